"""Labels that do not exclude each other: real agents, the command line, HTTP and MQTT's payload."""

import io
import json
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from PIL import Image

from mdp.cli import main as cli
from mdp.cli.watch import facts
from mdp.mqtt.messages import answer_payload
from mdp.testing.bundles import DEVICES, mixed_picture, subset_accuracy, write_bundle
from tests.support.command_lines import run_here
from tests.support.fleet import PLENTY_MS, ROOT, Fleet
from tests.support.web.browser import browser, why_no_browser
from tests.support.web.gateway import gateway

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Agents that look at something green and red."""
    folder = tmp_path_factory.mktemp("several")
    (folder / "seen").mkdir()
    Image.fromarray(mixed_picture(["green", "red"])).save(folder / "seen" / "both.png")
    bundle = write_bundle(folder / "bundle", several=True)
    with Fleet(folder, bundle) as fleet:
        for device in DEVICES:
            fleet.start(device, "--source", f"folder:{folder / 'seen'}", wait_for=None)
        for device in DEVICES:
            fleet.agents[device].wait_for("READY")
        fleet.write()
        yield fleet


def png(*labels: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(mixed_picture(labels)).save(file, "PNG")
    return file.getvalue()


def mdp(*args: object) -> tuple[int, str, str]:
    with chdir(ROOT):
        done = run_here(cli.main, "mdp", *args)
    return done.returncode, done.stdout, done.stderr


def test_every_label_of_a_look_and_what_a_missing_device_makes_of_it(fleet: Fleet) -> None:
    with fleet.client() as client:
        seen = client.look(deadline_ms=PLENTY_MS)
        assert (seen.label, seen.used) == ("green+red", DEVICES)
        assert seen.holds is not None
        assert {label for label, _ in seen.holds} == {"green", "red"}
        # Each device has looked at a picture of its own, and one picture for all was measured.
        assert seen.expected_accuracy is None
        for labels in (("blue",), (), ("blue", "green", "red")):
            found = client.classify(mixed_picture(labels), deadline_ms=PLENTY_MS)
            assert found.label == ("+".join(labels) or "none")
            assert found.expected_accuracy == subset_accuracy((0, 1, 2)).stacked
        payload = answer_payload("now", seen)
        assert payload["label"] == "green+red"
        assert [label for label, _ in facts("now", seen)["holds"]] == [one for one, _ in seen.holds]


def test_the_terminal_names_each_label(fleet: Fleet, tmp_path: Path) -> None:
    toml = fleet.folder / "fleet.toml"
    for name, labels in (("two", ("blue", "red")), ("no", ())):
        (tmp_path / f"{name}.png").write_bytes(png(*labels))
    deadline = ("--deadline-ms", PLENTY_MS)
    code, out, _ = mdp("classify", "--fleet", toml, *deadline, tmp_path / "two.png")
    assert code == 0
    first = out.splitlines()[0]
    assert "blue (" in first
    assert ") + red (" in first or ") + blue (" in first
    share = subset_accuracy((0, 1, 2)).stacked
    assert f"every label right on {share:.1%} of 100 test pictures" in first
    _, out, _ = mdp("classify", "--fleet", toml, *deadline, "--json", tmp_path / "no.png")
    told = json.loads(out)
    assert (told["label"], told["holds"]) == ("none", [])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("watch", "--trigger", "interval", "--rule", "red=2"),
            "--rule red: votes need one label an item, of this bundle several may hold",
        ),
        (
            ("gateway", "--teach", "scenes", "--teach-tokens", "tokens"),
            "--teach: expected a bundle with one label an item",
        ),
        (("classify", "--cascade", "x.png"), "cascade"),
    ],
)
def test_what_needs_one_label_is_refused_in_a_line(
    fleet: Fleet, words: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    (tmp_path / "tokens").write_text("a-token-of-those-who-teach-here\n")
    (tmp_path / "tokens").chmod(0o600)
    (tmp_path / "scenes").mkdir()
    with chdir(tmp_path):
        done = run_here(
            cli.main, "mdp", words[0], "--fleet", fleet.folder / "fleet.toml", *words[1:]
        )
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_gateway_answers_with_every_label(fleet: Fleet) -> None:
    with gateway("--fleet", fleet.folder / "fleet.toml") as served:
        look = served.ask(f"/v2/models/colours/look?deadline_ms={PLENTY_MS:g}").json
        assert look["label"] == "green+red"
        assert {label for label, _ in look["holds"]} == {"green", "red"}
        pixels = mixed_picture(["blue", "green"])
        body = {
            "inputs": [
                {
                    "name": "images",
                    "shape": [1, *pixels.shape],
                    "datatype": "UINT8",
                    "data": pixels.ravel().tolist(),
                }
            ],
            "parameters": {"deadline_ms": PLENTY_MS},
        }
        found = served.ask("/v2/models/colours/infer", json.dumps(body).encode()).json
        assert [sorted(one) for one in json.loads(found["parameters"]["holds"])] == [
            ["blue", "green"]
        ]


@pytest.mark.skipif(why_no_browser() != "", reason=why_no_browser())
def test_the_page_marks_the_labels_that_hold(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "two.png").write_bytes(png("blue", "red"))
    (tmp_path / "no.png").write_bytes(png())
    options = ("--fleet", fleet.folder / "fleet.toml", "--deadline-ms", PLENTY_MS)
    with gateway(*options) as served, browser(tmp_path / "chromium") as window:
        window.emulate()
        window.open(served.url)
        window.wait_for("#count", "3 of 3")
        window.type("#file", str(tmp_path / "two.png"))
        window.wait_for("#label", r"^(blue \+ red|red \+ blue)$")
        held = (
            "return [...document.querySelectorAll('#top .held span:first-child')].map(n => n.title)"
        )
        assert sorted(window.run(held)) == ["blue", "red"]
        assert "of the least certain label" in window.text("#note")
        assert window.text("#fused-label") == "blue+red"
        window.type("#file", str(tmp_path / "no.png"))
        window.wait_for("#label", "^none$")
        assert window.run(held) == []
