"""`mdp` as a user types it: output, exit codes, and one line for whatever is wrong."""

import base64
import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from mdp.cli import main as cli
from mdp.cli.doctor import tcp_diagnosis
from mdp.formats.bundle import FUSION, MANIFEST, Bundle
from mdp.formats.fleet import new_fleet
from mdp.testing.bundles import DEVICES, LABELS, colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from mdp.transport.greeting import PROBE
from tests.support.bundles import with_novelty
from tests.support.command_lines import run_here
from tests.support.fakes import other_program
from tests.support.fleet import BIN, ROOT, Fleet
from tests.support.pictures import encode_picture, with_orientation

pytestmark = pytest.mark.usefixtures("no_leaks")

PLENTY = ["--deadline-ms", "20000"]
DEAD = "tcp://127.0.0.1:1"
ANY = "127.0.0.1:0"


def mdp(*args: object) -> subprocess.CompletedProcess[str]:
    """Run `mdp` in the checkout."""
    with chdir(ROOT):
        return run_here(cli.main, "mdp", *args)


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Stdout as JSON, a line each; nothing else is there."""
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("commands")
    with Fleet(folder, write_bundle(folder / "bundle")) as fleet:
        fleet.start_all()
        fleet.write()
        yield fleet


@pytest.fixture
def toml(fleet: Fleet) -> Path:
    return fleet.folder / "fleet.toml"


@pytest.fixture
def nobody(fleet: Fleet, tmp_path: Path) -> Path:
    """A fleet file whose devices are all gone."""
    entries = "".join(
        f'[[devices]]\ndevice = "{device}"\naddress = "tcp://127.0.0.1:{k + 1}"\nk = {k}\n'
        for k, device in enumerate(DEVICES)
    )
    path = tmp_path / "nobody.toml"
    path.write_text(f'bundle = "{fleet.bundle}"\n{entries}')
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder per class, two pictures each."""
    folder = tmp_path / "pictures"
    for label in LABELS:
        (folder / label).mkdir(parents=True)
        for number in range(2):
            picture = Image.fromarray(colour_picture(label, 30 + 10 * number, 50))
            picture.save(folder / label / f"{number}.png")
    return folder


