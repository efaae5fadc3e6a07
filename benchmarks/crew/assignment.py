"""Local search for crews of 64 trainers against 1,000 random assignments, and against time.

    python -m benchmarks.crew.assignment

Under two objectives: the published one of DT-FM (groups of equal size, data parallel inside and a
pipeline across), and seconds of eight members side by side, as `crew plan` predicts them. 64
trainers in 8 sites; nothing is trained. Writes benchmarks/results/crew-assignment.json.
"""

import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import permutations
from typing import Any

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from partitioner.crew.planning.assign import Labels, Seconds, search, side_by_side
from partitioner.crew.planning.facts import Facts, Line, Trainer
from partitioner.crew.planning.methods import Methods
from partitioner.crew.planning.work import NetworkWork

RESULT = RESULTS / "crew-assignment.json"
SITES, PER_SITE, RANDOM, SEEDS = 8, 8, 1000, (0, 1, 2)
GRADIENTS, ACTIVATIONS = 23e6, 2e6
Matrix = NDArray[np.float64]


def _matches(able: NDArray[np.bool_]) -> bool:
    """Tell whether every row gets a column of its own, by augmenting paths (Kuhn)."""
    wishes = [np.flatnonzero(row).tolist() for row in able]
    taken: dict[int, int] = {}

    def place(row: int, seen: set[int]) -> bool:
        for column in wishes[row]:
            if column not in seen:
                seen.add(column)
                if column not in taken or place(taken[column], seen):
                    taken[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(wishes)))


def published_score(
    latency_s: Matrix, bytes_per_s: Matrix, gradients: float, activations: float
) -> Callable[[Labels], tuple[float]]:
    """DT-FM's seconds of a step, for labels of groups of equal size.

    The slowest group's exchange of gradients, `max_i sum_j 2 (a_ij + c / (|g| b_ij))`, and twice
    the best open path over the groups, whose distance is the bottleneck matching on `a + c / b`.
    """

    @cache
    def inside(group: tuple[int, ...]) -> float:
        rows = np.ix_(group, group)
        ways = 2 * (latency_s[rows] + gradients / (len(group) * bytes_per_s[rows]))
        np.fill_diagonal(ways, 0.0)
        return float(ways.sum(axis=1).max())

    @cache
    def between(one: tuple[int, ...], other: tuple[int, ...]) -> float:
        rows = np.ix_(one, other)
        ways = latency_s[rows] + activations / bytes_per_s[rows]
        steps = np.unique(ways)
        # Everyone has a partner at least this near; mostly that is the answer.
        least = max(ways.min(axis=0).max(), ways.min(axis=1).max())
        low, high = int(np.searchsorted(steps, least)), len(steps) - 1
        if _matches(ways <= least):
            return float(least)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if _matches(ways <= steps[middle]) else (middle + 1, high)
        return float(steps[low])

    paths: dict[int, NDArray[np.int64]] = {}

    def score(labels: Labels) -> tuple[float]:
        count = max(labels) + 1
        groups = [tuple(i for i, at in enumerate(labels) if at == g) for g in range(count)]
        if count not in paths:
            paths[count] = np.array([p for p in permutations(range(count)) if p[0] <= p[-1]])
        ways = np.zeros((count, count))
        for a in range(count):
            for b in range(a):
                ways[a, b] = ways[b, a] = between(*sorted((groups[a], groups[b])))
        orders = paths[count]
        path = ways[orders[:, :-1], orders[:, 1:]].sum(axis=1).min()
        return (max(map(inside, groups)) + 2 * float(path),)

    return score


def lines(seed: int) -> tuple[Matrix, Matrix]:
    """Seconds and bytes/s of 64 trainers: 1 ms and 1 Gbit/s in a site, drawn between sites."""
    random = Generator(Philox(seed))
    n = SITES * PER_SITE
    site = random.permutation(np.repeat(np.arange(SITES), PER_SITE))
    late = random.uniform(0.005, 0.1, (SITES, SITES))
    rate = np.exp(random.uniform(np.log(10), np.log(400), (SITES, SITES))) * 1e6 / 8
    late, rate = np.minimum(late, late.T), np.minimum(rate, rate.T)
    np.fill_diagonal(late, 0.001)
    np.fill_diagonal(rate, 1e9 / 8)
    rows = np.ix_(site, site)
    assert late[rows].shape == (n, n)
    return late[rows], rate[rows]


