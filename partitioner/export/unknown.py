"""Answers of a bundle's models to pictures of no class."""

from pathlib import Path

from mdp.formats.bundle import model_path
from mdp.formats.model_file import ModelFile
from mdp.formats.plan import Plan
from mdp.fusion.fuse import Contribution
from partitioner.data.crops import load_views, view_of
from partitioner.data.datasets import PictureSet
from partitioner.export.sessions import member_contribution, open_member
from partitioner.run.progress import Progress


def unknown_logits(
    folder: Path,
    plan: Plan,
    num_classes: int,
    pictures: PictureSet | None,
    cache: Path,
    progress: Progress,
) -> dict[int, Contribution] | None:
    """Logits `[U, C]` of every model in a bundle's `folder`; None without pictures."""
    if pictures is None:
        return None
    views = [view_of(part) for part in plan.assignments]
    pixels = load_views(pictures, views, cache, progress, "pictures of no class")
    return {
        part.k: member_contribution(
            open_member(ModelFile.read(folder / model_path(part.k)), part, num_classes), seen, part
        )
        for part, seen in zip(plan.assignments, pixels, strict=True)
    }
