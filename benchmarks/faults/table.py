"""The faults: how each is made and healed, and the promise while it lasts."""

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

#: A device without answers is late, until it counts as slow or silent or its connection ends.
SILENCE = ("late", r"slow: .+", r"silent: .+", "disconnected", "unreachable")
KNOWN_SILENCE = SILENCE[1:]
GONE = ("disconnected", "unreachable")
#: An open circuit breaker, and a half-open one.
FAILING = (r"failing: .+", PROBATION)
#: Unanswered requests that open a circuit breaker; and calls that may wait for a device that is too
#: late: further ones begin before its third late answer.
WAITS = 3
WAITS_FOR_LATE = 6
NOT_FINITE = (r"(failing: )?bad_output: logits that are not finite",)
SAME = (r"(failing: )?bad_output: the same logits for \d+ different crops in a row",)
#: More than any deadline of a run.
SLOW_S = 0.6
TEN_YEARS_S = 315_360_000
#: Too slow, but alive: known from its late answers, and tried again.
_SLOW = Promise(reasons=(*SILENCE, PROBATION, r"too_late: .+"), waits=WAITS_FOR_LATE)
#: The only device is waited for nevertheless.
_ALONE_AND_SLOW: Mapping[Kind, Promise] = {"alone": replace(_SLOW, waits=None)}
#: Slow at times: waited for again after enough answers in time.
_SLOW_AT_TIMES = replace(_SLOW, used="perhaps", waits=None)
#: The only device is asked again although it is silent.
_LAST_CHANCE: Mapping[Kind, Promise] = {"alone": Promise(reasons=SILENCE, known=GONE, waits=None)}
_SILENT = Promise(reasons=SILENCE, known=KNOWN_SILENCE, waits=WAITS)
_UNHURT = Promise(used="always")
_UNSTEADY = Promise(reasons=(*GONE, PROBATION, r"unsteady: .+"))
#: Wrong labels until the stuck output is detected.
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
    #: How it is made and healed, for the page.
    made: str
    healed: str
    make: Callable[[Scene], None]
    heal: Callable[[Scene], None]
    promise: Promise
    #: Other promises of some kinds of fleet.
    instead: Mapping[Kind, Promise] = field(default_factory=dict)
    where: Where = "loopback"
    #: Least seconds in a whole run, and least calls in any.
    lasts_s: float = 1.0
    calls: int = 12
    #: Why it cannot be made on this machine; empty if it can.
    hindered: Callable[[], str] = lambda: ""
    #: Preparation before the first call, and its end after the last one.
    before: Callable[[Scene], None] = lambda scene: None
    after: Callable[[Scene], None] = lambda scene: None
    #: Evidence that the fault was not made, asked for before it is healed; empty if it was.
    proof: Callable[[Scene], str] = lambda scene: ""


