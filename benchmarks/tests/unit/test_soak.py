"""The soak detects mixed, doubled and lost answers, leaks and growth."""

import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from benchmarks.harness.results import read_result
from benchmarks.soak import page
from benchmarks.soak.__main__ import failures, main
from benchmarks.soak.client import Asker, numbers_of, play
from benchmarks.soak.faults import LASTS_S, QUIET_S, count_faults, schedule
from benchmarks.soak.over_http import parse_infer
from benchmarks.soak.pictures import DEVICES, SIZES, draw, label_of, picture_of, write_colour_bundle
from benchmarks.soak.tally import Answer, CallFailed, Outcome, Tally, find_unaccounted, verdict
from benchmarks.soak.watch import Held, find_growth, trends
from mdp.files import write_json
from mdp.formats.bundle import Bundle, model_path
from mdp.fusion.fuse import Contribution, fuse, list_subsets, probabilities, weights_for


def test_an_answer_with_another_pictures_part_is_recognised(tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    bundle = write_colour_bundle(tmp_path / "bundle")
    other_bundle = write_colour_bundle(tmp_path / "other", begin="other:", opposite=True)
    truth = {bundle.digest: "", other_bundle.digest: "other:"}
    models = {
        each.digest: [ort.InferenceSession(each.path / model_path(k)) for k in range(len(SIZES))]
        for each in (bundle, other_bundle)
    }

    def found(
        numbers: dict[int, int], expected: int, named: Bundle = bundle, foreign: int | None = None
    ) -> str:
        """The verdict on the answer of these pictures, by member, as that for `expected`.

        Member `foreign` computes with the bundle that the answer does not name.
        """
        given = {}
        for k, number in numbers.items():
            by = named
            if k == foreign:
                by = other_bundle if named is bundle else bundle
            crop = picture_of(number)[None, : SIZES[k], : SIZES[k]]
            boost, bag = models[by.digest][k].run(["boost", "bag"], {"images": crop})
            given[k] = Contribution(boost[0], bag[0])
        weights = weights_for(sorted(given), "stacked", named.fusion_weights())
        scores = probabilities(fuse(given, weights))
        label, probability = named.manifest.labels[int(scores.argmax())], float(scores.max())
        fused = answer(0, probability, label=label, bundle=named.digest)
        return verdict(expected, fused, truth)

    chance, number = random.Random(0), 0
    for _ in range(25):
        other, number = number, draw(chance, number)
        for members in list_subsets(range(3)):
            same = dict.fromkeys(members, number)
            for named in (bundle, other_bundle):
                assert found(same, number, named) == "right"
                assert found(same, number, named, foreign=chance.choice(members)) != "right"
            assert found(same, other) == "wrong"
            if len(members) > 1:
                assert found(same | {chance.choice(members): other}, number) != "right"


def test_a_label_of_another_bundle_than_the_one_named_is_wrong() -> None:
    truth = {"one": "", "two": "second:"}
    second = answer(3, label=label_of(3, "second:"), bundle="two")
    assert verdict(3, second, truth) == "right"
    assert verdict(3, structs.replace(second, bundle="one"), truth) == "wrong"
    assert verdict(3, structs.replace(second, bundle="none"), truth) == "wrong"
    # One that names no bundle may be of any.
    assert verdict(3, structs.replace(second, bundle=None), truth) == "right"
    assert verdict(4, structs.replace(second, bundle=None), truth) == "wrong"


def answer(number: int, probability: float = 1.0, **changes: Any) -> Answer:
    known: dict[str, Any] = {"label": label_of(number), "probability": probability}
    return Answer(**known | {"bundle": "one", "used": DEVICES, "missing": ()} | changes)


def test_wrong_mixed_doubled_and_lost_calls_are_counted() -> None:
    tally = Tally(100.0, {"one": ""})
    right, wrong, mixed, doubled, failed, lost = (tally.begin(number) for number in range(6))
    tally.end(right, answer(0), 0.01)
    tally.end(wrong, answer(7), 0.01)
    tally.end(mixed, answer(2, 0.9), 0.01)
    tally.end(doubled, answer(3), 0.01)
    tally.end(doubled, answer(3), 0.01)
    tally.end(failed, CallFailed("DeadlineExceeded"), 0.25)
    result = tally.result({})
    assert list(tally.open) == [lost]
    assert result["counts"] == {
        "begun": 6, "ended": 5, "complete": 4, "error": 1, "wrong": 2, "mixed": 1, "late": 1
    }  # fmt: skip
    assert result["overshoot_ms"] == pytest.approx(150)
    assert [text.split(":")[0] for text in result["wrong"]] == [
        f"call {wrong}", f"call {mixed}", f"call {doubled} ended twice",
    ]  # fmt: skip


def test_a_device_that_is_neither_used_nor_missing_is_found() -> None:
    whole = answer(0, used=("alpha", "gamma"), missing=("beta",))
    assert find_unaccounted(whole) == []
    assert find_unaccounted(answer(0, used=("alpha", "beta/second"), missing=("gamma",))) == []
    assert find_unaccounted(answer(0, used=("alpha", "gamma"))) == ["beta"]
    # Told for several pictures together.
    assert find_unaccounted(answer(0, used=("alpha",), missing=None)) == []
    tally = Tally(100.0, {"one": ""})
    tally.end(tally.begin(0), answer(0, used=("alpha", "gamma")), 0.01)
    tally.end(tally.begin(0), whole, 0.01)
    assert (tally.counts["unaccounted"], tally.counts["partial"]) == (1, 2)


def test_late_calls_and_by_how_much() -> None:
    tally = Tally(100.0, {"one": ""})
    for took_s in (0.05, 0.1, *[0.11] * 199, 0.3):
        tally.end(tally.begin(0), answer(0), took_s)
    result = tally.result({})
    assert result["counts"]["late"] == 200
    assert result["late_p50_ms"] == pytest.approx(10, rel=0.1)
    assert result["late_p99_ms"] == pytest.approx(10, rel=0.1)
    assert result["overshoot_ms"] == pytest.approx(200)


def test_what_http_answers_is_read() -> None:
    told: dict[str, Any] = {
        "outputs": [
            {"name": "labels", "shape": [2, 2], "data": ["0-0-1", "x", "0-0-2", "y"]},
            {"name": "probabilities", "shape": [2, 2], "data": [1.0, 0.0, 0.75, 0.25]},
        ],
        "parameters": {"used": "alpha", "missing": "beta: lost; or so; gamma: late"},
    }
    first, second = parse_infer(told)
    assert (first.label, second.label, second.probability) == ("0-0-1", "0-0-2", 0.75)
    # Of several pictures, it is not told which lacks a device, unless there is an output for that.
    assert (first.used, first.missing) == (["alpha"], None)
    told["outputs"].append({"name": "used", "shape": [2], "data": ["alpha, beta", "alpha"]})
    first, second = parse_infer(told)
    assert (first.used, first.missing) == (["alpha", "beta"], ["gamma"])
    assert (second.used, second.missing) == (["alpha"], ["beta", "gamma"])
    for output in told["outputs"][:2]:
        output |= {"shape": [1, 2], "data": output["data"][:2]}
    (alone,) = parse_infer(told | {"outputs": told["outputs"][:2]})
    assert (alone.used, alone.missing) == (["alpha"], ["beta", "gamma"])
    # A member with a replica is missing by the name of what was asked.
    told["parameters"]["missing"] = "beta/second: late; gamma: late"
    (alone,) = parse_infer(told | {"outputs": told["outputs"][:2]})
    assert alone.missing == ["beta", "gamma"]
    told["outputs"][2]["data"] = ["alpha, beta/second"]
    (alone,) = parse_infer(told)
    assert alone.missing == ["gamma"]


def test_a_load_counts_what_is_asked_and_what_is_held_back() -> None:
    async def ask(numbers: Sequence[int]) -> list[Outcome]:
        return [(answer(number), 0.01) for number in numbers]

    async def never(numbers: Sequence[int]) -> list[Outcome]:
        await asyncio.sleep(60)
        raise AssertionError

    tally, numbers = Tally(100.0, {"one": ""}), numbers_of(1)
    load = {"seconds": 0.3, "rate": None, "at_once": 2}
    asyncio.run(play(load, tally, Asker(ask=ask, threads=1, sizes=(3, 1)), numbers))
    assert tally.counts["begun"] == tally.counts["ended"] == tally.counts["complete"] > 0
    stuck = Tally(100.0, {"one": ""})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.soak.client.CONNECT_S", 0.0)
        load = {"seconds": 0.1, "rate": 1000.0, "at_once": 2}
        patch.setattr("benchmarks.soak.client.HELD_S", 0.001)
        asyncio.run(play(load, stuck, Asker(ask=never), numbers))
    # Neither ended nor forgotten, and no more than may be under way.
    assert 0 < stuck.counts["begun"] == len(stuck.open) <= 8


def test_a_schedule_follows_its_seed_and_ends_early_enough_to_heal() -> None:
    ending = {"alpha": 1.0, "gateway": 1 / 3, "gamma": 0.0}
    faults = schedule(3, 300.0, ending)
    assert faults == schedule(3, 300.0, ending)
    assert {fault.kind for fault in faults if fault.name == "gamma"} == {"stop"}
    assert {fault.kind for fault in faults} == {"kill", "stop", "restart"}
    ended = [fault for fault in faults if fault.name == "gateway" and fault.kind != "stop"]
    assert ended
    assert all(fault.at_s < 100 for fault in ended)
    assert sum(count_faults(faults)["gamma"].values()) == count_faults(faults)["gamma"]["stop"] > 0
    for name in ending:
        own = [fault for fault in faults if fault.name == name]
        assert all(one.at_s + one.lasts_s <= after.at_s for one, after in pairwise(own))
        assert own[-1].at_s + LASTS_S[1] <= 300 - QUIET_S


def make_held(at_s: float, mib: float = 80.0, pid: int = 1, **changes: int) -> Held:
    counts = {"files": 20, "sockets": 5, "threads": 6} | changes
    return Held(at_s=at_s, process="alpha", pid=pid, rss_bytes=round(mib * 2**20), **counts)


def test_growth_of_long_lived_processes_and_unreleased_sockets_are_found() -> None:
    noise = np.random.default_rng(0).normal(0, 0.2, 1800)
    grows = [make_held(t, 80 + t / 3600 * 6 + noise[int(t)]) for t in np.arange(1800.0)]
    warms = [make_held(t, 50 if t < 180 else 80, pid=2) for t in np.arange(1800.0)]
    short = [make_held(t, pid=3) for t in np.arange(800.0)]
    growing, flat = trends([*grows, *warms, *short], 1800.0)
    assert growing["mib_per_hour"] == pytest.approx(6, abs=2 * growing["mib_per_hour_margin"])
    assert 0 < growing["mib_per_hour_margin"] < 0.5
    assert flat["mib_per_hour"] == 0
    steady = trends([make_held(t + 0.1, 56.82, pid=4) for t in np.arange(107.0)], 110.0)
    assert [(row["mib_per_hour"], row["mib_per_hour_margin"]) for row in steady] == [(0.0, 0.0)]
    before = {"alpha": make_held(0), "gone": make_held(0)}
    assert find_growth(before, {"alpha": make_held(1, files=19)}) == []
    assert find_growth(before, {"alpha": make_held(1, sockets=6)}) == ["alpha: sockets 5 -> 6"]


CLIENT = {
    "style": "sync", "open": 0, "counts": {"begun": 9, "ended": 9, "complete": 9}, "wrong": [],
    "overshoot_ms": 0.0, "counters": {"malformed": 0}, "reasons": {"HTTP 503": 2},
}  # fmt: skip
TREND = {"process": "alpha", "seconds": 1800, "mib_per_hour": 1.0, "mib_per_hour_margin": 1.0}
WELL: dict[str, Any] = {
    "clients": [CLIENT], "healed": True, "grown": [], "trends": [TREND], "complaints": [],
    "calm": False,
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
            {"counters": {"malformed": 2}}, {"reasons": {"HTTP 500": 1}},
            {"counts": {"begun": 1, "ended": 1, "error": 1}},
        )),
    ],
)  # fmt: skip
def test_each_broken_promise_fails_a_run(changes: dict[str, Any]) -> None:
    assert failures(WELL) == []
    assert len(failures(WELL | changes)) == 1


