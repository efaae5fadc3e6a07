"""`make release`: what it changes, what it refuses, and what it says of each extra."""

import hashlib
import json
import tomllib
from pathlib import Path

import pytest

import mdp
from tools.release import (
    PLACES,
    ROOT,
    SUMS,
    TRIALS,
    ReleaseRefused,
    Trial,
    checked_version,
    main,
    present_version,
    released,
    report,
    sums,
    table,
    with_version,
)

CHANGES = """# Changelog

## [Unreleased]

### Added

- A thing.

## [0.1.0] - 2026-11-20

- All.
"""


def test_what_is_unreleased_becomes_the_new_version_s() -> None:
    made = released(CHANGES, "0.2.0", "2026-12-01")
    assert made.startswith(
        "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n### Added\n\n- A thing.\n"
    )
    assert made.endswith("## [0.1.0] - 2026-11-20\n\n- All.\n")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (CHANGES.replace("- A thing.\n", ""), r"expected entries below '## \[Unreleased\]'"),
        ("# Changelog\n", "expected entries below"),
        (CHANGES.replace("[0.1.0]", "[0.2.0]"), r"expected no section of 0\.2\.0 yet"),
    ],
)
def test_a_change_log_without_changes_is_refused(changes: str, expected: str) -> None:
    with pytest.raises(ReleaseRefused, match=expected):
        released(changes, "0.2.0", "2026-12-01")


@pytest.mark.parametrize("wanted", ["0.1.0", "0.0.9", "0.1.0rc1", "two", ""])
def test_a_version_is_later_than_the_one_before(wanted: str) -> None:
    with pytest.raises(ReleaseRefused, match=r"^VERSION: expected one "):
        checked_version(wanted, "0.1.0")
    assert checked_version("0.2.0rc1", "0.1.0") == "0.2.0rc1"


def test_the_version_stands_in_every_place_and_is_the_same() -> None:
    assert present_version() == mdp.__version__
    for name, pattern in PLACES.items():
        text = (ROOT / name).read_text()
        changed = with_version(text, pattern, "9.8.7")
        assert changed != text
        assert changed.replace("9.8.7", present_version()) == text
    # Once for all images, whose stages take it from there.
    lines = (ROOT / "deploy/Containerfile").read_text().splitlines()
    (given,) = [number for number, line in enumerate(lines) if line.startswith("ARG VERSION=")]
    assert not [line for line in lines[:given] if line.startswith("FROM ")]
    used = sum('version="${VERSION}"' in line for line in lines)
    assert used == lines.count("ARG VERSION") > 0
    with pytest.raises(ReleaseRefused, match="found none"):
        with_version("", PLACES["pyproject.toml"], "9.8.7")


def test_every_extra_is_tried_or_said_not_to_be() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    assert extras - set(TRIALS) == {"agent-gpu", "dev", "fuzz"}
    assert set(TRIALS) - extras == {""}


def test_checksums_are_of_all_other_files(tmp_path: Path) -> None:
    (tmp_path / "b.whl").write_bytes(b"b")
    (tmp_path / "a.tar.gz").write_bytes(b"a")
    (tmp_path / SUMS).write_text("of before")
    assert sums(tmp_path).splitlines() == [
        f"{hashlib.sha256(name[:1].encode()).hexdigest()}  {name}" for name in ("a.tar.gz", "b.whl")
    ]


def test_a_trial_that_failed_says_why() -> None:
    said = table([Trial("python3.11", "", 1.0, 50.0), Trial("python3.11", "demo", 2.0, 9.0, "no")])
    first, second = said.splitlines()
    assert first.endswith("works")
    assert "(none)" in first
    assert second.split()[1] == "demo"
    assert second.endswith(" no")


def test_a_report_has_every_trial() -> None:
    found = json.loads(report([Trial("python3.13", "demo", 2.0, 9.0, "no")], 1000))
    assert found["wheel_bytes"] == 1000
    assert found["trials"] == [
        {"python": "python3.13", "extra": "demo", "seconds": 2.0, "megabytes": 9.0, "fault": "no"}
    ]


def test_a_version_that_is_none_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    before = (ROOT / "pyproject.toml").read_bytes()
    assert main(["--version", "none"]) == 2
    assert capsys.readouterr().err.startswith("make release: ")
    assert (ROOT / "pyproject.toml").read_bytes() == before
