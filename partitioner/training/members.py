"""Train the K sub-models of a plan; with boosting, each on what its predecessors leave over."""

import math
from collections.abc import Callable, Container, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from mdp.errors import InputError
from mdp.files import write_bytes
from mdp.formats.plan import Assignment, Plan, Spec
from partitioner.data.crops import View, single_view_of, view_of
from partitioner.data.memmaps import Index, Views, load, rows
from partitioner.data.scenes import taught
from partitioner.networks.families import FamilyMember, cut_classifier, own_classifier
from partitioner.networks.linear_probe import fit_classifier
from partitioner.networks.submodel import Member, SubModel
from partitioner.networks.teacher import Teacher
from partitioner.networks.weight_init import TrainedMember, init_from
from partitioner.run.curves import Curve
from partitioner.run.settings import MemberSchedule
from partitioner.training.cached_outputs import BATCH, batch, device_of, keep_outputs
from partitioner.training.compute import training_device
from partitioner.training.context import TrainingContext
from partitioner.training.distributed import all_exist, on_first
from partitioner.training.largest_logits import Answers, LargestLogits
from partitioner.training.live import LiveRun
from partitioner.training.loop import Validate, derive_seed, train_stage
from partitioner.training.student import DistillationTargets, MemberLoss, Student

#: Pictures, at most, that a linear probe is fitted on.
_PROBED = 20_000


def train_members(
    work: TrainingContext,
    teacher: Teacher,
    logits: Sequence[Answers],
    only: Container[int] | None = None,
) -> None:
    """Train every sub-model that the run folder does not have yet, or `only` some of them.

    They are trained in the plan's order. `logits` are the teacher's, centred, `[N, C]` per variant
    of the train split. The folder needs the weights of those that the schedule names as
    `predecessors` of a sub-model, and nothing of the others.
    """
    live: LiveRun | None = None
    same = twins(work.plan, work.settings.schedule)
    for assignment in work.plan.assignments:
        if only is not None and assignment.k not in only:
            continue
        if all_exist(work.run.member(assignment.k)):
            continue
        if (twin := same.get(assignment.k)) is not None:
            on_first(partial(_copy, work, assignment, work.plan.assignments[twin]))
            continue
        if work.settings.teaching == "live":
            live = live or LiveRun.of(work, teacher)
            submodel = initial_member(work, assignment, teacher)
            _keep(work, assignment, submodel, live.train(assignment, submodel))
        else:
            _train_member(work, assignment, teacher, logits)
            on_first(partial(_remove_views, work, assignment))


def _remove_views(work: TrainingContext, assignment: Assignment) -> None:
    """Remove a trained sub-model's views of variants where nothing after it needs them."""
    schedule, view = work.settings.schedule, single_view_of(assignment)
    later = [a for a in work.plan.assignments if not work.run.member(a.k).exists()]
    # With boosting or stacking distillation its outputs for them are computed later.
    if view not in map(single_view_of, later) and not (schedule.boosting or schedule.stacking):
        work.variants.remove_views(view)


def twins(plan: Plan, schedule: MemberSchedule) -> dict[int, int]:
    """Sub-models that take over the weights of an earlier one, and which: with `shared` alone."""
    first: list[tuple[Spec, View, int]] = []
    found: dict[int, int] = {}
    for one in plan.assignments if schedule.shared else ():
        spec, view = one.spec, single_view_of(one)
        twin = next((k for *shape, k in first if shape == [spec, view]), None)
        if twin is None:
            first.append((spec, view, one.k))
        else:
            found[one.k] = twin
    return found


def _copy(work: TrainingContext, assignment: Assignment, twin: Assignment) -> None:
    work.progress.note(f"sub-model {assignment.k} shares the weights of sub-model {twin.k}")
    _keep(work, assignment, work.load_member(twin), [])


def _train_member(
    work: TrainingContext, assignment: Assignment, teacher: Teacher, logits: Sequence[Answers]
) -> None:
    k, schedule = assignment.k, work.schedule_of(assignment.k)

    def prepare() -> tuple[Student, MemberLoss, Validate | None]:
        predecessors = schedule.predecessors(k)
        if predecessors:
            _ensure_outputs(work, predecessors[-1])
        for replaced in predecessors[:-1]:
            remove_outputs(work, replaced)
        targets = _targets(work, assignment, logits)
        submodel = initial_member(work, assignment, teacher)
        student = Student(submodel, targets.imitated[0].shape[1] if targets.imitated else None)
        validate = None
        if schedule.patience:
            pixels = work.member_pixels(assignment, "calibration")
            validate = _BagLoss(pixels, work.data.calibration.targets)
        return student, MemberLoss(targets, schedule), validate

    def keep(student: Student, curve: Curve) -> None:
        _keep(work, assignment, student.submodel, curve)

    what = f"training sub-model {k} for {assignment.device}"
    stage = work.stage(
        f"member-{k}", what, schedule, schedule.patience, work.training_rows(assignment)
    )
    train_stage(stage, prepare, keep, work.progress)


