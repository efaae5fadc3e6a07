"""The losses are what their docstrings state."""

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from partitioner.training.losses import centre, distillation_loss, stack_loss  # noqa: E402

pytestmark = pytest.mark.torch


def random(*shape: int) -> Tensor:
    drawn: Tensor = torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))
    return drawn


def test_stack_loss_is_blind_to_scale_and_zero_for_the_same_direction() -> None:
    feature = random(8, 5)
    assert stack_loss(3 * feature, feature) == pytest.approx(0, abs=1e-6)
    assert stack_loss(-feature, feature) == pytest.approx(2, abs=1e-6)


def test_distillation_loss_is_a_mixture_of_labels_and_teacher() -> None:
    bag, teacher, target = random(6, 4), random(6, 4) * 2, torch.arange(6) % 4
    labels_ = torch.nn.functional.one_hot(target, 4).float()

    def loss(distillation: float, temperature: float = 1.0) -> float:
        value = distillation_loss(
            bag, labels_, teacher,
            distillation=distillation, temperature=temperature, label_smoothing=0.0,
        )  # fmt: skip
        return float(value)

    labels = torch.nn.functional.cross_entropy(bag, target)
    p, q = teacher.softmax(1), bag.softmax(1)
    divergence = (p * (p.log() - q.log())).sum(1).mean()
    assert loss(0.0) == pytest.approx(float(labels), rel=1e-5)
    assert loss(1.0) == pytest.approx(float(divergence), rel=1e-5)
    assert loss(0.25) == pytest.approx(0.75 * float(labels) + 0.25 * float(divergence), rel=1e-5)
    assert loss(1.0, temperature=1e3) > 0.5 * float((centre(teacher) - centre(bag)).var()) / 4


def test_distillation_loss_vanishes_for_a_copy_of_the_teacher() -> None:
    teacher = random(6, 4)
    value = distillation_loss(
        teacher + 3, torch.full((6, 4), 0.25), teacher,
        distillation=1.0, temperature=2.0, label_smoothing=0.0,
    )  # fmt: skip
    assert float(value) == pytest.approx(0, abs=1e-6)


def test_centred_rows_sum_to_zero() -> None:
    assert torch.allclose(centre(random(3, 7)).sum(1), torch.zeros(3), atol=1e-6)
