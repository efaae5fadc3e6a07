"""Bad input of `mdp-partition crew` and `train --crew`: one line, exit code 2."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from mdp.files import write_toml
from partitioner.crew.planning.facts import Facts, Trainer
from tests.support.models.runs import tiny_plan
from tests.support.models.trees import write_tree
from tests.unit.partitioner.cli.conftest import Run

pytestmark = pytest.mark.torch

OF_CREW = ["--plan", "plan.toml", "--data", "photos", "--crew", "crew", "--threads", "1"]
JOIN = ["crew", "join", "127.0.0.1:1", "--name", "tower", "--data", "photos", "--run", "run"]
SIMULATE, TRAIN = ["crew", "simulate"], ["train", "--run", "run"]
TUNE = ["crew", "tune"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tree(tmp_path / "photos", each=10)
    write_toml(tmp_path / "plan.toml", tiny_plan())
    (tmp_path / "crew").mkdir()
    return tmp_path


def key(folder: Path) -> str:
    """The name of an empty key file that all can read."""
    (folder / "crew.key").write_text("\n")
    (folder / "crew.key").chmod(0o644)
    return "crew.key"


def error_line(done: tuple[int, str, str]) -> str:
    """The one line of a command that found bad input."""
    code, out, err = done
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("address", ["8.8.8.8:47100", "0.0.0.0:47100", "192.168.1.10"])
def test_no_public_address(folder: Path, run: Run, address: str) -> None:
    probe = ["crew", "probe", *OF_CREW, "--listen", address, "--trainers", "tower"]
    said = error_line(run(*probe))
    assert "expected a loopback or private address" in said or "expected HOST:PORT" in said
    assert not (folder / "crew" / "crew.key").exists()
    words = [address if word == "127.0.0.1:1" else word for word in JOIN]
    name = key(folder)
    (folder / name).chmod(0o600)
    (folder / name).write_text("1234")
    assert error_line(run(*words, "--key", name)) == said


def test_a_key_that_is_missing_or_empty(folder: Path, run: Run) -> None:
    assert "crew.key: cannot be read" in error_line(run(*JOIN, "--key", "crew.key"))
    assert "only its owner can read" in error_line(run(*JOIN, "--key", key(folder)))
    (folder / "crew.key").chmod(0o600)
    assert "crew.key: expected a token" in error_line(run(*JOIN, "--key", "crew.key"))
    assert not (folder / "run").exists()


def test_names_that_repeat(folder: Path, run: Run) -> None:
    probe = ["crew", "probe", *OF_CREW, "--listen", "127.0.0.1:1", "--trainers", "nuc", "nuc"]
    assert "--trainers: expected names that differ" in error_line(run(*probe))
    assert "--trainers Tower: expected 1 to 64 of a-z" in error_line(run(*probe[:-2], "Tower"))
    named = run(*probe[:-2], "nuc", "--name", "Desktop")
    assert "--name Desktop: expected 1 to 64 of a-z" in error_line(named)


@pytest.mark.parametrize("command", [["crew", "plan"], SIMULATE, TRAIN, TUNE])
def test_facts_that_miss(folder: Path, run: Run, command: list[str]) -> None:
    said = error_line(run(*command, *OF_CREW))
    assert "crew/facts.toml: no such file: `mdp-partition crew probe` writes it" in said


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "no such file: `mdp-partition crew plan` writes it"),
        ('chain = "lead"', "Invalid enum value 'lead' - at `$.chain`"),
        (
            "[answers]\nby = ['nobody']",
            "`answers.by`: expected trainers of the facts (coordinator)",
        ),
        ("[[network]]\nname = 'member-7'", "`network`: expected only networks that are trained"),
        (
            "[[network]]\nname = 'member-0'\ncodec = 'int8'\nroute = 'ring'",
            "`network[0].route`: expected",
        ),
    ],
)
def test_a_plan_that_contradicts_itself(
    folder: Path, run: Run, text: str | None, expected: str
) -> None:
    trainer = Trainer(name="coordinator", address="127.0.0.1:1", memory_bytes=2**33)
    write_toml(folder / "crew" / "facts.toml", Facts(trainer=(trainer,)))
    if text is not None:
        (folder / "crew" / "crew.toml").write_text(f"format_version = 1\n{text}\n")
    for command in (SIMULATE, TRAIN, TUNE):
        said = error_line(run(*command, *OF_CREW))
        assert "crew/crew.toml: " in said
        assert expected in said
    assert not (folder / "run" / "settings.toml").exists()


def test_nothing_to_try(folder: Path, run: Run) -> None:
    trainer = Trainer(name="coordinator", address="127.0.0.1:1", memory_bytes=2**33)
    write_toml(folder / "crew" / "facts.toml", Facts(trainer=(trainer,)))
    (folder / "crew" / "crew.toml").write_text("format_version = 1\n")
    said = error_line(run(*TUNE, *OF_CREW))
    assert "crew/crew.toml: expected a network of several trainers" in said
    assert sorted(path.name for path in (folder / "crew").iterdir()) == ["crew.toml", "facts.toml"]
