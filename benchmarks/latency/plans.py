"""Whole plans through real agents: a client's latency against the predicted one.

Two devices are what two cores can be: each agent computes on a core of its own, and each core has
a profile that a probe measured while another one measured the other core. Plans are what the
planner makes of the two for several teachers and targets. What the link and the client cost is
measured in the same run and goes into the predictions: what a byte costs with models that take next
to no time, the rest with other plans' members. The longer those compute, the more a call costs
beside it, as their weights push everything else out of the caches.

A client would be on a machine of its own. Here it has the agents' cores, which they leave to it
whenever it wants them (SCHED_IDLE): else it waits for an agent's turn to end, 3 ms, in as many of
its calls as the scheduler pleases.
"""

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from benchmarks.latency.measure import others_cpu_s
from benchmarks.latency.models import export_all
from benchmarks.latency.plan_bundles import NUM_CLASSES, case_of, write_plan_bundle
from benchmarks.latency.shapes import Case
from mdp import Client
from mdp.cli.bench import noise_picture, overhead_ms
from mdp.files import Record, write_toml
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet
from mdp.formats.plan import Plan
from mdp.formats.profile import DeviceProfile, Link, Precision
from mdp.testing.agents import AgentProcess, agent_command
from mdp.testing.bundles import LABELS, write_bundle
from partitioner.estimates.latency import Way, matching_points
from partitioner.estimates.latency_quantiles import jitter_of, pace_for, spread_of
from partitioner.estimates.network import reply_bytes, request_bytes
from partitioner.networks.teacher import teacher_spec
from partitioner.planner.make_plan import PlanOptions, make_planned

#: Targets of each teacher, in milliseconds; those that are refused are left out.
TARGETS_MS = {
    "vit_small_patch16_224": (5.0, 8.0, 12.0, 18.0, 27.0, 40.0, 60.0),
    "vit_tiny_patch16_224": (2.5, 4.0, 6.0, 9.0, 13.0, 20.0),
}
#: The plans from whose answers the link is known, the quickest first, asked in turns with the
#: others; their targets are none of those. The planner is told what the one in the middle has
#: cost before.
LINK_PLANS: tuple[tuple[str, float], ...] = (
    ("vit_tiny_patch16_224", 3.0),
    ("vit_small_patch16_224", 10.0),
    ("vit_small_patch16_224", 33.0),
)
#: Each alone and both, as an agent may be asked to serve either.
PRECISIONS: tuple[tuple[Precision, ...], ...] = (("fp32",), ("fp32", "int8"))
#: Picture sizes whose difference in time tells the link's bandwidth.
_SMALL, _LARGE = 16, 224
_DEADLINE_MS = 10_000.0
#: What an agent's command begins with: the rest of it is run where nobody else wants the core.
_ASIDE = """
import os, sys
if hasattr(os, "SCHED_IDLE"):
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
os.execv(sys.argv[1], sys.argv[1:])
"""


class MemberRow(Record, frozen=True):
    """One member's computing, in the median of all requests."""

    case: Case
    precision: Precision
    runtime: str
    predicted_ms: float
    measured_ms: float


class PlanRow(Record, frozen=True):
    """One plan: what was predicted, and what a client waited."""

    teacher: str
    target_ms: float
    members: list[MemberRow]
    predicted_ms: float
    #: Percentiles of all requests.
    measured_ms: float
    p10_ms: float
    p90_ms: float
    requests: int
    others_cores: float


class LinkAtWork(Record, frozen=True):
    """The link beside agents of which the slower one computes so long."""

    compute_ms: float
    link: Link

    @property
    def late_s(self) -> float:
        """The 90th percentile of a round trip, no less than the median."""
        return max(self.link.round_trip_s, self.link.round_trip_p90_s or 0.0)


class PlanRows(Record, frozen=True):
    """The content of benchmarks/results/latency-plans.json."""

    machine: dict[str, Any]
    #: As they went into the predictions, in ascending order of computing.
    links: list[LinkAtWork]
    #: With agents that have next to nothing to compute.
    idle_link: Link
    rows: list[PlanRow]


def make_plan(
    teacher: str, target_ms: float, precisions: Sequence[Precision], profiles: Sequence[str]
) -> Plan:
    """What the planner makes of the profiles, a better single network or not."""
    options = PlanOptions(latency_ms=target_ms, anyway=True)
    spec = teacher_spec(teacher, {})
    return make_planned(spec, profiles, options, NUM_CLASSES, precisions=precisions).plan


def make_plans(profiles: Sequence[str]) -> list[Plan]:
    """The plans of all teachers, targets and precisions, advised or not; the same one only once."""
    plans: list[Plan] = []
    for teacher, targets_ms in TARGETS_MS.items():
        for target_ms in targets_ms:
            for precisions in PRECISIONS:
                plan = make_plan(teacher, target_ms, precisions, profiles)
                if [a.submodel for a in plan.assignments] not in [
                    [a.submodel for a in other.assignments] for other in plans
                ]:
                    plans.append(plan)
    return plans