def _keep(work: TrainingContext, assignment: Assignment, submodel: Member, curve: Curve) -> None:
    """Write a finished sub-model to the run folder, and report its accuracy on calibration."""
    if curve:
        work.run.keep_curve(f"member-{assignment.k}", curve)
    targets = work.data.calibration.targets
    student = Student(submodel).to(device_of(submodel)).eval()
    logits = _bag_logits(student, work.member_pixels(assignment, "calibration"))
    right = float((logits.argmax(dim=1).numpy() == targets).mean())
    work.progress.note(
        f"sub-model {assignment.k} for {assignment.device}: {right:.1%} alone "
        f"on {len(targets)} calibration pictures"
    )
    state = {name: value.contiguous() for name, value in submodel.state_dict().items()}
    write_bytes(work.run.member(assignment.k), save(state))


def initial_member(work: TrainingContext, assignment: Assignment, teacher: Teacher) -> Member:
    """Sub-model k before its training; raises InputError if the teacher does not fit it.

    Plain ViTs start from other weights as the schedule says, networks from pretrained ones.
    """
    torch.manual_seed(derive_seed(work.settings.seed, "member", assignment.k, "init"))
    weights = work.weights.get(assignment.k)
    submodel = work.new_member(assignment, weights)
    start = work.settings.schedule.start
    if weights is not None:
        heads = _start_heads(work, assignment, submodel, weights)
        work.progress.note(f"sub-model {assignment.k} starts from {weights}, its heads as {heads}")
        return submodel
    if start == "scratch" or (start == "auto" and _init_from_earlier(work, submodel, assignment.k)):
        return submodel
    if not isinstance(submodel, SubModel):
        work.progress.note(
            f"sub-model {assignment.k}, {assignment.spec.outline}, starts from drawn weights: no "
            "--weights were given"
        )
        return submodel
    try:
        init_from(submodel.trunk, teacher)
    except InputError as error:
        if start == "teacher":
            raise
        work.progress.note(f"sub-model {assignment.k} starts from drawn weights: {error}")
    return submodel


def _start_heads(
    work: TrainingContext, assignment: Assignment, submodel: Member, weights: Path
) -> str:
    """Give the heads of a pretrained network a classifier for the data's classes; returns which."""
    assert isinstance(submodel, FamilyMember)
    name, count = submodel.backbone.name, len(work.data.labels)
    rows = work.settings.class_rows.get(name)
    own = own_classifier(name, weights) if rows else None
    if rows and own is not None and own.in_features == submodel.width:
        submodel.start_heads(cut_classifier(own, rows))
        return f"{count} rows of its classifier"
    part = work.training_rows(assignment)
    pixels = work.variants.view(single_view_of(assignment), 0)[part]
    index = np.arange(0, len(pixels), math.ceil(len(pixels) / _PROBED))
    device = training_device()
    submodel.to(device).eval()
    features = []
    with torch.inference_mode():
        for some in np.array_split(index, math.ceil(len(index) / BATCH)):
            seen = submodel.normalise(batch(pixels, some, device))
            features.append(submodel.of_normalised(seen).feature)
    # Tensors made in inference mode cannot be fitted to.
    known = torch.cat(features).clone()
    targets = torch.from_numpy(work.singles.train.targets[part][index]).to(device)
    probe = nn.Linear(submodel.width, count)
    weight, bias = fit_classifier(known, targets, count)
    probe.load_state_dict({"weight": weight, "bias": bias})
    submodel.start_heads(probe)
    return f"a linear probe of {len(index):,} pictures"


def _init_from_earlier(work: TrainingContext, submodel: Member, k: int) -> bool:
    """Cut plain ViT k from the first earlier one that is large enough; False if none is.

    Trained weights as a start need fewer epochs (docs/results/small-vits.md).
    """
    earlier = work.settings.schedule.predecessors(k) if isinstance(submodel, SubModel) else ()
    for number in earlier:
        source = work.load_member(work.plan.assignments[number])
        if not isinstance(source, SubModel):
            continue
        try:
            init_from(submodel.trunk, TrainedMember(source.trunk))
        except InputError:
            continue
        return True
    return False


def _targets(
    work: TrainingContext, assignment: Assignment, logits: Sequence[Answers]
) -> DistillationTargets:
    """Sub-model k's views, labels, teacher logits and predecessors' outputs, per variant."""
    k, variants, schedule = assignment.k, work.variants, work.settings.schedule
    every, part, view = (
        _variants_of(work, k),
        work.training_rows(assignment),
        single_view_of(assignment),
    )
    before = schedule.predecessors(k)
    last = before[-1] if before else 0
    boosting, stacking = k > 0 and schedule.boosting, k > 0 and schedule.stacking
    return DistillationTargets(
        pixels=[variants.view(view, v)[part] for v in every],
        labels=[variants.labels(v).part(part) for v in every],
        teacher=[_taught(work, logits[v], v, part) for v in every],
        before=[load(_sum(work, last, v)) for v in every if boosting],
        imitated=[load(_feature(work, last, v)) for v in every if stacking],
    )


