"""What parts of the picture at real detail bring, against other networks of the whole picture.

    python -m benchmarks.accuracy.regions --data imagenette --weights FOLDER --scratch FOLDER

EfficientNet-Lite of public weights, rows cut by name, nothing trained, at two latencies. WEIGHTS
has lite0.safetensors to lite2.safetensors and imagenet1k.txt. Fusion is fitted and everything
chosen on the calibration split; accuracy is that of the test split, on which only what was chosen
is computed. Writes benchmarks/results/regions.json.
"""

import argparse
import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.networks import SEEN, Store
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, kept
from benchmarks.harness.tables import table
from mdp.files import write_json
from mdp.fusion.fuse import Contribution, fuse
from partitioner.data.datasets import SplitName
from partitioner.export.evaluate import accuracy
from partitioner.fusion.stacking import fit_subset

RESULT = RESULTS / "regions.json"
#: Milliseconds of the slowest on one thread (docs/results/accuracy.md) -> networks.
BUDGETS = {
    2.26: ("lite0-128", "lite1-112", "lite2-104"),
    3.12: ("lite0-152", "lite1-128", "lite0-128"),
}
Member = tuple[str, str]
#: Kinds of fleets -> the members they may have. Of each the best three on the calibration split.
KINDS: dict[str, Callable[[Sequence[Member]], bool]] = {
    "whole pictures": lambda members: all(seen == "whole" for _, seen in members),
    "any network, any region": lambda members: True,
}


def measured(store: Store, bodies: Sequence[str]) -> list[dict[str, Any]]:
    """The best single network and the best three of each kind, chosen on the calibration split."""
    members = list(itertools.product(bodies, SEEN))
    targets = {"calibration": store.data.calibration.targets, "test": store.data.test.targets}

    @cache
    def logits(member: Member, split: SplitName) -> Contribution:
        return store.of_public(member[0], split, member[1])

    @cache
    def fused(fleet: tuple[Member, ...], split: SplitName) -> NDArray[np.float32]:
        fitted = {k: logits(member, "calibration") for k, member in enumerate(fleet)}
        weights = fit_subset(fitted, tuple(fitted), targets["calibration"])
        return fuse({k: logits(member, split) for k, member in enumerate(fleet)}, weights)

    def best(choices: Iterable[tuple[Member, ...]]) -> tuple[Member, ...]:
        return max(
            choices, key=lambda fleet: accuracy(fused(fleet, "calibration"), targets["calibration"])
        )

    def right(fleet: tuple[Member, ...]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = fused(fleet, "test").argmax(axis=1) == targets["test"]
        return found

    single = best((member,) for member in members)
    whole = [(member,) for member in members if member[1] == "whole"]
    rows = {"one network, the whole picture": best(whole), "one network, any region": single}
    for kind, allowed in KINDS.items():
        rows[f"three: {kind}"] = best(filter(allowed, itertools.combinations(members, 3)))
    against = right(single)
    return [
        {
            "kind": kind,
            "members": [" ".join(member) for member in fleet],
            "share": float(right(fleet).mean()),
            "missing": [
                float(right(tuple(m for m in fleet if m != out)).mean()) for out in fleet
            ] if len(fleet) > 1 else [],
            "gain": float((right(fleet) * 1.0 - against).mean()),
            "error": float((right(fleet) * 1.0 - against).std() / len(against) ** 0.5),
        }
        for kind, fleet in rows.items()
    ]  # fmt: skip


def figures() -> str:
    """A table for each latency."""
    return "\n\n".join(
        table(
            budget["fleets"],
            ("chosen", "{kind}"),
            ("members", lambda row: ", ".join(row["members"])),
            ("all in", lambda row: f"{row['share']:.1%}"),
            ("one missing", lambda row: ", ".join(f"{share:.1%}" for share in row["missing"])),
            ("over one network, any region",
             lambda row: f"{row['gain'] * 100:+.1f} ± {row['error'] * 100:.1f}"),
            title=f"Within {budget['ms']:.2f} ms",
        )
        for budget in kept(RESULT.stem)["budgets"]
    )  # fmt: skip


PAGE = Page("benchmarks.accuracy.regions", figures)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.regions")
    for option in ("--data", "--weights", "--scratch"):
        parser.add_argument(option, type=Path, required=True)
    asked = parser.parse_args()
    store = Store(asked.scratch, str(asked.data), asked.weights)
    budgets = [{"ms": ms, "fleets": measured(store, bodies)} for ms, bodies in BUDGETS.items()]
    write_json(RESULT, {"test_pictures": len(store.data.test), "budgets": budgets})
    PAGE.write()


if __name__ == "__main__":
    main()
