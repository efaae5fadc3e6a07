"""The comparison under chaos fails on each broken promise, and its bundles change in turns."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak.pictures import DEVICES
from benchmarks.truth import changes
from benchmarks.truth.__main__ import SECOND, STYLES, count_compared, failures
from benchmarks.truth.changes import HELD, Changes, point

CLIENT = {
    "style": "sync", "open": 0, "counts": {"begun": 9, "ended": 9, "complete": 5, "partial": 3},
    "wrong": [], "counters": {}, "reasons": {"DeadlineExceeded": 1}, "begins": {"": 4, SECOND: 4},
}  # fmt: skip
WELL: dict[str, Any] = {
    "clients": [CLIENT], "healed": True, "complaints": [], "changes": {"changes": 1},
}  # fmt: skip


@pytest.mark.parametrize(
    "changed",
    [
        {"healed": False},
        {"complaints": ["the gateway: 1 unforeseen errors"]},
        {"changes": {}},
        *({"clients": [CLIENT | change]} for change in (
            {"open": 1}, {"wrong": ["call 3: nothing about beta"]}, {"counters": {"malformed": 2}},
            {"reasons": {"HTTP 400": 1}}, {"begins": {"": 8}},
        )),
    ],
)  # fmt: skip
def test_each_broken_promise_fails_a_run(changed: dict[str, Any]) -> None:
    assert failures(WELL) == []
    assert len(failures(WELL | changed)) == 1


def test_answers_are_counted_and_errors_are_not() -> None:
    assert count_compared([CLIENT, CLIENT]) == 16
    assert {"sync", "stream", "async", "classify", "infer"} == set(STYLES)


class Ended(Exception):
    """Ends a run of changes."""


def test_bundles_change_in_turns_and_by_rollbacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused push is tried again before clients hold the bundle, and every third goes back."""
    bundles = [tmp_path / name for name in ("first", "second")]
    for bundle in bundles:
        bundle.mkdir()
    point(tmp_path, bundles[0])
    made: list[tuple[str, str, str]] = []
    codes = iter([3, *[0] * 7, 3])

    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        held = (tmp_path / HELD).resolve().name
        made.append((words[2], Path(words[3]).name, held))
        code = next(codes, None)
        if code is None:
            raise Ended
        return subprocess.CompletedProcess(words, code, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(changes, "EVERY_S", (0.0, 0.0))
    monkeypatch.setattr(changes, "AGAIN_S", 0.0)
    turns = Changes(tmp_path / "fleet.toml", bundles, seed=1)
    with pytest.raises(Ended):
        turns._run()
    assert made == [
        ("push", "second", "first"),
        ("push", "second", "first"),
        ("push", "first", "second"),
        *(("rollback", device, "first") for device in DEVICES),
        ("push", "second", "first"),
        ("push", "first", "second"),
        ("push", "second", "first"),
        ("push", "second", "first"),
    ]
    assert turns.counts["changes"] == 4
    assert turns.counts["by rollback"] == 1
    assert turns.complaints == []


def test_an_unforeseen_exit_code_is_a_complaint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(words: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(words, 1, "", "unforeseen\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(changes, "PATIENCE_S", -1.0)
    turns = Changes(tmp_path / "fleet.toml", [tmp_path], seed=1)
    turns._push(tmp_path)
    first, second = turns.complaints
    assert first == "push: exit code 1: unforeseen"
    assert "is not served after" in second
