"""The command's options, before anything is measured."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from devices.cli.main import app
from mdp.errors import InputError


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--out", "here.json"), r"^--out: expected a file NAME\.toml, got 'here\.json'$"),
        (("--out", "x/Here.toml"), r"^--name 'Here': expected 1 to 64 of a-z"),
        (("--out", "a.toml", "--name", "b"), "^--name: expected 'a', the stem of --out, got 'b'$"),
        (("--out", "a.toml", "--name", "-b-"), "^--name '-b-': expected 1 to 64 of a-z"),
        (("--out", "a.toml", "--peer", "nas:1"), "^--peer: expected tcp://HOST:PORT of a running"),
        (("--out", "a.toml", "--share", "--shapes", "3"), "^--share: expected no --shapes: rows"),
        (("--out", "/dev/null/a.toml"), "^--out /dev/null/a.toml: /dev/null is no folder that can"),
    ],
)
def test_bad_input_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["probe", *arguments])
    assert isinstance(result.exception, InputError)
    with pytest.raises(InputError, match=expected):
        raise result.exception
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [("--minutes", "2"), ("--threads", "0"), ("--shapes", "13")])
def test_numbers_out_of_range_are_refused(tmp_path: Path, arguments: tuple[str, str]) -> None:
    out = str(tmp_path / "here.toml")
    result = CliRunner().invoke(app, ["probe", "--out", out, *arguments])
    assert isinstance(result.exception, InputError)
    assert arguments[0] in str(result.exception)
    assert list(tmp_path.iterdir()) == []
