"""Rounds of trainers in threads: weights, lossy codecs, numbers that are not finite."""

import gc
import io
import threading
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from queue import Empty, Queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from msgspec.structs import replace  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._C._distributed_c10d import HashStore  # noqa: E402

from mdp.testing.processes import until  # noqa: E402
from partitioner.crew.averaging.mean import Means, Meeting  # noqa: E402
from partitioner.crew.averaging.owners import OuterStep  # noqa: E402
from partitioner.crew.averaging.parameters import CrewEnded, Rounds  # noqa: E402
from partitioner.crew.coordinator.neighbours import Neighbours  # noqa: E402
from partitioner.crew.coordinator.partial import OnRequest, Shuffled  # noqa: E402
from partitioner.crew.coordinator.rounds import RoundLengths  # noqa: E402
from partitioner.crew.coordinator.schedule import LocalSgdSchedule  # noqa: E402
from partitioner.crew.coordinator.sizes import CodecName  # noqa: E402
from partitioner.crew.messages import (  # noqa: E402
    AnyAction,
    AnyEvent,
    Finished,
    GoOn,
    Meet,
    MeetingFailed,
    Ready,
    Waiting,
)  # fmt: skip
from partitioner.run.curves import Curve  # noqa: E402
from partitioner.run.progress import Progress  # noqa: E402
from partitioner.training.loop import Validate, fit  # noqa: E402
from tests.support.gloo import PlainGroups, in_threads  # noqa: E402
from tests.support.models.fitted import PICTURES, Net, plain, play_values, stage  # noqa: E402

pytestmark = pytest.mark.torch
TWO_PHASE = Means(route="two_phase")
TRAINERS, BATCHES = 3, [np.arange(start, start + 2) for start in range(0, 24, 2)]


class Coordinator:
    """A schedule and mailboxes in this process."""

    def __init__(
        self, every: int, *, background: bool = False, schedule: LocalSgdSchedule | None = None
    ) -> None:
        self.schedule = schedule or LocalSgdSchedule(
            "net",
            RoundLengths(every, len(BATCHES), 1),
            expected=range(TRAINERS),
            background=background,
        )
        self.lock = threading.Lock()
        self.boxes: list[Queue[AnyAction]] = [Queue() for _ in range(TRAINERS)]
        self.counters: dict[str, int] = defaultdict(int)
        self.log: list[AnyEvent] = []
        self.told: list[tuple[AnyEvent, list[AnyAction]]] = []
        self.settling_bytes: set[int] = set()
        self.in_background = self.in_meetings_of_some = self.takes = 0

    def take(self, event: AnyEvent) -> None:
        with self.lock:
            self.log.append(event)
            actions = self.schedule.handle(event)
            self.told.append((event, actions))
            for action in actions:
                self.in_background += isinstance(action, Meet) and action.background
                self.in_meetings_of_some += isinstance(action, Meet) and not action.whole
                if isinstance(action, GoOn):
                    self.takes += sum(taken.share > 0 for taken in action.takes)
                self.boxes[action.rank].put(action)


class End:
    """A trainer's end of it."""

    def __init__(self, coordinator: Coordinator, rank: int) -> None:
        self.coordinator, self.rank = coordinator, rank
        self.taken: list[int] = []
        self.given: list[int] = []

    def report(self, event: AnyEvent) -> None:
        if isinstance(event, Ready | Waiting | Finished):
            event = replace(event, claims=tuple(self.taken))
            self.taken = []
        self.coordinator.take(event)

    def poll(self, timeout_s: float = 0.0) -> AnyAction | None:
        try:
            action = self.coordinator.boxes[self.rank].get(
                block=timeout_s > 0, timeout=timeout_s or None
            )
        except Empty:
            return None
        if isinstance(action, GoOn):
            self.given += action.claims
        return action

    def claim(self, counter: str) -> int:
        with self.coordinator.lock:
            if self.given:
                self.taken.append(self.given.pop(0))
            else:
                self.taken.append(self.coordinator.counters[counter])
                self.coordinator.counters[counter] += 1
        return self.taken[-1]


