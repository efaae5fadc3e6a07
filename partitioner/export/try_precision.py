"""Try a sub-model in other precisions and runtimes, and choose which of them are served.

`try_precision` makes and measures one, `accept` decides: it has to be measured faster on every
device that serves the member, and the fused answer may lose at most `max_loss`, however many
members are quantized.
"""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from mdp.errors import AgentError, InputError
from mdp.formats.bundle import Bundle
from mdp.formats.model_file import ModelFile
from mdp.formats.plan import Assignment
from mdp.formats.profile import DeviceProfile
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from mdp.runtimes.base import Execution, Runtime
from mdp.runtimes.select import open_runtime
from partitioner.estimates import latency
from partitioner.estimates.latency_networks import fit_networks
from partitioner.estimates.macs import macs
from partitioner.export.quantize import WAYS, QuantizationError, Way, quantize_model
from partitioner.export.sessions import batch_for, contribution

#: Smallest share of fp32's time that has to be saved: less is noise between two runs.
MIN_GAIN = 0.03
#: Default of the accuracy that the fused answer may lose, a fraction.
MAX_LOSS = 0.005
#: Models are timed in turns: rounds, seconds per model and round, least runs, runs before them.
ROUNDS, ROUND_S, MIN_RUNS, WARM_UP = 9, 0.1, 5, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeRequest:
    """The precisions to try, and what they may cost."""

    #: Accuracy that the fused answer may lose, a fraction.
    max_loss: float
    profiles: Sequence[DeviceProfile] = ()
    #: Devices that are timed on this machine.
    here: Sequence[str] = ()
    ways: Sequence[Way] = WAYS[1:]
    #: Sub-models that are tried, by k; None: all.
    members: Collection[int] | None = None


class TrialTiming(NamedTuple):
    """Milliseconds of one picture on one device, and those of the planned fp32."""

    compute_ms: float
    fp32_ms: float

    @property
    def ratio(self) -> float:
        """Time relative to fp32."""
        return self.compute_ms / self.fp32_ms


@dataclass(slots=True, kw_only=True)
class Trial:
    """Sub-model `k` in one precision and runtime. A `reason` without `accepted` rejects it."""

    k: int
    way: Way
    model: bytes = field(default=b"", repr=False)
    #: Logits `[N, C]` of the calibration pictures; None where there are none to compare.
    logits: Contribution | None = None
    #: On the assigned device.
    timing: TrialTiming | None = None
    #: Accuracy that the fused answer loses if only this member is changed, a fraction.
    loss: float | None = None
    reason: str = ""
    accepted: bool = False


def try_member(
    bundle: Bundle, assignment: Assignment, pixels: Pixels, request: QuantizeRequest
) -> list[Trial]:
    """Sub-model `assignment.k` in each requested way but the planned one, made and timed."""
    plan = bundle.manifest.plan
    planned: Way = (assignment.spec.precision, assignment.runtime)
    replicas = [plan.assignment_of(r.device) for r in plan.replicas if r.k == assignment.k]
    parts = [assignment, *(part for part in replicas if part is not None)]
    timings: dict[Way, dict[str, TrialTiming]] = {w: {} for w in request.ways if w != planned}
    trials = [
        try_precision(bundle, parts, way, pixels, request, found) for way, found in timings.items()
    ]
    made = [trial for trial in trials if not trial.reason]
    for part in parts:
        if part.device in request.here and made:
            runs = [_open(bundle, part, planned).run]
            runs += [_open(bundle, part, trial.way, trial.model).run for trial in made]
            fp32_ms, *compute_ms = best_ms(runs, pixels[:1])
            for trial, ms in zip(made, compute_ms, strict=True):
                timings[trial.way][part.device] = TrialTiming(ms, fp32_ms)
    for trial in made:
        measured = timings[trial.way]
        trial.timing = measured[assignment.device]
        slow = [too_slow(measured[part.device], part.device) for part in parts]
        trial.reason = next((reason for reason in slow if reason), "")
        if trial.reason:
            trial.model = b""
    return trials


def try_precision(
    bundle: Bundle,
    parts: Sequence[Assignment],
    way: Way,
    pixels: Pixels,
    request: QuantizeRequest,
    timings: dict[str, TrialTiming],
) -> Trial:
    """The sub-model of `parts`, the devices that serve it, in one precision and runtime.

    Timings known from profiles are put into `timings` by device. A trial with a `reason` is given
    up: unknown latency, no conversion, no runtime, or logits that are not finite.
    """
    first = parts[0]
    trial = Trial(k=first.k, way=way)
    for part in parts:
        if part.device in request.here:
            continue
        profile = next((p for p in request.profiles if p.name == part.device), None)
        found: TrialTiming | str = (
            f"nothing was measured on {part.device}: give its profile, or --here"
            if profile is None
            else profile_timing(profile, part, way, (first.spec.precision, first.runtime))
        )
        if isinstance(found, str):
            trial.reason = found
            return trial
        timings[part.device] = found
    try:
        trial.model = quantize_model(bundle.model(first.k).content, way[0], pixels)
        runtime = _open(bundle, first, way, trial.model)
        outputs = contribution(runtime, pixels, batch_for(way[0]))
    except (QuantizationError, InputError, AgentError) as error:
        trial.reason = str(error)
        return trial
    finite = np.isfinite(outputs.heads).all(axis=(0, 2))
    if finite.all():
        trial.logits = outputs
    else:
        count = f"{int((~finite).sum())} of {len(pixels)}"
        trial.reason = f"logits are not finite on {count} calibration pictures"
    return trial


