"""Outputs of frozen networks, computed by several trainers and written by the coordinator.

A teacher's answers, sub-models' outputs and evaluations need no other trainer: each computes the
chunks that `Leases` gives it and sends the rows, 2 bytes a number. What reaches the coordinator's
disk are the files of one process, whole or not at all. A trainer may come, leave or be killed at
any moment.
"""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mdp.errors import InputError, MDPError
from partitioner.crew.bus.control import Coordinator, CoordinatorClient
from partitioner.crew.bus.files import PIECE_BYTES
from partitioner.crew.coordinator.leases import Leases
from partitioner.crew.messages import (
    AnyPassOrder,
    AnyPassReport,
    Ask,
    Broken,
    Chunk,
    Compute,
    Decline,
    Offer,
    PassOrder,
    Rank,
    Rows,
)
from partitioner.data.memmaps import Array, Index, new_array
from partitioner.run.progress import Advance
from partitioner.run.settings import Autocast
from partitioner.training.cached_outputs import BATCH, finite_rows
from partitioner.training.largest_logits import Keep

#: Pictures whose outputs every trainer shows before it takes part, and their largest difference
#: from the coordinator's, relative to the largest output.
REFERENCES = 16
TOLERANCE: Mapping[Autocast, float] = {"fp32": 1e-5, "bf16": 1e-2}
#: Seconds between two looks at leases, where nothing arrives.
LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class FrozenPass:
    """Outputs of frozen networks for all pictures of a split; the same on every trainer."""

    #: Names networks, pictures and variants: the digest that names the file, for example.
    name: str
    pictures: int
    #: Variants in the order in which they are needed.
    variants: Sequence[int]
    #: Variant -> function from pictures `[B]` to outputs, each `[B, ...]`.
    outputs_of: Callable[[int], Callable[[Index], Sequence[Tensor]]]
    #: What each output is, in messages.
    outputs: Sequence[str]
    arithmetic: Autocast
    dtype: type[np.floating] = np.float16
    #: Variants that are of a network each, whose first outputs are compared.
    networks: Sequence[int] = (0,)
    #: Instead of outputs `[B, C]` the largest alone, as rows of `largest`.
    keep: Keep | None = None

    def form(self, output: Array) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """Type and shape in which one picture's row of an output `[n, ...]` is sent and kept."""
        if self.keep is not None:
            return np.dtype(np.uint16), (self.keep.numbers,)
        return np.dtype(self.dtype), output.shape[1:]

    def rows(self, chunk: Chunk) -> list[NDArray[Any]]:
        """Rows of a chunk, each `[n, ...]`; raises InputError where they are not finite."""
        of_batch = self.outputs_of(chunk.variant)
        found: list[list[NDArray[Any]]] = [[] for _ in self.outputs]
        for start in range(chunk.start, chunk.stop, BATCH):
            index = np.arange(start, min(start + BATCH, chunk.stop))
            rows = self._rows(of_batch, index, self.dtype, self.keep)
            for parts, part in zip(found, rows, strict=True):
                parts.append(part)
        return [np.concatenate(parts) for parts in found]

    def reference(self) -> list[Array]:
        """Outputs of the first pictures of every network in float32, each `[n, ...]`."""
        index = np.arange(min(REFERENCES, self.pictures))
        of_all = [self._rows(self.outputs_of(v), index, np.float32) for v in self.networks]
        return [np.concatenate(one) for one in zip(*of_all, strict=True)]

    def _rows(
        self,
        of_batch: Callable[[Index], Sequence[Tensor]],
        index: Index,
        dtype: type[np.floating],
        keep: Keep | None = None,
    ) -> list[NDArray[Any]]:
        return finite_rows(
            self.outputs, of_batch, index, arithmetic=self.arithmetic, dtype=dtype, keep=keep
        )


@dataclass(slots=True)
class Shares:
    """The shares of a frozen pass that trainers did."""

    #: Rank -> pictures whose result counted.
    pictures: dict[int, int] = field(default_factory=dict)
    #: Bytes of rows that arrived.
    row_bytes: int = 0
    #: Results of chunks that had one already, and those that differed from it.
    repeated: int = 0
    unequal: int = 0
    #: Rank -> why it took no part.
    refused: dict[int, str] = field(default_factory=dict)


class OutputsRefused(MDPError):
    """The coordinator takes no outputs of this trainer."""


