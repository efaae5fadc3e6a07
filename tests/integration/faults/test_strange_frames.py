"""Garbage, on both sides of the wire: answered or counted, and everybody goes on."""

import json
import random
import re
import socket
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from mdp.client.sync import Client
from mdp.formats.bundle import Bundle
from mdp.protocol.messages import (
    MAX_BUFFER_BYTES,
    Buffer,
    Failure,
    Infer,
    Result,
    Status,
    StatusRequest,
    encode,
)
from mdp.requests.prediction import Prediction
from mdp.testing.agents import ANY_PORT
from mdp.testing.bundles import DEVICES, SIZES, colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from tests.support.bundles import change_assignment
from tests.support.fakes import FakeAgent, Handler, StrangePeer, other_program, red_result
from tests.support.fleet import BIN, PLENTY_MS, Fleet, answers_until
from tests.support.pictures import (
    encoded,
    exif_that_warns,
    four_corners,
    jpeg_that_claims,
    with_segments,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

RED = colour_picture("red")
SIZE = SIZES[0]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("strange")
    with Fleet(folder, write_bundle(folder / "bundle")) as fleet:
        change_assignment(fleet.bundle, encoding="jpeg")
        yield fleet.start_all("alpha", "beta")


@pytest.fixture
def infer(fleet: Fleet) -> Infer:
    """A request that alpha would answer."""
    return Infer(
        request_id=5,
        digest=Bundle.open(fleet.bundle).digest,
        k=0,
        budget_ms=PLENTY_MS,
        image_size=SIZE,
        encoding="raw",
    )


PIXELS = bytes(SIZE * SIZE * 3)


def is_well(peer: StrangePeer) -> Status:
    peer.send(encode(StatusRequest(request_id=1)))
    status = peer.receive().message
    assert isinstance(status, Status)
    assert status.state == "READY"
    return status


def failed(peer: StrangePeer) -> Failure:
    """The next reply, which has to be a failure."""
    failure = peer.receive().message
    assert isinstance(failure, Failure)
    return failure


def test_the_agent_answers_a_request_made_by_hand(fleet: Fleet, infer: Infer) -> None:
    with StrangePeer(fleet.agents["alpha"].address) as peer:
        peer.send(encode(infer, PIXELS))
        result = peer.receive()
        assert isinstance(result.message, Result)
        assert (result.message.request_id, result.message.num_classes) == (5, 3)
        assert len(result.buffers[0]) == 24


def replaced(infer: Infer, **changes: object) -> Infer:
    return msgspec.structs.replace(infer, **changes)


MALFORMED: list[tuple[list[Buffer], str]] = [
    ([b"garbage"], "expected a first frame that begins with 'MDP'"),
    ([b"MDP\x02\x01"], "expected protocol version 1, got 2"),
    ([b"MDP\x01\x02" + b"\x00" * 20_000], "expected a header up to 16384 bytes"),
    ([*encode(StatusRequest(request_id=3)), b"x"], "StatusRequest: expected 0 buffer(s), got 1"),
    (red_result(1), "Result is for clients"),
    (encode(Failure(request_id=1, code="failed", text="no, you")), "Failure is for clients"),
]


def test_malformed_messages_are_answered_and_counted(fleet: Fleet) -> None:
    with StrangePeer(fleet.agents["alpha"].address) as peer:
        before = is_well(peer).counts["bad_message"]
        for frames, expected in MALFORMED:
            peer.send(frames)
            failure = failed(peer)
            assert (failure.request_id, failure.code) == (0, "bad_message")
            assert failure.text.startswith(expected)
        assert is_well(peer).counts["bad_message"] == before + len(MALFORMED)


@pytest.mark.parametrize(
    ("changes", "pixels", "code", "expected"),
    [
        ({"image_size": 8}, bytes(192), "bad_message", "expected a crop of 16 pixels, got 8"),
        ({"digest": "0" * 64}, PIXELS, "wrong_bundle", "serves colours "),
        ({"k": 1}, PIXELS, "wrong_submodel", "alpha serves sub-model 0, asked for 1"),
        ({"encoding": "jpeg"}, b"no jpeg", "bad_message", "not a complete JPEG: "),
        (
            {"encoding": "jpeg"},
            encoded(four_corners(8, 8), "JPEG"),
            "bad_message",
            "expected a JPEG of 16x16, got (8, 8)",
        ),
    ],
)
def test_requests_that_cannot_be_served_are_answered_with_their_id(
    fleet: Fleet, infer: Infer, changes: dict[str, object], pixels: bytes, code: str, expected: str
) -> None:
    with StrangePeer(fleet.agents["alpha"].address) as peer:
        peer.send(encode(replaced(infer, **changes), pixels))
        failure = failed(peer)
        assert (failure.request_id, failure.code) == (5, code)
        assert failure.text.startswith(expected)
        is_well(peer)


def test_broken_jpegs_do_not_count_as_failures_of_the_model(fleet: Fleet, infer: Infer) -> None:
    jpeg = replaced(infer, encoding="jpeg")
    bad = [jpeg_that_claims(65_500, 65_500), jpeg_that_claims(16, 16)[:200], b"\xff\xd8\xff\xe1"]
    with StrangePeer(fleet.agents["alpha"].address) as peer:
        for data in bad * 2:
            peer.send(encode(jpeg, data))
            failure = failed(peer)
            assert (failure.request_id, failure.code) == (5, "bad_message")
        assert is_well(peer).counts["failed"] == 0
        peer.send(encode(jpeg, encoded(four_corners(SIZE, SIZE), "JPEG")))
        assert isinstance(peer.receive().message, Result)


def test_a_jpeg_is_not_decoded_where_raw_pixels_are_planned(fleet: Fleet, infer: Infer) -> None:
    with StrangePeer(fleet.agents["beta"].address) as peer:
        jpeg = replaced(infer, k=1, image_size=SIZES[1], encoding="jpeg")
        peer.send(encode(jpeg, encoded(four_corners(SIZES[1], SIZES[1]), "JPEG")))
        failure = failed(peer)
        assert failure.text == "expected raw pixels, as planned, got a JPEG"


def test_an_agent_whose_stderr_is_not_read_is_stopped_by_no_picture(
    fleet: Fleet, infer: Infer, tmp_path: Path
) -> None:
    """Pillow warns a hundred times of each of these, once for each text."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(20):
        jpeg = with_segments(encoded(RED, "JPEG"), exif_that_warns(100 + number))
        (folder / f"{number}.jpg").write_bytes(jpeg)
    command = [str(BIN / "mdp-agent"), "run", "--bundle", str(fleet.bundle), "--device", "alpha"]
    own = ["--bind", ANY_PORT, "--json", "--source", f"folder:{folder}", "--source-fps", "200"]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, *own], stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["address"]
            while b"READY" not in process.stdout.readline():
                assert process.poll() is None
            with StrangePeer(address) as peer:
                hostile = replaced(infer, encoding="jpeg")
                for number in range(20):
                    view = encoded(four_corners(SIZE, SIZE), "JPEG")
                    peer.send(encode(hostile, with_segments(view, exif_that_warns(80 + number))))
                    failure = failed(peer)
                    assert failure.text.endswith("got one of 0xFFE1")
                until(lambda: frames_of(is_well(peer)) > 60, "every picture was read thrice")
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
            assert process.stderr is not None
            assert process.stderr.read() == b""
        finally:
            process.kill()


def frames_of(status: Status) -> int:
    """How many pictures the agent's own source has given."""
    found = re.search(r"frame (\d+)", status.source)
    return int(found[1]) if found else 0


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x00" * 200,
        b"\xff" + b"\x00" * 8 + b"\x7f" + b"\x03" + b"\x00" * 53,
        random.Random(1).randbytes(4096),
        b"",
    ],
    ids=["http", "zeros", "greeting", "noise", "nothing"],
)
def test_raw_bytes_do_no_harm(fleet: Fleet, data: bytes) -> None:
    address = fleet.agents["alpha"].address
    port = urlsplit(address).port
    assert port is not None
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as raw:
        raw.sendall(data)
        with StrangePeer(address) as peer:
            is_well(peer)
    with StrangePeer(address) as peer:
        is_well(peer)


