"""Good items that anomaly heads learn from: which may be some, and what is learnt when."""

import asyncio
import json
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mdp.client.scenes import SceneFolder
from mdp.errors import InputError, TransferError
from mdp.formats.bundle import MANIFEST, Bundle
from mdp.formats.fleet import read_fleet
from mdp.line.kept import RECORD, read_kept
from mdp.teach import builder as builder_module
from mdp.teach import teacher as teacher_module
from mdp.teach.builder import heads_words, read_heads
from mdp.teach.good import DEFECTS, GOOD, cameras_of, data_words, good_pictures
from mdp.teach.review import GoneError, Review
from mdp.teach.teacher import WAITING, BuildRequest, FleetTeacher, TeachOptions
from mdp.testing.bundles import DEVICES, write_bundle
from mdp.testing.processes import PATIENCE_S

#: Device -> camera. Two cameras are called as other devices are.
CAMERAS = {"alpha": "beta", "beta": "alpha", "gamma": "top"}
INSPECTION = {
    "data": "good", "data_digest": "0" * 64, "good": 40, "members": [], "defective": 0,
    "defects": None, "rate": 0.005,
}  # fmt: skip


def bundle_of(folder: Path, *, heads: bool = True, cameras: bool = True) -> Bundle:
    path = write_bundle(folder) / MANIFEST
    content = json.loads(path.read_text())
    if heads:
        content["inspection"] = INSPECTION
    for part in content["plan"]["assignments"] if cameras else ():
        part["camera"] = CAMERAS[part["device"]]
    path.write_text(json.dumps(content))
    return Bundle.open(folder)


def fleet_of(folder: Path, *more: str, **options: bool) -> Path:
    bundle_of(folder / "bundle", **options)
    entries = "".join(
        f'[[devices]]\ndevice = "{device}"\naddress = "tcp://127.0.0.1:{place + 1}"\nk = {k}\n'
        for place, (device, k) in enumerate(
            [*zip(DEVICES, range(len(DEVICES)), strict=True), *((one, 0) for one in more)]
        )
    )
    path = folder / "fleet.toml"
    path.write_text(f'bundle = "bundle"\n{entries}')
    return path


def keep(kept: Path, item: str, *, suspects: Mapping[str, str] = {}, left_out: str = "") -> Path:
    folder = kept / item
    folder.mkdir(parents=True)
    for device in (*DEVICES, "alpha/attic"):
        if device != left_out:
            (folder / f"{device.replace('/', '+')}.jpg").write_bytes(b"\xff\xd8" + device.encode())
    record = {
        "item": item, "time": "2026-11-25T22:00:01.5+00:00", "why_kept": "different",
        "answer": {"class": "red", "anomaly": 2.5, "suspects": suspects},
    }  # fmt: skip
    (folder / RECORD).write_text(json.dumps(record))
    return folder


def test_pictures_are_called_as_the_bundle_calls_its_cameras(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, "alpha/attic")
    cameras = cameras_of(*read_fleet(fleet))
    # A replica sees what the first device sees.
    assert cameras == CAMERAS
    kept = keep(tmp_path / "kept", "17")
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    review = Review(tmp_path / "kept", tmp_path / "scenes")
    move = review.make_good(
        "17", SceneFolder(tmp_path / "items", GOOD), lambda item: good_pictures(item, cameras, {})
    )
    assert (move.good, move.label) == (True, GOOD)
    assert {path.name: path.read_bytes()[2:] for path in move.scene.iterdir()} == {
        f"{camera}.jpg": device.encode() for device, camera in CAMERAS.items()
    }
    review.undo()
    # Each picture is the same camera's again, and the replica's is there.
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    assert not (tmp_path / "items" / GOOD).exists()


def test_bundles_whose_heads_cannot_learn(tmp_path: Path) -> None:
    plain = fleet_of(tmp_path / "plain", heads=False)
    with pytest.raises(InputError, match="has no anomaly heads: mdp-partition inspect adds them"):
        cameras_of(*read_fleet(plain))
    single = fleet_of(tmp_path / "single", cameras=False)
    with pytest.raises(InputError, match=r"expected a camera for each sub-model, .* for alpha"):
        cameras_of(*read_fleet(single))


