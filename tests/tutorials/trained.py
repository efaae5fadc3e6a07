"""Pages that train: the tutorial of a bundle, and the notebook, word for word (make tutorials)."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tests.support.pages import ROOT, cells, follow


def test_from_pictures_to_a_bundle(tmp_path: Path) -> None:
    page = ROOT / "docs/tutorials/from-pictures-to-a-bundle.md"
    pictures, built, served, switched_off = follow(page, tmp_path, timeout_s=900)
    assert "1,295" in pictures
    assert "259 test pictures of photos" in built
    assert "measured 93.4% on the test split" in built
    assert "bundle: 3 sub-models" in built
    devices = {"laptop-cpu", "n100", "raspberry-pi-5"}
    for printed, expected in ((served, devices), (switched_off, devices - {"laptop-cpu"})):
        first = next(line for line in printed.splitlines() if line.startswith("photos/7/"))
        found = re.search(r"stacked from ([^,]+), \d+\.\d% accurate on 259 test pictures", first)
        assert found is not None, first
        assert set(found[1].split(" + ")) == expected
    assert "without laptop-cpu: unreachable" in switched_off


def test_four_cameras(tmp_path: Path) -> None:
    page = ROOT / "docs/tutorials/four-cameras.md"
    *_, fleet, recorded, built, looked, unplugged, _ = follow(page, tmp_path, timeout_s=1700)
    assert "PROBLEM" not in fleet
    assert recorded.count("raspberry-pi-5-1, raspberry-pi-5-2, raspberry-pi-5-3") > 100
    assert "bundle: 4 sub-models" in built
    everyone = [f"raspberry-pi-5-{number}" for number in range(1, 5)]
    assert f"from {' + '.join(everyone)}, " in looked
    # Not which: the bundle is wrong on some cards, as its report says.
    assert re.search(r"^look: (unknown, nearest )?(three|seven|eight) \(\d+%\)", looked, re.M)
    assert f"from {' + '.join(everyone[:3])}, " in unplugged
    assert "  without raspberry-pi-5-4: unreachable" in unplugged


def test_the_decomposition_end_to_end(tmp_path: Path) -> None:
    words = ("-m", "tools.demo_build", "--rehearsal", "--work", str(tmp_path / "work"))
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads((tmp_path / "work/seen.json").read_text())
    assert seen["ok"] is True
    assert seen["killed"]["answers"] == 20
    *_, served, everything = done.stdout.splitlines()
    assert served.startswith("serve by three agents, kill one ")
    assert everything.startswith("all ")


def test_the_notebook() -> None:
    program = "\n".join(cells(ROOT / "examples/three_devices.ipynb"))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *_, everyone, without, expected = done.stdout.splitlines()
    assert everyone.startswith("3, a 3: stacked from ")
    assert "'n100': " in without
    assert expected.startswith("expected of these: 9")
