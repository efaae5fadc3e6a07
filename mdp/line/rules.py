"""Decides what an item is and whether it passes, by one look at it. Pure.

A class is seen by the fused answer, or by its rule: by so many cameras that each say so alone.
Cameras that are missing, or suspected to be covered or turned, have no vote; where their votes
could still make up the number, the rule is `open`, and the item does not pass. Of a bundle with
anomaly heads, an item also does not pass that differs from the good ones: by the fused score, or to
so many cameras alone.

Of a bundle of which several labels may hold, the fused answer alone decides, and an item passes
where each of its labels does; cameras that see different labels do not disagree.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from mdp.errors import InferenceError, InputError
from mdp.formats.bundle import NO_LABEL
from mdp.line.kept import WhyKept
from mdp.requests.prediction import Prediction

#: Probability from which on an answer, or a camera's own one, is sure, unless told otherwise.
SURE_FROM = 0.5
VoteState = Literal["seen", "open", "unseen"]
#: What decided: the fused answer or a rule. `unknown` is an item of no class, `different` one that
#: differs from the good ones; `open` lacks cameras, `unconfirmed` votes; `conflict` has two
#: classes, `unsure` a small probability; `empty` shows no item; `no_answer` had no device in time;
#: `unsettled` looks differed, `missed` had no look.
Decision = Literal[
    "fused", "rule", "unknown", "different", "open", "unconfirmed", "conflict", "unsure", "empty",
    "no_answer", "unsettled", "missed",
]  # fmt: skip
#: Decisions with which an item's pictures tell something that is not known yet.
_UNSURE: frozenset[Decision] = frozenset(
    ("unconfirmed", "conflict", "unsure", "no_answer", "unsettled")
)


#: How it is seen that an item differs from the good ones: by the fused score, by so many cameras
#: that each say so alone, or not at all.
DifferentBy = int | Literal["fused", "off"]


class OwnAnswer(Struct, frozen=True):
    """Answer of one camera alone."""

    label: str
    probability: float
    #: Whether it finds a difference from good items; None without an anomaly head.
    different: bool | None = None


class Look(Struct, frozen=True, kw_only=True):
    """One look at an item, as far as rules need it."""

    #: Fused; None without an answer.
    label: str | None
    probability: float = 0.0
    #: Where several labels may hold, those that do, or `none`; else empty.
    labels: tuple[str, ...] = ()
    #: Whether it is one of the classes; None where the bundle cannot say.
    known: bool | None = None
    #: Whether it is like the good ones; None of a bundle without anomaly heads.
    normal: bool | None = None
    #: Whether anomaly heads could not tell, as every side is missing or suspected.
    uninspected: bool = False
    #: By device: those in the answer.
    own: Mapping[str, OwnAnswer] = {}
    #: How many cameras there should be.
    cameras: int = 0
    #: Devices that are not in the answer.
    missing: tuple[str, ...] = ()
    suspects: frozenset[str] = frozenset()
    #: Why there is no answer.
    error: str = ""


class Votes(Struct, frozen=True, kw_only=True):
    """The votes for one class."""

    needed: int
    #: How many cameras there should be.
    of: int
    #: Devices that see it.
    seen: tuple[str, ...]
    #: How many cameras have no vote: not in the answer, or suspected.
    missing: int
    state: VoteState

    def __str__(self) -> str:
        lacking = f", {self.missing} missing" if self.missing else ""
        return f"seen by {len(self.seen)} of {self.of}{lacking}, {self.needed} needed"


class Judgement(Struct, frozen=True, kw_only=True):
    """The verdict of one look."""

    #: The class; None where there is none, or no single one.
    label: str | None
    passed: bool
    sure: bool
    decision: Decision
    #: For people, without the item's id.
    text: str
    votes: Mapping[str, Votes] = {}
    #: Those for a difference from the good ones, where cameras vote on that.
    different: Votes | None = None
    why_kept: WhyKept | None = None

    @property
    def outcome(self) -> tuple[str | None, bool, str]:
        """Class, verdict and being unknown or different, which are the same in equal looks."""
        strange = self.decision if self.decision in ("unknown", "different") else ""
        return self.label, self.passed, strange


class LineRules(Struct, frozen=True, kw_only=True):
    """Rules of a line: how classes are seen, and which pass."""

    #: Class -> how many cameras have to see it; by others the fused answer decides.
    needed: Mapping[str, int] = {}
    #: Classes that pass; None: all but `empty`.
    passing: frozenset[str] | None = None
    #: The class of a scene without an item.
    empty: str | None = None
    sure_from: float = SURE_FROM
    different: DifferentBy = "fused"

    def passes(self, label: str) -> bool:
        """Tell whether items of the class `label` pass."""
        return label != self.empty and (self.passing is None or label in self.passing)

    def stops(self, label: str) -> bool:
        """Tell whether an item does not pass once the class `label` is seen on it."""
        return label != self.empty and not self.passes(label)

    def check(
        self, labels: Sequence[str], cameras: int, *, inspects: bool = False, several: bool = False
    ) -> None:
        """Raise InputError for a class that is none of `labels`, or more votes than `cameras`.

        Also for votes on a difference where the bundle has no anomaly heads, as `inspects` says,
        and for votes on a class where `several` labels may hold.
        """
        if several:
            labels = (*labels, NO_LABEL)
            for label in self.needed:
                raise InputError(
                    f"--rule {label}: votes need one label an item, of this bundle several may hold"
                )
        if isinstance(self.different, int):
            if not inspects:
                raise InputError(
                    f"--different {self.different}: expected a bundle with anomaly heads: "
                    "mdp-partition inspect adds them"
                )
            if self.different > cameras:
                raise InputError(
                    f"--different {self.different}: expected at most {cameras}, the cameras of the "
                    "fleet"
                )
        named = {
            "--rule": tuple(self.needed),
            "--pass": tuple(sorted(self.passing or ())),
            "--empty": () if self.empty is None else (self.empty,),
        }
        for option, classes in named.items():
            for label in classes:
                if label not in labels:
                    raise InputError(
                        f"{option} {label}: expected a class of the bundle: {', '.join(labels)}"
                    )
        for label, needed in self.needed.items():
            if needed > cameras:
                raise InputError(
                    f"--rule {label}={needed}: expected at most {cameras}, the cameras of the fleet"
                )


def read_rules(texts: Sequence[str]) -> dict[str, int]:
    """Class -> votes needed, from `CLASS=any`, `CLASS=2` and `CLASS=fused`; raises InputError."""
    found: dict[str, int] = {}
    seen = set()
    for text in texts:
        label, separator, rule = text.rpartition("=")
        votes = {"any": "1", "fused": "0"}.get(rule, rule)
        if not (separator and label and votes.isascii() and votes.isdecimal()) or (
            rule.strip("0") == "" or len(votes) > 3
        ):
            raise InputError(f"--rule {text}: expected CLASS=any, CLASS=fused or CLASS=2")
        if label in seen:
            raise InputError(f"--rule {text}: expected one rule for {label}, got two")
        seen.add(label)
        if int(votes):
            found[label] = int(votes)
    return found


def read_different(text: str) -> DifferentBy:
    """Rule of how a difference is seen, from `fused`, `any`, `2` and `off`; raises InputError."""
    if text == "fused" or text == "off":
        return text  # type: ignore[return-value]
    votes = "1" if text == "any" else text
    if not (votes.isascii() and votes.isdecimal()) or not 0 < int(votes[:4]) < 1000:
        raise InputError(f"--different {text}: expected fused, any, off or a number of cameras")
    return int(votes)


def look_of(seen: Prediction | InferenceError, cameras: int) -> Look:
    """Make a look of a client's answer with `opinions`, in a fleet of so many cameras."""
    if isinstance(seen, InferenceError):
        why = " ".join(str(seen).split())
        return Look(label=None, cameras=cameras, missing=tuple(seen.outcomes), error=why)
    own = {
        one.device: OwnAnswer(
            one.label, one.probability or 0.0, None if one.anomaly is None else one.anomaly > 0
        )
        for one in seen.members
        if one.label is not None
    }
    held = None if seen.holds is None else tuple(label for label, _ in seen.holds)
    return Look(
        label=seen.label,
        probability=seen.probability,
        labels=() if held is None else held or (NO_LABEL,),
        known=seen.known,
        normal=seen.normal,
        uninspected=seen.normal is None and bool(seen.blind_sides),
        own=own,
        cameras=cameras,
        missing=tuple(seen.missing),
        suspects=frozenset(seen.suspects),
    )


