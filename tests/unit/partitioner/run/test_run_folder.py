"""A run goes on only as it was started, and only in one process at a time."""

from pathlib import Path

import msgspec
import pytest

from mdp.errors import InputError
from partitioner.run.folder import RunFolder
from partitioner.run.settings import (
    Augmentation,
    DataFacts,
    MemberSchedule,
    Settings,
    TeacherFacts,
    TeacherSchedule,
    differences,
)
from tests.support.models.runs import tiny_plan


def settings(source: str = "digits", **changes: object) -> Settings:
    facts = DataFacts(
        source=source, classes=10, limit_train=None, limit_test=None,
        train="a", calibration="b", test="c",
    )  # fmt: skip
    plain = Settings(
        seed=0,
        autocast="fp32",
        data=facts,
        teacher=TeacherFacts(name="vit", pretrained=False, checkpoint=None, args={"depth": 2}),
        teacher_schedule=TeacherSchedule(),
        schedule=MemberSchedule(),
        augmentation=Augmentation(),
    )
    return msgspec.structs.replace(plain, **changes)


def begin_run(path: Path) -> RunFolder:
    """A run whose teacher has been trained for an epoch."""
    run = RunFolder(path)
    run.start_or_continue(settings(), tiny_plan())
    run.checkpoint("teacher").write_bytes(b"")
    return run


def test_settings_may_change_until_something_is_trained(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.start_or_continue(settings(), tiny_plan())
    run.cache.mkdir()
    run.start_or_continue(settings(seed=3), tiny_plan())
    assert run.settings().seed == 3


def test_other_settings_are_refused_and_what_was_asked_for_is_named_first(tmp_path: Path) -> None:
    run, plan = begin_run(tmp_path / "run"), tiny_plan()
    first = msgspec.structs.replace(plan.assignments[0], why="other", memory_bytes=9)
    later = msgspec.structs.replace(
        plan, target_ms=9, deadline_ms=12.5, assignments=[first, plan.assignments[1]]
    )
    pictures = msgspec.structs.replace(settings().data, calibration="ab" * 16)
    for other, planned, expected in (
        (
            settings(seed=3, schedule=MemberSchedule(epochs=7)),
            plan,
            r"schedule\.epochs was 20, is now 7; seed was 0, is now 3",
        ),
        (settings(), later, r"target_ms was 5\.0, is now 9"),
        (settings(data=pictures), plan, "the calibration pictures differ"),
    ):
        with pytest.raises(InputError, match=rf"other settings: {expected} \(give the same"):
            run.start_or_continue(other, planned)
        assert run.settings() == settings()


def test_pictures_may_move_as_long_as_they_are_the_same(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.start_or_continue(settings("/old/place"), tiny_plan())
    run.start_or_continue(settings("/new/place"), tiny_plan())
    assert run.settings().data.source == "/new/place"


def test_what_is_no_run_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a run folder of mdp-partition train"):
        RunFolder(tmp_path).settings()
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="expected a new, an empty or a run folder"):
        RunFolder(tmp_path).start_or_continue(settings(), tiny_plan())
    with pytest.raises(InputError, match="run: cannot be made: Not a directory"):
        RunFolder(tmp_path / "thesis.txt" / "run").lock().__enter__()


def test_an_unfinished_run_is_not_exported(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.start_or_continue(settings(), tiny_plan())
    run.teacher.write_bytes(b"")
    with pytest.raises(InputError, match=r"member-0\.safetensors, member-1\.safetensors missing"):
        run.require_trained(tiny_plan())


def test_one_process_at_a_time_and_no_leftovers(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    with run.lock():
        left = run.path / ".teacher.safetensors.00.partial"
        left.write_bytes(b"half")
        with pytest.raises(InputError, match="another mdp-partition is at work there"):
            RunFolder(run.path).lock().__enter__()
    with run.lock():
        assert not left.exists()


def test_what_is_refused_leaves_no_folder_behind(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    with pytest.raises(InputError), run.lock():
        raise InputError("refused")
    assert not run.path.exists()
    with run.lock():
        run.start_or_continue(settings(), tiny_plan())
    with pytest.raises(InputError), run.lock():
        raise InputError("refused")
    assert run.plan_file.exists()


def test_differences_are_limited_to_five() -> None:
    old = {str(number): number for number in range(8)}
    assert differences(old, old) == ""
    found = differences(old, dict.fromkeys(old, -1))
    assert found.startswith("0 was 0, is now -1; ")
    assert found.endswith(" and 3 more")
    assert differences({"a": [1]}, {"a": [1, 2]}) == "a.1 was absent, is now 2"
