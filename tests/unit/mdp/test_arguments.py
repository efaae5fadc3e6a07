"""Wrong arguments of the Python API: an InputError says which one and what was expected."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mdp.client.aio import AsyncClient
from mdp.client.base import WatchOptions
from mdp.client.sync import Client
from mdp.errors import InputError
from mdp.requests.capture import check_every_ms, frame_query
from mdp.requests.deadline import check_deadline_ms

#: Of any type, as a caller without a type checker may give them.
CLIENTS: list[Any] = [Client, AsyncClient]
#: Arguments are checked before anything of a client is used.
CLIENT: Any = object.__new__(Client)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"fusion": "Stacked"}, "fusion: expected stacked, boosted or bagged, got 'Stacked'"),
        ({"fusion": None}, "fusion: expected stacked, boosted or bagged, got None"),
        ({"hedge_share": "0.1"}, "hedge_share: expected 0 to 1, got '0.1'"),
        ({"hedge_share": 2}, "hedge_share: expected 0 to 1, got 2"),
        ({"hedge_after_ms": "5"}, "hedge_after_ms: expected 0 or more, got '5'"),
        ({"key": 7}, "key: expected a path, got int"),
        ({"fleet": b"fleet.toml"}, "fleet: expected a path, got bytes"),
        ({"fleet": None}, "fleet: expected a path, got NoneType"),
    ],
)
def test_options_of_a_client(client: Any, wrong: dict[str, object], expected: str) -> None:
    with pytest.raises(InputError) as raised:
        client(**{"fleet": "no/fleet.toml", **wrong})
    assert str(raised.value) == expected


@pytest.mark.parametrize("timeout_s", [-1, float("nan"), float("inf"), "1", None])
def test_timeouts(timeout_s: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: Client.connect("no/fleet.toml", timeout_s=timeout_s),
        lambda: Client.status(CLIENT, timeout_s=timeout_s),
        lambda: Client.reload(CLIENT, timeout_s=timeout_s),
    ]
    for call in calls:
        with pytest.raises(InputError, match=r"^timeout_s: expected 0 to 1e\+06, got "):
            call()


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"errors": "ignore"}, "errors: expected raise or yield, got 'ignore'"),
        ({"in_flight": 0}, "in_flight: expected a whole number of at least 1, got 0"),
        ({"in_flight": 1.5}, "in_flight: expected a whole number of at least 1, got 1.5"),
        ({"in_flight": "2"}, "in_flight: expected a whole number of at least 1, got '2'"),
        (
            {"deadline_ms": "80"},
            "deadline_ms: expected more than 0 and at most 3,600,000, got '80'",
        ),
        ({"pictures": "cat.jpg"}, "pictures: expected several pictures, as in a list, got a str"),
        ({"pictures": Path("a")}, "pictures: expected several pictures, as in a list, got a Posix"),
        ({"pictures": b"\xff"}, "pictures: expected several pictures, as in a list, got a bytes"),
        ({"pictures": io.BytesIO()}, "pictures: expected several pictures, as in a list, got a By"),
        ({"pictures": 3}, "pictures: expected several pictures, as in a list, got a int"),
        (
            {"pictures": np.zeros((8, 8, 3), np.uint8)},
            "pictures: expected several pictures, as in a list, got one array [8, 8, 3]",
        ),
    ],
)
def test_a_stream(wrong: dict[str, object], expected: str) -> None:
    with pytest.raises(InputError) as raised:
        CLIENT.stream(**{"pictures": [], **wrong})
    assert str(raised.value).startswith(expected)


def test_watching_and_looking() -> None:
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: CLIENT.watch(errors="ignore"), "errors: expected raise or yield, got 'ignore'"),
        (lambda: check_every_ms("1"), "every_ms: expected 0 to 1e+09, got '1'"),  # type: ignore[arg-type]
        (
            lambda: frame_query("latest", within_ms="1", now_s=0.0),  # type: ignore[arg-type]
            "within_ms: expected 0 to 1e+09, got '1'",
        ),
        (
            lambda: frame_query(None, within_ms=1, now_s=0.0),  # type: ignore[arg-type]
            r"at: expected 'latest' or a reading of time.monotonic(), got None",
        ),
    ]
    for call, expected in calls:
        with pytest.raises(InputError) as raised:
            call()
        assert str(raised.value) == expected


def test_a_fleet_that_cannot_answer_is_not_asked_without_pause() -> None:
    often, seldom = WatchOptions(every_ms=0.0), WatchOptions(every_ms=500.0)
    assert often.pause_s(0.03, answered=True) == 0.0
    assert often.pause_s(0.03, answered=False) == pytest.approx(0.07)
    assert seldom.pause_s(0.2, answered=False) == pytest.approx(0.3)
    assert seldom.pause_s(0.6, answered=False) == 0.0


def test_numbers_of_numpy_are_numbers() -> None:
    assert check_deadline_ms(np.float32(80)) == 80  # type: ignore[arg-type]
    of_numpy: Any = np.int64(80)
    assert check_deadline_ms(of_numpy) == 80
