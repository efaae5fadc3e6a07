"""Trainings of rounds, what is compared of them, and what the planner says by it."""

from itertools import product
from pathlib import Path
from statistics import mean

import pytest

pytest.importorskip("torch")

from benchmarks.crew.factors import (
    EQUAL,
    GRADIENTS,
    GRID,
    SCALED,
    TODAY,
    UNEQUAL,
    Key,
    case,
    cases_of,
    compare,
    key_of,
    key_of_case,
    take_up,
)  # fmt: skip
from benchmarks.crew.lengths import CUT, FINE_TUNED, FROM_SCRATCH
from benchmarks.harness.results import read_result
from mdp.errors import InputError
from partitioner.crew.planning.losses import MEASURED, STEP_SIZES

pytestmark = pytest.mark.torch
STARTS = {FINE_TUNED: "given", FROM_SCRATCH: "drawn", CUT: "cut"}


def test_the_planner_says_what_was_measured() -> None:
    """Of rounds of an eighth or a sixteenth of an epoch, in which all are equally quick."""
    longer = [
        row | {"seed": 0, "rate": 1.0, "method": TODAY if row["rounds"] else GRADIENTS}
        for row in read_result("crew-lengths")["rows"]
        if row["rounds"] in (0, 8)
    ]
    rows = read_result("crew-factors")["rows"]
    assert {row["seed"] for row in rows} == {0, 1, 2}
    found: dict[tuple[str, str], list[float]] = {}
    for some in (longer, rows):
        for data, start, method, paces in {key_of(row)[:4] for row in some}:
            if paces == EQUAL and method in (TODAY, SCALED):
                compared = compare(some, (data, start, method, paces))
                key = STARTS[start], "auto" if method == SCALED else "given"
                both = (compared.default, compared.best)
                found.setdefault(key, []).extend(one for one in both if one is not None)
    assert {k: (round(min(v), 1), round(max(v), 1)) for k, v in found.items()} == MEASURED


def test_the_planner_proposes_the_step_size_that_lost_less() -> None:
    rows = read_result("crew-factors")["rows"]
    starts = {key_of(row).start for row in rows}
    for start in starts:
        data = sorted({key_of(row).data for row in rows if key_of(row).start == start})
        lost: dict[str, float] = {}
        for method, step_size in ((TODAY, "given"), (SCALED, "auto")):
            best = [compare(rows, (one, start, method, EQUAL)).best for one in data]
            lost[step_size] = mean(one for one in best if one is not None)
        assert STEP_SIZES[STARTS[start]] == min(lost, key=lost.__getitem__)  # type: ignore[index]


def loss_row(rate: float, seed: int, loss: float, method: str = GRADIENTS) -> dict[str, object]:
    return {
        "data": "d", "start": CUT, "method": method, "rate": rate, "seed": seed, "test loss": loss,
    }  # fmt: skip


def test_each_side_is_at_its_best_step_size_of_those_with_most_seeds() -> None:
    rows = [
        loss_row(1.0, 0, 2.0),
        loss_row(1.0, 1, 2.2),
        loss_row(2.0, 0, 1.0),
        loss_row(4.0, 0, 1.8),
        loss_row(4.0, 1, 2.0),
    ]
    rows += [
        loss_row(1.0, 0, 2.1, TODAY),
        loss_row(1.0, 1, 2.2, TODAY),
        loss_row(2.0, 0, 0.1, TODAY),
    ]
    found = compare(rows, ("d", CUT, TODAY, EQUAL))
    # 2.0 has one seed alone.
    assert found.multiples == (1.0, 4.0)
    assert found.seeds == 2
    assert found.default == pytest.approx(100 * ((2.1 / 2 - 1) + 0) / 2)
    assert found.best == pytest.approx(100 * ((2.1 / 1.8 - 1) + (2.2 / 2 - 1)) / 2)
    assert compare(rows, ("d", FINE_TUNED, TODAY, EQUAL)) == (None, None, None, 0, None)


def test_the_first_seed_tries_all_step_sizes_and_others_its_best() -> None:
    counts = {"one": 5_400, "other": 5_000}
    rows: list[dict[str, object]] = []
    done = dict[Key, int]()
    for part in cases_of(counts, rows):
        # Every part is of as many processes.
        assert len({one.picture_s for one in part}) == 1
        for one in part:
            key = key_of_case(one)
            done[key] = done.get(key, 0) + 1
            # Gradients are best at four times the default step size, others at twice.
            best = 4.0 if key.method == GRADIENTS else 2.0
            loss = abs(key.rate - best)
            rows.append({**key._asdict(), "test loss": loss})
    first = {key for key in done if key.seed == 0}
    of_rounds = [key for key in first if key.method == SCALED]
    assert len(of_rounds) == 2 * len(GRID) * 2 * 4
    assert len([key for key in first if key.method == GRADIENTS]) == 2 * len(GRID) * 4
    # Where four times were not tried yet, the best of what was stands in for it.
    others = {key for key in done if key.seed}
    assert {key.rate for key in others if key.method == SCALED} == {2.0, 1.0}
    assert {key.rate for key in others if key.method == GRADIENTS} == {2.0, 4.0}
    for data, start, paces in product(counts, GRID, (EQUAL, UNEQUAL)):
        seeds = {k.seed for k in others if (k.data, k.start, k.paces) == (data, start, paces)}
        assert seeds == {1, 2}
    unequal = case("one", CUT, SCALED, 1.0, 0, 5_400, UNEQUAL).picture_s
    assert [unequal[0] / s for s in unequal] == [1, 1 / 2, 1 / 4]


def test_a_result_of_other_pictures_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "crew-factors.json"
    assert take_up(path, {"d": 10}) == []
    path.write_text('{"pictures": {"d": 10}, "rows": [{"method": "gradients"}]}')
    assert take_up(path, {"d": 10}) == [{"method": "gradients"}]
    with pytest.raises(
        InputError, match=r"expected a result of \{'d': 11\} pictures, found .* --anew"
    ):
        take_up(path, {"d": 11})
