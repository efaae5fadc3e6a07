"""The bundles that an agent serves: the current one and, for a grace period, the previous one."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from mdp.errors import AgentError
from mdp.formats.bundle import Bundle
from mdp.formats.plan import Assignment, Encoding
from mdp.protocol.messages import FailureCode, FrameRequest, Infer
from mdp.runtimes.base import Runtime

#: Why a request is not answered: for programs, and for people.
Refusal = tuple[FailureCode, str]

#: How long a replaced bundle is served after its last request, and at least, for the requests that
#: name it, before a further one takes its place.
GRACE_S = 30.0
#: Batch sizes that are measured: all small ones, as large batches are rare and each costs two runs.
SIZES = (1, 2, 3, 4, 8, 16, 32)
#: Timed runs of one picture where there are rungs, of which the quickest counts: by it a rung is
#: used or not.
ALONE_RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadableBundle:
    """A bundle that has been read, and how to load this device's part of it."""

    bundle: Bundle
    assignment: Assignment
    load: Callable[[], Runtime]
    #: Most pictures to compute at once.
    batch: int = 1
    #: How to load its rungs below the top, in their order.
    load_lower: Sequence[Callable[[], Runtime]] = ()

    @property
    def memory_bytes(self) -> int:
        """Memory that serving it takes, all rungs together."""
        lower = sum(rung.memory_bytes for rung in self.assignment.lower)
        return self.assignment.memory_bytes + lower

    def __str__(self) -> str:
        return f"{self.bundle.manifest.name} {self.bundle.digest[:12]}"


class LoadedRung(NamedTuple):
    """One rung of a sub-model, loaded."""

    #: In the plan, counted from the top.
    number: int
    runtime: Runtime
    #: Batch size -> seconds of computing it, measured before serving.
    measured_s: Mapping[int, float]


@dataclass(slots=True, kw_only=True)
class ServedBundle:
    """A loaded bundle, its measured speed and its record."""

    source: LoadableBundle
    #: Of the top rung.
    runtime: Runtime
    measured_s: Mapping[int, float] = field(default_factory=dict)
    #: Those rungs below it that are quicker here.
    lower: Sequence[LoadedRung] = ()
    answered: int = 0
    #: Consecutive inferences that failed.
    failures: int = 0
    last_request_s: float = float("-inf")
    #: Copied, as every request is compared with them.
    digest: str = field(init=False)
    k: int = field(init=False)
    image_size: int = field(init=False)
    encoding: Encoding = field(init=False)
    num_classes: int = field(init=False)

    def __post_init__(self) -> None:
        bundle, assignment = self.source.bundle, self.source.assignment
        self.digest, self.num_classes = bundle.digest, len(bundle.manifest.labels)
        self.k, self.image_size = assignment.k, assignment.spec.image_size
        self.encoding = assignment.encoding

    @property
    def rungs(self) -> list[LoadedRung]:
        """The rungs that are served, the top one first."""
        return [LoadedRung(0, self.runtime, self.measured_s), *self.lower]

    @property
    def speeds(self) -> str:
        """The measured times as a sentence."""
        sizes = ", ".join(map(str, self.measured_s))
        text = f"{sizes} pictures at once take {_ms(self.measured_s.values())} ms"
        for rung in self.lower:
            text += f", at rung {rung.number} {_ms(rung.measured_s.values())}"
        unused = len(self.source.load_lower) - len(self.lower)
        return text + (f"; {unused} rungs are no quicker here and not used" if unused else "")

    def refusal(self, request: Infer | FrameRequest) -> Refusal | None:
        """Reason why this device does not answer a request for this bundle, or None."""
        if request.k != self.k:
            device = self.source.assignment.device
            return "wrong_submodel", f"{device} serves sub-model {self.k}, asked for {request.k}"
        if isinstance(request, FrameRequest):
            if request.wants_map and not self.source.bundle.manifest.inspection:
                return "bad_message", "was asked for a map: the bundle has no anomaly heads"
            return None
        if request.image_size != self.image_size:
            text = f"expected a crop of {self.image_size} pixels, got {request.image_size}"
            return "bad_message", text
        if request.encoding == "jpeg" != self.encoding:
            return "bad_message", "expected raw pixels, as planned, got a JPEG"
        return None