@pytest.mark.parametrize(
    ("recorded", "now", "told"),
    [
        ({"beta": "moved"}, {}, r"item 17: beta: finds every item different, the others do not: "
         r"camera moved since the good scenes\? Expected a picture as of the good scenes: put"),
        ({}, {"gamma": "disagrees"}, "item 17: gamma: disagrees with the others: camera covered"),
    ],
)  # fmt: skip
def test_what_a_camera_saw_that_was_moved_since_is_no_good_picture(
    tmp_path: Path, recorded: dict[str, str], now: Any, told: str
) -> None:
    item = read_kept(keep(tmp_path, "17", suspects=recorded))
    with pytest.raises(InputError, match=told):
        good_pictures(item, CAMERAS, now)
    # Another's camera is none of these.
    assert len(good_pictures(item, {"alpha": "top"}, now)) == 1


def test_an_item_without_a_picture_of_each_camera_is_no_good_scene(tmp_path: Path) -> None:
    item = read_kept(keep(tmp_path, "17", left_out="beta"))
    with pytest.raises(InputError, match=r"item 17: expected a picture of each .* none of beta"):
        good_pictures(item, CAMERAS, {})


def test_the_words_of_a_fit_and_its_report(tmp_path: Path) -> None:
    words = heads_words(Path("b/1"), Path("b/2"), data_words(tmp_path, "--data", 0.5))
    assert " ".join(words) == (
        f"inspect --json --bundle b/1 --out b/2 --data {tmp_path / GOOD} --all-good --rate 0.5"
    )
    (tmp_path / DEFECTS).mkdir()
    assert data_words(tmp_path, "--inspect", 1.0)[-2:] == ["--defects", str(tmp_path / DEFECTS)]
    printed = {"digest": "ab" * 32, "inspection": {}, "anomaly": {"good": 41, "default": 0.0238}}
    report = read_heads(Path("b/2"), json.dumps(printed).encode(), 7.06)
    assert (report.bundle, report.good, report.rate, report.seconds) == ("2", 41, 0.0238, 7.1)
    for content in (b"", b"{}", b"\xff", b'{"digest": "", "anomaly": null}'):
        with pytest.raises(InputError, match="mdp-partition inspect printed no report"):
            read_heads(Path("b/2"), content, 0.0)


class PlayedRollout:
    """Boards that serve what they are told, as the fleet file names it."""

    fault = ""

    def __init__(self, fleet: Path, key: Path | None) -> None:
        self._fleet = fleet

    def push(self, folder: Path, told: object) -> None:
        if self.fault:
            raise TransferError(self.fault)
        text = self._fleet.read_text().splitlines()
        self._fleet.write_text("\n".join([f'bundle = "{folder}"', *text[1:], ""]))


#: Copies the bundle, and prints what `inspect` does.
PROGRAM = """
import json, pathlib, shutil, sys
words = sys.argv[1:]
value = lambda option: words[words.index(option) + 1]
shutil.copytree(value("--bundle"), value("--out"))
good = len(list(pathlib.Path(value("--data")).iterdir()))
print("fitting anomaly heads: 50%", file=sys.stderr, flush=True)
print(json.dumps({"digest": "1" * 64, "anomaly": {"good": good, "default": 0.01}}))
"""


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TeachOptions:
    """A fleet whose heads are fitted by a program that is none, in a moment."""
    code, program = tmp_path / "program.py", tmp_path / "mdp-partition"
    code.write_text(PROGRAM)
    # The interpreter's path may have a space, which a first line of its own cannot have.
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(code)])} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(builder_module, "why_no_build", lambda: "")
    monkeypatch.setattr(builder_module, "why_no_heads", lambda: "")
    monkeypatch.setattr(builder_module, "program", lambda: str(program))
    monkeypatch.setattr(teacher_module, "FleetRollout", PlayedRollout)
    monkeypatch.setattr(teacher_module, "QUIET_S", 0.0)
    monkeypatch.setattr(PlayedRollout, "fault", "")
    return TeachOptions(
        fleet=fleet_of(tmp_path),
        scenes=tmp_path / "scenes",
        kept=tmp_path / "kept",
        inspect=tmp_path / "items",
    )


async def end(teacher: FleetTeacher) -> None:
    """Let heads learn and be pushed, as `watch` does."""
    async with asyncio.timeout(PATIENCE_S):
        teacher._tend_heads()
        while teacher._heads.running:
            await asyncio.sleep(0.01)
        teacher._tend_heads()
        while teacher.rollout.under_way:
            await asyncio.sleep(0.01)