@contextmanager
def _agents(bundle: Bundle, folder: Path, cores: dict[str, int]) -> Iterator[Path]:
    """fleet.toml of a running agent per device, each on a core of its own."""
    with ExitStack() as stack:
        addresses = [
            f"{a.device}={stack.enter_context(_agent(bundle, a.device, cores[a.device]))}"
            for a in bundle.manifest.plan.assignments
        ]
        new_fleet(bundle, addresses, folder / "fleet.toml")
        yield folder / "fleet.toml"


@contextmanager
def _agent(bundle: Bundle, device: str, core: int) -> Iterator[str]:
    command = agent_command(bundle.path, device, "--threads", 1, "--cpus", core)
    with AgentProcess(device, [sys.executable, "-c", _ASIDE, *command]) as agent:
        yield agent.wait_for("READY").address


def measure_idle_link(folder: Path, cores: dict[str, int], requests: int) -> Link:
    """What a call to two agents costs beyond computing, as a link: fixed, and per byte."""
    costs_ms = {}
    for side in (_SMALL, _LARGE):
        where = folder / f"link-{side}"
        write_bundle(where / "bundle", devices=tuple(cores), sizes=(side, side))
        bundle = Bundle.open(where / "bundle")
        with _agents(bundle, where, cores) as fleet, Client.connect(fleet) as client:
            picture = noise_picture(side)
            answers = [client.classify(picture) for _ in range(requests + 10)][10:]
        costs_ms[side] = np.percentile([overhead_ms(answer) for answer in answers], (50, 90))
    more_bytes = request_bytes(_LARGE, "raw") - request_bytes(_SMALL, "raw")
    per_byte_ms = max(1e-9, float(costs_ms[_LARGE][0] - costs_ms[_SMALL][0]) / more_bytes)
    small_bytes = request_bytes(_SMALL, "raw") + reply_bytes(len(LABELS))
    fixed_ms, late_ms = np.maximum(0.0, costs_ms[_SMALL] - small_bytes * per_byte_ms).tolist()
    return Link(
        bandwidth_bps=8e3 / per_byte_ms,
        round_trip_s=fixed_ms / 1e3,
        round_trip_p90_s=late_ms / 1e3,
    )


def link_beside(compute_ms: float, links: Sequence[LinkAtWork]) -> Link:
    """The link beside agents that compute so long, between those that were measured."""
    known_ms = [at_work.compute_ms for at_work in links]

    def between(values_s: Sequence[float]) -> float:
        return float(np.interp(compute_ms, known_ms, values_s))

    return structs.replace(
        links[0].link,
        round_trip_s=between([at_work.link.round_trip_s for at_work in links]),
        round_trip_p90_s=between([at_work.late_s for at_work in links]),
    )


