"""Ways to make and heal each fault in a scene, and to verify its effect."""

import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil

from benchmarks.faults.faulty_agent import MIB
from benchmarks.faults.scene import HOST, Scene, picture
from mdp.client.sync import Client
from mdp.testing.machine_faults import fill, memory_limit, silent_name_server, small_disk
from mdp.testing.processes import PATIENCE_S, until
from mdp.testing.raw_agent import raw_agent
from mdp.testing.relay_process import Link
from mdp.transport import dealer


def command(word: str) -> Callable[[Scene], None]:
    def write(scene: Scene) -> None:
        scene.word.write_text(word)

    return write


def set_link(link: Link) -> Callable[[Scene], None]:
    def change(scene: Scene) -> None:
        scene.relay.link = link

    return change


def stop_and_restart(scene: Scene, bundle: Path | None = None) -> None:
    scene.stop()
    scene.restart(bundle=bundle)


def restart_after_failure(scene: Scene) -> None:
    """As a supervisor does with an agent that has ended or FAILED."""
    scene.release()
    scene.agent.close()
    scene.restart()


def exhaust_memory(scene: Scene) -> None:
    """Limit its memory, and let its model take more at each inference."""
    pid = scene.agent.process.pid
    _, most = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (scene.memory_bytes("VmSize") + 16 * MIB, most))
    scene.word.write_text("hoard 64")


def exceed_memory_limit(scene: Scene) -> None:
    limit_bytes = scene.memory_bytes("VmRSS") + 64 * MIB
    scene.hold(memory_limit(scene.agent.process.pid, limit_bytes))
    scene.word.write_text("hoard 256")


def move_to_small_disk(scene: Scene) -> None:
    """Move its working folder, log and temporary files to a small disk."""
    home = scene.folder / "disk"
    scene.hold(small_disk(home, MIB))
    scene.stop()
    scene.restart(home=home)
    # With room it logs an invalid message, once every few seconds; a restart resets that limit.
    scene.send_junk()
    until(lambda: count_logged(scene) == 1, "it logs an invalid message")
    scene.stop()
    scene.restart(home=home)


def fill_disk(scene: Scene) -> None:
    disk = scene.folder / "disk"
    fill(disk, disk / "agent.log")
    scene.send_junk()


def move_back(scene: Scene) -> None:
    scene.stop()
    scene.release()
    scene.restart()


#: Attempts to find an idle client that dials, and seconds for its first connection.
_ATTEMPTS, FIRST_S = 10, 5.0
#: libzmq holds 2,000 events of a monitor that is not read; each round is two.
ROUNDS = 1_050


def reconnect_quickly(scene: Scene) -> None:
    """Let the client reconnect a thousand times within seconds instead of two minutes."""
    scene.dial_ms, dealer.RECONNECT_MS = dealer.RECONNECT_MS, 1


def reconnect_as_before(scene: Scene) -> None:
    dealer.RECONNECT_MS = scene.dial_ms


def flap_while_idle(scene: Scene) -> None:
    port = int(scene.agent.address.rpartition(":")[2])

    def hang_up(peer: socket.socket) -> None:
        scene.rounds += 1
        # The client reads the whole handshake before the end: one that fails, as by a connection
        # that is reset, ends its dialling until it is called.
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(4096):
            pass

    def more_than(rounds: int, patience_s: float) -> None:
        until(lambda: scene.rounds > rounds, "the client reconnects", patience_s)

    for _ in range(_ATTEMPTS):
        with scene.idle:
            scene.rounds = 0
            scene.agent.kill()
            flapping = ExitStack()
            flapping.enter_context(raw_agent(hang_up, port))
            try:
                more_than(0, FIRST_S)
            except AssertionError:
                # Seen on busy machines alone; probably it dialled the dying agent before that had
                # closed its port, and was reset.
                flapping.close()
            else:
                scene.hold(flapping)
                while scene.rounds <= ROUNDS:
                    # Patience for each connection: a busy machine takes minutes for all.
                    more_than(scene.rounds, PATIENCE_S)
                return
        restart_after_failure(scene)
        # It is called meanwhile, and dials.
        until(lambda: _is_connected(port), "the client is connected")
    raise AssertionError(f"not in {_ATTEMPTS} attempts: an idle client reconnects")


def _is_connected(port: int) -> bool:
    """Tell whether this process has a connection to a port."""
    return any(
        one.raddr and one.raddr.port == port and one.status == psutil.CONN_ESTABLISHED
        for one in psutil.Process().net_connections("tcp")
    )


def use_own_names(scene: Scene) -> None:
    scene.name_server = scene.own_names.enter_context(silent_name_server(scene.folder, HOST))


def remove_name(scene: Scene) -> None:
    known = (scene.folder / "hosts").read_text()
    (scene.folder / "hosts").write_text(known.replace(HOST, "another"))
    scene.agent.kill()


def name_was_asked_for(scene: Scene) -> str:
    scene.name_server.setblocking(False)
    try:
        scene.name_server.recv(512)
    except BlockingIOError:
        return "the name server was not asked"
    return ""


def set_clock(text: str) -> Callable[[Scene], None]:
    def jump(scene: Scene) -> None:
        scene.word.write_text("clock")
        scene.clock.write_text(text)

    return jump


def was_killed(scene: Scene) -> str:
    code = scene.agent.process.poll()
    return "" if code == -signal.SIGKILL else f"the agent was not killed, but ended with {code}"


def count_logged(scene: Scene) -> int:
    return (scene.folder / "disk" / "agent.log").read_text().count("bad_message")


def clock_differs(least_s: float) -> Callable[[Scene], str]:
    def differs(scene: Scene) -> str:
        # With a replica the faulty device may have computed nothing lately.
        with Client.connect(scene.fleet_file(alone=True), timeout_s=PATIENCE_S) as client:
            client.classify(picture(0)[0], deadline_ms=PATIENCE_S * 1e3)
        seen_s = float(scene.word.with_suffix(".clock").read_text())
        ahead_s = seen_s - time.time()
        return "" if abs(ahead_s) >= least_s else f"its clock is only {ahead_s:.0f} s ahead"

    return differs
