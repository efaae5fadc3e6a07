"""Frozen passes over an in-memory log: the files of one process, and who is refused."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mdp.errors import InputError, MDPError  # noqa: E402
from partitioner.crew.exchange import answers  # noqa: E402
from partitioner.crew.exchange.answers import FrozenPass, Shares, contribute, share_out, shared_out  # noqa: E402
from partitioner.crew.exchange.lease_messages import Ask, Offer, Refuse, Rows, encode  # noqa: E402
from partitioner.crew.machine.leases import FIRST, Chunk  # noqa: E402
from partitioner.data.memmaps import Index, load  # noqa: E402
from partitioner.training.cached_outputs import BATCH, keep_outputs  # noqa: E402

pytestmark = pytest.mark.torch

PICTURES, CLASSES = 3 * FIRST + 7, 5


class Wire:
    """Log and mailboxes in memory."""

    def __init__(self) -> None:
        self.log: Queue[bytes] = Queue()
        self.mailboxes: dict[int, Queue[bytes]] = {}
        self.over: list[str] = []

    def read(self, timeout_s: float) -> bytes | None:
        return taken(self.log, timeout_s)

    def post(self, rank: int, message: bytes) -> None:
        self.mailboxes[rank].put(message)

    def close(self, work: str) -> None:
        self.over.append(work)


class End:
    """A trainer's end of it."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank = wire, rank
        self.mailbox = wire.mailboxes.setdefault(rank, Queue())

    def append(self, message: bytes) -> None:
        self.wire.log.put(message)

    def next(self, timeout_s: float) -> bytes | None:
        return taken(self.mailbox, timeout_s)

    def closed(self, work: str) -> bool:
        return work in self.wire.over


def taken(waiting: Queue[bytes], timeout_s: float) -> bytes | None:
    try:
        return waiting.get(timeout=timeout_s)
    except Empty:
        return None


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
            contribute(End(wire, rank), End(wire, rank), work)
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
    found = share_out(wire, frozen(), paths(folder), lambda more, said: None)
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
    assert found.received_bytes > found.row_bytes
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
        ({"arithmetic": "bf16"}, "computes in bf16, the desk in fp32"),
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
    stranger.append(encode(Offer(**known, arithmetic="fp32", reference=reference)))
    data = bytes(FIRST * 2 * (CLASSES + 6))
    stranger.append(encode(Rows(**known, chunk=chunk, part=0, parts=1, took_s=1.0, data=data)))
    end = End(wire, 0)
    thread = threading.Thread(target=contribute, args=(end, End(wire, 0), work), daemon=True)
    thread.start()
    found = share_out(wire, work, paths(tmp_path), lambda more, said: None)
    thread.join()
    assert "expected a chunk that was given out" in found.refused[1]
    assert found.pictures == {0: 2 * PICTURES}


def test_a_trainer_that_comes_too_late_has_nothing_to_do(tmp_path: Path) -> None:
    wire = Wire()
    wire.close("teacher")
    assert contribute(End(wire, 0), End(wire, 0), frozen()) == 0


def test_messages_of_an_earlier_pass_are_passed_over(tmp_path: Path) -> None:
    wire = Wire()
    End(wire, 0).append(encode(Ask(work="earlier", rank=0)))
    End(wire, 0).mailbox.put(encode(Refuse(work="earlier", reason="")))
    thread = threading.Thread(
        target=contribute, args=(End(wire, 0), End(wire, 0), frozen()), daemon=True
    )
    thread.start()
    share_out(wire, frozen(), paths(tmp_path), lambda more, said: None)
    thread.join()
    assert load(paths(tmp_path)[1][1]).shape == (PICTURES, 2, 3)


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("partitioner.data.memmaps.os.posix_fallocate", full)
    with pytest.raises(InputError, match="No space left on device"):
        shared(tmp_path, frozen())
    assert not list(tmp_path.rglob("*"))


def test_the_desk_does_not_wait_for_its_own_part_that_has_failed(tmp_path: Path) -> None:
    class Broken(End):
        def append(self, message: bytes) -> None:
            raise RuntimeError("out of memory")

    wire = Wire()
    end = Broken(wire, 0)
    with pytest.raises(RuntimeError, match="out of memory"):
        shared_out(wire, end, end, frozen(), paths(tmp_path), lambda more, said: None)
    assert wire.over == ["teacher"]
    assert list(tmp_path.iterdir()) == []