def _written(folder: Path, profiles: Sequence[DeviceProfile], link: Link) -> list[str]:
    """Files of the profiles with this link."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{profile.name}.toml" for profile in profiles]
    for path, profile in zip(paths, profiles, strict=True):
        write_toml(path, structs.replace(profile, link=link))
    return [str(path) for path in paths]


def _cases(plan: Plan) -> list[Case]:
    return [case_of(plan, k) for k in range(len(plan.assignments))]


class _Served:
    """A plan whose agents run, and what requests came to so far."""

    def __init__(
        self, stack: ExitStack, folder: Path, bundle: Bundle, cores: dict[str, int]
    ) -> None:
        fleet = stack.enter_context(_agents(bundle, folder, cores))
        self._client = stack.enter_context(Client.connect(fleet))
        self._plan = bundle.manifest.plan
        # As large as the largest view, so that cutting views is part of what is timed.
        largest = max(a.vit.image_size for a in self._plan.assignments)
        self._picture = noise_picture(largest)
        self.latency_ms: list[float] = []
        #: What each request took beyond its members' computing.
        self.cost_ms: list[float] = []
        self.compute_ms: list[list[float]] = [[] for _ in self._plan.assignments]
        self.others_cores: list[float] = []

    def burst(self, seconds: float) -> None:
        """Requests one after another for `seconds`; the first few are not counted."""
        for _ in range(5):
            self._client.classify(self._picture, deadline_ms=_DEADLINE_MS)
        begin, others_s, own_ms = time.perf_counter(), others_cpu_s(), 0.0
        while time.perf_counter() - begin < seconds:
            answer = self._client.classify(self._picture, deadline_ms=_DEADLINE_MS)
            assert not answer.partial, answer.missing
            self.latency_ms.append(answer.latency_ms)
            self.cost_ms.append(overhead_ms(answer))
            for member in answer.members:
                self.compute_ms[member.k].append(member.compute_ms)
                own_ms += member.compute_ms
        # The agents are other processes too: what they computed is taken off.
        others_s = others_cpu_s() - others_s - own_ms / 1e3
        self.others_cores.append(max(0.0, others_s / (time.perf_counter() - begin)))

    def link(self, idle: Link) -> LinkAtWork:
        """The link with what it cost beyond computing while these agents were at work."""
        largest = max(a.vit.image_size for a in self._plan.assignments)
        sent_bytes = request_bytes(largest, "raw") + reply_bytes(NUM_CLASSES)
        bytes_ms = 8e3 * sent_bytes / idle.bandwidth_bps
        costs_ms = np.percentile(self.cost_ms, (50, 90)) - bytes_ms
        fixed_ms, late_ms = np.maximum(0.0, costs_ms).tolist()
        return LinkAtWork(
            compute_ms=statistics.median(map(max, zip(*self.compute_ms, strict=True))),
            link=structs.replace(idle, round_trip_s=fixed_ms / 1e3, round_trip_p90_s=late_ms / 1e3),
        )

    def row(self, profiles: Sequence[DeviceProfile], links: Sequence[LinkAtWork]) -> PlanRow:
        """What the bursts came to, and what was predicted."""
        low, middle, high = np.percentile(self.latency_ms, (10, 50, 90))
        return PlanRow(
            teacher=self._plan.require_teacher().name,
            target_ms=self._plan.target_ms,
            members=[
                MemberRow(
                    case=case_of(self._plan, k),
                    precision=assignment.vit.precision,
                    runtime=assignment.runtime,
                    predicted_ms=assignment.predicted_ms.compute,
                    measured_ms=round(statistics.median(self.compute_ms[k]), 4),
                )
                for k, assignment in enumerate(self._plan.assignments)
            ],
            predicted_ms=round(predicted_ms(self._plan, profiles, links), 4),
            measured_ms=round(float(middle), 4),
            p10_ms=round(float(low), 4),
            p90_ms=round(float(high), 4),
            requests=len(self.latency_ms),
            others_cores=round(statistics.median(self.others_cores), 2),
        )


def predicted_ms(
    plan: Plan, profiles: Sequence[DeviceProfile], links: Sequence[LinkAtWork]
) -> float:
    """What a client is predicted to wait for all members in the median.

    Of several members the slower one counts, so each has to be in time in more than half of the
    requests. The client's own work is in the `links` that were measured; `profiles` have the one
    that the planner was told.
    """
    link = link_beside(max(a.predicted_ms.compute for a in plan.assignments), links)
    pace = dataclasses.replace(pace_for(50, len(plan.assignments)), client_ms=0.0)
    by_name = {profile.name: profile for profile in profiles}
    latest_ms = 0.0
    for a in plan.assignments:
        profile = by_name[a.device]
        way = Way(
            precision=a.vit.precision,
            runtime=a.runtime,
            provider=a.provider,
            threads=a.threads,
        )
        compute_ms = np.array([a.predicted_ms.compute])
        sigma = spread_of(matching_points(profile, way)).sigma(compute_ms)
        more_s = link.round_trip_s - profile.link.round_trip_s
        network_ms = np.array([a.predicted_ms.network + more_s * 1e3])
        by_ms = pace.by_ms(compute_ms, network_ms, sigma, jitter_of(link))
        latest_ms = max(latest_ms, float(by_ms[0]))
    return latest_ms


def measure_plans(
    models: Path,
    profiles: Sequence[DeviceProfile],
    *,
    rounds: int,
    seconds: float,
    note: Callable[[str], None],
) -> tuple[list[LinkAtWork], Link, list[PlanRow]]:
    """Serve every plan of `profiles`, one per core, and ask them in turns, `rounds` bursts each.

    Returns the links at work and the idle one as well.
    """
    cores = {profile.name: core for core, profile in enumerate(profiles)}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)

        def serve(plans: Sequence[Plan], what: str) -> list[_Served]:
            export_all(models, [case for plan in plans for case in _cases(plan)], note)
            served = []
            for number, plan in enumerate(plans):
                note(f"starting the agents of {what} {number + 1} of {len(plans)}")
                where = folder / f"{what}-{number}"
                bundle = write_plan_bundle(where / "bundle", models, plan)
                served.append(_Served(stack, where, bundle, cores))
            return served

        note("measuring the link")
        idle = measure_idle_link(folder, cores, requests=400)
        files = _written(folder / "idle", profiles, idle)
        linking = serve([make_plan(*asked, PRECISIONS[0], files) for asked in LINK_PLANS], "link")
        teller = linking[len(linking) // 2]
        teller.burst(seconds)
        told = teller.link(idle).link
        served = serve(make_plans(_written(folder / "told", profiles, told)), "plan")
        for number in range(rounds):
            note(f"round {number + 1} of {rounds}")
            for one in (*linking, *served):
                one.burst(seconds)
        links = [one.link(idle) for one in linking]
        linked = [structs.replace(profile, link=told) for profile in profiles]
        return links, idle, [one.row(linked, links) for one in served]