def seconds_of_members(seed: int) -> tuple[list[str], list[str], Seconds]:
    """Eight members of 23 MB; paces drawn between 50 and 800 pictures/s."""
    late, rate = lines(seed)
    paces = np.exp(Generator(Philox(seed + 100)).uniform(np.log(50), np.log(800), len(late)))
    names = [f"t{i}" for i in range(len(late))]
    members = [f"member-{k}" for k in range(1, 1 + SITES)]
    networks = {
        name: NetworkWork(name=name, size_bytes=GRADIENTS, pictures=50_000, epochs=14)
        for name in members
    }
    facts = Facts(
        trainer=tuple(
            Trainer(
                name=name,
                address="10.0.0.1",
                memory_bytes=2**36,
                pictures_per_s=dict.fromkeys(members, float(pace)),
            )
            for name, pace in zip(names, paces, strict=True)
        ),
        line=tuple(
            Line(
                a=names[i],
                b=names[j],
                latency_s=float(late[i, j]),
                bytes_per_s=float(rate[i, j]),
                back_bytes_per_s=float(rate[i, j]),
            )
            for i in range(len(names))
            for j in range(i)
        ),
    )
    methods = Methods(facts)
    by_site = [name for site in facts.sites for name in site]

    @cache
    def seconds(name: str, crew: tuple[str, ...]) -> float:
        method = methods.best(networks[name], crew)
        return networks[name].all_pictures / method.pictures_per_s if method else float("inf")

    return members, by_site, seconds


def by_published_score(seed: int) -> dict[str, float]:
    score = published_score(*lines(seed), GRADIENTS, ACTIVATIONS)
    random = Generator(Philox(seed + 1))
    start = tuple(i % SITES for i in range(SITES * PER_SITE))
    drawn = min(score(tuple(random.permutation(start).tolist()))[0] for _ in range(RANDOM))
    began = time.process_time()
    found = search([start], score, seed, evaluations=3000)
    return _row(seed, began, score(found)[0], drawn)


def by_seconds(seed: int) -> dict[str, float]:
    members, names, seconds = seconds_of_members(seed)
    random = Generator(Philox(seed + 1))

    def last(crews: Sequence[tuple[str, ...]]) -> float:
        return max(seconds(m, c) for m, c in zip(members, crews, strict=True))

    drawn = []
    for _ in range(RANDOM):
        labels = random.integers(0, SITES, len(names))
        crews = [tuple(n for n, at in zip(names, labels, strict=True) if at == g) for g in range(8)]
        if all(crews):
            drawn.append(last(crews))
    began = time.process_time()
    found = side_by_side(members, names, seconds, seed)
    return _row(seed, began, last([found[m] for m in members]), min(drawn))


def _row(seed: int, began: float, found: float, drawn: float) -> dict[str, float]:
    return {
        "seed": seed,
        "search_cpu_s": round(time.process_time() - began, 1),
        "found": round(found, 3),
        "best_of_random": round(drawn, 3),
    }


def figures() -> str:
    result, rows = read_result(RESULT.stem), []
    for key, name in (("published", "DT-FM's, of a step"), ("seconds", "of eight members")):
        some = result[key]
        row = {name: [one[name] for one in some] for name in some[0]}
        row["quicker"] = [a / b for a, b in zip(row["best_of_random"], row["found"], strict=True)]
        rows.append(row | {"objective": name})

    def each(key: str, digits: int) -> Callable[[dict[str, Any]], str]:
        return lambda row: ", ".join(f"{value:.{digits}f}" for value in row[key])

    return table(
        rows,
        ("seconds", "{objective}"),
        ("best of 1,000 random / found", each("quicker", 2)),
        ("search, s", each("search_cpu_s", 1)),
    )


PAGE = Page("benchmarks.crew.assignment", figures)


def main() -> None:
    results = {
        "machine": describe_machine(),
        "published": [by_published_score(seed) for seed in SEEDS],
        "seconds": [by_seconds(seed) for seed in SEEDS],
    }
    write_json(RESULT, results)
    PAGE.write()


if __name__ == "__main__":
    main()