def test_a_client_that_left_costs_nothing(fleet: Fleet, infer: Infer) -> None:
    address = fleet.agents["alpha"].address
    for _ in range(20):
        with StrangePeer(address) as peer:
            peer.send(encode(infer, PIXELS))
    with StrangePeer(address) as peer:
        is_well(peer)


def ask(fleet: Fleet, handler: Handler) -> tuple[Prediction, int]:
    """The answer of a fleet whose gamma is a fake, and how many malformed replies were counted."""
    with FakeAgent(handler) as fake, fleet.client(gamma=fake.address) as client:
        answer = client.classify(RED, deadline_ms=PLENTY_MS)
        assert fake.asked == 1
        assert answer.label == "red"
        return answer, client.counters["malformed"]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (lambda i: [b"garbage"], "expected a first frame that begins with 'MDP'"),
        (
            lambda i: [red_result(i.request_id)[0], red_result(i.request_id)[1][:-4]],
            "expected 12 bytes of logits, or twice, got 20",
        ),
    ],
)
def test_a_reply_that_is_no_message_names_its_device(
    fleet: Fleet, reply: object, expected: str
) -> None:
    assert callable(reply)
    answer, malformed = ask(fleet, lambda infer: [reply(infer)])
    assert answer.used == ("alpha", "beta")
    assert answer.missing["gamma"].startswith(f"bad_message: {expected}")
    assert malformed == 1


