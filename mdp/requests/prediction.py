"""The outcome of a call: one labelled answer, made from whatever a session collected. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from mdp.errors import ConfigError, DeadlineExceeded, InferenceError, QuorumNotMet, WireError
from mdp.formats.bundle import FUSION, JOINED_BY, NO_LABEL, Bundle
from mdp.formats.fleet import MAX_SPREAD_MS
from mdp.fusion.fuse import (
    Contribution,
    Fusion,
    FusionWeights,
    Logits,
    Mode,
    SubsetWeights,
    fuse,
    labels_held,
    mode_of,
    rule_for,
    scale_rung,
    sigmoid,
    weights_for,
)
from mdp.fusion.novelty import NoveltyScore
from mdp.fusion.novelty_table import SubsetNovelty
from mdp.requests.camera_drift import CameraDrift
from mdp.requests.capture import FrameInAnswer, FramesSeen, together
from mdp.requests.inspection import Difference, Inspector, blind_sides
from mdp.requests.reason import NOT_NEEDED, Code, Reason, Suspicion
from mdp.requests.session import Arrival, Finish, Stage

TOP_K = 5
#: So many classes are sorted and weighed before NumPy has begun: three in 2 us instead of 10.
_FEW = 16


class MemberTiming(Struct, frozen=True, kw_only=True):
    """Milliseconds of one member, by where they went."""

    device: str
    k: int
    queue_ms: float
    compute_ms: float
    network_ms: float
    #: What this member alone would have answered; None unless the client was asked for `opinions`.
    label: str | None = None
    probability: float | None = None
    #: Of a look: which frame of its own this device saw, by its own count, and how old that was as
    #: the answer was given. Known to half of `network_ms`.
    frame: int | None = None
    frame_age_ms: float | None = None
    #: What the request waited in this client, behind its others, before it was sent.
    held_ms: float = 0.0
    #: At which rung of its sub-model it answered: 0 at the top, the most accurate one.
    rung: int = 0
    #: Of a bundle with anomaly heads: how much rarer good pictures of this camera are than at its
    #: own threshold, in decades; above 0 it finds a difference by itself.
    anomaly: float | None = None
    #: 16 rows of 16 cells of its view where a look asked for `maps`: from 128 on, a cell is as
    #: strange as the strangest one of a good picture in a hundred. In JSON, base64.
    anomaly_map: bytes | None = None

    @property
    def spent_ms(self) -> float:
        """Milliseconds from sending the request to the reply."""
        return self.queue_ms + self.compute_ms + self.network_ms


class Prediction(Struct, frozen=True, kw_only=True):
    """One picture's answer, and what it is made of."""

    label: str
    probability: float
    #: The likeliest labels with their probabilities, at most five, best first.
    top: tuple[tuple[str, float], ...]
    mode: Mode
    #: Devices whose contributions are in the answer, by boosting position.
    used: tuple[str, ...]
    #: Device -> reason, for every device that was wanted and is not in the answer.
    missing: dict[str, str]
    #: Accuracy that this combination was measured to have. None for a bundle never evaluated, where
    #: a suspect is in the answer, since it was measured with cameras that see what they should, and
    #: for an unknown item, since it was measured on items of the classes.
    #: Where the first stage of a cascade was sure, that of the cascade over all pictures and both
    #: stages. With members below their top rung, between the measured accuracies of all at the top
    #: and all at the lowest; None for such a first stage, which was measured at the top alone.
    expected_accuracy: float | None
    #: How many pictures that was measured on; None for a bundle never evaluated.
    expected_accuracy_pictures: int | None = None
    #: From the call to the answer, decoding, cropping and fusing included.
    latency_ms: float
    deadline_ms: float
    members: tuple[MemberTiming, ...]
    #: Identity of the bundle that all of it was made with.
    bundle: str = ""
    #: Of a look: how far apart the oldest and the newest frame in the answer were taken.
    frame_spread_ms: float | None = None
    #: How it came about: `all` members were asked at once; the `first` stage of a cascade was sure;
    #: or it was `escalated` to the others.
    stage: Stage = "all"
    #: Device -> the code of its reason in `missing`.
    missing_codes: dict[str, Code] = {}
    #: Of a look: device -> why its camera is suspected. It `disagrees` with the others: covered,
    #: turned or moved, as this client's looks found (`camera_drift`) or, by its agent, another
    #: client's; or it is `frozen`: its picture never changes.
    suspects: dict[str, Suspicion] = {}
    #: Whether the item is one of the classes; None where the bundle cannot say. Where it is False,
    #: `label` is the nearest class.
    known: bool | None = None
    #: How far the answer is above the threshold from which on items are unknown: above 0 it is.
    novelty: float | None = None
    #: The share of test items of the classes that exactly this combination took for unknown. None
    #: where that was never measured, with a rate that the client asked for, with a suspect, and
    #: with a member below its top rung.
    known_rejected: float | None = None
    #: Whether the item is like the good ones; None of a bundle without anomaly heads.
    normal: bool | None = None
    #: Decades by which good items are rarer than at the threshold: above 0 the item differs.
    anomaly: float | None = None
    #: The rate of good items that the threshold of exactly these sides was made to reject.
    good_rejected: float | None = None
    #: The share of measured defects that exactly these sides do not find; None without any.
    defects_missed: float | None = None
    #: The range of that share among all defects like those measured, in 19 of 20 cases.
    defects_missed_least: float | None = None
    defects_missed_most: float | None = None
    #: Devices whose sides of the item did not count: missing, or suspected.
    blind_sides: tuple[str, ...] = ()
    #: Where labels do not exclude each other, those that hold with their probabilities, likeliest
    #: first; None where each item has one label. Then `label` joins them by `+`, sorted, or is
    #: `none`; `probability` is that of the least certain label to be as told; `top` has the
    #: likeliest labels, each by itself; and `expected_accuracy` is the share of items of which
    #: every label was told as it is.
    holds: tuple[tuple[str, float], ...] | None = None

    def __repr__(self) -> str:
        """The answer and the devices that it lacks or doubts; `to_dict` has every field."""
        shown = (
            f"label={self.label!r}, probability={self.probability:.3g}, mode={self.mode!r}, "
            f"used={self.used!r}, missing={self.missing!r}"
        )
        doubts = f", suspects={self.suspects!r}" if self.suspects else ""
        unknown = "known=False, " if self.known is False else ""
        unknown += "normal=False, " if self.normal is False else ""
        return f"Prediction({unknown}{shown}{doubts})"

    @property
    def verdict(self) -> str:
        """The label and its probability; that an item is unknown, or differs from the good ones."""
        named = f"{self.label} ({self.probability:.0%})"
        if self.holds:
            named = " + ".join(f"{label} ({share:.0%})" for label, share in self.holds)
        named = f"unknown, nearest {named}" if self.known is False else named
        return f"different: {named}" if self.normal is False else named

    @property
    def partial(self) -> bool:
        """Tell whether any member is missing."""
        return bool(self.missing)

    @property
    def degraded(self) -> bool:
        """Tell whether a needed member is missing; a cascade's first stage may be enough."""
        return any(reason != str(NOT_NEEDED) for reason in self.missing.values())

    @property
    def uses_suspect(self) -> bool:
        """Tell whether a device is in the answer whose camera is suspected."""
        return any(device in self.suspects for device in self.used)

    def to_dict(self) -> dict[str, Any]:
        """Every field under its name, in dicts, lists, texts, numbers, booleans and None.

        The keys are those that `mdp classify --json` prints (docs/reference/client.md).
        """
        return dict(msgspec.json.decode(self.to_json()))

    def to_json(self) -> str:
        """`to_dict` as JSON, in one line."""
        return msgspec.json.encode(self).decode()