class ServedBundles:
    """The current bundle and the previous one; at most two, to bound memory. Pure."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.current: ServedBundle | None = None
        self.previous: ServedBundle | None = None
        self._grace_s = grace_s
        #: When the previous one was replaced.
        self._replaced_s = float("-inf")
        #: Whether the previous one takes no more requests.
        self._leaving = False

    @property
    def all(self) -> list[ServedBundle]:
        """Those that take requests, the current one first."""
        both = (self.current, None if self._leaving else self.previous)
        return [served for served in both if served is not None]

    def bundle_for(self, digest: str, *, now_s: float) -> ServedBundle | None:
        """The bundle for a request that has just arrived, None if it is not served."""
        for served in (self.current, self.previous):
            if served is not None and served.digest == digest:
                if self._leaving and served is self.previous:
                    return None
                served.last_request_s = now_s
                return served
        return None

    def install(self, served: ServedBundle, *, now_s: float) -> None:
        """Make `served`, new or the previous one, current; the current one becomes previous."""
        self.previous, self.current = self.current, served
        self._leaving, self._replaced_s = False, now_s
        if self.previous is not None:
            # The grace period begins now, also for a bundle without recent requests.
            self.previous.last_request_s = max(self.previous.last_request_s, now_s)

    def withdraw(self, served: ServedBundle) -> ServedBundle | None:
        """Stop serving a failed bundle; returns the other one, if there is one."""
        others = (other for other in (self.current, self.previous) if other is not served)
        self.current, self.previous = next(filter(None, others), None), None
        self._leaving = False
        return self.current

    def make_room(self, *, now_s: float) -> float:
        """Have the previous bundle take no more requests, so that it can be retired.

        Only after its grace period since it was replaced, however often it is asked for; returns
        the seconds until then, 0 if it leaves.
        """
        left_s = max(0.0, self._replaced_s + self._grace_s - now_s)
        self._leaving = self._leaving or not left_s
        return 0.0 if self._leaving else left_s

    def retire(self, *, now_s: float) -> ServedBundle | None:
        """Stop serving the previous bundle after its grace period; returns it then."""
        if now_s < self.retires_s():
            return None
        retired, self.previous = self.previous, None
        self._leaving = False
        return retired

    def retires_s(self) -> float:
        """The time from which the previous bundle can be retired; infinity without one."""
        previous = self.previous
        if previous is None:
            return float("inf")
        return float("-inf") if self._leaving else previous.last_request_s + self._grace_s


def _ms(times_s: Iterable[float]) -> str:
    return ", ".join(f"{seconds * 1e3:.1f}" for seconds in times_s)


def warm_up(source: LoadableBundle, runtime: Runtime, clock: Callable[[], float]) -> ServedBundle:
    """Warm up a loaded top `runtime`, load the rungs below, and measure the batches of all.

    Rungs that are no quicker with one picture than the one above are not used. Raises AgentError,
    and what loading raises.
    """
    image_size, most = source.assignment.spec.image_size, source.batch
    runtime.warm_up()
    if not source.load_lower:
        measured_s = measure_batches(runtime, image_size, most, clock)
        return ServedBundle(source=source, runtime=runtime, measured_s=measured_s)
    heads = _heads(runtime, image_size)
    top_s = measure_batches(runtime, image_size, most, clock, alone=True)
    rungs = [LoadedRung(0, runtime, top_s)]
    for number, load in enumerate(source.load_lower, 1):
        below = load()
        below.warm_up()
        if (found := _heads(below, image_size)) != heads:
            raise AgentError(f"rung {number}: expected {heads} heads as at the top, got {found}")
        own_s = measure_batches(below, image_size, most, clock, alone=True)
        if own_s[1] < rungs[-1].measured_s[1]:
            rungs.append(LoadedRung(number, below, own_s))
    return ServedBundle(source=source, runtime=runtime, measured_s=top_s, lower=rungs[1:])


def _heads(runtime: Runtime, image_size: int) -> int:
    blank = np.zeros((1, image_size, image_size, 3), dtype=np.uint8)
    return len(runtime.run(blank).heads)


def measure_batches(
    runtime: Runtime, image_size: int, most: int, clock: Callable[[], float], *, alone: bool = False
) -> dict[int, float]:
    """Seconds of computing batches of up to `most` black pictures.

    Empty where `most` is 1, unless single pictures are asked for (`alone`), which are timed a few
    times. The first run of a size allocates memory. Raises AgentError.
    """
    measured: dict[int, float] = {}
    for pictures in (*(size for size in SIZES if size < most), most) if most > 1 or alone else ():
        blank = np.zeros((pictures, image_size, image_size, 3), dtype=np.uint8)
        times_s = list[float]()
        try:
            runtime.run(blank)
            for _ in range(ALONE_RUNS if alone and pictures == 1 else 1):
                started_s = clock()
                runtime.run(blank)
                times_s.append(clock() - started_s)
        except Exception as error:  # runtimes raise types of their own, without a common base
            raise AgentError(f"the model cannot be run on {pictures} pictures: {error}") from error
        measured[pictures] = min(times_s)
    return measured
