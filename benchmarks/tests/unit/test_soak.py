"""The soak detects mixed, doubled and lost answers, leaks and growth."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.soak.__main__ import failures
from benchmarks.soak.client import Tally
from benchmarks.soak.faults import LASTS_S, QUIET_S, schedule
from benchmarks.soak.pictures import CERTAIN, SIZES, draw, label_of, picture_of, write_colour_bundle
from benchmarks.soak.watch import Held, grown, trends
from mdp.errors import DeadlineExceeded
from mdp.formats.bundle import model_path
from mdp.fusion.fuse import Contribution, fuse, listed_subsets, probabilities, weights_for
from mdp.requests.prediction import Prediction


def test_an_answer_with_another_pictures_part_is_recognised(tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    bundle = write_colour_bundle(tmp_path / "bundle")
    models = [ort.InferenceSession(bundle.path / model_path(k)) for k in range(len(SIZES))]

    def right(numbers: dict[int, int], expected: int) -> bool:
        """Whether the answer of these pictures, by member, passes as that of `expected`."""
        given = {}
        for k, number in numbers.items():
            crop = picture_of(number)[None, : SIZES[k], : SIZES[k]]
            boost, bag = models[k].run(["boost", "bag"], {"images": crop})
            given[k] = Contribution(boost[0], bag[0])
        weights = weights_for(sorted(given), "stacked", bundle.fusion_weights())
        scores = probabilities(fuse(given, weights))
        label = bundle.manifest.labels[int(scores.argmax())]
        return label == label_of(expected) and scores.max() >= CERTAIN

    chance, number = random.Random(0), 0
    for _ in range(25):
        other, number = number, draw(chance, number)
        for members in listed_subsets(range(3)):
            assert right(dict.fromkeys(members, number), number)
            if len(members) > 1:
                stray = {chance.choice(members): other}
                assert not right(dict.fromkeys(members, number) | stray, number)


def prediction(number: int, probability: float = 1.0) -> Prediction:
    return Prediction(
        label=label_of(number), probability=probability, top=((label_of(number), probability),),
        mode="stacked", used=("alpha",), missing={}, expected_accuracy=None, latency_ms=1.0,
        deadline_ms=100.0, members=(),
    )  # fmt: skip


def test_wrong_doubled_and_lost_calls_are_counted() -> None:
    tally = Tally(100.0)
    right, mixed, unsure, doubled, failed, lost = (tally.begin(number) for number in range(6))
    tally.end(right, prediction(0), 0.01)
    tally.end(mixed, prediction(7), 0.01)
    tally.end(unsure, prediction(2, 0.9), 0.01)
    tally.end(doubled, prediction(3), 0.01)
    tally.end(doubled, prediction(3), 0.01)
    tally.end(failed, DeadlineExceeded("no", {}), 0.25)
    result = tally.result({})
    assert list(tally.open) == [lost]
    assert result["counts"] == {"begun": 6, "ended": 5, "complete": 4, "error": 1, "wrong": 3}
    assert result["overshoot_ms"] == pytest.approx(150)
    assert [text.split(":")[0] for text in result["wrong"]] == [
        f"call {mixed}", f"call {unsure}", f"call {doubled} ended twice",
    ]  # fmt: skip


def test_a_schedule_follows_its_seed_and_ends_early_enough_to_heal() -> None:
    agents = ["alpha", "beta", "gamma"]
    faults = schedule(3, 300.0, agents, "gamma")
    assert faults == schedule(3, 300.0, agents, "gamma")
    assert {fault.kind for fault in faults if fault.agent == "gamma"} == {"stop"}
    assert {fault.kind for fault in faults} == {"kill", "stop", "restart"}
    for agent in agents:
        own = [fault for fault in faults if fault.agent == agent]
        assert all(one.at_s + one.lasts_s <= after.at_s for one, after in pairwise(own))
        assert own[-1].at_s + LASTS_S[1] <= 300 - QUIET_S


def held(at_s: float, mib: float = 80.0, pid: int = 1, **changes: int) -> Held:
    counts = {"files": 20, "sockets": 5, "threads": 6} | changes
    return Held(at_s=at_s, process="alpha", pid=pid, rss_bytes=round(mib * 2**20), **counts)


def test_growth_of_long_lived_processes_and_unreleased_sockets_are_found() -> None:
    noise = np.random.default_rng(0).normal(0, 0.2, 1800)
    grows = [held(t, 80 + t / 3600 * 6 + noise[int(t)]) for t in np.arange(1800.0)]
    warms = [held(t, 50 if t < 180 else 80, pid=2) for t in np.arange(1800.0)]
    short = [held(t, pid=3) for t in np.arange(800.0)]
    growing, flat = trends([*grows, *warms, *short], 1800.0)
    assert growing["mib_per_hour"] == pytest.approx(6, abs=2 * growing["mib_per_hour_margin"])
    assert 0 < growing["mib_per_hour_margin"] < 0.5
    assert flat["mib_per_hour"] == 0
    before = {"alpha": held(0), "gone": held(0)}
    assert grown(before, {"alpha": held(1, files=19)}) == []
    assert grown(before, {"alpha": held(1, sockets=6)}) == ["alpha: sockets 5 -> 6"]


CLIENT = {
    "style": "sync", "open": 0, "counts": {"begun": 9, "ended": 9, "complete": 9}, "wrong": [],
    "overshoot_ms": 0.0, "counters": {"malformed": 0},
}  # fmt: skip
TREND = {"process": "alpha", "seconds": 1800, "mib_per_hour": 1.0, "mib_per_hour_margin": 1.0}
WELL: dict[str, Any] = {
    "clients": [CLIENT], "healed": True, "grown": [], "trends": [TREND], "complaints": [],
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"healed": False},
        {"complaints": ["alpha ended with 1"]},
        {"grown": ["alpha: files 1 -> 2"]},
        {"trends": [TREND | {"mib_per_hour_margin": 40.0}]},
        *({"clients": [CLIENT | change]} for change in (
            {"open": 1}, {"wrong": ["call 3 ended twice"]}, {"overshoot_ms": 30100.0},
            {"counters": {"malformed": 2}}, {"counts": {"begun": 1, "ended": 1, "error": 1}},
        )),
    ],
)  # fmt: skip
def test_each_broken_promise_fails_a_run(changes: dict[str, Any]) -> None:
    assert failures(WELL) == []
    assert len(failures(WELL | changes)) == 1
