"""From a new class to answers by all boards, timed: in the page, and by commands.

    make solids OUT=solids MORE='--classes 6 --scenes 40 --unknown 24 --seed 38'
    python -m tests.gateway.teaching solids/ [--pictures]      (needs the extra `weights`, chromium)

Four agents have folders as cameras, before scenes of solid items, two a second. They serve a bundle
of all classes but one; that one is taught. With --pictures the page's pictures in docs/pictures are
written on the way.
"""

import argparse
import io
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from mdp.line.kept import RECORD
from mdp.testing.folder_cameras import FolderCameras
from mdp.testing.processes import until
from tests.support.fleet import BIN, PLENTY_MS, ROOT, Fleet
from tests.support.web.browser import Browser, browser
from tests.support.web.gateway import gateway

PICTURES = ROOT / "docs" / "pictures"
PLACES = ("top", "left", "right", "back")
DEVICES = tuple(f"raspberry-pi-5-{number + 1}" for number in range(len(PLACES)))
UNKNOWN, TAUGHT, SCENES = "unknown", "square_nut", 20
PERIOD_S, PATIENCE_S = 0.5, 900.0
LATENCY_MS = 20
TOKEN = "teacher-0123456789abc"


class Belt(FolderCameras):
    """Cameras before one scene after another of one kind of item."""

    def __init__(self, folder: Path, solids: Path) -> None:
        super().__init__(folder, DEVICES, fps=5)
        self._solids, self._turns = solids, 0
        self._lock, self._over = threading.Lock(), threading.Event()
        self._label, self._scenes = TAUGHT, slice(0, 30)

    def show_item(self, label: str, scenes: slice) -> None:
        """From now on show these scenes of `label`."""
        with self._lock:
            self._label, self._scenes = label, scenes
        self.step()

    def step(self) -> None:
        """Show the next one."""
        with self._lock:
            found = sorted((self._solids / self._label).iterdir())[self._scenes]
            scene = found[self._turns % len(found)]
            self._turns += 1
            self.put(pictures_of(scene))

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Go on in this block."""

        def run() -> None:
            while not self._over.wait(PERIOD_S):
                self.step()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()


def pictures_of(scene: Path) -> dict[str, bytes]:
    """By device: the picture of its camera."""
    return {
        device: (scene / f"{place}.jpg").read_bytes()
        for device, place in zip(DEVICES, PLACES, strict=True)
    }


def command(program: str, *words: object) -> str:
    """The output of a command, which has to succeed."""
    done = subprocess.run(
        [str(BIN / program), *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(scenes: Path, out: Path) -> None:
    """A bundle of frozen networks."""
    command(
        "mdp-partition", "build", "--data", scenes, "--out", out, "--minutes", 0, "--profiles",
        f"raspberry-pi-5*{len(DEVICES)}", "--latency-ms", LATENCY_MS,
    )  # fmt: skip


def write_scenes(solids: Path, out: Path) -> None:
    """Scenes of all classes but the one that is to be taught."""
    for label in solids.iterdir():
        if label.name in (UNKNOWN, TAUGHT):
            continue
        for scene in sorted(label.iterdir())[:SCENES]:
            folder = out / label.name / scene.name
            folder.mkdir(parents=True)
            for device, content in pictures_of(scene).items():
                (folder / f"{device}.jpg").write_bytes(content)


def keep_items(solids: Path, kept: Path) -> None:
    """Kept items, as the line leaves them."""
    for number, (why, label) in enumerate(
        (
            ("unknown", TAUGHT),
            ("unknown", TAUGHT),
            ("unsure", "hex_nut"),
            ("disagreement", "hex_nut"),
        )
    ):
        folder = kept / f"{1041 + 17 * number}"
        folder.mkdir(parents=True)
        scene = sorted((solids / label).iterdir())[30 + number]
        for device, content in pictures_of(scene).items():
            (folder / f"{device}.jpg").write_bytes(content)
        said = ("hex_nut", "cap_nut", "hex_nut", "flange_nut")
        answer = {
            "class": "hex_nut", "probability": 0.47 + number / 50, "known": why != "unknown",
            "novelty": 1.0 - number / 10,
            "devices": {
                device: {"class": own, "probability": 0.41 + place / 10}
                for place, (device, own) in enumerate(zip(DEVICES, said, strict=True))
            },
        }  # fmt: skip
        record = {
            "item": folder.name, "time": f"2026-11-25T22:00:0{number}+00:00", "why_kept": why,
            "answer": answer,
        }  # fmt: skip
        (folder / RECORD).write_text(json.dumps(record))


@contextmanager
def room(folder: Path, bundle: Path, solids: Path) -> Iterator[tuple[Fleet, Belt]]:
    """Agents that serve `bundle`, before a belt."""
    folder.mkdir()
    (folder / "client.limits").write_text("record = true\npush = true\nmask = true\n")
    belt = Belt(folder, solids)
    belt.step()
    with Fleet(folder, bundle, keys=True) as fleet, belt.moving():
        for device in DEVICES:
            fleet.start(
                device, *belt.source(device), "--allow-record", "--threads", 1,
                "--allow-push", folder / f"pushed-{device}",
                "--mask", folder / f"mask-{device}.toml", "--allow-mask", wait_for=None,
            )  # fmt: skip
        for device in DEVICES:
            fleet.agents[device].wait_for("READY")
        fleet.write()
        yield fleet, belt


class Watch:
    """Seconds since its start, by what was reached."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self.reached: dict[str, float] = {}

    def note(self, what: str) -> None:
        """Note that this is reached now."""
        self.reached[what] = round(time.monotonic() - self._began_s, 1)


