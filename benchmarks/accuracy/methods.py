"""The methods of the accuracy benchmark by name: ours, ours with one part changed, the rivals."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.accuracy.results import Choice
from benchmarks.accuracy.shapes import Shapes, even
from benchmarks.rivals import class_pruned, class_split, independent, replicated, single
from benchmarks.rivals.ground import Ground
from benchmarks.rivals.outcome import Outcome, stacked_subsets
from mdp.formats.plan import Assignment, SubModelSpec
from mdp.fusion.fuse import Contribution
from partitioner.data.datasets import SplitName
from partitioner.export.evaluate import accuracy
from partitioner.run.settings import JointSchedule, MemberSchedule
from partitioner.training.cached_outputs import BATCH, batch, device_of
from partitioner.training.context import Work
from partitioner.training.joint import train_jointly
from partitioner.training.members import train_members
from partitioner.training.student import Student

OURS = "ours"
#: Step sizes that every method is tuned over, and the one that holds before.
RATES = (1e-3,)
DEFAULT_RATE = 1e-3
#: Share of the epochs that a joint pass takes away from the members' own.
JOINT_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    run: Callable[[Ground], Outcome]
    shapes: Callable[[Shapes, Choice], Sequence[SubModelSpec]] = lambda shapes, _: shapes.members
    #: Fields of MemberSchedule that differ from the product's defaults.
    schedule: dict[str, Any] = field(default_factory=dict)
    #: Whether there is a joint pass; None is the product's default.
    joint: bool | None = False
    #: Epochs, as a multiple of what the others have.
    longer: float = 1.0
    #: Whose tuning it takes; its own if empty.
    tuned_as: str = ""
    #: Whether the run's plan has the method's shapes, and not the devices' as they are.
    plans: bool = False


def run_ours(ground: Ground) -> Outcome:
    """Train by the product's own steps; measure in torch, fp32."""
    work, data = ground.work, ground.work.data
    work.run.start_or_continue(work.settings, work.plan)
    train_members(work, ground.teacher, ground.targets)
    train_jointly(work, ground.targets)
    calibration, test = (_contributions(work, split) for split in ("calibration", "test"))
    subsets, right = stacked_subsets(calibration, data.calibration.targets, test, data.test.targets)
    shutil.rmtree(work.run.left_behind, ignore_errors=True)
    return Outcome(
        shapes=[a.vit for a in work.plan.assignments],
        alone=[accuracy(part.bag, data.test.targets) for part in test.values()],
        subsets=subsets,
        headline="stacked",
        calibration=right,
    )


def _contributions(work: Work, split: SplitName) -> dict[int, Contribution]:
    return {a.k: _contribution(work, a, split) for a in work.plan.assignments}


def _contribution(work: Work, assignment: Assignment, split: SplitName) -> Contribution:
    pixels = work.member_pixels(assignment, split)
    student = Student(work.load_member(assignment)).eval()
    boost, bag = [], []
    for start in range(0, len(pixels), BATCH):
        index = np.arange(start, min(start + BATCH, len(pixels)))
        with torch.inference_mode():
            output = student(batch(pixels, index, device_of(student)))
        boost.append(output.boost.numpy())
        bag.append(output.bag.numpy())
    return Contribution(np.concatenate(boost), np.concatenate(bag))


def _ours(
    shapes: Callable[[Shapes, Choice], Sequence[SubModelSpec]] | None = None,
    *,
    joint: bool | None = None,
    **schedule: Any,
) -> Method:
    return Method(
        run=run_ours,
        shapes=shapes or (lambda shapes, _: shapes.members),
        schedule=schedule,
        joint=joint,
        tuned_as=OURS,
        plans=True,
    )


#: Ours, each part removed or exchanged in turn. Entries that change nothing are left out of a run.
ABLATIONS: dict[str, Method] = {
    OURS: _ours(),
    "no-stack": _ours(stack_weight=0.0),
    "stack-0.5": _ours(stack_weight=0.5),
    "no-boost": _ours(boost_weight=0.0),
    "no-bag": _ours(bag_weight=0.0),
    "no-teacher": _ours(distillation=0.0),
    "teacher-only": _ours(distillation=1.0),
    "logits": _ours(boost_target="logits"),
    "probabilities": _ours(boost_target="probabilities"),
    "shrinkage-0.5": _ours(boost_target="logits", shrinkage=0.5),
    "imitate-predecessors": _ours(imitate="predecessors", stack_weight=0.5),
    "imitate-teacher": _ours(imitate="teacher", stack_weight=0.5),
    "start-scratch": _ours(start="scratch"),
    "start-scratch-stack-0.5": _ours(start="scratch", stack_weight=0.5),
    "start-teacher": _ours(start="teacher"),
    "later-as-long": _ours(later_share=1.0),
    "one-trunk": _ours(trunks=1),
    "two-trunks": _ours(lambda shapes, _: [even(spec) for spec in shapes.members], trunks=2),
    "reversed-order": _ours(lambda shapes, _: shapes.members[::-1]),
    "joint": _ours(joint=True),
    "no-joint": _ours(joint=False),
}
RIVALS: dict[str, Method] = {
    "single": Method(
        run=single.run,
        shapes=lambda shapes, choice: [shapes.fitting_singles()[choice.candidate]],
    ),
    "independent": Method(run=independent.run),
    "single-start-teacher": Method(
        run=single.run,
        shapes=lambda shapes, choice: [shapes.fitting_singles()[choice.candidate]],
        schedule={"start": "teacher"},
        tuned_as="single",
    ),
    # As many epochs as went into the weights of our later members: the first one's and their own.
    "single-longer": Method(
        run=single.run,
        shapes=lambda shapes, choice: [shapes.fitting_singles()[choice.candidate]],
        schedule={"start": "teacher"},
        longer=1.0 + MemberSchedule().later_share,
        tuned_as="single",
    ),
    "independent-start-teacher": Method(
        run=independent.run, schedule={"start": "teacher"}, tuned_as="independent"
    ),
    "class-split": Method(run=class_split.run),
    "class-split-drop": Method(run=class_split.run_dropping),
    "class-pruned": Method(run=class_pruned.run),
    "replicated": Method(
        run=replicated.run, shapes=lambda shapes, choice: [shapes.slowest[choice.candidate]]
    ),
}
METHODS: dict[str, Method] = ABLATIONS | RIVALS


def choices(name: str, shapes: Shapes) -> list[Choice]:
    """What a method is tuned over: every step size, for a single model with every candidate."""
    candidates = {"single": len(shapes.fitting_singles()), "replicated": len(shapes.slowest)}
    return [
        Choice(learning_rate=rate, candidate=candidate)
        for candidate in range(candidates.get(name, 1))
        for rate in RATES
    ]


def joint_epochs(method: Method, epochs: int) -> int:
    """How many of a member's epochs are the joint pass's."""
    wanted = JointSchedule().epochs > 0 if method.joint is None else method.joint
    return min(max(1, round(JOINT_SHARE * epochs)), epochs - 1) if wanted else 0