def test_classify_prints_what_is_documented(toml: Path, pictures: Path) -> None:
    done = mdp("classify", "--fleet", toml, *PLENTY, pictures, pictures / "red/0.png", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answers = lines(done)
    wanted = [f"{label}/{number}.png" for label in LABELS for number in range(2)]
    wanted.append("red/0.png")
    assert [answer["path"] for answer in answers] == [str(pictures / name) for name in wanted]
    for answer in answers:
        assert answer["label"] == Path(answer["path"]).parent.name
        assert 0 < answer["probability"] <= 1
        assert answer["mode"] == "stacked"
        assert answer["used"] == list(DEVICES)
        assert answer["missing"] == {}
        assert answer["expected_accuracy"] == 1.0
        assert answer["expected_accuracy_pictures"] == 100
        assert 0 < answer["latency_ms"] <= answer["deadline_ms"] == 20000
        for member, device in zip(answer["members"], DEVICES, strict=True):
            assert member["device"] == device
            assert member["compute_ms"] > 0
            assert member["network_ms"] >= 0


def test_odd_files_and_names_take_their_own_place(toml: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    good = encode_picture(colour_picture("red"), "PNG")
    bytes_name = os.fsencode(folder) + b"/e-caf\xe9.png"
    for name, content in (
        ("a.png", good),
        ("b.png", good[:200]),
        ("c.txt", b"I am not a picture"),
        ("d.jpg", with_orientation(6)),
        (os.fsdecode(bytes_name), good),
        ("f\x1b]0;owned\x07.png", good),
        ("g\x9b31m\u202e.png", b"no picture"),
    ):
        (folder / name).write_bytes(content)
    done = mdp("classify", "--fleet", toml, *PLENTY, folder, "--json")
    assert done.returncode == 2
    answers = lines(done)
    assert [Path(answer["path"]).name[0] for answer in answers] == list("abcdefg")
    assert ["label" in answer for answer in answers] == [
        True,
        False,
        False,
        True,
        True,
        True,
        False,
    ]
    assert base64.b64decode(answers[4]["path_bytes"]) == bytes_name
    assert answers[5]["path"] == str(folder / "f\x1b]0;owned\x07.png")
    truncated, text, _ = done.stderr.splitlines()
    assert truncated.startswith(f"mdp: {folder}/b.png: ")
    assert "cannot be decoded" in truncated
    assert text.endswith("c.txt: expected a picture, found no format that is read")
    done = mdp("classify", "--fleet", toml, *PLENTY, folder, tmp_path / "gone.png")
    assert done.returncode == 2
    assert "e-caf?.png: red" in done.stdout
    # Nothing of a name controls the terminal.
    assert "f?]0;owned?.png: red" in done.stdout
    assert "g?31m?.png: " in done.stderr
    assert f"mdp: {tmp_path}/gone.png: no such file" in done.stderr.splitlines()
    assert all(line.isprintable() for line in (done.stdout + done.stderr).splitlines())


def test_classify_appends_to_a_file(toml: Path, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no picture")
    for out in (tmp_path / "seen.csv", tmp_path / "seen.jsonl"):
        words = ["classify", "--fleet", toml, *PLENTY, "--out", out, "--json"]
        first = mdp(*words, pictures / "red/0.png", tmp_path / "broken.png")
        again = mdp(*words, pictures / "blue/1.png")
        assert (first.returncode, again.returncode) == (2, 0)
        printed = [*lines(first), *lines(again)]
    # JSON lines are those that were printed.
    assert [json.loads(line) for line in out.read_text().splitlines()] == printed
    with (tmp_path / "seen.csv").open(newline="") as file:
        red, broken, blue = csv.DictReader(file)
    assert [row["path"] for row in (red, broken, blue)] == [row["path"] for row in printed]
    assert (red["label"], red["used"], red["at_s"], red["time"], red["error"]) == (
        "red", " ".join(DEVICES), "", "", "",
    )  # fmt: skip
    assert float(red["probability"]) == pytest.approx(printed[0]["probability"], abs=0.01)
    assert (broken["label"], broken["error"]) == ("", printed[1]["error"])
    assert blue["label"] == "blue"


def test_a_full_disk_ends_classify(toml: Path, pictures: Path, tmp_path: Path) -> None:
    (tmp_path / "full.jsonl").symlink_to("/dev/full")
    done = mdp("classify", "--fleet", toml, *PLENTY, pictures, "--out", tmp_path / "full.jsonl")
    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr.splitlines() == [
        f"mdp: {tmp_path}/full.jsonl: cannot be written: No space left on device"
    ]


def test_classify_without_any_device(nobody: Path, pictures: Path) -> None:
    done = mdp("classify", "--fleet", nobody, pictures / "red", "--json")
    assert done.returncode == 3
    missing = dict.fromkeys(DEVICES, "unreachable")
    reasons = "alpha, beta, gamma: unreachable"
    paths = [f"{pictures}/red/{number}.png" for number in (0, 1)]
    text = f"no device can answer ({reasons})"
    assert lines(done) == [
        {"path": p, "error": text, "outcomes": missing, "codes": missing} for p in paths
    ]
    assert done.stderr.splitlines() == [f"mdp: {path}: {text}" for path in paths]


def here(*args: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    done = mdp(*args)
    return done.returncode, done.stdout, done.stderr


def assert_refusal(ended: tuple[int, str, str], expected: str) -> None:
    """Assert exit code 2 and one line on stderr."""
    code, out, err = ended
    assert (code, out) == (2, "")
    assert re.match(rf"mdp: .*{expected}", err), err
    assert err.count("\n") == 1, err


#: Command lines that are refused, where PICTURES, FLEET and the like stand for what is at hand.
REFUSED = [
    (
        "classify --fleet FLEET PICTURES --deadline-ms 0",
        "--deadline-ms: expected more than 0 and at",
    ),
    ("bench --fleet FLEET PICTURES --deadline-ms 1e300", "--deadline-ms: expected more than 0 and"),
    ("bench --fleet FLEET GONE", "gone.png: no such file"),
    ("classify --fleet FLEET EMPTY", "it holds no file"),
    (
        "classify --fleet FLEET PICTURES --out TYPE",
        r"expected a file that ends in \.csv or \.jsonl",
    ),
    ("classify --fleet TYPE PICTURES", r"type\.toml: Expected `str`, got `int` - at `\$\.bundle`"),
    ("status --fleet NO_BUNDLE", "gone: expected a bundle folder with a manifest.json"),
    ("doctor --fleet NO_BUNDLE", "gone: expected a bundle folder with a manifest.json"),
    ("bench --fleet NO_BUNDLE", "gone: expected a bundle folder with a manifest.json"),
    ("status --fleet WEIGHTS", r"fusion\.json: expected \d+ bytes, found 2"),
    ("status --fleet MANIFEST", r"manifest\.json: Input data was truncated"),
    ("fleet new --bundle BUNDLE --device delta=tcp://h:1 --out NEW", "of alpha, beta, gamma, got"),
    (
        "fleet new --bundle BUNDLE --device alpha=tcp://h:1 --out EMPTY",
        "empty: exists already: expected ",
    ),
    ("fleet new --bundle BUNDLE --device alpha=tcp://h:1 --out FLEET", "toml: exists already"),
    (
        "fleet new --bundle BUNDLE --device alpha=tcp://h:1 --out TYPE/new.toml",
        "cannot be written: (Not a directory|File exists)",
    ),
]


def test_refusals_leave_nothing(fleet: Fleet, toml: Path, pictures: Path, tmp_path: Path) -> None:
    entry = f'{{ device = "alpha", address = "{DEAD}", k = 0 }}'
    for name in ("gone", "weights", "manifest"):
        (tmp_path / f"{name}.toml").write_text(f'bundle = "{name}"\ndevices = [{entry}]')
    (write_bundle(tmp_path / "weights") / FUSION).write_text("{}")
    (write_bundle(tmp_path / "manifest") / MANIFEST).write_text("{")
    (tmp_path / "type.toml").write_text("bundle = 3\ndevices = []")
    (tmp_path / "empty").mkdir()
    words = {"BUNDLE": fleet.bundle, "FLEET": toml, "PICTURES": pictures}
    words |= {"NO_BUNDLE": tmp_path / "gone.toml", "GONE": tmp_path / "gone.png"}
    words |= {n.upper(): tmp_path / f"{n}.toml" for n in ("type", "weights", "manifest", "new")}
    words |= {"EMPTY": tmp_path / "empty", "TYPE/new.toml": tmp_path / "type.toml" / "new.toml"}
    before, content = sorted(tmp_path.rglob("*")), toml.read_bytes()
    for line, expected in REFUSED:
        assert_refusal(here(*(words.get(word, word) for word in line.split())), expected)
    assert (sorted(tmp_path.rglob("*")), toml.read_bytes()) == (before, content)
    for options in (["--deadline-ms", "soon"], ["--fusion", "magic"], ["--nonsense"], ["--fleet"]):
        done = here("classify", "--fleet", toml, pictures, *options)
        assert_refusal(done, rf"{options[0]}.* \(mdp classify -h\)$")
    assert_refusal(here("classify"), r"pictures.* \(mdp classify -h\)$")
    assert_refusal(here("dance"), r"dance.* \(mdp -h\)$")
    assert_refusal(here("bundle", "--nonsense"), r"--nonsense.* \(mdp bundle -h\)$")


def test_a_rate_that_no_calibration_supports_is_one_line(toml: Path, pictures: Path) -> None:
    few = with_novelty(write_bundle(toml.parent / "few"))
    without = (toml.parent / "bundle").resolve()
    for bundle, expected in (
        (few, "expected at least 0.01, the lowest rate that 99 calibration pictures support, got "),
        (without, "expected thresholds for `reject` 0.001 of the fleet file, found none: "),
    ):
        path = toml.parent / "asked.toml"
        path.write_text(
            f'bundle = "{bundle}"\nreject = 0.001\n{toml.read_text().partition(chr(10))[2]}'
        )
        for command in (["look"], ["classify", pictures], ["watch"], ["gateway", "--bind", ANY]):
            done = mdp(*command, "--fleet", path)
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr.startswith(f"mdp: {bundle / FUSION}: key `novelty`: ")
            assert expected in done.stderr
            assert done.stderr.count("\n") == 1


def test_status_prints_what_is_documented(toml: Path, fleet: Fleet) -> None:
    done = mdp("status", "--fleet", toml, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (content,) = lines(done)
    assert [device["device"] for device in content["devices"]] == list(DEVICES)
    for device in content["devices"]:
        assert device["address"] == fleet.agents[device["device"]].address
        assert device["state"] == "READY"
        assert device["bundle"] == "colours"
        assert device["provider"] == "CPUExecutionProvider"
        assert device["reason"] == ""
    done = mdp("status", "--fleet", toml)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.partition(", answered ")[0] for line in done.stdout.splitlines()] == [
        f"{device}: READY at {fleet.agents[device].address}, colours on CPU" for device in DEVICES
    ]


def test_status_of_absent_devices(fleet: Fleet, nobody: Path, tmp_path: Path) -> None:
    code, out, err = here("status", "--fleet", nobody, "--json")
    assert (code, err) == (3, "")
    states = [(d["state"], d["reason"]) for d in json.loads(out)["devices"]]
    assert states == [("UNREACHABLE", "no connection")] * 3
    some = tmp_path / "some.toml"
    alpha = fleet.agents["alpha"].address
    some.write_text(nobody.read_text().replace('"tcp://127.0.0.1:1"', f'"{alpha}"'))
    expected_states = ["READY", "UNREACHABLE", "UNREACHABLE"]
    for options, expected in (([], 3), (["--allow-partial"], 0)):
        code, out, err = here("status", "--fleet", some, "--json", *options)
        assert (code, err) == (expected, "")
        assert [d["state"] for d in json.loads(out)["devices"]] == expected_states
    two = [f"{device}={fleet.agents[device].address}" for device in ("alpha", "gamma")]
    new_fleet(Bundle.open(fleet.bundle), two, some)
    code, out, _ = here("status", "--fleet", some)
    assert (code, out.splitlines()[-1]) == (3, f"not in {some}: beta")
    code, out, _ = here("status", "--fleet", some, "--allow-partial", "--json")
    assert (code, json.loads(out)["absent"]) == (0, ["beta"])


def test_doctor_finds_nothing_wrong(toml: Path) -> None:
    code, out, err = here("doctor", "--fleet", toml, "--json")
    assert (code, err) == (0, "")
    findings = json.loads(out)["findings"]
    assert all(finding["ok"] for finding in findings)
    subjects = {finding["subject"] for finding in findings}
    assert subjects == {
        FUSION,
        *(f"submodels/{k}/model.onnx" for k in range(3)),
        *DEVICES,
        "network",
    }
    code, out, err = here("doctor", "--fleet", toml)
    assert (code, err) == (0, "")
    assert out.count("ok ") == len(findings)


def test_doctor_names_what_is_wrong(fleet: Fleet, tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", bag_scale=7.0, evaluated=False)
    model = bundle / "submodels/1/model.onnx"
    model.write_bytes(model.read_bytes() + b"x")
    (bundle / "submodels/2/model.onnx").unlink()
    with other_program(0, b"") as port:
        addresses = [
            fleet.agents["alpha"].address,
            f"tcp://127.0.0.1:{port}",
            f"tcp://{'x' * 70}.example:7500",
        ]
        entries = [
            f'{{ device = "{device}", address = "{address}", k = {k} }}'
            for k, (device, address) in enumerate(zip(DEVICES, addresses, strict=True))
        ]
        path = tmp_path / "fleet.toml"
        path.write_text(f'bundle = "bundle"\ndevices = [{", ".join(entries)}]')
        code, out, err = here("doctor", "--fleet", path, "--json", "--insecure")
        status = here("status", "--fleet", path, "--json", "--insecure")
    assert code == 3
    assert err.startswith(f"mdp: WARNING: device 'gamma' at {addresses[2]} is plain text: ")
    alpha = json.loads(status[1])["devices"][0]
    assert (status[0], alpha["state"]) == (3, "READY")
    assert alpha["reason"].startswith("wrong_bundle: serves colours ")
    said = [(f["subject"], f["text"]) for f in json.loads(out)["findings"] if not f["ok"]]
    subjects = [subject for subject, _ in said]
    assert subjects == ["submodels/1/model.onnx", "manifest.json", "gamma", *DEVICES]
    texts = dict(said)
    assert "bytes, found" in texts["submodels/1/model.onnx"]
    assert texts["manifest.json"] == "never evaluated: run mdp-partition evaluate --write"
    assert texts["alpha"].startswith("READY on CPUExecutionProvider: wrong_bundle: serves colours")
    assert "x.example:7500" in texts["gamma"]


def test_doctor_distinguishes_another_program_from_none() -> None:
    assert tcp_diagnosis(DEAD) == f"{DEAD}: Connection refused: no agent listens there"
    with other_program(0, b"HTTP/1.1 400\r\n") as port:
        address = f"tcp://127.0.0.1:{port}"
        expected = f"{address} accepts connections but does not speak this protocol"
        assert tcp_diagnosis(address) == expected
    with other_program(0, PROBE) as port:
        address = f"tcp://127.0.0.1:{port}"
        expected = f"{address} speaks this protocol, but let no client in so far: overloaded, or"
        assert tcp_diagnosis(address).startswith(expected)


def test_bench_prints_what_is_documented(toml: Path, pictures: Path) -> None:
    done = mdp("bench", "--fleet", toml, *PLENTY, "--requests", 12, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (outcome,) = lines(done)
    assert outcome["scenario"] == "single-stream"
    assert (outcome["requests"], outcome["modes"]) == (12, {"stacked": 12})
    assert set(outcome["latency_ms"]) >= {"p50", "p90", "p99", "max"}
    assert set(outcome["overhead_ms"]) >= {"p50", "p99"}
    assert outcome["throughput_per_s"] > 0
    done = mdp("bench", "--fleet", toml, *PLENTY, "--requests", 6, "--in-flight", 3, pictures)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^scenario +stream-3$", done.stdout, re.MULTILINE)
    assert re.search(r"^latency_ms\.p50 +[\d.]+$", done.stdout, re.MULTILINE)


def test_bench_without_devices_or_requests(nobody: Path, toml: Path) -> None:
    code, out, err = here("bench", "--fleet", nobody)
    assert (code, out) == (3, "")
    assert err.startswith("mdp: no device can answer (alpha, beta, gamma: unreachable)")
    assert err.count("\n") == 1
    assert here("bench", "--fleet", toml, "--requests", 0)[0] == 2


def test_watch_ends_where_no_agent_has_a_camera(toml: Path, tmp_path: Path) -> None:
    file = tmp_path / "seen.jsonl"
    code, out, err = here("watch", "--fleet", toml, *PLENTY, "--out", file)
    assert (code, out, file.read_text()) == (3, "", "")
    reason = "alpha, beta, gamma: no_frame: this agent has no source (--source)"
    assert err == f"mdp: no device can answer ({reason})\n"


def test_ctrl_c_ends_with_130(toml: Path) -> None:
    command = [str(BIN / "mdp"), "bench", "--fleet", str(toml), "--requests", "1000000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        # It is under way as soon as it holds connections to all three agents.
        until(
            lambda: len(psutil.Process(process.pid).net_connections("tcp")) >= 3,
            "mdp bench is connected",
        )
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert b"Traceback" not in out + err


@pytest.mark.parametrize("module", ["mdp.cli.bench", "devices.probe.measure"])
def test_what_drops_ctrl_c_as_it_is_loaded_is_loaded_first(module: str) -> None:
    # numpy's random numbers are modules of C that clear what is raised as they are loaded; numpy
    # would load them at their first use, when only Python's own handler is there.
    command = f"import {module}, sys; print('numpy.random._generator' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_reader_that_leaves_is_no_failure(toml: Path, pictures: Path) -> None:
    words = [BIN / "mdp", "classify", "--fleet", toml, *[pictures] * 50]
    classify = shlex.join(map(str, words))
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{classify} | head -1"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1


def test_fleet_new(fleet: Fleet, tmp_path: Path) -> None:
    out = tmp_path / "new.toml"
    devices = ["--device", "alpha=tcp://10.0.0.7:7500", "--device", "gamma/attic=tcp://h:1"]
    code, said, err = here(
        "fleet", "new", "--bundle", fleet.bundle, *devices, "--out", out, "--json"
    )
    assert (code, err) == (0, "")
    content = json.loads(said)
    assert (content["path"], content["absent"]) == (str(out), ["beta"])
    assert [entry["k"] for entry in content["devices"]] == [0, 2]
    out.unlink()
    code, said, err = here("fleet", "new", "--bundle", fleet.bundle, *devices, "--out", out)
    assert (code, err) == (0, "")
    assert said.splitlines() == [
        f"{out}: 2 devices of bundle colours",
        "  without beta: every answer will be partial",
        "  alpha has no key: expected --insecure, for plain text",
        "  gamma/attic has no key: expected --insecure, for plain text",
    ]
