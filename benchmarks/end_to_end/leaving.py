"""Ctrl-C and its like: whatever happens, what was set up is removed."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGHUP)
_ALL = (signal.SIGINT, *STOPPING)
_AGAIN_S = 0.1


def leave(number: int, _: FrameType | None) -> None:
    """Go through every clean-up, as Ctrl-C does."""
    raise SystemExit(128 + number)


def leave_when_told() -> None:
    """Make SIGTERM and SIGHUP end this process in order, and none of them or Ctrl-C be lost.

    A signal that comes during a destructor or a weak reference's callback raises there, where
    Python prints the exception and goes on; then it is raised once more a moment later.
    """
    for number in STOPPING:
        signal.signal(number, leave)
    lost: list[BaseException] = []

    def keep(unraisable: "sys.UnraisableHookArgs") -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt | SystemExit):
            lost.append(unraisable.exc_value)
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        else:
            sys.__unraisablehook__(unraisable)

    def again(_number: int, _: FrameType | None) -> None:
        raise lost[-1].with_traceback(None)

    signal.signal(signal.SIGALRM, again)
    sys.unraisablehook = keep


@contextmanager
def undisturbed() -> Iterator[None]:
    """Nothing that asks this process to end is heeded meanwhile: it ends already."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _ALL}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
