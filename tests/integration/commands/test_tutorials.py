"""The tutorial of a fleet, followed word for word with real agents and a real gateway."""

import json
import shutil
from pathlib import Path

import pytest

from tests.support.pages import ROOT, follow


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_from_boards_to_a_fleet(tmp_path: Path) -> None:
    page = ROOT / "docs/tutorials/from-boards-to-a-fleet.md"
    *_, fleet, first, web, unplugged, back, _ = follow(page, tmp_path, timeout_s=200)
    everyone = "laptop-cpu + n100 + raspberry-pi-5"
    assert "PROBLEM" not in fleet
    assert first.startswith("temple.jpg: church (")
    assert f"stacked from {everyone}, 97.4% accurate on 3925 test pictures" in first
    answer = json.loads(web[web.index("{") :])
    assert (answer["label"], answer["degraded"]) == ("church", False)
    assert "stacked from laptop-cpu + n100, 97.4% accurate" in unplugged
    assert "  without raspberry-pi-5: " in unplugged
    assert "raspberry-pi-5" in back
