"""The gateway's page in headless Chromium, before real agents."""

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mdp.formats.bundle import MANIFEST
from mdp.testing.bundles import DEVICES, colour_picture, subset_accuracy, write_bundle
from mdp.testing.processes import until
from tests.support.bundles import with_novelty
from tests.support.fleet import PLENTY_MS, Fleet
from tests.support.web.browser import LOW_CONTRAST, Browser, browser, why_no_browser
from tests.support.web.gateway import Gateway, gateway

pytestmark = pytest.mark.skipif(why_no_browser() != "", reason=why_no_browser())

SPACE = "\ue00d"
STRANGE_IS_HIDDEN = "return document.querySelector('#strange').hidden"
#: Answers have long labels in the place of `red` and `blue`.
LONG_LABELS = """
const before = window.fetch;
window.fetch = async (path, ...more) => {
  const response = await before(path, ...more);
  if (!`${path}`.endsWith("/classify")) return response;
  const found = await response.text();
  const content = found.replaceAll(/"(red|blue)"/g, '"old_english_sheepdog_puppy"');
  return new Response(content, { status: response.status });
};
"""
#: The next answer lacks a device that is able to answer.
ONE_LATE = """
const before = window.fetch;
window.fetch = async (path, ...more) => {
  const response = await before(path, ...more);
  if (!`${path}`.endsWith("/classify")) return response;
  window.fetch = before;
  const content = { ...(await response.json()), degraded: true, missing: { alpha: "too late" } };
  return new Response(JSON.stringify(content), { status: response.status });
};
"""
#: Words of the table of answers that stand on more than one line.
BROKEN_WORDS = """
const walk = document.createTreeWalker(document.querySelector("#made table"), NodeFilter.SHOW_TEXT);
const broken = [];
while (walk.nextNode()) {
  for (const word of walk.currentNode.data.matchAll(/[^\\s_-]+[_-]?/g)) {
    const range = document.createRange();
    range.setStart(walk.currentNode, word.index);
    range.setEnd(walk.currentNode, word.index + word[0].length);
    if (range.getClientRects().length > 1) broken.push(word[0]);
  }
}
return broken;
"""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Agents of which alpha and beta see the left half, and gamma the right one."""
    folder = tmp_path_factory.mktemp("page")
    # Nothing is above the threshold but what has no colour at all.
    path = with_novelty(write_bundle(folder / "bundle"), threshold=-1.17) / MANIFEST
    manifest = json.loads(path.read_text())
    halves = ({"right": 0.5}, {"right": 0.5}, {"left": 0.5})
    for assignment, half in zip(manifest["plan"]["assignments"], halves, strict=True):
        assignment["region"] = half
        assignment["predicted_ms"]["total"] += assignment["k"]
    path.write_text(json.dumps(manifest))
    (folder / "seen").mkdir()
    Image.fromarray(colour_picture("green")).save(folder / "seen" / "green.png")
    with Fleet(folder, folder / "bundle") as fleet:
        for device in DEVICES:
            fleet.start(device, "--source", f"folder:{folder / 'seen'}", wait_for=None)
        for device in DEVICES:
            fleet.agents[device].wait_for("READY")
        fleet.write()
        yield fleet


@pytest.fixture(scope="module")
def served(fleet: Fleet) -> Iterator[Gateway]:
    options = ("--deadline-ms", PLENTY_MS)
    with gateway("--fleet", fleet.folder / "fleet.toml", *options) as found:
        yield found


@pytest.fixture(scope="module")
def page(served: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as window:
        window.emulate()
        window.open(served.url)
        window.wait_for("#count", "3 of 3")
        yield window


@pytest.fixture(scope="module")
def two_colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blue on the left, red on the right."""
    pixels = np.hstack([colour_picture("blue", 80, 40), colour_picture("red", 80, 40)])
    path = tmp_path_factory.mktemp("picture") / "two.png"
    Image.fromarray(pixels).save(path)
    return path


