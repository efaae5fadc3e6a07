"""Frozen passes that trainers share in a run: networks in, files of one process out.

A teacher's answers to what is trained on, and to the held-out pictures; a sub-model's outputs that
its successors learn from; exported sub-models' logits for the held-out pictures, to which fusion is
fitted and which accuracy is measured on.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mdp.formats.model_file import ModelFile
from mdp.formats.plan import Assignment, Plan
from mdp.runtimes.base import Runtime
from partitioner.crew.jobs.answers import FrozenPass
from partitioner.data.datasets import SplitName
from partitioner.data.memmaps import Index
from partitioner.export.sessions import contribution, logits_file, open_member
from partitioner.run.settings import Autocast
from partitioner.training.compute import training_device
from partitioner.training.context import TrainingContext
from partitioner.training.largest_logits import Keep
from partitioner.training.members import output_files, outputs_of, remove_outputs
from partitioner.training.teacher import (
    ensure_teacher,
    keep_of,
    logits_of,
    note_accuracy,
    plain_answers_file,
    target_files,
)

#: Outputs of a batch of pictures, each `[B, ...]`.
Outputs = Callable[[Index], Sequence[Tensor]]
#: A pass, and the coordinator's files of its outputs by variant.
Pass = tuple[FrozenPass, Mapping[int, Sequence[Path]]]

#: Jobs: the teacher's answers; with a number what a sub-model's successors learn from; the exported
#: sub-models, which are the coordinator's; and their evaluation.
ANSWERS, OUTPUTS, MODELS, EVALUATION = "answers", "outputs-", "models", "evaluation"
HELD_OUT: tuple[SplitName, ...] = ("calibration", "test")


def members_to_share(plan: Plan) -> list[Assignment]:
    """The sub-models that trainers evaluate together: in int8, processors differ by more."""
    return [a for a in plan.assignments if a.spec.precision == "fp32"]


def model_of(work: TrainingContext, k: int) -> Path:
    """The exported sub-model `k`, for trainers to evaluate."""
    return work.run.cache / f"model-{k}.onnx"


def outputs(work: TrainingContext, k: int) -> Iterator[Pass]:
    """A sub-model's outputs for its successors."""
    kept, of_variant = output_files(work, k), outputs_of(work, k)
    count, arithmetic = len(work.data.train), work.settings.autocast
    yield _pass(f"sub-model {k}'s outputs", of_variant, count, kept, arithmetic, np.float16)
    if k:
        remove_outputs(work, k - 1)


def answers(work: TrainingContext) -> Iterator[Pass]:
    """The teacher's answers, for training and for the held-out pictures."""
    teacher, variants = ensure_teacher(work, None).to(training_device()), work.variants

    def of_variant(variant: int) -> Outputs:
        return logits_of(teacher, variants.view(work.teacher_view, variant))

    what, kept = "the teacher's answers", {v: [path] for v, path in enumerate(target_files(work))}
    count, arithmetic = len(work.singles.train), work.settings.autocast
    yield _pass(what, of_variant, count, kept, arithmetic, np.float16, keep=keep_of(work))

    def plain(split: SplitName, variant: int) -> Outputs:
        return logits_of(teacher, work.teacher_pixels(split))

    for split in HELD_OUT:
        path, count = plain_answers_file(work, split), len(work.singles.split(split))
        yield _pass(what, partial(plain, split), count, {0: [path]}, "fp32", np.float32)
        if path.exists():  # which is at the coordinator
            note_accuracy(work, split)


def evaluation(work: TrainingContext) -> Iterator[Pass]:
    """The exported sub-models' logits for the held-out pictures."""
    members = {a.k: a for a in members_to_share(work.plan)}
    models = {k: ModelFile.read(model_of(work, k)) for k in members}

    @cache
    def runtime(k: int) -> Runtime:
        return open_member(models[k], members[k], len(work.data.labels))

    def logits(split: SplitName, k: int) -> Outputs:
        pixels = work.member_pixels(members[k], split)

        def of(index: Index) -> list[Tensor]:
            heads = contribution(runtime(k), pixels[index]).heads
            return [torch.from_numpy(np.stack(heads, axis=1))]

        return of

    for split in HELD_OUT if members else ():
        pictures = work.data.split(split)
        kept = {
            k: [logits_file(work.run.cache, models[k], a, pictures.digest)]
            for k, a in members.items()
        }
        yield _pass(
            "sub-models' logits", partial(logits, split), len(pictures), kept, "fp32", np.float32,
            networks=[*members],
        )  # fmt: skip


def _pass(
    what: str,
    of_variant: Callable[[int], Outputs],
    pictures: int,
    kept: Mapping[int, Sequence[Path]],
    arithmetic: Autocast,
    dtype: type[np.floating],
    networks: Sequence[int] = (0,),
    keep: Keep | None = None,
) -> Pass:
    """A pass over all variants of which files are kept."""
    paths = next(iter(kept.values()))
    frozen = FrozenPass(
        name=paths[0].name,
        pictures=pictures,
        variants=[*kept],
        outputs_of=of_variant,
        outputs=[what] * len(paths),
        arithmetic=arithmetic,
        dtype=dtype,
        networks=networks,
        keep=keep,
    )
    return frozen, kept
