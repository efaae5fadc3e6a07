"""Containers without an engine: a Containerfile as it is written, and run as its user would be.

A process gets a root of its own that it cannot write, the user, environment and entry point of an
image, no privileges and a network of its own; /opt/mdp is this environment. Linux, as root.

The scripts of the environment name it, and it names the checkout: both are also where they are on
this machine, wherever that is. They are there entry by entry, as one may lie within another, and
/tmp is emptied before them.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTAINERFILE = ROOT / "deploy" / "Containerfile"
#: What a base image brings, from this machine.
_SYSTEM = ("bin", "sbin", "lib", "lib64", "usr", "etc", "proc", "dev")
#: What a virtual environment needs.
_ENVIRONMENT = ("bin", "lib", "lib64", "pyvenv.cfg")


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a Containerfile: its instructions, its base's first."""

    name: str
    instructions: tuple[tuple[str, str], ...]

    def last(self, instruction: str) -> str:
        """The argument of the last one of this name, or nothing."""
        found = [text for name, text in self.instructions if name == instruction]
        return found[-1] if found else ""

    def words(self, instruction: str) -> list[str]:
        """As `last`, of the form `["a", "b"]`, after options."""
        text = self.last(instruction)
        found: list[str] = json.loads(text[text.index("[") :]) if text else []
        return found

    @property
    def environment(self) -> dict[str, str]:
        """Variables that ENV sets."""
        texts = [text for name, text in self.instructions if name == "ENV"]
        return dict(word.split("=", 1) for text in texts for word in shlex.split(text))


def stages(path: Path = CONTAINERFILE) -> dict[str, Stage]:
    """The stages by name."""
    text = re.sub(r"\\\n\s*", "", re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.M))
    found: dict[str, Stage] = {}
    current = Stage("", ())
    for line in filter(None, text.splitlines()):
        instruction, _, argument = line.partition(" ")
        if instruction == "FROM":
            base, _, name = argument.partition(" AS ")
            inherited = found[base].instructions if base in found else ()
            current = Stage(name, inherited)
        one = (instruction, argument.strip())
        current = Stage(current.name, (*current.instructions, one))
        found[current.name] = current
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """A folder or file of this machine in a container."""

    place: str
    source: Path
    writable: bool = False


def command(
    stage: Stage,
    words: Sequence[str],
    mounts: Sequence[Mount],
    *,
    root: Path,
    entry: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
    network_of: int | None = None,
) -> list[str]:
    """The command that runs `words` in a container of `stage`.

    `root` is an empty folder; `entry` replaces the stage's entry point; `network_of` is the process
    whose network it shares.
    """
    user, group = stage.last("USER").split(":")
    system = [Mount(place=f"/{name}", source=Path("/", name)) for name in _SYSTEM]
    lines = ["set -eu", "umask 022", f"mount -t tmpfs -o mode=0755 tmpfs {_q(root)}"]
    lines.append(f"mkdir {_q(root / 'tmp')}")
    lines.append(f"mount -t tmpfs -o mode=1777 tmpfs {_q(root / 'tmp')}")
    for mount in (*system, *_environment_mounts(), *mounts):
        place = root / mount.place.lstrip("/")
        if mount.source.is_file():
            lines.append(
                f"test -e {_q(place)} || {{ mkdir -p {_q(place.parent)}; : > {_q(place)}; }}"
            )
        else:
            lines.append(f"mkdir -p {_q(place)}")
        lines.append(f"mount --rbind {_q(mount.source)} {_q(place)}")
        if not mount.writable and mount.place not in ("/proc", "/dev"):
            lines.append(f"mount -o remount,bind,ro {_q(place)}")
    lines.append(f"mount -o remount,ro {_q(root)}")
    if network_of is None:
        lines.append("ip link set lo up")
    variables = {**stage.environment, **(environment or {})}
    lines.append(
        shlex.join(
            [
                *("exec", "chroot", str(root), "setpriv", f"--reuid={user}", f"--regid={group}"),
                *("--clear-groups", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"),
                *("--", "env", "-i", f"--chdir={stage.last('WORKDIR')}"),
                *(f"{name}={value}" for name, value in variables.items()),
                *(stage.words("ENTRYPOINT") if entry is None else entry),
                *words,
            ]
        )
    )
    spaces = ["unshare", "--mount"] if network_of is not None else ["unshare", "--mount", "--net"]
    outer = [] if network_of is None else ["nsenter", f"--net=/proc/{network_of}/ns/net"]
    return [*outer, *spaces, "sh", "-c", "\n".join(lines)]


def _environment_mounts() -> list[Mount]:
    """This environment, at /opt/mdp and where it is, and what the wheel is built from."""
    prefix, base = Path(sys.prefix), Path(sys.base_prefix)
    found = [(Path("/opt/mdp") / name, prefix / name) for name in _ENVIRONMENT]
    found += [(place / name, prefix / name) for place in _names(prefix) for name in _ENVIRONMENT]
    copied = [text.split() for name, text in stages()["wheel"].instructions if name == "COPY"]
    sources = [name for *names, _ in copied for name in names]
    found += [(place / name, ROOT / name) for place in _names(ROOT) for name in sources]
    if not base.is_relative_to("/usr"):
        found += [(place, base) for place in _names(base)]
    return [Mount(place=str(place), source=path) for place, path in found if path.exists()]


def _names(path: Path) -> list[Path]:
    """A path, and that which links in it lead to."""
    return list(dict.fromkeys((path, path.resolve())))


def _q(path: Path) -> str:
    return shlex.quote(str(path))


@cache
def reason_against() -> str:
    """Reason why no container can be run here; empty if one can."""
    if os.geteuid() != 0:
        return "needs root, for a root and a network of its own"
    for program in ("unshare", "nsenter", "setpriv", "ip"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    tried = subprocess.run(
        ["unshare", "--mount", "--net", "sh", "-c", "ip link set lo up && setpriv --version"],
        capture_output=True,
        text=True,
    )
    return tried.stderr.strip() if tried.returncode else ""
