"""Teaching a fleet through the gateway's page, before real agents: by HTTP and in Chromium."""

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mdp.formats.bundle import Bundle
from mdp.formats.fleet import read_devices, read_fleet
from mdp.formats.mask import read_mask
from mdp.line.kept import RECORD
from mdp.testing.bundles import LABELS, write_bundle
from mdp.testing.processes import until
from tests.support.faults.stage import Stage, jpeg, with_cameras
from tests.support.fleet import PLENTY_MS, Fleet
from tests.support.web.browser import LOW_CONTRAST, Browser, browser, why_no_browser
from tests.support.web.gateway import Gateway, Reply, gateway

CAMERAS = ("laptop-cpu", "n100")
TEACHER, ASKER = "teacher-0123456789abc", "asker-0123456789abcde"
#: A class that looks as the first one.
TWIN = "twin"
#: A class that no bundle knows yet, and a name with markup in it, which is a class like any other.
NEW, MARKUP = "black", "<img src=x onerror=document.title='broken'>"
NETWORK = "test_vit"
#: For a build on a busy machine.
BUILD_S = 300.0
needs_browser = pytest.mark.skipif(why_no_browser() != "", reason=why_no_browser())


class Room:
    """Agents with folders as cameras, and what a gateway that teaches them is given."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stage = Stage(folder, CAMERAS)
        self.scenes, self.kept = folder / "scenes", folder / "kept"
        self.bundle = with_cameras(write_bundle(folder / "bundle", devices=CAMERAS, sizes=(16, 16)))
        for name, token in (("teachers", TEACHER), ("askers", ASKER)):
            (folder / name).touch(0o600)
            (folder / name).write_text(f"{token}\n")
        (folder / "build.toml").write_text(
            f"[plan]\nprofiles = {json.dumps(CAMERAS)}\nlatency_ms = 1.5\n"
            f'[run]\nweights = "{folder / "weights"}"\n'
        )
        self.stage.show_all(LABELS[0])

    def options(self) -> tuple[object, ...]:
        return (
            "--fleet", self.folder / "fleet.toml", "--deadline-ms", PLENTY_MS,
            "--tokens", self.folder / "askers", "--teach", self.scenes,
            "--teach-tokens", self.folder / "teachers", "--teach-kept", self.kept,
            "--teach-config", self.folder / "build.toml",
        )  # fmt: skip

    def keep(self, item: str, label: str, why: str = "unsure") -> None:
        """Keep an item as the line does."""
        folder = self.kept / item
        folder.mkdir(parents=True)
        for camera in CAMERAS:
            (folder / f"{camera}.jpg").write_bytes(jpeg(self.stage.picture(label)))
        record = {
            "item": item, "time": "2026-11-25T22:00:00+00:00", "why_kept": why,
            "answer": {"class": label, "probability": 0.4, "known": why != "unknown"},
        }  # fmt: skip
        (folder / RECORD).write_text(json.dumps(record))


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    room = Room(tmp_path_factory.mktemp("room"))
    folder = room.folder
    (folder / "client.limits").write_text("record = true\npush = true\nmask = true\n")
    with Fleet(folder, room.bundle, keys=True) as fleet:
        for camera in CAMERAS:
            fleet.start(
                camera, *room.stage.source(camera), "--allow-record", "--grace-s", 0,
                "--allow-push", folder / f"pushed-{camera}",
                "--mask", folder / f"mask-{camera}.toml", "--allow-mask", wait_for=None,
            )  # fmt: skip
        for camera in CAMERAS:
            fleet.agents[camera].wait_for("READY")
        fleet.write()
        yield room


@pytest.fixture(scope="module")
def served(room: Room) -> Iterator[Gateway]:
    with gateway(*room.options()) as found:
        yield found


def ask(
    served: Gateway, path: str, content: object = None, method: str = "GET", token: str = TEACHER
) -> Reply:
    body = None if content is None else json.dumps(content).encode()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return served.ask(path, body, method=method, headers=headers)


def state(served: Gateway) -> Any:
    return ask(served, "/teach/state").json


def record(served: Gateway, label: str, count: int = 2) -> Any:
    """The outcome of a whole recording."""
    wanted = {"label": label, "count": count, "every_s": 0.5, "countdown_s": 0}
    # A picture of a camera that was just looked at may be one too many.
    until(
        lambda: ask(served, "/teach/recording", wanted, "PUT").status == 200, "a recording begins"
    )
    until(lambda: state(served)["recording"]["state"] == "done", "the recording is done")
    return state(served)["recording"]


def test_only_those_who_may_teach_see_and_change_anything(served: Gateway) -> None:
    # The page itself asks for a token, and is there without one.
    assert served.ask("/teach").status == 200
    paths = ("state", "events", "cameras", "cameras/n100", "masks", "kept", "kept/17/n100")
    for path in paths:
        for token, status in (("", 401), (f"{TEACHER}x", 401), (ASKER, 403)):
            reply = ask(served, f"/teach/{path}", token=token)
            assert (reply.status, list(reply.json)) == (status, ["error"])
    changes = (
        ("recording", "PUT"), ("recording", "DELETE"), ("recording/scenes", "DELETE"),
        ("kept/17", "PUT"), ("kept/17", "DELETE"), ("moved", "DELETE"), ("masks/n100", "PUT"),
        ("build", "PUT"), ("build", "DELETE"), ("rollout", "PUT"), ("good", "PUT"),
        ("good/17", "PUT"),
    )  # fmt: skip
    for path, method in changes:
        assert ask(served, f"/teach/{path}", {}, method, token=ASKER).status == 403
        assert ask(served, f"/teach/{path}", {}, method, token="").status == 401
    # Who may teach may ask too; who may ask is let in for that alone.
    assert ask(served, "/fleets").json[0]["teaches"] is True
    assert ask(served, "/fleets", token=ASKER).status == 200
    assert ask(served, "/fleets", token="").status == 401


def test_a_class_is_recorded_counted_and_removed(room: Room, served: Gateway) -> None:
    outcome = record(served, "lid", 3)
    assert (outcome["scenes"] + outcome["left_out"], outcome["wanted"]) == (3, 3)
    kept = outcome["scenes"]
    assert len(list((room.scenes / "lid").glob("*/n100.jpg"))) == kept >= 1
    counts = {"label": "lid", "scenes": kept, "cameras": dict.fromkeys(CAMERAS, kept)}
    until(lambda: counts in state(served)["classes"], "they are counted")
    told = ask(served, "/teach/recording/scenes", method="DELETE").json
    assert [one["label"] for one in told["classes"] if one["label"] == "lid"] == []
    assert not (room.scenes / "lid").exists()


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"label": "a/b"}, "label 'a/b': expected the name of a folder"),
        ({"label": "</script>"}, "label '</script>': expected the name of a folder"),
        ({"label": ".."}, "label '..': expected the name of a folder"),
        ({"label": ""}, "label '': expected the name of a folder"),
        ({"label": "train"}, "label train: expected a class, train/ would be a split"),
        ({"label": "x" * 81}, "label: expected at most 80 characters, got 81"),
        ({"label": "a", "count": 0}, "count: expected 1 to 1000, got 0"),
        ({"label": "a", "every_s": 0.1}, "every_s: expected 0.5 to 60, got 0.1"),
        ({"label": 7}, "/teach/recording: Expected `str`, got `int` - at `$.label`"),
        ([], "/teach/recording: Expected `object`, got `array`"),
    ],
)
def test_recordings_that_are_refused(served: Gateway, wanted: object, expected: str) -> None:
    reply = ask(served, "/teach/recording", wanted, "PUT")
    assert (reply.status, reply.json) == (400, {"error": expected})


def test_two_people_teach_at_once(room: Room, served: Gateway) -> None:
    wanted = {"label": "first", "count": 50, "every_s": 0.5, "countdown_s": 30}
    assert ask(served, "/teach/recording", wanted, "PUT").status == 200
    second = ask(served, "/teach/recording", {**wanted, "label": "second"}, "PUT")
    assert second.status == 409
    assert second.json["error"].startswith("first is being recorded, 0 of 50 scenes: ")
    assert ask(served, "/teach/build", {}, "PUT").status == 409
    assert ask(served, "/teach/masks/n100", {"mask": None}, "PUT").status == 409
    # Both see what is under way, and either may end it.
    assert state(served)["recording"]["label"] == "first"
    assert ask(served, "/teach/recording", method="DELETE").json["recording"]["state"] == "stopped"
    assert not (room.scenes / "second").exists()
    # Of many who put one item right, one does.
    room.keep("17", "red")
    replies: list[Reply] = []
    people = [
        threading.Thread(
            target=lambda label=label: replies.append(
                ask(served, "/teach/kept/17", {"label": label}, "PUT")
            )
        )
        for label in ("one", "other", "third")
    ]
    for person in people:
        person.start()
    for person in people:
        person.join()
    assert sorted(reply.status for reply in replies) == [200, 404, 404]
    assert len(list(room.scenes.glob("*/2026-11-25T22-00-00.000"))) == 1
    assert not (room.kept / "17").exists()
    assert ask(served, "/teach/moved", method="DELETE").status == 200
    assert sorted(path.name for path in (room.kept / "17").iterdir()) == [
        "laptop-cpu.jpg", "n100.jpg", RECORD,
    ]  # fmt: skip
    assert ask(served, "/teach/kept/17", method="DELETE").status == 200
    assert not (room.kept / "17").exists()


@pytest.mark.parametrize("item", ["17", "..%2f..%2fbundle", ".hidden", "%2e%2e"])
def test_items_that_are_not_there(served: Gateway, item: str) -> None:
    for method, content in (("PUT", {"label": "red"}), ("DELETE", None)):
        assert ask(served, f"/teach/kept/{item}", content, method).status in (404, 405)
    assert ask(served, f"/teach/kept/{item}/n100").status == 404


def test_a_mask_of_another_size_than_the_picture(room: Room, served: Gateway) -> None:
    until(lambda: ask(served, "/teach/cameras/n100").status == 200, "a picture")
    found = ask(served, "/teach/masks").json["masks"]["n100"]
    assert (found["mask"], found["width"], found["height"]) == (None, 60, 40)
    wrong = {"mask": {"width": 1280, "height": 720}}
    reply = ask(served, "/teach/masks/n100", wrong, "PUT")
    assert (reply.status, reply.json["error"]) == (
        400,
        "n100: a picture of 60x40: expected the shape of the mask's, 1280x720: draw the mask anew",
    )
    assert not (room.folder / "mask-n100.toml").exists()
    assert ask(served, "/teach/masks/attic", wrong, "PUT").status == 404


def test_a_build_that_fails_leaves_the_old_bundle(room: Room, served: Gateway) -> None:
    before = read_fleet(room.folder / "fleet.toml")[1].digest
    # There are no weights yet.
    assert ask(served, "/teach/build", {"minutes": 0}, "PUT").status == 200
    until(lambda: state(served)["build"]["state"] == "failed", "the build fails")
    build = state(served)["build"]
    assert build["error"].startswith("mdp-partition: ")
    assert build["error"].endswith("(exit code 2)")
    assert build["error"].split(" (exit")[0] == build["lines"][-1]
    assert build["pushable"] is False
    assert ask(served, "/teach/rollout", {"action": "push"}, "PUT").json == {
        "error": "expected a build that is done"
    }
    assert read_fleet(room.folder / "fleet.toml")[1].digest == before
    answer = ask(served, "/v2/models/colours/look").json
    assert (answer["used"], answer["label"]) == ([*CAMERAS], LABELS[0])
    assert not list((room.folder / "scenes.builds").iterdir())


@pytest.fixture(scope="module")
def page(served: Gateway, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as window:
        window.emulate()
        window.open(f"{served.url}/teach")
        window.wait_for("dialog[open]", "needs a token")
        # Another's token is none for this.
        window.type("#token", f"{ASKER}\n")
        window.wait_for("dialog[open]", "may not teach here")
        window.type("#token", f"{TEACHER}\n")
        window.wait_for("#live", "^Ready$")
        yield window


def click(page: Browser, selector: str) -> None:
    page.run(f"document.querySelector({json.dumps(selector)}).click()")


def fill(page: Browser, selector: str, words: str) -> None:
    page.run(f"document.querySelector({json.dumps(selector)}).value = ''")
    page.type(selector, words)


@needs_browser
def test_kept_items_are_put_right_with_one_key_each(room: Room, page: Browser) -> None:
    for item, why in (("21", "unsure"), ("22", "unknown"), ("23", "unsure")):
        room.keep(item, "red", why)
    page.wait_for("#review-count", "^3 kept: ")
    page.wait_for("#item-name", "^Item 22$")
    page.wait_for("#item-why", "^unknown$")
    # A picture of each camera is there.
    until(
        lambda: (
            page.run(
                "return [...document.querySelectorAll('#item-pictures img')]"
                ".filter((image) => image.naturalWidth === 60).length"
            )
            == len(CAMERAS)
        ),
        "the pictures",
    )
    page.press("#item", "2")
    page.wait_for("#undo-text", f"^Item 22 is a scene of {LABELS[1]}$")
    page.wait_for("#item-name", "^Item 21$")
    assert len(list((room.scenes / LABELS[1]).glob("*/n100.jpg"))) == 1
    page.press("#item", "z")
    page.wait_for("#item-name", "^Item 22$")
    assert not (room.scenes / LABELS[1]).exists()
    # A label with markup in it is text.
    page.press("#item", "n")
    fill(page, "#new-label", f"{MARKUP}\n")
    page.wait_for("#classes", "<img src=x")
    page.wait_for("#item-keys", "<img src=x")
    assert page.run("return document.querySelectorAll('img[src=x]').length") == 0
    assert page.run("return document.title").startswith("Teach ")
    assert (room.scenes / MARKUP).is_dir()
    # One that cannot be a folder leaves the item where it was.
    page.press("#item", "n")
    fill(page, "#new-label", "<b>bold</b>\n")
    page.wait_for("#alert", "expected the name of a folder")
    page.wait_for("#item-name", "^Item 21$")
    for _ in range(2):
        page.press("#item", "x")
    page.wait_for("#no-review", "Nothing is left")
    page.log()


#: Has the page's requests to remove an item wait until `sendRemovals` is called.
HOLD_REMOVALS = """
const send = window.fetch;
const held = new Promise((resolve) => { window.sendRemovals = resolve; });
window.fetch = async (path, options) => {
  if (options?.method === "DELETE") {
    await held;
    window.fetch = send;
  }
  return send(path, options);
};
"""


@needs_browser
def test_an_item_that_is_being_removed_is_not_shown_again(room: Room, page: Browser) -> None:
    room.keep("24", "red")
    page.wait_for("#item-name", "^Item 24$")
    page.run(HOLD_REMOVALS)
    page.press("#item", "x")
    # The list that comes with this one has the first one still, in front.
    room.keep("25", "red")
    page.wait_for("#review-count", "^2 kept: ")
    page.wait_for("#item-name", "^Item 25$")
    page.run("window.sendRemovals()")
    page.wait_for("#review-count", "^1 kept: ")
    page.wait_for("#item-name", "^Item 25$")
    page.press("#item", "x")
    page.wait_for("#no-review", "Nothing is left")
    assert page.log() == []


@needs_browser
def test_what_can_be_read_in_light_dark_and_on_a_phone(room: Room, page: Browser) -> None:
    room.keep("31", "red")
    recorded_once = {"label": "lid", "count": 1, "every_s": 0.5, "countdown_s": 0}
    page.run(
        "fetch('teach/recording', {method: 'PUT', body: "
        f"'{json.dumps(recorded_once)}', headers: "
        "{Authorization: `Bearer ${sessionStorage.getItem('token')}`}})"
    )
    page.wait_for("#recording-text", "recorded$|are kept$")
    page.wait_for("#item-name", "^Item 31$")
    for width, dark in ((1280, False), (1280, True), (390, False), (390, True)):
        page.emulate(width=width, dark=dark)
        assert page.run(LOW_CONTRAST) == []
        # Nothing is beyond the edge of the screen.
        assert page.run("return document.documentElement.scrollWidth") <= width
    page.emulate()
    named = {f"{node['role']} {node['name']}" for node in page.tree()}
    for wanted in (
        "button Record", "button Push to all boards", "button Region and mask of n100",
        "spinbutton Scenes", "image Item 31 as n100 saw it",
    ):  # fmt: skip
        assert wanted in named
    page.press("#item", "x")
    page.wait_for("#no-review", "Nothing is left")


@needs_browser
def test_a_mask_is_drawn_and_applied(room: Room, page: Browser) -> None:
    kept = room.folder / "mask-n100.toml"
    page.wait_for("#cameras", "n100")
    click(page, "#cameras [data-name=n100] button")
    page.wait_for("#mask-title", "of n100$")
    click(page, "#mask-add")
    fill(page, "#boxes tr:nth-child(2) input", "25")
    click(page, "#mask-save")
    until(kept.exists, "the agent keeps it")
    mask = read_mask(kept)
    assert (mask.width, mask.height) == (60, 40)
    assert [(box.left, box.right) for box in mask.hidden] == [(0.25, 0.6)]
    until(lambda: not is_open(page), "it closes")
    # As it is, it is shown again.
    click(page, "#cameras [data-name=n100] button")
    until(lambda: is_open(page), "it opens again")
    page.wait_for("#boxes", "Hidden 1")
    click(page, "#mask-clear")
    until(lambda: not kept.exists(), "it is gone")
    until(lambda: not is_open(page), "it closes again")


def is_open(page: Browser) -> bool:
    """Tell whether the dialog of a mask is."""
    return bool(page.run("return document.querySelector('#mask').open"))


@needs_browser
@pytest.mark.torch
@pytest.mark.timeout(2 * BUILD_S)
def test_from_a_new_class_to_answers_and_back(room: Room, page: Browser) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    from partitioner.networks.families import Backbone, create

    weights = room.folder / "weights"
    weights.mkdir()
    torch.manual_seed(0)
    save_file(create(Backbone(NETWORK, 160), 5).state_dict(), weights / f"{NETWORK}.safetensors")
    fleet = room.folder / "fleet.toml"
    before = read_fleet(fleet)[1]
    for left in room.scenes.glob("*"):
        if left.name not in LABELS:
            # Scenes of other tests.
            left.rename(room.folder / f"left-{os.urandom(4).hex()}")
    room.stage.write_scenes(room.scenes, 18)
    room.stage.show_all(NEW)
    fill(page, "#label", NEW)
    fill(page, "#count", "2")
    click(page, "#start")
    page.wait_for("#recording-text", f"^Put {NEW} before the cameras$")
    page.wait_for("#recording-text", rf"^[12] scenes? of {NEW} recorded$")
    page.wait_for("#classes", rf"{NEW}\s*new")
    # As it would go on for minutes.
    room.stage._write(room.scenes, NEW, [dict.fromkeys(CAMERAS, NEW)] * 18)
    # Enough of each for the test split to have some.
    for label in (LABELS[0], TWIN):
        room.stage._write(room.scenes, label, [dict.fromkeys(CAMERAS, LABELS[0])] * 40)
    click(page, "#build-start")
    # By then the page has dropped the error of the build before.
    until(lambda: bool(page.run("return !document.querySelector('#building').hidden")), "it builds")
    until(lambda: "%" in page.text("#predicted") or build_error(page) != "", "it is built", BUILD_S)
    assert not build_error(page)
    assert page.text("#measured").endswith("%")
    page.wait_for("#measured-text", r"^on \d+ scenes that it never saw$")
    click(page, "#push")
    page.wait_for("#rollout-text", "^All 2 boards serve ")
    made = read_fleet(fleet)[1]
    assert made.digest != before.digest
    assert made.manifest.evaluation is not None
    (pair,) = made.manifest.evaluation.confusions or ()
    assert set(pair.labels) == {LABELS[0], TWIN}
    assert page.text("#confusions").startswith(
        f"Taken for each other: {' and '.join(pair.labels)} "
        f"({pair.confused} of {pair.pictures} scenes). Record more scenes of both"
    )
    assert NEW in made.manifest.labels
    # The gateway's model keeps its name.
    assert made.manifest.name == before.manifest.name
    click(page, "#look")
    page.wait_for("#answer-note", "by 2 of 2 boards")
    until(lambda: has_label(room, page, NEW), "the new class is seen")
    click(page, "#look")
    click(page, "#rollback")
    page.wait_for("#rollout-text", f"^All 2 boards serve {before.manifest.name}")
    assert Bundle.open(fleet.parent / read_devices(fleet).bundle).digest == before.digest
    assert [line for line in page.log() if "401" not in line and "403" not in line] == []


def build_error(page: Browser) -> str:
    return page.text("#build-error")


def has_label(room: Room, page: Browser, label: str) -> bool:
    """Tell whether a look at a new item has this label: some known ones are called unknown."""
    room.stage.show_all(label)
    return page.text("#answer") == label
