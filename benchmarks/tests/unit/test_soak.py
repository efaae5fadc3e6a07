"""What the soak would notice: mixed, doubled and lost answers, leaks and growth."""

import io
import json
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from benchmarks.soak.__main__ import failures
from benchmarks.soak.client import Tally
from benchmarks.soak.faults import LASTS_S, QUIET_S, schedule
from benchmarks.soak.page import draw as draw_picture
from benchmarks.soak.page import markdown
from benchmarks.soak.pictures import (
    CERTAIN,
    LEVELS,
    SIZES,
    draw,
    label_of,
    picture_of,
    write_colour_bundle,
)
from benchmarks.soak.watch import Held, grown, slope_per_hour, trends
from mdp.errors import DeadlineExceeded
from mdp.formats.bundle import Bundle, model_path
from mdp.fusion.fuse import Contribution, arrival_subsets, fuse, probabilities, weights_for
from mdp.requests.prediction import Prediction

COLOURS = LEVELS**3


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_colour_bundle(tmp_path_factory.mktemp("soak") / "bundle")


@pytest.fixture(scope="module")
def contributions(bundle: Bundle) -> list[list[Contribution]]:
    """What each member says of each colour: `[member][colour]`."""
    ort = pytest.importorskip("onnxruntime")
    said = []
    for k, size in enumerate(SIZES):
        session = ort.InferenceSession(
            str(bundle.path / model_path(k)), providers=["CPUExecutionProvider"]
        )
        crops = np.stack([picture_of(number)[:size, :size] for number in range(COLOURS)])
        boost, bag = session.run(["boost", "bag"], {"images": crops})
        said.append([Contribution(a, b) for a, b in zip(boost, bag, strict=True)])
    return said


def answer(bundle: Bundle, given: dict[int, Contribution]) -> tuple[str, float]:
    weights = weights_for(sorted(given), "stacked", bundle.fusion_weights())
    scores = probabilities(fuse(given, weights))
    return bundle.manifest.labels[int(scores.argmax())], float(scores.max())


def test_every_picture_is_known_by_every_subset_of_members(
    bundle: Bundle, contributions: list[list[Contribution]]
) -> None:
    for number in range(0, COLOURS, 7):
        for members in arrival_subsets(range(3)):
            label, probability = answer(bundle, {k: contributions[k][number] for k in members})
            assert label == label_of(number)
            assert probability >= CERTAIN


def test_an_answer_with_another_pictures_part_is_never_taken_for_right(
    bundle: Bundle, contributions: list[list[Contribution]]
) -> None:
    chance, number = random.Random(0), 0
    for _ in range(300):
        other, number = number, draw(chance, number)
        for members in ((0, 1), (1, 2), (0, 1, 2)):
            given = {k: contributions[k][number] for k in members}
            stray = chance.choice(members)
            given[stray] = contributions[stray][other]
            label, probability = answer(bundle, given)
            assert label != label_of(number) or probability < CERTAIN


def prediction(number: int, probability: float = 1.0) -> Prediction:
    return Prediction(
        label=label_of(number), probability=probability, top=((label_of(number), probability),),
        mode="stacked", used=("alpha",), missing={}, expected_accuracy=None, latency_ms=1.0,
        deadline_ms=100.0, members=(),
    )  # fmt: skip


def test_a_tally_knows_every_call() -> None:
    log = io.StringIO()
    tally = Tally(100.0, log)
    tally.start("soak")
    right, mixed, unsure, doubled, failed, lost = (tally.begin(number) for number in range(6))
    tally.end(right, prediction(0), 0.01)
    tally.end(mixed, prediction(7), 0.01)
    tally.end(unsure, prediction(2, 0.9), 0.01)
    tally.end(doubled, prediction(3), 0.01)
    tally.end(doubled, prediction(3), 0.01)
    tally.end(failed, DeadlineExceeded("no", {}), 0.25)
    tally.say("done", counters={})
    said = json.loads(log.getvalue())
    assert said["open"] == 1 == len(tally.open)
    assert list(tally.open) == [lost]
    assert said["counts"] == {"begun": 6, "ended": 5, "complete": 4, "error": 1, "wrong": 3}
    assert said["reasons"] == {"DeadlineExceeded": 1}
    assert said["overshoot_ms"] == pytest.approx(150)
    assert [text.split(":")[0] for text in said["wrong"]] == [
        f"call {mixed}", f"call {unsure}", f"call {doubled} ended twice",
    ]  # fmt: skip


def test_a_schedule_is_its_seed_s_and_leaves_time_to_heal() -> None:
    agents = ["alpha", "beta", "gamma"]
    faults = schedule(3, 300.0, agents, survivors=["gamma"])
    assert faults == schedule(3, 300.0, agents, survivors=["gamma"])
    assert faults != schedule(4, 300.0, agents, survivors=["gamma"])
    assert {fault.kind for fault in faults if fault.agent == "gamma"} == {"stop"}
    assert {fault.kind for fault in faults} == {"kill", "stop", "restart"}
    for agent in agents:
        own = [fault for fault in faults if fault.agent == agent]
        assert len(own) > 5
        for one, next_one in pairwise(own):
            assert one.at_s + one.lasts_s <= next_one.at_s
        assert own[-1].at_s + LASTS_S[1] <= 300 - QUIET_S


