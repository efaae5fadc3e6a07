"""Read inputs of one target again: python -m tests.fuzz.replay TARGET FILE..."""

import sys
from pathlib import Path

from tests.fuzz.targets import TARGETS


def main() -> None:
    """Say of each file whether it is accepted; what breaks a promise is raised."""
    name, *files = sys.argv[1:]
    for file in files:
        accepted = TARGETS[name].read(Path(file).read_bytes())
        print(f"{file}: {'accepted' if accepted else 'refused'}")


if __name__ == "__main__":
    main()
