"""The faults: how each is made, how it is healed, and what is promised while it lasts."""

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from benchmarks.faults import making
from benchmarks.faults.promises import PROBATION, STARTING, Kind, Promise
from benchmarks.faults.scene import Scene, Where
from mdp.requests.stuck_output import DIFFERENT_CROPS
from mdp.testing.machine_faults import (
    faketime_library,
    groups_work,
    mounting_works,
    own_names_work,
    processor_limit,
)
from mdp.testing.relay import WELL
from mdp.testing.relay_process import Link
from mdp.testing.wires import wiring_works

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
TEN_YEARS_S = 315_360_000
#: Too slow, but alive: known from its late answers, and tried again and again.
_SLOW = Promise(reasons=(*SILENCE, PROBATION, r"too_late: .+"), waits=WAITS_FOR_LATE)
#: With nobody else to ask, it is waited for all the same.
_ALONE_AND_SLOW: Mapping[Kind, Promise] = {"alone": replace(_SLOW, waits=None)}
#: Slow at times: waited for again whenever it has been in time often enough.
_SLOW_AT_TIMES = replace(_SLOW, used="perhaps", waits=None)
#: With nobody else to ask, a silent device is asked again and again: it may be well by now.
_LAST_CHANCE: Mapping[Kind, Promise] = {"alone": Promise(reasons=SILENCE, known=GONE, waits=None)}
_SILENT = Promise(reasons=SILENCE, known=KNOWN_SILENCE, waits=WAITS)
_UNHURT = Promise(used="always")
#: How many wrong labels there may be before anybody can tell.
_CONSTANT = Promise(
    used="perhaps", reasons=(*SAME, PROBATION), known=SAME, wrong_labels=DIFFERENT_CROPS
)
#: Short of memory, a device is slow before it is killed.
_KILLED_FOR_MEMORY = Promise(
    used="perhaps", reasons=(*SILENCE, r"too_late: .+"), known=GONE, waits=WAITS
)
_FLAPS = (
    "SIGKILL; in its place, something makes the handshake and hangs up "
    f"{making.ROUNDS} times while the client does not call"
)


def _link_was_bad(scene: Scene) -> str:
    return "" if scene.relay.troubles else "the link lost and reset nothing"


def _no_faketime() -> str:
    return "" if faketime_library() else "needs libfaketime (Debian: apt-get install faketime)"


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


