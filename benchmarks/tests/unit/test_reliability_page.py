"""docs/reference/reasons.md names every reason that a device can be missing for."""

import re
from typing import get_args

import pytest

from benchmarks.faults.scene import ROOT
from benchmarks.faults.table import FAULTS
from mdp.requests.health import FIRST_PAUSE_S, LONGEST_PAUSE_S, TOLERATED_FAILURES
from mdp.requests.reason import Code
from mdp.requests.stuck_output import DIFFERENT_CROPS
from mdp.transport.dealer import CONNECT_MS, RECONNECT_MS

PAGE = (ROOT / "docs" / "reference" / "reasons.md").read_text()
MATRIX = (ROOT / "docs" / "results" / "reliability.md").read_text()
#: The first column of the table of reasons, up to a colon.
NAMED = {found.partition(":")[0] for found in re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)}


def test_every_reason_is_named_and_no_other() -> None:
    said = {code for codes in get_args(Code) for code in get_args(codes)}
    assert said == NAMED


@pytest.mark.parametrize(
    "text",
    [
        f"after {FIRST_PAUSE_S:g}, 1, 2, ... {LONGEST_PAUSE_S:g} s",
        f"for {['none', 'one', 'two', 'three', 'four'][DIFFERENT_CROPS]} different crops",
        f"after {['none', 'one', 'two', 'three'][TOLERATED_FAILURES]} unanswered requests",
        f"dialled again after {RECONNECT_MS / 1e3:g} s",
        f"given up after {CONNECT_MS / 1e3:g} s",
    ],
)
def test_numbers_are_those_of_the_code(text: str) -> None:
    assert text in PAGE


def test_every_fault_stands_in_the_matrix() -> None:
    for fault in FAULTS:
        assert MATRIX.count(f"\n| {fault.name} | {fault.made} |") == 1, fault.name
