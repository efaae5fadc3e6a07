"""Classes of a data set among ImageNet's."""

import pytest

pytest.importorskip("torch")

from mdp.errors import InputError
from partitioner.networks.imagenet import rows_of

pytestmark = pytest.mark.torch


def test_folders_are_found_by_any_word_in_any_case() -> None:
    assert rows_of(["tench", "Great_White_Shark", "english-springer"]) == [0, 2, 217]
    assert rows_of(["toilet tissue", "teddy_bear", "Tinca tinca"]) == [999, 850, 0]


@pytest.mark.parametrize("name", ["crane", "maillot"])
def test_a_word_for_two_classes_is_neither_s_name(name: str) -> None:
    with pytest.raises(InputError, match=f"ImageNet-1k: has several classes named {name}"):
        rows_of(["tench", name])


def test_a_class_that_imagenet_lacks_has_no_row() -> None:
    with pytest.raises(InputError, match=r"no class named our cat .* names of the classifier's"):
        rows_of(["tench", "our cat"])
