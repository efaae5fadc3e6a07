"""The terms of the latency formula: counted as cost counts them, and none shrinks."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdp.formats.plan import SubModelSpec
from partitioner.estimates import macs as cost
from partitioner.estimates.latency_terms import COLUMN, NAMES, terms


def spec_from(
    side: int, patch_size: int, head_size: int, num_heads: int, depth: int, mlp_ratio: float
) -> SubModelSpec:
    return SubModelSpec(
        image_size=side * patch_size,
        patch_size=patch_size,
        embed_dim=head_size * num_heads,
        depth=depth,
        num_heads=num_heads,
        mlp_ratio=mlp_ratio,
    )


SHAPES = st.builds(
    spec_from,
    side=st.integers(2, 12),
    patch_size=st.sampled_from([4, 8, 14, 16]),
    head_size=st.sampled_from([16, 32, 64]),
    num_heads=st.integers(1, 12),
    depth=st.integers(1, 12),
    mlp_ratio=st.sampled_from([1.5, 2.0, 4.0]),
)


def larger(spec: SubModelSpec) -> list[SubModelSpec]:
    """The shape with each of its dimensions grown."""
    finer = spec.image_size + spec.patch_size
    changes = (
        {"image_size": finer},
        {"embed_dim": spec.embed_dim + spec.num_heads},
        {"embed_dim": 2 * spec.embed_dim, "num_heads": 2 * spec.num_heads},
        {"depth": spec.depth + 1},
        {"num_heads": spec.embed_dim},
        {"mlp_ratio": spec.mlp_ratio + 0.5},
        {"image_size": finer, "depth": spec.depth + 1, "embed_dim": 2 * spec.embed_dim},
    )
    grown = [msgspec.structs.replace(spec, **change) for change in changes]
    return [one for one in grown if one.num_heads <= 64]


@settings(max_examples=100, deadline=None)
@given(SHAPES, st.integers(0, 1000), st.integers(1, 8))
def test_terms_grow_with_dimensions(spec: SubModelSpec, num_classes: int, batch: int) -> None:
    counts = terms([spec], num_classes, batch)
    assert (counts >= 0).all()
    for other in larger(spec):
        assert (terms([other], num_classes, batch) >= counts).all()
    assert (terms([spec], num_classes + 1, batch) >= counts).all()
    assert (terms([spec], num_classes, batch + 1) >= counts).all()


@given(SHAPES, st.integers(1, 8))
def test_terms_count_what_cost_counts(spec: SubModelSpec, batch: int) -> None:
    counted = dict(zip(NAMES, terms([spec], 0, batch)[0], strict=True))
    products = ("embedding_macs", "layer_macs", "attention_macs")
    assert sum(counted[name] for name in products) == batch * cost.macs(spec, 0)
    assert counted["weights"] == spec.depth * cost.layer_weights(spec)


@pytest.mark.parametrize("weights", [2_000_000, 8_000_000])
def test_weights_count_as_far_away_only_beyond_a_cache(weights: int) -> None:
    name = COLUMN[f"weights_beyond_{weights}"]
    # One layer of width 96 has 110,592 weights.
    fitting = spec_from(4, 8, 32, 3, 2, 4.0)
    assert terms([fitting], 0)[0, name] == 0
    large = msgspec.structs.replace(fitting, embed_dim=768, depth=12)
    assert terms([large], 0)[0, name] == 12 * 12 * 768**2 - weights


def test_an_operator_on_many_values_counts_as_small_only_up_to_64_000() -> None:
    name = COLUMN["values_within"]
    # 5 tokens, 96 wide, 384 hidden, 3 heads, one layer; then twice the values in all but pixels.
    few = spec_from(2, 8, 32, 3, 1, 4.0)
    values = 5 * 96 * 32 + 5 * 384 * 13 + 3 * 5 * 5 * 4
    assert terms([few], 0)[0, name] == values + 3 * 16 * 16 * 8
    deep = msgspec.structs.replace(few, depth=2)
    assert terms([deep], 0)[0, name] == 2 * values + 3 * 16 * 16 * 8
    many = spec_from(20, 16, 64, 12, 1, 4.0)
    assert terms([many], 0)[0, name] == 64_000 * (32 + 13 + 4 + 8)
