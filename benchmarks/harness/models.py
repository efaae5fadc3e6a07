"""The shapes of models that benchmarks measure."""

from mdp.formats.plan import SubModelSpec


def vit(
    image_size: int, patch_size: int, embed_dim: int, depth: int, num_heads: int
) -> SubModelSpec:
    """A plain ViT's shape; sizes in pixels."""
    return SubModelSpec(
        image_size=image_size,
        patch_size=patch_size,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        mlp_ratio=4.0,
    )
