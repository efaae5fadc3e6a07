"""Frozen passes over mailboxes in memory: the files of one process, and who is refused."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, Queue
from typing import Any, TypeVar, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mdp.errors import InputError, MDPError  # noqa: E402
from partitioner.crew.bus.control import Coordinator, CoordinatorClient  # noqa: E402
from partitioner.crew.coordinator.leases import FIRST, LEASE_S  # noqa: E402
from partitioner.crew.jobs import answers  # noqa: E402
from partitioner.crew.jobs.answers import FrozenPass, Shares, contribute, lead_pass, share_out  # noqa: E402
from partitioner.crew.messages import (  # noqa: E402
    AnyPassOrder,
    AnyPassReport,
    Ask,
    Chunk,
    Compute,
    Decline,
    Offer,
    PassOver,
    Rows,
    State,
)
from partitioner.data.memmaps import Index, load  # noqa: E402
from partitioner.training.cached_outputs import BATCH, keep_outputs  # noqa: E402
from partitioner.training.largest_logits import Keep  # noqa: E402

pytestmark = pytest.mark.torch

T = TypeVar("T")
PICTURES, CLASSES = 3 * FIRST + 7, 5


class Wire:
    """The coordinator's mailbox and those of trainers, in memory."""

    def __init__(self) -> None:
        self.reports: Queue[AnyPassReport] = Queue()
        self.mailboxes: dict[int, Queue[AnyPassOrder]] = {}
        self.states: dict[int, State] = {}
        self.over: list[str] = []

    def read(self, timeout_s: float) -> AnyPassReport | None:
        return taken(self.reports, timeout_s)

    def post(self, order: AnyPassOrder) -> None:
        self.mailboxes[order.rank].put(order)

    def end_pass(self, work: str) -> None:
        self.over.append(work)
        for rank in self.states:
            self.post(PassOver(rank=rank, work=work))


