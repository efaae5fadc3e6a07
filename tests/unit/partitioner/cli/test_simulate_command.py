"""`mdp-partition simulate` as a user sees it."""

import json
from functools import partial
from pathlib import Path

import msgspec
import pytest

from mdp.files import write_toml
from mdp.testing.bundles import colour_plan, subset_accuracy, write_bundle
from partitioner.estimates.network import request_bytes
from tests.unit.partitioner.cli.conftest import Run

NAMES = ("n100", "raspberry-pi-5", "laptop-cpu")


def write_quiet(folder: Path) -> None:
    """A file of devices and links that never vary."""
    (folder / "quiet.toml").write_text("sigma = 0.0\njitter_ms = 0.0\n")


@pytest.fixture
def simulated(run: Run, tmp_path: Path) -> Run:
    """Run `simulate` beside a bundle and a plan of shipped profiles' devices."""
    write_bundle(tmp_path / "bundle", devices=NAMES)
    write_toml(tmp_path / "plan.toml", colour_plan(NAMES))
    write_quiet(tmp_path)
    return partial(run, "simulate", "--requests", 200)


QUIET = ("--assume", "quiet.toml")


def test_json_has_everything(simulated: Run) -> None:
    code, out, err = simulated(
        "--bundle", "bundle", "--deadline-ms", "20", "40", "--rate", "50", "--clients", "3",
        "--lose", "n100", "--add", "n100=1", "--hedge-ms", "1", "--seed", "7", "--json", *QUIET,
    )  # fmt: skip
    assert code == 0, err
    told = json.loads(out)
    assert told["accuracy_source"] == "as measured on 100 pictures of colours"
    assert told["load"] == {
        "requests": 200,
        "clients": 3,
        "rate_per_s": 50.0,
        "think_s": 0.0,
        "burst": 1.0,
    }
    assert (told["seed"], told["assumed"]["sigma"]) == (7, 0.0)
    first, second = told["deadlines"]
    assert (first["deadline_ms"], second["deadline_ms"]) == (20.0, 40.0)
    assert list(first["what_if"]) == [
        "without n100",
        "with n100/added for sub-model 1",
        "with n100/added for sub-model 1, hedged after 1 ms",
    ]
    assert first["base"]["accuracy"] == pytest.approx(subset_accuracy((0, 1, 2)).stacked)
    assert first["what_if"]["without n100"]["modes"] == {"stacked": 1.0}
    assert set(first["base"]["latency_ms"]) == {"p50", "p90", "p99", "p99.9", "max"}
    assert set(first["base"]["devices"]) == set(NAMES)
    hedged = first["what_if"]["with n100/added for sub-model 1, hedged after 1 ms"]
    assert hedged["devices"]["n100/added"]["asked"] > 0


def test_the_same_seed_tells_the_same(simulated: Run) -> None:
    asked = ("--bundle", "bundle", "--deadline-ms", 3, "--json", "--seed")
    assert simulated(*asked, 3)[1] == simulated(*asked, 3)[1] != simulated(*asked, 4)[1]


def test_a_client_s_port_is_the_plan_s_unless_it_is_given(simulated: Run, tmp_path: Path) -> None:
    plan = msgspec.structs.replace(colour_plan(NAMES), client_bps=1e6)
    write_toml(tmp_path / "narrow.toml", plan)
    write_bundle(tmp_path / "narrow", devices=NAMES)
    manifest = tmp_path / "narrow" / "manifest.json"
    told = json.loads(manifest.read_text())
    told["plan"]["client_bps"] = 1e6
    manifest.write_text(json.dumps(told))

    def latest_ms(*options: object) -> tuple[float | None, float]:
        code, out, err = simulated(*options, "--deadline-ms", 500, "--json", *QUIET)
        assert code == 0, err
        told = json.loads(out)
        return told["client_bps"], told["deadlines"][0]["base"]["latency_ms"]["max"]

    port_bps, narrow_ms = latest_ms("--plan", "narrow.toml")
    free_bps, free_ms = latest_ms("--plan", "plan.toml")
    sent = [request_bytes(a.vit.image_size, a.encoding) for a in plan.assignments]
    crops_ms = sum(sent) * 8e3 / 1e6
    assert (port_bps, free_bps) == (1e6, None)
    assert narrow_ms > crops_ms > free_ms
    port_bps, bundle_ms = latest_ms("--bundle", "narrow")
    assert port_bps == 1e6
    # Its three classes make shorter replies than the thousand that a plan is taken to be for.
    assert narrow_ms > bundle_ms > crops_ms
    assert latest_ms("--plan", "narrow.toml", "--client-mbit", "inf") == (None, free_ms)
    assert latest_ms("--plan", "plan.toml", "--client-mbit", 1) == (1e6, narrow_ms)
    _, out, _ = simulated("--plan", "narrow.toml", "--deadline-ms", 500)
    assert "crops of a client share its port of 1 Mbit/s" in out


def test_tables_for_people(simulated: Run) -> None:
    code, out, err = simulated("--plan", "plan.toml", "--deadline-ms", "20", "--replicas", "2")
    assert code == 0, err
    for words in (
        "plan.toml, simulated: 200 requests, 1 client, one request at a time",
        "without",
        "raspberry-pi-5/2",
        "not known: the plan predicts none",
        "virtual time:",
    ):
        assert words in " ".join(out.split()), words
    assert "simulating" in err


