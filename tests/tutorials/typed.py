"""The Python of README.md, docs/ and the notebook is what a strict type checker accepts.

Part of `make check`, after mypy has read the code that the examples import.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pages import ROOT, cells

NOTEBOOK = ROOT / "examples/three_devices.ipynb"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# Without the cache of an earlier run, and beside other work, mypy takes minutes; it always ends.
@pytest.mark.timeout(0)
def test_mypy_strict_accepts_the_examples(tmp_path: Path) -> None:
    files = []
    for page in PAGES:
        for number, block in enumerate(BLOCK.findall(page.read_text())):
            name = re.sub(r"\W", "_", str(page.relative_to(ROOT).with_suffix("")))
            files.append(tmp_path / f"{name}_{number}.py")
            files[-1].write_text(block)
    assert len(files) >= 4
    files.append(tmp_path / "notebook.py")
    files[-1].write_text("\n".join(cells(NOTEBOOK)))
    # The project's own settings are strict, and its cache knows what the examples import.
    command = [sys.executable, "-m", "mypy"]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
