"""Crews: known ones, against every possibility, and above eight trainers."""

import math
from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator, Philox

from partitioner.crew.planning.assign import Seconds, best_crew, search, side_by_side
from partitioner.crew.planning.costs import RATIO
from partitioner.crew.planning.flows import Links
from tests.unit.partitioner.crew.planning.fleets import three

SIZES = {"member-0": 23e6, "member-1": 6e6}
SEEN = {"member-0": 20 * 20_000, "member-1": 14 * 20_000}


def rounds_per_s(name: str, crew: tuple[str, ...]) -> float:
    """Pictures/s in rounds of 4,096 in int8, waiting for half a step of 64 of the slowest."""
    facts = three()
    paces = [facts.of(trainer).pictures_per_s[name] for trainer in crew]
    mean_s = Links(facts).mean("two_phase", crew).of(RATIO["int8"] * SIZES[name])
    wait_s = 32 / min(paces) if len(crew) > 1 else 0.0
    return 4096 / (4096 / sum(paces) + mean_s + wait_s)


def seconds(name: str, crew: tuple[str, ...]) -> float:
    return SEEN[name] / rounds_per_s(name, crew)


def test_rates_of_known_crews() -> None:
    # The published figures take a code of int8 for exactly a quarter of a number.
    for crew, rates in (
        (("coordinator", "tower"), (550, 1270)),
        (("coordinator", "tower", "nuc"), (604, 1405)),
    ):
        for name, rate in zip(SIZES, rates, strict=True):
            assert rounds_per_s(name, crew) == pytest.approx(rate, rel=0.002)


def test_known_crews_one_after_the_other() -> None:
    names = three().names
    assert [best_crew(name, names, seconds) for name in SIZES] == [names, names]
    assert sum(seconds(name, names) for name in SIZES) == pytest.approx(862, rel=0.002)
    assert sum(seconds(name, ("coordinator",)) for name in SIZES) == pytest.approx(1311, rel=0.001)


def drawn(names: list[str], trainers: list[str], seed: int) -> Seconds:
    """Crews that gain from trainers, lose to their number, and now and then cannot at all."""
    random = Generator(Philox(seed))
    paces: dict[str, float] = dict(zip(trainers, random.uniform(1, 8, len(trainers)), strict=True))
    works: dict[str, float] = dict(zip(names, random.uniform(1, 3, len(names)), strict=True))
    waits = float(random.uniform(0, 0.3))

    def taken(name: str, crew: tuple[str, ...]) -> float:
        if len(crew) == 1 and paces[crew[0]] < 1.5:
            return math.inf
        return works[name] / sum(paces[t] for t in crew) + waits * (len(crew) - 1) / len(crew)

    return taken


def least_makespan(names: list[str], trainers: list[str], taken: Seconds) -> float:
    """By trying every label of every network and every trainer."""
    groups = range(len(names))
    found = math.inf
    for labels in product((*groups, -1), repeat=len(trainers)):
        crews = [
            tuple(t for t, at in zip(trainers, labels, strict=True) if at == g) for g in groups
        ]
        for places in product(groups, repeat=len(names)):
            if not all(crews[place] for place in places):
                continue
            ends = [0.0] * len(names)
            for name, place in zip(names, places, strict=True):
                ends[place] += taken(name, crews[place])
            found = min(found, max(ends))
    return found


def makespan(crews: dict[str, tuple[str, ...]], taken: Seconds) -> float:
    ends: dict[tuple[str, ...], float] = {}
    for name, crew in crews.items():
        ends[crew] = ends.get(crew, 0.0) + taken(name, crew)
    for one, other in combinations(ends, 2):
        assert not set(one) & set(other)
    return max(ends.values(), default=math.inf)


@settings(max_examples=15)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 10**6))
def test_crews_are_the_best_of_all(networks: int, count: int, seed: int) -> None:
    names, trainers = [f"n{k}" for k in range(networks)], [f"t{k}" for k in range(count)]
    taken = drawn(names, trainers, seed)
    found = makespan(side_by_side(names, trainers, taken), taken)
    assert found == pytest.approx(least_makespan(names, trainers, taken))


def test_crews_of_eight_are_the_best_of_all() -> None:
    names, trainers = ["n0", "n1"], [f"t{k}" for k in range(8)]
    taken = drawn(names, trainers, 1)
    found = makespan(side_by_side(names, trainers, taken), taken)
    assert found == pytest.approx(least_makespan(names, trainers, taken))


def test_fewer_trainers_are_taken_of_equals() -> None:
    def alike(name: str, crew: tuple[str, ...]) -> float:
        return 1.0

    assert best_crew("n0", ["a", "b", "c"], alike) == ("a",)
    assert sum(map(len, side_by_side(["n0", "n1"], ["a", "b", "c"], alike).values())) == 2
    assert side_by_side([], ["a"], alike) == {}


def test_more_than_eight_trainers_are_searched() -> None:
    names, trainers = [f"n{k}" for k in range(3)], [f"t{k}" for k in range(12)]
    taken = drawn(names, trainers, 5)
    found = makespan(side_by_side(names, trainers, taken), taken)
    assert found == makespan(side_by_side(names, trainers, taken), taken)  # a seed, no chance
    random = Generator(Philox(9))
    for _ in range(300):
        labels = random.integers(0, 3, 12).tolist()
        crews = {
            name: tuple(t for t, at in zip(trainers, labels, strict=True) if at == g)
            for g, name in enumerate(names)
        }
        if all(crews.values()):
            assert found <= makespan(crews, taken)
    alone = best_crew("n0", trainers, taken)
    for trainer in trainers:
        changed = tuple(t for t in trainers if (t in alone) != (t == trainer))
        assert not changed or taken("n0", alone) <= taken("n0", changed) * (1 + 1e-6)


def test_search_keeps_the_sizes_of_groups_without_choices() -> None:
    def apart(labels: tuple[int, ...]) -> tuple[float, ...]:
        return (sum(a != b for a, b in zip(labels[::2], labels[1::2], strict=True)),)

    found = search([(0, 1, 2, 0, 1, 2)], apart, seed=3)
    assert sorted(found) == [0, 0, 1, 1, 2, 2]
    assert apart(found) == (0,)
