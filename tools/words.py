"""Count words that make code a dialect: docstrings, names of functions and classes, lines.

python tools/words.py [FOLDER ...]     (mdp, devices and partitioner without any)
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PRODUCT = ("mdp", "devices", "partitioner")
#: First words of a docstring that name no subject.
QUESTIONS = frozenset(("what", "who", "how", "which", "whether", "where", "when", "why"))
#: Participles that do not end in -ed.
PARTICIPLES = frozenset(
    ("told", "said", "shown", "begun", "given", "made", "known", "kept", "left", "sent", "found",
     "held", "met", "gone", "done", "seen", "taken", "written", "drawn", "chosen", "lost", "bound",
     "built", "grown", "hidden")
)  # fmt: skip
#: Words that end in -ed and are none.
NO_PARTICIPLES = frozenset(
    ["speed", "need", "seed", "feed", "embed", "proceed", "exceed", "bed", "red"]
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Count:
    """Figures of a tree of Python files; findings are `FILE:LINE name`."""

    lines: int = 0
    docstrings: int = 0
    functions: int = 0
    questions: list[str] = field(default_factory=list)
    participles: list[str] = field(default_factory=list)
    #: Class name -> where it is defined.
    classes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def twice(self) -> dict[str, list[str]]:
        """Class names that are defined more than once."""
        return {name: places for name, places in self.classes.items() if len(places) > 1}

    def add(self, name: str, source: str) -> None:
        """Count one file."""
        self.lines += source.count("\n")
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Module | ast.ClassDef | Function):
                continue
            place = f"{name}:{getattr(node, 'lineno', 1)}"
            if text := ast.get_docstring(node):
                self.docstrings += 1
                if re.split(r"\W", text, maxsplit=1)[0].lower() in QUESTIONS:
                    self.questions.append(f"{place} {text.splitlines()[0]}")
            if isinstance(node, ast.ClassDef):
                self.classes[node.name].append(place)
            elif isinstance(node, Function):
                self.functions += 1
                if is_participle(node.name):
                    self.participles.append(f"{place} {node.name}")


def is_participle(name: str) -> bool:
    """Tell whether a function is named by a participle alone, as `told` or `_served`.

    Words that are their own infinitive, as `read` and `cut`, are verbs.
    """
    word = name.strip("_")
    if word in PARTICIPLES:
        return True
    return "_" not in word and word.endswith("ed") and word not in NO_PARTICIPLES


def sources(folders: Sequence[str]) -> Iterator[Path]:
    """Every Python file, sorted."""
    for folder in folders:
        yield from sorted(Path(folder).rglob("*.py"))


def main(words: list[str]) -> int:
    """Print the figures, and after each what it consists of."""
    count = Count()
    for path in sources(words or PRODUCT):
        count.add(str(path), path.read_text())
    asked, named, twice = len(count.questions), len(count.participles), count.twice
    print(f"lines: {count.lines:,}")
    print(f"docstrings that begin with a question: {asked} of {count.docstrings:,}")
    print("".join(f"  {one}\n" for one in count.questions), end="")
    print(f"functions named by a participle: {named} of {count.functions:,}")
    print("".join(f"  {one}\n" for one in count.participles), end="")
    print(f"class names defined twice: {len(twice)} of {len(count.classes):,}")
    print("".join(f"  {name}: {', '.join(where)}\n" for name, where in twice.items()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
