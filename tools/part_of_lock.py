"""Print the lines of constraints.lock for some packages: a smaller environment, by the same hashes.

python tools/part_of_lock.py numpy pillow > some.lock
"""

import re
import sys
from pathlib import Path

LOCK = Path(__file__).resolve().parent.parent / "constraints.lock"


def part_of(lock: str, names: list[str]) -> str:
    """The requirements of `names` with their hashes; raises ValueError for one that is lacking."""
    found = {
        re.split("==", block, maxsplit=1)[0]: block
        for block in re.findall(r"^[A-Za-z0-9._-]+==(?:.*\\\n)*.*\n", lock, re.MULTILINE)
    }
    if lacking := sorted(set(names) - found.keys()):
        raise ValueError(f"{LOCK.name}: expected a line of {lacking[0]}, found none")
    return "--only-binary :all:\n" + "".join(found[name] for name in names)


if __name__ == "__main__":
    try:
        print(part_of(LOCK.read_text(), sys.argv[1:]), end="")
    except ValueError as error:
        sys.exit(str(error))