def test_a_fake_that_answers_right_is_used(fleet: Fleet) -> None:
    answer, malformed = ask(fleet, lambda infer: [red_result(infer.request_id)])
    assert answer.used == DEVICES
    assert malformed == 0


def counted(client: Client, count: int) -> bool:
    return client.status(timeout_s=0.05) != [] and sum(client.counters.values()) == count


def test_replies_to_nothing_and_second_ones_are_counted(fleet: Fleet) -> None:
    def chatty(infer: Infer) -> list[list[Buffer]]:
        right = red_result(infer.request_id)
        return [red_result(infer.request_id + 1000), right, right, right]

    with FakeAgent(chatty) as fake, fleet.client(gamma=fake.address) as client:
        for number in range(1, 4):
            assert client.classify(RED, deadline_ms=PLENTY_MS).missing == {}
            # The second and third reply come before or after the other devices' own.
            until(partial(counted, client, 3 * number), "every reply is counted")
        assert client.counters["late"] >= 3
        assert client.counters["malformed"] == 0


def reachable_again(client: Client, fleet: Fleet, address: str) -> None:
    """A real agent takes over the address, and the same client uses it."""
    fleet.start("gamma", bind=address)
    try:
        again = answers_until(client, RED, lambda a: "gamma" in a.used, PLENTY_MS)
        assert again[-1].used == DEVICES
    finally:
        fleet.agents.pop("gamma").kill()


def test_a_device_whose_frame_was_oversized_is_used_again_once_it_behaves(fleet: Fleet) -> None:
    def flood(infer: Infer) -> list[list[Buffer]]:
        return [[red_result(infer.request_id)[0], bytes(MAX_BUFFER_BYTES + 1)]]

    fake = FakeAgent(flood)
    with fake, fleet.client(gamma=fake.address) as client:
        answer = client.classify(RED, deadline_ms=PLENTY_MS)
        assert answer.missing == {"gamma": "disconnected"}
        fake.close()
        reachable_again(client, fleet, fake.address)


@pytest.mark.parametrize("greeting", [b"\x00" * 64, b"SSH-2.0-OpenSSH_9.9\r\n", b""])
def test_a_port_that_another_program_had_is_used_again(fleet: Fleet, greeting: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    entries = fleet.write(gamma=address)
    with other_program(port, greeting):
        client = Client.connect(entries, timeout_s=0.5)
        answer = client.classify(RED, deadline_ms=2000.0)
        assert answer.label == "red"
        assert list(answer.missing) == ["gamma"]
    with client:
        reachable_again(client, fleet, address)


def test_a_device_that_never_says_how_it_is_is_silent(fleet: Fleet) -> None:
    with FakeAgent(lambda infer: []) as fake, fleet.client(gamma=fake.address) as client:
        # It is connected, but never says how it is.
        status = client.status(timeout_s=0.2)[2]
        assert (status.state, status.reason) == ("SILENT", "connected, but does not answer")
