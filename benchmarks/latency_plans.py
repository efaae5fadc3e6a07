"""Whole plans through real agents: a client's latency against the predicted total.

Plans are random, of two or three sub-models that no fit saw, each served by an agent of its own
with one thread. What the link and the client cost is measured in the same run, with models that
take next to no time, and goes into the prediction as the profile's link.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

from benchmarks.accuracy_table import Sheet
from benchmarks.latency_models import PRECISIONS, model_file
from benchmarks.latency_numbers import PROVIDER
from benchmarks.latency_shapes import Case, describe, with_precision
from benchmarks.measure_encoders import others_cpu_s
from benchmarks.overhead import agents
from mdp import Client
from mdp.bench import noise_picture, overhead_ms
from mdp.bundle import FUSION, MANIFEST, Bundle, Manifest, file_entry, model_path
from mdp.files import Record, write_json
from mdp.fusion import FusionWeights, SubsetWeights, listed_subsets
from mdp.plan import Assignment, Plan, TeacherSpec
from mdp.profile import DeviceProfile, Link, Precision
from partitioner.cost import macs, memory_bytes
from partitioner.latency import Way, fit_latency, predict
from partitioner.network import reply_bytes, request_bytes
from tests.support.bundles import LABELS, write_bundle

SEED = 8
#: Members of each plan. Two share two cores with the client; three are more than the cores.
MEMBERS = (2, 2, 2, 2, 2, 2, 3, 3)
#: A sub-model that computes less than this is not worth a device.
_LEAST_MACS = 30_000_000
#: Picture sizes whose difference in time tells the link's bandwidth.
_SMALL, _LARGE = 16, 224
_DEADLINE_MS = 10_000.0


class MemberRow(Record, frozen=True):
    """One member's computing, in the median of all requests."""

    case: Case
    precision: Precision
    predicted_ms: float
    measured_ms: float


class PlanRow(Record, frozen=True):
    """One plan: what was predicted, and what a client waited."""

    members: list[MemberRow]
    predicted_ms: float
    #: Percentiles of all requests.
    measured_ms: float
    p10_ms: float
    p90_ms: float
    requests: int
    others_cores: float


class PlanRows(Record, frozen=True):
    """The content of benchmarks/results/latency-plans.json."""

    machine: dict[str, Any]
    link: Link
    rows: list[PlanRow]


Part = tuple[Case, Precision]


def random_plans(cases: Sequence[Case], seed: int = SEED) -> list[list[Part]]:
    """Parts of every plan: different sub-models with the same classes, in random precisions."""
    rng = np.random.default_rng(seed)
    cases = [case for case in cases if macs(case.spec, case.num_classes) >= _LEAST_MACS]
    classes = sorted({case.num_classes for case in cases})
    plans = []
    for members in MEMBERS:
        num_classes = classes[rng.integers(len(classes))]
        fitting = [case for case in cases if case.num_classes == num_classes]
        chosen = rng.choice(len(fitting), size=members, replace=False)
        plans.append([(fitting[i], PRECISIONS[rng.integers(2)]) for i in chosen])
    return plans


def predicted_plan(profile: DeviceProfile, parts: Sequence[Part]) -> Plan:
    """The parts as a plan, one device each, with what the cost model predicts."""
    assignments = []
    for k, (case, precision) in enumerate(parts):
        model = fit_latency(profile, Way(precision=precision, provider=PROVIDER, threads=1))
        spec = with_precision(case, precision)
        assignments.append(
            Assignment(
                k=k,
                device=f"device-{k}",
                submodel=spec,
                predicted_ms=predict(profile, model, spec, case.num_classes),
                memory_bytes=memory_bytes(spec, case.num_classes),
                provider=PROVIDER,
                threads=1,
                why="drawn at random",
            )
        )
    longest = max(assignment.predicted_ms.total for assignment in assignments)
    return Plan(
        teacher=TeacherSpec(name="none", shape=parts[0][0].spec),
        target_ms=longest,
        refused=False,
        reason="",
        assignments=assignments,
    )


def write_plan_bundle(folder: Path, models: Path, plan: Plan, parts: Sequence[Part]) -> Bundle:
    """The plan's untrained sub-models as a bundle; its answers mean nothing."""
    members = range(len(parts))
    for k, (case, precision) in enumerate(parts):
        (folder / model_path(k)).parent.mkdir(parents=True)
        shutil.copyfile(model_file(models, case, precision), folder / model_path(k))
    num_classes = parts[0][0].num_classes
    subsets = [
        SubsetWeights(members=s, a=(0.5,) * len(s), b=(1.0 / len(s),) * len(s))
        for s in listed_subsets(members)
    ]
    write_json(folder / FUSION, FusionWeights(num_classes=num_classes, subsets=subsets))
    paths = [*(model_path(k) for k in members), FUSION]
    manifest = Manifest(
        name="untrained",
        labels=[f"class-{index}" for index in range(num_classes)],
        plan=plan,
        files={path: file_entry(folder / path) for path in paths},
        provenance={"made_by": "benchmarks/latency_plans.py"},
    )
    write_json(folder / MANIFEST, manifest)
    return Bundle.open(folder)


