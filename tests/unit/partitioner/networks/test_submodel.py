"""A sub-model has the planned shape and two heads on one trunk."""

import pytest

torch = pytest.importorskip("torch")

from mdp.formats.plan import SubModelSpec  # noqa: E402
from partitioner.networks.submodel import MEAN, STD, Normalise, SubModel  # noqa: E402

pytestmark = pytest.mark.torch
SPEC = SubModelSpec(image_size=12, patch_size=4, embed_dim=16, depth=2, num_heads=2, mlp_ratio=2.0)


def test_two_heads_and_the_feature_they_share() -> None:
    model = SubModel(SPEC, 5).eval()
    output = model(torch.zeros(3, 3, 12, 12))
    assert output.boost.shape == output.bag.shape == (3, 5)
    assert output.feature.shape == (3, 16)
    assert torch.equal(output.bag, model.bag(output.feature))
    assert torch.equal(output.boost, model.boost(output.feature))


def test_pixels_become_minus_one_to_one() -> None:
    pixels = torch.tensor([0.0, 127.5, 255.0]).expand(1, 3, 1, 3)
    assert torch.allclose(
        Normalise(MEAN, STD)(pixels)[0, 0, 0], torch.tensor([-1.0, 0.0, 1.0]), atol=1e-6
    )


def test_normalisation_is_no_weight() -> None:
    assert not Normalise(MEAN, STD).state_dict()