FAULTS: tuple[Fault, ...] = (
    Fault(name="crash", made="SIGKILL", healed="started again",
        make=lambda scene: scene.agent.kill(), heal=Scene.restart,
        promise=Promise(reasons=GONE, known=GONE), lasts_s=3.0),
    Fault(name="hang", made="SIGSTOP", healed="SIGCONT", make=lambda scene: scene.agent.stop(),
        heal=lambda scene: scene.agent.signal(signal.SIGCONT), promise=_SILENT,
        instead=_LAST_CHANCE, lasts_s=10.0),
    Fault(name="restart", made="SIGTERM, and started again", healed="by itself",
        make=making.stop_and_restart, heal=lambda scene: None,
        promise=Promise(used="perhaps", reasons=STARTING)),
    Fault(name="slow device", made=f"each inference takes {SLOW_S} s longer",
        healed="as fast as before", make=making.says(f"slow {SLOW_S}"), heal=making.says(""),
        promise=_SLOW, instead=_ALONE_AND_SLOW, lasts_s=8.0),
    Fault(name="starved device", made="a control group gives it 1 ms of processor time a second",
        healed="the limit is taken off",
        make=lambda scene: scene.hold(processor_limit(scene.agent.process.pid, 0.001)),
        heal=Scene.release, promise=_SLOW_AT_TIMES, lasts_s=8.0,
        hindered=lambda: groups_work("cpu")),
    Fault(name="slow link", made="a relay passes on 200 kbit/s",
        healed="the relay passes on everything", make=making.links(Link(rate_bps=2e5)),
        heal=making.links(WELL), promise=_SLOW, instead=_ALONE_AND_SLOW, where="relay",
        lasts_s=8.0),
    Fault(name="slow link (tbf)", made="`tc tbf` on a switch limits both directions to 200 kbit/s",
        healed="the limit is taken off", make=lambda scene: scene.cable.limit(200_000),
        heal=lambda scene: scene.cable.unlimit(), promise=_SLOW, instead=_ALONE_AND_SLOW,
        where="wire", lasts_s=8.0, hindered=wiring_works),
    Fault(name="lossy link", made="a relay delays 5 % of all segments by TCP's retransmissions",
        healed="the relay loses nothing", make=making.links(Link(loss=0.05)),
        heal=making.links(WELL), promise=_SLOW_AT_TIMES, where="relay", lasts_s=8.0,
        proof=_link_was_bad),
    Fault(name="partition", made="a relay passes on nothing and closes nothing",
        healed="the relay passes on everything", make=making.links(Link(silent=True)),
        heal=making.links(WELL), promise=_SILENT, instead=_LAST_CHANCE, where="relay",
        lasts_s=10.0),
    Fault(name="partition (switch)",
        made="the switch between two network namespaces loses every packet",
        healed="the switch passes them on", make=lambda scene: scene.cable.part(),
        heal=lambda scene: scene.cable.join(), promise=_SILENT, instead=_LAST_CHANCE, where="wire",
        lasts_s=20.0, hindered=wiring_works),
    Fault(name="flapping link",
        made="a relay resets every connection for 0.3 s, lets it be for 0.3 s, and so on",
        healed="the relay lets them be", make=making.links(Link(flap_s=0.3)),
        heal=making.links(WELL),
        promise=Promise(used="perhaps", reasons=(*GONE, PROBATION, r"unsteady: .+")), where="relay",
        lasts_s=6.0, calls=40, proof=_link_was_bad),
    Fault(name="idle client, flapping device", made=_FLAPS, healed="started again",
        before=making.dials_quickly, make=making.flaps_while_idle, heal=making.restart_what_is_left,
        after=making.dials_as_ever, promise=Promise(reasons=(*GONE, PROBATION, r"unsteady: .+")),
        proof=lambda scene: "" if scene.rounds > making.ROUNDS else f"{scene.rounds} connections"),
    Fault(name="host name without an address",
        made="SIGKILL; its host's name is in no hosts file any more, and the name server is silent",
        healed="started again, the name as before", before=making.own_names, make=making.no_name,
        heal=Scene.restart, after=lambda scene: scene.own_names.close(),
        promise=Promise(reasons=GONE, known=GONE), where="name", lasts_s=12.0,
        hindered=own_names_work, proof=making.name_was_asked_for),
    Fault(name="NaN outputs", made="its logits are not numbers", healed="they are numbers again",
        make=making.says("nan"), heal=making.says(""),
        promise=Promise(reasons=(*NOT_FINITE, PROBATION), known=NOT_FINITE), lasts_s=3.0),
    Fault(name="constant outputs", made="its logits are the same for every picture",
        healed="they differ again", make=making.says("constant"), heal=making.says(""),
        promise=_CONSTANT, lasts_s=3.0),
    Fault(name="wrong bundle", made="started again with a bundle of another name",
        healed="started again with the right one",
        make=lambda scene: making.stop_and_restart(scene, scene.others),
        heal=making.stop_and_restart,
        promise=Promise(reasons=(*STARTING, r"wrong_bundle: serves others .+"))),
    Fault(name="older bundle", made="started again with an older version of the bundle",
        healed="started again with the right one",
        make=lambda scene: making.stop_and_restart(scene, scene.older),
        heal=making.stop_and_restart,
        promise=Promise(reasons=(*STARTING, r"wrong_bundle: serves colours .+"))),
    Fault(name="full disk",
        made="its log, working folder and temporary files are on a disk without room, and it logs",
        healed="there is room again", before=making.small_home, make=making.full_disk,
        heal=lambda scene: (scene.folder / "disk" / "full").unlink(), after=making.old_home,
        promise=_UNHURT, hindered=mounting_works,
        proof=lambda scene: "" if making.complaints(scene) == 1 else "there was room"),
    Fault(name="no memory to have",
        made="RLIMIT_AS: each inference asks for 64 MiB more than it may take",
        healed="started again without the limit", make=making.no_memory_to_have,
        heal=making.restart_what_is_left,
        promise=Promise(reasons=(*GONE, *FAILING, r"failed: MemoryError.*"))),
    Fault(name="killed for memory",
        made="a control group allows 64 MiB more, an inference takes 256",
        healed="started again without the limit", make=making.killed_for_memory,
        heal=making.restart_what_is_left, promise=_KILLED_FOR_MEMORY,
        hindered=lambda: groups_work("memory"), proof=making.was_killed),
    Fault(name="clock ahead",
        made="the wall clocks of client and agents jump ten years ahead (libfaketime)",
        healed="they jump back", make=making.clock(f"+{TEN_YEARS_S}"), heal=making.clock("+0"),
        promise=_UNHURT, where="clock", hindered=_no_faketime,
        proof=making.clock_differs(TEN_YEARS_S / 2)),
    Fault(name="clock back",
        made="the wall clocks of client and agents jump ten years back (libfaketime)",
        healed="they jump ahead", make=making.clock(f"-{TEN_YEARS_S}"), heal=making.clock("+0"),
        promise=_UNHURT, where="clock", hindered=_no_faketime,
        proof=making.clock_differs(TEN_YEARS_S / 2)),
)  # fmt: skip
