"""A teacher in stages, each on a trainer: cut by the coordinator, trained, and joined again."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from mdp.errors import MDPError
from mdp.files import replacing
from partitioner.crew.averaging.generations import train_in_generations
from partitioner.crew.averaging.groups import TrainerGroups
from partitioner.crew.bus.files import Files
from partitioner.crew.jobs.pipeline import (
    Cut,
    Pipeline,
    StagePictures,
    default_group,
    gather,
    part_of,
    stage_of,
    take_common,
)
from partitioner.crew.messages import TrainerControl
from partitioner.crew.planning.syncplan import NetworkSync
from partitioner.data.memmaps import load_weights
from partitioner.run.curves import Curve
from partitioner.training.context import TrainingContext
from partitioner.training.distributed import Crew
from partitioner.training.loop import fit
from partitioner.training.teacher import initial_teacher


class StageLost(MDPError):
    """A trainer of a stage is not there, and no other has its weights."""


LOST = (
    "teacher: {name}, the trainer of a stage, is not there: the same commands go on from the last "
    "epoch that all stages have"
)


def hand_out_start(
    work: TrainingContext,
    sync: NetworkSync,
    checkpoint: Path | None,
    coordinator: str,
    files: Files,
) -> None:
    """Give every stage its first weights, which are those of one process.

    The teacher is in memory whole while it is cut, without gradients and moments; `checkpoint` is
    the user's file to start from. The coordinator keeps the file of its own stage.
    """
    blocks = tuple(stage.blocks for stage in sync.stage)
    paths = [_file(work, "start", blocks, index) for index in range(len(blocks))]
    if not all(path.exists() for path in paths):
        state = initial_teacher(work, checkpoint).state_dict()
        for index, path in enumerate(paths):
            own = {name: v for name, v in state.items() if stage_of(name, blocks) == index}
            with replacing(path) as temporary:
                save_file(own, temporary)
    for stage, path in zip(sync.stage, paths, strict=True):
        if stage.by != coordinator:
            files.send(path.name, path)


def train_in_stages(
    work: TrainingContext,
    sync: NetworkSync,
    control: TrainerControl,
    groups: TrainerGroups,
    name_of: Callable[[int], str],
    files: Files,
) -> bool:
    """Train the own stage; whether this trainer has the whole teacher to hand in.

    `name_of` knows trainers by their rank. The first stage's puts all together. Raises StageLost
    where not all trainers are there.
    """
    names = [stage.by for stage in sync.stage]
    blocks = tuple(stage.blocks for stage in sync.stage)
    index = names.index(name_of(control.rank))
    ends = [_file(work, "end", blocks, other) for other in range(len(blocks))]
    start = _file(work, "start", blocks, index)
    # What may take long comes before trainers meet: a group waits for seconds.
    if not (start.exists() or work.run.teacher.exists()):
        files.fetch(start.name, start)
    pictures = _pictures(work, is_first=index == 0, is_last=index == len(blocks) - 1)
    #: The first stage whose trainer has the whole teacher already, if any.
    having: list[int] = []

    def train(crew: Crew, members: tuple[int, ...]) -> None:
        places = {name_of(rank): place for place, rank in enumerate(members)}
        for name in names:
            if name not in places:
                raise StageLost(LOST.format(name=name))
        own = index if work.run.teacher.exists() else len(blocks)
        having[:] = [min(int(one) for one in gather(crew, torch.tensor([own])))]
        if having[0] < len(blocks):
            return
        cut = Cut(
            blocks=blocks,
            index=index,
            micro_batches=sync.micro_batches or 1,
            in_flight=sync.in_flight[index],
            ranks=tuple(places[name] for name in names),
        )
        curve = _train(work, crew, cut, pictures, start, ends[index])
        if index == 0:
            work.run.keep_curve("teacher", curve)
        else:
            files.send(ends[index].name, ends[index])

    never = work.run.cache / "teacher-stage-none.pt"  # a stage's weights are of use to it alone
    train_in_generations("teacher", control, groups, never, train)
    if having[0] < len(blocks):
        return having[0] == index
    if index == 0:
        for name, path in zip(names[1:], ends[1:], strict=True):
            if not files.has(path.name):  # all that live have sent theirs
                raise StageLost(LOST.format(name=name))
            files.fetch(path.name, path)
        whole = {name: v for path in ends for name, v in load_weights(path).items()}
        with replacing(work.run.teacher) as temporary:
            save_file(whole, temporary)
        forget_stages(work)
    return index == 0


def forget_stages(work: TrainingContext) -> None:
    """Delete what stages keep, as the whole teacher is there."""
    for path in work.run.path.glob("checkpoint-teacher-*.pt"):
        path.unlink(missing_ok=True)
    for path in work.run.cache.glob("teacher-stage-*.safetensors"):
        path.unlink(missing_ok=True)


def _pictures(work: TrainingContext, *, is_first: bool, is_last: bool) -> StagePictures:
    variants, schedule = work.variants, work.settings.teacher_schedule
    every, count = range(variants.count), len(work.singles.train)
    return StagePictures(
        pixels=[variants.view(work.teacher_view, v) for v in every if is_first],
        labels=[variants.labels(v) for v in every if is_last],
        batch_size=math.ceil(count / math.ceil(count / schedule.batch_size)),
        label_smoothing=schedule.label_smoothing,
        classes=len(work.data.labels),
        side=work.teacher_view.image_size,
        autocast=work.settings.autocast,
    )


def _train(
    work: TrainingContext, crew: Crew, cut: Cut, pictures: StagePictures, start: Path, end: Path
) -> Curve:
    """Train one stage and write its weights to `end`."""
    spec = work.plan.require_teacher()
    module, between = part_of(spec, pictures.classes, cut, load_weights(start))
    checkpoint = work.run.checkpoint(f"teacher-{_words(cut.blocks)}-{cut.index}")
    take_common(crew, checkpoint)
    pipeline = Pipeline(crew, cut, pictures, between, checkpoint)
    stage = replace(
        work.stage("teacher", "training the teacher", work.settings.teacher_schedule),
        checkpoint=checkpoint,
        sync=pipeline,
    )
    with default_group(crew):
        curve = fit(module, stage, pipeline.loss_of, work.progress)
    with replacing(end) as temporary:
        save_file({name: v.contiguous() for name, v in module.state_dict().items()}, temporary)
    return curve


def _file(work: TrainingContext, what: str, blocks: tuple[int, ...], index: int) -> Path:
    return work.run.cache / f"teacher-stage-{_words(blocks)}-{index}-{what}.safetensors"


def _words(blocks: tuple[int, ...]) -> str:
    return "-".join(map(str, blocks))
