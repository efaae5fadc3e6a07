"""Patient distillation: the views, the boxes, and a tiny student that comes to agree."""

import copy
import math
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from mdp.errors import InputError
from mdp.formats.plan import Region
from partitioner.data.crops import View
from partitioner.data.live_views import (
    Draw,
    Drawing,
    Draws,
    Perturbation,
    Pictures,
    mix_pairs,
    random_boxes,
    views_of,
)
from partitioner.networks.families import Backbone, FamilyMember, create
from partitioner.run.settings import MemberSchedule
from partitioner.training.live import Recipe, distil, move_to
from partitioner.training.student import BatchTargets, Student
from tests.support.models.runs import QUIET

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def whole_boxes(count: int) -> torch.Tensor:
    """Boxes `[count, 4]` of whole pictures."""
    return torch.tensor([0.0, 0.0, 1.0, 1.0]).expand(count, 4)


def pictures(count: int = 24, side: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)


def test_a_whole_view_of_the_same_size_is_the_picture_itself() -> None:
    some = pictures(2)
    whole, plain = whole_boxes(2), torch.ones(2)
    torch.testing.assert_close(views_of(some, whole, plain, 32), some.float(), atol=0.01, rtol=0)
    mirrored = views_of(some, whole, -plain, 32)
    torch.testing.assert_close(mirrored, some.float().flip(3), atol=0.01, rtol=0)


def test_a_reduced_view_keeps_the_mean() -> None:
    some = pictures(2)
    reduced = views_of(some, whole_boxes(2), torch.ones(2), 8)
    assert reduced.shape == (2, 3, 8, 8)
    assert reduced.mean().item() == pytest.approx(some.float().mean().item(), abs=3)


def test_random_boxes_lie_inside_the_picture() -> None:
    boxes = random_boxes(500, 0.3, torch.Generator().manual_seed(0))
    assert (boxes[:, :2].abs() + boxes[:, 2:] <= 1 + 1e-6).all()
    area = boxes[:, 2] * boxes[:, 3]
    assert 0.2 < area.min().item() < area.max().item() <= 1


@pytest.mark.parametrize("mirrored", [1.0, -1.0])
def test_a_region_is_cut_from_what_the_teacher_sees(mirrored: float) -> None:
    draw = Draw(
        torch.arange(3), torch.tensor([[0.1, -0.2, 0.8, 0.6]]).expand(3, 4),
        torch.full((3,), mirrored), torch.tensor([1.0, 0.25, 0.5]),
    )  # fmt: skip
    some = pictures(3)
    whole = draw.views(some, View(32))
    corner = draw.views(some, View(16, Region(left=0.5, right=1.0, top=0.0, bottom=0.5)))
    torch.testing.assert_close(corner, whole[:, :, :16, 16:], atol=0.01, rtol=0)


def unchanged(count: int, **changed: torch.Tensor) -> Perturbation:
    ones, zeros = torch.ones(count), torch.zeros(count)
    changes: dict[str, torch.Tensor] = {
        "turns": zeros,
        "colours": torch.ones(count, 3),
        "contrast": ones,
        "saturation": ones,
        "covers": torch.zeros(count, 4),
        "cover_colours": torch.zeros(count, 3),
    }
    return Perturbation(**(changes | changed))


def whole_draw(perturbation: Perturbation | None, count: int = 2) -> Draw:
    ones = torch.ones(count)
    return Draw(torch.arange(count), whole_boxes(count), ones, ones, perturbation)


def test_a_quarter_turn_turns_the_picture() -> None:
    some = pictures(2)
    turned = whole_draw(unchanged(2, turns=torch.full((2,), math.pi / 2))).views(some, View(32))
    torch.testing.assert_close(turned, some.float().rot90(1, (2, 3)), atol=0.01, rtol=0)


@pytest.mark.parametrize("mirrored", [1.0, -1.0])
def test_a_region_is_cut_from_a_turned_and_covered_view(mirrored: float) -> None:
    covers = torch.tensor([[0.6, 0.1, 0.9, 0.3]]).expand(3, 4)
    draw = Draw(
        torch.arange(3), torch.tensor([[0.1, -0.2, 0.6, 0.6]]).expand(3, 4),
        torch.full((3,), mirrored), torch.ones(3),
        unchanged(3, turns=torch.tensor([0.2, -0.1, 0.0]), covers=covers),
    )  # fmt: skip
    some = pictures(3)
    whole = draw.views(some, View(32))
    corner = draw.views(some, View(16, Region(left=0.5, right=1.0, top=0.0, bottom=0.5)))
    torch.testing.assert_close(corner, whole[:, :, :16, 16:], atol=0.01, rtol=0)
    assert (whole[:, :, 5:9, 20:28] == 0).all()
    assert (whole[:, :, 12:, :16] != 0).any()


def test_light_changes_brightness_contrast_and_saturation() -> None:
    some = pictures(2).clamp(64, 127)
    darker = whole_draw(unchanged(2, colours=torch.full((2, 3), 0.5))).views(some, View(32))
    torch.testing.assert_close(darker, some.float() / 2, atol=0.01, rtol=0)
    flat = whole_draw(unchanged(2, contrast=torch.zeros(2))).views(some, View(32))
    assert flat.std(dim=(1, 2, 3)).max().item() < 0.01
    grey = whole_draw(unchanged(2, saturation=torch.zeros(2))).views(some, View(32))
    torch.testing.assert_close(
        grey, some.float().mean(dim=1, keepdim=True).expand(-1, 3, -1, -1), atol=0.01, rtol=0
    )