#: Sets of members whose weights are kept: of n members, there are 2^n sets.
KEPT_RULES = 1024


@dataclass(frozen=True, slots=True)
class _Rule:
    mode: Mode
    weights: SubsetWeights
    fusion: Fusion
    expected_accuracy: float | None
    novelty: "_Novelty | None"


@dataclass(frozen=True, slots=True)
class _Novelty:
    """Score of one subset's answers, and the threshold from which on an item is unknown."""

    score: NoveltyScore
    fitted: SubsetNovelty
    threshold: float
    #: Measured at this threshold.
    known_rejected: float | None

    def of(self, contributions: Mapping[int, Contribution]) -> float:
        """The score above the threshold, to 4 digits after the point."""
        return round(float(self.score.of(contributions, self.fitted.weights)) - self.threshold, 4)


class AnswerBuilder:
    """Makes an answer of what a session collected, by one bundle's labels, weights and table."""

    def __init__(
        self,
        bundle: Bundle,
        fusion: Fusion,
        *,
        opinions: bool = False,
        max_spread_ms: float = MAX_SPREAD_MS,
        reject: float | None = None,
    ) -> None:
        """Answers by the rule `fusion`, with `opinions` also each member's alone.

        Frames that are further apart than `max_spread_ms` are not fused. At most the share `reject`
        of known items is called unknown; None: the share that the bundle is made for. Raises
        ConfigError if the bundle's weights are damaged, or cannot keep that share.
        """
        self._opinions, self._max_spread_ms = opinions, max_spread_ms
        self._bundle = bundle
        self._fusion: Fusion = fusion
        self._labels = bundle.manifest.labels
        self._weights = bundle.fusion_weights()
        self._reject, self._place = reject, _place(bundle, self._weights, reject)
        cameras = len(bundle.manifest.plan.cameras)
        known = bool(self._weights.agreement)
        #: Whether labels do not exclude each other.
        self._several = bundle.manifest.several
        # Cameras are compared by the one label that each finds.
        compares = (known or cameras > 1) and not self._several
        self._drift = CameraDrift(self._weights) if compares else None
        #: Devices whose cameras the looks so far suspect.
        self.disagreeing: frozenset[str] = frozenset()
        #: Whether each contribution has an anomaly score.
        self.inspects = bool(self._weights.anomaly)
        self._inspector = Inspector(self._weights.anomaly) if self._weights.anomaly else None
        #: Heads of each contribution that fusion needs.
        self.heads = 2 if "boosted" in self._weights.rules else 1
        self._rules: dict[tuple[int, ...], _Rule] = {}
        measured = bundle.manifest.evaluation
        self._pictures = None if measured is None else measured.pictures
        cascade = bundle.manifest.cascade
        self._first = () if cascade is None else cascade.first
        self._threshold = 1.0 if cascade is None else cascade.threshold(fusion)

    def scale_rung(self, k: int, rung: int, contribution: Contribution) -> Contribution:
        """The logits of sub-model `k` at one rung, for the weights that the top one is fused by.

        Raises WireError for a rung that the bundle has not.
        """
        if rung == 0:
            return contribution
        lower = self._bundle.manifest.plan.assignments[k].lower
        if rung > len(lower):
            raise WireError(f"expected a rung up to {len(lower)}, got {rung}")
        return scale_rung(contribution, lower[rung - 1].scales)

    def is_sure(self, arrived: Mapping[int, Contribution]) -> bool:
        """Tell whether the answer of a cascade's first stage is final."""
        _, shares = likeliest(fuse(arrived, self._rule(self._first).weights))
        return shares[0] > self._threshold

    def build(
        self, finish: Finish, deadline_ms: float, frames: FramesSeen | None = None
    ) -> Prediction | InferenceError:
        """The answer from `finish`, its `latency_ms` left at 0, or the error in its place.

        `frames` are those of a camera question.
        """
        whole = finish
        if frames is not None:
            finish = together(finish, frames, self._max_spread_ms)
        if not finish.arrived:
            return no_answer(finish.missing, timed_out=finish.timed_out, deadline_ms=deadline_ms)
        rule = self._rule(tuple(finish.arrived))
        expected = rule.expected_accuracy
        rungs = tuple([arrival.rung for arrival in finish.arrived.values()])
        if finish.stage == "first" and finish is whole:
            expected = None if any(rungs) else self._bundle.cascade_accuracy(self._fusion)
        elif any(rungs):
            members = tuple(finish.arrived)
            expected = self._bundle.expected_accuracy(members, rule.fusion, rungs)
        contributions = {k: arrival.contribution for k, arrival in finish.arrived.items()}
        fused = fuse(contributions, rule.weights)
        found = self._several_of(fused, rule.weights) if self._several else self._one_of(fused)
        scored = rule.novelty
        novelty = None if scored is None else scored.of(contributions)
        known_rejected = None if scored is None or any(rungs) else scored.known_rejected
        used = tuple([arrival.device for arrival in finish.arrived.values()])
        suspects: dict[str, Suspicion] = {}
        if frames is not None:
            if self._drift is not None:
                unknown = self._unknown_beside(finish.arrived) if novelty and novelty > 0 else ()
                self.disagreeing = frozenset(self._drift.saw(contributions, used, unknown))
            suspected = self.disagreeing.union(one for one in used if frames[one].suspected)
            suspects |= dict.fromkeys(sorted(suspected), "disagrees")
            suspects |= dict.fromkeys((one for one in used if frames[one].frozen), "frozen")
            # Members that were measured on one picture have never been on views of their own.
            several_views = len(used) > 1 and not self._bundle.manifest.plan.cameras
            if several_views or not suspects.keys().isdisjoint(used):
                expected = known_rejected = None
        inspected = self._inspect(finish, suspects, looked=frames is not None)
        if inspected is not None and inspected.moved:
            suspects |= dict.fromkeys(inspected.moved, "moved")
            expected = known_rejected = None
        known = None if novelty is None else novelty <= 0
        return Prediction(
            label=found.label,
            probability=found.probability,
            top=found.top,
            holds=found.holds,
            mode=rule.mode,
            used=used,
            missing={device: str(reason) for device, reason in finish.missing.items()},
            missing_codes={device: reason.code for device, reason in finish.missing.items()},
            expected_accuracy=None if known is False else expected,
            expected_accuracy_pictures=self._pictures,
            latency_ms=0.0,
            deadline_ms=deadline_ms,
            members=tuple(
                [self._member(k, one, frames, inspected) for k, one in finish.arrived.items()]
            ),
            bundle=self._bundle.digest,
            stage=finish.stage,
            frame_spread_ms=_spread_ms(finish, frames),
            suspects=suspects,
            known=known,
            novelty=novelty,
            known_rejected=known_rejected,
            **_fields_of(inspected),
        )

    def _one_of(self, fused: Logits) -> "_Labelled":
        """The likeliest label, of logits `[C]`."""
        classes, shares = likeliest(fused)
        top = tuple(zip([self._labels[i] for i in classes], shares, strict=True))
        return _Labelled(*top[0], top, None)

    def _several_of(self, fused: Logits, weights: SubsetWeights) -> "_Labelled":
        """The labels that hold, of log-odds `[L]`."""
        shares = sigmoid(fused)
        told = labels_held(shares, weights)
        order = np.argsort(-fused, kind="stable").tolist()
        ranked = [(self._labels[i], float(shares[i]), bool(told[i])) for i in order]
        holds = tuple((label, share) for label, share, holds in ranked if holds)
        return _Labelled(
            label=JOINED_BY.join(sorted(label for label, _ in holds)) or NO_LABEL,
            probability=float(np.where(told, shares, 1 - shares).min()),
            top=tuple((label, share) for label, share, _ in ranked[:TOP_K]),
            holds=holds,
        )

    def _inspect(
        self, finish: Finish, suspects: Mapping[str, Suspicion], *, looked: bool
    ) -> "_Inspected | None":
        """Judge an answer by its anomaly scores; None without heads."""
        if self._inspector is None:
            return None
        scores = {
            k: float(one.contribution.anomaly)
            for k, one in finish.arrived.items()
            if one.contribution.anomaly is not None
        }
        surprises = self._inspector.surprises(scores)
        devices = {k: one.device for k, one in finish.arrived.items()}
        if looked:
            self._inspector.saw(surprises, devices, suspects)
        moved = tuple(
            sorted(self._inspector.cameras_moved.intersection(devices.values()) - {*suspects})
        )
        counted = {
            k: one
            for k, one in surprises.items()
            if devices[k] not in suspects and devices[k] not in moved
        }
        plan = self._bundle.manifest.plan
        # A device is called as in the fleet, not as in the plan: elsewhere in the answer it is too.
        names = dict[int, str]()
        for name in finish.missing:
            part = plan.assignment_of(name.partition("/")[0])
            if part is not None:
                names.setdefault(part.k, name)
        names |= devices
        assigned = [names.get(part.k, part.device) for part in plan.assignments]
        return _Inspected(
            difference=self._inspector.difference(counted),
            own={k: self._inspector.alone(k, one) for k, one in surprises.items()},
            moved=moved,
            blind=blind_sides(assigned, counted),
        )

    def _unknown_beside(self, arrived: Mapping[int, Arrival]) -> list[int]:
        """The members whose others, without suspects, take the item for unknown or cannot say."""
        found = []
        for k in arrived:
            others = {
                other: arrival.contribution
                for other, arrival in arrived.items()
                if other != k and arrival.device not in self.disagreeing
            }
            scored = self._rule(tuple(others)).novelty if others else None
            if scored is None or scored.of(others) > 0:
                found.append(k)
        return found

    def _member(
        self, k: int, arrival: Arrival, frames: FramesSeen | None, inspected: "_Inspected | None"
    ) -> MemberTiming:
        own = None if inspected is None else inspected.own.get(k)
        cells = arrival.contribution.anomaly_map
        frame: FrameInAnswer | None = None if frames is None else frames[arrival.device]
        label, probability = None, None
        if self._opinions:
            weights = self._rule((k,)).weights
            alone = fuse({k: arrival.contribution}, weights)
            own_one = self._several_of(alone, weights) if self._several else self._one_of(alone)
            label, probability = own_one.label, own_one.probability
        return MemberTiming(
            device=arrival.device,
            k=k,
            queue_ms=arrival.queue_ms,
            compute_ms=arrival.compute_ms,
            network_ms=arrival.network_ms,
            held_ms=arrival.held_ms,
            rung=arrival.rung,
            label=label,
            probability=probability,
            frame=None if frame is None else frame.number,
            frame_age_ms=None if frame is None else frame.age_ms,
            anomaly=None if own is None else round(own, 4),
            anomaly_map=None if cells is None else cells.tobytes(),
        )

    def _rule(self, members: tuple[int, ...]) -> "_Rule":
        """The rule that combines ascending `members`, and its accuracy; worked out once."""
        known = self._rules.get(members)
        if known is None:
            if len(self._rules) >= KEPT_RULES:
                del self._rules[next(iter(self._rules))]
            rule = rule_for(members, self._fusion, self._weights)
            known = self._rules[members] = _Rule(
                mode_of(members, rule),
                weights_for(members, rule, self._weights),
                rule,
                self._bundle.expected_accuracy(members, rule),
                self._novelty(members),
            )
        return known

    def _novelty(self, members: tuple[int, ...]) -> _Novelty | None:
        table = self._weights.novelty
        fitted = table.of(members) if table else None
        if fitted is None:
            return None
        measured = None if self._reject is not None else self._bundle.known_rejected(members)
        threshold = fitted.thresholds[self._place]
        return _Novelty(NoveltyScore(members, self._weights), fitted, threshold, measured)


