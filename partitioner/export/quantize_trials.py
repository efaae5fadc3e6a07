"""Try every way of running a sub-model: what comes out, how fast, at what loss."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np

from mdp.errors import AgentError, InputError
from mdp.files import write_bytes
from mdp.formats.bundle import Bundle
from mdp.formats.model_file import ModelFile
from mdp.formats.plan import Assignment
from mdp.formats.profile import DeviceProfile
from mdp.fusion.fuse import Contribution, fuse
from mdp.pictures.crop import Pixels
from mdp.runtimes.base import Execution, Runtime
from mdp.runtimes.select import open_runtime
from partitioner.data.datasets import Dataset
from partitioner.export.evaluate import accuracy
from partitioner.export.precision_choice import (
    Candidate,
    Timing,
    Way,
    network_timing,
    profile_timing,
    too_slow,
)
from partitioner.export.quantize import WAYS, QuantisationError, quantised
from partitioner.export.sessions import batch_for, contribution, on_processor
from partitioner.fusion.stacking import fit_subset

#: Rounds in which the ways of running a member take turns, so that drift of the machine meets all;
#: of each round so many seconds are spent on each way, but at least some runs.
ROUNDS, ROUND_S, MIN_RUNS, WARM_UP = 9, 0.1, 5, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How a bundle is to be quantised."""

    #: What the fused answer may lose, a fraction.
    max_loss: float
    profiles: Sequence[DeviceProfile]
    #: Devices for which this machine stands.
    here: Sequence[str] = ()
    ways: Sequence[Way] = WAYS[1:]
    #: Sub-models that are tried, by k; None: all.
    members: Collection[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A candidate with what it computes; nothing where it was given up before."""

    candidate: Candidate
    model: bytes = b""
    calibration: Contribution | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """A candidate that computes, and the devices' timings as far as they are known."""

    candidate: Candidate
    path: Path
    outputs: Contribution
    timings: dict[str, Timing]


class Member:
    """One sub-model, and everything that it might be turned into."""

    def __init__(
        self, bundle: Bundle, assignment: Assignment, pixels: Pixels, asked: Asked
    ) -> None:
        self._bundle = bundle
        self._pixels, self._asked, self._assignment = pixels, asked, assignment
        plan = bundle.manifest.plan
        #: Everyone who runs this file: the assigned device first, then its replicas.
        self._served = [assignment]
        for replica in plan.replicas:
            serving = plan.assignment_of(replica.device)
            if replica.k == assignment.k and serving is not None:
                self._served.append(serving)
        #: The way that is planned: fp32, in one runtime or the other.
        self._planned: Way = (assignment.spec.precision, assignment.runtime)
        self.plain = self._outputs(self._model(), on_processor(Execution.of(assignment)))

    def trials(self) -> list[Trial]:
        """Every way that was asked for."""
        with TemporaryDirectory(prefix="mdp-quantise-") as folder:
            ways = [way for way in self._asked.ways if way != self._planned]
            made = [self._made(way, Path(folder)) for way in ways]
            standing = [one for one in made if isinstance(one, _Made)]
            for served in self._served:
                if served.device in self._asked.here and standing:
                    self._time_here(standing, served)
            return [self._finished(one) if isinstance(one, _Made) else one for one in made]

    def _made(self, way: Way, folder: Path) -> Trial | _Made:
        """The candidate with what it computes, or given up with the reason."""
        candidate = Candidate(k=self._assignment.k, way=way)
        # What a profile can rule out need not be made.
        found = {s.device: self._from_profile(s, way) for s in self._served}
        unproven = next((t for t in found.values() if isinstance(t, str)), "")
        if unproven:
            return Trial(candidate=replace(candidate, reason=unproven))
        path = folder / f"{way[0]}-{way[1]}.onnx"
        try:
            write_bytes(path, quantised(self._model().content, way[0], self._pixels))
            outputs = self._outputs(ModelFile.read(path), _in_way(self._assignment, way))
        except (QuantisationError, InputError, AgentError) as error:
            return Trial(candidate=replace(candidate, reason=str(error)))
        wrong = sum(not finite for finite in _finite(outputs))
        if wrong:
            count = f"{wrong} of {len(self._pixels)}"
            reason = f"gives logits that are not finite on {count} calibration pictures"
            return Trial(candidate=replace(candidate, reason=reason))
        timings = {device: t for device, t in found.items() if isinstance(t, Timing)}
        return _Made(candidate=candidate, path=path, outputs=outputs, timings=timings)

    def _from_profile(self, served: Assignment, way: Way) -> Timing | str | None:
        """What this device's profile proves, why it proves nothing, or None: to be timed here."""
        if served.device in self._asked.here:
            return None
        profile = next((p for p in self._asked.profiles if p.name == served.device), None)
        if profile is None:
            return f"nothing was measured on {served.device}: give its profile, or --here"
        how: dict[str, Any] = {
            "threads": served.threads,
            "provider": served.provider,
            "against": self._planned,
        }
        if served.submodel is None:
            assert served.network is not None
            return network_timing(profile, served.network, way, **how)
        return profile_timing(profile, served.submodel, way, **how)

    def _finished(self, made: _Made) -> Trial:
        """The candidate with its time, and against it if any device is not faster with it."""
        slow = (too_slow(made.timings[s.device], s.device) for s in self._served)
        candidate = replace(
            made.candidate,
            timing=made.timings[self._assignment.device],
            reason=next((reason for reason in slow if reason), ""),
        )
        model = b"" if candidate.reason else made.path.read_bytes()
        return Trial(candidate=candidate, model=model, calibration=made.outputs)

    def _model(self) -> ModelFile:
        """The file as it is; read anew each time, as those of all members may not fit in memory."""
        return self._bundle.model(self._assignment.k)

    def _runtime(self, model: ModelFile, execution: Execution) -> Runtime:
        labels = self._bundle.manifest.labels
        return open_runtime(model, execution, num_classes=len(labels))

    def _outputs(self, model: ModelFile, execution: Execution) -> Contribution:
        return contribution(
            self._runtime(model, execution), self._pixels, batch_for(execution.precision)
        )

    def _time_here(self, made: Sequence[_Made], served: Assignment) -> None:
        """Time fp32 and every candidate together, as one device runs them."""

        runtimes = [self._runtime(self._model(), _in_way(served, self._planned))]
        runtimes += [
            self._runtime(ModelFile.read(one.path), _in_way(served, one.candidate.way))
            for one in made
        ]
        plain, *rounds = in_turns([runtime.run for runtime in runtimes], self._pixels[:1])
        for one, ours in zip(made, rounds, strict=True):
            one.timings[served.device] = compared(ours, plain)


def _in_way(served: Assignment, way: Way) -> Execution:
    """As a device would run what has been turned into another precision or runtime."""
    precision, runtime = way
    return msgspec.structs.replace(Execution.of(served), precision=precision, runtime=runtime)


def _finite(outputs: Contribution) -> Any:
    """Of every picture, whether all its logits are finite."""
    return np.isfinite(outputs.heads).all(axis=(0, 2))


def compared(ours: Sequence[float], plain: Sequence[float]) -> Timing:
    """The timing that rounds of a candidate and of fp32, in milliseconds, come to.

    Sure of it are all rounds but one: that one may have met somebody else at work.
    """
    shares = sorted(a / b for a, b in zip(ours, plain, strict=True))
    fp32_ms = float(np.median(plain))
    return Timing(compute_ms=float(np.median(shares)) * fp32_ms, fp32_ms=fp32_ms, surely=shares[-2])


def in_turns(
    runs: Sequence[Callable[[Pixels], object]],
    pixels: Pixels,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Median milliseconds of one picture in each runtime, of every round; they take turns."""
    one = np.ascontiguousarray(pixels[:1])
    medians: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for run, found in zip(runs, medians, strict=True):
            for _ in range(WARM_UP):
                run(one)
            times_s: list[float] = []
            while sum(times_s) < ROUND_S or len(times_s) < MIN_RUNS:
                started_s = clock()
                run(one)
                times_s.append(clock() - started_s)
            found.append(float(np.median(times_s)) * 1e3)
    return medians


class Judge:
    """Fused accuracy on the calibration pictures, stacked weights fitted anew each time."""

    def __init__(
        self, plain: Mapping[int, Contribution], trials: Sequence[Trial], data: Dataset
    ) -> None:
        self._plain, self._targets = plain, data.calibration.targets
        self._tried = {
            (t.candidate.k, t.candidate.way): t.calibration
            for t in trials
            if t.calibration is not None
        }
        self.before = self._accuracy({})

    def with_ways(self, ways: Mapping[int, Way]) -> dict[int, Contribution]:
        """Every member's calibration logits, of some in another way."""
        return {k: self._tried[k, ways[k]] if k in ways else c for k, c in self._plain.items()}

    def loss(self, ways: Mapping[int, Way]) -> float:
        """How much of the fp32 accuracy is lost, a fraction."""
        return self.before - self._accuracy(ways)

    def alone(self, trial: Trial) -> Candidate:
        """The candidate with what it loses if everybody else stays in fp32."""
        candidate = trial.candidate
        if trial.calibration is None:
            return candidate
        return replace(candidate, loss=self.loss({candidate.k: candidate.way}))

    def _accuracy(self, ways: Mapping[int, Way]) -> float:
        contributions = self.with_ways(ways)
        weights = fit_subset(contributions, sorted(contributions), self._targets)
        return accuracy(fuse(contributions, weights), self._targets)
