"""Names of ImageNet-1k's classes, in the order of the rows of public classifiers."""

from collections.abc import Sequence
from functools import cache

from partitioner.data.class_names import ClassNames
from partitioner.torchvision_shim import import_timm

#: Rows of a classifier of ImageNet-1k.
CLASSES = 1000


@cache
def imagenet_classes() -> ClassNames:
    """All words of WordNet for each class, as timm has them."""
    import_timm()
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    return ClassNames(
        [word.strip() for word in words.split(",")] for words in info.label_descriptions()
    )


def rows_of(labels: Sequence[str]) -> list[int]:
    """The row of each class of the data, by any word for it; raises InputError.

    A word for two of ImageNet's classes, as crane, is the name of neither.
    """
    return imagenet_classes().rows_of(
        labels, {}, "ImageNet-1k", "give the names of the classifier's rows in labels.txt"
    )
