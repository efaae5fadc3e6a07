"""Rollouts to boards that refuse, or switch and cannot say so: no fleet serves two bundles."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mdp.errors import InputError, TransferError
from mdp.formats.bundle import Bundle
from mdp.formats.device_part import Version, version_of
from mdp.teach import rollout
from mdp.teach.rollout import FleetRollout
from mdp.testing.bundles import DEVICES, write_bundle

OLD, OLDER = (Version(name="old", digest=d * 64, manifest=d * 64) for d in "ab")


class PlayedBoard:
    """The bundles of one agent, the served one first."""

    def __init__(self, name: str, *versions: Version) -> None:
        self.name, self.versions = name, [*versions]
        #: Whether a switch is refused, or made and its answer lost; and whether nobody is there.
        self.refuses = self.loses_answer = self.away = False

    def __enter__(self) -> "PlayedBoard":
        if self.away:
            raise TransferError(f"{self.name}: no connection for 1 s")
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def state(self) -> Any:
        return SimpleNamespace(serves=self.versions[0], previous=self.versions[1])

    def push(self, bundle: Bundle, progress: Callable[[int, int], None]) -> None:
        progress(1, 1)
        self._switch([version_of(bundle), *self.versions])

    def rollback(self) -> None:
        self._switch([self.versions[1], self.versions[0], *self.versions[2:]])

    def _switch(self, versions: list[Version]) -> None:
        if self.refuses:
            raise TransferError(f"{self.name}: serves what it did before: no memory")
        self.versions = versions
        if self.loses_answer:
            self.loses_answer = False
            raise TransferError(f"{self.name}: no answer for 1 s")


class PlayedFleet:
    """A fleet of boards, and what its file names."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.boards = {name: PlayedBoard(name, OLD, OLDER) for name in DEVICES}
        self.named: list[str] = []
        self.unwritable = False
        fleet: Any = SimpleNamespace(
            devices=[SimpleNamespace(device=name, plan_device=name) for name in DEVICES]
        )
        self.rollout = FleetRollout(folder / "fleet.toml", None)
        monkeypatch.setattr(self.rollout, "_fleet", lambda: fleet)
        monkeypatch.setattr(
            self.rollout, "_connect", lambda fleet, entry: self.boards[entry.device]
        )
        monkeypatch.setattr(rollout, "name_bundle", lambda path, bundle: self._name(bundle))

    def _name(self, bundle: Any) -> Any:
        def write() -> None:
            if self.unwritable:
                raise InputError("fleet.toml: cannot be written: No space left on device")
            self.named.append(bundle.digest)

        return SimpleNamespace(write=write)

    @property
    def served(self) -> set[Version]:
        return {board.versions[0] for board in self.boards.values()}


@pytest.fixture
def boards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlayedFleet:
    return PlayedFleet(tmp_path, monkeypatch)


def nothing(device: str, share: float) -> None:
    """Show no progress."""


def test_all_boards_get_a_bundle(boards: PlayedFleet, tmp_path: Path) -> None:
    folder, shares = write_bundle(tmp_path / "new"), dict[str, float]()
    assert boards.rollout.push(folder, shares.__setitem__) == list(DEVICES)
    new = version_of(Bundle.open(folder))
    assert boards.served == {new}
    assert boards.named == [new.digest]
    assert shares == dict.fromkeys(DEVICES, 1.0)


@pytest.mark.parametrize("fault", ["refuses", "loses_answer"])
def test_a_push_that_one_board_does_not_take_changes_nothing(
    boards: PlayedFleet, tmp_path: Path, fault: str
) -> None:
    setattr(boards.boards[DEVICES[1]], fault, True)
    with pytest.raises(TransferError, match=r"^beta: [a-z ]+(before: no memory|for 1 s)$"):
        boards.rollout.push(write_bundle(tmp_path / "new"), nothing)
    assert boards.served == {OLD}
    assert boards.named == []


def test_a_push_with_a_fleet_file_that_cannot_be_written_changes_nothing(
    boards: PlayedFleet, tmp_path: Path
) -> None:
    boards.unwritable = True
    with pytest.raises(TransferError, match=r"No space left on device$"):
        boards.rollout.push(write_bundle(tmp_path / "new"), nothing)
    assert boards.served == {OLD}


def test_boards_that_cannot_go_back_are_named(boards: PlayedFleet, tmp_path: Path) -> None:
    first, last = boards.boards[DEVICES[0]], boards.boards[DEVICES[2]]

    def leave(device: str, share: float) -> None:
        if device == last.name:
            first.away = last.away = True

    with pytest.raises(TransferError, match=r"could not go back: alpha$"):
        boards.rollout.push(write_bundle(tmp_path / "new"), leave)
    assert boards.boards[DEVICES[1]].versions[0] == OLD


@pytest.mark.parametrize("fault", ["", "refuses", "loses_answer"])
def test_all_boards_go_back_or_none(
    boards: PlayedFleet, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(
        boards.rollout, "_find", lambda version, folders: SimpleNamespace(digest=version.digest)
    )
    if not fault:
        assert boards.rollout.roll_back([], nothing) == OLDER
        assert (boards.served, boards.named) == ({OLDER}, [OLDER.digest])
        return
    setattr(boards.boards[DEVICES[2]], fault, True)
    with pytest.raises(TransferError, match=r"^gamma: "):
        boards.rollout.roll_back([], nothing)
    assert (boards.served, boards.named) == ({OLD}, [])
