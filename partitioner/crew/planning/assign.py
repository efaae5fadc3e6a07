"""Assignment of unequal trainers to networks, after decentralised scheduling (DT-FM). Pure.

Exact for at most `EXACT` trainers, above it local search from drawn starts. How long a crew takes
for a network is handed in; a crew that cannot take it has infinite seconds.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import combinations

from numpy.random import Generator, Philox

#: A network's name and a crew, in the order of the trainers, to seconds.
Seconds = Callable[[str, tuple[str, ...]], float]
#: Network to its crew.
Crews = dict[str, tuple[str, ...]]
#: Two are better than one only if they save more than rounding.
_EPSILON = 1e-9
#: Most trainers for all subsets and partitions, and most pairs of their subsets.
EXACT, _MOST_STATES = 8, 2_000_000
#: Starts of a local search, and assignments that all of them look at together.
_STARTS, _EVALUATIONS = 20, 4000
#: Label of a trainer that takes no part.
_IDLE = -1

Labels = tuple[int, ...]
Score = Callable[[Labels], tuple[float, ...]]


def best_crew(name: str, trainers: Sequence[str], seconds: Seconds) -> tuple[str, ...]:
    """The crew that has a network soonest; of equals the smallest.

    Of at most `EXACT` trainers the best subset. Of more the best of the m quickest, changed by one
    trainer at a time while that helps.
    """
    if len(trainers) <= EXACT:
        some = (c for m in range(1, len(trainers) + 1) for c in combinations(trainers, m))
        return _soonest((crew, seconds(name, crew)) for crew in some)
    by_pace = sorted(trainers, key=lambda t: seconds(name, (t,)))
    prefixes = [_order(by_pace[:m], trainers) for m in range(1, len(by_pace) + 1)]
    crew = _soonest((prefix, seconds(name, prefix)) for prefix in prefixes)
    while True:
        changed = [_order(set(crew) ^ {trainer}, trainers) for trainer in trainers]
        found = _soonest((c, seconds(name, c)) for c in [crew, *changed] if c)
        if seconds(name, found) >= seconds(name, crew) * (1 - _EPSILON):
            return crew
        crew = found


def side_by_side(
    names: Sequence[str], trainers: Sequence[str], seconds: Seconds, seed: int = 0
) -> Crews:
    """Crews of networks that are trained at the same time, such that the last ends soonest.

    Crews have no trainer in common, unless they are equal: then their networks are trained one
    after another. Trainers may be left out. Empty where a network has no crew that can take it.
    Of more than `EXACT` trainers those beside each other in `trainers`, as of one site, are tried
    together.
    """
    if not names:
        return {}
    states = 3 ** (len(trainers) + len(names))
    if len(trainers) <= EXACT and states <= _MOST_STATES:
        return _exact(tuple(names), tuple(trainers), seconds)
    return _search(names, trainers, seconds, seed)


#: Seconds, trainers, and groups of networks with their crews, as masks.
_Found = tuple[float, int, tuple[tuple[int, int], ...]]


def _exact(names: tuple[str, ...], trainers: tuple[str, ...], seconds: Seconds) -> Crews:
    """Every crew for the first network left, with every set of others after it on that crew."""
    crews = [_members(mask, trainers) for mask in range(1 << len(trainers))]
    taken = [[seconds(name, crew) if crew else math.inf for crew in crews] for name in names]

    @cache
    def best(free: int, left: int) -> _Found:
        if not left:
            return 0.0, 0, ()
        first = left & -left
        found: _Found = (math.inf, 0, ())
        crew = free
        while crew:
            others = left ^ first
            after = others
            while True:
                group = after | first
                here = sum(taken[k][crew] for k in range(len(names)) if group >> k & 1)
                if here < found[0] * (1 + _EPSILON):
                    rest = best(free ^ crew, left ^ group)
                    tried = max(here, rest[0]), crew.bit_count() + rest[1]
                    if _better(tried, found[:2]):
                        found = (*tried, ((group, crew), *rest[2]))
                if not after:
                    break
                after = (after - 1) & others
            crew = (crew - 1) & free
        return found

    chosen = best((1 << len(trainers)) - 1, (1 << len(names)) - 1)[2]
    return {
        name: crews[crew]
        for k, name in enumerate(names)
        for group, crew in chosen
        if group >> k & 1
    }


def _better(new: tuple[float, int], old: tuple[float, int]) -> bool:
    """Sooner, or as soon with fewer trainers."""
    return new[0] < old[0] * (1 - _EPSILON) or (
        new[0] <= old[0] * (1 + _EPSILON) and new[1] < old[1]
    )


def _search(names: Sequence[str], trainers: Sequence[str], seconds: Seconds, seed: int) -> Crews:
    """Crews of the networks in turn, each group of networks on a crew of its own."""
    groups = min(len(names), len(trainers))
    dealt = [[name for i, name in enumerate(names) if i % groups == g] for g in range(groups)]

    @cache
    def group_s(group: int, crew: tuple[str, ...]) -> float:
        return sum(seconds(name, crew) for name in dealt[group]) if crew else math.inf

    def crews(labels: Labels) -> list[tuple[str, ...]]:
        return [
            tuple(t for t, label in zip(trainers, labels, strict=True) if label == group)
            for group in range(groups)
        ]

    def score(labels: Labels) -> tuple[float, ...]:
        taken = sorted((group_s(g, crew) for g, crew in enumerate(crews(labels))), reverse=True)
        return (*taken, sum(label != _IDLE for label in labels))

    # By pace, back and forth over the groups; and neighbours together. Other starts are drawn.
    by_pace = sorted(range(len(trainers)), key=lambda t: seconds(names[0], (trainers[t],)))
    dealt_out = [0] * len(trainers)
    for place, t in enumerate(by_pace):
        lap, group = divmod(place, groups)
        dealt_out[t] = groups - 1 - group if lap % 2 else group
    neighbours = [t * groups // len(trainers) for t in range(len(trainers))]
    choices = (_IDLE, *range(groups))
    best = search([tuple(dealt_out), tuple(neighbours)], score, seed, choices)
    if score(best)[0] == math.inf:
        return {}
    return {name: crew for g, crew in enumerate(crews(best)) for name in dealt[g]}


def search(
    starts: Sequence[Labels],
    score: Score,
    seed: int,
    choices: Sequence[int] = (),
    evaluations: int = _EVALUATIONS,
) -> Labels:
    """The labels with the least score that local search finds from `starts` and shuffles of them.

    Moves swap the labels of two, and give one another of `choices`; the first that helps is taken,
    until none does or the start's part of `evaluations` is spent.
    """
    random = Generator(Philox(seed))
    count = len(starts[0])
    moves = _moves(count, choices)
    # Of many trainers fewer starts, as each has more moves.
    number = max(len(starts), min(_STARTS, evaluations // len(moves)))
    best: tuple[tuple[float, ...], Labels] | None = None
    for i in range(number):
        labels = starts[i % len(starts)]
        if i >= len(starts):
            labels = tuple(labels[j] for j in random.permutation(count).tolist())
        found = _improve(labels, score, moves, random, evaluations // number)
        best = found if best is None or found[0] < best[0] else best
    assert best is not None
    return best[1]


#: One's other label, or two that change theirs.
_Move = tuple[int, int, bool]


def _moves(count: int, choices: Sequence[int]) -> list[_Move]:
    swaps = [(i, j, True) for i, j in combinations(range(count), 2)]
    return swaps + [(i, label, False) for i in range(count) for label in choices]


def _improve(
    labels: Labels, score: Score, moves: list[_Move], random: Generator, evaluations: int
) -> tuple[tuple[float, ...], Labels]:
    now, spent, since = score(labels), 0, 0
    order: list[int] = []
    while since < len(moves) and spent < evaluations:
        order = order or random.permutation(len(moves)).tolist()
        i, other, swaps = moves[order.pop()]
        since += 1
        changed = list(labels)
        if swaps:
            changed[i], changed[other] = labels[other], labels[i]
        else:
            changed[i] = other
        if changed == list(labels):
            continue
        spent += 1
        if (value := score(tuple(changed))) < now:
            labels, now, since = tuple(changed), value, 0
    return now, labels


def _soonest(found: Iterable[tuple[tuple[str, ...], float]]) -> tuple[str, ...]:
    """The crew with the least seconds; of equals the smallest, then the first."""
    best: tuple[str, ...] = ()
    least = (math.inf, 0)
    for crew, seconds in found:
        if not best or _better((seconds, len(crew)), least):
            best, least = crew, (seconds, len(crew))
    return best


def _members(mask: int, trainers: Sequence[str]) -> tuple[str, ...]:
    return tuple(trainer for i, trainer in enumerate(trainers) if mask >> i & 1)


def _order(some: Iterable[str], trainers: Sequence[str]) -> tuple[str, ...]:
    chosen = set(some)
    return tuple(trainer for trainer in trainers if trainer in chosen)
