"""Fleets against single networks of one data set: choices on the calibration split, shares and
paired differences on the test split. Pure.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.networks import BRIEF, FIRST, SEEN, UNTOUCHED, WHOLE, Network
from mdp.fusion.fuse import Logits, fuse, probabilities
from partitioner.data.datasets import SplitName
from partitioner.fusion.stacking import fit_subset

SEEDS = (0, 1, 2)
#: Kinds of a teacher's students.
TAUGHT = ("", BRIEF, FIRST)
#: A fleet of each data set's budgets: the slowest member sets the budget.
FLEETS: dict[str, tuple[tuple[str, ...], ...]] = {
    "cifar10": (("cs3-64", "lite0-40", "vit4-48"), ("lite0-96", "vit6-64", "resnet10-64")),
    "tinyimagenet40": (
        ("lite0-152", "lite1-128", "vit8-96"),
        ("lite0-224", "lite1-192", "vit12-128"),
    ),
    "imagenette": (("lite0-152",), ("lite0-192", "lite1-160", "vit10-112")),
}
#: Members of a fleet, and of the largest one.
FLEET, LARGEST = 3, 5
#: Fleets that are grown on at each size, and networks besides the best part of each that they are
#: grown by.
BEAM, POOL = 3, 12

Right = NDArray[np.bool_]


@dataclass(slots=True)
class Field:
    """The networks of one data set, and what fusing some of them gives."""

    networks: dict[str, Network]
    calibration: NDArray[np.int64]
    test: NDArray[np.int64]
    unseen: Right | None = None
    _chosen_by: dict[tuple[str, ...], float] = field(default_factory=dict)
    _right: dict[tuple[str, ...], Right] = field(default_factory=dict)

    def right(self, names: Sequence[str], rule: str = "stacked") -> Right:
        """Test pictures `[N]` that these networks together are right on."""
        key = (rule, *sorted(names))
        if key not in self._right:
            fit = self._average if rule == "averaged" else self._stack
            self._right[key] = fit(key[1:], "test").argmax(axis=1) == self.test
        return self._right[key]

    def choice_score(self, names: Sequence[str]) -> float:
        """Share of the calibration pictures, which choices are made by."""
        key = tuple(sorted(names))
        if key not in self._chosen_by:
            fused = self._stack(key, "calibration")
            self._chosen_by[key] = float((fused.argmax(axis=1) == self.calibration).mean())
        return self._chosen_by[key]

    def ms(self, names: Sequence[str]) -> float:
        return max(self.networks[name].ms for name in names)

    def seeds(self, body: str, kind: str = "", seen: str = WHOLE) -> list[str]:
        """Names of the networks of this body, kind and part of the picture, by seed."""
        wanted = (body, kind, seen)
        found = [n for n in self.networks.values() if (n.body, n.kind, n.seen) == wanted]
        return [n.name for n in sorted(found, key=lambda n: n.seed)]

    def one(self, body: str, kind: str, seed: int, seen: str = WHOLE) -> str | None:
        """The name of one network, if it is there."""
        names = self.seeds(body, kind, seen)
        return next((name for name in names if self.networks[name].seed == seed), None)

    def _stack(self, names: Sequence[str], split: SplitName) -> Logits:
        members = [self.networks[name] for name in names]
        calibration = {k: m.logits("calibration") for k, m in enumerate(members)}
        weights = fit_subset(calibration, tuple(calibration), self.calibration)
        return fuse({k: m.logits(split) for k, m in enumerate(members)}, weights)

    def _average(self, names: Sequence[str], split: SplitName) -> Logits:
        """Mean of probabilities or of logits, whichever is better on the calibration split."""
        means: dict[SplitName, tuple[Logits, Logits]] = {}
        parts: tuple[SplitName, ...] = ("calibration", split)
        for part in parts:
            bags = np.stack([self.networks[name].logits(part).bag for name in names])
            means[part] = (probabilities(bags).mean(axis=0), bags.mean(axis=0))
        shares = [(m.argmax(axis=1) == self.calibration).mean() for m in means["calibration"]]
        return means[split][int(np.argmax(shares))]


def difference(ours: Sequence[Right], theirs: Sequence[Right]) -> dict[str, Any]:
    """Mean of ours less theirs, seed by seed where there are as many, with its standard error over
    the test pictures, which are the same on both sides, and its spread over seeds.
    """
    each = np.mean(ours, axis=0) - np.mean(theirs, axis=0)
    pairs = [float(a.mean() - b.mean()) for a, b in zip(ours, theirs, strict=False)]
    spread = float(np.std(pairs, ddof=1)) if len(ours) == len(theirs) > 1 else None
    return {
        "mean": float(each.mean()),
        "error": float(each.std() / np.sqrt(len(each))),
        "spread": spread,
    }


def compare(own: Field, name: str) -> dict[str, Any]:
    """Everything that the page says of one data set."""
    budgets = []
    for fleet in FLEETS[name]:
        kinds = TAUGHT if len(fleet) == FLEET else (UNTOUCHED,)
        known = [n.name for n in own.networks.values() if n.body in fleet and n.kind in kinds]
        if known:
            budgets.append(at_budget(own, fleet, own.ms(known)))
    return {
        "calibration_pictures": len(own.calibration),
        "test_pictures": len(own.test),
        "unseen_pictures": 0 if own.unseen is None else int(own.unseen.sum()),
        "budgets": budgets,
        "front": front(own),
    }


def best_single(own: Field, within: Sequence[Network]) -> list[str]:
    """The seeds of the body, kind and part of the picture that is best on the calibration split."""
    kinds = sorted({(n.body, n.kind, n.seen) for n in within})
    return max(
        (own.seeds(*one) for one in kinds),
        key=lambda names: float(np.mean([own.choice_score([name]) for name in names])),
    )


def at_budget(own: Field, fleet: Sequence[str], budget_ms: float) -> dict[str, Any]:
    """All rivals within a latency."""
    within = [n for n in own.networks.values() if n.ms <= budget_ms]
    single = best_single(own, within)
    # Whichever seed a fleet has, it is held against the single network of that seed.
    alone = [own.right([name]) for name in single]

    def row(method: str, fleets: Sequence[Sequence[str]]) -> dict[str, Any]:
        averaged = [float(own.right(fleet, "averaged").mean()) for fleet in fleets]
        told = {"method": method, "averaged": averaged if len(fleets[0]) > 1 else []}
        return describe(own, fleets, alone, own.right) | told

    def best_answer(names: Sequence[str]) -> Right:
        """Of a model on each device and no fusion."""
        return own.right([max(names, key=lambda name: own.choice_score([name]))])

    def one_row(method: str, names: Sequence[str]) -> dict[str, Any]:
        found = row(method, [[name] for name in names])
        return found | {"one_missing": found["all_in"], "one_missing_worst": found["all_in"]}

    pool = [n for n in within if n.kind in (*TAUGHT, UNTOUCHED)]
    rows = [one_row("best single network, or that on each device", single)]
    whole = best_single(own, [n for n in within if n.seen == WHOLE])
    if whole != single:
        rows.append(one_row("best single network, whole picture", whole))
    for method, known in (
        ("assembled, nothing trained", [n.name for n in pool if n.kind == UNTOUCHED]),
        ("three, whole pictures", [n.name for n in pool if n.seen == WHOLE]),
    ):
        if len(known) >= FLEET:
            rows.append(row(method, [best_fleet(own, known, FLEET)]))
    if students := best_body(own, fleet):
        rows.append(row(f"three seeds of {students}, whole pictures", [own.seeds(students)]))
    mixed = seeds_of(own, fleet, [WHOLE] * len(fleet))
    if mixed and len(fleet) == FLEET:
        rows.append(row(f"one of each: {', '.join(fleet)}, whole pictures", mixed))
        told = {"method": "the same three, best answer that came", "averaged": []}
        rows.append(describe(own, mixed, alone, best_answer) | told)
        rows.append(row("the same three, each in its part", in_parts(own, fleet)))
    names, series = [n.name for n in pool], []
    if len(names) >= FLEET:
        chosen = best_fleet(own, names, FLEET)
        if [chosen] not in [known["members"] for known in rows]:
            rows.append(row("three chosen on calibration", [chosen]))
        counts = range(2, min(LARGEST, len(names)) + 1)
        series = [row(str(count), [best_fleet(own, names, count)]) for count in counts]
    best = max(rows, key=lambda one: float(np.mean(one["calibration"])))
    slower = [n for n in own.networks.values() if n.ms > budget_ms]
    reached = [n for n in slower if own.choice_score([n.name]) >= np.mean(best["calibration"])]
    one_device = min(reached, key=lambda n: n.ms, default=None)
    return {
        "budget_ms": budget_ms,
        "single": single,
        "rows": rows,
        "series": series,
        "best": best["method"],
        "one_device": None if one_device is None else
        {"name": one_device.name, "ms": one_device.ms,
         "test": float(own.right([one_device.name]).mean())},
    }  # fmt: skip


def best_body(own: Field, bodies: Sequence[str]) -> str | None:
    """Of those with all seeds, the one whose seeds together are best on the calibration split."""
    whole = [body for body in sorted(set(bodies)) if len(own.seeds(body)) == len(SEEDS)]
    return max(whole, key=lambda body: own.choice_score(own.seeds(body)), default=None)


def seeds_of(own: Field, fleet: Sequence[str], parts: Sequence[str]) -> list[list[str]]:
    """The fleet of each seed that is there whole, with these parts of the picture."""
    found = []
    for seed in SEEDS:
        names = [own.one(body, "", seed, seen) for body, seen in zip(fleet, parts, strict=True)]
        if None not in names:
            found.append([name for name in names if name is not None])
    return found


def in_parts(own: Field, fleet: Sequence[str]) -> list[list[str]]:
    """The fleet of each seed, with the parts that are best on the calibration split on average."""
    ways = (seeds_of(own, fleet, parts) for parts in itertools.product(SEEN, repeat=len(fleet)))
    return max(
        (way for way in ways if way),
        key=lambda fleets: float(np.mean([own.choice_score(one) for one in fleets])),
    )


def describe(
    own: Field,
    fleets: Sequence[Sequence[str]],
    alone: Sequence[Right],
    answer: Callable[[Sequence[str]], Right],
) -> dict[str, Any]:
    """Fleets of several seeds: all in, one missing, gain over the single; `answer` fuses."""
    right = [answer(fleet) for fleet in fleets]
    missing = [
        [float(answer(some).mean()) for some in all_but_one(fleet)]
        for fleet in fleets if len(fleet) > 1
    ]  # fmt: skip
    return {
        "members": [list(fleet) for fleet in fleets],
        "ms": max(own.ms(fleet) for fleet in fleets),
        "calibration": [own.choice_score(fleet) for fleet in fleets],
        "all_in": [float(one.mean()) for one in right],
        "one_missing": [float(np.mean(some)) for some in missing],
        "one_missing_worst": [min(some) for some in missing],
        "gain": difference(right, alone),
        "unseen": [] if own.unseen is None else [float(one[own.unseen].mean()) for one in right],
    }


def all_but_one(fleet: Sequence[str]) -> Iterator[list[str]]:
    """The fleet without each of its members."""
    for out in fleet:
        yield [name for name in fleet if name != out]


def best_fleet(own: Field, names: Sequence[str], count: int) -> list[str]:
    """The best `count` on the calibration split that a beam search finds."""
    able = sorted(names, key=lambda name: (-own.choice_score([name]), name))
    best_parts = {name.partition("@")[0]: name for name in reversed(able)}
    able = list(dict.fromkeys([*able[:POOL], *best_parts.values()]))
    fleets: list[tuple[str, ...]] = [()]
    for _ in range(count):
        grown = {tuple(sorted((*fleet, n))) for fleet in fleets for n in able if n not in fleet}
        fleets = sorted(grown, key=lambda fleet: (-own.choice_score(fleet), fleet))[:BEAM]
    return list(fleets[0])


def front(own: Field) -> dict[str, Any]:
    """Accuracy against latency: every single network, and the best fleet of three within each."""
    pool = [n for n in own.networks.values() if n.kind in (*TAUGHT, "teacher", UNTOUCHED)]
    fleets: list[dict[str, Any]] = []
    best: Mapping[str, Any] | None = None
    for budget_ms in sorted({n.ms for n in pool}):
        within = [n.name for n in pool if n.ms <= budget_ms]
        if len(within) < FLEET:
            continue
        fleet = best_fleet(own, within, FLEET)
        calibration = own.choice_score(fleet)
        if best is None or calibration > best["calibration"]:
            best = {
                "members": fleet,
                "ms": own.ms(fleet),
                "calibration": calibration,
                "test": float(own.right(fleet).mean()),
            }
            fleets.append(dict(best))
    singles = []
    for ms, body, kind, seed in sorted({(n.ms, n.body, n.kind, n.seed) for n in pool}):
        # A network stands for itself in its best part of the picture.
        parts = [name for seen in SEEN if (name := own.one(body, kind, seed, seen))]
        name = max(parts, key=lambda name: own.choice_score([name]))
        singles.append(
            {"name": name, "ms": ms, "kind": kind, "calibration": own.choice_score([name]),
             "test": float(own.right([name]).mean())}
        )  # fmt: skip
    return {"singles": singles, "fleets": fleets}
