"""A teacher in stages, each on a trainer: cut by the coordinator, trained, and joined again."""

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save_file
from torch.distributed import ProcessGroup

from mdp.errors import MDPError
from mdp.files import replacing
from partitioner.crew.averaging.generations import train_in_generations
from partitioner.crew.averaging.groups import TrainerGroups
from partitioner.crew.averaging.mean import Means, Meeting
from partitioner.crew.bus.files import Files
from partitioner.crew.jobs.pipeline import (
    Cut,
    Pipeline,
    StageGroups,
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
        if set(stage.trainers) != {coordinator}:
            files.send(path.name, path)


def train_in_stages(
    work: TrainingContext,
    sync: NetworkSync,
    control: TrainerControl,
    groups: TrainerGroups,
    name_of: Callable[[int], str],
    means: Means,
    files: Files,
) -> bool:
    """Train the own stage; whether this trainer has the whole teacher to hand in.

    `name_of` knows trainers by their rank. means: the way in which several trainers of a stage
    average its gradients. The first stage's first trainer puts all together. Raises StageLost where
    not all trainers are there.
    """
    names = sync.crew
    blocks = tuple(stage.blocks for stage in sync.stage)
    own_place = names.index(name_of(control.rank))
    pipeline, index = divmod(own_place, len(blocks))
    ends = [_file(work, "end", blocks, other) for other in range(len(blocks))]
    start = _file(work, "start", blocks, index)
    # What may take long comes before trainers meet: a group waits for seconds.
    if not (start.exists() or work.run.teacher.exists()):
        files.fetch(start.name, start)
    pictures = _pictures(work, is_first=index == 0, is_last=index == len(blocks) - 1)
    #: The place among `names` of the first who has the whole teacher already, if any.
    having: list[int] = []

    def train(crew: Crew, members: tuple[int, ...]) -> None:
        places = {name_of(rank): place for place, rank in enumerate(members)}
        for name in names:
            if name not in places:
                raise StageLost(LOST.format(name=name))
        own = own_place if work.run.teacher.exists() else len(names)
        having[:] = [min(int(one) for one in gather(crew, torch.tensor([own])))]
        if having[0] < len(names):
            return
        ordered = [places[name] for name in names]
        with groups_of_stages(crew, members, ordered, len(blocks), groups, means) as found:
            cut = Cut(
                blocks=blocks,
                index=index,
                micro_batches=sync.micro_batches or 1,
                in_flight=sync.in_flight[index],
                pipelines=len(sync.pipelines),
                pipeline=pipeline,
            )
            curve = _train(work, found, cut, pictures, start, ends[index])
        if own_place == 0:
            work.run.keep_curve("teacher", curve)
        elif pipeline == 0:
            files.send(ends[index].name, ends[index])

    never = work.run.cache / "teacher-stage-none.pt"  # a stage's weights are of use to it alone
    train_in_generations("teacher", control, groups, never, train)
    if having[0] < len(names):
        return having[0] == own_place
    if own_place == 0:
        for name, path in zip(names[1 : len(blocks)], ends[1:], strict=True):
            if not files.has(path.name):  # all that live have sent theirs
                raise StageLost(LOST.format(name=name))
            files.fetch(path.name, path)
        whole = {name: v for path in ends for name, v in load_weights(path).items()}
        with replacing(work.run.teacher) as temporary:
            save_file(whole, temporary)
        forget_stages(work)
    return own_place == 0


@contextmanager
def groups_of_stages(
    crew: Crew,
    members: Sequence[int],
    places: Sequence[int],
    stages: int,
    groups: TrainerGroups,
    means: Means,
) -> Iterator[StageGroups]:
    """Groups of the own pipeline and of the own stage, while a generation trains.

    members: the ranks of the crew's members, by their place in it. places: of all trainers,
    pipeline after pipeline, each of so many `stages`.
    """
    if len(places) == stages:
        yield StageGroups(crew=crew, pipeline=crew, ranks=tuple(places), means=means)
        return
    pipeline, index = divmod(places.index(crew.rank), stages)
    ordered = [members[place] for place in places]
    in_pipeline = tuple(ordered[pipeline * stages : (pipeline + 1) * stages])
    in_stage = tuple(ordered[index::stages])
    # No two generations meet by one name.
    token = torch.tensor([secrets.randbits(62)])
    crew.require_group().broadcast(token, 0).wait()
    mark = f"teacher-{int(token)}"
    wanted = {f"{mark}-pipeline-{pipeline}": in_pipeline, f"{mark}-stage-{index}": in_stage}
    try:
        # Of the collectives torch's types know only that a ProcessGroup has them.
        own, of_stage = (cast(ProcessGroup, groups.of(n, 0, who)) for n, who in wanted.items())
        yield StageGroups(
            crew=crew,
            pipeline=Crew(index, stages, own, own_files=True),
            ranks=tuple(range(stages)),
            means=means,
            meeting=Meeting(
                group=of_stage,
                members=in_stage,
                weights=(1.0,) * len(in_stage),
                rank=members[crew.rank],
            ),
        )
    finally:
        for name, who in wanted.items():
            groups.drop(name, who)


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
    work: TrainingContext,
    groups: StageGroups,
    cut: Cut,
    pictures: StagePictures,
    start: Path,
    end: Path,
) -> Curve:
    """Train one stage and write its weights to `end`."""
    spec = work.plan.require_teacher()
    module, between = part_of(spec, pictures.classes, cut, load_weights(start))
    checkpoint = work.run.checkpoint(f"teacher-{_words(cut.blocks)}-{cut.index}")
    take_common(groups.crew, checkpoint)
    pipeline = Pipeline(groups, cut, pictures, between, checkpoint)
    stage = replace(
        work.stage("teacher", "training the teacher", work.settings.teacher_schedule),
        checkpoint=checkpoint,
        sync=pipeline,
    )
    with default_group(groups.pipeline):
        curve = fit(module, stage, pipeline.loss_of, work.progress)
    with replacing(end) as temporary:
        save_file({name: v.contiguous() for name, v in module.state_dict().items()}, temporary)
    return curve


def _file(work: TrainingContext, what: str, blocks: tuple[int, ...], index: int) -> Path:
    return work.run.cache / f"teacher-stage-{_words(blocks)}-{index}-{what}.safetensors"


def _words(blocks: tuple[int, ...]) -> str:
    return "-".join(map(str, blocks))
