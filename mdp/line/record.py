"""The record of an item: what is published of it, once. Pure."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from mdp.errors import InferenceError
from mdp.line.items import ItemOutcome
from mdp.line.kept import WhyKept
from mdp.line.rules import Decision, Votes
from mdp.protocol.messages import as_line
from mdp.requests.prediction import Prediction

TriggerKind = Literal["interval", "still", "mqtt", "http"]


class DeviceRecord(Struct, frozen=True, kw_only=True):
    """One device's own answer."""

    label: str | None = field(name="class")
    probability: float | None
    frame: int | None
    frame_age_ms: float | None
    #: Decades above its own threshold; null without an anomaly head.
    anomaly: float | None = None


class AnswerRecord(Struct, frozen=True, kw_only=True):
    """The fused answer of an item's last look, all null and empty without one."""

    #: The likeliest class; of an unknown item the nearest one.
    label: str | None = field(default=None, name="class")
    probability: float | None = None
    #: Where several labels may hold, those that do, with their probabilities; else null.
    holds: tuple[tuple[str, float], ...] | None = None
    known: bool | None = None
    novelty: float | None = None
    known_rejected: float | None = None
    normal: bool | None = None
    anomaly: float | None = None
    good_rejected: float | None = None
    defects_missed: float | None = None
    #: The range of that share among all defects like those measured, in 19 of 20 cases.
    defects_missed_least: float | None = None
    defects_missed_most: float | None = None
    #: Devices whose sides of the item did not count.
    blind_sides: tuple[str, ...] = ()
    mode: str | None = None
    expected_accuracy: float | None = None
    used: tuple[str, ...] = ()
    #: Device -> why it is not in the answer.
    missing: Mapping[str, str] = {}
    suspects: Mapping[str, str] = {}
    devices: Mapping[str, DeviceRecord] = {}
    bundle: str | None = None
    #: Why there is no answer.
    error: str | None = None


class ItemRecord(Struct, frozen=True, kw_only=True):
    """One item, as published."""

    item: str
    #: From 1, in this run of the watcher.
    number: int
    #: Of the trigger, in UTC (ISO 8601).
    time: str
    trigger: TriggerKind
    #: Null where there is none, or no single one.
    label: str | None = field(name="class")
    passed: bool
    sure: bool
    decision: Decision
    #: For people.
    verdict: str
    rules: Mapping[str, Votes]
    #: Votes on a difference from the good ones; null where cameras have none on that.
    different: Votes | None
    answer: AnswerRecord
    #: Looks taken, and how many at the end had the same outcome.
    looks: int
    equal: int
    #: From the item's moment to its verdict, and how long that may take.
    latency_ms: float
    deadline_ms: float
    why_kept: WhyKept | None


def answer_record(seen: Prediction | InferenceError | None) -> AnswerRecord:
    """The record of an answer, or of the error in its place."""
    if seen is None:
        return AnswerRecord()
    if isinstance(seen, InferenceError):
        return AnswerRecord(missing=seen.outcomes, error=as_line(str(seen)))
    devices = {
        one.device: DeviceRecord(
            label=one.label,
            probability=_round(one.probability),
            frame=one.frame,
            frame_age_ms=_round(one.frame_age_ms, 1),
            anomaly=one.anomaly,
        )
        for one in seen.members
    }
    return AnswerRecord(
        label=seen.label,
        probability=_round(seen.probability),
        holds=None
        if seen.holds is None
        else tuple((label, round(share, 4)) for label, share in seen.holds),
        known=seen.known,
        novelty=seen.novelty,
        known_rejected=seen.known_rejected,
        normal=seen.normal,
        anomaly=seen.anomaly,
        good_rejected=seen.good_rejected,
        defects_missed=seen.defects_missed,
        defects_missed_least=seen.defects_missed_least,
        defects_missed_most=seen.defects_missed_most,
        blind_sides=seen.blind_sides,
        mode=seen.mode,
        expected_accuracy=seen.expected_accuracy,
        used=seen.used,
        missing=seen.missing,
        suspects={**seen.suspects},
        devices=devices,
        bundle=seen.bundle,
    )


def record_of(
    outcome: ItemOutcome, *, item: str, trigger: TriggerKind, published_s: float, verdict_s: float
) -> ItemRecord:
    """The record of an item that has ended, published at `published_s` of the books' clock."""
    judgement = outcome.judgement
    return ItemRecord(
        item=item,
        number=outcome.number,
        time=outcome.trigger.time,
        trigger=trigger,
        label=judgement.label,
        passed=judgement.passed,
        sure=judgement.sure,
        decision=judgement.decision,
        verdict=as_line(judgement.text),
        rules=judgement.votes,
        different=judgement.different,
        answer=answer_record(outcome.seen),
        looks=outcome.looks,
        equal=outcome.equal,
        latency_ms=round((published_s - outcome.due_from_s) * 1e3, 2),
        deadline_ms=round(verdict_s * 1e3, 2),
        why_kept=judgement.why_kept,
    )


def to_json(record: ItemRecord, more: Mapping[str, Any] | None = None) -> bytes:
    """`record` as JSON in one line, with the keys of `more` behind its own."""
    if not more:
        return msgspec.json.encode(record)
    return msgspec.json.encode({**msgspec.to_builtins(record), **more})


def _round(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(value, digits)
