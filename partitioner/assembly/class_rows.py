"""Rows of pretrained classifiers that belong to the classes of the data, by network."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from mdp.errors import InputError
from partitioner.assembly.members import read_names, rows_of
from partitioner.networks import imagenet
from partitioner.networks.families import is_known, own_classifier
from partitioner.run.weights import LABELS


def rows_by_network(
    weights: Mapping[str, Path],
    labels: Sequence[str],
    folder: Path | None,
    others: Path | None = None,
    mapped: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, list[int]]:
    """The row of each of `labels` in the classifiers of pretrained `weights`, by network.

    The names of the classes of networks in `folder` are its labels.txt; else, and of others, those
    in the file `others` where the number of classes agrees, renamed by `mapped`, else ImageNet's
    for 1,000 classes. Networks with other class names, and those that timm does not know, are left
    out. Raises InputError for a labels.txt with another number of names than a classifier of its
    folder has rows.
    """
    named = None if folder is None else folder / LABELS
    own = [] if named is None or not named.exists() else read_names(named)
    of_others = [] if others is None else read_names(others)
    found = dict[str, list[int]]()
    for network, path in weights.items():
        classifier = own_classifier(network, path) if is_known(network) else None
        if classifier is None:
            continue
        rows = classifier.out_features
        by_folder = bool(own) and path.parent == folder
        if by_folder and rows != len(own):
            raise InputError(
                f"{named}: names {len(own)} classes, expected {rows}: as many as the classifier "
                f"of {path} has rows"
            )
        names, file = (own, named) if by_folder else (of_others, others)
        with suppress(InputError):  # classes of other names
            if rows == len(names):
                found[network] = rows_of(names, labels, {} if by_folder else mapped, str(file))
            elif rows == imagenet.CLASSES:
                found[network] = imagenet.rows_of(labels)
    return found