FAULTS: tuple[Fault, ...] = (
    Fault(name="crash", made="SIGKILL", healed="started again",
        make=Scene.kill, heal=Scene.restart,
        promise=Promise(reasons=GONE, known=GONE), lasts_s=3.0),
    Fault(name="hang", made="SIGSTOP", healed="SIGCONT", make=Scene.hang, heal=Scene.resume,
        promise=_SILENT,
        instead=_LAST_CHANCE, lasts_s=10.0),
    Fault(name="restart", made="SIGTERM, and started again", healed="by itself",
        make=making.stop_and_restart, heal=lambda scene: None,
        promise=Promise(used="perhaps", reasons=STARTING)),
    Fault(name="slow device", made=f"each inference takes {SLOW_S} s longer",
        healed="as fast as before", make=making.command(f"slow {SLOW_S}"), heal=making.command(""),
        promise=_SLOW, instead=_ALONE_AND_SLOW, lasts_s=8.0),
    Fault(name="starved device", made="a control group gives it 1 ms of processor time a second",
        healed="the limit is taken off",
        make=lambda scene: scene.hold(processor_limit(scene.agent.process.pid, 0.001)),
        heal=Scene.release, promise=_SLOW_AT_TIMES, lasts_s=8.0,
        hindered=lambda: groups_work("cpu")),
    Fault(name="slow link", made="a relay passes on 200 kbit/s",
        healed="the relay passes on everything", make=making.set_link(Link(rate_bps=2e5)),
        heal=making.set_link(WELL), promise=_SLOW, instead=_ALONE_AND_SLOW, where="relay",
        lasts_s=8.0),
    Fault(name="slow link (tbf)", made="`tc tbf` on a switch limits both directions to 200 kbit/s",
        healed="the limit is taken off", make=lambda scene: scene.cable.limit(200_000),
        heal=lambda scene: scene.cable.unlimit(), promise=_SLOW, instead=_ALONE_AND_SLOW,
        where="wire", lasts_s=8.0, hindered=wiring_works),
    Fault(name="lossy link", made="a relay delays 5 % of all segments by TCP's retransmissions",
        healed="the relay loses nothing", make=making.set_link(Link(loss=0.05)),
        heal=making.set_link(WELL), promise=_SLOW_AT_TIMES, where="relay", lasts_s=8.0,
        proof=_link_was_bad),
    Fault(name="partition", made="a relay passes on nothing and closes nothing",
        healed="the relay passes on everything", make=making.set_link(Link(silent=True)),
        heal=making.set_link(WELL), promise=_SILENT, instead=_LAST_CHANCE, where="relay",
        lasts_s=10.0),
    Fault(name="partition (switch)",
        made="the switch between two network namespaces loses every packet",
        healed="the switch passes them on", make=lambda scene: scene.cable.part(),
        heal=lambda scene: scene.cable.join(), promise=_SILENT, instead=_LAST_CHANCE, where="wire",
        lasts_s=20.0, hindered=wiring_works),
    Fault(name="flapping link",
        made="a relay resets every connection for 0.3 s, lets it be for 0.3 s, and so on",
        healed="the relay lets them be", make=making.set_link(Link(flap_s=0.3)),
        heal=making.set_link(WELL),
        promise=replace(_UNSTEADY, used="perhaps"), where="relay", lasts_s=6.0,
        calls=40, proof=_link_was_bad),
    Fault(name="idle client, flapping device", made=_FLAPS, healed="started again",
        before=making.reconnect_quickly, make=making.flap_while_idle,
        heal=making.restart_after_failure, after=making.reconnect_as_before, promise=_UNSTEADY,
        proof=lambda scene: "" if scene.rounds > making.ROUNDS else f"{scene.rounds} connections"),
    Fault(name="host name without an address",
        made="SIGKILL; its host's name is in no hosts file any more, and the name server is silent",
        healed="started again, the name as before", before=making.use_own_names,
        make=making.remove_name, heal=Scene.restart, after=lambda scene: scene.own_names.close(),
        promise=Promise(reasons=GONE, known=GONE), where="name", lasts_s=12.0,
        hindered=own_names_work, proof=making.name_was_asked_for),
    Fault(name="NaN outputs", made="its logits are not numbers", healed="they are numbers again",
        make=making.command("nan"), heal=making.command(""),
        promise=Promise(reasons=(*NOT_FINITE, PROBATION), known=NOT_FINITE), lasts_s=3.0),
    Fault(name="constant outputs", made="its logits are the same for every picture",
        healed="they differ again", make=making.command("constant"), heal=making.command(""),
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
        healed="there is room again", before=making.move_to_small_disk, make=making.fill_disk,
        heal=lambda scene: (scene.folder / "disk" / "full").unlink(), after=making.move_back,
        promise=_UNHURT, hindered=mounting_works,
        proof=lambda scene: "" if making.count_logged(scene) == 1 else "there was room"),
    Fault(name="no memory to have",
        made="RLIMIT_AS: each inference asks for 64 MiB more than it may take",
        healed="started again without the limit", make=making.exhaust_memory,
        heal=making.restart_after_failure,
        promise=Promise(reasons=(*GONE, *FAILING, r"failed: MemoryError.*"))),
    Fault(name="killed for memory",
        made="a control group allows 64 MiB more, an inference takes 256",
        healed="started again without the limit", make=making.exceed_memory_limit,
        heal=making.restart_after_failure, promise=_KILLED_FOR_MEMORY,
        hindered=lambda: groups_work("memory"), proof=making.was_killed),
    Fault(name="clock ahead",
        made="the wall clocks of client and agents jump ten years ahead (libfaketime)",
        healed="they jump back", make=making.set_clock(f"+{TEN_YEARS_S}"),
        heal=making.set_clock("+0"), promise=_UNHURT, where="clock", hindered=_no_faketime,
        proof=making.clock_differs(TEN_YEARS_S / 2)),
    Fault(name="clock back",
        made="the wall clocks of client and agents jump ten years back (libfaketime)",
        healed="they jump ahead", make=making.set_clock(f"-{TEN_YEARS_S}"),
        heal=making.set_clock("+0"), promise=_UNHURT, where="clock", hindered=_no_faketime,
        proof=making.clock_differs(TEN_YEARS_S / 2)),
)  # fmt: skip
