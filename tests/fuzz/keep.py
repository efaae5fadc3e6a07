"""Choose from what a run has made the few inputs that are kept in the repository.

python -m tests.fuzz.keep [TARGET...] goes through the kept and the new inputs, the shortest first,
and keeps one if it takes a step between two lines of the watched modules that none before it took.
"""

import argparse
import hashlib
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.target import CORPUS, Target
from tests.fuzz.targets import TARGETS

_WATCHED = ("/mdp/", "/devices/", "/tomllib/", "/PIL/")
Step = tuple[str, int, int]


def steps_of(target: Target, data: bytes) -> set[Step]:
    """The steps from line to line that reading `data` takes in the watched modules."""
    steps: set[Step] = set()

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not any(part in name for part in _WATCHED):
            return None
        before = frame.f_code.co_firstlineno

        def line(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal before
            steps.add((name, before, frame.f_lineno))
            before = frame.f_lineno
            return line

        return line

    sys.settrace(enter)
    try:
        accepted = target.read(data)
    finally:
        sys.settrace(None)
    return steps | {("accepted", int(accepted), 0)}


def choose(target: Target, inputs: Iterable[bytes], seen: set[Step]) -> list[bytes]:
    """Those of `inputs` that take a step which is not in `seen`, to which theirs are added."""
    kept = []
    for data in sorted(set(inputs), key=lambda data: (len(data), data)):
        steps = steps_of(target, data)
        if steps - seen:
            seen |= steps
            kept.append(data)
    return kept


def main() -> None:
    """Replace what was kept without a name of its own; named files are regressions, and stay."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--work", type=Path, default=Path("runs/fuzz"))
    options = parser.parse_args()
    # Pillow warns of what is odd in a file, and reads it nevertheless.
    warnings.simplefilter("ignore")
    for name in options.targets:
        target, folder = TARGETS[name], CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        files = list(folder.iterdir())
        unnamed = [file for file in files if "-" not in file.name]
        seen: set[Step] = set()
        for data in [
            *target.seeds().values(),
            *(f.read_bytes() for f in set(files) - set(unnamed)),
        ]:
            seen |= steps_of(target, data)
        new = options.work / name / "new"
        made = list(new.iterdir()) if new.is_dir() else []
        inputs = {file.read_bytes() for file in [*unnamed, *made]}
        kept = choose(target, inputs, seen)
        for file in unnamed:
            file.unlink()
        for data in kept:
            (folder / hashlib.sha1(data).hexdigest()[:16]).write_bytes(data)
        print(f"{name}: kept {len(kept)} of {len(inputs)}, {sum(map(len, kept)):,} bytes")


if __name__ == "__main__":
    main()
