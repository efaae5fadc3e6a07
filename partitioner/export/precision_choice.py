"""Which sub-models are served in another precision: what is faster and loses little. Pure.

A candidate has to be measured faster on every device that serves it, and the fused answer of all
members together may lose so much and no more, however many of them are quantised.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from msgspec.structs import replace as changed

from mdp.formats.plan import NetworkSpec, SubModelSpec
from mdp.formats.profile import DeviceProfile, LatencyPoint, Precision, RuntimeName
from partitioner.estimates import latency
from partitioner.estimates.latency_networks import fit_networks
from partitioner.estimates.macs import macs

Way = tuple[Precision, RuntimeName]
#: How a sub-model is exported, and what everything else is compared with unless a plan has fp32 in
#: another runtime.
PLAIN: Way = ("fp32", "onnxruntime")
#: A candidate has to save this share of fp32's time; less is within what two runs differ by.
MIN_GAIN = 0.03
#: What the fused answer may lose unless something else is asked for, a fraction.
MAX_LOSS = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Milliseconds of one picture on one device, measured with those of fp32."""

    compute_ms: float
    fp32_ms: float
    #: Share of fp32's time that all rounds but one stayed within, where rounds are known.
    surely: float | None = None

    @property
    def ratio(self) -> float:
        """Time relative to fp32."""
        return self.compute_ms / self.fp32_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way of running sub-model `k`; `reason` says what speaks against it."""

    k: int
    way: Way
    #: On the assigned device.
    timing: Timing | None = None
    #: Fused accuracy lost on the calibration pictures if only this member runs so, a fraction.
    loss: float | None = None
    reason: str = ""
    kept: bool = False


def way_words(way: Way) -> str:
    """A way of running in words: `int8 in onnxruntime`."""
    return f"{way[0]} in {way[1]}"


def profile_timing(
    profile: DeviceProfile,
    spec: SubModelSpec,
    way: Way,
    *,
    threads: int,
    provider: str,
    against: Way = PLAIN,
) -> Timing | str:
    """What a profile's own measurements prove about `spec` run in a `way`, or why they prove none.

    Points are compared with those of fp32, in the runtime of `against`, of the same shape, threads
    and provider. For a shape in
    between, the ratio is interpolated over the MACs, both as logarithms; beyond the smallest or the
    largest measured shape it stays as it was there.
    """
    provenance = profile.provenance["latency"]
    if provenance.method != "measured":
        return f"the latency of profile {profile.name} is estimated, which proves nothing"
    points = _by_shape(profile, way, threads, provider)
    plain = _by_shape(profile, against, threads, provider)
    pairs = sorted(
        (math.log(macs(shape, 0)), math.log(points[shape]), math.log(plain[shape]))
        for shape in points.keys() & plain.keys()
    )
    if not pairs:
        return (
            f"profile {profile.name} has no {way_words(way)} beside fp32 of the same shapes "
            f"with {threads} threads"
        )
    shape = _shape(spec)
    if shape in points and shape in plain:
        return Timing(compute_ms=points[shape], fp32_ms=plain[shape])
    size, faster, slower = np.array(pairs).T
    at = math.log(macs(shape, 0))
    ratio = math.exp(float(np.interp(at, size, faster - slower)))
    fp32_ms = math.exp(float(np.interp(at, size, slower)))
    return Timing(compute_ms=fp32_ms * ratio, fp32_ms=fp32_ms)


def network_timing(
    profile: DeviceProfile,
    network: NetworkSpec,
    way: Way,
    *,
    threads: int,
    provider: str,
    against: Way = PLAIN,
) -> Timing | str:
    """The same of a network, by the latencies fitted to networks that the profile has measured."""
    if profile.provenance["latency"].method != "measured":
        return f"the latency of profile {profile.name} is estimated, which proves nothing"
    known, took_ms = latency.ways(profile), []
    for precision, runtime in (way, against):
        run = latency.Way(precision=precision, runtime=runtime, provider=provider, threads=threads)
        found = None
        if run in known:
            found = fit_networks(profile, run).estimate(changed(network, precision=precision))
        if found is None or found.basis != "measured":
            return (
                f"profile {profile.name} has no networks in {way_words((precision, runtime))} "
                f"with {threads} threads: measure with --here"
            )
        took_ms.append(found.ms)
    return Timing(compute_ms=took_ms[0], fp32_ms=took_ms[1])


def _by_shape(
    profile: DeviceProfile, way: Way, threads: int, provider: str
) -> dict[SubModelSpec, float]:
    """Shape in fp32's words -> milliseconds, of the points of one picture in this `way`."""

    def matches(point: LatencyPoint) -> bool:
        ran = (point.precision, point.runtime)
        where = (point.threads, point.provider or profile.provider, point.batch)
        return ran == way and where == (threads, provider, 1)

    return {_shape(p): p.latency_ms for p in profile.latency if matches(p)}


