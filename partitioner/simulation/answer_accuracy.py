"""Accuracy of simulated answers by arrival subset, fused by stacking."""

import math
from typing import Protocol

from mdp.formats.bundle import Bundle
from mdp.formats.plan import Plan
from mdp.fusion.fuse import Fusion, Mode, mode_of, rule_for
from partitioner.estimates.accuracy_law import (
    AccuracyLaw,
    LawMember,
    capability_of,
    model_of,
    together,
    view_of,
)


class AnswerAccuracy(Protocol):
    """The accuracy of answers made of some members."""

    #: Where the accuracies come from, in words.
    source: str

    def mode(self, members: tuple[int, ...]) -> Mode:
        """The mode of an answer of ascending `members`."""

    def accuracy(self, members: tuple[int, ...], rungs: tuple[int, ...] = ()) -> float | None:
        """Share of the answers of `members`, at these rungs, that are right; None if unknown."""

    def sure_accuracy(self) -> float | None:
        """Accuracy of answers of a cascade's first stage; None if unknown."""


class MeasuredSubsets:
    """The accuracies in a bundle's manifest, as every answer carries them."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._weights = bundle.fusion_weights()
        evaluation = bundle.manifest.evaluation
        self.source = "not known: the bundle has not been evaluated"
        if evaluation is not None:
            self.source = f"as measured on {evaluation.pictures:,} pictures of {evaluation.data}"
        if evaluation is not None and evaluation.lowest:
            self.source += "; estimated between the top and the lowest rungs"

    def accuracy(self, members: tuple[int, ...], rungs: tuple[int, ...] = ()) -> float | None:
        """As measured; between the top and the lowest rungs, where nothing was, by `_lowered`."""
        rule = self.rule(members)
        found = self._bundle.expected_accuracy(members, rule, rungs)
        if found is not None or not any(rungs):
            return found
        assignments = self._bundle.manifest.plan.assignments
        top = self._bundle.expected_accuracy(members, rule)
        lowest = tuple(len(assignments[k].lower) for k in members)
        floor = self._bundle.expected_accuracy(members, rule, lowest)
        if top is None or floor is None:
            return None
        return top + (floor - top) * self._share_of_loss(members, rungs)

    def _share_of_loss(self, members: tuple[int, ...], rungs: tuple[int, ...]) -> float:
        """Share of the way from the top (0) to the lowest rungs (1) that these have gone.

        By what they lose alone of what the lowest lose, or by their steps where none loses.
        """
        evaluation = self._bundle.manifest.evaluation
        assert evaluation is not None
        alone = {member.k: member.accuracy for member in evaluation.members}
        lost = most_lost = steps = most_steps = 0.0
        for k, rung in zip(members, rungs, strict=True):
            lower = self._bundle.manifest.plan.assignments[k].lower
            losses = [0.0, *(max(0.0, alone.get(k, 0.0) - one.accuracy) for one in lower)]
            lost, most_lost = lost + min(losses[rung], losses[-1]), most_lost + losses[-1]
            steps, most_steps = steps + rung, most_steps + len(lower)
        return lost / most_lost if most_lost else steps / most_steps

    def rule(self, members: tuple[int, ...]) -> Fusion:
        """The rule that combines ascending `members`, as `mdp.requests.prediction` decides it."""
        return rule_for(members, "stacked", self._weights)

    def mode(self, members: tuple[int, ...]) -> Mode:
        """The mode of such an answer."""
        return mode_of(members, self.rule(members))

    def sure_accuracy(self) -> float | None:
        """The measured accuracy, as answers carry it."""
        return self._bundle.cascade_accuracy("stacked")


class PredictedSubsets:
    """A plan's predictions: its own for all members, the accuracy law's for fewer."""

    def __init__(self, plan: Plan, law: AccuracyLaw) -> None:
        self._law = law
        self._count = len(plan.assignments)
        self._whole = None if plan.accuracy is None else plan.accuracy.all_in
        self._members = {
            a.k: LawMember(
                capability=capability_of(min(a.accuracy, 1 - 1e-9)),
                view=view_of(a.spec, a.region),
                model=model_of(a.spec),
            )
            for a in plan.assignments
            if a.accuracy is not None
        }
        self.source = "not known: the plan predicts none"
        if self._whole is not None:
            self.source = "as the plan predicts it for answers of all members; of others not known"
        if self._whole is not None and len(self._members) == self._count:
            self.source = "as predicted for each subset of the members"

    def sure_accuracy(self) -> None:
        """A plan has no cascade."""

    def mode(self, members: tuple[int, ...]) -> Mode:
        """As of a bundle with fitted fusion weights."""
        return mode_of(members, "stacked")

    def accuracy(self, members: tuple[int, ...], rungs: tuple[int, ...] = ()) -> float | None:
        """As predicted; None where a member's accuracy is unknown, as below its top rung."""
        if any(rungs):
            return None
        if len(members) == self._count:
            return self._whole
        if not self._members.keys() >= set(members):
            return None
        predicted = together(self._law, [self._members[k] for k in members])
        # No subset is better than all members.
        return min(-math.expm1(-predicted), self._whole or 1.0)
