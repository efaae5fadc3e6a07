"""Lines on standard error that nobody reads cost lines, never the thread that causes them."""

import logging
import os
import sys
import threading
import warnings
from pathlib import Path

import pytest

from mdp.logs import MOST_WAITING, BackgroundWriter, ErrorLog, quiet_libraries


def fill(pipe: int) -> None:
    while True:
        os.write(pipe, b"x" * 4096)


def test_native_log_lines_do_not_wait_for_a_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "lastResort", logging.lastResort)
    reader, writer = os.pipe()
    other = os.dup(writer)
    try:
        quiet_libraries(writer)
        with pytest.raises(BlockingIOError):
            fill(writer)
        assert os.get_blocking(other), "other processes' writes wait as before"
        assert os.read(reader, 1) == b"x"
    finally:
        for descriptor in (reader, writer, other):
            os.close(descriptor)


def test_a_stderr_that_is_no_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "lastResort", logging.lastResort)
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        quiet_libraries(log)
        assert os.get_blocking(log)
        warnings.warn("of a picture", UserWarning, stacklevel=1)
    finally:
        os.close(log)
    quiet_libraries(log)


def test_a_reader_that_holds_up_whoever_writes_does_not_hold_up_whoever_tells() -> None:
    said: list[str] = []
    may_write = threading.Event()

    def say(line: str) -> None:
        assert may_write.wait(60)
        said.append(line)

    with BackgroundWriter(say, "test") as reporter:
        for number in range(2 * MOST_WAITING):
            reporter.put(f"{number}")
        may_write.set()
    assert said[:3] == ["0", "1", "2"]
    assert MOST_WAITING <= len(said) <= MOST_WAITING + 1


def test_what_python_prints_is_lost_where_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "lastResort", logging.lastResort)
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as before:
        monkeypatch.setattr(sys, "stderr", before)
        quiet_libraries(writer)
        # A pipe holds 64 KiB; neither a blocking nor a failing write would reach the end.
        for _ in range(1000):
            print("x" * 200, file=sys.stderr)
        assert os.read(reader, 201) == b"x" * 200 + b"\n"
        while os.read(reader, 65536) == b"x" * 65536:
            pass
        print("heard again \udc80", file=sys.stderr)
        assert os.read(reader, 65536).endswith(b"heard again \\udc80\n")
    os.close(reader)


def error_log(said: list[str], now_s: list[float]) -> logging.Logger:
    logger = logging.Logger("test")
    logger.addHandler(ErrorLog(said.append, lambda: now_s[0]))
    return logger


def test_one_traceback_in_ten_seconds_says_how_many_more_there_were() -> None:
    said: list[str] = []
    now_s = [0.0]
    logger = error_log(said, now_s)
    for now_s[0] in (0.0, 1.0, 9.9, 10.0, 25.0):
        logger.warning("no error")
        try:
            raise ZeroDivisionError(now_s[0])
        except ZeroDivisionError:
            logger.exception("it failed")
    assert [text.partition("\n")[0] for text in said] == ["it failed"] * 3
    lasts = [text.splitlines()[-1] for text in said]
    assert lasts == [
        "ZeroDivisionError: 0.0",
        "ZeroDivisionError: 10.0 (2 more since the last one)",
        "ZeroDivisionError: 25.0",
    ]


def test_connections_that_cannot_be_accepted_are_a_line_and_hide_no_error() -> None:
    said: list[str] = []
    now_s = [0.0]
    logger = error_log(said, now_s)
    for now_s[0] in (0.0, 0.1, 0.2, 10.5):
        # As asyncio's exception handler logs it.
        error = OSError(24, "Too many open files")
        logger.error("socket.accept() out of system resource\nsocket: 7", exc_info=error)
    logger.error("it failed")
    line = "connections cannot be accepted: Too many open files"
    assert said == [line, f"{line} (2 more since the last one)", "it failed"]