def held(at_s: float, **changes: Any) -> Held:
    known: dict[str, Any] = {
        "who": "alpha",
        "pid": 1,
        "rss_bytes": 80 * 2**20,
        "files": 20,
        "sockets": 5,
    }
    return Held(at_s=at_s, **(known | {"threads": 6} | changes))


def test_a_trend_and_how_sure_it_is() -> None:
    noise = np.random.default_rng(0).normal(0, 0.2, 1800)
    at_s = np.arange(1800.0)
    slope, margin = slope_per_hour(at_s, 80 + at_s / 3600 * 6 + noise)
    assert slope == pytest.approx(6, abs=2 * margin)
    assert 0 < margin < 0.5
    flat, margin = slope_per_hour(at_s, 80 + noise)
    assert abs(flat) < 2 * margin


def test_trends_are_of_those_that_lived_long_and_are_warm() -> None:
    grows = [held(t, rss_bytes=int((80 + t / 100) * 2**20)) for t in np.arange(100.0)]
    warms = [held(t, pid=2, rss_bytes=(50 if t < 10 else 80) * 2**20) for t in np.arange(100.0)]
    short = [held(t, pid=3) for t in np.arange(40.0)]
    rows = trends([*grows, *warms, *short], least_s=50, warm_s=10)
    assert [round(row["mib_per_hour"], 3) for row in rows] == [36, 0]


def test_what_was_not_given_back_is_named() -> None:
    before = {"alpha": held(0), "gone": held(0, who="gone")}
    assert grown(before, {"alpha": held(1, files=19)}) == []
    assert grown(before, {"alpha": held(1, sockets=6, threads=7)}) == [
        "alpha: sockets 5 -> 6", "alpha: threads 6 -> 7",
    ]  # fmt: skip


CLIENT = {
    "style": "sync", "open": 0, "counts": {"begun": 9, "ended": 9, "complete": 9}, "wrong": [],
    "overshoot_ms": 0.0, "counters": {"malformed": 0, "late": 0, "duplicate": 0}, "reasons": {},
    "p50_ms": 3.0, "p99_ms": 9.0, "p999_ms": 12.0,
}  # fmt: skip
TREND = {"who": "alpha", "seconds": 1800, "first_mib": 80.0, "last_mib": 80.0,
         "mib_per_hour": 1.0, "mib_per_hour_margin": 1.0}  # fmt: skip
WELL: dict[str, Any] = {
    "clients": [CLIENT], "healed": True, "grown": [], "trends": [TREND], "complaints": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"healed": False}, ["after the last fault, calls still lack members"]),
        ({"complaints": ["alpha ended with 1"]}, ["alpha ended with 1"]),
        ({"grown": ["alpha: files 1 -> 2"]}, ["more than before the load: alpha: files 1 -> 2"]),
        ({"trends": [TREND | {"mib_per_hour_margin": 40.0}]},
         ["alpha: may have grown by 20.5 MiB over the run"]),
        ({"clients": [CLIENT | {"open": 1}]}, ["the sync client: 9 calls begun, 9 ended"]),
        ({"clients": [CLIENT | {"wrong": ["call 3 ended twice"]}]},
         ["the sync client: call 3 ended twice"]),
        ({"clients": [CLIENT | {"overshoot_ms": 30100.0}]},
         ["the sync client: a call ended 30100 ms after its deadline"]),
        ({"clients": [CLIENT | {"counters": {"malformed": 2}}]},
         ["the sync client: 2 malformed replies"]),
        ({"clients": [CLIENT | {"counts": {"begun": 1, "ended": 1, "error": 1}}]},
         ["the sync client: no answer of all members in the whole run"]),
    ],
)  # fmt: skip
def test_what_breaks_a_run(changes: dict[str, Any], expected: list[str]) -> None:
    assert failures(WELL | changes) == expected


def test_the_page_and_the_picture_show_the_run() -> None:
    pytest.importorskip("matplotlib")
    counts = [[float(t), 10 * t, t, 0] for t in range(120)]
    result = WELL | {
        "minutes": 2.0, "seed": 1, "deadline_ms": 300.0, "faults": [3, 4, 5], "failures": [],
        "machine": {"cores": 2, "processor": "any", "load_before": 0.1, "date": "today"},
        "capacity_per_s": [100.0],
        "before": {"alpha": {"files": 20, "sockets": 5, "threads": 6}}, "after": {},
        "series": {"sync calls": counts, "alpha held": [[t, 80.0, 20, 6] for t in range(120)]},
        "happened": [[3.0, "alpha", "kill"]],
    }  # fmt: skip
    text = markdown(result)
    assert "3 kills, 4 stops, 5 restarts" in text
    assert "**Every promise held.**" in text
    assert "Broken: lost." in markdown(result | {"failures": ["lost"]})
    svg = draw_picture(result).decode()
    assert "resident memory" in svg
    assert draw_picture(result).decode() == svg
