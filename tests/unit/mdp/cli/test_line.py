"""Options of `mdp watch --trigger`, and a fleet file that changes under it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mdp.cli import line
from mdp.cli.line import LineOptions
from mdp.client import following
from mdp.errors import ConfigError, InputError
from mdp.line.rules import LineRules

PLAIN: dict[str, Any] = {
    "fleet": Path("fleet.toml"), "trigger": "still", "every": None, "out": None,
    "deadline_ms": 80.0, "verdict_ms": None, "within_ms": None, "delay": "0ms", "equal": 1,
    "rest": "300ms", "rules": [], "passing": [], "empty": None, "sure": 0.5, "keep": None,
    "keep_mb": 500.0, "broker": None, "login": None, "ca": None, "name": None, "bind": None,
    "tokens": None, "certificate": None, "private_key": None, "fusion": "stacked", "key": None,
    "different": "fused",
    "insecure": False, "json": False,
}  # fmt: skip


def options(**more: Any) -> LineOptions:
    return LineOptions(**{**PLAIN, **more})


def test_triggers_have_kinds() -> None:
    for text in ("interval", "still", "http"):
        assert options(trigger=text).kind == text
    asked = options(trigger="mqtt:belt/item:a")
    assert (asked.kind, asked.topic) == ("mqtt", "belt/item:a")
    for text in ("", "mqtt", "mqtt:", "mqtt:a\nb", "http:8080"):
        with pytest.raises(InputError, match="expected interval, still, mqtt:TOPIC or http"):
            print(options(trigger=text).kind)


def test_a_verdict_has_the_time_of_all_its_looks() -> None:
    assert options().timing().verdict_s == 0.08
    # Of three looks, each may take longer than from one to the next, or shorter.
    assert options(equal=3, every="100ms").timing().verdict_s == pytest.approx(0.28)
    assert options(equal=3, every="10ms").timing().verdict_s == pytest.approx(0.24)
    asked = options(verdict_ms=500.0, delay="0.2s").timing()
    assert (asked.verdict_s, asked.delay_s, asked.every_s) == (0.5, 0.2, 0.1)
    assert options(trigger="interval").timing().every_s == 1.0


def test_counted_ids_begin_with_the_start() -> None:
    assert line._prefix("2026-11-25T22:17:13.123+00:00") == "20261125T221713Z-"


def test_frames_of_states_may_be_older_than_those_of_items() -> None:
    assert options().frame_within_ms == 250.0
    assert options(trigger="interval").frame_within_ms == 2000.0
    assert options(within_ms=30.0).frame_within_ms == 30.0


def test_a_changed_fleet_is_followed_between_items(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stamps, now_s = [[(1, 1)]], [0.0]
    labels = ["good", "dent"]
    calls: list[str] = []

    def reload(timeout_s: float) -> None:
        # Items are waiting meanwhile.
        assert timeout_s == line.RELOAD_S
        calls.append("reload")
        if labels == []:
            raise ConfigError("fleet.toml: being written")

    client: Any = SimpleNamespace(
        fleet=SimpleNamespace(devices=[SimpleNamespace(k=0), SimpleNamespace(k=1)]),
        bundle=SimpleNamespace(
            manifest=SimpleNamespace(labels=labels, inspection=None, several=False)
        ),
        reload=reload,
    )
    monkeypatch.setattr(following, "files_stamp", lambda path, fleet: stamps[-1])
    monkeypatch.setattr(line, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    sinks: Any = SimpleNamespace(renew=lambda: calls.append("renew"))
    book: Any = SimpleNamespace(between_items=True, renew=lambda: calls.append("new looks"))
    follower = line._Follower(options(), client, LineRules(needed={"dent": 2}), sinks, book)

    def follow(after_s: float = 1.0, *, idle: bool = True) -> list[str]:
        now_s[0] += after_s
        calls.clear()
        follower.follow(idle=idle)
        return [*calls]

    assert follow() == []
    stamps.append([(2, 2)])
    assert follow(0.0) == []
    # Not between the looks at one item, which have to be equal.
    book.between_items = False
    assert follow() == []
    book.between_items = True
    assert follow() == ["reload", "new looks", "renew"]
    assert follow() == []
    # A line that is never idle has its items first.
    stamps.append([(2, 3)])
    assert [follow(idle=False), follow(9.0, idle=False)] == [[], ["reload", "new looks", "renew"]]
    labels.remove("dent")
    stamps.append([(3, 3)])
    assert follow() == ["reload", "new looks", "renew"]
    said = capsys.readouterr().err
    assert said == "mdp: --rule dent: expected a class of the bundle: good; it is never seen\n"
    # What is being replaced is read again.
    labels.clear()
    stamps.append([(4, 4)])
    assert [follow(), follow()] == [["reload"], ["reload"]]
    said = "mdp: fleet.toml: being written; going on with what was read before\n"
    assert capsys.readouterr().err == said
