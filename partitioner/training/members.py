"""Decompose: teach K sub-models one after another, each on what those before it leave over."""

import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from mdp.errors import InputError
from mdp.files import write_bytes
from mdp.formats.plan import Assignment
from partitioner.data.crops import view_of
from partitioner.data.memmaps import Array, Index, Views, load, rows
from partitioner.networks.families import FamilyMember, cut_classifier, own_classifier
from partitioner.networks.linear_probe import fit_classifier
from partitioner.networks.members import Member
from partitioner.networks.teacher import Teacher
from partitioner.networks.weight_init import TrainedMember, init_from
from partitioner.run.curves import Curve
from partitioner.training.cached_outputs import BATCH, batch, device_of, keep_outputs
from partitioner.training.compute import training_device
from partitioner.training.context import Work
from partitioner.training.distributed import finished, first_then_others, is_first, together
from partitioner.training.live import LiveRun
from partitioner.training.loop import derived_seed, fit
from partitioner.training.student import Lesson, MemberLoss, Student
from partitioner.training.teacher import Targets

#: Pictures, at most, that a linear probe is fitted on.
_PROBED = 20_000


def train_members(work: Work, teacher: Teacher, targets: Targets) -> None:
    """Train every sub-model that the run folder does not have yet, in boosting order."""
    live: LiveRun | None = None
    for assignment in work.plan.assignments:
        k = assignment.k
        if finished(work.run.member(k)):
            continue
        if work.settings.teaching == "live":
            live = live or LiveRun.of(work, teacher)
            submodel = untrained(work, assignment, teacher)
            _keep(work, assignment, submodel, live.train(assignment, submodel))
            continue
        if k:
            with first_then_others():
                _ensure_left_behind(work, k - 1)
            if is_first():
                _forget(work, k - 2)
        _train_member(work, assignment, teacher, targets)


def _train_member(work: Work, assignment: Assignment, teacher: Teacher, targets: Targets) -> None:
    k, schedule = assignment.k, work.schedule_of(assignment.k)
    with first_then_others():
        lesson = _lesson(work, assignment, targets)
        submodel = untrained(work, assignment, teacher)
        validate = _BagLoss(work, assignment) if schedule.patience else None
    student = Student(submodel, [feature.shape[1] for feature in lesson.imitated[0]])
    what = f"training sub-model {k} for {assignment.device}"
    stage = work.stage(f"member-{k}", what, schedule, schedule.patience)
    loss_of = MemberLoss(lesson, schedule)
    curve = fit(student, stage, loss_of, work.progress, validate=validate)
    with together():
        if is_first():
            _keep(work, assignment, submodel, curve)
            stage.checkpoint.unlink(missing_ok=True)


def _keep(work: Work, assignment: Assignment, submodel: Member, curve: Curve) -> None:
    """Put a finished sub-model into the run folder."""
    work.run.keep_curve(f"member-{assignment.k}", curve)
    _report(work, assignment, submodel)
    state = {name: value.contiguous() for name, value in submodel.state_dict().items()}
    write_bytes(work.run.member(assignment.k), save(state))


def untrained(work: Work, assignment: Assignment, teacher: Teacher) -> Member:
    """Sub-model k as its training finds it; raises InputError if the teacher does not fit it.

    Plain ViTs start from other weights as the schedule says, networks from pretrained ones.
    """
    torch.manual_seed(derived_seed(work.settings.seed, "member", assignment.k, "init"))
    weights = work.weights.get(assignment.k)
    submodel = work.new_member(assignment, weights)
    start = work.settings.schedule.start
    if weights is not None:
        heads = _start_heads(work, assignment, submodel, weights)
        work.progress.note(f"sub-model {assignment.k} starts from {weights}, its heads as {heads}")
        return submodel
    if start == "scratch" or (
        start == "auto" and _inherit_from_earlier(work, submodel, assignment.k)
    ):
        return submodel
    if not submodel.trunks():
        work.progress.note(
            f"sub-model {assignment.k}, {assignment.spec.outline}, starts from drawn weights: no "
            "--weights were given"
        )
    try:
        for trunk in submodel.trunks():
            init_from(trunk, teacher)
    except InputError as error:
        if start == "teacher":
            raise
        work.progress.note(f"sub-model {assignment.k} starts from drawn weights: {error}")
    return submodel


def _start_heads(work: Work, assignment: Assignment, submodel: Member, weights: Path) -> str:
    """Give both heads of a pretrained network a classifier for the data's classes; says which."""
    assert isinstance(submodel, FamilyMember)
    name, count = submodel.backbone.name, len(work.data.labels)
    rows = work.settings.class_rows.get(name)
    own = own_classifier(name, weights) if rows else None
    if rows and own is not None and own.in_features == submodel.width:
        submodel.start_heads(cut_classifier(own, rows))
        return f"{count} rows of its classifier"
    pixels = work.member_pixels(assignment, "train")
    index = np.arange(0, len(pixels), math.ceil(len(pixels) / _PROBED))
    device = training_device()
    submodel.to(device).eval()
    features = []
    with torch.inference_mode():
        for part in np.array_split(index, math.ceil(len(index) / BATCH)):
            seen = submodel.normalise(batch(pixels, part, device))
            features.append(submodel.of_normalised(seen).feature)
    # Outside of inference mode, or nothing could be fitted to them.
    known = torch.cat(features).clone()
    targets = torch.from_numpy(work.data.train.targets[index]).to(device)
    probe = nn.Linear(submodel.width, count)
    weight, bias = fit_classifier(known, targets, count)
    probe.load_state_dict({"weight": weight, "bias": bias})
    submodel.start_heads(probe)
    return f"a linear probe of {len(index):,} pictures"