def _taught(work: TrainingContext, logits: Answers, variant: int, part: slice) -> Answers:
    """The teacher's centred logits `[N, C]` that a sub-model learns, for one variant."""
    if not work.data.cameras:
        return logits
    random = np.random.default_rng([work.settings.seed, variant])
    # Views of a scene are fused over all classes.
    whole = logits[:] if isinstance(logits, LargestLogits) else logits
    return taught(whole, work.places, part, work.settings.schedule.teacher_views, random)


def _variants_of(work: TrainingContext, k: int) -> range:
    """The variants that the training of sub-model k uses."""
    return range(min(work.variants.count, work.schedule_of(k).epochs))


class _BagLoss:
    """Cross-entropy of the bag head on `pixels` `[N, S, S, 3]`, for early stopping."""

    def __init__(self, pixels: Views, targets: Index) -> None:
        self.pixels, self.targets = pixels, torch.from_numpy(targets)

    def __call__(self, network: nn.Module) -> float:
        return float(F.cross_entropy(_bag_logits(network, self.pixels), self.targets))


def _bag_logits(network: nn.Module, pixels: Views) -> Tensor:
    """Bag logits `[N, C]` of a student, without a gradient."""
    parts = np.array_split(np.arange(len(pixels)), math.ceil(len(pixels) / BATCH))
    device = device_of(network)
    with torch.inference_mode():
        return torch.cat([network(batch(pixels, part, device)).bag.cpu() for part in parts])


def output_files(work: TrainingContext, k: int) -> dict[int, list[Path]]:
    """The files of F_k (boosting) and h_k (stacking) by variant, of which there may be none.

    Those of every variant that the sub-models see which follow `k`.
    """
    schedule = work.settings.schedule
    wanted = [_sum] * schedule.boosting + [_feature] * schedule.stacking
    return {v: [path(work, k, v) for path in wanted] for v in _variants_of(work, k + 1)}


def outputs_of(work: TrainingContext, k: int) -> Callable[[int], Callable[[Index], list[Tensor]]]:
    """Variant -> function from training pictures `[B]` to F_k `[B, C]` and h_k `[B, D]`.

    With boosting the folder needs F_{k-1}.
    """
    assignment, boosting = work.plan.assignments[k], work.settings.schedule.boosting
    count = len(output_files(work, k)[0])
    student = Student(work.load_member(assignment)).to(training_device()).eval()

    def of_variant(variant: int) -> Callable[[Index], list[Tensor]]:
        pixels = work.variants.view(view_of(assignment), variant)
        before = load(_sum(work, k - 1, variant)) if k and boosting else None

        def of(index: Index) -> list[Tensor]:
            output = student(batch(pixels, index, device_of(student)))
            found = [] if output.boost is None else [output.boost]
            if before is not None:
                found[0] = found[0] + rows(before, index).to(found[0].device)
            return [*found, output.feature][:count]

        return of

    return of_variant


def _ensure_outputs(work: TrainingContext, k: int) -> None:
    """Write F_k (boosting) and h_k (stacking) of every variant that sub-model k + 1 sees."""
    kept, count = output_files(work, k), len(work.data.train)
    missing = [v for v, paths in kept.items() if not all(path.exists() for path in paths)]
    if not missing:
        return
    if k and work.settings.schedule.boosting:
        _ensure_outputs(work, k - 1)
    of_variant = outputs_of(work, k)
    what, done = f"sub-model {k}'s outputs", (len(kept) - len(missing)) * count
    with work.progress.task(what, len(kept) * count, done=done) as advance:
        for variant in missing:
            keep_outputs(
                kept[variant],
                of_variant(variant),
                count,
                arithmetic=work.settings.autocast,
                dtype=np.float16,
                advance=advance,
            )


def _sum(work: TrainingContext, k: int, variant: int) -> Path:
    """The file of F_k of one variant."""
    return work.run.predecessors / f"sum-{k}-{variant}.npy"


def _feature(work: TrainingContext, k: int, variant: int) -> Path:
    """The file of h_k of one variant."""
    return work.run.predecessors / f"feature-{k}-{variant}.npy"


def remove_outputs(work: TrainingContext, k: int) -> None:
    """Remove sub-model k's outputs, which its successor's replace."""
    for variant in range(work.variants.count):
        _sum(work, k, variant).unlink(missing_ok=True)
        _feature(work, k, variant).unlink(missing_ok=True)