class End:
    """A trainer's end of them."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank = wire, rank
        self.mailbox = wire.mailboxes.setdefault(rank, Queue())
        wire.states.setdefault(rank, State())

    def append(self, message: AnyPassReport) -> None:
        if isinstance(message, Offer) and message.work in self.wire.over:
            self.mailbox.put(PassOver(rank=self.rank, work=message.work))
        self.wire.reports.put(message)

    send = append

    def reply(self) -> AnyPassOrder:
        return self.mailbox.get()


def taken(waiting: Queue[T], timeout_s: float) -> T | None:
    try:
        return waiting.get(timeout=timeout_s)
    except Empty:
        return None


def coordinator_of(wire: Wire) -> Coordinator:
    return cast(Coordinator, wire)


def client_of(wire: Wire, rank: int) -> CoordinatorClient:
    return cast(CoordinatorClient, End(wire, rank))


def outputs_of(variant: int) -> Callable[[Index], Sequence[Tensor]]:
    """A network of two outputs: logits, and a map."""

    def of(index: Index) -> list[Tensor]:
        seen = torch.from_numpy(index).float()[:, None] + variant
        logits = torch.sin(seen * torch.arange(1, CLASSES + 1))
        return [logits, torch.cos(seen * torch.arange(6)).reshape(-1, 2, 3)]

    return of


def frozen(**changes: Any) -> FrozenPass:
    options: dict[str, Any] = {
        "name": "teacher",
        "pictures": PICTURES,
        "variants": [0, 1],
        "outputs_of": outputs_of,
        "outputs": ("logits", "map"),
        "arithmetic": "fp32",
        "networks": [0, 1],
    }
    return FrozenPass(**options | changes)


def paths(folder: Path) -> dict[int, list[Path]]:
    return {v: [folder / f"logits-{v}.npy", folder / f"map-{v}.npy"] for v in (0, 1)}


def shared(folder: Path, *works: FrozenPass) -> tuple[Shares, dict[int, Exception]]:
    """Share out the default pass of two networks; rank r computes `works[r]` in a thread."""
    wire, failed = Wire(), dict[int, Exception]()

    def run(rank: int, work: FrozenPass) -> None:
        try:
            contribute(client_of(wire, rank), work)
        except MDPError as error:
            failed[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank, work), daemon=True)
        for rank, work in enumerate(works)
    ]
    for rank in range(len(works)):
        End(wire, rank)
    for thread in threads:
        thread.start()
    found = share_out(coordinator_of(wire), frozen(), paths(folder), lambda more, said: None)
    for thread in threads:
        thread.join()
    return found, failed


def test_first_chunks_are_whole_batches() -> None:
    assert FIRST == BATCH


def test_the_files_are_those_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A chunk of rows takes several messages.
    monkeypatch.setattr(answers, "PIECE_BYTES", 1000)
    found, failed = shared(tmp_path / "shared", frozen(), frozen())
    assert not failed
    assert sum(found.pictures.values()) == 2 * PICTURES
    assert found.row_bytes >= 2 * PICTURES * 2 * (CLASSES + 6)
    assert found.unequal == 0
    for variant, two in paths(tmp_path / "alone").items():
        keep_outputs(
            two,
            outputs_of(variant),
            PICTURES,
            arithmetic="fp32",
            dtype=np.float16,
            advance=lambda more, said: None,
        )
        for alone, together in zip(two, paths(tmp_path / "shared")[variant], strict=True):
            assert alone.read_bytes() == together.read_bytes()


def test_the_largest_logits_alone_travel(tmp_path: Path) -> None:
    work = frozen(
        outputs=("logits",), outputs_of=lambda v: lambda i: outputs_of(v)(i)[:1], keep=Keep(2)
    )
    wire = Wire()
    End(wire, 0)
    thread = threading.Thread(target=contribute, args=(client_of(wire, 0), work), daemon=True)
    thread.start()
    kept = {v: [tmp_path / f"{v}.npy"] for v in (0, 1)}
    found = share_out(coordinator_of(wire), work, kept, lambda more, said: None)
    thread.join()
    assert found.row_bytes == 2 * PICTURES * (4 * 2 + 2)
    for variant, (path,) in kept.items():
        keep_outputs(
            [tmp_path / "alone.npy"], work.outputs_of(variant), PICTURES,
            arithmetic="fp32", dtype=np.float16, advance=lambda more, said: None, keep=Keep(2),
        )  # fmt: skip
        assert path.read_bytes() == (tmp_path / "alone.npy").read_bytes()


def other_weights(variant: int) -> Callable[[Index], Sequence[Tensor]]:
    return lambda index: [1.001 * output for output in outputs_of(variant)(index)]


def other_second(variant: int) -> Callable[[Index], Sequence[Tensor]]:
    return other_weights(variant) if variant == 1 else outputs_of(variant)


def not_finite(variant: int) -> Callable[[Index], Sequence[Tensor]]:
    def of(index: Index) -> list[Tensor]:
        found = outputs_of(variant)(index)
        # The first pictures, which are compared, are right.
        return [output / 0 if len(index) > 16 else output for output in found]

    return of


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"outputs_of": other_weights}, "expected the same pictures, weights and version"),
        ({"outputs_of": other_second}, "expected the same pictures, weights and version"),
        ({"arithmetic": "bf16"}, "computes in bf16, the coordinator in fp32"),
        ({"outputs": ("logits",), "outputs_of": lambda v: lambda i: outputs_of(v)(i)[:1]},
         "bytes of outputs to compare"),
    ],
)  # fmt: skip
def test_a_trainer_with_other_outputs_takes_no_part(
    tmp_path: Path, odd: dict[str, Any], reason: str
) -> None:
    found, failed = shared(tmp_path, frozen(), frozen(**odd))
    assert reason in str(failed[1])
    assert reason in found.refused[1]
    assert found.pictures == {0: 2 * PICTURES}


def test_outputs_that_are_not_finite_end_the_pass(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="logits: expected finite answers"):
        shared(tmp_path, frozen(outputs_of=not_finite))
    assert not list(tmp_path.rglob("*"))


def test_rows_that_were_not_asked_for_are_refused(tmp_path: Path) -> None:
    wire, work = Wire(), frozen()
    stranger, chunk = End(wire, 1), Chunk(0, 0, FIRST)
    reference = b"".join(one.tobytes() for one in work.reference())
    known: dict[str, Any] = {"work": "teacher", "rank": 1}
    stranger.append(Offer(**known, arithmetic="fp32", reference=reference))
    data = bytes(FIRST * 2 * (CLASSES + 6))
    stranger.append(Rows(**known, chunk=chunk, part=0, parts=1, took_s=1.0, data=data))
    thread = threading.Thread(target=contribute, args=(client_of(wire, 0), work), daemon=True)
    thread.start()
    found = share_out(coordinator_of(wire), work, paths(tmp_path), lambda more, said: None)
    thread.join()
    assert "expected a chunk that was given out" in found.refused[1]
    assert found.pictures == {0: 2 * PICTURES}


def test_a_trainer_that_comes_too_late_has_nothing_to_do(tmp_path: Path) -> None:
    wire = Wire()
    wire.end_pass("teacher")
    assert contribute(client_of(wire, 0), frozen()) == 0


def test_messages_of_an_earlier_pass_are_passed_over(tmp_path: Path) -> None:
    wire = Wire()
    End(wire, 0).append(Ask(work="earlier", rank=0))
    End(wire, 0).mailbox.put(Decline(rank=0, work="earlier", reason=""))
    thread = threading.Thread(target=contribute, args=(client_of(wire, 0), frozen()), daemon=True)
    thread.start()
    share_out(coordinator_of(wire), frozen(), paths(tmp_path), lambda more, said: None)
    thread.join()
    assert load(paths(tmp_path)[1][1]).shape == (PICTURES, 2, 3)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("partitioner.data.memmaps.os.posix_fallocate", full)
    with pytest.raises(InputError, match="No space left on device"):
        shared(tmp_path, frozen())
    assert not list(tmp_path.rglob("*"))


def test_the_coordinator_does_not_wait_for_its_own_part_that_has_failed(tmp_path: Path) -> None:
    class Broken(End):
        def append(self, message: AnyPassReport) -> None:
            raise RuntimeError("out of memory")

    wire = Wire()
    own = cast(CoordinatorClient, Broken(wire, 0))
    with pytest.raises(RuntimeError, match="out of memory"):
        lead_pass(coordinator_of(wire), own, frozen(), paths(tmp_path), lambda more, said: None)
    assert wire.over == ["teacher"]
    assert list(tmp_path.iterdir()) == []


class Absent(Wire):
    """Beside trainer 1, trainer 0 takes a chunk, after which its states are those of `said`."""

    def __init__(self, *said: State | None) -> None:
        super().__init__()
        self.said, self.now_s, self.given = list(said), 0.0, list[Chunk]()
        End(self, 0).append(offer(0))
        End(self, 0).append(Ask(rank=0, work="teacher"))
        End(self, 1).append(offer(1))

    def read(self, timeout_s: float) -> AnyPassReport | None:
        if not self.reports.empty():
            return self.reports.get()
        if self.said:
            self.now_s += 0.9 * LEASE_S
            state = self.said.pop(0)
            if state is None:
                del self.states[0]
            else:
                self.states[0] = state
            return Ask(rank=1, work="teacher") if not self.said else None
        raise InputError("all was said")

    def post(self, order: AnyPassOrder) -> None:
        if isinstance(order, Compute):
            self.given.append(order.chunk)
        super().post(order)


def test_half_of_the_rows_of_a_lost_trainer_are_not_kept(tmp_path: Path) -> None:
    wire = Wire()
    with ExitStack() as stack:
        coordinator = answers._PassCoordinator(
            coordinator_of(wire),
            frozen(),
            paths(tmp_path),
            lambda more, said: None,
            lambda: 0.0,
            stack,
        )
        End(wire, 0)
        coordinator.look(offer(0))
        coordinator.look(Ask(rank=0, work="teacher"))
        order = wire.mailboxes[0].get()
        assert isinstance(order, Compute)
        coordinator.look(
            Rows(
                rank=0, work="teacher", chunk=order.chunk, part=0, parts=2, took_s=1.0, data=b"1"
            )
        )  # fmt: skip
        assert coordinator._pieces
        del wire.states[0]
        coordinator.look(None)
        assert not coordinator._pieces


def offer(rank: int) -> Offer:
    reference = b"".join(one.tobytes() for one in frozen().reference())
    return Offer(rank=rank, work="teacher", arithmetic="fp32", reference=reference)


@pytest.mark.parametrize(
    ("said", "again"),
    [
        ((None,), True),  # it is lost
        ((State(), State()), True),  # it lives, and computes nothing
        ((State(pictures=FIRST), State(pictures=2 * FIRST)), False),
    ],
)
def test_a_chunk_is_given_again_if_its_trainer_is_lost_or_computes_nothing(
    tmp_path: Path, said: tuple[State | None, ...], again: bool
) -> None:
    wire, work = Absent(*said), frozen(pictures=FIRST, variants=[0])
    with pytest.raises(InputError, match="all was said"):
        share_out(
            coordinator_of(wire), work, paths(tmp_path), lambda more, said: None,
            clock=lambda: wire.now_s,
        )  # fmt: skip
    assert wire.given == [Chunk(0, 0, FIRST)] * (1 + again)
