"""Three processes train together: exact plans as one process, and rounds that lose a trainer."""

import json
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from partitioner.crew.averaging.gradients import Gradients  # noqa: E402
from partitioner.crew.bus.control import replay  # noqa: E402
from partitioner.crew.coordinator.schedule import LocalSgdSchedule  # noqa: E402
from partitioner.crew.coordinator.sizes import CodecName  # noqa: E402
from partitioner.crew.messages import GoOn, Meet  # noqa: E402
from partitioner.crew.planning.costs import RATIO  # noqa: E402
from partitioner.training.distributed import Crew  # noqa: E402
from partitioner.training.synchroniser import MAX_GRADIENT_NORM, EveryStep  # noqa: E402
from tests.support.models.crews import (  # noqa: E402
    EPOCHS,
    EXACT,
    FACTORED,
    KFAC,
    LOSSY,
    NEXT_FORWARD,
    NEXT_FORWARD_EPOCHS,
    PRECONDITIONED,
    ROUNDS,
    TRAINERS,
    WAYS,
    always,
    flat,
    in_pipelines,
    join_state,
    machine,
    main,
    train_narrow,
    train_teacher,
    train_vit,
)  # fmt: skip
from tests.support.models.forked import Forked  # noqa: E402

pytestmark = pytest.mark.torch
PATIENCE_S = 240.0
#: Largest relative difference of the weights, as one vector, in fp32.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what every case leaves behind, trained by three processes."""
    made = tmp_path_factory.mktemp("crews")
    said = [made / f"{rank}.log" for rank in range(TRAINERS)]
    with ExitStack() as stack:
        # Held until the end, so that no other test gets a port whose round begins late.
        taken = [stack.enter_context(socket.socket()) for _ in range(1 + len(ROUNDS))]
        for holder in taken:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
        ports = [holder.getsockname()[1] for holder in taken]
        started = [Forked(main, made, rank, *ports, stderr=said[rank]) for rank in range(TRAINERS)]
        try:
            codes = [process.wait(PATIENCE_S) for process in started]
        finally:
            for process in started:
                process.kill()
    assert codes == [0] * TRAINERS, "\n".join(path.read_text() for path in said)
    return made


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights that one process ends with."""
    return flat(train_vit(tmp_path_factory.mktemp("alone"), EveryStep()))


def ends(folder: Path, name: str) -> list[Any]:
    return [torch.load(folder / f"{name}-{rank}.pt") for rank in range(TRAINERS)]


def difference(ours: Any, theirs: Any) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("name", [*EXACT, *FACTORED])
def test_exact_plans_end_with_the_weights_of_one_process(
    folder: Path, alone: Any, name: str
) -> None:
    found = ends(folder, name)
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert difference(found[0], alone) < TOLERANCE


@pytest.mark.parametrize("name", PRECONDITIONED)
def test_preconditioned_gradients_end_with_the_weights_of_one_process_with_them(
    folder: Path, tmp_path: Path, name: str
) -> None:
    of_one = Gradients(Crew(0, 1), WAYS["ring"], always("fp32"), bucket_bytes=2**20, owner=KFAC)
    expected = flat(train_narrow(tmp_path, of_one))
    found = ends(folder, name)
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert difference(found[0], expected) < TOLERANCE
    # It took other steps than the optimiser's.
    (tmp_path / "plain").mkdir()
    plain = flat(train_narrow(tmp_path / "plain", EveryStep()))
    assert difference(found[0], plain) > 100 * TOLERANCE


class Noting(EveryStep):
    """One process that notes the norm of every step's gradients."""

    def __init__(self) -> None:
        super().__init__(Crew(0, 1))
        self.norms: list[float] = []

    def update(self, optimiser: Any) -> float:
        self.norms.append(super().update(optimiser))
        return self.norms[-1]


@pytest.mark.parametrize("name", NEXT_FORWARD)
def test_means_in_the_next_forward_pass_end_as_those_at_once(
    folder: Path, tmp_path: Path, name: str
) -> None:
    found, at_once = ends(folder, name), ends(folder, f"{name}-at-once")
    assert all(torch.equal(found[0], other) for other in found[1:])
    # Two routes at once differ by as much: the clipped norm is rounded in another way.
    assert difference(found[0], at_once[0]) < TOLERANCE
    for rank in range(TRAINERS):
        sent = json.loads((folder / f"sent-{rank}.json").read_bytes())
        assert sent[name] == sent[f"{name}-at-once"] > 0
    # Some of these steps are clipped, and there are 21.
    alone = Noting()
    ends_alone = flat(train_vit(tmp_path, alone, NEXT_FORWARD_EPOCHS))
    assert len(alone.norms) == 21
    assert max(alone.norms) > MAX_GRADIENT_NORM
    assert difference(found[0], ends_alone) < 10 * TOLERANCE