@pytest.mark.parametrize(
    ("counts", "overshoot_ms", "said"),
    [
        ({"late": 1}, 2.5, "1 of 9 calls late, by 2.5 ms at most"),
        ({"partial": 2}, 0.0, "2 of 9 calls without a whole answer"),
        ({"error": 3}, 0.0, "3 of 9 calls without a whole answer"),
    ],
)
def test_what_a_run_with_faults_forgives_fails_a_calm_one(
    counts: dict[str, int], overshoot_ms: float, said: str
) -> None:
    client = CLIENT | {"counts": {"begun": 9, "ended": 9, "complete": 6} | counts}
    disturbed = WELL | {"clients": [client | {"overshoot_ms": overshoot_ms}]}
    assert failures(disturbed) == []
    assert failures(disturbed | {"calm": True}) == [f"the sync client: {said}"]
    assert failures(WELL | {"calm": True}) == []


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--share", "0", "--share: expected a number above 0 and up to 1, got 0"),
        ("--share", "1.5", "--share: expected a number above 0 and up to 1, got 1.5"),
        ("--share", "nan", "--share: expected a number above 0 and up to 1, got nan"),
        ("--minutes", "-1", "--minutes: expected a number above 0, got -1"),
        ("--minutes", "inf", "--minutes: expected a number above 0, got inf"),
    ],
)
def test_a_share_or_a_time_that_cannot_be_is_one_line(
    option: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["soak", option, value])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == said


def test_a_calm_run_has_figures_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = read_result("soak")
    for place in ("soak.page", "harness.results"):
        monkeypatch.setattr(f"benchmarks.{place}.RESULTS", tmp_path)
    write_json(tmp_path / "soak.json", kept)
    assert "of capacity" not in page.figures()
    write_json(tmp_path / "soak-calm.json", kept | {"share": 0.9, "calm": True})
    assert "Nothing killed or stopped, 90% of capacity." in page.figures()
