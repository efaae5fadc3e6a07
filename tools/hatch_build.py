"""A wheel with the simulator's loop compiled: HATCH_BUILD_HOOKS_ENABLE=1 pip install .

Without that variable nothing here is run, and the wheel is of Python alone.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompiledBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds what tools/compiled.py makes."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile into a folder of its own; an editable install has `make compiled`."""
        if version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory()
        into = Path(self._folder.name).resolve()
        script = Path(self.root) / "tools" / "compiled.py"
        subprocess.run([sys.executable, script, "--into", into], check=True)
        build_data |= {"pure_python": False, "infer_tag": True}
        for module in into.rglob("*.so"):
            build_data["force_include"][str(module)] = str(module.relative_to(into))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """The wheel has its copies."""
        if version != "editable":
            self._folder.cleanup()