@pytest.mark.parametrize("name", FACTORED)
def test_factors_are_fewer_bytes(folder: Path, name: str) -> None:
    for rank in range(TRAINERS):
        sent = json.loads((folder / f"sent-{rank}.json").read_bytes())
        assert 0 < sent[name] < sent[FACTORED[name]]


def test_stages_end_with_the_weights_of_one_process(folder: Path, tmp_path: Path) -> None:
    stages = [torch.load(folder / f"stage-{index}" / "end.pt") for index in range(TRAINERS)]
    found = {name: value for stage in stages for name, value in stage["weights"].items()}
    assert len(found) == sum(len(stage["weights"]) for stage in stages)  # none is held twice
    assert difference(join_state(found), train_teacher(tmp_path)) < TOLERANCE
    assert stages[0]["losses"] == stages[1]["losses"] == stages[2]["losses"]


def test_pipelines_end_with_the_weights_of_one_process(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        said = [tmp_path / f"{rank}.log" for rank in range(4)]
        started = [
            Forked(in_pipelines, tmp_path, rank, port, stderr=said[rank]) for rank in range(4)
        ]
        try:
            codes = [process.wait(PATIENCE_S) for process in started]
        finally:
            for process in started:
                process.kill()
    assert codes == [0] * 4, "\n".join(path.read_text() for path in said)
    ends = [
        [torch.load(tmp_path / f"pipeline-{pipeline}-stage-{index}" / "end.pt") for index in (0, 1)]
        for pipeline in (0, 1)
    ]
    found = [{n: v for stage in stages for n, v in stage["weights"].items()} for stages in ends]
    assert difference(join_state(found[0]), train_teacher(tmp_path)) < TOLERANCE
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value)
    for stages in ends:
        for stage in stages:
            assert stage["losses"] == ends[0][0]["losses"]
            numbers = sum(value.numel() for value in stage["weights"].values())
            # Six steps, in each of which half is sent to the other one, and the own half's mean.
            assert 0 < stage["sent"] <= 6 * 4 * numbers


@pytest.mark.parametrize("codec", LOSSY)
def test_fewer_bytes_end_near(folder: Path, alone: Any, codec: CodecName) -> None:
    found = ends(folder, codec)
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert TOLERANCE < difference(found[0], alone) < 0.05
    for rank in range(TRAINERS):
        sent = json.loads((folder / f"sent-{rank}.json").read_bytes())
        ratio = sent[codec] / sent[f"{LOSSY[codec]}-equal-25"]
        assert ratio == pytest.approx(RATIO[codec], rel=1e-3)


@pytest.mark.parametrize("name", ROUNDS)
def test_rounds_end_with_one_network_and_every_batch_in_it(folder: Path, name: str) -> None:
    left = [rank for rank in range(TRAINERS) if name != "killed" or rank != 2]
    ended = [torch.load(folder / name / str(rank) / "end.pt") for rank in left]
    for other in ended[1:]:
        assert torch.equal(ended[0], other)
    assert not (folder / name / "2" / "end.pt").exists() or name != "killed"
    schedule, some, takes = machine(name), 0, 0
    for told, again in replay(folder / name / "log.jsonl", schedule):
        assert told == again
        some += sum(isinstance(action, Meet) and not action.whole for action in told)
        gone_on = [action for action in told if isinstance(action, GoOn)]
        takes += sum(taken.share > 0 for action in gone_on for taken in action.takes)
    # Only some met at a time, in between.
    assert (some > 2 * TRAINERS) == (name in ("shuffled", "on_request"))
    assert (takes > 2 * TRAINERS) == (name == "neighbours")
    rounds = schedule.networks["member-0"]
    assert isinstance(rounds, LocalSgdSchedule)
    # An epoch ends when every batch is in a committed mean, and with it the training.
    assert (rounds.epoch, rounds.ended) == (EPOCHS, "member-0 is trained")
    said = [json.loads((folder / name / str(rank) / "said.json").read_bytes()) for rank in left]
    first = min(said, key=lambda one: one["rank"])
    assert all(epoch["loss"] > 0 for epoch in first["curve"])
    # The first trainer validates for all, on all pictures: losses of a lost trainer are not known.
    values = [[epoch["validation"] for epoch in one["curve"]] for one in said]
    assert all(value == values[0] for value in values)
    assert len(values[0]) == EPOCHS
    assert values[0][-1] < values[0][0]