def test_a_device_dies_and_comes_back(fleet: Fleet, page: Browser, two_colours: Path) -> None:
    page.type("#file", str(two_colours))
    page.wait_for("#label", "^blue$")
    # What gamma says is another thing than what all say.
    assert page.text("#opinions td.other") == "red"
    assert page.run("return document.querySelectorAll('#crops rect.own').length") == 3
    assert "gamma: 50 % of the square" in page.text("#legend")
    accuracy = f"{subset_accuracy((0, 1, 2)).stacked:.1%}".replace("%", " %")
    assert page.text("#accuracy") == accuracy
    fleet.agents["alpha"].kill()
    page.wait_for("#label", "^red$")
    page.wait_for("#how", "partial")
    page.wait_for("#count", "2 of 3")
    page.wait_for("#faults", "alpha\nnot reachable")
    assert page.text("#accuracy") != accuracy
    fleet.restart("alpha")
    page.wait_for("#label", "^blue$")
    page.wait_for("#faults", "alpha\nback after not reachable")
    page.wait_for("#how", "^$")
    assert page.text("#mode") == "stacked"


def test_a_device_that_was_late_is_asked_again(page: Browser, two_colours: Path) -> None:
    page.run(ONE_LATE)
    page.type("#file", str(two_colours))
    page.wait_for("#how", "partial")
    assert "without alpha (too late)" in page.text("#note")
    page.wait_for("#how", "^$")
    assert "without" not in page.text("#note")


def test_an_item_of_no_class(page: Browser, served: Gateway, tmp_path: Path) -> None:
    path = tmp_path / "grey.png"
    Image.fromarray(np.full((80, 80, 3), 90, np.uint8)).save(path)
    page.type("#file", str(path))
    page.wait_for("#label", "^unknown$")
    label = served.ask("/v2/models/colours/classify", path.read_bytes()).json["label"]
    page.wait_for(
        "#note", f"^none of the classes, nearest {label}, 33.3 % probable, from alpha, beta"
    )
    assert page.run(STRANGE_IS_HIDDEN) is False
    fused = page.run(
        "return [...document.querySelectorAll('#made tfoot td')].map((td) => td.innerText)"
    )
    assert fused[0] == "unknown"
    assert not any(character.isdigit() for character in "".join(fused))
    assert page.run(LOW_CONTRAST) == []
    # The next one is of a class again.
    Image.fromarray(colour_picture("green")).save(path)
    page.type("#file", str(path))
    page.wait_for("#label", "^green$")
    assert page.run(STRANGE_IS_HIDDEN) is True
    assert page.text("#fused-label") == "green"


def test_a_switch_by_keyboard(page: Browser, served: Gateway, two_colours: Path) -> None:
    page.type("#file", str(two_colours))
    page.wait_for("#label", "^blue$")
    page.press("[data-name=alpha] input", SPACE)
    page.wait_for("#label", "^red$")
    page.wait_for("[data-name=alpha] .state", "Switched off here")
    assert "switched off" in page.text("#opinions")
    page.open(served.url)
    page.wait_for("[data-name=alpha] .state", "Switched off here")
    assert page.run("return document.querySelector('[data-name=alpha] input').checked") is False
    page.press("[data-name=alpha] input", SPACE)
    page.wait_for("#count", "3 of 3")


def test_a_chart_of_what_devices_are_worth(page: Browser, served: Gateway) -> None:
    page.wait_for("#front-card", "Accuracy against latency")
    front = served.ask("/fleets").json[0]["front"]
    assert [point["latency_ms"] for point in front] == [2.0, 3.0, 4.0][: len(front)]
    assert front[-1]["accuracy"] == max(point["accuracy"] for point in front)
    assert page.run("return document.querySelectorAll('#front .step').length") == len(front)
    assert page.run("return document.querySelectorAll('#front .now').length") == 1
    told = page.run("return document.querySelector('#front').getAttribute('aria-label')")
    assert "ms with alpha" in told


