"""Options made from records: every knob once, with its range."""

import tomllib
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from msgspec import Meta
from typer.testing import CliRunner

from mdp.errors import ConfigError, InputError
from mdp.files import Record
from partitioner.cli.main import app as partitioner
from partitioner.cli.options import RecipeOption, takes


class Knobs(Record, frozen=True):
    epochs: Annotated[int, Meta(ge=1, description="How often")] = 3
    rate: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, Meta(description="How fast")] = None
    flip: bool | None = None


def invoke(*args: str) -> Knobs:
    app, seen = typer.Typer(), []

    @app.command()
    @takes(knobs=(Knobs, "slow_"))
    def command(*, name: str = "x", recipe: RecipeOption = None, knobs: Knobs) -> None:
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


def test_a_recipe_gives_defaults(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("slow-epochs = 7\nslow-rate = 0.5\nslow-flip = false\n")
    given = Knobs(epochs=7, rate=0.5, flip=False)
    assert invoke("--recipe", str(recipe)) == given
    assert invoke("--slow-epochs", "9", "--recipe", str(recipe)) == Knobs(9, 0.5, flip=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "slow-epoch = 7",
            "r.toml: key 'slow-epoch': expected an option of this command; close to",
        ),
        ("recipe = 'r.toml'", "r.toml: key 'recipe': expected an option of this command"),
        ("slow-rate = ['0.5']", "r.toml: key 'slow-rate': expected one value, got"),
        ("slow-epochs =", "r.toml: expected options by their names: "),
        ("[slow]", "r.toml: expected options by their names: "),
        ("slow-epochs = 0", "--slow-epochs: expected `int` >= 1, got 0"),
    ],
)
def test_a_recipe_that_is_none(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "r.toml").write_text(content)
    with pytest.raises((ConfigError, InputError), match=message) as told:
        invoke("--recipe", str(tmp_path / "r.toml"))
    assert "\n" not in str(told.value)


RECIPES = sorted((Path(__file__).parents[4] / "examples/recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_that_come_along_are_options_of_build(recipe: Path) -> None:
    build: Any = typer.main.get_command(partitioner).commands["build"]  # type: ignore[attr-defined]
    args = ["--recipe", recipe, "--data", "digits", "--profiles", "n100", "--out", "b"]
    params = build.make_context("build", [str(arg) for arg in args]).params
    for name, value in tomllib.loads(recipe.read_text()).items():
        found = params[name.replace("-", "_")]
        assert (list(found) if isinstance(value, list) else found) == value
    assert params["whole_picture"] is True
