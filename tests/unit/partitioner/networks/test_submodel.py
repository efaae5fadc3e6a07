"""A sub-model has the planned shape, and its heads read one feature."""

import pytest

torch = pytest.importorskip("torch")

from mdp.formats.plan import SubModelSpec  # noqa: E402
from partitioner.networks.submodel import MEAN, STD, Normalise, SubModel  # noqa: E402

pytestmark = pytest.mark.torch
SPEC = SubModelSpec(image_size=12, patch_size=4, embed_dim=16, depth=2, num_heads=2, mlp_ratio=2.0)


@pytest.mark.parametrize("boosting", [False, True])
def test_the_heads_read_the_same_feature(boosting: bool) -> None:
    model = SubModel(SPEC, 5, boosting=boosting).eval()
    output = model(torch.zeros(3, 3, 12, 12))
    assert output.feature.shape == (3, 16)
    heads = [model.get_submodule(name) for name in model.heads]
    assert [tuple(logits.shape) for logits in output.logits] == [(3, 5)] * (1 + boosting)
    for logits, head in zip(output.logits, heads, strict=True):
        assert torch.equal(logits, head(output.feature))


def test_normalisation_is_no_weight() -> None:
    assert not Normalise(MEAN, STD).state_dict()