def test_good_items_are_learnt_and_pushed(tmp_path: Path, options: TeachOptions) -> None:
    for item in ("17", "18"):
        keep(tmp_path / "kept", item)

    async def teach() -> None:
        teacher = FleetTeacher(options)
        await teacher.scan()
        assert teacher.snapshot()["heads"]["teachable"] is True
        await teacher.make_good("17")
        await teacher.make_good("18")
        told = teacher.snapshot()
        assert (told["heads"]["good"], told["heads"]["waits"]) == (2, True)
        assert told["kept"]["undo"] == {"item": "18", "name": "18", "label": GOOD, "good": True}
        assert (options.builds / WAITING).is_file()
        await end(teacher)
        heads, rollout = teacher.snapshot()["heads"], teacher.snapshot()["rollout"]
        assert (heads["state"], heads["waits"], heads["report"].good) == ("done", False, 2)
        assert (rollout["state"], rollout["bundle"]) == ("done", heads["report"].bundle)
        assert read_fleet(options.fleet)[1].path == options.builds / rollout["bundle"]
        # All is learnt: neither this gateway nor another does anything more.
        assert not (options.builds / WAITING).exists()
        pushed = teacher.rollout
        await end(teacher)
        assert teacher.rollout is pushed
        # What is taken back is learnt, too.
        await teacher.undo()
        told = teacher.snapshot()
        assert (told["heads"]["good"], told["heads"]["waits"]) == (1, True)

    asyncio.run(teach())


def test_heads_that_boards_do_not_take_are_pushed_when_asked_again(
    tmp_path: Path, options: TeachOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path / "kept", "17")
    monkeypatch.setattr(PlayedRollout, "fault", "alpha: no connection for 1 s")

    async def teach() -> None:
        teacher = FleetTeacher(options)
        await teacher.make_good("17")
        await end(teacher)
        assert (teacher.rollout.state, teacher.rollout.error) == (
            "failed", "alpha: no connection for 1 s",
        )  # fmt: skip
        failed = teacher.rollout
        await end(teacher)
        # It is not tried for ever.
        assert teacher.rollout is failed
        assert read_fleet(options.fleet)[1].path == tmp_path / "bundle"
        assert (options.builds / WAITING).is_file()
        monkeypatch.setattr(PlayedRollout, "fault", "")
        shutil.rmtree(options.builds / str(failed.bundle))
        teacher.learn_again()
        await end(teacher)
        assert teacher.rollout.state == "done"

    asyncio.run(teach())


def test_another_gateway_learns_what_the_one_before_had_no_time_for(
    tmp_path: Path, options: TeachOptions
) -> None:
    keep(tmp_path / "kept", "17")

    async def teach(*, first: bool) -> str:
        teacher = FleetTeacher(options)
        if first:
            await teacher.make_good("17")
            await teacher.close()
            return "closed"
        await end(teacher)
        return teacher.rollout.state

    assert asyncio.run(teach(first=True)) == "closed"
    assert asyncio.run(teach(first=False)) == "done"
    assert not (options.builds / WAITING).exists()


def test_heads_of_a_bundle_that_is_served_no_longer_are_not_pushed(
    tmp_path: Path, options: TeachOptions
) -> None:
    keep(tmp_path / "kept", "17")

    async def teach() -> None:
        teacher = FleetTeacher(options)
        await teacher.make_good("17")
        teacher._tend_heads()
        while teacher._heads.running:
            await asyncio.sleep(0.01)
        teacher._learns_for = "another"
        teacher._tend_heads()
        # They learn once more, for the one that is served.
        assert (teacher.rollout.state, teacher.snapshot()["heads"]["waits"]) == ("none", True)

    asyncio.run(teach())


def test_what_forbids_what_while_heads_learn(tmp_path: Path, options: TeachOptions) -> None:
    keep(tmp_path / "kept", "17")

    async def teach() -> None:
        teacher = FleetTeacher(options)
        await teacher.make_good("17")
        teacher._tend_heads()
        assert teacher._heads.running
        works: list[Callable[[], None]] = [lambda: teacher.build(BuildRequest()), teacher.roll_back]
        for work in works:
            with pytest.raises(InputError, match="anomaly heads learn from good items: expected"):
                work()
        with pytest.raises(InputError, match="anomaly heads learn"):
            await teacher.undo()
        await teacher.close()

    asyncio.run(teach())