def test_what_the_devices_own_cameras_see(page: Browser) -> None:
    page.press("#cameras", SPACE)
    page.wait_for("#label", "^green$")
    page.wait_for("#empty", "The devices look for themselves")
    page.press("#cameras", SPACE)
    page.wait_for("#empty", "Drop a picture here")


def test_a_camera_that_another_client_suspects(fleet: Fleet, page: Browser) -> None:
    with fleet.client() as client:
        # As its looks would have found, had it looked long enough.
        client._connection.dispatcher._builder.disagreeing = frozenset(("beta",))
        client.look(deadline_ms=PLENTY_MS)
        page.wait_for("#live", "^Live, a camera suspected$")
        page.wait_for(
            "#accuracy-note", r"; it does not hold for looks with a suspected camera \(beta\)$"
        )
        page.wait_for("[data-name=beta] .state", "Ready: camera: disagrees with the others")
        assert page.text("[data-name=alpha] .state") == "Ready"
        page.press("#cameras", SPACE)
        page.wait_for("#note", r"; accuracy unknown with a suspected camera \(beta\)")
        assert "%" not in page.text("#fused-accuracy")
        assert page.text("#doubted") == "suspected camera"
        assert page.text("#opinions .doubt") == "suspected"
        assert page.text("#cameras") == "Stop looking"
        page.press("#cameras", SPACE)
        page.wait_for("#cameras", "^Fleet's cameras$")
        client._connection.dispatcher._builder.disagreeing = frozenset()
        client.look(deadline_ms=PLENTY_MS)
    page.wait_for("#live", "^Live$")
    assert "hold" not in page.text("#accuracy-note")


def test_tokens_and_several_fleets(fleet: Fleet, page: Browser, served: Gateway) -> None:
    tokens = fleet.folder / "tokens"
    tokens.touch(0o600)
    tokens.write_text("0123456789abcdef\n")
    file = fleet.folder / "fleet.toml"
    names = ("--fleet", f"cats={file}", "--fleet", f"dogs={file}")
    with gateway(*names, "--tokens", tokens) as guarded:
        page.open(guarded.url)
        page.wait_for("dialog[open]", "needs a token")
        # A browser cannot send this one at all.
        page.type("#token", "“0123456789abcdef”\n")
        assert page.run("return sessionStorage.getItem('token')") is None
        page.run("document.getElementById('token').value = ''")
        page.type("#token", "wrong\n")
        page.wait_for("dialog[open]", "does not know that token")
        page.type("#token", "0123456789abcdef\n")
        page.wait_for("#count", "3 of 3")
        assert page.text("#bundle") == "cats"
        page.type("#fleet", "dogs")
        page.wait_for("#bundle", "dogs")
    page.wait_for("#live", "No gateway")
    page.log()
    page.open(served.url)
    page.wait_for("#count", "3 of 3")


def test_what_a_screen_reader_is_told(page: Browser) -> None:
    tree = page.tree()
    switches = {node["name"] for node in tree if node["role"] == "switch"}
    assert switches == {f"{device} takes part in answers" for device in DEVICES}
    controls = [node for node in tree if node["role"] in ("button", "switch", "combobox", "link")]
    assert all(node["name"] for node in controls)
    assert {"banner", "main", "status"} <= {node["role"] for node in tree}


