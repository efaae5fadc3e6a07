"""Check that links between pages, and mentions of pages, lead to files and headings that exist.

python -m tools.links

Links are the relative ones of every Markdown file in git; anchors are those that GitHub gives to
headings. Mentions are paths of pages and pictures that begin with docs/, in any text file.
"""

import re
import sys
from collections import Counter
from pathlib import Path

from tools.large_files import list_tracked

ROOT = Path(__file__).resolve().parent.parent
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
MENTION = re.compile(r"(?<![\w./-])docs/[\w./-]+\.(?:md|svg)\b")
TEXT = {".md", ".py", ".toml", ".yml", ".yaml", ""}


def anchors(page: str) -> set[str]:
    """Lower case letters, digits, `-` and `_`, spaces turned into `-`; repeated ones counted."""
    found: set[str] = set()
    seen: Counter[str] = Counter()
    for heading in HEADING.findall(re.sub(r"^ *```.*?^ *```", "", page, flags=re.DOTALL | re.M)):
        anchor = re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", heading).lower())
        anchor = anchor.replace(" ", "-")
        found.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return found


def dead_links(page: Path) -> list[str]:
    """Relative links of `page` to no file, or to no heading of one."""
    dead = []
    for target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        if not found.exists():
            dead.append(f"{target}: expected a file")
        elif anchor and anchor not in anchors(found.read_text(encoding="utf-8")):
            dead.append(f"{target}: expected a heading of this name")
    return dead


def dead_mentions(root: Path, text: str) -> list[str]:
    """Pages that `text` names by their path from `root` and that are not there."""
    named = sorted(set(MENTION.findall(text)))
    return [f"{name}: expected a file" for name in named if not (root / name).exists()]


def main(root: Path = ROOT) -> int:
    """0 if none is dead."""
    dead = []
    for name in list_tracked():
        path = root / name
        if path.suffix not in TEXT or not path.is_file():
            continue
        if path.suffix == ".md":
            dead += [f"{name}: link to {link}" for link in dead_links(path)]
        text = path.read_text(encoding="utf-8", errors="ignore")
        dead += [f"{name}: mention of {page}" for page in dead_mentions(root, text)]
    print("\n".join(dead), end="\n" if dead else "")
    return 1 if dead else 0


if __name__ == "__main__":
    sys.exit(main())