def test_refused_items_stay_where_they_are(tmp_path: Path, options: TeachOptions) -> None:
    keep(tmp_path / "kept", "17")
    keep(tmp_path / "kept", "18", suspects={"alpha": "moved"})

    async def teach() -> None:
        teacher = FleetTeacher(options)
        with pytest.raises(InputError, match="item 18: alpha: finds every item different"):
            await teacher.make_good("18")
        with pytest.raises(GoneError):
            await teacher.make_good("19")
        teacher.suspected = lambda: {"gamma": "frozen"}
        with pytest.raises(InputError, match="item 17: gamma: the same picture again and again"):
            await teacher.make_good("17")
        teacher.suspected = dict
        # The program that builds is away.
        teacher._why_no_heads = "onnx is not installed here"
        for work in (teacher.make_good("17"), asyncio.to_thread(teacher.learn_again)):
            with pytest.raises(InputError, match="onnx is not installed here"):
                await work
        teacher._why_no_heads = ""
        shutil.rmtree(tmp_path / "bundle")
        bundle_of(tmp_path / "bundle", heads=False)
        with pytest.raises(InputError, match="has no anomaly heads"):
            await teacher.make_good("17")
        with pytest.raises(InputError, match="has no anomaly heads"):
            teacher.learn_again()
        await teacher.scan()
        assert teacher.snapshot()["heads"]["teachable"] is False
        # Boards that go back to a bundle without heads in the meantime.
        teacher._learn_s = time.monotonic()
        teacher._tend_heads()
        heads = teacher.snapshot()["heads"]
        assert (heads["state"], heads["waits"]) == ("failed", False)
        assert "has no anomaly heads" in heads["error"]

    asyncio.run(teach())
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["17", "18"]
    assert not (tmp_path / "items").exists()
    assert not options.builds.exists()


def test_without_a_folder_nothing_is_learnt(tmp_path: Path) -> None:
    keep(tmp_path / "kept", "17")
    teacher = FleetTeacher(
        TeachOptions(fleet=fleet_of(tmp_path), scenes=tmp_path / "s", kept=tmp_path / "kept")
    )
    with pytest.raises(GoneError, match="expected --teach-inspect DIR"):
        asyncio.run(teacher.make_good("17"))
    assert teacher.snapshot()["heads"]["teachable"] is False


def test_a_build_of_classes_keeps_its_heads(tmp_path: Path, options: TeachOptions) -> None:
    started: list[list[str]] = []
    config = tmp_path / "run.toml"
    config.write_text("[plan]\nlatency_ms = 10\n")
    wanted = TeachOptions(
        fleet=options.fleet, scenes=options.scenes, config=config, inspect=options.inspect
    )
    teacher = FleetTeacher(wanted)
    played: Any = SimpleNamespace(running=False, start=lambda words, out: started.append(words))
    teacher._builder = played
    teacher.build(BuildRequest())
    # Nothing is there to learn from yet.
    assert "--inspect" not in started[0]
    (tmp_path / "items" / GOOD).mkdir(parents=True)
    teacher.build(BuildRequest())
    assert started[1][-5:] == [
        "--inspect", str(tmp_path / "items" / GOOD), "--all-good", "--rate", "0.5",
    ]  # fmt: skip


def test_a_scan_that_began_before_a_move_does_not_bring_the_item_back(
    tmp_path: Path, options: TeachOptions
) -> None:
    kept = keep(tmp_path / "kept", "17")

    async def teach() -> int:
        teacher = FleetTeacher(options)
        review = teacher._require_review()
        look, listed, released = review.items, threading.Event(), threading.Event()

        def look_slowly() -> Any:
            found = look()
            listed.set()
            released.wait(PATIENCE_S)
            return found

        review.items = look_slowly  # type: ignore[method-assign]
        earlier = asyncio.create_task(teacher.scan())
        await asyncio.to_thread(listed.wait, PATIENCE_S)
        review.items = look  # type: ignore[method-assign]
        later = asyncio.create_task(teacher.make_good("17"))
        async with asyncio.timeout(PATIENCE_S):
            while kept.exists():
                await asyncio.sleep(0.01)
            released.set()
            await asyncio.gather(earlier, later)
        return int(teacher.snapshot()["kept"]["total"])

    assert asyncio.run(teach()) == 0