def test_a_file_that_is_no_picture_and_no_camera(page: Browser, tmp_path: Path) -> None:
    (tmp_path / "none.png").write_text("no picture")
    page.type("#file", str(tmp_path / "none.png"))
    page.wait_for("#note", r"^This file is no picture that can be read \(JPEG, PNG, WebP, ")
    assert page.run("return document.getElementById('picture').checkVisibility()") is False
    assert page.text("#empty") == "No picture to show\nthis browser cannot read the file"
    # Pillow reads TIFF; Chromium does not.
    Image.fromarray(colour_picture("blue")).save(tmp_path / "blue.tiff")
    page.type("#file", str(tmp_path / "blue.tiff"))
    page.wait_for("#mode", "stacked")
    assert page.run("return document.getElementById('picture').checkVisibility()") is False
    assert page.text("#empty").startswith("No picture to show")
    Image.fromarray(colour_picture("blue")).save(tmp_path / "blue.png")
    page.type("#file", str(tmp_path / "blue.png"))
    until(
        lambda: page.run("return document.getElementById('picture').checkVisibility()") is True,
        "a picture that the browser reads is shown",
    )
    assert page.run("return document.getElementById('empty').checkVisibility()") is False
    page.run("document.getElementById('webcam').click()")
    page.wait_for("#alert", "No webcam: this computer has none")


def test_a_webcam(served: Gateway, tmp_path: Path) -> None:
    with browser(tmp_path, "--use-fake-device-for-media-stream") as window:
        window.emulate()
        window.open(served.url)
        window.wait_for("#count", "3 of 3")
        window.press("#webcam", SPACE)
        window.wait_for("#mode", "^stacked$")
        assert window.text("#webcam") == "Stop the webcam"
        assert window.run("return document.querySelectorAll('#crops rect.own').length") == 3
        window.press("#webcam", SPACE)
        window.wait_for("#empty", "Drop a picture here")


def test_a_gateway_that_says_nothing_is_noticed(page: Browser, served: Gateway) -> None:
    """The page waits 25 s for a sign of life: here a part of a second."""
    hasty = "const timer = setTimeout; window.setTimeout = (call, ms) => timer(call, ms / 50);"
    script = page.before_load(hasty)
    page.open(served.url)
    page.wait_for("#count", "3 of 3")
    with served.pause():
        page.wait_for("#live", "No gateway")
    page.wait_for("#live", "^Live$")
    page.not_before_load(script)
    page.open(served.url)
    page.wait_for("#count", "3 of 3")


def test_it_asks_no_other_host_and_nothing_was_blocked(page: Browser, served: Gateway) -> None:
    script = "return performance.getEntriesByType('resource').map((each) => each.name)"
    assert {url.rsplit("/", 1)[0].startswith(served.url) for url in page.run(script)} == {True}
    blocked = [line for line in page.log() if "favicon" not in line and " 400 " not in line]
    assert blocked == []
    parts = [file for file in files("mdp.gateway").joinpath("page").iterdir() if file.is_file()]
    assert sum(len(file.read_bytes()) for file in parts) < 200_000


def test_words_are_not_broken_on_a_phone(page: Browser, served: Gateway, two_colours: Path) -> None:
    script = page.before_load(LONG_LABELS)
    page.emulate(width=360, height=740)
    page.open(served.url)
    page.wait_for("#count", "3 of 3")
    page.type("#file", str(two_colours))
    page.wait_for("#opinions", "old_english_sheepdog_puppy")
    assert page.run(BROKEN_WORDS) == []
    assert page.run("return document.documentElement.scrollWidth") <= 360
    page.not_before_load(script)
    page.emulate()
    page.open(served.url)
    page.wait_for("#count", "3 of 3")


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_all_of_it(page: Browser, dark: bool) -> None:
    page.emulate(width=360, height=740, dark=dark)
    assert page.run("return document.documentElement.scrollWidth") <= 360
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(14, 18, 24)" if dark else "rgb(244, 245, 248)")
    assert page.run(LOW_CONTRAST) == []
    page.emulate()


def test_without_agents_the_page_says_so(fleet: Fleet, page: Browser, two_colours: Path) -> None:
    page.type("#file", str(two_colours))
    page.wait_for("#label", "^blue$")
    for device in DEVICES:
        fleet.agents[device].kill()
    page.wait_for("#live", "No device can answer")
    page.wait_for("#note", "status 503")
    page.wait_for("#label", "No (device can )?answer")
    fleet.restart("gamma")
    page.wait_for("#label", "^red$")
