"""Garbage on both sides of the wire: answered or counted, and service goes on."""

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
from mdp.testing.agents import ANY_PORT
from mdp.testing.bundles import DEVICES, SIZES, colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from tests.support.bundles import change_assignment
from tests.support.fakes import FakeAgent, StrangePeer, other_program, red_result
from tests.support.fleet import BIN, PLENTY_MS, Fleet, answers_until
from tests.support.pictures import (
    encode_picture,
    exif_that_warns,
    four_corners,
    jpeg_that_claims,
    with_segments,
)
from tests.support.serving import ask_status

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
    status = ask_status(peer)
    assert status.state == "READY"
    return status


def next_failure(peer: StrangePeer) -> Failure:
    """The next reply, which has to be a failure."""
    failure = peer.receive().message
    assert isinstance(failure, Failure)
    return failure


def replace(infer: Infer, **changes: object) -> Infer:
    return msgspec.structs.replace(infer, **changes)


#: Frames that are no request, each with its reply's text; they cannot be told from whom they come.
MALFORMED: list[tuple[list[Buffer], str]] = [
    ([b"garbage"], "expected a first frame that begins with 'MDP'"),
    ([b"MDP\x02\x01"], "expected protocol version 1, got 2"),
    ([b"MDP\x01\x02" + b"\x00" * 20_000], "expected a header up to 16384 bytes"),
    ([*encode(StatusRequest(request_id=3)), b"x"], "StatusRequest: expected 0 buffer(s), got 1"),
    (red_result(1), "Result is for clients"),
    (encode(Failure(request_id=1, code="failed", text="no, you")), "Failure is for clients"),
]
#: Requests that cannot be served: what differs, the picture, and the reply's code and text.
REFUSED: list[tuple[dict[str, object], bytes, str, str]] = [
    ({"image_size": 8}, bytes(192), "bad_message", "expected a crop of 16 pixels, got 8"),
    ({"digest": "0" * 64}, PIXELS, "wrong_bundle", "serves colours "),
    ({"k": 1}, PIXELS, "wrong_submodel", "alpha serves sub-model 0, asked for 1"),
    *(
        (dict[str, object](encoding="jpeg"), data, "bad_message", said)
        for data, said in (
            (b"no jpeg", "not a complete JPEG: "),
            (b"\xff\xd8\xff\xe1", ""),
            (jpeg_that_claims(16, 16)[:200], ""),
            (jpeg_that_claims(65_500, 65_500), ""),
            (encode_picture(four_corners(8, 8), "JPEG"), "expected a JPEG of 16x16, got (8, 8)"),
        )
    ),
]


def test_malformed_and_impossible_requests_are_answered(fleet: Fleet, infer: Infer) -> None:
    with StrangePeer(fleet.agents["alpha"].address) as peer:
        before = is_well(peer).counts
        for frames, expected in MALFORMED:
            peer.send(frames)
            failure = next_failure(peer)
            assert (failure.request_id, failure.code) == (0, "bad_message")
            assert failure.text.startswith(expected)
        for changes, pixels, code, expected in REFUSED:
            peer.send(encode(replace(infer, **changes), pixels))
            failure = next_failure(peer)
            assert (failure.request_id, failure.code) == (5, code)
            assert failure.text.startswith(expected)
        after = is_well(peer).counts
        bad = len(MALFORMED) + sum(code == "bad_message" for _, _, code, _ in REFUSED)
        assert after["bad_message"] == before["bad_message"] + bad
        # None of them is a failure of the model, which still serves.
        assert after["failed"] == 0
        jpeg = encode_picture(four_corners(SIZE, SIZE), "JPEG")
        for request in (encode(infer, PIXELS), encode(replace(infer, encoding="jpeg"), jpeg)):
            peer.send(request)
            result = peer.receive()
            assert isinstance(result.message, Result)
            assert (result.message.request_id, result.message.num_classes) == (5, 3)
            assert len(result.buffers[0]) == 24
    with StrangePeer(fleet.agents["beta"].address) as peer:
        small = replace(infer, k=1, image_size=SIZES[1], encoding="jpeg")
        peer.send(encode(small, encode_picture(four_corners(SIZES[1], SIZES[1]), "JPEG")))
        assert next_failure(peer).text == "expected raw pixels, as planned, got a JPEG"