def _shape(spec: SubModelSpec | LatencyPoint) -> SubModelSpec:
    return SubModelSpec(
        image_size=spec.image_size,
        patch_size=spec.patch_size,
        embed_dim=spec.embed_dim,
        depth=spec.depth,
        num_heads=spec.num_heads,
        mlp_ratio=spec.mlp_ratio,
    )


def too_slow(timing: Timing, device: str) -> str:
    """Why a timing is no reason to quantise, or an empty text."""
    surely = timing.ratio if timing.surely is None else timing.surely
    if max(timing.ratio, surely) <= 1 - MIN_GAIN:
        return ""
    text = f"takes {timing.compute_ms:.3g} ms on {device} and fp32 {timing.fp32_ms:.3g} ms"
    if timing.ratio <= 1 - MIN_GAIN:
        return f"not faster in every round: {text} (measure while nothing else runs)"
    if timing.ratio < 1:
        return f"hardly faster: {text}"
    return f"slower: {text}"


def needed_pictures(max_loss: float) -> int:
    """How many calibration pictures show a loss of `max_loss`, a fraction: one of so many."""
    return math.ceil(round(1 / max_loss, 6))


def points(loss: float) -> str:
    """An accuracy lost, a fraction, in percentage points."""
    return f"{loss * 100:.2f} points"


def choose(
    candidates: Sequence[Candidate],
    fused_loss: Callable[[Mapping[int, Way]], float],
    urgency: Mapping[int, float],
    max_loss: float,
) -> list[Candidate]:
    """Decide about every candidate against which nothing speaks yet; the same list, decided.

    Members come in the order of `urgency` (milliseconds until their answer is there, the slowest
    first), and of each the fastest candidate is taken with which the fused answer loses at most
    `max_loss` together with everything taken before.
    """
    taken: dict[int, Way] = {}
    decided = {(c.k, c.way): c for c in candidates}
    for k in sorted(urgency, key=lambda k: -urgency[k]):
        open_ones = [c for c in candidates if c.k == k and not c.reason and c.timing is not None]
        for one in sorted(open_ones, key=_share):
            decided[k, one.way] = _decided(one, fused_loss, taken, max_loss)
            if decided[k, one.way].kept:
                taken[k] = one.way
    return [decided[c.k, c.way] for c in candidates]


def _share(candidate: Candidate) -> float:
    """Time relative to fp32: drift between two measurements of one device cancels out."""
    assert candidate.timing is not None
    return candidate.timing.ratio


def _decided(
    candidate: Candidate,
    fused_loss: Callable[[Mapping[int, Way]], float],
    taken: Mapping[int, Way],
    max_loss: float,
) -> Candidate:
    if candidate.k in taken:
        return replace(candidate, reason=f"slower than {way_words(taken[candidate.k])}")
    loss = fused_loss({**taken, candidate.k: candidate.way})
    others = ", ".join(str(k) for k in sorted(taken))
    with_others = f" together with sub-models {others}" if taken else ""
    # Written so that a NaN is refused too. Differences of shares are not exact.
    if not loss <= max_loss + 1e-9:
        reason = f"loses {points(loss)}{with_others}, more than {points(max_loss)}"
        return replace(candidate, reason=reason)
    timing = candidate.timing
    assert timing is not None
    reason = (
        f"{timing.ratio:.0%} of fp32's time, and the fused answer loses {points(loss)}{with_others}"
    )
    return replace(candidate, reason=reason, kept=True)
