"""Count the faults that tests find: python tools/mutants.py [ROOM ...] [--sample 60] [--seed 1]

A mutant is one module with one comparison, operator, condition or constant changed; it is killed
where one of its part's tests fails or computes for minutes. Source files stay as they are: a forked
child imports the changed module in place of the file's. Same sources and seed, same mutants, in the
same order: a part whose `--minutes` are over stops early, and says how many it has tried.
"""

import argparse
import ast
import importlib.machinery
import importlib.util
import os
import random
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import NamedTuple

import hypothesis
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Imported here, since every child would do it again.
LOADED_ONCE = (hypothesis, np)
#: Of processor time; what waits for ever is ended by pytest's own timeout.
LIMIT_S = 240
CHANGED_INPUTS = "tests/fuzz/test_corpus.py"
PLANS = "tests/unit/partitioner/cli/test_plan_command.py"
PARTS = {
    "mdp/requests": ("tests/unit/mdp/client", "tests/unit/mdp/requests"),
    "mdp/fusion": ("tests/unit/mdp/fusion",),
    "mdp/queueing": ("tests/unit/mdp/queueing",),
    "mdp/formats": ("tests/unit/mdp/formats",),
    "mdp/pictures": ("tests/unit/mdp/pictures", CHANGED_INPUTS),
    "mdp/protocol": ("tests/unit/mdp/protocol", CHANGED_INPUTS),
    "mdp/discovery": ("tests/unit/mdp/discovery", CHANGED_INPUTS),
    "devices/camera": ("tests/unit/devices/camera",),
    # What needs torch is about teachers, and takes longer than all else.
    "partitioner/planner": ("tests/unit/partitioner/planner", PLANS, "-m", "not torch"),
    "partitioner/estimates": ("tests/unit/partitioner/estimates",),
    "partitioner/fusion": ("tests/unit/partitioner/fusion",),
    "partitioner/simulation": ("tests/unit/partitioner/simulation",),
    "partitioner/config.py": ("tests/unit/partitioner/cli/test_options.py",),
    "partitioner/export/try_precision.py": ("tests/unit/partitioner/export",),
}
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}  # fmt: skip


class Mutant(NamedTuple):
    """One module in which `field` of `node` becomes `value`."""

    file: Path
    tree: ast.Module
    node: ast.AST
    field: str
    value: object

    def code(self) -> CodeType:
        """The changed module. It changes the tree: for a child that ends."""
        setattr(self.node, self.field, self.value)
        return compile(ast.fix_missing_locations(self.tree), str(self.file), "exec")

    def __str__(self) -> str:
        before = ast.unparse(self.node).splitlines()[0]
        kept, line = getattr(self.node, self.field), getattr(self.node, "lineno", 0)
        setattr(self.node, self.field, self.value)
        after = ast.unparse(self.node).splitlines()[0]
        setattr(self.node, self.field, kept)
        return f"{self.file.relative_to(ROOT)}:{line}: {before} -> {after}"


def mutants(file: Path) -> list[Mutant]:
    """Every mutant of a module."""
    tree = ast.parse(file.read_text())
    found: list[tuple[ast.AST, str, object]] = []
    decorators = {n for d in ast.walk(tree) for n in getattr(d, "decorator_list", ())}
    options = {inner for decorator in decorators for inner in ast.walk(decorator)}
    for node in ast.walk(tree):
        match node:
            case _ if node in options:
                continue
            case ast.Compare(ops=[op, *others]) if type(op) in SWAPS:
                found.append((node, "ops", [SWAPS[type(op)](), *others]))
            case ast.BoolOp(op=op) | ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPS:
                found.append((node, "op", SWAPS[type(op)]()))
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if not isinstance(
                test, ast.Compare
            ):
                found.append((node, "test", ast.UnaryOp(ast.Not(), test)))
            case ast.Constant(value=bool(value)):
                found.append((node, "value", not value))
            case ast.Constant(value=int() | float() as number):
                found.append((node, "value", number + 1))
    return [Mutant(file, tree, *change) for change in found]


class InPlace(importlib.machinery.SourceFileLoader):
    """Finds and loads one module: the mutant."""

    def __init__(self, mutant: Mutant) -> None:
        name = ".".join(mutant.file.relative_to(ROOT).with_suffix("").parts)
        super().__init__(name, str(mutant.file))
        self.changed = mutant.code()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def get_code(self, fullname: str) -> CodeType:
        return self.changed


def passes(tests: Sequence[str], mutant: Mutant | None) -> bool:
    """Tell whether all tests pass, with the mutant in place of its module."""
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        if mutant is not None:
            sys.meta_path.insert(0, InPlace(mutant))
        # That what was imported above has been is no error here.
        quiet = ["-q", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        os._exit(pytest.main(["-x", *quiet, *tests]) != 0)
    status = os.waitpid(child, 0)[1]
    return status == 0


def main() -> int:
    """Prints a line for each mutant that no test finds and a share for each part."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("parts", nargs="*", default=list(PARTS), metavar="PART", help=str([*PARTS]))
    words.add_argument("--sample", type=int, default=60, help="mutants of a part")
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--minutes", type=float, default=60.0, help="at most for a part")
    asked = words.parse_args()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for part in asked.parts:
        if not passes(PARTS[part], None):
            print(f"{part}: its tests fail without a mutant: run pytest {' '.join(PARTS[part])}")
            return 1
        place = ROOT / part
        files = [place] if place.is_file() else sorted(place.glob("*.py"))
        every = [mutant for file in files for mutant in mutants(file)]
        drawn = random.Random(asked.seed).sample(every, min(asked.sample, len(every)))
        killed = tried = 0
        until_s = time.monotonic() + 60 * asked.minutes
        for mutant in drawn:
            if time.monotonic() > until_s:
                break
            tried += 1
            if passes(PARTS[part], mutant):
                print(f"survived {mutant}", flush=True)
            else:
                killed += 1
        print(f"{part}: {killed} of {tried} killed, of {len(every)} possible", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