def by_commands(folder: Path, bundle: Path, solids: Path) -> dict[str, float]:
    """Record, build, push and look by commands; returns the seconds of each."""
    scenes, built = folder / "scenes", folder / "built"
    with room(folder, bundle, solids) as (fleet, belt):
        write_scenes(solids, scenes)
        file, watch = fleet.folder / "fleet.toml", Watch()
        command(
            "mdp", "record", "--fleet", file, "--label", TAUGHT, "--count", SCENES,
            "--every", "500ms", "--out", scenes,
        )  # fmt: skip
        watch.note("recorded")
        build(scenes, built)
        watch.note("built")
        command("mdp", "bundle", "push", built, "--fleet", file)
        watch.note("pushed")
        fleet.bundle = built
        fleet.write()
        belt.show_item(TAUGHT, slice(30, 40))
        until(lambda: looks_right(file), "all boards answer", PATIENCE_S)
        watch.note("answered")
    return watch.reached


def looks_right(file: Path) -> bool:
    """Tell whether all boards together call it what it is."""
    told = json.loads(command("mdp", "look", "--fleet", file, "--deadline-ms", PLENTY_MS, "--json"))
    return len(told["used"]) == len(DEVICES) and told["label"] == TAUGHT and told["known"]


def in_page(
    folder: Path, bundle: Path, solids: Path, show: Callable[[Browser, str], None]
) -> dict[str, float]:
    """The same in the page; returns the seconds of each."""
    scenes, kept = folder / "scenes", folder / "kept"
    with room(folder, bundle, solids) as (fleet, belt):
        write_scenes(solids, scenes)
        keep_items(solids, kept)
        (folder / "teachers").touch(0o600)
        (folder / "teachers").write_text(f"{TOKEN}\n")
        options = (
            "--fleet", fleet.folder / "fleet.toml", "--teach", scenes, "--teach-tokens",
            folder / "teachers", "--teach-kept", kept, "--deadline-ms", PLENTY_MS,
        )  # fmt: skip
        with gateway(*options) as served, browser(folder / "chromium") as page:
            page.emulate()
            page.open(f"{served.url}/teach")
            page.type("#token", f"{TOKEN}\n")
            page.wait_for("#live", "^Ready$")
            page.wait_for("#cameras-note", "^Live")
            watch = Watch()
            page.run("document.querySelector('#every').value = '0.5'")
            page.type("#label", f"{TAUGHT}\n")
            page.wait_for("#recording-text", "^Recording")
            until(lambda: int(page.text("#count-down") or 0) > 6, "six scenes")
            show(page, "teach-record")
            wait_long_for(page, "#recording-text", "recorded")
            watch.note("recorded")
            page.run("document.querySelector('#build-start').click()")
            wait_long_for(page, "#build-step", "measuring")
            show(page, "teach-build")
            until(lambda: "%" in page.text("#predicted"), "it is built", PATIENCE_S)
            watch.note("built")
            page.run("document.querySelector('#push').click()")
            wait_long_for(page, "#rollout-text", f"^All {len(DEVICES)} boards serve")
            watch.note("pushed")
            belt.show_item(TAUGHT, slice(30, 40))
            page.run("document.querySelector('#look').click()")
            wait_long_for(page, "#answer-note", f"by {len(DEVICES)} of {len(DEVICES)} boards")
            wait_long_for(page, "#answer", f"^{TAUGHT}$")
            watch.note("answered")
            for name, how in (
                ("teach-light", {}),
                ("teach-dark", {"dark": True}),
                ("teach-phone", {"width": 390, "height": 844, "scale": 1.5}),
            ):
                page.emulate(**how)
                time.sleep(1.0)
                show(page, name)
            page.emulate(height=1000)
            page.run("document.querySelector('#cameras button').click()")
            wait_long_for(page, "#boxes", "Region")
            page.run("document.querySelector('#mask-add').click()")
            show(page, "teach-mask")
    return watch.reached


def wait_long_for(page: Browser, selector: str, wanted: str) -> None:
    """As `wait_for`, with the patience that a build takes."""
    until(
        lambda: re.search(wanted, page.text(selector)) is not None,
        f"{selector} shows {wanted!r}",
        PATIENCE_S,
    )


def main(words: list[str]) -> None:
    """Time both; prints JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.gateway.teaching")
    parser.add_argument("solids", type=Path, help="folder of `make solids`")
    parser.add_argument("--pictures", action="store_true", help="write docs/pictures/teach-*.webp")
    parser.add_argument("--shots", type=Path, help="write PNGs into this folder")
    options = parser.parse_args(words)

    def show(page: Browser, name: str) -> None:
        content = page.picture()
        if options.shots is not None:
            options.shots.mkdir(exist_ok=True)
            (options.shots / f"{name}.png").write_bytes(content)
        if options.pictures:
            with Image.open(io.BytesIO(content)) as shot:
                path = PICTURES / f"{name}.webp"
                shot.convert("RGB").save(path, quality=78, method=6)

    with TemporaryDirectory() as name:
        folder = Path(name)
        write_scenes(options.solids, folder / "first")
        build(folder / "first", folder / "bundle")
        bundle = folder / "bundle"
        page_s = in_page(folder / "page", bundle, options.solids, show)
        print(json.dumps({"page": page_s}), flush=True)
        commands_s = by_commands(folder / "commands", bundle, options.solids)
        print(json.dumps({"page": page_s, "commands": commands_s}))


if __name__ == "__main__":
    main(sys.argv[1:])
