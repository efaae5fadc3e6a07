"""Load by other processes: what is counted, and what is not told."""

from collections.abc import Callable, Iterator

import pytest

from mdp.load import OtherLoad, cpu_seconds, is_busy, system_cpu_s


def test_a_measurement_is_disturbed_when_others_are_busy() -> None:
    assert is_busy(0.5)
    assert not is_busy(0.1)
    assert not is_busy(None)


def readings(*values: float | None) -> Callable[[], float | None]:
    left: Iterator[float | None] = iter(values)
    return lambda: next(left)


def times(*values: float) -> Callable[[], float]:
    left = iter(values)
    return lambda: next(left)


def test_what_this_process_computes_is_not_others() -> None:
    load = OtherLoad(readings(100.0, 103.0), times(10.0, 11.0), times(0.0, 2.0))
    assert load.cores() == 1.0


def test_a_tick_too_few_is_no_load() -> None:
    load = OtherLoad(readings(100.0, 100.99), times(10.0, 11.0), times(0.0, 1.0))
    assert load.cores() == 0.0


@pytest.mark.parametrize(
    ("busy_s", "took_s"), [((None, None), 1.0), ((1.0, None), 1.0), ((1.0, 1.1), 0.1)]
)
def test_what_cannot_be_told_is_none(
    busy_s: tuple[float | None, float | None], took_s: float
) -> None:
    load = OtherLoad(readings(*busy_s), times(0.0, 0.0), times(0.0, took_s))
    assert load.cores(0.2) is None


def test_this_system_counts_or_says_nothing() -> None:
    busy_s = system_cpu_s()
    assert busy_s is None or busy_s > 0
    assert cpu_seconds("") is None
