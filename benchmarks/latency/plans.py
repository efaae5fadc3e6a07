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
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from msgspec import structs

from benchmarks.harness.models import refilled
from benchmarks.harness.serving_fleet import client_of, served
from benchmarks.latency.measure import PRECISIONS, Note, Others, export_all, model_file
from benchmarks.latency.shapes import Case
from mdp.cli.bench import noise_picture, overhead_ms
from mdp.files import Record, write_toml
from mdp.formats.bundle import Bundle
from mdp.formats.plan import Plan
from mdp.formats.profile import DeviceProfile, Link, Precision
from mdp.testing.agents import agent_command
from mdp.testing.bundles import LABELS, write_bundle
from partitioner.estimates.latency import Way, matching_points
from partitioner.estimates.latency_quantiles import jitter_of, pace_for, spread_of
from partitioner.estimates.network import reply_bytes, request_bytes
from partitioner.networks.teacher import teacher_spec
from partitioner.planner.make_plan import PlanOptions, make_planned

NUM_CLASSES = 100
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
ROUNDS, BURST_S, LINK_CALLS = 4, 2.0, 400
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


class LinkAtWork(Record, frozen=True):
    """The link beside agents of which the slower one computes so long."""

    compute_ms: float
    link: Link


def make_plan(
    teacher: str, target_ms: float, precisions: Sequence[Precision], profiles: Sequence[str]
) -> Plan:
    """What the planner makes of the profiles, a better single network or not."""
    options = PlanOptions(latency_ms=target_ms, anyway=True)
    spec = teacher_spec(teacher, {})
    return make_planned(spec, profiles, options, NUM_CLASSES, precisions=precisions).plan


def make_plans(profiles: Sequence[str]) -> list[Plan]:
    """The plans of all teachers, targets and precisions, advised or not; the same one only once."""
    plans: dict[str, Plan] = {}
    for teacher, targets_ms in TARGETS_MS.items():
        # fp32 alone and both, as an agent may be asked to serve either.
        for target_ms, precisions in product(targets_ms, (PRECISIONS[:1], PRECISIONS)):
            plan = make_plan(teacher, target_ms, precisions, profiles)
            plans.setdefault(repr([a.submodel for a in plan.assignments]), plan)
    return list(plans.values())


def case_of(plan: Plan, k: int) -> Case:
    spec = structs.replace(plan.assignments[k].vit, precision="fp32")
    return Case(spec=spec, num_classes=NUM_CLASSES)


def write_plan_bundle(folder: Path, models: Path, plan: Plan) -> Bundle:
    """The plan's untrained sub-models as a bundle; its answers mean nothing."""
    files = [
        model_file(models, case_of(plan, k), a.vit.precision)
        for k, a in enumerate(plan.assignments)
    ]
    devices, sizes = zip(*((a.device, a.vit.image_size) for a in plan.assignments), strict=True)
    write_bundle(folder, devices=devices, sizes=sizes, evaluated=False)
    labels = [f"class-{index}" for index in range(NUM_CLASSES)]
    return refilled(folder, [file.read_bytes() for file in files], labels, plan)


class Served:
    """A bundle whose agents run, each on a core of its own, and what requests came to so far."""

    def __init__(self, stack: ExitStack, make_bundle: Any, cores: Mapping[str, int]) -> None:
        mdp_agent = agent_command(Path(), "")[:3]
        fleet = stack.enter_context(
            served(
                make_bundle, "--threads", 1,
                each={device: ("--cpus", core) for device, core in cores.items()},
                program=[sys.executable, "-c", _ASIDE, *mdp_agent],
            )
        )  # fmt: skip
        self._client = stack.enter_context(client_of(fleet))
        self.plan = Bundle.open(fleet.bundle).manifest.plan
        # As large as the largest view, so that cutting views is part of what is timed.
        self._side = max(a.vit.image_size for a in self.plan.assignments)
        self.latency_ms: list[float] = []
        #: What each request took beyond its members' computing.
        self.cost_ms: list[float] = []
        self.compute_ms: list[list[float]] = [[] for _ in self.plan.assignments]
        self.others_cores: list[float] = []

    def burst(self, seconds: float = BURST_S, requests: int = 1) -> None:
        """So many requests one after another, and for `seconds`; the first few do not count."""
        picture = noise_picture(self._side)
        for _ in range(5):
            self._client.classify(picture, deadline_ms=_DEADLINE_MS)
        until_s, others, own_ms, count = time.perf_counter() + seconds, Others(), 0.0, 0
        while time.perf_counter() < until_s or count < requests:
            answer = self._client.classify(picture, deadline_ms=_DEADLINE_MS)
            assert not answer.partial, answer.missing
            count += 1
            self.latency_ms.append(answer.latency_ms)
            self.cost_ms.append(overhead_ms(answer))
            for member in answer.members:
                self.compute_ms[member.k].append(member.compute_ms)
                own_ms += member.compute_ms
        # The agents are other processes too: what they computed is taken off.
        self.others_cores.append(others.cores(own_ms / 1e3))

    def link(self, bandwidth_bps: float, classes: int) -> LinkAtWork:
        """A link of this bandwidth, with what it cost beyond computing beside these agents."""
        sent_bytes = request_bytes(self._side, "raw") + reply_bytes(classes)
        costs_ms = np.percentile(self.cost_ms, (50, 90)) - 8e3 * sent_bytes / bandwidth_bps
        fixed_s, late_s = (np.maximum(0.0, costs_ms) / 1e3).tolist()
        link = Link(bandwidth_bps=bandwidth_bps, round_trip_s=fixed_s, round_trip_p90_s=late_s)
        slowest_ms = map(max, zip(*self.compute_ms, strict=True))
        return LinkAtWork(compute_ms=median(slowest_ms), link=link)

    def row(self, profiles: Sequence[DeviceProfile], links: Sequence[LinkAtWork]) -> dict[str, Any]:
        """What the bursts came to, and what was predicted; percentiles of all requests."""
        low, middle, high = np.percentile(self.latency_ms, (10, 50, 90)).round(4).tolist()
        members = [
            {"case": case_of(self.plan, k), "precision": a.vit.precision, "runtime": a.runtime,
             "predicted_ms": a.predicted_ms.compute,
             "measured_ms": round(median(self.compute_ms[k]), 4)}
            for k, a in enumerate(self.plan.assignments)
        ]  # fmt: skip
        return {
            "teacher": self.plan.require_teacher().name,
            "target_ms": self.plan.target_ms,
            "members": members,
            "predicted_ms": round(predicted_ms(self.plan, profiles, links), 4),
            "measured_ms": middle,
            "p10_ms": low,
            "p90_ms": high,
            "requests": len(self.latency_ms),
            "others_cores": round(median(self.others_cores), 2),
        }


