"""Settings and bundles that cannot be taught through the gateway."""

import asyncio
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from mdp.errors import InputError
from mdp.teach.builder import read_report
from mdp.teach.recorder import RecordRequest
from mdp.teach.teacher import BuildRequest, FleetTeacher, TeachOptions
from mdp.testing.bundles import DEVICES, write_bundle

#: The part that is read of what a build prints.
REPORT = json.dumps({
    "digest": "0" * 64, "pictures": 9, "members": [],
    "subsets": [{"members": [0], "stacked": 0.5, "bagged": 0.5}],
}).encode()  # fmt: skip


def fleet_of(folder: Path, *, several: bool) -> Path:
    write_bundle(folder / "bundle", several=several)
    entries = "".join(
        f'[[devices]]\ndevice = "{device}"\naddress = "tcp://127.0.0.1:{k + 1}"\nk = {k}\n'
        for k, device in enumerate(DEVICES)
    )
    path = folder / "fleet.toml"
    path.write_text(f'bundle = "bundle"\n{entries}')
    return path


def options(folder: Path, *, several: bool) -> TeachOptions:
    fleet = fleet_of(folder, several=several)
    return TeachOptions(fleet=fleet, key=None, scenes=folder / "scenes", kept=None)


def test_scenes_teach_one_label_each(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "several").mkdir()
    assert FleetTeacher(options(tmp_path / "one", several=False)).devices == list(DEVICES)
    with pytest.raises(InputError, match="--teach: expected a bundle with one label an item"):
        FleetTeacher(options(tmp_path / "several", several=True))


def test_the_page_follows_the_fleet_file(tmp_path: Path) -> None:
    teacher = FleetTeacher(options(tmp_path, several=False))
    fleet = tmp_path / "fleet.toml"
    whole = fleet.read_text()

    async def follow() -> None:
        fleet.write_text(whole.rpartition("[[devices]]")[0])
        await teacher.scan()
        assert teacher.snapshot()["cameras"] == list(DEVICES[:-1])
        fleet.write_text("bundle = ")
        await teacher.scan()
        assert teacher.snapshot()["cameras"] == list(DEVICES[:-1])
        fleet.write_text(whole)
        await teacher.scan()
        assert teacher.snapshot()["cameras"] == list(DEVICES)

    asyncio.run(follow())


def test_a_folder_whose_name_is_no_text_is_no_class(tmp_path: Path) -> None:
    teacher = FleetTeacher(options(tmp_path, several=False))
    for name in (b"nut", b"gr\xfcn"):
        os.makedirs(os.fsencode(tmp_path / "scenes") + b"/" + name + b"/0001")  # noqa: PTH103
    asyncio.run(teacher.scan())
    classes = teacher.snapshot()["classes"]
    assert [one.label for one in classes] == ["nut"]
    assert json.loads(msgspec.json.encode(classes))[0]["scenes"] == 1


def test_a_bundle_of_several_labels_under_a_page_that_runs(tmp_path: Path) -> None:
    """It was pushed by somebody else, or its agents went back to it."""
    teacher = FleetTeacher(options(tmp_path, several=False))
    told = "--teach: expected a bundle with one label an item"

    async def refuse_all() -> None:
        await teacher.scan()
        assert teacher.snapshot()["problem"] == ""
        shutil.rmtree(tmp_path / "bundle")
        write_bundle(tmp_path / "bundle", several=True)
        await teacher.scan()
        assert told in teacher.snapshot()["problem"]
        with pytest.raises(InputError, match=told):
            await teacher.put_right("item", "red")
        teacher._why_no_build = ""
        folder = tmp_path / "scenes.builds" / "build"
        teacher._builder.progress.report = read_report(folder, REPORT, 1.0)
        with pytest.raises(InputError, match=told):
            teacher.record(RecordRequest(label="red"))
        with pytest.raises(InputError, match=told):
            teacher.build(BuildRequest())
        with pytest.raises(InputError, match=told):
            teacher.push()
        shutil.rmtree(tmp_path / "bundle")
        write_bundle(tmp_path / "bundle")
        await teacher.scan()
        assert teacher.snapshot()["problem"] == ""

    asyncio.run(refuse_all())
    assert not (tmp_path / "scenes").exists()


def test_builds_are_beside_the_scenes_however_these_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenes = tmp_path / "scenes"
    (scenes / "bolt").mkdir(parents=True)
    builds = tmp_path / "scenes.builds"
    monkeypatch.chdir(scenes)
    for there in (scenes, Path()):
        assert TeachOptions(fleet=tmp_path, scenes=there).builds == builds
    monkeypatch.chdir(scenes / "bolt")
    assert TeachOptions(fleet=tmp_path, scenes=Path("..")).builds == builds


def test_settings_of_builds_have_one_label(tmp_path: Path) -> None:
    config = tmp_path / "build.toml"
    wanted = replace(options(tmp_path, several=False), config=config)
    for text in ('[run]\nlabels = "one"\n', "[plan]\nlatency_ms = 1.5\n", "no settings"):
        config.write_text(text)
        FleetTeacher(wanted)
    config.write_text('[run]\nlabels = "several"\n')
    told = (
        r"build\.toml: key `run\.labels`: expected one label an item, as scenes teach, got several"
    )
    with pytest.raises(InputError, match=told):
        FleetTeacher(wanted)
