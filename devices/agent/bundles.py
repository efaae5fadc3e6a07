"""One bundle as this device serves it, and the two that it may serve at a time."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from devices.camera.frames import Eyes, NoFrameError, Sighting, view_of
from mdp.errors import AgentError
from mdp.formats.bundle import Bundle
from mdp.formats.plan import Assignment, Encoding
from mdp.protocol.messages import FailureCode, Infer, Look, State, Status, answered_by, as_line
from mdp.runtimes.base import Runtime

#: How long a bundle is served on after the last request for it, once another has taken its place.
GRACE_S = 30.0
#: Batches worth measuring: the small ones, as few wait mostly, and few of the large ones, as each
#: is run twice before serving.
SIZES = (1, 2, 3, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A bundle that has been read, and how to load this device's part of it."""

    bundle: Bundle
    assignment: Assignment
    load: Callable[[], Runtime]
    #: Most pictures to compute at once.
    batch: int = 1

    def __str__(self) -> str:
        return f"{self.bundle.manifest.name} {self.bundle.digest[:12]}"


@dataclass(slots=True, kw_only=True)
class Service:
    """A candidate that is loaded, and what has become of it."""

    candidate: Candidate
    runtime: Runtime
    #: Seconds of computing so many pictures at once, as measured before serving.
    measured_s: Mapping[int, float] = field(default_factory=dict)
    answered: int = 0
    #: Inferences that failed since the last one that did not.
    failures: int = 0
    #: When it was last asked for.
    asked_s: float = float("-inf")
    #: What every request is compared with: the bundle, the sub-model, the side of its crop.
    digest: str = field(init=False)
    k: int = field(init=False)
    image_size: int = field(init=False)
    encoding: Encoding = field(init=False)
    num_classes: int = field(init=False)

    def __post_init__(self) -> None:
        bundle, assignment = self.candidate.bundle, self.candidate.assignment
        self.digest, self.num_classes = bundle.digest, len(bundle.manifest.labels)
        self.k, self.image_size = assignment.k, assignment.spec.image_size
        self.encoding = assignment.encoding

    @property
    def speeds(self) -> str:
        """What was measured, for people."""
        sizes = ", ".join(map(str, self.measured_s))
        times = ", ".join(f"{seconds * 1e3:.1f}" for seconds in self.measured_s.values())
        return f"{sizes} pictures at once take {times} ms"

    def refusal(self, infer: Infer | Look) -> tuple[FailureCode, str] | None:
        """Why a request for this bundle is not for this device."""
        if infer.k != self.k:
            device = self.candidate.assignment.device
            return "wrong_submodel", f"{device} serves sub-model {self.k}, asked for {infer.k}"
        if isinstance(infer, Infer) and infer.image_size != self.image_size:
            return "bad_message", (
                f"expected a crop of {self.image_size} pixels, got {infer.image_size}"
            )
        if isinstance(infer, Infer) and infer.encoding == "jpeg" != self.encoding:
            return "bad_message", "expected raw pixels, as planned, got a JPEG"
        return None


class Shelf:
    """What is served: the newest bundle, and for a while the one before it. Pure.

    Never more than two, so that memory is bounded.
    """

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self.newest: Service | None = None
        self.former: Service | None = None
        self._grace_s = grace_s

    @property
    def services(self) -> list[Service]:
        """All that is served, newest first."""
        return [service for service in (self.newest, self.former) if service is not None]

    def find(self, digest: str, *, now_s: float) -> Service | None:
        """Who serves a request for `digest` that has just come."""
        service = self.named(digest)
        if service is not None:
            service.asked_s = now_s
        return service

    def named(self, digest: str) -> Service | None:
        """Who serves `digest`."""
        for service in (self.newest, self.former):
            if service is not None and service.digest == digest:
                return service
        return None

    def put(self, service: Service, *, now_s: float) -> None:
        """From now on `service` is the newest, which may have been the former one.

        The one so far is served on for a while.
        """
        self.former, self.newest = self.newest, service
        if self.former is not None:
            # The grace begins now, also for one that nobody has asked for lately.
            self.former.asked_s = max(self.former.asked_s, now_s)

    def take_down(self, service: Service) -> Service | None:
        """Serve `service` no more; returns the other one, if there is one."""
        left = [other for other in self.services if other is not service]
        self.newest, self.former = left[0] if left else None, None
        return self.newest

    def retire(self, *, now_s: float) -> Service | None:
        """Take the former one down if its time has come; returns it then."""
        former = self.former
        if former is None or now_s < former.asked_s + self._grace_s:
            return None
        self.former = None
        return former

    def retires_s(self) -> float:
        """When to look whether the former one's time has come; infinity if there is none."""
        return float("inf") if self.former is None else self.former.asked_s + self._grace_s


