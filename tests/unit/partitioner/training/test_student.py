"""One batch's loss: what is fitted, what is imitated, and what each switch changes."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from partitioner.networks.submodel import SubModel  # noqa: E402
from partitioner.run.settings import MemberSchedule  # noqa: E402
from partitioner.training.losses import distillation_loss  # noqa: E402
from partitioner.training.student import DistillationTargets, MemberLoss, Student, StudentOutput  # noqa: E402
from tests.support.models.runs import spec  # noqa: E402

pytestmark = pytest.mark.torch
COUNT, CLASSES, WIDTH = 6, 3, 5
INDEX = np.array([4, 0, 3])
HOW: dict[str, Any] = {"distillation": 0.3, "temperature": 3.0, "label_smoothing": 0.1}


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


class Fixed(nn.Module):
    """A network with constant outputs."""

    def __init__(self, *, boosting: bool = True, imitates: bool = False) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        boost, bag = torch.from_numpy(draw(3, 3)), torch.from_numpy(draw(3, 4))[:, :3]
        projected = torch.from_numpy(draw(3, WIDTH)) if imitates else None
        self.output = StudentOutput(boost if boosting else None, bag, torch.zeros(3, 2), projected)

    def forward(self, pixels: Tensor) -> StudentOutput:
        assert pixels.shape == (3, 3, 4, 4)
        self.seen = pixels
        return self.output


def targets(*, before: bool = False, imitated: bool = False) -> DistillationTargets:
    """Two variants of six pictures."""
    two = range(2)
    return DistillationTargets(
        pixels=[np.full((COUNT, 4, 4, 3), 10 * v, dtype=np.uint8) for v in two],
        labels=[torch.eye(CLASSES)[torch.arange(COUNT) % CLASSES] for _ in two],
        teacher=[draw(COUNT, CLASSES) * (1 + v) for v in two],
        before=[draw(COUNT, CLASSES) * 0.5 + 2 * v for v in two] if before else [],
        imitated=[draw(COUNT, WIDTH) + v for v in two] if imitated else [],
    )


def losses(
    network: Fixed, given: DistillationTargets, epoch: int = 1, **changes: Any
) -> dict[str, float]:
    loss_of = MemberLoss(given, MemberSchedule(**changes))
    return {name: float(value) for name, value in loss_of(network, INDEX, epoch).items()}


@pytest.mark.parametrize("before", [False, True])
def test_heads_learn_labels_and_teacher_the_boost_head_after_the_sum(before: bool) -> None:
    network, given = Fixed(), targets(before=before)

    def wanted(logits: Tensor) -> float:
        teacher = torch.from_numpy(given.teacher[1][INDEX])
        return float(distillation_loss(logits, given.labels[1][INDEX], teacher, **HOW))

    found = losses(network, given, boost_weight=2.0, **HOW)
    assert float(network.seen.mean()) == 10
    boost = network.output.boost
    assert boost is not None
    whole = boost + torch.from_numpy(given.before[1][INDEX]) if before else boost
    assert found["boost"] == pytest.approx(wanted(whole), rel=1e-5)
    assert found["bag"] == pytest.approx(wanted(network.output.bag), rel=1e-5)
    assert found["loss"] == pytest.approx(2 * found["boost"] + found["bag"], rel=1e-5)
    assert "stack" not in found
    assert losses(network, given, epoch=2, **HOW)["bag"] != pytest.approx(found["bag"], rel=1e-3)


def test_the_predecessors_feature_is_imitated() -> None:
    network, given = Fixed(boosting=False, imitates=True), targets(imitated=True)
    projected = network.output.projected
    assert projected is not None
    feature = torch.from_numpy(given.imitated[1][INDEX])
    wanted = float(1 - torch.cosine_similarity(projected, feature, dim=1).mean())
    found = losses(network, given, stack_weight=2.0)
    assert found["stack"] == pytest.approx(wanted, rel=1e-5)
    assert found["loss"] == pytest.approx(found["bag"] + 2 * wanted, rel=1e-5)
    assert "boost" not in found


@pytest.mark.parametrize("boosting", [False, True])
def test_a_student_has_the_heads_and_the_projection_that_are_trained(boosting: bool) -> None:
    student = Student(SubModel(spec(8, 16), CLASSES, boosting=boosting), 5).eval()
    output = student(torch.zeros(2, 3, 8, 8))
    assert (output.boost is not None) is boosting
    assert output.projected.shape == (2, 5)
    assert output.feature.shape == (2, 16)
    assert Student(SubModel(spec(8, 16), CLASSES)).projection is None
