"""The first cut of pictures, which finds the unreadable ones before hours of training."""

from collections.abc import Callable

from partitioner.data.crops import NAMED, UnreadablePictures
from partitioner.data.datasets import SPLITS, SplitName
from partitioner.run.progress import Progress


def cut_views(cut: Callable[[SplitName], object], progress: Progress) -> None:
    """Cut every split; raises UnreadablePictures naming the unreadable ones of all of them."""
    broken: list[str] = []
    for split in SPLITS:
        try:
            cut(split)
        except UnreadablePictures as error:
            broken += error.reasons
    if len(broken) > NAMED:
        for reason in broken:
            progress.note(reason)
    if broken:
        raise UnreadablePictures(broken)
