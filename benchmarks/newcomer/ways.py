"""First minutes of a newcomer: commands as the pages have them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
#: A line that scripts print once all is installed, and what `mdp demo` prints then.
INSTALLED, STARTING = "everything is installed", "starting 4 agents"
#: What `mdp demo` prints after the address of its page.
SHOWN = "Ctrl-C ends everything"
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Three agents of a bundle that is found by its name, and one picture: docs/how-to/ask.md.
_PICTURE = f"""
python3 -m venv env
. env/bin/activate
pip install "$WHEEL[agent]"
echo {INSTALLED}
for one in laptop-cpu:7501 n100:7502 raspberry-pi-5:7503; do
  mdp-agent run --bundle digits --device ${{one%:*}} --bind tcp://127.0.0.1:${{one#*:}} &
done
mdp fleet new --bundle digits --device laptop-cpu=tcp://127.0.0.1:7501 \\
  --device n100=tcp://127.0.0.1:7502 --device raspberry-pi-5=tcp://127.0.0.1:7503
mdp status --fleet fleet.toml --wait 60s
mdp classify --fleet fleet.toml "$PICTURE" --deadline-ms 5000
"""


@dataclass(frozen=True, slots=True)
class Way:
    """Commands from nothing to something that is seen."""

    what: str
    #: In bash; $WHEEL and $PICTURE are files.
    script: str
    #: A part of the line that says that all is installed.
    installed: str = INSTALLED
    #: It runs in a fresh clone, else in an empty folder.
    clone: bool = False
    #: It ends once a page answers whose address it prints, else by itself.
    page: bool = False
    #: A package with the program that a newcomer has already; it is in $TOOLS.
    tool: str = ""
    #: Of the page that is followed to its end; 0 where the commands are all there is to read.
    words: int = 0

    @property
    def commands(self) -> int:
        """Number of commands to type; one over several lines counts once.

        `make` installs an environment by itself; here that is asked for apart, to be timed.
        """
        lines = self.script.replace("\\\n", " ").splitlines()
        apart = ("make .venv", f"echo {INSTALLED}")
        return sum(bool(line.strip()) and not line.startswith(apart) for line in lines)


def ways() -> dict[str, Way]:
    """All of them by name, in the order in which they are measured."""
    demo = "mdp demo --no-browser"
    make = "make .venv-demo/.installed\necho " + INSTALLED + "\n"
    return {
        "uvx": Way(
            "`uvx --from WHEEL mdp demo`, to the page",
            f'"$TOOLS/uvx" --from "$WHEEL[demo]" {demo}', STARTING, page=True, tool="uv",
        ),
        "pipx": Way(
            "`pipx run --spec WHEEL mdp demo`, to the page",
            f'"$TOOLS/pipx" run --spec "$WHEEL[demo]" {demo}', STARTING, page=True, tool="pipx",
        ),
        "demo-page": Way(
            "`make demo PAGE=1`, to the page", f"{make}make demo PAGE=1", clone=True, page=True
        ),
        "demo": Way("`make demo`, all of its text", f"{make}make demo", clone=True),
        "picture": Way("a picture of one's own, answered by three agents", _PICTURE),
        "pictures": tutorial("classes of one's own", "from-pictures-to-a-bundle"),
        "cameras": tutorial("four cameras of one's own", "four-cameras"),
        "demo-build": Way(
            "`make demo-build`",
            f"make .venv/.installed\necho {INSTALLED}\nmake demo-build",
            clone=True,
        ),
    }  # fmt: skip


def tutorial(what: str, name: str) -> Way:
    """A tutorial that installs in its first block, followed word for word: all blocks of `sh`."""
    page = (TUTORIALS / f"{name}.md").read_text()
    blocks = _BLOCK.findall(page)
    steps = [text for language, text in blocks if language == "sh"]
    return Way(
        f"{what}, the whole [tutorial](../tutorials/{name}.md)",
        "\n".join([blocks[0][1], f"echo {INSTALLED}", *steps]),
        clone=True,
        words=len(_BLOCK.sub("", page).split()),
    )
