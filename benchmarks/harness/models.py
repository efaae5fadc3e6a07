"""Shapes of models, and bundles of such models."""

from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

from mdp.files import read_json, write_json
from mdp.formats.bundle import FUSION, MANIFEST, Bundle, file_entry, model_path
from mdp.formats.plan import Plan, SubModelSpec
from mdp.fusion.fuse import FusionWeights
from mdp.testing.bundles import LABELS


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


def refilled(
    folder: Path, models: Sequence[bytes], labels: Sequence[str] = LABELS, plan: Plan | None = None
) -> Bundle:
    """The bundle at `folder`, written by `write_bundle`, with other models, labels and plan."""
    manifest, weights = Bundle.open(folder).manifest, read_json(folder / FUSION, FusionWeights)
    write_json(folder / FUSION, structs.replace(weights, num_classes=len(labels)))
    for k, model in enumerate(models):
        (folder / model_path(k)).write_bytes(model)
    changed = structs.replace(
        manifest,
        files={path: file_entry(folder / path) for path in manifest.files},
        labels=list(labels),
        plan=plan or manifest.plan,
    )
    write_json(folder / MANIFEST, changed)
    return Bundle.open(folder)
