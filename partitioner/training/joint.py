"""The joint pass: train all sub-models at once on the fused answers of random arrival subsets."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from mdp.files import write_bytes
from mdp.fusion.fuse import Contribution, FusionWeights, weights_for
from partitioner.data.crops import view_of
from partitioner.data.memmaps import Array, Index, Views, rows
from partitioner.data.variants import Variants
from partitioner.fusion.stacking import fit_fusion
from partitioner.run.curves import Curve
from partitioner.run.settings import JointSchedule, MemberSchedule
from partitioner.training.cached_outputs import BATCH, batch, device_of
from partitioner.training.compute import training_device
from partitioner.training.context import Work
from partitioner.training.distributed import finished
from partitioner.training.loop import train_stage
from partitioner.training.losses import distillation_loss
from partitioner.training.student import Student, StudentOutput


class Ensemble(nn.Module):
    """All students side by side; a batch runs some of them."""

    def __init__(self, students: Sequence[Student]) -> None:
        super().__init__()
        self.students = nn.ModuleList(students)

    def forward(self, pixels: Mapping[int, Tensor]) -> dict[int, StudentOutput]:
        """Outputs of the members k for their own pixels `[B, 3, S, S]`."""
        return {k: self.students[k](x) for k, x in pixels.items()}


def train_jointly(work: Work, teacher: Sequence[Array]) -> None:
    """Train the finished sub-models together, if that was asked for and is not done yet.

    `teacher` is the teacher's centred logits `[N, C]` per variant of the train split.
    """
    assignments, schedule = work.plan.assignments, work.settings.joint_schedule
    if schedule.epochs == 0 or finished(*(work.run.joint(a.k) for a in assignments)):
        return
    members = [work.load_member(a, joint=False) for a in assignments]

    def prepare() -> tuple[Ensemble, "JointLoss", None]:
        ensemble = Ensemble([Student(member) for member in members]).to(training_device())
        contributions = {
            a.k: _contribution(ensemble.students[a.k], work.member_pixels(a, "calibration"))
            for a in assignments
        }
        variants = work.variants
        loss_of = JointLoss(
            schedule,
            work.settings.schedule,
            [[variants.view(view_of(a), v) for v in range(variants.count)] for a in assignments],
            variants,
            teacher,
            fit_fusion(contributions, work.data.calibration.targets),
        )
        return ensemble, loss_of, None

    def keep(_: nn.Module, curve: Curve) -> None:
        work.run.keep_curve("joint", curve)
        for assignment, member in zip(assignments, members, strict=True):
            write_bytes(work.run.joint(assignment.k), save(member.state_dict()))

    stage = work.stage("joint", "training all sub-models together", schedule, in_parts=True)
    train_stage(stage, prepare, keep, work.progress)


def arrivals(members: int, drop: float, random: np.random.Generator) -> tuple[int, ...]:
    """A random arrival subset of members 0, 1, ...; each is missing by chance `drop`, never all."""
    present = np.flatnonzero(random.random(members) >= drop)
    return tuple(present.tolist()) or (int(random.integers(members)),)


class JointLoss:
    """Loss of the stacked answer of a random arrival subset, and of each bag head.

    The fusion weights are those fitted to the sub-models before the pass; they are constant during
    it, and fitted anew at export.
    """

    def __init__(
        self,
        schedule: JointSchedule,
        members: MemberSchedule,
        pixels: Sequence[Sequence[Views]],
        variants: Variants,
        teacher: Sequence[Array],
        fusion: FusionWeights,
    ) -> None:
        """`pixels[k]` and `teacher` have an array per variant; `members` is their own schedule."""
        self.schedule, self.members = schedule, members
        self.pixels, self.teacher, self.fusion = pixels, teacher, fusion
        self.labels = [variants.labels(v) for v in range(variants.count)]

    def __call__(self, network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        # Seeded by torch's random state, which is the same for every share of a batch.
        random = np.random.default_rng(int(torch.randint(2**62, ())))
        arrived = arrivals(len(self.pixels), self.schedule.drop, random)
        # The variants continue where the sub-models' own epochs ended.
        variant = (self.members.epochs + epoch) % len(self.labels)
        device = device_of(network)
        outputs = network({k: batch(self.pixels[k][variant], index, device) for k in arrived})
        labels = self.labels[variant][index].to(device)
        teacher = rows(self.teacher[variant], index).to(device)

        def loss(logits: Tensor) -> Tensor:
            return distillation_loss(
                logits,
                labels,
                teacher,
                distillation=self.members.distillation,
                temperature=self.members.temperature,
                label_smoothing=self.schedule.label_smoothing,
            )

        weights = weights_for(arrived, "stacked", self.fusion)
        heads = [outputs[k].boost for k in arrived if weights.a]
        heads += [outputs[k].bag for k in arrived]
        scaled = [a * head for a, head in zip(weights.a + weights.b, heads, strict=True)]
        stacked = loss(torch.stack(scaled).sum(dim=0))
        bag = torch.stack([loss(outputs[k].bag) for k in arrived]).mean()
        return {"loss": stacked + self.schedule.bag_weight * bag, "stacked": stacked, "bag": bag}


def _contribution(student: nn.Module, pixels: Views) -> Contribution:
    """A student's logits on the pictures `[N, S, S, 3]`."""
    device = device_of(student.eval())
    parts = []
    for start in range(0, len(pixels), BATCH):
        index = np.arange(start, min(start + BATCH, len(pixels)))
        with torch.inference_mode():
            output: StudentOutput = student(batch(pixels, index, device))
        logits = (output.bag,) if output.boost is None else (output.boost, output.bag)
        parts.append([head.cpu().numpy() for head in logits])
    return Contribution.of([np.concatenate(head) for head in zip(*parts, strict=True)])
