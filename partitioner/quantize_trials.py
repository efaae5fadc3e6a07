"""Try every way of running a sub-model: what comes out, how fast, at what loss."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mdp.bundle import Bundle, model_path
from mdp.crop import Pixels
from mdp.errors import InputError
from mdp.files import write_bytes
from mdp.fusion import Contribution, fuse
from mdp.plan import Assignment
from mdp.profile import DeviceProfile
from partitioner.data import Dataset
from partitioner.evaluate import accuracy
from partitioner.gate import PLAIN, Candidate, Timing, Way, profile_timing, too_slow
from partitioner.quantize import WAYS, QuantisationError, quantised
from partitioner.sessions import CPU, batch_for, contribution, open_way
from partitioner.stacking import fit_subset

#: Rounds in which the ways of running a member take turns, so that drift of the machine meets all;
#: of each round so many milliseconds are spent on each way, but at least some runs.
ROUNDS, ROUND_S, MIN_RUNS, WARM_UP = 5, 0.4, 5, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """How a bundle is to be quantised."""

    #: What the fused answer may lose, a fraction.
    max_loss: float
    profiles: Sequence[DeviceProfile]
    #: Devices for which this machine stands.
    here: Sequence[str] = ()
    ways: Sequence[Way] = WAYS[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A candidate with what it computes; nothing where it was given up before."""

    candidate: Candidate
    model: bytes = b""
    calibration: Contribution | None = None


class Member:
    """One sub-model, and everything that it might be turned into."""

    def __init__(
        self, bundle: Bundle, assignment: Assignment, pixels: Pixels, asked: Asked
    ) -> None:
        self._path = bundle.verified(model_path(assignment.k))
        self._pixels, self._asked, self._assignment = pixels, asked, assignment
        plan = bundle.manifest.plan
        #: Everyone who runs this file: the assigned device first, then its replicas.
        self._served = [assignment]
        for replica in plan.replicas:
            serving = plan.assignment_of(replica.device)
            if replica.k == assignment.k and serving is not None:
                self._served.append(serving)
        self.plain = self._outputs(self._path, PLAIN)

    def trials(self) -> list[Trial]:
        """Every way that was asked for."""
        return [self._trial(way) for way in self._asked.ways]

    def _trial(self, way: Way) -> Trial:
        candidate = Candidate(k=self._assignment.k, way=way)
        # What a profile can rule out need not be made.
        timings = {s.device: self._from_profile(s, way) for s in self._served}
        unproven = next((t for t in timings.values() if isinstance(t, str)), "")
        if unproven:
            return Trial(candidate=replace(candidate, reason=unproven))
        try:
            with TemporaryDirectory(prefix="mdp-quantise-") as folder:
                path = Path(folder) / "model.onnx"
                write_bytes(path, quantised(self._path.read_bytes(), way[0], self._pixels))
                return self._tried(candidate, path, timings)
        except (QuantisationError, InputError) as error:
            return Trial(candidate=replace(candidate, reason=str(error)))

    def _from_profile(self, served: Assignment, way: Way) -> Timing | str | None:
        """What this device's profile proves, why it proves nothing, or None: to be timed here."""
        if served.device in self._asked.here:
            return None
        profile = next((p for p in self._asked.profiles if p.name == served.device), None)
        if profile is None:
            return f"nothing was measured on {served.device}: give its profile, or --here"
        return profile_timing(
            profile, served.submodel, way, threads=served.threads, provider=served.provider
        )

    def _tried(
        self, candidate: Candidate, path: Path, timings: Mapping[str, Timing | str | None]
    ) -> Trial:
        """Run the candidate: what it computes, and how fast it is where that is not known yet."""
        outputs = self._outputs(path, candidate.way, self._assignment.provider)
        wrong = sum(not finite for finite in _finite(outputs))
        if wrong:
            reason = (
                f"gives logits that are not finite on {wrong} of {len(self._pixels)} "
                "calibration pictures"
            )
            return Trial(candidate=replace(candidate, reason=reason))
        for served in self._served:
            timing = timings[served.device] or self._time_here(path, candidate.way, served)
            assert isinstance(timing, Timing)
            if served is self._assignment:
                candidate = replace(candidate, timing=timing)
            reason = too_slow(timing, served.device)
            if reason:
                candidate = replace(candidate, reason=reason)
                break
        model = b"" if candidate.reason else path.read_bytes()
        return Trial(candidate=candidate, model=model, calibration=outputs)

    def _outputs(self, path: Path, way: Way, provider: str = CPU) -> Contribution:
        session = open_way(path, *way, provider=provider)
        return contribution(session, self._pixels, batch_for(way[0]))

    def _time_here(self, path: Path, way: Way, served: Assignment) -> Timing:
        def session(model: Path, way: Way) -> Any:
            return open_way(model, *way, threads=served.threads, provider=served.provider)

        sessions = [session(path, way), session(self._path, PLAIN)]
        ours, plain = in_turns(sessions, self._pixels[:1])
        return Timing(compute_ms=ours, fp32_ms=plain)


def _finite(outputs: Contribution) -> Any:
    """Of every picture, whether all its logits are finite."""
    return np.isfinite(outputs.boost).all(axis=1) & np.isfinite(outputs.bag).all(axis=1)


def in_turns(
    sessions: Sequence[Any], pixels: Pixels, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Median milliseconds of one picture in each session, block by block in turns."""
    one = {"images": np.ascontiguousarray(pixels[:1])}
    medians: list[list[float]] = [[] for _ in sessions]
    for _ in range(ROUNDS):
        for session, found in zip(sessions, medians, strict=True):
            for _ in range(WARM_UP):
                session.run(None, one)
            times_s: list[float] = []
            while sum(times_s) < ROUND_S / ROUNDS or len(times_s) < MIN_RUNS:
                started_s = clock()
                session.run(None, one)
                times_s.append(clock() - started_s)
            found.append(float(np.median(times_s)) * 1e3)
    return [float(np.median(found)) for found in medians]


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
