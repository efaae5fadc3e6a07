"""Prints the parts of the project: files per folder, who imports whom, and in which layers.

    python tools/architecture.py [--ref COMMIT] [--arrows] [--package mdp.requests] [--check]

A part is what lies directly in a package: a sub-package, or a module of its own. An arrow is one
part that imports another, however often. Layers are counted from below: a part is one layer
above the highest that it imports. Parts that import each other form a circle. With --ref the files
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


def part_of(module: str, package: str) -> str | None:
    """The part of a module in `package`; None for a module elsewhere and for the package itself."""
    parts = module.split(".")
    depth = package.count(".") + 1
    return parts[depth] if ".".join(parts[:depth]) == package and len(parts) > depth else None


def arrows(files: Sources, package: str) -> dict[str, set[str]]:
    """Each part of a package, and the other parts of it that it imports."""
    modules = {module_of(path) for path in files}
    found: dict[str, set[str]] = defaultdict(set)
    for path, source in files.items():
        part = part_of(module_of(path), package)
        if part is None:
            continue
        others = {part_of(module, package) for module in imports_of(source, modules)}
        found[part] |= {other for other in others if other not in (None, part)}
    return dict(found)


def reach(of: Arrows, part: str) -> set[str]:
    """Every part that can be reached along arrows."""
    seen: set[str] = set()
    ahead = [part]
    while ahead:
        new = of.get(ahead.pop(), set()) - seen
        seen |= new
        ahead += new
    return seen


def circles(of: Arrows) -> list[list[str]]:
    """Groups of parts that import each other."""
    below = {part: reach(of, part) for part in of}
    groups = {
        tuple(sorted(other for other in of if other in below[part] and part in below[other]))
        for part in of
        if part in below[part]
    }
    return [list(group) for group in sorted(groups)]


def layers(of: Arrows) -> list[list[str]]:
    """Parts by layer, the highest first; those of a circle share one."""
    below = {part: reach(of, part) for part in of}
    height: dict[str, int] = {}
    # A part that is reached from another, and not the other way about, reaches fewer.
    for part in sorted(of, key=lambda part: len(below[part] | {part})):
        under = [other for other in below[part] if part not in below[other]]
        height[part] = 1 + max((height[other] for other in under), default=0)
    top = max(height.values(), default=0)
    return [sorted(r for r in of if height[r] == layer) for layer in range(top, 0, -1)]


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
    """Print the parts; with --check, end with 1 where parts import each other."""
    parser = argparse.ArgumentParser(description="Parts, arrows between them, layers, files.")
    parser.add_argument("--ref", help="a commit instead of the checkout")
    parser.add_argument("--arrows", action="store_true", help="each part, and what it imports")
    parser.add_argument("--package", action="append", help=f"default: {', '.join(PACKAGES)}")
    parser.add_argument("--check", action="store_true", help="end with 1 at circles")
    options = parser.parse_args()
    files = sources(options.ref)
    drawn = {package: arrows(files, package) for package in options.package or PACKAGES}
    print(f"{'package':24} {'parts':>6} {'arrows':>7} {'layers':>7}  circles")
    for package, of in drawn.items():
        told = "; ".join(" = ".join(group) for group in circles(of)) or "none"
        count = sum(map(len, of.values()))
        print(f"{package:24} {len(of):6} {count:7} {len(layers(of)):7}  {told}")
    for package, of in drawn.items():
        print(f"\n{package}, from the top layer down")
        for layer in layers(of):
            print("  " + " | ".join(layer))
            for part in layer if options.arrows else ():
                print(f"      {part} -> {', '.join(sorted(of[part])) or 'nothing'}")
    print("\nmodules per folder")
    for folder, count in sorted(folders(files).items(), key=lambda item: (-item[1], item[0])):
        print(f"  {count:3}  {folder}")
    wrong = faults(files)
    print("", *wrong, sep="\n")
    if options.check and wrong:
        sys.exit(1)


def faults(files: Sources) -> list[str]:
    """Circles of parts that import each other, one line each."""
    return [
        f"{package}: {' and '.join(group)} import each other"
        for package in PACKAGES
        for group in circles(arrows(files, package))
    ]


if __name__ == "__main__":
    main()