@dataclass(frozen=True, slots=True)
class _Labelled:
    """The label of fused logits and its probability, as in a `Prediction`."""

    label: str
    probability: float
    top: tuple[tuple[str, float], ...]
    holds: tuple[tuple[str, float], ...] | None


@dataclass(frozen=True, slots=True)
class _Inspected:
    """Judgement of one answer by its anomaly scores."""

    difference: Difference | None
    #: By member.
    own: Mapping[int, float | None]
    #: Devices whose cameras have moved.
    moved: tuple[str, ...]
    blind: tuple[str, ...]


def _fields_of(inspected: _Inspected | None) -> dict[str, Any]:
    """Fields of a prediction."""
    if inspected is None:
        return {}
    found = inspected.difference
    told: dict[str, Any] = {"blind_sides": inspected.blind}
    return told if found is None else {**told, **msgspec.structs.asdict(found)}


def _place(bundle: Bundle, weights: FusionWeights, reject: float | None) -> int:
    """The place of the threshold for `reject`; raises ConfigError where there is none."""
    if not weights.novelty:
        if reject is None:
            return 0
        why = (
            "answers of several labels do not say that an item is unknown: remove `reject`"
            if weights.several
            else "the bundle was made without; make it anew"
        )
        raise ConfigError(
            f"{bundle.path / FUSION}: key `novelty`: expected thresholds for `reject` {reject:g} "
            f"of the fleet file, found none: {why}"
        )
    try:
        return weights.novelty.place(reject)
    except ValueError as error:
        raise ConfigError(
            f"{bundle.path / FUSION}: key `novelty`: `reject` of the fleet file: {error}"
        ) from error


