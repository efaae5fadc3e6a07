"""What the client found out, and the content of benchmarks/results/end-to-end.json."""

from typing import Any

from mdp.files import Record
from mdp.formats.plan import Plan

#: What everything is compared with.
OURS = "MDP"


class Answers(Record, frozen=True):
    name: str
    #: Milliseconds of each picture, one at a time.
    latency_ms: list[float]
    #: Pictures in a second with several under way, one number for each round.
    per_s: list[float]
    #: Bytes that all machines together sent for one picture, one number for each round.
    sent_bytes: list[float]
    #: Whether some of it was calculated instead of sent.
    calculated: bool = False


class LinkFound(Record, frozen=True):
    bandwidth_bps: float
    round_trip_s: float


class SplitFound(Record, frozen=True):
    """Medians of what the parts of layers took, in ms, and of what exchanging is calculated to."""

    compute_ms: float
    exchange_ms: float
    ends_ms: float


class Found(Record, frozen=True):
    link: LinkFound
    answers: list[Answers]
    split: dict[str, SplitFound]
    #: Largest difference of any logit between the pipeline's answer and the whole teacher's.
    pipeline_error: float
    #: The largest of these logits.
    largest_logit: float


class DeviceRow(Record, frozen=True):
    name: str
    core: int
    share: float
    #: Mean milliseconds of the teacher while all devices compute it.
    teacher_ms: float
    blocks: int
    heads: int
    hidden: int


class LinkResult(Record, frozen=True):
    """Everything over one kind of link."""

    bandwidth_bps: float
    #: Row's name -> the plan that was served, and the latency that was asked of it.
    plans: dict[str, Plan]
    found: Found


class Results(Record, frozen=True):
    machine: dict[str, Any]
    teacher: str
    quick: bool
    period_us: int
    devices: list[DeviceRow]
    client_share: float
    in_flight: int
    #: Why the HTTP servers are missing, if they are.
    without_http: str
    #: Largest difference of any logit between the teacher and its tensors split over all devices.
    split_error: float
    picture_bytes: int
    links: list[LinkResult]
