"""The orders in which kept items are put right."""

import numpy as np

from benchmarks.scenes.second_pass import TaughtLine, orders
from benchmarks.scenes.unknown import Floats


class _Line(TaughtLine):
    """A line with known answers: the features are probabilities and scores."""

    def __init__(self) -> None:
        """Nothing is fitted."""

    def answers(self, seen: Floats) -> Floats:
        return np.stack([seen[:, 0], 1 - seen[:, 0]], axis=1)

    def strangeness(self, seen: Floats) -> tuple[Floats, float]:
        return seen[:, 1], 1.0


def test_the_page_shows_unknown_items_first_and_then_the_least_probable() -> None:
    probabilities, scores = [0.9, 0.6, 0.95, 0.7, 0.99], [0.0, 0.5, 2.0, 0.1, 3.0]
    seen = np.stack([probabilities, scores], axis=1)
    found = orders(_Line(), seen, np.random.default_rng(0))
    assert found["page"].tolist() == [4, 2, 1, 3, 0]
    assert found["least probable"].tolist() == [1, 3, 0, 2, 4]
    assert set(found["kept at random"][:2]) == {2, 4}
    for order in found.values():
        assert sorted(order) == [0, 1, 2, 3, 4]