class Plain(PlainGroups):
    """Groups without anything kept."""

    def drop(self, network: str, members: Any) -> None:
        """Nothing is."""


def trained(
    codec: CodecName,
    odd: int | None = None,
    *,
    odd_steps: int = 1,
    every: int = 8,
    background: bool = False,
    stride: int = 1,
) -> tuple[Coordinator, list[Any]]:
    """Steps that add each picture's number to the parameters; `odd` adds none in its first.

    Rounds of 2 pictures are a step of each.
    """
    coordinator, store = Coordinator(every, background=background), HashStore()
    at_once = threading.Barrier(TRAINERS if every == 2 else 1)

    def run(rank: int) -> Tensor | str:
        module = nn.Linear(300, 2, bias=False)
        nn.init.constant_(module.weight, float(rank))
        optimiser = torch.optim.AdamW(module.parameters())
        sync = Rounds(
            "net", End(coordinator, rank), Plain(store, rank), TRAINERS, first=rank == 0,
            means=TWO_PHASE, codec_of=lambda name: codec, stride=stride,
        )  # fmt: skip
        sync.wrap(module, optimiser, torch.device("cpu"))
        steps = 0
        try:
            assert sync.begin(0) == 0
            for _, index, part in sync.shares(BATCHES, 0):
                assert part == 1.0
                steps += 1
                if steps <= odd_steps:
                    at_once.wait(20)
                with torch.no_grad():
                    module.weight += float(index.sum())
                    if rank == odd and steps <= odd_steps:
                        module.weight[0, 0] = float("nan")
                sync.after_step(len(index))
            sync.settle(torch.zeros(1, dtype=torch.float64))
            coordinator.settling_bytes.add(sync.settling_bytes)
        except CrewEnded as error:
            return str(error)
        weights: Tensor = module.weight.detach().clone()
        return weights

    return coordinator, in_threads(TRAINERS, run)