def lead_pass(
    end: Coordinator,
    own: CoordinatorClient,
    work: FrozenPass,
    paths: Mapping[int, Sequence[Path]],
    advance: Advance,
) -> Shares:
    """`share_out` at a coordinator that takes part, in another thread by its trainer's end `own`.

    Raises what that thread raises, too.
    """
    with ThreadPoolExecutor(1, "answers") as pool:
        part = pool.submit(contribute, own, work)
        found = share_out(end, work, paths, advance, look=lambda: part.done() and part.result())
        part.result()
    return found


def share_out(
    end: Coordinator,
    work: FrozenPass,
    paths: Mapping[int, Sequence[Path]],
    advance: Advance,
    *,
    look: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> Shares:
    """Let trainers compute `work`, and write `paths`, a file per output, for each variant.

    The files of a variant appear when all of it is there. `look` is called now and then, and may
    raise. Raises InputError for a full disk, and for outputs that are not finite.
    """
    try:
        with ExitStack() as stack:
            coordinator = _PassCoordinator(end, work, paths, advance, clock, stack)
            while not coordinator.leases.is_done:
                look()
                coordinator.look(end.read(LOOK_S))
    finally:
        end.end_pass(work.name)
    coordinator.shares.repeated = coordinator.leases.repeated
    coordinator.shares.unequal = coordinator.leases.unequal
    return coordinator.shares


class _Files(NamedTuple):
    """The unfinished files of one variant."""

    stack: ExitStack
    arrays: list[NDArray[Any]]


class _PassCoordinator:
    def __init__(
        self,
        end: Coordinator,
        work: FrozenPass,
        paths: Mapping[int, Sequence[Path]],
        advance: Advance,
        clock: Callable[[], float],
        stack: ExitStack,
    ) -> None:
        self._coordinator, self._work, self._paths, self._advance = end, work, paths, advance
        self._clock, self._stack = clock, stack
        self.leases, self.shares = Leases(work.variants, work.pictures), Shares()
        self._reference = work.reference()
        self._row_bytes = [
            dtype.itemsize * int(np.prod(shape)) for dtype, shape in map(work.form, self._reference)
        ]
        self._files: dict[int, _Files] = {}
        self._left = dict.fromkeys(work.variants, work.pictures)
        self._pieces: dict[tuple[int, Chunk], dict[int, bytes]] = {}
        #: Trainers that take part, and the pictures that each had computed at the last look.
        self._crew: dict[Rank, float] = {}
        #: Trainers that asked and got nothing yet.
        self._free: list[Rank] = []

    def look(self, report: AnyPassReport | None) -> None:
        """Take a trainer's word, if any, look who computes still, and give out what there is."""
        # Others are left from an earlier pass.
        if report is not None and report.work == self._work.name:
            self._handle(report)
        states = self._coordinator.states
        for rank, pictures in list(self._crew.items()):
            if rank not in states:
                self._drop(rank)
            elif states[rank].pictures != pictures:
                self._crew[rank] = states[rank].pictures
                self.leases.renew(rank, self._clock())
        for rank in list(self._free):
            chunk = self.leases.take(rank, self._clock())
            if chunk is not None:
                self._free.remove(rank)
                self._coordinator.post(Compute(rank=rank, work=self._work.name, chunk=chunk))

    def _handle(self, report: AnyPassReport) -> None:
        rank = report.rank
        if isinstance(report, Offer):
            self._crew[rank] = 0.0
            reason = self._doubt(report)
            if reason:
                self._refuse(rank, reason)
        elif rank not in self._crew:
            return
        elif isinstance(report, Ask):
            self._free.append(rank)
        elif isinstance(report, Rows):
            self._rows(report)
        else:
            # Its arithmetic and its first outputs are the coordinator's.
            raise InputError(report.reason)

    def _drop(self, rank: Rank) -> None:
        del self._crew[rank]
        self._free = [one for one in self._free if one != rank]
        self._pieces = {key: parts for key, parts in self._pieces.items() if key[0] != rank}
        self.leases.drop(rank)

    def _refuse(self, rank: Rank, reason: str) -> None:
        self.shares.refused[rank] = reason
        self._drop(rank)
        self._coordinator.post(Decline(rank=rank, work=self._work.name, reason=reason))

    def _doubt(self, offer: Offer) -> str:
        """The reason that a trainer's outputs are not the coordinator's; empty if they are."""
        if offer.arithmetic != self._work.arithmetic:
            return f"computes in {offer.arithmetic}, the coordinator in {self._work.arithmetic}"
        own = np.concatenate([one.ravel() for one in self._reference])
        if len(offer.reference) != own.nbytes:
            return f"expected {own.nbytes} bytes of outputs to compare, got {len(offer.reference)}"
        difference = np.abs(np.frombuffer(offer.reference, np.float32) - own).max(initial=0.0)
        most = TOLERANCE[offer.arithmetic] * float(np.abs(own).max(initial=0.0))
        if difference <= most:  # which a NaN is not
            return ""
        return (
            f"its outputs for {REFERENCES} pictures differ by {difference:.2g} from the "
            f"coordinator's, expected at most {most:.2g}: expected the same pictures, weights and "
            "version"
        )

    def _rows(self, event: Rows) -> None:
        """Keep one piece; the last one completes the chunk."""
        self.shares.row_bytes += len(event.data)
        self.leases.renew(event.rank, self._clock())
        pieces = self._pieces.setdefault((event.rank, event.chunk), {})
        pieces[event.part] = event.data
        if len(pieces) < event.parts:
            return
        del self._pieces[event.rank, event.chunk]
        data, chunk = b"".join(pieces[part] for part in sorted(pieces)), event.chunk
        if len(data) != len(chunk) * sum(self._row_bytes):
            self._refuse(event.rank, f"sent {len(data)} bytes for {len(chunk)} pictures")
            return
        digest = hashlib.sha256(data).digest()
        try:
            counts = self.leases.finish(event.rank, chunk, event.took_s, digest)
        except ValueError as error:
            self._refuse(event.rank, str(error))
            return
        if counts:
            self._write(chunk, data)
            done = self.shares.pictures
            done[event.rank] = done.get(event.rank, 0) + len(chunk)
            self._advance(len(chunk), f"{len(done)} trainers")

    def _write(self, chunk: Chunk, data: bytes) -> None:
        files = self._files.get(chunk.variant) or self._open(chunk.variant)
        at = 0
        for array, row_bytes in zip(files.arrays, self._row_bytes, strict=True):
            part = data[at : (at := at + len(chunk) * row_bytes)]
            values = np.frombuffer(part, array.dtype).reshape(len(chunk), *array.shape[1:])
            array[chunk.start : chunk.stop] = values
        self._left[chunk.variant] -= len(chunk)
        if not self._left[chunk.variant]:
            del self._files[chunk.variant]
            files.stack.close()

    def _open(self, variant: int) -> _Files:
        # An error in the outer stack's block reaches the files, which then vanish.
        stack = self._stack.enter_context(ExitStack())
        forms = map(self._work.form, self._reference)
        arrays = [
            stack.enter_context(new_array(path, dtype, (self._work.pictures, *shape)))
            for path, (dtype, shape) in zip(self._paths[variant], forms, strict=True)
        ]
        self._files[variant] = _Files(stack, arrays)
        return self._files[variant]


def contribute(
    end: CoordinatorClient, work: FrozenPass, *, clock: Callable[[], float] = time.monotonic
) -> int:
    """Compute chunks of `work` until the coordinator says that none is left; returns how many.

    Rows travel while the next chunk is asked for and computed. Raises OutputsRefused where the
    coordinator takes no outputs of this trainer, and InputError where they are not finite.
    """
    name, rank = work.name, end.rank
    reference = b"".join(one.tobytes() for one in work.reference())
    end.append(Offer(work=name, rank=rank, arithmetic=work.arithmetic, reference=reference))
    count = 0
    while True:
        end.append(Ask(work=name, rank=rank))
        order = _next_order(end, name)
        if not isinstance(order, Compute):
            break
        started_s, chunk = clock(), order.chunk
        try:
            rows = work.rows(chunk)
        except InputError as error:
            end.append(Broken(work=name, rank=rank, reason=str(error)))
            raise
        data, took_s = b"".join(one.tobytes() for one in rows), clock() - started_s
        parts = -(-len(data) // PIECE_BYTES)
        for part in range(parts):
            piece = data[part * PIECE_BYTES : (part + 1) * PIECE_BYTES]
            end.send(
                Rows(
                    work=name, rank=rank, chunk=chunk, part=part, parts=parts, took_s=took_s,
                    data=piece,
                )
            )  # fmt: skip
        count += 1
    if isinstance(order, Decline):
        raise OutputsRefused(f"the coordinator takes no outputs of this trainer: {order.reason}")
    return count


def _next_order(end: CoordinatorClient, work: str) -> AnyPassOrder:
    """The coordinator's answer to a question."""
    while True:
        order = end.reply()
        # Others are left from an earlier pass.
        if isinstance(order, PassOrder) and order.work == work:
            return order
