"""`mdp-partition assemble --bundle --rungs` as a user sees it."""

import json
from pathlib import Path

import pytest

from mdp.formats.bundle import Bundle
from mdp.testing.bundles import write_bundle
from partitioner.assembly import ladder
from tests.support.models.quantized import write_colours
from tests.unit.partitioner.cli.conftest import Run


def test_a_bundle_with_rungs_is_made_by_one_command(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "best_ms", lambda runs, *_: range(len(runs), 0, -1))
    write_bundle(tmp_path / "bundle", devices=("pi", "pi-1"), sizes=(12, 12))
    write_colours(tmp_path / "tree")
    asked = ("assemble", "--bundle", "bundle", "--data", "tree", "--rungs", "pi=0,1", "--out")
    code, out, err = run(*asked, "made")
    assert code == 0, err
    made = Bundle.open(tmp_path / "made")
    assert f"made: digest {made.digest}" in out
    assert "at their top rungs" in " ".join(out.split())
    code, out, err = run(*asked, "again", "--json")
    assert code == 0, err
    told = json.loads(out)
    (whole,) = made.manifest.plan.assignments
    assert told["rungs"] == {"0": [whole.lower[0].accuracy]}
    assert told["lowest"]["subsets"][0]["members"] == [0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "expected --models and --profiles, or --bundle and --rungs"),
        (("--models", "m.toml"), "expected --models and --profiles, or --bundle and --rungs"),
        (
            ("--models", "m.toml", "--profiles", "n100", "--rungs", "int8"),
            "--rungs: expected --bundle beside it",
        ),
        (("--bundle", "bundle", "--models", "m.toml"), "expected no --models beside it"),
        (("--bundle", "bundle", "--profiles", "n100"), "expected no --profiles beside it"),
        (("--bundle", "bundle"), "--rungs: expected one of fp16, int8, int8-static, or DEVICE="),
        (("--bundle", "none", "--rungs", "int8"), "none: expected a bundle folder"),
    ],
)
def test_options_that_do_not_go_together_end_in_one_line(
    run: Run, tmp_path: Path, options: tuple[str, ...], expected: str
) -> None:
    write_bundle(tmp_path / "bundle")
    write_colours(tmp_path / "tree")
    code, _, err = run("assemble", *options, "--data", "tree", "--out", "made")
    assert (code, expected in err) == (2, True), err
    assert not (tmp_path / "made").exists()
