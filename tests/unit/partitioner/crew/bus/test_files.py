"""Files of a run, handed from disk to disk by messages in memory."""

import tracemalloc
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

pytest.importorskip("torch")

from mdp.errors import TransferError
from mdp.formats.bundle import sha256_of
from partitioner.crew.bus import files as files_module
from partitioner.crew.bus.control import CoordinatorClient
from partitioner.crew.bus.files import CoordinatorFiles, TrainerFiles
from partitioner.crew.messages import AnyFileMessage, FileHead, NoFile, Piece, PieceQuery

pytestmark = pytest.mark.torch

PIECE = 100_000


class Wire:
    """The coordinator's answers, by trainer; its files answer in the caller's thread."""

    def __init__(self, folder: Path, digest_of: Callable[[str], str] = lambda name: "") -> None:
        self.answers: dict[int, deque[AnyFileMessage]] = {}
        self.files = CoordinatorFiles(folder, self.post, digest_of)

    def post(self, message: AnyFileMessage) -> None:
        self.answers[message.rank].append(message)

    def trainer(self, rank: int) -> "TrainerFiles":
        return TrainerFiles(cast(CoordinatorClient, End(self, rank)))


class End:
    """A trainer's end."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank, self.bytes_sent = wire, rank, 0
        self.answers = wire.answers.setdefault(rank, deque())

    def append(self, message: AnyFileMessage) -> None:
        self.wire.files.handle(message)

    send = append

    def reply(self) -> AnyFileMessage:
        return self.answers.popleft()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files_module, "PIECE_BYTES", PIECE)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of 50 pieces, and a short one."""
    path = tmp_path / "source"
    with path.open("wb") as file:
        for number in range(50):
            file.write(bytes([number]) * PIECE)
        file.write(b"end")
    return path


def test_no_more_than_a_few_pieces_are_in_memory(tmp_path: Path, source: Path) -> None:
    """Neither while a file is handed in and fetched nor after that."""
    wire = Wire(tmp_path / "files")
    trainers = [wire.trainer(rank) for rank in range(4)]
    tracemalloc.start()
    try:
        trainers[0].send("handed in", source)
        wire.files.send("the coordinator's", source)
        after_bytes, _ = tracemalloc.get_traced_memory()
        for name in ("handed in", "the coordinator's"):
            for rank, trainer in enumerate(trainers):
                assert trainer.fetch(name, tmp_path / f"{name}-{rank}")
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after_bytes < PIECE
    assert most_bytes < 4 * PIECE + 1_000_000 < source.stat().st_size / 3
    for rank in range(4):
        assert sha256_of(tmp_path / f"handed in-{rank}") == sha256_of(source)
    assert [path.stat().st_size for path in (tmp_path / "files").iterdir()] == [50 * PIECE + 3]


def test_the_first_file_that_is_whole_counts(tmp_path: Path) -> None:
    wire = Wire(tmp_path / "files")
    files, one, two = wire.files, tmp_path / "one", tmp_path / "two"
    one.write_bytes(bytes(PIECE + 1))
    two.write_bytes(b"two")
    for rank in (0, 1):
        wire.trainer(rank)
    head = FileHead(rank=0, name="member-0", bytes=PIECE + 1, sha256=sha256_of(one))
    files.handle(head)
    files.handle(Piece(rank=0, name="member-0", number=0, data=bytes(PIECE)))
    assert wire.trainer(1).send("member-0", two) == sha256_of(two)
    files.handle(Piece(rank=0, name="member-0", number=1, data=b"\0"))
    assert [type(message) for message in wire.answers[0]] == [PieceQuery, PieceQuery, FileHead]
    assert wire.answers[0][-1].sha256 == sha256_of(two)  # type: ignore[union-attr]
    # Nothing is asked for once there is one.
    files.handle(head)
    assert isinstance(wire.answers[0][-1], FileHead)
    assert len(list((tmp_path / "files").iterdir())) == 1
    # Nobody hands this in any more.
    files.handle(Piece(rank=0, name="member-0", number=0, data=b"late"))
    assert len(wire.answers[0]) == 4


@pytest.mark.parametrize("data", [b"", b"others"])
def test_a_file_that_changes_while_it_is_handed_in_is_not_kept(tmp_path: Path, data: bytes) -> None:
    wire = Wire(tmp_path / "files")
    wire.trainer(0)
    wire.files.handle(FileHead(rank=0, name="member-0", bytes=6, sha256="0" * 64))
    wire.files.handle(Piece(rank=0, name="member-0", number=0, data=data))
    assert wire.answers[0][-1] == NoFile(rank=0, name="member-0", reason="it has changed meanwhile")
    assert not wire.files.has("member-0")
    assert not list((tmp_path / "files").iterdir())


def test_the_coordinator_takes_the_file_that_its_trainer_has_told_of(tmp_path: Path) -> None:
    source, got = tmp_path / "source", tmp_path / "got"
    source.write_bytes(b"weights")
    wire = Wire(tmp_path / "files", lambda name: "0" * 64)
    digest = wire.trainer(0).send("member-1", source)
    with pytest.raises(TransferError, match="got: expected the file that its trainer has told of"):
        wire.files.fetch("member-1", got)
    assert not got.exists()
    wire = Wire(tmp_path / "files", {"member-1": digest}.__getitem__)
    wire.trainer(0).send("member-1", source)
    assert wire.files.fetch("member-1", got)


def test_a_disk_of_the_coordinator_that_cannot_be_read_ends_the_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"weights")
    wire = Wire(tmp_path / "files")

    def damaged(path: Path) -> str:
        if path != source:
            raise OSError(5, "Input/output error")
        return sha256_of(path)

    monkeypatch.setattr(files_module, "sha256_of", damaged)
    with pytest.raises(
        TransferError, match=r"the coordinator cannot keep it: .*Input/output error"
    ):
        wire.trainer(0).send("member-0", source)
    monkeypatch.undo()
    assert wire.trainer(0).send("member-0", source) == sha256_of(source)
