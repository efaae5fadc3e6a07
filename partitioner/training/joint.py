"""The last pass: train all sub-models at once on the answers that their subsets would give."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from mdp.files import write_bytes
from mdp.fusion.fuse import Contribution, FusionWeights, weights_for
from partitioner.data.crops import view_of
from partitioner.data.memmaps import Index, rows
from partitioner.fusion.stacking import fit_fusion
from partitioner.run.settings import JointSchedule, MemberSchedule
from partitioner.training.cached_outputs import BATCH, batch, device_of
from partitioner.training.compute import training_device
from partitioner.training.context import Work
from partitioner.training.distributed import finished, first_then_others, is_first, together
from partitioner.training.loop import fit
from partitioner.training.losses import taught_loss
from partitioner.training.student import Student, StudentOutput
from partitioner.training.teacher import Targets


class Ensemble(nn.Module):
    """All students side by side; runs those that are asked for."""

    def __init__(self, students: Sequence[Student]) -> None:
        super().__init__()
        self.students = nn.ModuleList(students)

    def forward(self, pixels: Mapping[int, Tensor]) -> dict[int, StudentOutput]:
        """Outputs of the members k for their own pixels `[B, 3, S, S]`."""
        return {k: self.students[k](x) for k, x in pixels.items()}


def train_jointly(work: Work, targets: Targets) -> None:
    """Train the finished sub-models together, if that was asked for and is not done yet."""
    assignments, schedule = work.plan.assignments, work.settings.joint_schedule
    if schedule.epochs == 0 or finished(*(work.run.joint(a.k) for a in assignments)):
        return
    members = [work.load_member(a, joint=False) for a in assignments]
    ensemble = Ensemble([Student(member) for member in members]).to(training_device())
    with first_then_others():
        contributions = {a.k: _calibration(work, ensemble, a.k) for a in assignments}
        fusion = fit_fusion(contributions, work.data.calibration.targets)
        loss_of = JointLoss(work, targets, fusion)
    stage = work.stage("joint", "training all sub-models together", schedule, in_parts=True)
    curve = fit(ensemble, stage, loss_of, work.progress)
    with together():
        if is_first():
            work.run.keep_curve("joint", curve)
            for assignment, member in zip(assignments, members, strict=True):
                write_bytes(work.run.joint(assignment.k), save(member.state_dict()))
            stage.checkpoint.unlink(missing_ok=True)


def arrivals(members: int, drop: float, random: np.random.Generator) -> tuple[int, ...]:
    """A random arrival subset of members 0, 1, ...; each is missing by chance `drop`, never all."""
    present = np.flatnonzero(random.random(members) >= drop)
    return tuple(present.tolist()) or (int(random.integers(members)),)


class JointLoss:
    """Loss of the stacked answer of a random arrival subset, and a little of each bag head's own.

    The stacking weights are those fitted to the sub-models as they came; they stay as they are
    while the sub-models move, and are fitted anew when the bundle is made.
    """

    def __init__(self, work: Work, targets: Targets, stacking: FusionWeights) -> None:
        variants = work.variants
        every = range(variants.count)
        self.schedule: JointSchedule = work.settings.joint_schedule
        self.taught: MemberSchedule = work.settings.schedule
        self.teacher, self.stacking = targets.train, stacking
        self.labels = [variants.labels(v) for v in every]
        self.pixels = [[variants.view(view_of(a), v) for v in every] for a in work.plan.assignments]

    def __call__(self, network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        # From torch's random state, which is the same for every share of a batch.
        random = np.random.default_rng(int(torch.randint(2**62, ())))
        members = arrivals(len(self.pixels), self.schedule.drop, random)
        # It goes on with the variants where the sub-models' own epochs ended.
        variant = (self.taught.epochs + epoch) % len(self.labels)
        device = device_of(network)
        outputs = network({k: batch(self.pixels[k][variant], index, device) for k in members})
        weights = weights_for(members, "stacked", self.stacking)
        fused = torch.stack(
            [
                a * outputs[k].boost + b * outputs[k].bag
                for k, a, b in zip(members, weights.a, weights.b, strict=True)
            ]
        ).sum(dim=0)
        labels = self.labels[variant][index].to(device)
        teacher = rows(self.teacher[variant], index).to(device)

        def loss(logits: Tensor) -> Tensor:
            return taught_loss(
                logits,
                labels,
                teacher,
                distillation=self.taught.distillation,
                temperature=self.taught.temperature,
                label_smoothing=self.schedule.label_smoothing,
            )

        stacked = loss(fused)
        bag = torch.stack([loss(outputs[k].bag) for k in members]).mean()
        return {"loss": stacked + self.schedule.bag_weight * bag, "stacked": stacked, "bag": bag}


def _calibration(work: Work, ensemble: Ensemble, k: int) -> Contribution:
    """Member k's logits on the calibration split."""
    pixels = work.member_pixels(work.plan.assignments[k], "calibration")
    student = ensemble.students[k].eval()
    device = device_of(student)
    parts = []
    for start in range(0, len(pixels), BATCH):
        index = np.arange(start, min(start + BATCH, len(pixels)))
        with torch.inference_mode():
            output = student(batch(pixels, index, device))
        parts.append((output.boost.cpu().numpy(), output.bag.cpu().numpy()))
    boost, bag = (np.concatenate(column) for column in zip(*parts, strict=True))
    return Contribution(boost, bag)
