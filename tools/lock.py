"""Write constraints.lock: the hashes of every file of every version in constraints.txt.

    python tools/lock.py        (make lock)

Hashes are those that the package index of this machine publishes, asked by uv, which knows all
files of a version, for every system and every Python; pip only sees those for its own machine.
Where pip is set up for another index than the usual one, say so to uv with UV_DEFAULT_INDEX.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PINS, LOCK = ROOT / "constraints.txt", ROOT / "constraints.lock"
#: Builds of torch differ by machine (processor only, CUDA, a vendor's own) and come from different
#: indexes under one version number. torchvision has to be of the same build.
WITHOUT_HASHES = ("torch", "torchvision")
#: Not of the gate: what `make fuzz` adds, and what `make lock` itself needs.
NOT_INSTALLED = ("atheris", "uv")
HEADER = f"""\
# Written by tools/lock.py (make lock) from constraints.txt: what the gate installs, nothing else.
# WITHOUT HASHES: {", ".join(WITHOUT_HASHES)}. Their builds for the processor alone, for CUDA and
# for a vendor's boards have one version number and different files, partly on indexes of their own,
# so no list of hashes holds on every machine. They are installed at their versions in
# constraints.txt, and CUDA's libraries, where a build of torch requires them, at those it names.
--only-binary :all:
"""


def pins() -> dict[str, str]:
    """Name -> version of every line in constraints.txt."""
    found = {}
    for line in PINS.read_text().splitlines():
        name, separator, version = line.partition("==")
        if not separator or not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line):
            sys.exit(f"{PINS}: expected NAME==VERSION, got {line!r}")
        found[name] = version
    return found


def main() -> None:
    """Ask for the hashes of all that the gate installs."""
    asked = {n: v for n, v in pins().items() if n not in (*WITHOUT_HASHES, *NOT_INSTALLED)}
    options = ["--no-deps", "--universal", "--generate-hashes", "--no-header", "--no-annotate"]
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", *options]
    done = subprocess.run(
        [*command, "--python-version", "3.11", "-"],
        input="".join(f"{name}=={version}\n" for name, version in asked.items()),
        stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{LOCK} is as before: uv could not find out all hashes")
    LOCK.write_text(HEADER + done.stdout)
    print(f"{LOCK}: {len(asked)} packages, {done.stdout.count('--hash=')} hashes")


if __name__ == "__main__":
    main()
