"""Check that the documentation has at most 35,000 words.

python -m tools.words

A word is text between white space with a letter or a digit in it, in tables and code as well;
`wc -w` also counts the bars of tables. The lab log and the change log are not counted.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST = 35_000
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/METHODOLOGY.md", "docs/**/*.md")
LEFT_OUT = "lab-log.md"


def words(root: Path) -> dict[str, int]:
    """Words of each page, the longest first."""
    pages = [page for pattern in PAGES for page in root.glob(pattern) if page.name != LEFT_OUT]
    found = {
        page.relative_to(root).as_posix(): len(
            [word for word in page.read_text(encoding="utf-8").split() if re.search(r"\w", word)]
        )
        for page in pages
    }
    return dict(sorted(found.items(), key=lambda page: -page[1]))


def main(root: Path = ROOT) -> int:
    """0 if there are no more."""
    found = words(root)
    if (total := sum(found.values())) <= MOST:
        return 0
    longest = ", ".join(f"{name} {count:,}" for name, count in list(found.items())[:5])
    print(f"documentation: expected at most {MOST:,} words, got {total:,}; longest: {longest}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
