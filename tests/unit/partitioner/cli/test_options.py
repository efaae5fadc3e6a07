"""Options made from records: every knob once, with its range."""

from typing import Annotated

import pytest
import typer
from msgspec import Meta
from typer.testing import CliRunner

from mdp.errors import InputError
from mdp.files import Record
from partitioner.cli.options import takes


class Knobs(Record, frozen=True):
    epochs: Annotated[int, Meta(ge=1, description="How often")] = 3
    rate: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, Meta(description="How fast")] = None
    flip: bool | None = None


def invoke(*args: str) -> Knobs:
    app, seen = typer.Typer(), []

    @app.command()
    @takes(knobs=(Knobs, "slow_"))
    def command(*, name: str = "x", knobs: Knobs) -> None:
        seen.append(knobs)

    result = CliRunner().invoke(app, args)
    if result.exception is not None:
        raise result.exception
    return seen[0]


def test_defaults_and_prefixed_names() -> None:
    assert invoke() == Knobs()
    assert invoke("--slow-epochs", "7", "--slow-rate", "0.5") == Knobs(epochs=7, rate=0.5)


@pytest.mark.parametrize(("flag", "value"), [("--slow-flip", True), ("--no-slow-flip", False)])
def test_switches(flag: str, value: bool) -> None:
    assert invoke(flag).flip is value


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--slow-epochs", "0"), r"--slow-epochs: expected `int` >= 1, got 0"),
        (("--slow-rate", "-1"), r"--slow-rate: expected `float` > 0.0, got -1.0"),
        (("--slow-rate", "nan"), r"--slow-rate: expected .*, got nan"),
        (("--slow-rate", "2"), r"--slow-rate: expected `float` <= 1.0, got 2.0"),
    ],
)
def test_values_out_of_range_are_named(args: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        invoke(*args)


def test_help_has_the_description() -> None:
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @takes(knobs=(Knobs, ""))
    def command(*, knobs: Knobs) -> None:
        """Nothing."""

    shown = CliRunner().invoke(app, ["--help"]).output
    assert "How often" in shown
    assert "--flip" in shown
