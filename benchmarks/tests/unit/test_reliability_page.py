"""docs/reference/reasons.md names every reason that a device can be missing for."""

import re
from typing import get_args

import pytest

from benchmarks.faults.scene import ROOT
from benchmarks.faults.table import FAULTS
from mdp.client.dispatcher import BACKLOGGED
from mdp.protocol.messages import FailureCode
from mdp.requests.health import (
    FIRST_REST_S,
    LONGEST_REST_S,
    TOLERATED_STRIKES,
    UNREACHABLE,
    UNSTEADY,
)
from mdp.requests.session import LATE, NO_TIME, NOT_NEEDED, PROBATION
from mdp.requests.stuck_output import DIFFERENT_CROPS
from mdp.transport.dealer import CONNECT_MS, RECONNECT_MS

PAGE = (ROOT / "docs" / "reference" / "reasons.md").read_text()
MATRIX = (ROOT / "docs" / "results" / "reliability.md").read_text()
#: The first column of the table of reasons, up to a colon.
NAMED = {found.partition(":")[0] for found in re.findall(r"^\| `([^`]+)` \|", PAGE, re.MULTILINE)}
OWN = (LATE, NO_TIME, NOT_NEEDED, PROBATION, BACKLOGGED, UNREACHABLE, UNSTEADY)
MORE = ("silent", "slow", "failing", "refused", "disconnected", "bad_output", "not in the fleet")


def test_every_reason_is_named_and_no_other() -> None:
    said = {reason.partition(":")[0] for reason in (*OWN, *MORE, *get_args(FailureCode))}
    assert said == NAMED


@pytest.mark.parametrize(
    "text",
    [
        f"after {FIRST_REST_S:g}, 1, 2, ... {LONGEST_REST_S:g} s",
        f"for {['none', 'one', 'two', 'three', 'four'][DIFFERENT_CROPS]} different crops",
        f"after {['none', 'one', 'two', 'three'][TOLERATED_STRIKES]} unanswered requests",
        f"dialled again after {RECONNECT_MS / 1e3:g} s",
        f"given up after {CONNECT_MS / 1e3:g} s",
    ],
)
def test_numbers_are_those_of_the_code(text: str) -> None:
    assert text in PAGE


def test_every_fault_stands_in_the_matrix() -> None:
    for fault in FAULTS:
        assert MATRIX.count(f"\n| {fault.name} |") >= 2, fault.name
