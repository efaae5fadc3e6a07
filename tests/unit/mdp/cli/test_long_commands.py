"""Commands that run until they are stopped: nothing on their stderr may hold them up."""

from collections.abc import Callable
from typing import Any

import pytest

from mdp.cli import discover, gateway, main, mqtt, record, watch
from mdp.errors import InputError
from partitioner.cli import crew
from partitioner.cli import main as partitioner_main
from tests.support.command_lines import run_here

FLEET = ("--fleet", "no-such-fleet.toml")
JOIN = ("--name", "a", "--data", "no-such-data", "--key", "no-such-key", "--run", "run")


@pytest.mark.parametrize(
    ("module", "entry", "words"),
    [
        (gateway, main.main, ("gateway", *FLEET)),
        (mqtt, main.main, ("mqtt", *FLEET, "--broker", "localhost")),
        (watch, main.main, ("watch", *FLEET)),
        (watch, main.main, ("look", *FLEET)),
        (record, main.main, ("record", *FLEET, "--label", "x", "--out", "scenes")),
        (discover, main.main, ("fleet", "discover", "--bundle", "no-such/bundle")),
        (crew, partitioner_main.main, ("crew", "join", "localhost:1", *JOIN)),
    ],
)
def test_libraries_are_quiet_before_anything_else(
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    entry: Callable[[], object],
    words: tuple[str, ...],
) -> None:
    def stop() -> None:
        raise InputError("quiet first")

    monkeypatch.setattr(module, "quiet_libraries", stop)
    done = run_here(entry, "mdp", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("quiet first\n")