def _open(bundle: Bundle, part: Assignment, way: Way, content: bytes | None = None) -> Runtime:
    """The sub-model of `part` as its device runs it in `way`; `content` replaces its file."""
    model = bundle.model(part.k)
    if content is not None:
        model = ModelFile(model.path, content)
    execution = replace(Execution.of(part), precision=way[0], runtime=way[1])
    return open_runtime(model, execution, num_classes=len(bundle.manifest.labels))


def best_ms(
    runs: Sequence[Callable[[Pixels], object]],
    pixels: Pixels,
    clock: Callable[[], float] = time.perf_counter,
    rounds: int = 0,
) -> list[float]:
    """Milliseconds of one picture for each of `runs`: the best round's median.

    There are `ROUNDS` rounds, unless fewer are asked for.

    They are timed in turns. Other load on the machine only adds time: of two equal models under a
    load of 6 on 2 cores neither was 3 % faster in 24 comparisons.
    """
    one = np.ascontiguousarray(pixels[:1])
    best = [math.inf] * len(runs)
    for _ in range(rounds or ROUNDS):
        for place, run in enumerate(runs):
            for _ in range(WARM_UP):
                run(one)
            times_s: list[float] = []
            while sum(times_s) < ROUND_S or len(times_s) < MIN_RUNS:
                started_s = clock()
                run(one)
                times_s.append(clock() - started_s)
            best[place] = min(best[place], float(np.median(times_s)) * 1e3)
    return best


def profile_timing(
    profile: DeviceProfile, part: Assignment, way: Way, planned: Way
) -> TrialTiming | str:
    """The sub-model of `part` in `way` and as `planned`, by a measured profile; else why unknown.

    A plain ViT's ratio is that of the measured points of its shape, or interpolated between shapes
    over the logarithm of the MACs; beyond the measured shapes it is constant. Other networks are
    predicted by the formula fitted to the profile's networks.
    """
    if profile.provenance["latency"].method != "measured":
        return f"the latencies of profile {profile.name} are estimated, not measured"
    runs = [
        latency.Way(precision=p, runtime=r, provider=part.provider, threads=part.threads)
        for p, r in (way, planned)
    ]
    unknown = f"profile {profile.name} has no {{}} with {part.threads} threads"
    if part.network is not None:
        known, predicted_ms = latency.ways(profile), []
        for run in runs:
            network = replace(part.network, precision=run.precision)
            fitted = fit_networks(profile, run) if run in known else None
            found = None if fitted is None else fitted.estimate(network)
            if found is None:
                words = f"networks in {way_words((run.precision, run.runtime))}"
                return f"{unknown.format(words)}: measure with --here"
            predicted_ms.append(found.ms)
        return TrialTiming(*predicted_ms)
    quick, plain = (
        {
            replace(latency.spec_of(point), precision="fp32"): point.latency_ms
            for point in latency.points_of(profile, run)
            if point.batch == 1
        }
        for run in runs
    )
    shapes = sorted(quick.keys() & plain.keys(), key=lambda shape: macs(shape, 0))
    if not shapes:
        return unknown.format(f"{way_words(way)} beside fp32 of the same shapes")
    assert part.submodel is not None
    shape = replace(part.submodel, precision="fp32")
    if shape in shapes:
        return TrialTiming(quick[shape], plain[shape])
    size = np.log([macs(shape, 0) for shape in shapes])
    logs = np.log([(quick[shape], plain[shape]) for shape in shapes])
    compute_ms, fp32_ms = (
        math.exp(float(np.interp(math.log(macs(shape, 0)), size, column))) for column in logs.T
    )
    return TrialTiming(compute_ms, fp32_ms)


def way_words(way: Way) -> str:
    """A precision and a runtime in words: `int8 in onnxruntime`."""
    return f"{way[0]} in {way[1]}"


def too_slow(timing: TrialTiming, device: str) -> str:
    """Reason not to quantize, by a timing, or an empty text."""
    if timing.ratio <= 1 - MIN_GAIN:
        return ""
    how = "hardly faster" if timing.ratio < 1 else "slower"
    return f"{how}: takes {timing.compute_ms:.3g} ms on {device} and fp32 {timing.fp32_ms:.3g} ms"


def pictures_needed(max_loss: float) -> int:
    """Calibration pictures with which one picture is worth no more than `max_loss`, a fraction."""
    return math.ceil(round(1 / max_loss, 6))


def accept(
    trials: Sequence[Trial],
    fused_loss: Callable[[Mapping[int, Way]], float],
    urgency: Mapping[int, float],
    max_loss: float,
) -> None:
    """Accept at most one of each member's `trials`, in place, and give every other a reason.

    Members in descending order of `urgency`, the predicted milliseconds of their answers; of each
    the fastest with which the fused answer, all accepted ones together, loses at most `max_loss`.
    """
    accepted: dict[int, Way] = {}
    for k in sorted(urgency, key=lambda k: -urgency[k]):
        candidates = [(t.timing.ratio, t) for t in trials if t.k == k and t.timing and not t.reason]
        # Ratios, as drift between the measurements of two devices cancels out in them.
        for ratio, trial in sorted(candidates, key=lambda pair: pair[0]):
            if k in accepted:
                trial.reason = f"slower than {way_words(accepted[k])}"
                continue
            loss = fused_loss({**accepted, k: trial.way})
            text = points(loss)
            if accepted:
                text += f" together with sub-models {', '.join(map(str, sorted(accepted)))}"
            # False for NaN; differences of shares are not exact.
            trial.accepted = loss <= max_loss + 1e-9
            if trial.accepted:
                accepted[k] = trial.way
                trial.reason = f"{ratio:.0%} of fp32's time, and the fused answer loses {text}"
            else:
                trial.reason = f"loses {text}, more than {points(max_loss)}"


def points(loss: float) -> str:
    return f"{loss * 100:.2f} points"