def status_of(
    shelf: Shelf,
    first: Candidate,
    *,
    request_id: int,
    state: State,
    reasons: Iterable[str],
    queued: int,
    counts: Mapping[str, int],
    source: str,
) -> Status:
    """How an agent is that serves what is on the shelf, or `first` as long as nothing is."""
    newest = shelf.newest
    candidate = newest.candidate if newest else first
    answered = {answered_by(service.digest): service.answered for service in shelf.services}
    return Status(
        request_id=request_id,
        device=candidate.assignment.device,
        state=state,
        bundle=as_line(candidate.bundle.manifest.name),
        digest=candidate.bundle.digest,
        k=candidate.assignment.k,
        provider=as_line(newest.runtime.provider) if newest else "",
        fallback=newest.runtime.fallback if newest else False,
        reason=as_line("; ".join(filter(None, reasons))),
        queued=queued,
        counts={**counts, **answered},
        source=source,
    )


def wrong_bundle(shelf: Shelf, infer: Infer | Look) -> tuple[FailureCode, str]:
    """Why a request for a bundle that nobody on the shelf is cannot be answered."""
    served = " and ".join(str(service.candidate) for service in shelf.services)
    return "wrong_bundle", (
        f"serves {served}: give client and agent the same bundle, and reload whichever had "
        f"another; asked for {infer.digest[:12]}"
    )


def sighting_for(eyes: Eyes | None, look: Look, shelf: Shelf) -> Sighting:
    """The frame that `look` asks for, cut for its bundle; raises NoFrameError."""
    if eyes is None:
        raise NoFrameError("this agent has no source (--source)")
    service = shelf.named(look.digest)
    if service is None:
        raise NoFrameError("this bundle has just been given up")
    view = view_of(service.candidate.assignment)
    return eyes.see(view, ago_ms=look.ago_ms, within_ms=look.within_ms)


def warmed(candidate: Candidate, runtime: Runtime, clock: Callable[[], float]) -> Service:
    """The candidate with its loaded `runtime`, run until steady; raises AgentError."""
    runtime.warm_up()
    measured_s = measure_batches(
        runtime, candidate.assignment.spec.image_size, candidate.batch, clock
    )
    return Service(candidate=candidate, runtime=runtime, measured_s=measured_s)


def check_room(candidate: Candidate, available_bytes: int | None) -> None:
    """Raise AgentError if memory does not suffice for one more bundle; None where unknown."""
    needed = candidate.assignment.memory_bytes
    if available_bytes is not None and needed > available_bytes:
        raise AgentError(
            f"{candidate} needs {needed / 1e6:,.0f} MB beside what is served, "
            f"{available_bytes / 1e6:,.0f} MB are free"
        )


def measure_batches(
    runtime: Runtime, image_size: int, most: int, clock: Callable[[], float]
) -> dict[int, float]:
    """Seconds of computing 1 to `most` black pictures at once; nothing for one at a time.

    Beyond four, only some of the sizes. The first run of a size allocates memory, the second is
    measured. Raises AgentError.
    """
    measured: dict[int, float] = {}
    for pictures in (*(size for size in SIZES if size < most), most) if most > 1 else ():
        blank = np.zeros((pictures, image_size, image_size, 3), dtype=np.uint8)
        try:
            runtime.run(blank)
            started_s = clock()
            runtime.run(blank)
        except Exception as error:  # runtimes raise types of their own, without a common base
            raise AgentError(f"the model cannot be run on {pictures} pictures: {error}") from error
        measured[pictures] = clock() - started_s
    return measured