def _inherit_from_earlier(work: Work, submodel: Member, k: int) -> bool:
    """Cut sub-model k from the first earlier one that is large enough; False if none is.

    What that one has learned is kept, so that fewer epochs do (docs/results/small-vits.md).
    """
    trunks = submodel.trunks()
    for earlier in work.plan.assignments[:k] if trunks else ():
        heritages = work.load_member(earlier, joint=False).trunks()
        if not heritages:
            continue
        try:
            for trunk, heritage in zip(trunks, heritages, strict=True):
                init_from(trunk, TrainedMember(heritage))
        except InputError:
            continue
        return True
    return False


def _lesson(work: Work, assignment: Assignment, targets: Targets) -> Lesson:
    """What sub-model k is trained on: its views, the labels, and what others know of them."""
    k, variants, schedule = assignment.k, work.variants, work.settings.schedule
    every = _seen(work, k)
    features: list[list[Array]] = [[] for _ in every]
    if schedule.stack_weight and schedule.imitate == "teacher":
        features = [[targets.features[v]] for v in every]
    elif schedule.stack_weight and k:
        first = 0 if schedule.imitate == "predecessors" else k - 1
        features = [[load(_feature(work, j, v)) for j in range(first, k)] for v in every]
    return Lesson(
        pixels=[variants.view(view_of(assignment), v) for v in every],
        labels=[variants.labels(v) for v in every],
        teacher=[targets.train[v] for v in every],
        before=[load(_sum(work, k - 1, v)) for v in every] if k else [],
        imitated=features,
    )


def _seen(work: Work, k: int) -> range:
    """The variants that come up while sub-model k is trained."""
    return range(min(work.variants.count, work.schedule_of(k).epochs))


class _BagLoss:
    """Cross-entropy of the bag head on the calibration split: what early stopping goes by."""

    def __init__(self, work: Work, assignment: Assignment) -> None:
        self.pixels = work.member_pixels(assignment, "calibration")
        self.targets = torch.from_numpy(work.data.calibration.targets)

    def __call__(self, network: nn.Module) -> float:
        logits = _bag_logits(network, self.pixels)
        return float(F.cross_entropy(logits, self.targets))


def _bag_logits(network: nn.Module, pixels: Views) -> Tensor:
    """Bag logits `[N, C]` of a student, without a gradient."""
    parts = np.array_split(np.arange(len(pixels)), math.ceil(len(pixels) / BATCH))
    device = device_of(network)
    with torch.inference_mode():
        return torch.cat([network(batch(pixels, part, device)).bag.cpu() for part in parts])


def _report(work: Work, assignment: Assignment, submodel: Member) -> None:
    """Say how good the finished sub-model is on its own, on the calibration split."""
    targets = work.data.calibration.targets
    student = Student(submodel).to(device_of(submodel)).eval()
    logits = _bag_logits(student, work.member_pixels(assignment, "calibration"))
    right = float((logits.argmax(dim=1).numpy() == targets).mean())
    work.progress.note(
        f"sub-model {assignment.k} for {assignment.device}: {right:.1%} alone "
        f"on {len(targets)} calibration pictures"
    )


def _ensure_left_behind(work: Work, k: int) -> None:
    """Keep F_k and h_k of every variant that the next one sees, so that nobody runs k again."""
    assignment, count, variants = work.plan.assignments[k], len(work.data.train), work.variants
    imitated = work.settings.schedule.stack_weight > 0
    seen = _seen(work, k + 1)
    kept = [[_sum(work, k, v), _feature(work, k, v)][: 1 + imitated] for v in seen]
    missing = [v for v, paths in enumerate(kept) if not all(path.exists() for path in paths)]
    if not missing:
        return
    if k:
        _ensure_left_behind(work, k - 1)
    student = Student(work.load_member(assignment, joint=False)).to(training_device()).eval()
    what, done = f"sub-model {k}'s outputs", (len(kept) - len(missing)) * count
    with work.progress.task(what, len(kept) * count, done=done) as advance:
        for variant in missing:
            pixels = variants.view(view_of(assignment), variant)
            before = load(_sum(work, k - 1, variant)) if k else None

            def outputs_of(
                index: Index, pixels: Views = pixels, before: Array | None = before
            ) -> list[Tensor]:
                output = student(batch(pixels, index, device_of(student)))
                known = 0 if before is None else rows(before, index).to(output.boost.device)
                return [known + output.boost, output.feature][: 1 + imitated]

            keep_outputs(
                kept[variant],
                outputs_of,
                count,
                arithmetic=work.settings.autocast,
                dtype=np.float16,
                advance=advance,
            )


def _sum(work: Work, k: int, variant: int) -> Path:
    """Where F_k of one variant lies."""
    return work.run.left_behind / f"sum-{k}-{variant}.npy"


def _feature(work: Work, k: int, variant: int) -> Path:
    """Where h_k of one variant lies."""
    return work.run.left_behind / f"feature-{k}-{variant}.npy"


def _forget(work: Work, k: int) -> None:
    """Remove what sub-model k left behind, now that its successor's is there."""
    for variant in range(work.variants.count):
        _sum(work, k, variant).unlink(missing_ok=True)
        if work.settings.schedule.imitate != "predecessors":
            _feature(work, k, variant).unlink(missing_ok=True)
