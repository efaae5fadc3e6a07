"""Latencies that follow a plain formula, for profiles whose answers a test can know."""

from dataclasses import dataclass

from mdp.formats.plan import SubModelSpec
from mdp.formats.profile import LatencyPoint, Precision
from partitioner.estimates import macs as cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """A fixed time, and times per layer, multiply-accumulate, read or written value, and weight."""

    fixed_ms: float
    layer_ms: float
    mac_ms: float
    value_ms: float = 0.0
    weight_ms: float = 0.0

    def predict_ms(self, spec: SubModelSpec, num_classes: int) -> float:
        """Milliseconds of one picture."""
        length = cost.tokens(spec)
        # As often as each is read or written: `partitioner.estimates.latency_fit` tells them apart
        # so.
        values = spec.depth * length * (32 * spec.embed_dim + 13 * cost.hidden_dim(spec))
        values += 4 * spec.depth * spec.num_heads * length**2 + 8 * 3 * spec.image_size**2
        heads = 2 * spec.embed_dim * num_classes
        return (
            self.fixed_ms
            + self.layer_ms * spec.depth
            + self.mac_ms * (cost.macs(spec, 0) + 8 * heads)
            + self.value_ms * values
            + self.weight_ms * (spec.depth * cost.layer_weights(spec) + heads)
        )

    def point(self, spec: SubModelSpec, threads: int = 1) -> LatencyPoint:
        """Point that measuring `spec` would give."""
        return LatencyPoint(
            image_size=spec.image_size,
            patch_size=spec.patch_size,
            embed_dim=spec.embed_dim,
            depth=spec.depth,
            num_heads=spec.num_heads,
            mlp_ratio=spec.mlp_ratio,
            threads=threads,
            latency_ms=self.predict_ms(spec, 0),
            precision=spec.precision,
        )


def spec_from(
    image_size: int = 32,
    patch_size: int = 8,
    embed_dim: int = 64,
    depth: int = 4,
    num_heads: int = 2,
    mlp_ratio: float = 4.0,
    precision: Precision = "fp32",
) -> SubModelSpec:
    """A small shape, of which a test names what matters to it."""
    return SubModelSpec(
        image_size=image_size,
        patch_size=patch_size,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        mlp_ratio=mlp_ratio,
        precision=precision,
    )
