"""Check that no file in git is large, or becomes so: every clone keeps it for good.

python tools/large_files.py [FILE ...]      (all files that git knows, without any named)
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 350_000
#: Trained bundles of 5 to 12 MB, which `make demo` serves, and the README's loop.
ALLOWED = ("examples/bundles/", "docs/pictures/demo.webp")


def list_tracked() -> list[str]:
    """Every file that git knows; none where there is no git."""
    try:
        words = ["git", "ls-files", "-z"]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return []
    return [name for name in done.stdout.split("\0") if name]


def too_large(root: Path, names: list[str]) -> list[str]:
    """Those with more bytes than a file may have, and with how many."""
    files = [name for name in names if not name.startswith(ALLOWED) and (root / name).is_file()]
    sizes = {name: (root / name).stat().st_size for name in files}
    return [f"{size} bytes: {name}" for name, size in sizes.items() if size > MOST_BYTES]


def main(words: list[str]) -> int:
    """0 if none is too large."""
    found = too_large(ROOT, words or list_tracked())
    for line in found:
        print(f"file in git: expected at most {MOST_BYTES} bytes, got {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