def measure_link(folder: Path, requests: int) -> Link:
    """What a call to two agents costs beyond computing, as a link: fixed, and per byte."""
    costs_ms = {}
    for side in (_SMALL, _LARGE):
        where = folder / f"link-{side}"
        write_bundle(where / "bundle", devices=("device-0", "device-1"), sizes=(side, side))
        bundle = Bundle.open(where / "bundle")
        with agents(bundle, where) as fleet, Client.connect(fleet) as client:
            picture = noise_picture(side)
            answers = [client.classify(picture) for _ in range(requests + 10)][10:]
        costs_ms[side] = statistics.median(map(overhead_ms, answers))
    more_bytes = request_bytes(_LARGE, "raw") - request_bytes(_SMALL, "raw")
    per_byte_ms = max(1e-9, (costs_ms[_LARGE] - costs_ms[_SMALL]) / more_bytes)
    small_bytes = request_bytes(_SMALL, "raw") + reply_bytes(len(LABELS))
    fixed_ms = max(0.0, costs_ms[_SMALL] - small_bytes * per_byte_ms)
    return Link(bandwidth_bps=8e3 / per_byte_ms, round_trip_s=fixed_ms / 1e3)


class _Served:
    """A plan whose agents run, and what requests came to so far."""

    def __init__(self, stack: ExitStack, folder: Path, bundle: Bundle) -> None:
        fleet = stack.enter_context(agents(bundle, folder))
        self._client = stack.enter_context(Client.connect(fleet))
        # As large as the largest view, so that cutting views is part of what is timed.
        plan = bundle.manifest.plan
        self._picture = noise_picture(max(a.submodel.image_size for a in plan.assignments))
        self.latency_ms: list[float] = []
        self.compute_ms: list[list[float]] = [[] for _ in plan.assignments]
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
            for member in answer.members:
                self.compute_ms[member.k].append(member.compute_ms)
                own_ms += member.compute_ms
        # The agents are other processes too: what they computed is taken off.
        others_s = others_cpu_s() - others_s - own_ms / 1e3
        self.others_cores.append(max(0.0, others_s / (time.perf_counter() - begin)))

    def row(self, plan: Plan, parts: Sequence[Part]) -> PlanRow:
        """What the bursts came to."""
        low, middle, high = np.percentile(self.latency_ms, (10, 50, 90))
        return PlanRow(
            members=[
                MemberRow(
                    case=case,
                    precision=precision,
                    predicted_ms=assignment.predicted_ms.compute,
                    measured_ms=round(statistics.median(compute), 4),
                )
                for (case, precision), assignment, compute in zip(
                    parts, plan.assignments, self.compute_ms, strict=True
                )
            ],
            predicted_ms=plan.target_ms,
            measured_ms=round(float(middle), 4),
            p10_ms=round(float(low), 4),
            p90_ms=round(float(high), 4),
            requests=len(self.latency_ms),
            others_cores=round(statistics.median(self.others_cores), 2),
        )


def measure_plans(
    models: Path,
    profile: DeviceProfile,
    cases: Sequence[Case],
    *,
    rounds: int,
    seconds: float,
    note: Callable[[str], None],
) -> tuple[Link, list[PlanRow]]:
    """Serve every plan at once, ask them in turns, `rounds` bursts each."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        note("measuring the link")
        link = measure_link(folder, requests=400)
        profile = structs.replace(profile, link=link)
        parts = random_plans(cases)
        plans = [predicted_plan(profile, part) for part in parts]
        served = []
        for number, (plan, part) in enumerate(zip(plans, parts, strict=True)):
            note(f"starting the agents of plan {number + 1} of {len(plans)}")
            where = folder / f"plan-{number}"
            bundle = write_plan_bundle(where / "bundle", models, plan, part)
            served.append(_Served(stack, where, bundle))
        for number in range(rounds):
            note(f"round {number + 1} of {rounds}")
            for one in served:
                one.burst(seconds)
        rows = zip(served, plans, parts, strict=True)
        return link, [one.row(plan, part) for one, plan, part in rows]


def plan_sheet(plans: PlanRows) -> Sheet:
    """Every plan, predicted against measured, and the errors' median and 95th percentile."""
    rows = []
    for row in plans.rows:
        members = ", ".join(
            f"{describe(m.case)}, {m.precision}: {m.measured_ms:.3g} ({m.predicted_ms:.3g})"
            for m in row.members
        )
        rows.append(
            (members, f"{row.measured_ms:.3g}", f"{row.p90_ms:.3g}", f"{row.predicted_ms:.3g}",
             f"{row.predicted_ms / row.measured_ms - 1:+.1%}")
        )  # fmt: skip
    for count in sorted({len(row.members) for row in plans.rows}):
        errors = [
            abs(row.predicted_ms / row.measured_ms - 1)
            for row in plans.rows
            if len(row.members) == count
        ]
        text = f"median {np.median(errors):.1%}, 95th percentile {np.percentile(errors, 95):.1%}"
        rows.append((f"all plans of {count} devices", "", "", "", text))
    return Sheet(
        "Whole plans through real agents, one thread each: client latency in ms",
        ("members: measured (predicted) computing in ms", "p50", "p90", "predicted", "error"),
        rows,
    )
