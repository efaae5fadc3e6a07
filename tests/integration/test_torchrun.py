"""Two processes under torchrun train what one would: real processes that speak gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.support.fitted import Net, cases, stage, stopped_at, trained  # noqa: E402

pytestmark = pytest.mark.torch
PATIENCE_S = 180.0
#: Largest relative difference of the weights, as one vector, in fp32. Measured here: 0 to 4e-8.
#: Sums in another order are rounded otherwise, and AdamW makes more of that with every step.
TOLERANCE = 1e-5


def torchrun(*args: str) -> subprocess.CompletedProcess[str]:
    """Run `args` in two processes of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*launcher, "--nproc-per-node", "2", *args],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        check=False,
    )


def weights(out: Path, rank: int = 0) -> Any:
    """All weights of one process as one vector."""
    state = torch.load(out / f"weights-{rank}.pt", weights_only=True)
    return torch.cat([value.flatten() for value in state.values()])


def report(out: Path, rank: int = 0) -> dict[str, Any]:
    return json.loads((out / f"report-{rank}.json").read_bytes())


def difference(ours: Any, theirs: Any) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case, trained by one process and then by two."""
    made = tmp_path_factory.mktemp("fitted")
    with pytest.raises(KeyboardInterrupt):
        trained(made / "resumed", stage(made / "resumed"), stopped_at(1))
    for case in ("damaged/1", "damaged/2"):
        (made / case).mkdir(parents=True)
        (made / case / "checkpoint.pt").write_bytes(b"damaged")
    for name, run in cases(made).items():
        if name != "resumed":
            run()
    done = torchrun("-m", "tests.support.fitted", str(made))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all cases ran\n"
    assert "FutureWarning" not in done.stderr
    return made


@pytest.mark.parametrize("case", ["plain", "empty", "parts"])
def test_two_processes_end_with_the_weights_of_one(folder: Path, case: str):
    one, two = folder / case / "1", folder / case / "2"
    assert torch.equal(weights(two, 0), weights(two, 1))
    assert difference(weights(two), weights(one)) < TOLERANCE
    start = torch.cat([value.flatten() for value in Net().state_dict().values()])
    assert difference(weights(one), start) > 0.05, "nothing was learnt"
    for ours, theirs in zip(report(two)["curve"], report(one)["curve"], strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
    assert report(two, 0)["curve"][-1]["loss"] == report(two, 1)["curve"][-1]["loss"]


def test_two_processes_go_on_where_one_was_stopped(folder: Path):
    assert len(report(folder / "resumed")["curve"]) == 4
    assert difference(weights(folder / "resumed"), weights(folder / "plain" / "1")) < TOLERANCE


def test_all_stop_early_together_with_the_best_weights(folder: Path):
    one, two = folder / "early" / "1", folder / "early" / "2"
    for rank in (0, 1):
        found = [epoch["validation"] for epoch in report(two, rank)["curve"]]
        assert found == [3.0, 1.0, 2.0, 1.0]
    assert torch.equal(weights(two, 0), weights(two, 1))
    assert difference(weights(two), weights(one)) < TOLERANCE


def test_a_loss_that_one_process_finds_broken_stops_all_in_the_same_step(folder: Path):
    one, two = folder / "broken" / "1", folder / "broken" / "2"
    first, other = report(two, 0), report(two, 1)
    assert first["kind"] == "TrainingDiverged"
    assert first["error"].startswith("fitting: the loss became nan in epoch 3, step ")
    assert first["error"].replace("/2/", "/1/") == report(one)["error"]
    assert (other["kind"], other["error"]) == ("StoppedElsewhere", first["error"])
    kept = torch.load(two / "checkpoint.pt", weights_only=True)
    assert len(kept["curve"]) == 2
    assert all(value.isfinite().all() for value in kept["module"].values())


def test_a_broken_checkpoint_is_named_once(folder: Path):
    two = folder / "damaged" / "2"
    assert report(two, 0)["error"].endswith(
        "checkpoint.pt: not a checkpoint of this run; remove it to start over"
    )
    assert (report(two, 1)["kind"], report(two, 1)["code"]) == ("StoppedElsewhere", 0)


def test_the_first_prepares_and_whoever_fails_speaks(folder: Path):
    first, other = (json.loads((folder / f"said-{rank}.json").read_bytes()) for rank in (0, 1))
    assert first == [
        "wrote",
        "InputError: only 0 knows",
        "StoppedElsewhere: process 1 of 2 stopped",
        "ran",
        "InputError: no room, 2",
        "0.25",
    ]
    assert other == [
        "read written",
        "StoppedElsewhere: process 0 of 2 stopped",
        "InputError: only 1 knows",
        "StoppedElsewhere: process 0 of 2 stopped, 0",
        "0.25",
    ]
