"""Bytes, seconds and memory of training together, and when which network is trained. Pure.

Formulas hold for one trainer. A network of S bytes has S / 4 parameters, in fp32.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from partitioner.crew.coordinator.sizes import (
    FOUR_BIT_BLOCK,
    INT8_BLOCK,
    KEEP,
    CodecName,
    whole_codec,
    wire_bytes,
)

What = Literal["gradients", "parameters"]
Chain = Literal["strict", "star"]

#: Numbers that fill all blocks of each codec.
_FILLED = 5 * INT8_BLOCK
#: Encoded bytes of each byte of fp32.
RATIO: Mapping[CodecName, float] = {
    codec: wire_bytes(codec, _FILLED) / (4 * _FILLED) for codec in get_args(CodecName)
}
#: A training step is one forward pass and a backward pass of twice its work.
FORWARD = 1 / 3
#: Arithmetic of training, as `run.settings` has it.
Arithmetic = Literal["fp32", "bf16"]
#: Weights, gradients and AdamW's two moments.
_TRAINED = 4
#: Bytes that a block keeps of each number of its tokens: of some 20 numbers each.
_BYTES_OF_A_NUMBER: Mapping[Arithmetic, float] = {"fp32": 80.0, "bf16": 52.0}
#: What computing and sending need besides, and copies of a picture that the first layers keep.
WORKING_BYTES: Mapping[Arithmetic, float] = {"fp32": 85e6, "bf16": 45e6}
PICTURE_COPIES: Mapping[Arithmetic, float] = {"fp32": 4.0, "bf16": 1.0}


def step_s(
    what: What,
    compute_s: float,
    mean_s: float,
    *,
    steps: float = 1,
    wait_s: float = 0.0,
    buckets: float = math.inf,
) -> float:
    """Seconds of a step, computing `compute_s`, with one mean in each `steps` steps.

    Gradients are averaged in `buckets` while backward runs: of the mean of the last one nothing is
    hidden, nor of the backward pass before the first. Parameters are averaged in rounds of `steps`,
    which wait for the last trainer.
    """
    if what == "parameters":
        return compute_s + (mean_s + wait_s) / steps
    return FORWARD * compute_s + _beside((1 - FORWARD) * compute_s, mean_s, buckets)


def next_forward_s(compute_s: float, mean_s: float, buckets: float = math.inf) -> float:
    """Seconds of a step whose means take their first half during the backward pass.

    The other half is under way during the next step's forward pass. After DeAR (arXiv 2302.12445).
    """
    forward_s, half_s = FORWARD * compute_s, mean_s / 2
    backward_s = compute_s - forward_s
    return _beside(forward_s, half_s, buckets) + _beside(backward_s, half_s, buckets)


def _beside(pass_s: float, sending_s: float, buckets: float) -> float:
    """Seconds of a pass beside which buckets are sent, of which one waits for the other."""
    return max(pass_s + sending_s / buckets, sending_s + pass_s / buckets)


def sent_ratio(
    codec: CodecName, stride: int = 1, keep: float = KEEP, settling: float = 0.0
) -> float:
    """Encoded bytes of each byte of fp32 in a mean, of which each `stride`-th number travels.

    keep: of `top4`. settling: the share of means that end an epoch, in which every number travels.
    """
    ratio = RATIO[codec]
    if codec == "top4":
        ratio = (1 + keep * (4 + 16 / FOUR_BIT_BLOCK)) / 32
    if stride == 1 and codec != "top4":
        return ratio
    return (1 - settling) * ratio / stride + settling * RATIO[whole_codec(codec)]


def activation_bytes(
    pictures: int, tokens: int, width: int, depth: int, arithmetic: Arithmetic = "fp32"
) -> float:
    """Activations that the blocks of a vision transformer keep for their backward pass.

    By what pipelines of such blocks were measured to have (benchmarks.crew.stages). Torch's fused
    attention keeps no product of tokens with tokens.
    """
    return _BYTES_OF_A_NUMBER[arithmetic] * pictures * depth * tokens * width


def memory_bytes(
    what: What,
    codec: CodecName,
    size_bytes: float,
    activations: float = 0.0,
    *,
    outer: bool = False,
    masked: bool = False,
    received: float = 0.0,
) -> float:
    """Memory of one trainer with AdamW; DDP's buckets are views of gradients.

    Means of parameters need a flat copy; int8 and top4 the error fed back, and for parameters the
    last mean, as `outer` steps do beside their momentum, and means of `masked` numbers. `received`
    are networks that neighbours have sent, as encoded.
    """
    copies = _TRAINED + (what == "parameters") + received
    feeds_back = codec in ("int8", "top4")
    if feeds_back:
        copies += 2 if what == "parameters" else 1
    if masked:
        copies += not feeds_back
    if outer:
        copies += 1 + (not feeds_back)
    return copies * size_bytes + activations


def answers_per_s(pace: float, bytes_per_s: float, numbers: int) -> float:
    """Pictures/s of one trainer's frozen passes, each sent to the coordinator as fp16 numbers."""
    return min(pace, bytes_per_s / (2 * numbers))


@dataclass(frozen=True, slots=True)
class CrewJob:
    """Something that a crew does together."""

    name: str
    crew: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one trainer's work, from `start_s` to `end_s`."""

    trainer: str
    start_s: float
    end_s: float
    what: str


def member_index(name: str) -> int | None:
    """The K of `member-K`; None for another name."""
    kind, _, number = name.partition("-")
    return int(number) if kind == "member" and number.isdecimal() else None


def timeline(jobs: Sequence[CrewJob], chain: Chain = "strict") -> list[Span]:
    """Spans of `jobs` by trainer; a trainer does one after another, in their order.

    Jobs other than members come one after another, before the members or after the one that they
    follow. Of members, `strict` starts each when the job before has ended, `star` all others when
    the first and the job that follows it have ended.
    """
    free: dict[str, float] = {}
    spans: list[Span] = []
    before_s = 0.0
    first_s: float | None = None
    for job in jobs:
        is_member = member_index(job.name) is not None
        ready_s = first_s if is_member and chain == "star" and first_s is not None else before_s
        start_s = max([ready_s, *(free.get(name, 0.0) for name in job.crew)])
        end_s = start_s + job.seconds
        before_s = end_s
        if is_member == (first_s is None):
            first_s = end_s
        for name in job.crew:
            free[name] = end_s
            spans.append(Span(name, start_s, end_s, job.name))
    return spans


def makespan_s(spans: Sequence[Span]) -> float:
    """End of the last one."""
    return max((span.end_s for span in spans), default=0.0)
