"""One batch's loss: what is fitted, what is imitated, and what each switch changes."""

from typing import Any, Literal

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from mdp.errors import InputError  # noqa: E402
from partitioner.networks.submodel import SubModel  # noqa: E402
from partitioner.run.settings import MemberSchedule  # noqa: E402
from partitioner.training.losses import taught_loss  # noqa: E402
from partitioner.training.student import Lesson, MemberLoss, Student, StudentOutput  # noqa: E402
from tests.support.models.runs import spec  # noqa: E402

pytestmark = pytest.mark.torch
COUNT, CLASSES, WIDTH = 6, 3, 5
INDEX = np.array([4, 0, 3])


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


class Fixed(nn.Module):
    """A network that always says the same."""

    def __init__(self, features: int = 0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        boost, bag = torch.from_numpy(drawn(3, 3)), torch.from_numpy(drawn(3, 4))[:, :3]
        projected = [torch.from_numpy(drawn(3, WIDTH))] * features
        self.output = StudentOutput(boost, bag, torch.zeros(3, 2), projected)

    def forward(self, pixels: Tensor) -> StudentOutput:
        assert pixels.shape == (3, 3, 4, 4)
        self.seen = pixels
        return self.output


def lesson(*, before: bool = False, features: int = 0) -> Lesson:
    """Two variants of six pictures."""
    two = range(2)
    return Lesson(
        pixels=[np.full((COUNT, 4, 4, 3), 10 * v, dtype=np.uint8) for v in two],
        labels=[torch.eye(CLASSES)[torch.arange(COUNT) % CLASSES] for _ in two],
        teacher=[drawn(COUNT, CLASSES) + v for v in two],
        before=[drawn(COUNT, CLASSES) * 0.5 + 2 * v for v in two] if before else [],
        imitated=[[drawn(COUNT, WIDTH) + f for f in range(features)] for _ in two],
    )


def losses(
    network: Fixed,
    lesson_: Lesson,
    epoch: int = 1,
    target: Literal["logits", "probabilities"] = "logits",
    **changes: Any,
) -> dict[str, float]:
    loss_of = MemberLoss(lesson_, MemberSchedule(boost_target=target, **changes))
    return {name: float(value) for name, value in loss_of(network, INDEX, epoch).items()}


def test_the_boost_head_is_held_against_the_residual_of_this_variant() -> None:
    network, given = Fixed(), lesson(before=True)
    boost = network.output.boost.numpy()
    residual = given.teacher[1][INDEX] - given.before[1][INDEX]
    wanted = np.square(boost - residual).mean() / np.square(given.teacher[0]).mean()
    assert losses(network, given)["boost"] == pytest.approx(wanted, rel=1e-5)
    assert float(network.seen.mean()) == 10
    assert losses(network, given, epoch=2)["boost"] != pytest.approx(wanted, rel=1e-3)


def test_without_predecessors_the_residual_is_the_teacher() -> None:
    network, given = Fixed(), lesson()
    difference = network.output.boost.numpy() - given.teacher[1][INDEX]
    wanted = np.square(difference).mean() / np.square(given.teacher[0]).mean()
    assert losses(network, given)["boost"] == pytest.approx(wanted, rel=1e-5)


def test_shrinkage_asks_for_a_share_of_the_residual() -> None:
    network, given = Fixed(), lesson(before=True)
    residual = given.teacher[1][INDEX] - given.before[1][INDEX]
    difference = network.output.boost.numpy() - 0.25 * residual
    wanted = np.square(difference).mean() / np.square(given.teacher[0]).mean()
    assert losses(network, given, shrinkage=0.25)["boost"] == pytest.approx(wanted, rel=1e-5)


def test_probabilities_are_held_against_labels_and_teacher_after_the_sum() -> None:
    network, given = Fixed(), lesson(before=True)
    wanted = taught_loss(
        network.output.boost + torch.from_numpy(given.before[1][INDEX]),
        given.labels[1][INDEX], torch.from_numpy(given.teacher[1][INDEX]),
        distillation=0.3, temperature=3.0, label_smoothing=0.1,
    )  # fmt: skip
    found = losses(
        network, given, target="probabilities",
        distillation=0.3, temperature=3.0, label_smoothing=0.1,
    )  # fmt: skip
    assert found["boost"] == pytest.approx(float(wanted), rel=1e-5)


def test_every_imitated_feature_counts_the_same() -> None:
    given = lesson(features=2)
    network = Fixed(features=2)
    projected = network.output.projected[0]
    distances = [
        1 - torch.cosine_similarity(projected, torch.from_numpy(f[INDEX]), dim=1).mean()
        for f in given.imitated[1]
    ]
    wanted = float(torch.stack(distances).mean())
    found = losses(network, given, stack_weight=2.0, boost_weight=0.0, bag_weight=0.0)
    assert found["stack"] == pytest.approx(wanted, rel=1e-5)
    assert found["loss"] == pytest.approx(2 * wanted, rel=1e-5)


def test_the_parts_are_weighed_as_asked() -> None:
    found = losses(Fixed(), lesson(), boost_weight=2.0, bag_weight=3.0)
    assert found["loss"] == pytest.approx(2 * found["boost"] + 3 * found["bag"], rel=1e-5)
    assert "stack" not in found


def test_the_bag_head_learns_mixed_labels_and_the_teacher() -> None:
    network, given = Fixed(), lesson()
    wanted = taught_loss(
        network.output.bag, given.labels[1][INDEX], torch.from_numpy(given.teacher[1][INDEX]),
        distillation=0.3, temperature=2.0, label_smoothing=0.1,
    )  # fmt: skip
    found = losses(network, given, distillation=0.3, label_smoothing=0.1)["bag"]
    assert found == pytest.approx(float(wanted), rel=1e-5)


def test_a_student_has_one_projection_for_each_imitated_feature() -> None:
    student = Student(SubModel(spec(8, 16), CLASSES), [5, 7]).eval()
    output = student(torch.zeros(2, 3, 8, 8))
    assert [p.shape for p in output.projected] == [(2, 5), (2, 7)]
    assert output.feature.shape == (2, 16)


def test_two_trunks_share_nothing_and_cost_the_same() -> None:
    one, two = SubModel(spec(8, 16, depth=4), CLASSES), SubModel(spec(8, 16, depth=4), CLASSES, 2)
    assert len(one.trunks()) == 1
    blocks: list[Any] = [trunk.blocks for trunk in two.trunks()]
    assert [len(each) for each in blocks] == [2, 2]
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    before = two(x)
    with torch.no_grad():
        trunk: Any = two.bag_trunk
        trunk.norm.bias += 1
    after = two(x)
    assert torch.equal(before.boost, after.boost)
    assert not torch.equal(before.bag, after.bag)
    with pytest.raises(InputError, match=r"schedule\.trunks: expected 1, or sub-models of even"):
        SubModel(spec(8, 16, depth=3), CLASSES, 2)
