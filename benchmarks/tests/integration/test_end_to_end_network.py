"""The end-to-end benchmark's network: what it makes, and that nothing of it stays."""

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.end_to_end.__main__ import check_here
from benchmarks.end_to_end.machines import (
    CLIENT,
    DEVICES,
    MACHINES,
    Network,
    ProgramError,
    groups_left,
    sent_bytes,
)
from mdp.errors import InputError

SERVE = f"""
import socket
server = socket.create_server(({DEVICES[1].address!r}, 7000))
print("READY", flush=True)
server.accept()[0].makefile("rb").read()
"""
SEND = f"""
import socket
print("READY", flush=True)
with socket.create_connection(({DEVICES[1].address!r}, 7000)) as peer:
    peer.sendall(bytes(100_000))
    peer.shutdown(socket.SHUT_WR)
    print("SENT", len(peer.recv(1)), flush=True)
"""


def test_what_machines_send_is_counted_and_an_interrupted_run_leaves_nothing(
    tmp_path: Path,
) -> None:
    try:
        check_here()
    except InputError as error:
        pytest.skip(str(error))
    interfaces = sorted(path.name for path in Path("/sys/class/net").iterdir())
    python, seen = [sys.executable, "-c"], []

    def interrupted() -> None:
        with ExitStack() as stack:
            network = Network(stack, tmp_path)
            network.set_rate(100e6)
            assert len(groups_left(os.getpid())) == len(MACHINES)
            odd = network.running(DEVICES[2], "odd", [*python, "raise SystemExit('no such thing')"])
            with pytest.raises(ProgramError, match=r"odd on slow: .* ended with 1: no such thing"):
                stack.enter_context(odd)
            server = stack.enter_context(network.running(DEVICES[1], "serve", [*python, SERVE]))
            seen.append(server)
            assert os.sched_getaffinity(server.process.pid) == {DEVICES[1].core}
            before = sent_bytes(network.counting())
            with network.running(CLIENT, "send", [*python, SEND]) as process:
                assert process.line() == "SENT 0"
            # Headers of 70 packets and of their acknowledgements.
            assert 100_000 < sent_bytes(network.counting()) - before < 120_000
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert seen[0].process.returncode is not None
    assert groups_left(os.getpid()) == []
    assert sorted(path.name for path in Path("/sys/class/net").iterdir()) == interfaces