def test_an_unread_stderr_blocks_no_agent(fleet: Fleet, infer: Infer, tmp_path: Path) -> None:
    """Pillow warns a hundred times of each of these, once for each text."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(20):
        jpeg = with_segments(encode_picture(RED, "JPEG"), exif_that_warns(100 + number))
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
                hostile = replace(infer, encoding="jpeg")
                for number in range(20):
                    view = encode_picture(four_corners(SIZE, SIZE), "JPEG")
                    peer.send(encode(hostile, with_segments(view, exif_that_warns(80 + number))))
                    failure = next_failure(peer)
                    assert failure.text.endswith("got one of 0xFFE1")
                until(lambda: frames_of(is_well(peer)) > 60, "every picture was read thrice")
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
            assert process.stderr is not None
            assert process.stderr.read() == b""
        finally:
            process.kill()


def frames_of(status: Status) -> int:
    """Number of pictures that the agent's own source has given."""
    found = re.search(r"frame (\d+)", status.source)
    return int(found[1]) if found else 0


def test_raw_bytes_and_clients_that_leave_do_no_harm(fleet: Fleet, infer: Infer) -> None:
    address = fleet.agents["alpha"].address
    port = urlsplit(address).port
    assert port is not None
    for data in (
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x00" * 200,
        b"\xff" + b"\x00" * 8 + b"\x7f" + b"\x03" + b"\x00" * 53,
        random.Random(1).randbytes(4096),
        b"",
    ):
        with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as raw:
            raw.sendall(data)
            with StrangePeer(address) as peer:
                is_well(peer)
    for _ in range(20):
        with StrangePeer(address) as peer:
            peer.send(encode(infer, PIXELS))
    with StrangePeer(address) as peer:
        is_well(peer)


def test_garbage_and_second_replies_are_counted_and_end_no_call(fleet: Fleet) -> None:
    def odd(infer: Infer) -> list[list[Buffer]]:
        right = red_result(infer.request_id)
        if fake.asked == 1:
            return [[right[0], right[1][:-4]]]
        return [red_result(infer.request_id + 1000), right, right, right]

    def counted(count: int) -> bool:
        return client.status(timeout_s=0.05) != [] and sum(client.counters.values()) == count

    with FakeAgent(odd) as fake, fleet.client(gamma=fake.address) as client:
        answer = client.classify(RED, deadline_ms=PLENTY_MS)
        assert (answer.label, answer.used) == ("red", ("alpha", "beta"))
        assert (
            answer.missing["gamma"] == "bad_message: expected 12 bytes of logits, or twice, got 20"
        )
        assert client.counters["malformed"] == 1
        for number in range(1, 4):
            assert client.classify(RED, deadline_ms=PLENTY_MS).missing == {}
            # The second and third reply come before or after the other devices' own.
            until(partial(counted, 1 + 3 * number), "every reply is counted")
        assert client.counters["late"] >= 3
        assert client.counters["malformed"] == 1


def reachable_again(client: Client, fleet: Fleet, address: str) -> None:
    """A real agent takes over the address, and the same client uses it."""
    fleet.start("gamma", bind=address)
    try:
        again = answers_until(client, RED, lambda a: "gamma" in a.used, PLENTY_MS)
        assert again[-1].used == DEVICES
    finally:
        fleet.agents.pop("gamma").kill()


def test_a_device_is_used_again_after_an_oversized_frame(fleet: Fleet) -> None:
    def flood(infer: Infer) -> list[list[Buffer]]:
        return [[red_result(infer.request_id)[0], bytes(MAX_BUFFER_BYTES + 1)]]

    fake = FakeAgent(flood)
    with fake, fleet.client(gamma=fake.address) as client:
        answer = client.classify(RED, deadline_ms=PLENTY_MS)
        assert answer.missing == {"gamma": "disconnected"}
        fake.close()
        reachable_again(client, fleet, fake.address)


def test_a_port_that_another_program_had_is_used_again(fleet: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    entries = fleet.write(gamma=address)
    with other_program(port, b"SSH-2.0-OpenSSH_9.9\r\n"):
        client = Client.connect(entries, timeout_s=0.5)
        answer = client.classify(RED, deadline_ms=2000.0)
        assert answer.label == "red"
        assert list(answer.missing) == ["gamma"]
    with client:
        reachable_again(client, fleet, address)
