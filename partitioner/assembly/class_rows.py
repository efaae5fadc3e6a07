"""Rows of pretrained classifiers that belong to the classes of the data, by network."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from mdp.errors import InputError
from partitioner.assembly.members import read_names, rows_of
from partitioner.networks import imagenet
from partitioner.networks.families import own_classifier
from partitioner.run.weights import LABELS


def rows_by_network(
    weights: Mapping[str, Path],
    labels: Sequence[str],
    folder: Path | None,
    others: Path | None = None,
    mapped: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, list[int]]:
    """The row of each of `labels` in the classifiers of pretrained `weights`, by network.

    The names of their classes are labels.txt in `folder`, else those in the file `others` where the
    number of classes agrees, renamed by `mapped`, else ImageNet's for 1,000 classes. Networks with
    other class names are left out. Raises InputError for a labels.txt with another number of names
    than a classifier has rows.
    """
    own = None if folder is None else folder / LABELS
    own = own if own is not None and own.exists() else None
    file = own or others
    names = [] if file is None else read_names(file)
    found = dict[str, list[int]]()
    for network, path in weights.items():
        classifier = own_classifier(network, path)
        if classifier is None:
            continue
        rows = classifier.out_features
        if own is not None and rows != len(names):
            raise InputError(
                f"{file}: names {len(names)} classes, expected {rows}: as many as the classifier "
                f"of {path} has rows"
            )
        with suppress(InputError):  # classes of other names
            if rows == len(names):
                found[network] = rows_of(names, labels, {} if own else mapped, str(file))
            elif rows == imagenet.CLASSES:
                found[network] = imagenet.rows_of(labels)
    return found
