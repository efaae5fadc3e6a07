"""examples/demo.py on a ready-made bundle: everything that it claims to have seen, it has seen."""

import io
import json
import runpy
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import psutil
import pytest
from PIL import Image
from rich.console import Console

from mdp.testing.bundles import DEVICES, LABELS, colour_picture, write_bundle
from tests.support.command_lines import run_here
from tests.support.fleet import ROOT

DEMO = runpy.run_path(str(ROOT / "examples/demo.py"))
MAIN = DEMO["main"]

pytestmark = pytest.mark.usefixtures("no_leaks")


def demo(*args: object) -> subprocess.CompletedProcess[str]:
    with chdir(ROOT):
        return run_here(MAIN, "demo", *args)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "bundle")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for label in LABELS:
        folder = tmp_path / "pictures" / label
        folder.mkdir(parents=True)
        for number in range(8):
            Image.fromarray(colour_picture(label)).save(folder / f"{number}.png")
    (tmp_path / "pictures/README.md").write_text("What these are.")
    return tmp_path / "pictures"


def agents_of(bundle: Path) -> list[list[str]]:
    """Command lines of the agents that still serve `bundle`."""
    running = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in running if str(bundle) in line and "run" in line]


def test_the_demo_verifies_its_claims(tmp_path: Path, bundle: Path, pictures: Path) -> None:
    seen = tmp_path / "seen.json"
    work = tmp_path / "work"
    work.mkdir()
    (work / "fleet.toml").write_text("of an earlier demo")
    done = demo("--work", work, "--bundle", bundle, "--pictures", pictures, "--report", seen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert agents_of(bundle) == []
    content = json.loads(seen.read_text())
    assert content["ok"] is True
    assert len(content["claims"]) == 5
    assert set(content["claims"].values()) == {True}
    assert content["killed"]["device"] == content["restarted"]["device"] == "beta"
    assert content["killed"]["answers"] == 20
    assert content["live"]["pictures"] == 24
    assert content["live"]["accuracy"] == 1.0
    assert content["live"]["modes"] == ["stacked"]
    assert set(content["live"]["compute_ms"]) == set(DEVICES)
    assert len(content["evaluation"]["subsets"]) == 7
    # Exactly the commands that a user would type are shown.
    for command in ("mdp-agent run", "mdp fleet new", "mdp status", "kill -KILL"):
        assert f"$ {command}" in done.stdout
    assert "NOT SEEN" not in done.stdout


@pytest.mark.parametrize("page", [False, True])
def test_the_page_is_advertised_where_it_is_not_shown(page: bool) -> None:
    seen, shown = DEMO["_Seen"](), io.StringIO()
    seen.facts["seconds"] = 7.0
    DEMO["_print_claims"](Console(file=shown, width=100), seen, page=page)
    hint = "" if page else "; --page (PAGE=1) shows the fleet in a browser"
    assert shown.getvalue() == f"\n7 s in all{hint}\n"


@pytest.mark.parametrize(
    ("work", "bundle", "pictures", "expected"),
    [
        ("w", "nowhere", None, "nowhere: expected a bundle folder with a manifest.json"),
        ("w", "new", None, "new: never evaluated; run mdp-partition evaluate --write first"),
        ("w", "bundle", "other", "expected folders named after classes of"),
        ("w", "bundle", "w", "w: expected pictures, or a folder per class with some"),
        ("file", "bundle", None, "file: cannot be made: File exists"),
    ],
)
def test_what_the_demo_refuses(
    tmp_path: Path, work: str, bundle: str, pictures: str | None, expected: str
) -> None:
    if bundle != "nowhere":
        write_bundle(tmp_path / bundle, evaluated=bundle == "bundle")
    (tmp_path / "file").touch()
    (tmp_path / "other/unicorn").mkdir(parents=True)
    (tmp_path / "other/unicorn/0.png").touch()
    more = [] if pictures is None else ["--pictures", tmp_path / pictures]
    done = demo("--work", tmp_path / work, "--bundle", tmp_path / bundle, *more)
    assert done.returncode == 2
    assert done.stderr.startswith("demo: ")
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_agent_that_does_not_start_ends_the_demo(tmp_path: Path, bundle: Path) -> None:
    (bundle / "submodels/1/model.onnx").unlink()
    done = demo("--work", tmp_path / "work", "--bundle", bundle)
    assert done.returncode == 3
    assert done.stderr.startswith("demo: the agent of beta ended: mdp-agent: ")
    assert "model.onnx: missing, but listed in manifest.json" in done.stderr
    assert done.stderr.count("\n") == 1
    assert agents_of(bundle) == []


def test_without_the_partition_extra_nothing_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    done = demo("--work", tmp_path / "work")
    assert done.returncode == 2
    assert "torch is not installed; building a bundle needs it: pip install" in done.stderr
    assert not (tmp_path / "work").exists()