def test_many_devices_are_not_lost_one_by_one(simulated: Run) -> None:
    code, out, _ = simulated(
        "--bundle", "bundle", "--deadline-ms", 20, "--replicas", 6, "--clients", 6, "--json"
    )
    told = json.loads(out)
    assert code == 0
    assert told["deadlines"][0]["what_if"] == {}
    assert len(told["deadlines"][0]["base"]["devices"]) == 18


SOURCE = ("--bundle", "bundle")
PLAN = ("--plan", "plan.toml")
SHIPPED = "desktop-gpu, jetson-orin-nano, laptop-cpu, n100, raspberry-pi-5"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((), "expected either --bundle or --plan"),
        ((*SOURCE, *PLAN), "expected either --bundle or --plan"),
        ((*SOURCE, "--deadline-ms", 0), "--deadline-ms: expected a number above 0, got 0"),
        ((*SOURCE, "--deadline-ms", "nan"), "--deadline-ms: expected a number above 0, got nan"),
        (
            (*SOURCE, "--deadline-ms", 1e9),
            "deadline_ms: expected more than 0 and at most 3,600,000, got 1e+09",
        ),
        ((*SOURCE, "--clients", 0), "--clients: expected at least 1, got 0"),
        ((*SOURCE, "--client-mbit", "nan"), "--client-mbit: expected a number above 0, got nan"),
        ((*SOURCE, "--rate", 0), "--rate: expected a number above 0, got 0"),
        (
            (*SOURCE, "--lose", "toaster"),
            f"--lose: expected one of {', '.join(NAMES[:2])}, laptop-cpu, got 'toaster'",
        ),
        (
            (*SOURCE, "--add", "toaster"),
            f"toaster: neither a file nor a shipped profile (these are: {SHIPPED})",
        ),
        ((*SOURCE, "--add", "n100=3"), "--add n100=3: expected a sub-model from 0 to 2 after '='"),
        (
            (*SOURCE, "--hedge-ms", 5),
            "--hedge-ms: no sub-model has a replica; see --replicas and --add",
        ),
        (
            (*SOURCE, "--assume", "none.toml"),
            "none.toml: cannot be read: No such file or directory",
        ),
    ],
)
def test_bad_input_is_one_line(simulated: Run, options: tuple[object, ...], line: str) -> None:
    deadline = () if "--deadline-ms" in options else ("--deadline-ms", 9)
    assert simulated(*options, *deadline) == (2, "", f"mdp-partition: {line}\n")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("sigma = 4.0", "Expected `float` <= 3.0 - at `$.sigma`, found 4"),
        ("loss = nan", "Expected `float` >= 0.0 - at `$.loss`, found nan"),
        ("mean_down_s = 0.0", "Expected `float` > 0.0 - at `$.mean_down_s`, found 0"),
        ("jitter = 1.0", "unknown"),
    ],
)
def test_an_assumption_is_in_its_range(
    simulated: Run, tmp_path: Path, content: str, line: str
) -> None:
    (tmp_path / "assumed.toml").write_text(content)
    code, out, err = simulated(*SOURCE, "--deadline-ms", 9, "--assume", "assumed.toml")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("mdp-partition: assumed.toml: ")
    assert line in err


def test_assumptions_of_a_file_are_taken(simulated: Run, tmp_path: Path) -> None:
    (tmp_path / "assumed.toml").write_text("loss = 0.25\ndetect_s = 1.0\n")
    asked = ("--bundle", "bundle", "--deadline-ms", 9, "--json")
    code, out, err = simulated(*asked, "--assume", "assumed.toml")
    assert code == 0, err
    assert json.loads(out)["assumed"] == {
        "sigma": None, "jitter_ms": None, "loss": 0.25, "mean_down_s": 10.0, "detect_s": 1.0,
    }  # fmt: skip


def test_rungs_are_shown_beside_each_alone(run: Run, tmp_path: Path) -> None:
    write_quiet(tmp_path)
    write_bundle(tmp_path / "ladder", devices=NAMES, rungs=3)
    asked = ("simulate", "--bundle", "ladder", "--requests", 2000, "--deadline-ms", 12, *QUIET)
    code, out, err = run(*asked, "--rate", 150, "--burst", 15, "--clients", 3, "--json")
    assert code == 0, err
    (told,) = json.loads(out)["deadlines"]
    base, top, lowest = (
        told["base"], *(told["what_if"][f"always the {name} rung"] for name in ("top", "lowest")),
    )  # fmt: skip
    assert 0 < base["lowered"] < 1
    assert (top["lowered"], lowest["lowered"]) == (0, lowest["answered"])
    assert base["answered"] > top["answered"]
    assert base["accuracy"] > max(top["accuracy"], lowest["accuracy"])
    code, out, _ = run(*asked, "--rate", 150, "--burst", 15)
    assert code == 0
    assert "lowered" in out
    assert "15 times as many in each tenth second" in " ".join(out.split())


def test_a_burst_is_of_a_rate(simulated: Run) -> None:
    code, _, err = simulated("--bundle", "bundle", "--deadline-ms", 20, "--burst", 10)
    assert (code, "--burst: expected --rate beside it" in err) == (2, True)
    code, _, err = simulated("--bundle", "bundle", "--deadline-ms", 20, "--rate", 9, "--burst", 0)
    assert (code, "--burst: expected a number above 0, got 0" in err) == (2, True)
