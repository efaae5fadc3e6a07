"""One agent's bundles over a connection that a test plays: whatever the agent says, it ends."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mdp.client import bundles
from mdp.client.base import Options
from mdp.client.bundles import DeviceBundles
from mdp.errors import ConfigError, InputError, TransferError
from mdp.formats.bundle import MANIFEST, Bundle
from mdp.formats.device_part import path_in_bundle, version_of
from mdp.formats.fleet import Fleet, FleetEntry
from mdp.protocol.messages import Buffer, Failure, Message, decode, encode
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
from mdp.transport import Disconnected, Received, TransportEvent

Agent = Callable[[Any, Sequence[Buffer]], tuple[Message, Buffer | None] | Message | None]
RESTARTED = "model.onnx was not offered"
ALPHA = FleetEntry(device="alpha", address="tcp://10.0.0.1:7500", k=0, key="0" * 40)


class Played:
    """Stands for `Dealers`; `agent` says what is replied, None for a lost connection.

    After `RESTARTED` a connection was lost before, which is known later.
    """

    agent: Agent

    def __init__(self, *_: object, **__: object) -> None:
        self.connected, self.refused = {"alpha"}, dict[str, str]()
        self._events, self._later = list[TransportEvent](), list[TransportEvent]()

    def send(self, device: str, frames: Sequence[Buffer]) -> bool:
        envelope = decode([bytes(frame) for frame in frames])
        told = type(self).agent(envelope.message, envelope.buffers)
        if told is None:
            self._events.append(Disconnected("alpha"))
            return True
        message, buffer = told if isinstance(told, tuple) else (told, None)
        reply = encode(message, *([] if buffer is None else [buffer]))
        self._events.append(Received("alpha", [bytes(frame) for frame in reply]))
        if isinstance(message, BundleRefusal) and message.text == RESTARTED:
            self._later.append(Disconnected("alpha"))
        return True

    def poll(self, timeout_s: float | None) -> list[TransportEvent]:
        events, self._events, self._later = self._events, self._later, []
        return events

    def close(self) -> None:
        """Nothing to close."""


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceBundles]:
    monkeypatch.setattr(bundles, "Dealers", Played)
    monkeypatch.setattr(bundles, "client_keys", lambda fleet, options: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    clock = itertools.count()
    fleet = Fleet(bundle="bundle", devices=[ALPHA])
    with DeviceBundles(
        fleet, ALPHA, Options(fleet=Path("fleet.toml")), clock=lambda: float(next(clock))
    ) as device:
        yield device


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle.open(write_bundle(tmp_path / "bundle", comment_bytes=3 * PIECE_BYTES))


def play(agent: Agent) -> None:
    Played.agent = staticmethod(agent)


def state(asked: Any, bundle: Bundle, **changes: Any) -> BundleState:
    told = BundleState(
        request_id=asked.request_id,
        device="alpha",
        current=version_of(bundle),
        previous=None,
        serves=version_of(bundle),
        received={},
        switching=False,
        error="",
    )
    return msgspec.structs.replace(told, **changes)


@pytest.mark.parametrize(
    ("agent", "said"),
    [
        (
            lambda asked, _: Failure(request_id=0, code="bad_message", text="1 to 7, got 8"),
            "alpha: its mdp-agent does not know this message: expected a newer one (1 to 7, got 8)",
        ),
        (lambda asked, _: BundleRefusal(request_id=asked.request_id, text="no"), "alpha: no"),
        (lambda asked, _: None, "alpha: no connection for 30 s"),
        (lambda asked, _: BundleRefusal(request_id=0, text="x"), "alpha: no answer for 30 s"),
        (
            lambda asked, _: Failure(request_id=asked.request_id, code="overloaded", text="full"),
            "alpha: overloaded: full",
        ),
        (
            lambda asked, _: (BundleContent(request_id=asked.request_id, size_bytes=1), b"x"),
            "alpha: expected a BundleState",
        ),
    ],
)
def test_a_question_always_ends(connected: DeviceBundles, agent: Agent, said: str) -> None:
    play(agent)
    with pytest.raises(TransferError) as raised:
        connected.state()
    assert str(raised.value) == said


def test_an_agent_gets_no_other_device_s_model(connected: DeviceBundles, bundle: Bundle) -> None:
    play(lambda asked, _: state(asked, bundle, device="beta"))
    with pytest.raises(TransferError, match="alpha: the agent there is that of beta"):
        connected.push(bundle)


def test_a_bundle_without_the_device_is_not_sent(connected: DeviceBundles, tmp_path: Path) -> None:
    other = write_bundle(tmp_path / "other", devices=("pi", "n100", "pc"))
    play(lambda asked, _: pytest.fail("asked"))
    with pytest.raises(ConfigError, match="no assignment for device 'alpha'"):
        connected.push(Bundle.open(other))


@pytest.mark.parametrize("restarted", [False, True])
def test_a_broken_push_resumes(
    connected: DeviceBundles, bundle: Bundle, tmp_path: Path, restarted: bool
) -> None:
    old = Bundle.open(write_bundle(tmp_path / "old", name="old"))
    served, there = old, dict[Any, int]()
    lost = iter([False] * 4 + [True])

    def agent(asked: Any, buffers: Sequence[Buffer]) -> Message | None:
        nonlocal served
        if isinstance(asked, BundlePiece):
            assert asked.offset == there[asked.file]
            if restarted and next(lost, False):
                return BundleRefusal(request_id=asked.request_id, text=RESTARTED)
            # The second time, what had come before is kept: the piece, not the reply.
            there[asked.file] += len(buffers[0])
            if next(lost, False):
                return None
        elif asked.action == "offer":
            for file in asked.files:
                there.setdefault(file, 0)
        elif asked.action == "switch":
            served = bundle
        return state(asked, served, received=dict(there))

    play(agent)
    seen: list[int] = []
    pushed = connected.push(bundle, lambda done, total: seen.append(done))
    assert pushed.total_bytes == sum(there.values())
    assert (pushed.sent_bytes > pushed.total_bytes) == restarted
    assert seen == sorted(seen)


def test_waiting_for_a_switch_ends(
    connected: DeviceBundles, bundle: Bundle, tmp_path: Path
) -> None:
    old = Bundle.open(write_bundle(tmp_path / "old", name="old"))

    def agent(asked: BundleRequest, _: object) -> Message:
        whole = {file: entry.size_bytes for file, entry in asked.files.items()}
        return state(asked, old, received=whole)

    play(agent)
    with pytest.raises(TransferError, match="was restarted whenever it had to switch"):
        connected.push(bundle)
    play(lambda asked, _: state(asked, old, switching=True))
    with pytest.raises(TransferError, match="still loads after 900 s"):
        connected.push(bundle)
    play(lambda asked, _: state(asked, old, error="it does not load", received=whole_of(asked)))
    with pytest.raises(TransferError, match="serves what it did before: it does not load"):
        connected.push(bundle)


def whole_of(asked: BundleRequest) -> dict[Any, int]:
    return {file: entry.size_bytes for file, entry in asked.files.items()}


def test_a_first_push_ends_when_the_agent_serves(connected: DeviceBundles, bundle: Bundle) -> None:
    """Its socket is opened anew in between, which breaks the connection."""
    nothing: dict[str, Any] = {"current": None, "serves": None}
    replies = [nothing, nothing, {"serves": None, "switching": True}, {"serves": None}, None, {}]

    def agent(asked: BundleRequest, _: object) -> Message | None:
        changes = replies.pop(0)
        return (
            None if changes is None else state(asked, bundle, received=whole_of(asked), **changes)
        )

    play(agent)
    assert connected.push(bundle).version == version_of(bundle)
    assert replies == []


def test_a_rollback_needs_a_version_to_go_back_to(connected: DeviceBundles, bundle: Bundle) -> None:
    play(lambda asked, _: state(asked, bundle))
    with pytest.raises(TransferError, match="alpha: keeps no previous version"):
        connected.rollback()


def giving(bundle: Bundle, change: Callable[[str, bytes], tuple[int, bytes]]) -> Agent:
    """An agent that gives its bundle, but for what `change` makes of a whole file."""

    def agent(asked: Any, _: object) -> tuple[Message, Buffer] | Message:
        if not isinstance(asked, BundleRead):
            return state(asked, bundle)
        path = bundle.path / path_in_bundle(asked.file, 0)
        size_bytes, content = change(asked.file, path.read_bytes() if path.exists() else b"")
        reply = BundleContent(request_id=asked.request_id, size_bytes=size_bytes)
        return reply, content[asked.offset :][:PIECE_BYTES]

    return agent


@pytest.mark.parametrize(
    ("file", "change", "said"),
    [
        (MANIFEST, lambda content: b" " + content[1:], "manifest.json: not what it says"),
        ("model.onnx", lambda content: b"?" + content[1:], "model.onnx: not as manifest.json"),
        ("model.onnx", lambda content: content + b"x", "model.onnx: expected at most"),
        ("fusion.json", lambda content: b"", "fusion.json: not as manifest.json"),
        ("signature.json", lambda content: b"x" * 5000, "signature.json: expected at most 4,096"),
    ],
)
def test_what_is_pulled_is_verified(
    connected: DeviceBundles,
    bundle: Bundle,
    tmp_path: Path,
    file: str,
    change: Callable[[bytes], bytes],
    said: str,
) -> None:
    def changed(name: str, content: bytes) -> tuple[int, bytes]:
        content = change(content) if name == file else content
        return len(content), content

    play(giving(bundle, changed))
    with pytest.raises(TransferError, match=said):
        connected.pull(tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()


def test_a_pull_of_a_short_file(connected: DeviceBundles, bundle: Bundle, tmp_path: Path) -> None:
    play(giving(bundle, lambda name, content: (len(content) + 5, content)))
    expected = r"manifest.json: expected a piece of [\d,]+ bytes, got [\d,]+"
    with pytest.raises(TransferError, match=expected):
        connected.pull(tmp_path / "pulled")
    play(giving(bundle, lambda name, content: (len(content), content)))
    connected.pull(tmp_path / "pulled")
    assert Bundle.open(tmp_path / "pulled").model(0).content == bundle.model(0).content
    with pytest.raises(InputError, match="exists already"):
        connected.pull(tmp_path / "pulled")


def test_a_pull_ends_whatever_the_agent_does(
    connected: DeviceBundles, bundle: Bundle, tmp_path: Path
) -> None:
    asked_for: list[int] = []

    def dripping(asked: Any, _: object) -> tuple[Message, Buffer] | Message:
        if not isinstance(asked, BundleRead):
            return state(asked, bundle)
        asked_for.append(asked.offset)
        assert len(asked_for) < 1000, "it would go on for ever"
        return BundleContent(request_id=asked.request_id, size_bytes=2**20), b"x"

    play(dripping)
    expected = "alpha: manifest.json: expected a piece of 65,536 bytes, got 1"
    with pytest.raises(TransferError, match=expected):
        connected.pull(tmp_path / "pulled")
    assert asked_for == [0]

    def breaking(asked: Any, _: object) -> Message | None:
        asked_for.append(0)
        assert len(asked_for) < 1000, "it would go on for ever"
        return None if isinstance(asked, BundleRead) else state(asked, bundle)

    play(breaking)
    with pytest.raises(TransferError, match="alpha: the connection broke 100 times"):
        connected.pull(tmp_path / "pulled")
    assert not (tmp_path / "pulled").exists()


def test_a_device_without_a_key_has_no_bundles_to_exchange() -> None:
    plain = msgspec.structs.replace(ALPHA, key=None)
    fleet = Fleet(bundle="bundle", devices=[plain])
    with pytest.raises(ConfigError, match="device 'alpha': expected a `key`"):
        DeviceBundles(fleet, plain, Options(fleet=Path("fleet.toml")))


def test_an_agent_that_predates_rungs_is_named(connected: DeviceBundles, tmp_path: Path) -> None:
    """It knows no file of a rung, and refuses the offer that names one as malformed."""
    ladder = Bundle.open(write_bundle(tmp_path / "ladder", rungs=2))
    other = Bundle.open(write_bundle(tmp_path / "other"))

    def agent(asked: Any, _: Sequence[Buffer]) -> Message:
        if isinstance(asked, BundleRequest) and "rung-1.onnx" in asked.files:
            text = "BundleRequest header: Invalid enum value 'rung-1.onnx'"
            return Failure(request_id=0, code="bad_message", text=text)
        return state(asked, other)

    play(agent)
    with pytest.raises(TransferError, match=r"alpha: its mdp-agent .* newer one .*rung-1\.onnx"):
        connected.push(ladder)
