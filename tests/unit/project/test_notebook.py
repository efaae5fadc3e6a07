"""The notebook as it is kept."""

import json
from pathlib import Path

NOTEBOOK = Path(__file__).parents[3] / "examples/three_devices.ipynb"


def test_the_notebook_is_kept_without_outputs() -> None:
    found = json.loads(NOTEBOOK.read_text())["cells"]
    kept = [cell for cell in found if cell.get("outputs") or cell.get("execution_count")]
    assert kept == []
