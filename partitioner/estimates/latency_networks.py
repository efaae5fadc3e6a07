"""Milliseconds of a public network on a device whose profile has only plain ViTs measured. Pure."""

from mdp.errors import InputError
from mdp.formats.plan import NetworkSpec, SubModelSpec
from partitioner.estimates.catalogue import network_of
from partitioner.estimates.latency import LatencyModel

#: The shape that catalogue latencies are relative to.
_VIT_S = SubModelSpec(
    image_size=224, patch_size=16, embed_dim=384, depth=12, num_heads=6, mlp_ratio=4.0
)


def ratio_ms(model: LatencyModel, spec: NetworkSpec) -> float | None:
    """Estimated compute milliseconds of one picture, or None where nothing is known.

    The catalogue's ratio to ViT-S/16 on another processor times ViT-S/16 on this device, scaled by
    multiply-accumulates to the picture size. Raises InputError for another precision than the
    model's.
    """
    if spec.precision != model.way.precision:
        raise InputError(f"expected a network of {model.way.precision}, got {spec.precision}")
    network = network_of(spec)
    if network is None or spec.image_size not in network.costs:
        return None
    ratio = network.vit_s_ratio if spec.precision == "fp32" else network.vit_s_ratio_int8
    if ratio is None or spec.precision not in ("fp32", "int8-static"):
        return None
    size = network.costs[spec.image_size].macs / network.costs[network.image_size].macs
    reference = SubModelSpec(
        image_size=_VIT_S.image_size,
        patch_size=_VIT_S.patch_size,
        embed_dim=_VIT_S.embed_dim,
        depth=_VIT_S.depth,
        num_heads=_VIT_S.num_heads,
        mlp_ratio=_VIT_S.mlp_ratio,
        precision=spec.precision,
    )
    return ratio * size * model.predict_ms(reference, 0)
