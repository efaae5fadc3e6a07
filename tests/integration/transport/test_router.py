"""The agent's socket by itself: messages one by one, and what else ends a wait for them."""

import subprocess
import sys
import threading
from collections.abc import Sequence

import pytest

from mdp.protocol.messages import Buffer, Failure, StatusRequest, decode, encode
from mdp.testing.agents import ANY_PORT
from mdp.testing.processes import PATIENCE_S
from mdp.transport import Peer, Router
from tests.support.fakes import StrangePeer


def answer(router: Router, peer: Peer, request_id: int) -> None:
    failure = Failure(request_id=request_id, code="failed", text="")
    assert router.send(peer.route, encode(failure))


def request_number(frames: Sequence[Buffer]) -> int:
    """Number of this request."""
    message = decode(frames).message
    assert isinstance(message, StatusRequest)
    return message.request_id


def coming(router: Router) -> list[tuple[Peer, Sequence[Buffer]]]:
    """Next messages, however long they take; a connection's arrival may end a wait first."""
    while not (came := list(router.poll(None))):
        pass
    return came


def test_messages_that_arrive_while_others_are_answered_are_read() -> None:
    """Sending takes in what ZeroMQ has to tell, of which the descriptor then tells nobody."""
    with Router(ANY_PORT) as router, StrangePeer(router.address) as peer:
        count = 300
        for request_id in range(count):
            peer.send(encode(StatusRequest(request_id=request_id)))
        came: list[int] = []
        while len(came) < count:
            for sender, frames in router.poll(PATIENCE_S):
                came.append(request_number(frames))
                answer(router, sender, came[-1])
                if came[-1] % 7 == 0:
                    # Whoever leaves in the middle finds the others next time.
                    break
        assert came == list(range(count))
        for request_id in range(count):
            message = peer.receive().message
            assert isinstance(message, Failure)
            assert message.request_id == request_id


def test_a_wake_up_is_no_message_and_delays_none() -> None:
    with Router(ANY_PORT) as router, StrangePeer(router.address) as peer:
        peer.send(encode(StatusRequest(request_id=1)))
        ((sender, frames),) = coming(router)
        assert request_number(frames) == 1
        router.wake()
        peer.send(encode(StatusRequest(request_id=2)))
        answer(router, sender, 1)
        assert [request_number(frames) for _, frames in coming(router)] == [2]
        assert (router.was_woken(), router.was_woken()) == (True, False)
        assert list(router.poll(0.0)) == []
        router.wake()
        assert list(router.poll(PATIENCE_S)) == []
        assert router.was_woken()


def test_a_wake_up_is_heard_however_much_comes() -> None:
    with Router(ANY_PORT) as router, StrangePeer(router.address) as peer:
        woken = False
        peer.send(encode(StatusRequest(request_id=0)))
        for turn in range(10):
            for sender, frames in router.poll(None):
                # The next one is on its way before this one is answered.
                peer.send(encode(StatusRequest(request_id=request_number(frames) + 1)))
                answer(router, sender, request_number(frames))
            woken |= router.was_woken() and turn > 1
            if turn == 1:
                router.wake()
        assert woken


def test_a_reply_from_another_thread_loses_no_message() -> None:
    with Router(ANY_PORT) as router, StrangePeer(router.address) as peer:
        peer.send(encode(StatusRequest(request_id=0)))
        ((sender, _),) = coming(router)
        over = threading.Event()

        def reply() -> None:
            while not over.is_set():
                router.send(sender.route, [b""])

        replying = threading.Thread(target=reply)
        replying.start()
        try:
            for wanted in range(1, 51):
                peer.send(encode(StatusRequest(request_id=wanted)))
                assert [request_number(frames) for _, frames in coming(router)] == [wanted]
        finally:
            over.set()
            replying.join()


def test_replies_sent_before_the_end_reach_a_slow_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdp.transport.router.LINGER_S", PATIENCE_S)
    router = Router(ANY_PORT)
    closing = threading.Thread(target=router.close)
    with StrangePeer(router.address) as peer:
        peer.send(encode(StatusRequest(request_id=0)))
        ((sender, _),) = coming(router)
        # More than the kernel keeps for a connection whose other end does not read.
        replies, frame = 200, bytes(100_000)
        for _ in range(replies):
            assert router.send(sender.route, [b"", frame])
        closing.start()
        try:
            for _ in range(replies):
                assert peer.dealer.poll(int(1000 * PATIENCE_S)), "no reply"
                assert peer.dealer.recv_multipart() == [b"", frame]
        finally:
            closing.join()


def test_a_router_that_is_dropped_does_not_hang_the_process() -> None:
    program = (
        "import gc, socket\n"
        "from mdp.transport import Router\n"
        "router = Router('tcp://127.0.0.1:0')\n"
        "port = int(router.address.rpartition(':')[2])\n"
        "peer = socket.create_connection(('127.0.0.1', port))\n"
        "router.itself = router\n"
        "del router\n"
        "gc.collect()\n"
        "print('ended')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "ended\n"