@pytest.mark.parametrize("background", [False, True], ids=["at_once", "background"])
@pytest.mark.parametrize(
    ("codec", "stride"),
    [("fp32", 1), ("fp16", 1), ("int8", 1), ("top4", 1), ("fp32", 3), ("int8", 3), ("top4", 3)],
)
def test_all_end_with_the_same_bits(codec: CodecName, stride: int, background: bool) -> None:
    coordinator, found = trained(codec, background=background, stride=stride)
    assert coordinator.schedule.ended == "net is trained"
    assert (coordinator.in_background >= TRAINERS) == background
    assert all(torch.equal(found[0], other) for other in found)
    # Beside the means, parameters of the first meeting in fp32: moments are the same there.
    assert coordinator.settling_bytes == {4 * 600 * 4 // 3}
    # Every round adds the weighted mean of what its trainers added; the first one's start counts.
    assert 0 < float(found[0].min()) <= float(found[0].max()) < 276
    # A number that travelled later than others had less of it, in rounds of unequal weights.
    if stride == 1 and codec != "top4":
        assert float(found[0].max() - found[0].min()) <= (0 if codec == "fp32" else 1)


WAYS = pytest.mark.parametrize("means", [TWO_PHASE, Means()], ids=["two_phase", "ring"])


@WAYS
def test_an_outer_step_goes_further_than_the_mean(means: Means) -> None:
    """The owner's step 0.7 and momentum 0.9, from 0 to means of 2, twice."""
    coordinator, store = Coordinator(100), HashStore()

    def run(rank: int) -> list[float]:
        module, found = nn.Linear(3, 2, bias=False), []
        nn.init.zeros_(module.weight)
        sync = Rounds(
            "net", End(coordinator, rank), Plain(store, rank), TRAINERS, first=rank == 0,
            means=means, codec_of=lambda name: "fp32", outer=OuterStep(0.7, 0.9),
        )  # fmt: skip
        sync.wrap(module, torch.optim.AdamW(module.parameters()), torch.device("cpu"))
        sync.begin(0)
        for _ in range(2):
            with torch.no_grad():
                module.weight += float(rank + 1)
            sync.after_step(1)
            sync._report(Waiting)
            sync._rest()
            found += module.weight.detach().flatten().tolist()
        return found

    first = 0.7 * (2 + 0.9 * 2)
    second = first + 0.7 * (2 + 0.9 * (0.9 * 2 + 2))
    found = in_threads(TRAINERS, run)
    assert found == [found[0]] * TRAINERS
    assert found[0] == pytest.approx([first] * 6 + [second] * 6)


def test_what_int8_leaves_out_stays_with_the_parameters() -> None:
    """Parameters differ within an epoch by what was not sent, and are the same at its end."""
    coordinator, store = Coordinator(8), HashStore()

    def run(rank: int) -> tuple[list[Tensor], Tensor]:
        module = nn.Linear(300, 2, bias=False)
        drawn = torch.Generator().manual_seed(rank)
        sync = Rounds(
            "net", End(coordinator, rank), Plain(store, rank), TRAINERS, first=rank == 0,
            means=TWO_PHASE, codec_of=lambda name: "int8",
        )  # fmt: skip
        sync.wrap(module, torch.optim.AdamW(module.parameters()), torch.device("cpu"))
        sync.begin(0)
        lacking = []
        for _, index, _ in sync.shares(BATCHES, 0):
            with torch.no_grad():
                module.weight += torch.randn(2, 300, generator=drawn)
            before = module.weight.detach().clone()
            sync.after_step(len(index))
            if not torch.equal(before, module.weight):
                lacking.append((module.weight.detach().flatten() - sync.common).abs().max())
        sync.settle(torch.zeros(1, dtype=torch.float64))
        return lacking, module.weight.detach().clone()

    found = in_threads(TRAINERS, run)
    lacking = [float(one) for some, _ in found for one in some]
    assert lacking
    assert 0 < max(lacking) < 0.2
    assert all(torch.equal(found[0][1], weights) for _, weights in found)


class Counted(Rounds):
    """Rounds that keep what each mean did: what changed, G, and what the mean was of."""

    seen: list[tuple[Tensor, Tensor, Meet]]

    def _average(self, meet: Meet, vector: Tensor) -> Any:
        self.seen.append((vector, getattr(self, "common", torch.zeros(0)), meet))
        return super()._average(meet, vector)


@pytest.mark.parametrize(("codec", "stride"), [("fp32", 4), ("top4", 4), ("top4", 1)])
def test_what_does_not_travel_stays_until_the_last_mean_of_an_epoch(
    codec: CodecName, stride: int
) -> None:
    """x += C(mean) - C(own), with statistics in every mean, and G the same bits on all."""
    coordinator, store = Coordinator(4), HashStore()

    def run(rank: int) -> tuple[list[tuple[Tensor, Tensor, Meet]], Tensor, Tensor, Tensor]:
        linear, norm = nn.Linear(300, 2, bias=False), nn.BatchNorm1d(2, affine=False)
        module = nn.Sequential(linear, norm)
        drawn = torch.Generator().manual_seed(rank)
        sync = Counted(
            "net", End(coordinator, rank), Plain(store, rank), TRAINERS, first=rank == 0,
            means=TWO_PHASE, codec_of=lambda name: codec, stride=stride,
        )  # fmt: skip
        sync.seen = []
        sync.wrap(module, torch.optim.AdamW(module.parameters()), torch.device("cpu"))
        sync.begin(0)
        for _, index, _ in sync.shares(BATCHES, 0):
            with torch.no_grad():
                linear.weight += torch.randn(2, 300, generator=drawn)
                assert norm.running_mean is not None
                norm.running_mean += float(rank + 1)
            sync.after_step(len(index))
        sync.settle(torch.zeros(1, dtype=torch.float64))
        left = torch.zeros(0) if sync._left is None else sync._left
        return sync.seen, sync._flat.read(), sync.common, left

    found = in_threads(TRAINERS, run)
    assert coordinator.schedule.ended == "net is trained"
    seen, end, common, _ = found[0]
    assert torch.equal(end, common), "an epoch ends with G"
    for others, other_end, other_common, left in found:
        assert torch.equal(other_end, end)
        assert torch.equal(other_common, common)
        assert [meet.seq for _, _, meet in others] == [meet.seq for _, _, meet in seen]
        for (_, mine, _), (_, other, _) in zip(others, seen, strict=True):
            assert torch.equal(mine, other)
        # After it nothing but what int8 loses is missing.
        assert float(left.abs().max()) <= (1e-5 if codec == "fp32" else 0.1)
    # The first meeting is exact, the last one of every number.
    inner = [meet.ends for _, _, meet in seen[1:]]
    assert len(inner) >= 3
    assert inner == [False] * (len(inner) - 1) + [True]
    for (_, before, meet), (_, after, _) in pairwise(seen[1:]):
        changed = (after - before)[:600] != 0
        assert set(torch.nonzero(changed)[:, 0].remainder(stride).tolist()) == {meet.seq % stride}
        assert int(changed.sum()) <= (600 if codec == "fp32" else 0.21 * 600) / stride
        assert bool(((after - before)[600:602] != 0).all()), "statistics travel in every mean"


def test_who_took_no_step_keeps_what_it_has_not_sent() -> None:
    """Members count alike where parts travel, as what stays is of earlier rounds too."""
    coordinator, store = Coordinator(100), HashStore()

    def run(rank: int) -> tuple[list[float], list[float]]:
        module, found = nn.Linear(2, 1, bias=False), list[list[float]]()
        nn.init.zeros_(module.weight)
        sync = Rounds(
            "net", End(coordinator, rank), Plain(store, rank), TRAINERS, first=rank == 0,
            means=TWO_PHASE, codec_of=lambda name: "fp32", stride=2,
        )  # fmt: skip
        sync.wrap(module, torch.optim.AdamW(module.parameters()), torch.device("cpu"))
        sync.begin(0)
        for t in range(2):
            if t == 0 or rank == 0:
                with torch.no_grad():
                    module.weight += 3.0 * (rank + 1)
                sync.after_step(1)
            sync._report(Waiting)
            sync._rest()
            found.append(module.weight.detach().flatten().tolist())
        return found[0], found[1]

    for rank, (first, second) in enumerate(in_threads(TRAINERS, run)):
        # One number in each mean: 3, 6 and 9 of the first, and of the other with 3 more of rank 0.
        one, other = (0, 1) if first[0] == 6 else (1, 0)
        assert first[one] == 6
        assert first[other] == 3 * (rank + 1)
        assert second[one] == 6 + 3 * (rank == 0)
        assert second[other] == 7


@pytest.mark.parametrize("kind", [Shuffled, OnRequest, Neighbours])
def test_differences_are_those_from_the_last_mean_of_all(
    kind: type[Shuffled | OnRequest | Neighbours],
) -> None:
    """Meetings of some in int8, and neighbours, leave the reference; the epoch ends alike."""
    meetings = kind("net", RoundLengths(4, len(BATCHES), 1), expected=range(TRAINERS))
    coordinator, store = Coordinator(4, schedule=meetings), HashStore()
    at_once = threading.Barrier(TRAINERS)

    def run(rank: int) -> tuple[Tensor, Tensor, bool]:
        module = nn.Linear(300, 2, bias=False)
        drawn = torch.Generator().manual_seed(rank)
        sync = Rounds(
            "net", End(coordinator, rank), Plain(store, rank), TRAINERS, first=rank == 0,
            means=TWO_PHASE, codec_of=lambda name: "int8", scales=True,
        )  # fmt: skip
        sync.wrap(module, torch.optim.AdamW(module.parameters()), torch.device("cpu"))
        sync.begin(0)
        first, factor = sync.common.clone(), sync._factor
        at_once.wait(20)
        kept = True
        for _, index, _ in sync.shares(BATCHES, 0):
            with torch.no_grad():
                module.weight += torch.randn(2, 300, generator=drawn)
            before = module.weight.detach().clone()
            sync.after_step(len(index))
            if not torch.equal(before, module.weight):
                kept &= torch.equal(sync.common, first) and sync._factor == factor
        sync.settle(torch.zeros(1, dtype=torch.float64))
        return module.weight.detach().flatten(), sync.common, kept

    found = in_threads(TRAINERS, run)
    assert coordinator.schedule.ended == "net is trained"
    weights, common, _ = found[0]
    assert all(torch.equal(weights, other[0]) for other in found)
    assert all(torch.equal(common, other[1]) for other in found)
    assert all(kept for *_, kept in found)
    assert kind is Neighbours or coordinator.in_meetings_of_some >= 2
    assert kind is not Neighbours or coordinator.takes >= 2


def followed(coordinator: Coordinator) -> dict[int, list[float]]:
    """Parameters of trainers that add 3 times their rank in each step, by what they were told."""
    value, found = [0.0] * TRAINERS, defaultdict[int, list[float]](list)
    published: dict[tuple[int, int], float] = {}
    for event, actions in coordinator.told:
        if isinstance(event, Ready):
            value[event.rank] += 3.0 * event.rank
        elif isinstance(event, Waiting):
            published[event.rank, event.since] = value[event.rank]
        for told in actions:
            if isinstance(told, GoOn):
                theirs = sum(share * published[source, at] for source, at, share in told.takes)
                own = 1 - sum(taken.share for taken in told.takes)
                value[told.rank] = own * value[told.rank] + theirs
                found[told.rank].append(value[told.rank])
    return found


@pytest.mark.parametrize(("codec", "size"), [("fp32", 1024), ("fp16", 512), ("int8", 260)])
def test_neighbours_take_each_others_newest(codec: CodecName, size: int) -> None:
    """All numbers are alike, so that codecs write them nearly as they are."""
    schedule = Neighbours("net", RoundLengths(3, 100, 1), expected=range(TRAINERS), backup=0)
    coordinator, store = Coordinator(3, schedule=schedule), HashStore()
    at_once = threading.Barrier(TRAINERS)
    # Other tests of this process may have left some that wait for who is lost.
    before = set(threading.enumerate())

    def run(rank: int) -> tuple[list[float], Rounds]:
        module, found = nn.Linear(256, 1, bias=False), list[float]()
        nn.init.zeros_(module.weight)
        sync = Rounds(
            "net", End(coordinator, rank), Plain(store, rank), TRAINERS, first=rank == 0,
            means=TWO_PHASE, codec_of=lambda name: codec,
        )  # fmt: skip
        sync.wrap(module, torch.optim.AdamW(module.parameters()), torch.device("cpu"))
        sync.begin(0)
        for _ in range(3):
            with torch.no_grad():
                module.weight += 3.0 * rank
            sync.after_step(1)
            found += set(module.weight.detach().flatten().tolist())
        at_once.wait(20)
        sync._part()
        return found, sync

    told = in_threads(TRAINERS, run)
    expected = followed(coordinator)
    for rank, (found, _) in enumerate(told):
        assert found == pytest.approx(expected[rank], rel=1e-3 if codec == "fp16" else 1e-5)
    assert coordinator.takes == 3 * 3 * 2
    # Threads end once all have said that no more comes; a head goes before each vector.
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("crew-neighbour"):
            thread.join(20)
            assert not thread.is_alive()
    # Of three publications to each neighbour one may give way to a newer one, or to the end.
    heads = 2 * 8
    sent = [sync.bytes_sent - heads for _, sync in told]
    assert all(bytes_ % (size + 8) == 0 for bytes_ in sent)
    assert all(2 * (size + 8) < bytes_ <= 2 * 3 * (size + 8) for bytes_ in sent)


def test_a_number_that_is_not_finite_reaches_no_neighbour() -> None:
    schedule = Neighbours("net", RoundLengths(3, 100, 1), expected=range(TRAINERS), backup=0)
    coordinator, store = Coordinator(3, schedule=schedule), HashStore()

    def run(rank: int) -> list[float]:
        module = nn.Linear(2, 1, bias=False)
        nn.init.ones_(module.weight)
        sync = Rounds(
            "net", End(coordinator, rank), Plain(store, rank), TRAINERS, first=rank == 0,
            means=TWO_PHASE, codec_of=lambda name: "fp32",
        )  # fmt: skip
        sync.wrap(module, torch.optim.AdamW(module.parameters()), torch.device("cpu"))
        sync.begin(0)
        with torch.no_grad():
            module.weight[0, 0] = (2.0, torch.nan, 4.0)[rank]
        sync.after_step(1)
        found: list[float] = module.weight.detach().flatten().tolist()
        sync._part()
        return found

    assert in_threads(TRAINERS, run) == [[3.0, 1.0]] * TRAINERS
    assert [e.blamed for e in coordinator.log if isinstance(e, MeetingFailed)] == [1] * TRAINERS
    assert coordinator.takes == 0


@pytest.mark.parametrize("scales", [False, True])
def test_the_step_size_follows_from_the_steps_of_each(scales: bool) -> None:
    coordinator, store = Coordinator(100), HashStore()

    def run(rank: int) -> list[float]:
        module, sizes = nn.Linear(3, 2), []
        optimiser = torch.optim.AdamW(module.parameters(), lr=0.5)
        sync = Rounds(
            "net", End(coordinator, rank), Plain(store, rank), TRAINERS, first=rank == 0,
            means=TWO_PHASE, codec_of=lambda name: "fp32", scales=scales,
        )  # fmt: skip
        sync.wrap(module, optimiser, torch.device("cpu"))
        sync.begin(0)
        for _ in range(2):
            optimiser.param_groups[0]["lr"] = 0.5
            for parameter in module.parameters():
                parameter.grad = torch.ones_like(parameter)
            assert sync.update(optimiser) == pytest.approx(8**0.5)
            sizes.append(optimiser.param_groups[0]["lr"])
            sync.after_step((4, 2, 1)[rank])
            sync._report(Waiting)
            sync._rest()
        return sizes

    for sizes in in_threads(TRAINERS, run):
        expected = [3**0.5, 1.3472] if scales else [1, 1]
        assert sizes == pytest.approx([0.5 * factor for factor in expected], rel=1e-4)


@pytest.mark.parametrize("every", [0, 1])
def test_moments_are_averaged_on_demand(every: int) -> None:
    coordinator, store = Coordinator(100), HashStore()

    def run(rank: int) -> Tensor:
        module = nn.Linear(3, 2)
        optimiser = torch.optim.AdamW(module.parameters(), lr=0.5)
        sync = Rounds(
            "net", End(coordinator, rank), Plain(store, rank), TRAINERS, first=rank == 0,
            means=TWO_PHASE, codec_of=lambda name: "fp32", moments=every,
        )  # fmt: skip
        sync.wrap(module, optimiser, torch.device("cpu"))
        sync.begin(0)
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 0.01 * (rank + 1))
        sync.update(optimiser)
        sync.after_step(1)
        sync._report(Waiting)
        sync._rest()
        average: Tensor = optimiser.state[module.weight]["exp_avg"]
        return average

    found = in_threads(TRAINERS, run)
    for rank, moment in enumerate(found):
        expected = 0.001 * (2 if every else rank + 1)
        assert moment.flatten().tolist() == pytest.approx([expected] * 6)