def count_votes(label: str, needed: int, look: Look) -> Votes:
    """The votes for `label`, of which `needed` make it seen."""
    return _count(needed, look, {device: one.label == label for device, one in look.own.items()})


def count_different(needed: int, look: Look) -> Votes:
    """The votes for a difference from the good ones, of which `needed` make it seen."""
    told = {device: one.different for device, one in look.own.items() if one.different is not None}
    return _count(needed, look, told)


def _count(needed: int, look: Look, told: Mapping[str, bool]) -> Votes:
    voting = {device: vote for device, vote in told.items() if device not in look.suspects}
    seen = tuple(device for device, vote in voting.items() if vote)
    missing = max(0, look.cameras - len(voting))
    state: VoteState = "unseen"
    if len(seen) >= needed:
        state = "seen"
    elif len(seen) + missing >= needed:
        state = "open"
    return Votes(needed=needed, of=look.cameras, seen=seen, missing=missing, state=state)


def judge(look: Look, rules: LineRules) -> Judgement:
    """The verdict of one look: a class that stops an item, and is seen, comes before all else."""
    needed = {} if look.labels else rules.needed
    votes = {label: count_votes(label, count, look) for label, count in needed.items()}
    different = None
    if isinstance(rules.different, int):
        different = count_different(rules.different, look)
    label, decision, text = _decide(look, rules, votes, different)
    decided = decision in ("fused", "rule")
    passed = decided and label is not None and label != rules.empty
    passed = passed and all(rules.passes(one) for one in look.labels or (str(label),))
    why: WhyKept | None = None
    if decision in ("unknown", "different"):
        why = decision
    elif decision in _UNSURE:
        why = "unsure"
    elif decision != "empty" and not look.labels and disagree(look, rules.sure_from):
        why = "disagreement"
    return Judgement(
        label=label,
        passed=passed,
        sure=decided or decision == "empty",
        decision=decision,
        text=f"{text}: {'passed' if passed else 'not passed'}",
        votes=votes,
        different=different,
        why_kept=why,
    )