def likeliest(logits: Logits) -> tuple[list[int], list[float]]:
    """Classes of the `TOP_K` largest `logits[num_classes]` and their softmax, best first.

    Of equal ones, the first class is the first.
    """
    if len(logits) > _FEW:
        return _likeliest_of_many(logits)
    values = logits.tolist()
    best = sorted(range(len(values)), key=values.__getitem__, reverse=True)[:TOP_K]
    shares = [math.exp(value - values[best[0]]) for value in values]
    whole = sum(shares)
    return best, [shares[i] / whole for i in best]


def _likeliest_of_many(logits: Logits) -> tuple[list[int], list[float]]:
    # Sorting all of them would take longer than fusing.
    candidates = np.flatnonzero(logits >= np.partition(logits, -TOP_K)[-TOP_K])
    best = candidates[np.argsort(-logits[candidates], kind="stable")[:TOP_K]]
    largest = logits[best[0]]
    whole = np.add.reduce(np.exp(logits - largest))
    return best.tolist(), (np.exp(logits[best] - largest) / whole).tolist()


def _spread_ms(finish: Finish, frames: FramesSeen | None) -> float | None:
    if frames is None:
        return None
    ages_ms = [frames[arrival.device].age_ms for arrival in finish.arrived.values()]
    return max(ages_ms) - min(ages_ms)


def no_answer(
    missing: Mapping[str, Reason], *, timed_out: bool, deadline_ms: float
) -> InferenceError:
    """The error of a call to which no member contributed."""
    outcomes = {device: str(reason) for device, reason in missing.items()}
    codes = {device: reason.code for device, reason in missing.items()}
    devices: dict[str, list[str]] = {}
    # Not in the order of their replies, so that the same outcome has the same text.
    for device, reason in sorted(outcomes.items()):
        devices.setdefault(reason, []).append(device)
    told = "; ".join(f"{', '.join(those)}: {reason}" for reason, those in devices.items())
    if timed_out:
        return DeadlineExceeded(f"no answer within {deadline_ms:g} ms ({told})", outcomes, codes)
    return QuorumNotMet(f"no device can answer ({told})", outcomes, codes)
