"""Prints the rooms of the project: files per folder, who imports whom, and the floors they stand
on.

    python tools/architecture.py [--ref COMMIT] [--arrows] [--package mdp.requests] [--check]

A room is what lies directly in a package: a sub-package, or a module of its own. An arrow is one
room that imports another, however often. Floors are counted from below: a room stands one floor
above the highest that it imports. Rooms that import each other form a circle. With --ref the files
are those of a commit, so that two commits can be compared.
"""

import argparse
import ast
import io
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("mdp", "devices", "partitioner", "benchmarks")

Sources = Mapping[str, str]
Arrows = Mapping[str, set[str]]


def sources(ref: str | None) -> dict[str, str]:
    """Every Python file of the packages and the tests by its path: of the checkout, or of a
    commit.
    """
    tops = (*PACKAGES, "tests")
    if ref is None:
        found = (file for top in tops for file in sorted((ROOT / top).rglob("*.py")))
        return {file.relative_to(ROOT).as_posix(): file.read_text() for file in found}
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", ref, *tops], check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = [member for member in tar if member.name.endswith(".py")]
        read = {member.name: tar.extractfile(member) for member in members}
        return {path: content.read().decode() for path, content in read.items() if content}


def module_of(path: str) -> str:
    """`mdp/client/sync.py` is `mdp.client.sync`, `mdp/client/__init__.py` is `mdp.client`."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, modules: set[str]) -> set[str]:
    """The modules of the project that a file imports, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names.update(full & modules or {node.module})
            if not full <= modules:
                names.add(node.module)
    return names & modules


def room_of(module: str, package: str) -> str | None:
    """The room of a module in `package`; None for a module elsewhere and for the package itself."""
    parts = module.split(".")
    depth = package.count(".") + 1
    return parts[depth] if ".".join(parts[:depth]) == package and len(parts) > depth else None


def arrows(files: Sources, package: str) -> dict[str, set[str]]:
    """Each room of a package, and the other rooms of it that it imports."""
    modules = {module_of(path) for path in files}
    found: dict[str, set[str]] = defaultdict(set)
    for path, source in files.items():
        room = room_of(module_of(path), package)
        if room is None:
            continue
        others = {room_of(module, package) for module in imports_of(source, modules)}
        found[room] |= {other for other in others if other not in (None, room)}
    return dict(found)


def reach(of: Arrows, room: str) -> set[str]:
    """Every room that can be reached along arrows."""
    seen: set[str] = set()
    ahead = [room]
    while ahead:
        new = of.get(ahead.pop(), set()) - seen
        seen |= new
        ahead += new
    return seen


def circles(of: Arrows) -> list[list[str]]:
    """Groups of rooms that import each other."""
    below = {room: reach(of, room) for room in of}
    groups = {
        tuple(sorted(other for other in of if other in below[room] and room in below[other]))
        for room in of
        if room in below[room]
    }
    return [list(group) for group in sorted(groups)]


def floors(of: Arrows) -> list[list[str]]:
    """Rooms by floor, the highest first; those of a circle share one."""
    below = {room: reach(of, room) for room in of}
    height: dict[str, int] = {}
    # A room that is reached from another, and not the other way about, reaches fewer.
    for room in sorted(of, key=lambda room: len(below[room] | {room})):
        under = [other for other in below[room] if room not in below[other]]
        height[room] = 1 + max((height[other] for other in under), default=0)
    top = max(height.values(), default=0)
    return [sorted(r for r in of if height[r] == floor) for floor in range(top, 0, -1)]


def folders(files: Sources) -> Counter[str]:
    """Count the modules of each folder; an empty `__init__.py` holds nothing and is not
    counted.
    """
    return Counter(
        str(PurePosixPath(path).parent)
        for path, source in files.items()
        if not path.endswith("__init__.py") or source.strip()
    )


def main() -> None:
    """Print the rooms; with --check, end with 1 where rooms import each other."""
    parser = argparse.ArgumentParser(description="Rooms, arrows between them, floors, files.")
    parser.add_argument("--ref", help="a commit instead of the checkout")
    parser.add_argument("--arrows", action="store_true", help="each room, and what it imports")
    parser.add_argument("--package", action="append", help=f"default: {', '.join(PACKAGES)}")
    parser.add_argument("--check", action="store_true", help="end with 1 at circles")
    options = parser.parse_args()
    files = sources(options.ref)
    drawn = {package: arrows(files, package) for package in options.package or PACKAGES}
    print(f"{'package':24} {'rooms':>6} {'arrows':>7} {'floors':>7}  circles")
    for package, of in drawn.items():
        told = "; ".join(" = ".join(group) for group in circles(of)) or "none"
        count = sum(map(len, of.values()))
        print(f"{package:24} {len(of):6} {count:7} {len(floors(of)):7}  {told}")
    for package, of in drawn.items():
        print(f"\n{package}, from the top floor down")
        for floor in floors(of):
            print("  " + " | ".join(floor))
            for room in floor if options.arrows else ():
                print(f"      {room} -> {', '.join(sorted(of[room])) or 'nothing'}")
    print("\nmodules per folder")
    for folder, count in sorted(folders(files).items(), key=lambda item: (-item[1], item[0])):
        print(f"  {count:3}  {folder}")
    wrong = faults(files)
    print("", *wrong, sep="\n")
    if options.check and wrong:
        sys.exit(1)


def faults(files: Sources) -> list[str]:
    """Circles of rooms that import each other, one line each."""
    return [
        f"{package}: {' and '.join(group)} import each other"
        for package in PACKAGES
        for group in circles(arrows(files, package))
    ]


if __name__ == "__main__":
    main()
