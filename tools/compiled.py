"""Compiles the simulator's loop, and what of `mdp` it is made of, with mypyc: the same sources.

    python tools/compiled.py [--into FOLDER]

Without --into the extension modules come to lie beside their sources, where Python prefers them.
It takes mypy, setuptools, a C compiler and Python's headers.
"""

import argparse
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: No module whose structs are decoded from bytes is here: mypyc makes `type` of their annotations.
MODULES = (
    "mdp/requests/choice.py",
    "mdp/requests/exclusion.py",
    "mdp/requests/health.py",
    "mdp/requests/hedging.py",
    "mdp/requests/ranked.py",
    "mdp/requests/replica_stats.py",
    "mdp/requests/replicas.py",
    "mdp/requests/session.py",
    "partitioner/simulation/agent.py",
    "partitioner/simulation/device.py",
    "partitioner/simulation/engine.py",
    "partitioner/simulation/trace.py",
)
#: `make check` is where types are checked; here they are only read.
MYPY = (
    "--config-file=",
    "--ignore-missing-imports",
    "--follow-imports=silent",
    "--no-warn-unused-ignores",
)


def missing() -> str:
    """What is not here and has to be, in one line; empty where all is."""
    compiler = os.environ.get("CC", sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"no C compiler: {compiler!r} is not on the PATH (Debian: gcc)"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        return f"no {header}: expected this Python's headers (Debian: python3-dev)"
    return ""


def compile_modules(into: Path) -> None:
    """Put the extension modules into `into`, in their packages' folders."""
    # Before mypyc, which takes distutils otherwise.
    from setuptools import Distribution
    from mypyc.build import mypycify  # isort: skip

    with tempfile.TemporaryDirectory() as work:
        extensions = mypycify(
            [*MYPY, f"--cache-dir={work}/mypy", *MODULES],
            opt_level="2",
            debug_level="0",
            target_dir=work,
            group_name="mdp_simulator",
        )
        # Not setup(), which would read pyproject.toml and not know what to make of it.
        build = Distribution({"name": "mdp-edge", "ext_modules": extensions}).get_command_obj(
            "build_ext"
        )
        built = Path(work) / "built"
        build.build_lib, build.build_temp = str(built), work
        build.ensure_finalized()
        build.run()
        # All of them or none: one without the others cannot be imported.
        shutil.copytree(built, into, dirs_exist_ok=True)


def main() -> None:
    """Compile, or say in one line what is missing."""
    parser = argparse.ArgumentParser(description="Compile the simulator's loop.")
    parser.add_argument("--into", type=Path, default=ROOT, help="default: beside the sources")
    into = parser.parse_args().into.resolve()
    if without := missing():
        sys.exit(f"tools/compiled.py: {without}")
    os.chdir(ROOT)
    compile_modules(into)


if __name__ == "__main__":
    main()
