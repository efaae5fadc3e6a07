"""Messages about bundles: who may, one switch at a time, and what is told of it. No sockets."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from devices.agent.bundles import LoadableBundle
from devices.agent.counters import Counters
from devices.agent.lifecycle import Lifecycle
from devices.agent.push import FORBIDDEN, MOST_WAITING, BundleMessage, BundlePush, PushAccess
from devices.agent.reload import Reload
from devices.agent.replies import Replies
from devices.agent.store import BundleStore
from mdp.errors import AgentError
from mdp.formats.bundle import FUSION, MANIFEST, Bundle
from mdp.formats.device_part import MODEL, PartFile, entry_of, part_of, version_of
from mdp.protocol.messages import Buffer, Failure, Message, decode
from mdp.protocol.transfer import (
    PIECE_BYTES,
    BundleContent,
    BundlePiece,
    BundleRead,
    BundleRefusal,
    BundleRequest,
    BundleState,
)
from mdp.testing.bundles import write_bundle
from mdp.testing.processes import until
from mdp.transport import Peer, Router

OWNER, OTHER = "owner", "other"


class Desk:
    """An agent's part that answers about bundles, without the rest."""

    def __init__(self, folder: Path) -> None:
        self.sent: list[tuple[Message, list[Buffer]]] = []
        self.audited: list[tuple[str, str, str]] = []
        self.switches: list[Reload] = []
        self.served = Bundle.open(write_bundle(folder / "served"))
        self.pushed = Bundle.open(write_bundle(folder / "pushed", name="new", bag_scale=9.0))
        store = BundleStore(
            folder / "kept",
            self.served.path,
            max_bytes=10**6,
            read=lambda where: (Bundle.open(where), 0),
            free_bytes=lambda _: 2**40,
        )
        counters = Counters()
        self.push = BundlePush(
            PushAccess(
                store=store,
                may_push=lambda client: client == OWNER,
                loadable=self.loadable,
                audit=lambda event, key, address, why: self.audited.append((event, key, why)),
            ),
            Lifecycle(
                self.loadable(self.served.path), counters, report=lambda _: None, clock=lambda: 0.0
            ),
            Replies(cast(Router, self), counters, report=lambda _: None),
            self.switches.append,
        )

    def loadable(self, folder: Path) -> LoadableBundle:
        bundle = Bundle.open(folder)
        load: Any = None
        return LoadableBundle(bundle=bundle, assignment=bundle.assignment("alpha"), load=load)

    def send(self, route: bytes, frames: list[Buffer]) -> bool:
        """Stands for the router."""
        envelope = decode(frames)
        self.sent.append((envelope.message, list(envelope.buffers)))
        return True

    def ask(self, message: BundleMessage, *buffers: Buffer, client: str = OWNER) -> Message:
        before = len(self.sent)
        self.push.receive(Peer(b"route", client), message, buffers)
        until(lambda: len(self.sent) > before, "a reply")
        return self.sent[-1][0]

    def state(self) -> BundleState:
        told = self.ask(BundleRequest(request_id=1, action="state"))
        assert isinstance(told, BundleState)
        return told

    def send_all(self) -> str:
        """Offer the new bundle and send it; returns its manifest's hash."""
        part = part_of(self.pushed, 0)
        files: dict[PartFile, Any] = {file: entry_of(content) for file, content in part.items()}
        manifest = files[MANIFEST].sha256
        self.ask(BundleRequest(request_id=2, action="offer", manifest=manifest, files=files))
        for file, content in part.items():
            piece = BundlePiece(request_id=3, manifest=manifest, file=file, offset=0)
            told = self.ask(piece, content)
            assert isinstance(told, BundleState)
            assert told.received[file] == len(content)
        return str(manifest)

    def switch(self, manifest: str) -> Message:
        return self.ask(BundleRequest(request_id=4, action="switch", manifest=manifest))


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path)
    yield desk
    with desk.push.worker:
        pass


def test_every_message_needs_the_right(desk: Desk, tmp_path: Path) -> None:
    messages: list[BundleMessage] = [
        BundleRequest(request_id=5, action="state"),
        BundleRequest(request_id=5, action="offer", manifest="0" * 64),
        BundleRequest(request_id=5, action="switch", manifest="0" * 64),
        BundlePiece(request_id=5, manifest="0" * 64, file=MODEL, offset=0),
        BundleRead(request_id=5, manifest="0" * 64, file=MODEL, offset=0),
    ]
    for message in messages:
        buffers = [b"x"] * message.buffers
        refusal = desk.ask(message, *buffers, client=OTHER)
        assert refusal == BundleRefusal(request_id=5, text=FORBIDDEN)
    assert desk.audited == [("refuse", OTHER, f"bundle: {FORBIDDEN}")] * len(messages)
    assert list((tmp_path / "kept").iterdir()) == []


