"""Bytes that plans count."""

import pytest

from partitioner.crew.coordinator.sizes import factors_ratio


@pytest.mark.parametrize(
    ("outputs", "inputs", "pictures", "trainers", "expected"),
    [
        (10, 96, 16, 4, 3.53),
        (1_000, 96, 16, 4, 0.365),
        (1_000, 640, 16, 4, 0.082),
        (21_841, 640, 16, 4, 0.051),
        (21_841, 640, 64, 8, 0.412),
    ],
)
def test_factors_are_fewer_bytes_of_wide_layers_and_few_pictures(
    outputs: int, inputs: int, pictures: int, trainers: int, expected: float
) -> None:
    # The inequality as published: (n - 1) K (M + N) against 2 (n - 1) / n M N.
    sent = (trainers - 1) * pictures * (outputs + inputs)
    dense = 2 * (trainers - 1) / trainers * outputs * inputs
    found = factors_ratio(outputs, inputs, trainers * pictures)
    assert found == pytest.approx(sent / dense)
    assert found == pytest.approx(expected, rel=0.01)
