"""What the client found out."""

from mdp.files import Record


class Answers(Record, frozen=True):
    """One rival's answers over one kind of link."""

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
    """What a link was measured to carry."""

    bandwidth_bps: float
    round_trip_s: float


class SplitFound(Record, frozen=True):
    """Medians of what the parts of layers took, in ms, and of what exchanging is calculated to."""

    compute_ms: float
    exchange_ms: float
    ends_ms: float


class Found(Record, frozen=True):
    """What one run of the client brought."""

    link: LinkFound
    answers: list[Answers]
    split: dict[str, SplitFound]
    #: Largest difference of any logit between the pipeline's answer and the whole teacher's.
    pipeline_error: float
    #: The largest of these logits.
    largest_logit: float