def test_one_switch_at_a_time_whose_outcome_can_be_asked_for(desk: Desk) -> None:
    manifest = desk.send_all()
    told = desk.switch(manifest)
    assert isinstance(told, BundleState)
    assert told.switching
    # Asked again, as after a lost reply: the same switch.
    told = desk.switch(manifest)
    assert isinstance(told, BundleState)
    assert told.switching
    other = desk.switch(version_of(desk.served).manifest)
    assert other == BundleRefusal(request_id=4, text="another switch is under way")
    (reload,) = desk.switches
    assert desk.state().current == version_of(desk.served)
    reload.commit(reload.read())
    reload.settled("")
    state = desk.state()
    assert not state.switching
    assert (state.current, state.previous) == (version_of(desk.pushed), version_of(desk.served))
    assert [event for event in desk.audited if event[0] != "refuse"] == [
        ("push", OWNER, f"begin {manifest[:12]}, {sum(map(len, part_of(desk.pushed, 0).values()))} "
         "bytes"),
        ("push", OWNER, f"switch to {manifest[:12]}"),
        ("push", OWNER, "switched"),
    ]  # fmt: skip
    desk.switch(version_of(desk.served).manifest)
    assert desk.audited[-1][0] == "rollback"


def test_a_switch_that_failed_says_why_until_the_next(desk: Desk) -> None:
    manifest = desk.send_all()
    desk.switch(manifest)
    desk.switches[0].settled("no\nmemory")
    state = desk.state()
    assert (state.switching, state.error) == (False, "no memory")
    assert state.current == version_of(desk.served)
    told = desk.switch(manifest)
    assert isinstance(told, BundleState)
    assert (told.switching, told.error) == (True, "")


def test_of_a_version_whose_files_are_gone_no_other_is_served(desk: Desk, tmp_path: Path) -> None:
    desk.switch(desk.send_all())
    (reload,) = desk.switches
    reload.commit(reload.read())
    reload.settled("")
    # The previous version is `--bundle`, which is another one by now.
    shutil.rmtree(desk.served.path)
    write_bundle(desk.served.path, name="third", bag_scale=5.0)
    desk.switch(version_of(desk.served).manifest)
    with pytest.raises(AgentError, match=r"the files of version .* are gone"):
        desk.switches[1].read()


def test_what_is_served_is_given_in_pieces(desk: Desk, tmp_path: Path) -> None:
    manifest = version_of(desk.served).manifest
    whole = (desk.served.path / "submodels/0/model.onnx").read_bytes()
    assert len(whole) < PIECE_BYTES
    read = BundleRead(request_id=9, manifest=manifest, file=MODEL, offset=100)
    assert desk.ask(read) == BundleContent(request_id=9, size_bytes=len(whole))
    assert bytes(desk.sent[-1][1][0]) == whole[100:]
    absent = BundleRead(request_id=9, manifest=manifest, file="signature.json", offset=0)
    assert desk.ask(absent) == BundleContent(request_id=9, size_bytes=0)
    outside = tmp_path / "secret"
    outside.write_text("secret")
    fusion = desk.served.path / FUSION
    fusion.unlink()
    fusion.symlink_to(outside)
    assert desk.ask(BundleRead(request_id=9, manifest=manifest, file=FUSION, offset=0)) == (
        BundleRefusal(request_id=9, text="fusion.json: expected a regular file inside the bundle")
    )
    later = BundleRead(request_id=9, manifest="0" * 64, file=MODEL, offset=0)
    assert desk.ask(later) == BundleRefusal(request_id=9, text="another version is served by now")


def test_more_than_wait_are_refused_at_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(desk.push.worker), "is_full", True)
    told = desk.ask(BundleRequest(request_id=1, action="state"))
    assert isinstance(told, Failure)
    assert (told.request_id, told.code) == (1, "overloaded")
    assert MOST_WAITING * PIECE_BYTES < 2**20


@pytest.mark.parametrize("break_it", [OSError(5, "Input/output error"), ValueError("odd")])
def test_unforeseen_failure(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, break_it: Exception
) -> None:
    def fails(*_: object) -> None:
        raise break_it

    broken: Callable[..., None] = fails
    with monkeypatch.context() as patch:
        patch.setattr(BundleStore, "offer", broken)
        told = desk.ask(BundleRequest(request_id=1, action="offer", manifest="0" * 64))
    assert told == BundleRefusal(request_id=1, text=f"{type(break_it).__name__}: {break_it}")
    assert desk.state().serves == version_of(desk.served)