def test_perturbations_are_drawn_within_their_limits() -> None:
    drawing = Drawing(turn=10.0, light=0.3, covered=0.25)
    found = Perturbation.draw(4000, drawing, torch.Generator().manual_seed(0))
    assert found.turns.abs().max().item() == pytest.approx(math.radians(10), rel=0.01)
    assert 0.7 <= found.contrast.min().item() < found.contrast.max().item() <= 1.3
    sides = found.covers[:, 2:] - found.covers[:, :2]
    covered = sides[:, 0] > 0
    assert covered.float().mean().item() == pytest.approx(0.25, abs=0.03)
    assert 0.2 - 1e-6 <= sides[covered].min().item() < sides[covered].max().item() <= 0.6 + 1e-6
    assert found.covers.min().item() >= 0
    assert found.covers.max().item() <= 1


def test_a_drawing_without_perturbations_draws_none() -> None:
    assert Draws(4, 4, Drawing(), 0, CPU)().perturbation is None
    assert Draws(4, 4, Drawing(covered=0.5), 0, CPU)().perturbation is not None


@pytest.mark.parametrize(("alpha", "middle"), [(1.0, 0.5), (0.25, 0.2)])
def test_shares_of_a_mixture_follow_alpha(alpha: float, middle: float) -> None:
    draw = Draws(4000, 4000, Drawing(flip=False, mixed=1.0, alpha=alpha), 1, CPU)()
    assert draw.share.mean().item() == pytest.approx(0.5, abs=0.03)
    between = ((draw.share > 0.25) & (draw.share < 0.75)).float().mean().item()
    assert between == pytest.approx(middle, abs=0.05)
    assert (draw.flips == 1).all()


def test_every_picture_comes_up_once_an_epoch() -> None:
    draws = Draws(10, 4, Drawing(), 3, CPU)
    assert draws.per_epoch == 2
    epoch = torch.cat([draws().rows for _ in range(2)]).tolist()
    assert len(set(epoch)) == 8


def test_pairs_are_mixed_by_their_share() -> None:
    x = torch.tensor([0.0, 1.0]).view(2, 1, 1, 1)
    assert mix_pairs(x, torch.tensor([0.75, 1.0])).flatten().tolist() == [0.25, 1.0]


def test_a_student_comes_to_agree_with_its_teacher() -> None:
    torch.manual_seed(0)
    member = FamilyMember(Backbone("test_efficientnet", 32), 3)
    data = Pictures(pictures(), torch.arange(24) % 3, 3)
    schedule = MemberSchedule(
        epochs=20, batch_size=12, learning_rate=3e-3, distillation=1.0, temperature=1.0
    )
    recipe = Recipe(schedule, Drawing(min_area=1.0, mixed=0.0), "fp32", 0, average=0.5)
    wanted = torch.eye(3)[data.targets] * 4

    def teach(draw: Draw) -> BatchTargets:
        return BatchTargets(draw.labels(data), wanted[draw.rows])

    @torch.no_grad()
    def loss() -> float:
        logits = member(data.pixels.float()).bag
        return torch.nn.functional.mse_loss(logits.softmax(1), wanted.softmax(1)).item()

    member.eval()
    before = loss()
    curve = distil(Student(member), View(32), teach, data, recipe, "a student", QUIET)
    assert len(curve) == 20
    assert curve[-1]["loss"] < curve[0]["loss"]
    assert loss() < before


@pytest.mark.parametrize(
    ("backbone", "expected"),
    [
        (Backbone("nobody_s_network", 32), "has no such model"),
        (Backbone("test_efficientnet", 32, 2), "cannot be cut to 2 blocks"),
    ],
)
def test_a_backbone_that_cannot_be_made_is_named(backbone: Backbone, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        create(backbone, 2)


def test_depthwise_convolutions_alone_are_computed_in_fp32_on_a_processor() -> None:
    torch.manual_seed(0)
    network = create(Backbone("test_efficientnet", 32), 3)
    names = list(network.state_dict())
    move_to(network, CPU)
    convolutions: dict[str, Any] = {
        name: part for name, part in network.named_modules() if isinstance(part, torch.nn.Conv2d)
    }
    kinds: dict[str, torch.dtype] = {}
    for name, part in convolutions.items():
        part.register_forward_hook(
            lambda _, inputs, output, name=name: kinds.update({name: output.dtype})
        )
    x = torch.rand(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        network(x).float().sum().backward()
    depthwise = {name for name, part in convolutions.items() if part.groups > 1}
    assert depthwise
    assert {name for name, kind in kinds.items() if kind == torch.float32} == depthwise
    assert set(kinds) == set(convolutions)
    assert all(part.weight.grad is not None for part in convolutions.values())
    assert list(network.state_dict()) == names

    # A copy convolves with its own weights.
    other = copy.deepcopy(network).eval()
    with torch.no_grad():
        for name, part in other.named_modules():
            if name in depthwise:
                part.weight.zero_()
        assert not torch.equal(other(x), network.eval()(x))
