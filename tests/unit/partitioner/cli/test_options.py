"""Options made from records: every knob once, with its range."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from mdp.errors import ConfigError, InputError
from partitioner.cli.main import app as partitioner
from partitioner.cli.options import add_config_options
from partitioner.config import Given, read_config
from partitioner.run.settings import TrainingConfig

KEYS = (
    *("plan.teacher", "plan.teacher_args", "plan.profiles", "plan.latency_ms"),
    *("run.data", "run.pretrained", "schedule.epochs"),
)
CONFIG = """
[plan]
teacher = "vit_tiny_patch16_224"
teacher_args = {img_size = 24, qkv_bias = false}
profiles = ["n100"]
latency_ms = 5
[run]
data = "digits"
pretrained = true
[schedule]
epochs = 7
temperature = 3
"""


def parse(*args: object, keys: Sequence[str] = KEYS) -> Given:
    app, seen = typer.Typer(), []

    @app.command()
    @add_config_options(*keys)
    def command(*, given: Given, name: str = "x") -> None:
        seen.append(given)

    result = CliRunner().invoke(app, [str(arg) for arg in args])
    if result.exception is not None:
        raise result.exception
    return seen[0]


def test_a_config_gives_all_and_options_count_before_it(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    built = parse("--config", config).build()
    assert (built.plan.teacher, built.plan.latency_ms) == ("vit_tiny_patch16_224", 5.0)
    assert built.plan.teacher_args == {"img_size": 24, "qkv_bias": False}
    assert (built.options.data, built.options.pretrained) == ("digits", True)
    assert (built.schedule.epochs, built.schedule.temperature) == (7, 3.0)
    args = ["--epochs", 9, "--teacher-arg", "depth=2", "--no-pretrained", "--profiles", "b"]
    changed = parse("--config", config, *args).build()
    assert (changed.schedule.epochs, changed.schedule.temperature) == (9, 3.0)
    assert changed.plan.teacher_args == {"depth": 2}
    assert changed.plan.profiles == ["b"]
    assert changed.options.pretrained is False
    assert read_config(config) == built
    assert read_config(config, {"schedule.epochs": 9}).schedule.epochs == 9
    assert parse("--config", config).training() == TrainingConfig(
        options=built.options, schedule=built.schedule
    )
    assert parse("--config", config).planning() == built.plan


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[schedule]\nepoch = 7", "key `schedule.epoch`: unknown key; close to it: `schedule.e"),
        ("[schedule]\nboost_target = 'logits'", "key `schedule.boost_target`: unknown key"),
        (
            "[schedules]\nepochs = 7",
            "expected only known tables, got `schedules`; close to it: `sch",
        ),
        ("epochs = 7", "expected only known tables, got `epochs`"),
        ("schedule = 7", "key `schedule`: expected a table, got 7"),
        ("[schedule]\nepochs =", "Invalid value"),
        ("[schedule]\nepochs = 0", "key `schedule.epochs`: expected `int` >= 1, got 0"),
        ("[schedule]\nepochs = '7'", "key `schedule.epochs`: expected `int`, got `str`"),
        ("[plan]\nprofiles = 'n100'", "key `plan.profiles`: expected `array`, got `str`"),
        ("[plan]\nprofiles = [1]", "key `plan.profiles`: expected `str`, got `int`"),
        ("[plan]\nlatency_ms = -5", "key `plan.latency_ms`: expected a number above 0, got -5"),
        ("[plan]\nprecision = ['int4']", "key `plan.precision`: expected some of fp32, fp16"),
        ("[plan]\nteacher_args = {in_chans = 1}", "key `plan.teacher_args`: 'in_chans' is set by"),
    ],
)
def test_a_bad_config_names_file_and_key(tmp_path: Path, content: str, message: str) -> None:
    config = tmp_path / "run.toml"
    options = ["--teacher", "vit", "--data", "digits"]
    if "profiles" not in content:
        options += ["--profiles", "n100"]
    if "latency_ms" not in content:
        options += ["--latency-ms", "5"]
    config.write_text(content)
    with pytest.raises((ConfigError, InputError)) as told:
        parse("--config", config, *options).build()
    assert str(told.value).startswith(f"{config}: {message}")
    assert "\n" not in str(told.value)


def test_a_plan_checks_the_keys_of_every_table(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text("[schedule]\nepocs = 7")
    with pytest.raises(
        InputError, match=r"key `schedule\.epocs`: .*close to it: `schedule\.epochs`"
    ):
        parse("--config", config)


def test_an_option_is_named_where_its_value_was_given_by_one(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    for args, message in (
        (["--epochs", 0], "--epochs: expected `int` >= 1, got 0"),
        (["--latency-ms", -1], "--latency-ms: expected a number above 0, got -1"),
        (["--teacher-arg", "depth"], "--teacher-arg: expected key=value, got 'depth'"),
    ):
        with pytest.raises(InputError) as told:
            parse("--config", config, *args).build()
        assert str(told.value) == message
    with pytest.raises(InputError) as told:
        parse("--latency-ms", 5).build()
    assert str(told.value) == "--profiles: expected it, or `plan.profiles` in the file of --config"


def test_what_a_command_finds_wrong_later_names_the_key_as_well(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    for wrong, named in (
        ("--teacher: timm has no", f"{config}: key `plan.teacher`: timm has no"),
        ("schedule.start: expected 1", f"{config}: key `schedule.start`: expected 1"),
        ("--name: expected letters", "--name: expected letters"),
        ("nowhere: expected a folder", "nowhere: expected a folder"),
    ):
        with pytest.raises(InputError) as told, parse("--config", config).naming():
            raise InputError(wrong)
        assert str(told.value) == named
    with pytest.raises(InputError, match=r"^schedule\.start: expected 1$"), Given().naming():
        raise InputError("schedule.start: expected 1")


def test_build_s_options_fit_two_screens_and_every_key_is_of_the_file() -> None:
    shown = CliRunner().invoke(partitioner, ["build", "--help"], env={"COLUMNS": "80"}).output
    assert len(shown.splitlines()) <= 2 * 48
    assert "--config" in shown
    assert "--temperature" not in shown


def test_force_is_a_second_name_of_anyway() -> None:
    for word, wanted in (("--anyway", True), ("--force", True), ("--no-anyway", False)):
        assert parse(word, keys=["plan.anyway"]).options == {"plan.anyway": wanted}
    for command in (["plan"], ["build"], ["crew", "plan"]):
        assert "--force" in CliRunner().invoke(partitioner, [*command, "--help"]).output


CONFIGS = sorted((Path(__file__).parents[4] / "examples/configs").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_configs_that_come_along_are_those_of_a_build(path: Path) -> None:
    options = {"run.data": "digits", "plan.profiles": ["n100"], "plan.latency_ms": 5}
    built = Given(path, options).build()
    told = tomllib.loads(path.read_text())
    for table, known in (("plan", built.plan), ("schedule", built.schedule)):
        assert told[table] == {key: getattr(known, key) for key in told[table]}
