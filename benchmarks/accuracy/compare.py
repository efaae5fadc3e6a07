"""Fleets against single networks of one data set: choices on the calibration split, shares and
paired differences on the test split. Pure.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.networks import BRIEF, UNTOUCHED, Network
from mdp.fusion.fuse import Logits, fuse, probabilities
from partitioner.fusion.stacking import fit_subset

SEEDS = (0, 1, 2)
#: Kinds of a teacher's students.
TAUGHT = ("", BRIEF)
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
#: Networks that fleets are chosen from.
POOL = 8
#: A part, the kind of network that has it, and the kind that has all but it; "": taught, same view.
PARTS = (
    ("the teacher, against labels alone", "", "labels"),
    ("the teacher alone, against half labels", "", "half"),
    ("four times the epochs", "", "short"),
    ("pretraining", "", "scratch"),
    ("boosting", "boost", ""),
    ("stacking distillation", "stack", "boost"),
)
#: Noise is this many standard errors.
SURE = 2.0

Right = NDArray[np.bool_]


@dataclass(slots=True)
class Field:
    """The networks of one data set, and what fusing some of them gives."""

    networks: dict[str, Network]
    calibration: NDArray[np.int64]
    test: NDArray[np.int64]
    unseen: Right | None = None
    _known: dict[tuple[str, ...], tuple[float, Right]] = field(default_factory=dict)

    def right(self, names: Sequence[str], rule: str = "stacked") -> Right:
        """Which test pictures `[N]` these networks together are right on."""
        return self._fused(names, rule)[1]

    def chosen_by(self, names: Sequence[str]) -> float:
        """Share of the calibration pictures, which choices are made by."""
        return self._fused(names, "stacked")[0]

    def ms(self, names: Sequence[str]) -> float:
        return max(self.networks[name].ms for name in names)

    def seeds(self, body: str, kind: str = "") -> list[str]:
        """Names of the networks of this body and kind, by seed."""
        found = [n for n in self.networks.values() if (n.body, n.kind) == (body, kind)]
        return [n.name for n in sorted(found, key=lambda n: n.seed)]

    def one(self, body: str, kind: str, seed: int) -> str | None:
        """The name of one network, if it is there."""
        wanted = (body, kind, seed)
        return next(
            (n.name for n in self.networks.values() if (n.body, n.kind, n.seed) == wanted), None
        )

    def _fused(self, names: Sequence[str], rule: str) -> tuple[float, Right]:
        names = sorted(names)
        key = (rule, *names)
        if key not in self._known:
            fit = self._averaged if rule == "averaged" else self._stacked
            calibration, test = fit([self.networks[name] for name in names])
            self._known[key] = (
                float((calibration.argmax(axis=1) == self.calibration).mean()),
                test.argmax(axis=1) == self.test,
            )
        return self._known[key]

    def _stacked(self, members: Sequence[Network]) -> tuple[Logits, Logits]:
        calibration = {k: m.calibration for k, m in enumerate(members)}
        weights = fit_subset(calibration, tuple(calibration), self.calibration)
        test = {k: m.test for k, m in enumerate(members)}
        return fuse(calibration, weights), fuse(test, weights)

    def _averaged(self, members: Sequence[Network]) -> tuple[Logits, Logits]:
        """Mean of probabilities or of logits, whichever is better on the calibration split."""
        both = [
            np.stack([m.calibration.bag for m in members]), np.stack([m.test.bag for m in members])
        ]  # fmt: skip
        means = [
            [probabilities(part).mean(axis=0) for part in both],
            [part.mean(axis=0) for part in both],
        ]
        found = max(means, key=lambda m: (m[0].argmax(axis=1) == self.calibration).mean())
        return found[0], found[1]


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


def compared(own: Field, name: str) -> dict[str, Any]:
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
        "candidates": candidates(own),
        "budgets": budgets,
        "ablations": ablations(own, next(f for f in FLEETS[name] if len(f) == FLEET)),
        "front": front(own),
    }


def candidates(own: Field) -> list[dict[str, Any]]:
    """Every body and kind, alone, its seeds together; quickest first."""
    kinds = sorted({(n.ms, n.body, n.kind) for n in own.networks.values()})
    return [
        {
            "body": body,
            "kind": kind,
            "ms": ms,
            "test": [float(own.right([name]).mean()) for name in own.seeds(body, kind)],
            "unseen": [] if own.unseen is None else
            [float(own.right([name])[own.unseen].mean()) for name in own.seeds(body, kind)],
        }
        for ms, body, kind in kinds
    ]  # fmt: skip


def best_single(own: Field, budget_ms: float) -> list[str]:
    """The seeds of the body and kind, of any family, that is best on the calibration split."""
    kinds = {(n.body, n.kind) for n in own.networks.values() if n.ms <= budget_ms}
    return max(
        (own.seeds(*one) for one in sorted(kinds)),
        key=lambda names: float(np.mean([own.chosen_by([name]) for name in names])),
    )


def at_budget(own: Field, fleet: Sequence[str], budget_ms: float) -> dict[str, Any]:
    """All rivals within a latency."""
    single = best_single(own, budget_ms)
    # Whichever seed a fleet has, it is held against the single network of that seed.
    alone = [own.right([name]) for name in single]

    def row(method: str, fleets: Sequence[Sequence[str]]) -> dict[str, Any]:
        averaged = [float(own.right(fleet, "averaged").mean()) for fleet in fleets]
        told = {"method": method, "averaged": averaged if len(fleets[0]) > 1 else []}
        return described(own, fleets, alone) | told

    within = [n for n in own.networks.values() if n.ms <= budget_ms]
    pool = [n.name for n in within if n.kind in (*TAUGHT, UNTOUCHED)]
    untouched = [n.name for n in within if n.kind == UNTOUCHED]
    first = row("best single network, or that on each device", [[name] for name in single])
    rows = [first | {"one_missing": first["all_in"], "one_missing_worst": first["all_in"]}]
    if len(untouched) >= FLEET:
        rows.append(row("assembled, nothing trained", [best_fleet(own, untouched, FLEET)]))
    if students := best_body(own, fleet):
        rows.append(row(f"three seeds of {students}", [own.seeds(students)]))
    mixed = seeds_of(own, fleet)
    if mixed and len(fleet) == FLEET:
        rows.append(row(f"one of each: {', '.join(fleet)}", mixed))
        rows.append(best_answer(own, mixed, alone))
    series = []
    if len(pool) >= FLEET:
        chosen = best_fleet(own, pool, FLEET)
        if not any(sorted(chosen) in map(sorted, known["members"]) for known in rows):
            rows.append(row("three chosen on calibration", [chosen]))
        series = [
            row(str(count), [best_fleet(own, pool, count)])
            for count in range(2, min(LARGEST, len(pool)) + 1)
        ]
    hindsight = max(within, key=lambda n: float(own.right([n.name]).mean()))
    best = max(rows, key=lambda one: float(np.mean(one["calibration"])))
    reached = [
        n for n in own.networks.values()
        if n.ms > budget_ms and own.right([n.name]).mean() >= np.mean(best["all_in"])
    ]  # fmt: skip
    one_device = min(reached, key=lambda n: n.ms, default=None)
    return {
        "budget_ms": budget_ms,
        "single": single,
        "rows": rows,
        "series": series,
        "best": best["method"],
        "hindsight": {"name": hindsight.name, "test": float(own.right([hindsight.name]).mean())},
        "one_device": None if one_device is None else
        {"name": one_device.name, "ms": one_device.ms,
         "test": float(own.right([one_device.name]).mean())},
    }  # fmt: skip


def best_body(own: Field, bodies: Sequence[str]) -> str | None:
    """Of those with all seeds, the one whose seeds together are best on the calibration split."""
    whole = [body for body in sorted(set(bodies)) if len(own.seeds(body)) == len(SEEDS)]
    return max(whole, key=lambda body: own.chosen_by(own.seeds(body)), default=None)


def seeds_of(own: Field, fleet: Sequence[str], kind: str = "") -> list[list[str]]:
    """The fleet of each seed that is there whole."""
    found = []
    for seed in SEEDS:
        names = [own.one(body, kind, seed) for body in fleet]
        if None not in names:
            found.append([name for name in names if name is not None])
    return found


def described(
    own: Field, fleets: Sequence[Sequence[str]], alone: Sequence[Right]
) -> dict[str, Any]:
    """Fleets of several seeds, stacked: all in, one missing, one in, gain over the single."""
    right = [own.right(fleet) for fleet in fleets]
    missing = [
        [float(own.right(some).mean()) for some in all_but_one(fleet)]
        for fleet in fleets if len(fleet) > 1
    ]  # fmt: skip
    ones = [[float(own.right([name]).mean()) for name in fleet] for fleet in fleets]
    return {
        "members": [list(fleet) for fleet in fleets],
        "ms": max(own.ms(fleet) for fleet in fleets),
        "calibration": [own.chosen_by(fleet) for fleet in fleets],
        "all_in": [float(one.mean()) for one in right],
        "one_missing": [float(np.mean(some)) for some in missing],
        "one_missing_worst": [min(some) for some in missing],
        "one_in": [float(np.mean(some)) for some in ones],
        "gain": difference(right, alone),
        "unseen": [] if own.unseen is None else [float(one[own.unseen].mean()) for one in right],
    }


def all_but_one(fleet: Sequence[str]) -> Iterator[list[str]]:
    """The fleet without each of its members."""
    for out in fleet:
        yield [name for name in fleet if name != out]


def best_answer(
    own: Field, fleets: Sequence[Sequence[str]], alone: Sequence[Right]
) -> dict[str, Any]:
    """A model on each device and no fusion: the best of those that answered counts."""

    def best(names: Sequence[str]) -> Right:
        return own.right([max(names, key=lambda name: own.chosen_by([name]))])

    right = [best(fleet) for fleet in fleets]
    missing = [[float(best(some).mean()) for some in all_but_one(fleet)] for fleet in fleets]
    return described(own, fleets, alone) | {
        "averaged": [],
        "method": "the same three, best answer that came",
        "all_in": [float(one.mean()) for one in right],
        "one_missing": [float(np.mean(some)) for some in missing],
        "one_missing_worst": [min(some) for some in missing],
        "calibration": [max(own.chosen_by([name]) for name in fleet) for fleet in fleets],
        "gain": difference(right, alone),
        "unseen": [] if own.unseen is None else [float(one[own.unseen].mean()) for one in right],
    }


def best_fleet(own: Field, names: Sequence[str], count: int) -> list[str]:
    """The best `count` on the calibration split, of all combinations up to three of the `POOL` that
    are best alone, then grown.
    """
    able = sorted(names, key=lambda name: (-own.chosen_by([name]), name))
    fleet = max(itertools.combinations(able[:POOL], min(count, FLEET)), key=own.chosen_by)
    while len(fleet) < count:
        fleet = max(((*fleet, name) for name in able if name not in fleet), key=own.chosen_by)
    return list(fleet)


def ablations(own: Field, fleet: Sequence[str]) -> list[dict[str, Any]]:
    """What each part brings: the fleet that has it less the one that has all but it."""
    base = seeds_of(own, fleet)
    if not base:
        return []
    spread = float(np.std([own.right(one).mean() for one in base], ddof=1)) if base[1:] else 0.0
    found = []
    if body := best_body(own, fleet):
        what = f"three families, against three {body}"
        found.append(brought(own, what, base, [own.seeds(body)], spread))
    for what, has, lacks in PARTS:
        ours, theirs = swapped(own, fleet, has, lacks)
        if changed := sum(a != b for a, b in zip(ours, theirs, strict=True)):
            what = f"{what} ({changed} of {len(fleet)} members)"
            found.append(brought(own, what, [ours], [theirs], spread))
    for body in fleet:
        chain = [own.one(body, "", 0), *own.seeds(body, "chain")]
        if len(chain) > 1 and None not in chain:
            with_part = [name for name in chain if name is not None]
            independent = own.seeds(body)[: len(with_part)]
            what = f"starting from the first member ({len(with_part)} {body})"
            found.append(brought(own, what, [with_part], [independent], spread))
    return found


def swapped(own: Field, fleet: Sequence[str], has: str, lacks: str) -> tuple[list[str], list[str]]:
    """Seed 0 of a fleet in two kinds; members that are not there in both kinds stay as they are."""
    pairs = []
    for body in fleet:
        pair = own.one(body, has, 0), own.one(body, lacks, 0)
        base = own.one(body, "", 0)
        assert base is not None
        pairs.append((base, base) if None in pair else pair)
    return [a for a, _ in pairs if a is not None], [b for _, b in pairs if b is not None]


def brought(
    own: Field,
    what: str,
    having: Sequence[Sequence[str]],
    lacking: Sequence[Sequence[str]],
    seed_spread: float,
) -> dict[str, Any]:
    """One part: both fleets, their difference, and whether it is more than noise."""
    ours, theirs = ([own.right(fleet) for fleet in side] for side in (having, lacking))
    alone = [
        float(np.mean([own.right([name]).mean() for fleet in side for name in fleet]))
        for side in (having, lacking)
    ]
    found = difference(ours, theirs)
    seeds = np.sqrt(seed_spread**2 * (1 / len(ours) + 1 / len(theirs)))
    noise = SURE * float(np.hypot(found["error"], seeds))
    return {
        "part": what,
        "with": [list(fleet) for fleet in having],
        "without": [list(fleet) for fleet in lacking],
        "accuracy_with": float(np.mean(ours)),
        "accuracy_without": float(np.mean(theirs)),
        "brings": found,
        "noise": noise,
        "alone": alone[0] - alone[1],
    }


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
        calibration = own.chosen_by(fleet)
        if best is None or calibration > best["calibration"]:
            best = {
                "members": fleet,
                "ms": own.ms(fleet),
                "calibration": calibration,
                "test": float(own.right(fleet).mean()),
            }
            fleets.append(dict(best))
    singles = [
        {"name": n.name, "ms": n.ms, "kind": n.kind, "calibration": own.chosen_by([n.name]),
         "test": float(own.right([n.name]).mean())}
        for n in sorted(own.networks.values(), key=lambda n: (n.ms, n.name))
    ]  # fmt: skip
    return {"singles": singles, "fleets": fleets}