def idle_bandwidth_bps(small: Served, large: Served) -> float:
    """What a byte costs, from calls of small and of large pictures to agents that are idle."""
    more_bytes = request_bytes(_LARGE, "raw") - request_bytes(_SMALL, "raw")
    more_ms = median(large.cost_ms) - median(small.cost_ms)
    return 8e3 / max(1e-9, more_ms / more_bytes)


def link_beside(compute_ms: float, links: Sequence[LinkAtWork]) -> Link:
    """The link beside agents that compute so long, between those that were measured."""
    known_ms = [at_work.compute_ms for at_work in links]
    trips_s = [(x.link.round_trip_s, x.link.round_trip_p90_s or 0.0) for x in links]
    typical_s, late_s = (
        float(np.interp(compute_ms, known_ms, values))
        for values in ([trip for trip, _ in trips_s], [max(both) for both in trips_s])
    )
    return structs.replace(links[0].link, round_trip_s=typical_s, round_trip_p90_s=late_s)


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
            precision=a.vit.precision, runtime=a.runtime, provider=a.provider, threads=a.threads
        )
        compute_ms = np.array([a.predicted_ms.compute])
        sigma = spread_of(matching_points(profile, way)).sigma(compute_ms)
        more_s = link.round_trip_s - profile.link.round_trip_s
        network_ms = np.array([a.predicted_ms.network + more_s * 1e3])
        by_ms = pace.by_ms(compute_ms, network_ms, sigma, jitter_of(link))
        latest_ms = max(latest_ms, float(by_ms[0]))
    return latest_ms


def measure_plans(
    machine: dict[str, Any], models: Path, profiles: Sequence[DeviceProfile], note: Note
) -> dict[str, Any]:
    """Serve every plan of `profiles`, one per core, and ask them in turns.

    Returns the content of benchmarks/results/latency-plans.json: the links as they went into the
    predictions, in ascending order of computing, and the one with agents that are idle.
    """
    cores = {profile.name: core for core, profile in enumerate(profiles)}
    with TemporaryDirectory() as name, ExitStack() as stack:

        def told(link: Link) -> list[str]:
            """Files of the profiles with this link."""
            paths = [Path(name) / f"{profile.name}.toml" for profile in profiles]
            for path, profile in zip(paths, profiles, strict=True):
                write_toml(path, structs.replace(profile, link=link))
            return [str(path) for path in paths]

        def serve(plans: Sequence[Plan]) -> list[Served]:
            cases = [case_of(plan, k) for plan in plans for k in range(len(plan.assignments))]
            export_all(models, cases, note)
            note(f"starting the agents of {len(plans)} plans")
            writers = [partial(write_plan_bundle, models=models, plan=plan) for plan in plans]
            return [Served(stack, writer, cores) for writer in writers]

        note("measuring the link")
        idle = []
        for side in (_SMALL, _LARGE):
            with ExitStack() as only:
                make = partial(write_bundle, devices=tuple(cores), sizes=(side, side))
                idle.append(Served(only, make, cores))
                idle[-1].burst(0.0, LINK_CALLS)
        bandwidth_bps = idle_bandwidth_bps(*idle)
        idle_link = idle[0].link(bandwidth_bps, len(LABELS)).link
        files = told(idle_link)
        linking = serve([make_plan(*asked, PRECISIONS[:1], files) for asked in LINK_PLANS])
        teller = linking[len(linking) // 2]
        teller.burst()
        link = teller.link(bandwidth_bps, NUM_CLASSES).link
        plans = serve(make_plans(told(link)))
        for number in range(ROUNDS):
            note(f"round {number + 1} of {ROUNDS}")
            for one in (*linking, *plans):
                one.burst()
        links = [one.link(bandwidth_bps, NUM_CLASSES) for one in linking]
        linked = [structs.replace(profile, link=link) for profile in profiles]
        rows = [one.row(linked, links) for one in plans]
    return {"machine": machine, "links": links, "idle_link": idle_link, "rows": rows}