def _decide(
    look: Look, rules: LineRules, votes: Mapping[str, Votes], different: Votes | None
) -> tuple[str | None, Decision, str]:
    """Class, what decided it, and that in words."""
    if look.label is None:
        return None, "no_answer", f"no answer ({look.error})"
    seen = [label for label, one in votes.items() if one.state == "seen"]
    stops = [label for label in seen if rules.stops(label)]
    if stops:
        label = max(stops, key=lambda each: len(votes[each].seen))
        return label, "rule", f"{label}, {votes[label]}"
    fused = f"{look.label} ({look.probability:.0%})"
    # A bundle may come to a line that runs: a rule that nobody can count stops as an open one does.
    for label in filter(rules.stops, rules.needed if look.labels else ()):
        return look.label, "open", f"{fused}, but votes for {label} need one label an item"
    if look.known is False:
        return None, "unknown", f"unknown, nearest {fused}"
    # A scene without an item differs from good items, and is none that differs.
    if look.label == rules.empty:
        different = None
    elif rules.different == "fused" and look.normal is False:
        return look.label, "different", f"different from the good ones, {fused}"
    elif rules.different == "fused" and look.uninspected:
        return look.label, "open", f"{fused}, but no side can tell if it differs from the good ones"
    if different is not None and different.state == "seen":
        return look.label, "different", f"different from the good ones, {different}, {fused}"
    if different is not None and different.state == "open":
        return look.label, "open", f"{fused}, but it may differ from the good ones: {different}"
    open_stops = [
        label for label, one in votes.items() if one.state == "open" and rules.stops(label)
    ]
    if open_stops:
        label = max(open_stops, key=lambda each: len(votes[each].seen))
        return look.label, "open", f"{fused}, but {label} may be there: {votes[label]}"
    own = votes.get(look.label)
    others = [label for label in seen if label != look.label]
    # Where cameras see an item, it did come.
    if look.label == rules.empty and own is None and not others:
        return look.label, "empty", f"no item ({fused})"
    if own is None:
        if others:
            return None, "conflict", f"{fused}, but {others[0]} is {votes[others[0]]}"
        if look.probability < rules.sure_from:
            return look.label, "unsure", f"{fused}, unsure"
        return look.label, "fused", fused
    if own.state == "seen" and not others:
        decision: Decision = "empty" if look.label == rules.empty else "rule"
        return look.label, decision, f"{look.label}, {own}"
    if own.state != "seen" and len(others) == 1:
        return others[0], "rule", f"{others[0]}, {votes[others[0]]}"
    if others:
        return None, "conflict", f"{' and '.join(seen)}, {votes[others[0]]}"
    decision = "open" if own.state == "open" else "unconfirmed"
    return look.label, decision, f"{look.label}, {own}"


def disagree(look: Look, sure_from: float) -> bool:
    """Tell whether two cameras that are sure on their own name different classes."""
    named = {one.label for one in look.own.values() if one.probability >= sure_from}
    return len(named) > 1
