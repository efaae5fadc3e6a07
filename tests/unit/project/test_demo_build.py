"""`make demo-build`: its steps in order, what they took, and where it stops."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.demo_build import REHEARSAL, Spent, Step, follow, steps, table

A, B = Step("the first", ("one", "--x", "a b")), Step("the second", ("two",))


class Scripted:
    """Commands that take seconds of their own, half of them of processor time."""

    def __init__(self, took_s: dict[str, float], codes: dict[str, int]) -> None:
        self.took_s, self.codes, self.now_s = took_s, codes, 0.0

    def run(self, words: Sequence[str]) -> int:
        self.now_s += self.took_s[words[0]]
        return self.codes.get(words[0], 0)


def followed(machine: Scripted) -> tuple[list[Spent], int]:
    return follow([A, B], machine.run, lambda: machine.now_s, lambda: machine.now_s / 2)


def test_every_step_is_shown_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    spent, code = followed(Scripted({"one": 3.0, "two": 1.0}, {}))
    assert code == 0
    assert spent == [Spent(A, 3.0, 1.5), Spent(B, 1.0, 0.5)]
    assert capsys.readouterr().out == "\n$ one --x 'a b'\n\n$ two\n"
    assert table(spent).splitlines() == [
        "            seconds  of processor time",
        "the first       3.0      1.5",
        "the second      1.0      0.5",
        "all             4.0      2.0",
    ]


@pytest.mark.parametrize(("code", "expected"), [(1, 3), (4, 3), (130, 130)])
def test_it_stops_at_a_step_that_fails(
    capsys: pytest.CaptureFixture[str], code: int, expected: int
) -> None:
    spent, ended = followed(Scripted({"one": 2.0}, {"one": code}))
    assert (len(spent), ended) == (1, expected)
    assert capsys.readouterr().err == f"make demo-build: one ended with exit code {code}\n"


def test_the_bundle_that_is_built_is_the_one_that_is_served() -> None:
    *_, built, served = (step.words for step in steps(Path("w"), rehearsal=False))
    assert built[-2:] == ("--out", "w/bundle")
    assert served[served.index("--bundle") + 1] == "w/bundle"
    assert not set(REHEARSAL) & set(built)
    assert set(REHEARSAL) <= set(steps(Path("w"), rehearsal=True)[3].words)
