"""The faults: how each is made, how it is healed, and what is promised while it lasts."""

import resource
import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from mdp.client.sync import Client
from mdp.requests.stuck_output import DIFFERENT_CROPS
from mdp.transport import dealer
from tests.support.fakes import raw_agent
from tests.support.faults.confined import (
    faketime_library,
    fill,
    groups_work,
    memory_limit,
    mounting_works,
    own_names_work,
    processor_limit,
    silent_name_server,
    small_disk,
)
from tests.support.faults.fault_promises import PROBATION, STARTING, Kind, Promise
from tests.support.faults.fault_scene import HOST, Scene, Where, picture
from tests.support.faults.faulty_agent import MIB
from tests.support.faults.relay import WELL, Link
from tests.support.fleet import PATIENCE_S, until
from tests.support.wires import wiring_works

#: A device that does not answer is late, until it is known to be slow or silent or its connection
#: ends.
SILENCE = ("late", r"slow: .+", r"silent: .+", "disconnected", "unreachable")
KNOWN_SILENCE = SILENCE[1:]
GONE = ("disconnected", "unreachable")
#: A device that has failed often enough is left alone for a while, and then tried.
FAILING = (r"failing: .+", PROBATION)
#: Requests that may go unanswered before a device is left alone; and those that may wait for one
#: that answers too late: until the third such answer has come, others begin.
WAITS = 3
WAITS_FOR_LATE = 6
NOT_FINITE = (r"(failing: )?bad_output: logits that are not finite",)
SAME = (r"(failing: )?bad_output: the same logits for \d+ different crops in a row",)
#: More than any deadline of a run.
SLOW_S = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row of the matrix."""

    name: str
    #: How it is made and healed, for people.
    made: str
    healed: str
    make: Callable[[Scene], None]
    heal: Callable[[Scene], None]
    promise: Promise
    #: Where a kind of fleet is promised something else.
    instead: Mapping[Kind, Promise] = field(default_factory=dict)
    where: Where = "loopback"
    #: How long it lasts at least in a whole run, in seconds, and how many calls at least in any.
    lasts_s: float = 1.0
    calls: int = 12
    #: Why it cannot be made here; empty if it can.
    hindered: Callable[[], str] = lambda: ""
    #: What has to be done before the first call and after the last one.
    before: Callable[[Scene], None] = lambda scene: None
    after: Callable[[Scene], None] = lambda scene: None
    #: What speaks against the fault having been made, asked for before it is healed.
    proof: Callable[[Scene], str] = lambda scene: ""

    def promised(self, kind: Kind) -> Promise:
        """What holds of one kind of fleet."""
        return self.instead.get(kind, self.promise)


def _restart(scene: Scene) -> None:
    scene.restart()


def _says(word: str) -> Callable[[Scene], None]:
    def say(scene: Scene) -> None:
        scene.word.write_text(word)

    return say


def _links(link: Link) -> Callable[[Scene], None]:
    def change(scene: Scene) -> None:
        scene.relay.link = link

    return change


def _serves_others(scene: Scene) -> None:
    scene.stop()
    scene.restart(bundle=scene.others)


def _serves_older(scene: Scene) -> None:
    scene.stop()
    scene.restart(bundle=scene.older)


def _stop_and_restart(scene: Scene) -> None:
    scene.stop()
    scene.restart()


def _restart_what_is_left(scene: Scene) -> None:
    """As a supervisor does with an agent that has ended or says FAILED."""
    scene.release()
    scene.agent.close()
    scene.restart()


def _no_memory_to_have(scene: Scene) -> None:
    """Let its model want more memory at each inference than it is allowed to take."""
    pid = scene.agent.process.pid
    _, most = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (scene.memory_bytes("VmSize") + 16 * MIB, most))
    scene.word.write_text("hoard 64")


def _killed_for_memory(scene: Scene) -> None:
    limit_bytes = scene.memory_bytes("VmRSS") + 64 * MIB
    scene.hold(memory_limit(scene.agent.process.pid, limit_bytes))
    scene.word.write_text("hoard 256")


def _starve(scene: Scene) -> None:
    scene.hold(processor_limit(scene.agent.process.pid, 0.001))


def _small_home(scene: Scene) -> None:
    """Have it work, log and keep its temporary files where there is little room."""
    home = scene.folder / "disk"
    scene.hold(small_disk(home, MIB))
    scene.stop()
    scene.restart(home=home)
    # As long as there is room, it says what it is sent; once every few seconds, hence anew.
    scene.send_junk()
    until(lambda: _complaints(scene) == 1, "it tells of what it was sent")
    scene.stop()
    scene.restart(home=home)


def _full_disk(scene: Scene) -> None:
    disk = scene.folder / "disk"
    fill(disk, disk / "agent.log")
    scene.send_junk()


def _room_again(scene: Scene) -> None:
    (scene.folder / "disk" / "full").unlink()


def _old_home(scene: Scene) -> None:
    scene.stop()
    scene.release()
    scene.restart()


#: libzmq holds 2,000 events of a monitor that is not read; each round is two.
ROUNDS = 1_050


def _dials_quickly(scene: Scene) -> None:
    """Have the client dial a thousand times within seconds, as it does within two minutes."""
    scene.dial_ms, dealer.RECONNECT_MS = dealer.RECONNECT_MS, 1


def _dials_as_ever(scene: Scene) -> None:
    dealer.RECONNECT_MS = scene.dial_ms


def _flaps_while_idle(scene: Scene) -> None:
    scene.rounds, port = 0, int(scene.agent.address.rpartition(":")[2])

    def hang_up(_: socket.socket) -> None:
        scene.rounds += 1

    with scene.idle:
        scene.agent.kill()
        scene.hold(raw_agent(hang_up, port))
        until(lambda: scene.rounds > ROUNDS, "the client dials again and again")


def _flapped(scene: Scene) -> str:
    return "" if scene.rounds > ROUNDS else f"it was connected to only {scene.rounds} times"


def _own_names(scene: Scene) -> None:
    scene.name_server = scene.own_names.enter_context(silent_name_server(scene.folder, HOST))


def _no_name(scene: Scene) -> None:
    known = (scene.folder / "hosts").read_text()
    (scene.folder / "hosts").write_text(known.replace(HOST, "another"))
    scene.agent.kill()


def _name_was_asked_for(scene: Scene) -> str:
    scene.name_server.setblocking(False)
    try:
        scene.name_server.recv(512)
    except BlockingIOError:
        return "nobody asked the name server"
    return ""


def _clock(text: str) -> Callable[[Scene], None]:
    def jump(scene: Scene) -> None:
        scene.word.write_text("clock")
        scene.clock.write_text(text)

    return jump


def _was_killed(scene: Scene) -> str:
    code = scene.agent.process.poll()
    return "" if code == -signal.SIGKILL else f"the agent was not killed, but ended with {code}"


def _complaints(scene: Scene) -> int:
    return (scene.folder / "disk" / "agent.log").read_text().count("bad_message")


def _had_no_room(scene: Scene) -> str:
    return "" if _complaints(scene) == 1 else "there was room for what it had to say"


def _link_was_bad(scene: Scene) -> str:
    return "" if scene.relay.troubles else "the link lost and reset nothing"


def _clock_differs(least_s: float) -> Callable[[Scene], str]:
    def differs(scene: Scene) -> str:
        # It may have been passed over for its replica, and then has written nothing lately.
        with Client.connect(scene.fleet_file(alone=True), timeout_s=PATIENCE_S) as client:
            client.classify(picture(0)[0], deadline_ms=PATIENCE_S * 1e3)
        seen_s = float(scene.word.with_suffix(".clock").read_text())
        ahead_s = seen_s - time.time()
        return "" if abs(ahead_s) >= least_s else f"its clock is only {ahead_s:.0f} s ahead"

    return differs


def _faketime() -> str:
    return "" if faketime_library() else "needs libfaketime (Debian: apt-get install faketime)"


#: Too slow, but alive: known from its late answers, and tried again and again.
_SLOW = Promise(reasons=(*SILENCE, PROBATION, r"too_late: .+"), waits=WAITS_FOR_LATE)
#: With nobody else to ask, it is waited for all the same.
_ALONE_AND_SLOW: Mapping[Kind, Promise] = {"alone": replace(_SLOW, waits=None)}
#: Slow at times: waited for again whenever it has been in time often enough.
_SLOW_AT_TIMES = replace(_SLOW, used="perhaps", waits=None)
#: With nobody else to ask, a silent device is asked again and again: it may be well by now.
_LAST_CHANCE: Mapping[Kind, Promise] = {
    "alone": Promise(reasons=SILENCE, known=GONE, waits=None),
}
_SILENT = Promise(reasons=SILENCE, known=KNOWN_SILENCE, waits=WAITS)
_UNHURT = Promise(used="always")
_TEN_YEARS_S = 315_360_000

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="crash",
        made="SIGKILL",
        healed="started again",
        make=lambda scene: scene.agent.kill(),
        heal=_restart,
        promise=Promise(reasons=GONE, known=GONE),
        lasts_s=3.0,
    ),
    Fault(
        name="hang",
        made="SIGSTOP",
        healed="SIGCONT",
        make=lambda scene: scene.agent.stop(),
        heal=lambda scene: scene.agent.signal(signal.SIGCONT),
        promise=_SILENT,
        instead=_LAST_CHANCE,
        lasts_s=10.0,
    ),
    Fault(
        name="restart",
        made="SIGTERM, and started again",
        healed="by itself",
        make=_stop_and_restart,
        heal=lambda scene: None,
        promise=Promise(used="perhaps", reasons=STARTING),
    ),
    Fault(
        name="slow device",
        made=f"each inference takes {SLOW_S} s longer",
        healed="as fast as before",
        make=_says(f"slow {SLOW_S}"),
        heal=_says(""),
        promise=_SLOW,
        instead=_ALONE_AND_SLOW,
        lasts_s=8.0,
    ),
    Fault(
        name="starved device",
        made="a control group gives it 1 ms of processor time a second",
        healed="the limit is taken off",
        make=_starve,
        heal=lambda scene: scene.release(),
        promise=_SLOW_AT_TIMES,
        lasts_s=8.0,
        hindered=lambda: groups_work("cpu"),
    ),
    Fault(
        name="slow link",
        made="a relay passes on 200 kbit/s",
        healed="the relay passes on everything",
        make=_links(Link(rate_bps=2e5)),
        heal=_links(WELL),
        promise=_SLOW,
        instead=_ALONE_AND_SLOW,
        where="relay",
        lasts_s=8.0,
    ),
    Fault(
        name="slow link (tbf)",
        made="`tc tbf` on a switch limits both directions to 200 kbit/s",
        healed="the limit is taken off",
        make=lambda scene: scene.cable.limit(200_000),
        heal=lambda scene: scene.cable.unlimit(),
        promise=_SLOW,
        instead=_ALONE_AND_SLOW,
        where="wire",
        lasts_s=8.0,
        hindered=wiring_works,
    ),
    Fault(
        name="lossy link",
        made="a relay delays 5 % of all segments by TCP's retransmissions",
        healed="the relay loses nothing",
        make=_links(Link(loss=0.05)),
        heal=_links(WELL),
        promise=_SLOW_AT_TIMES,
        where="relay",
        lasts_s=8.0,
        proof=_link_was_bad,
    ),
    Fault(
        name="partition",
        made="a relay passes on nothing and closes nothing",
        healed="the relay passes on everything",
        make=_links(Link(silent=True)),
        heal=_links(WELL),
        promise=_SILENT,
        instead=_LAST_CHANCE,
        where="relay",
        lasts_s=10.0,
    ),
    Fault(
        name="partition (switch)",
        made="the switch between two network namespaces loses every packet",
        healed="the switch passes them on",
        make=lambda scene: scene.cable.part(),
        heal=lambda scene: scene.cable.join(),
        promise=_SILENT,
        instead=_LAST_CHANCE,
        where="wire",
        lasts_s=20.0,
        hindered=wiring_works,
    ),
    Fault(
        name="flapping link",
        made="a relay resets every connection for 0.3 s, lets it be for 0.3 s, and so on",
        healed="the relay lets them be",
        make=_links(Link(flap_s=0.3)),
        heal=_links(WELL),
        promise=Promise(used="perhaps", reasons=(*GONE, PROBATION, r"unsteady: .+")),
        where="relay",
        lasts_s=6.0,
        calls=40,
        proof=_link_was_bad,
    ),
    Fault(
        name="idle client, flapping device",
        made=f"SIGKILL; in its place, something makes the handshake and hangs up {ROUNDS} times "
        "while the client does not call",
        healed="started again",
        before=_dials_quickly,
        make=_flaps_while_idle,
        heal=_restart_what_is_left,
        after=_dials_as_ever,
        promise=Promise(reasons=(*GONE, PROBATION, r"unsteady: .+")),
        proof=_flapped,
    ),
    Fault(
        name="host name without an address",
        made="SIGKILL; its host's name is in no hosts file any more, and the name server is silent",
        healed="started again, the name as before",
        before=_own_names,
        make=_no_name,
        heal=_restart,
        after=lambda scene: scene.own_names.close(),
        promise=Promise(reasons=GONE, known=GONE),
        where="name",
        lasts_s=12.0,
        hindered=own_names_work,
        proof=_name_was_asked_for,
    ),
    Fault(
        name="NaN outputs",
        made="its logits are not numbers",
        healed="they are numbers again",
        make=_says("nan"),
        heal=_says(""),
        promise=Promise(reasons=(*NOT_FINITE, PROBATION), known=NOT_FINITE),
        lasts_s=3.0,
    ),
    Fault(
        name="constant outputs",
        made="its logits are the same for every picture",
        healed="they differ again",
        make=_says("constant"),
        heal=_says(""),
        promise=Promise(
            used="perhaps",
            reasons=(*SAME, PROBATION),
            known=SAME,
            # Nobody can tell before.
            wrong_labels=DIFFERENT_CROPS,
        ),
        lasts_s=3.0,
    ),
    Fault(
        name="wrong bundle",
        made="started again with a bundle of another name",
        healed="started again with the right one",
        make=_serves_others,
        heal=_stop_and_restart,
        promise=Promise(reasons=(*STARTING, r"wrong_bundle: serves others .+")),
    ),
    Fault(
        name="older bundle",
        made="started again with an older version of the bundle",
        healed="started again with the right one",
        make=_serves_older,
        heal=_stop_and_restart,
        promise=Promise(reasons=(*STARTING, r"wrong_bundle: serves colours .+")),
    ),
    Fault(
        name="full disk",
        made="its log, working folder and temporary files are on a disk without room, and it logs",
        healed="there is room again",
        before=_small_home,
        make=_full_disk,
        heal=_room_again,
        after=_old_home,
        promise=_UNHURT,
        hindered=mounting_works,
        proof=_had_no_room,
    ),
    Fault(
        name="no memory to have",
        made="RLIMIT_AS: each inference asks for 64 MiB more than it may take",
        healed="started again without the limit",
        make=_no_memory_to_have,
        heal=_restart_what_is_left,
        promise=Promise(reasons=(*GONE, *FAILING, r"failed: MemoryError.*")),
    ),
    Fault(
        name="killed for memory",
        made="a control group allows 64 MiB more, an inference takes 256",
        healed="started again without the limit",
        make=_killed_for_memory,
        heal=_restart_what_is_left,
        # Short of memory, it is slow before it is killed.
        promise=Promise(
            used="perhaps", reasons=(*SILENCE, r"too_late: .+"), known=GONE, waits=WAITS
        ),
        hindered=lambda: groups_work("memory"),
        proof=_was_killed,
    ),
    Fault(
        name="clock ahead",
        made="the wall clocks of client and agents jump ten years ahead (libfaketime)",
        healed="they jump back",
        make=_clock(f"+{_TEN_YEARS_S}"),
        heal=_clock("+0"),
        promise=_UNHURT,
        where="clock",
        hindered=_faketime,
        proof=_clock_differs(_TEN_YEARS_S / 2),
    ),
    Fault(
        name="clock back",
        made="the wall clocks of client and agents jump ten years back (libfaketime)",
        healed="they jump ahead",
        make=_clock(f"-{_TEN_YEARS_S}"),
        heal=_clock("+0"),
        promise=_UNHURT,
        where="clock",
        hindered=_faketime,
        proof=_clock_differs(_TEN_YEARS_S / 2),
    ),
)
