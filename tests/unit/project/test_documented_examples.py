"""The Python blocks of README.md and docs/ are what a strict type checker accepts."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_mypy_strict_accepts_the_examples(tmp_path: Path) -> None:
    files = []
    for page in PAGES:
        for number, block in enumerate(BLOCK.findall(page.read_text())):
            name = re.sub(r"\W", "_", str(page.relative_to(ROOT).with_suffix("")))
            files.append(tmp_path / f"{name}_{number}.py")
            files[-1].write_text(block)
    assert len(files) >= 4
    # The project's own settings are strict, and its cache knows what the examples import.
    command = [sys.executable, "-m", "mypy"]
    done = subprocess.run(
        [*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
