"""Health of an agent, as it tells whoever asks on its machine, and its exit codes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from devices.health import PORT, SILENT_S, LifeSigns, plain_words, verdict

STATES = ["STARTING", "WARMING", "READY", "DRAINING", "FAILED"]


@given(st.sampled_from(STATES), st.lists(st.floats(0, 2 * SILENT_S), min_size=1, max_size=9))
def test_an_agent_without_a_sign_of_life_hangs(state: str, pauses: list[float]) -> None:
    now_s = [0.0]
    signs = LifeSigns("n100", clock=lambda: now_s[0])
    for pause_s in pauses:
        now_s[0] += pause_s
        silent_s = now_s[0] - (now_s[0] - pause_s)
        assert signs.line(state) == f"{'HANGS' if silent_s > SILENT_S else state} n100"
        signs.give()
        assert signs.line(state) == f"{state} n100"


@pytest.mark.parametrize("said", [f"{state} n100" for state in [*STATES, "HANGS"]])
def test_only_ready_is_healthy(said: str) -> None:
    assert verdict(said, live=False) == (said == "READY n100")
    assert verdict(said, live=True) == (said != "HANGS n100")


def test_who_says_nothing_is_not_healthy() -> None:
    assert not verdict("", live=False)
    assert not verdict("", live=True)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ([], (PORT, False)),
        (["--live"], (PORT, True)),
        (["--port", "7510", "--live"], (7510, True)),
        # The parser of all commands says what is wrong.
        (["--port"], None),
        (["--port", "x"], None),
        (["--port", "0"], None),
        (["--port", "65536"], None),
        (["--port", "9" * 5000], None),
        (["--port=7510"], None),
        (["--help"], None),
        (["n100"], None),
    ],
)
def test_plain_words_need_no_parser(words: list[str], meant: tuple[int, bool] | None) -> None:
    assert plain_words(words) == meant