def fit_in_rounds(
    coordinator: Coordinator,
    store: HashStore,
    rank: int,
    folder: Path,
    validate: Validate | None = None,
    **more: Any,
) -> tuple[Tensor, Curve]:
    """Weights and curve that one trainer ends with."""
    module = Net()
    sync = Rounds(
        "net", End(coordinator, rank), Plain(store, rank), TRAINERS, first=True,
        means=TWO_PHASE, codec_of=lambda name: "fp32",
    )  # fmt: skip
    training = stage(folder, sync=sync, **more)
    curve = fit(module, training, plain, Progress(io.StringIO()), validate=validate)
    return torch.cat([value.flatten() for value in module.state_dict().values()]), curve


def test_rounds_go_on_after_the_epochs_of_the_one_that_has_most(tmp_path: Path) -> None:
    for rank in range(TRAINERS):
        (tmp_path / str(rank)).mkdir()
    begun = Net()
    first = fit(begun, stage(tmp_path / "1", epochs=2), plain, Progress(io.StringIO()))
    batches = TRAINERS * -(-PICTURES // 8)
    schedule = LocalSgdSchedule("net", RoundLengths(8, batches, 4), expected=range(TRAINERS))
    coordinator, store = Coordinator(8, schedule=schedule), HashStore()

    def run(rank: int) -> tuple[Tensor, Curve]:
        return fit_in_rounds(coordinator, store, rank, tmp_path / str(rank))

    found = in_threads(TRAINERS, run)
    assert (schedule.epoch, schedule.ended) == (4, "net is trained")
    assert set(coordinator.counters) == {"cursor/net/2", "cursor/net/3"}
    for weights, _ in found[1:]:
        assert torch.equal(weights, found[0][0])
    before = [curve[:2] for _, curve in found]
    assert before == [[{}, {}], first, [{}, {}]]
    assert {len(curve) for _, curve in found} == {4}


def test_who_is_ahead_of_its_crew_neither_stops_nor_keeps_what_it_knows(tmp_path: Path) -> None:
    """The others have begun again from an earlier epoch; early stopping would end it at once."""
    for rank in range(TRAINERS):
        (tmp_path / str(rank)).mkdir()
    values = play_values([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    begun = stage(tmp_path / "2", epochs=6, patience=20)
    fit(Net(), begun, plain, Progress(io.StringIO()), validate=values)
    batches = TRAINERS * -(-PICTURES // 8)
    schedule = LocalSgdSchedule("net", RoundLengths(8, batches, 4), expected=range(2))
    coordinator, store = Coordinator(8, schedule=schedule), HashStore()

    def run(rank: int) -> tuple[Tensor, Curve]:
        if rank == 2:
            until(lambda: set(schedule._holders()) == {0, 1}, "the others have begun")
        falling = play_values([1.0, 0.9, 0.8, 0.7])
        return fit_in_rounds(
            coordinator, store, rank, tmp_path / str(rank), validate=falling, patience=3
        )

    found = in_threads(TRAINERS, run)
    assert (schedule.epoch, schedule.ended) == (4, "net is trained")
    for weights, curve in found:
        assert torch.equal(weights, found[0][0])
        assert len(curve) == 4


def test_losses_of_one_that_is_gone_are_not_waited_for() -> None:
    """It was killed after the mean: no number of it comes, and gloo says so at once."""
    store, over = HashStore(), threading.Barrier(2)

    def run(rank: int) -> bool | None:
        group: Any = Plain(store, rank).of("net", 1, (0, 1))
        if rank == 1:
            over.wait(20)
            del group
            gc.collect()
            over.wait(20)
            return None
        over.wait(20)
        over.wait(20)
        meeting = Meeting(group=group, members=(0, 1), weights=(1.0, 1.0), rank=0)
        result: Any = SimpleNamespace(meeting=meeting)
        return Rounds._receive(result, torch.zeros(3, dtype=torch.float64), 1)

    assert in_threads(2, run) == [False, None]


@pytest.mark.parametrize(("codec", "stride"), [("int8", 1), ("fp32", 3), ("top4", 3)])
def test_a_round_is_repeated_without_who_sent_what_is_no_number(
    codec: CodecName, stride: int
) -> None:
    coordinator, found = trained(codec, odd=2, stride=stride)
    failed = [event for event in coordinator.log if isinstance(event, MeetingFailed)]
    assert {event.blamed for event in failed} == {2}
    assert len(failed) == TRAINERS
    assert coordinator.schedule.ended == "net is trained"
    assert all(torch.equal(found[0], other) for other in found)
    assert bool(found[0].isfinite().all())


def test_the_second_time_ends_the_training() -> None:
    coordinator, found = trained("fp32", odd=2, odd_steps=2, every=2)
    assert coordinator.schedule.ended == "net: trainer 2 sent a number that is not finite"
    assert found == [coordinator.schedule.ended] * TRAINERS
