"""Clocks of tests."""


class Clock:
    """Seconds that pass only where a test changes `now_s`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class TickingClock:
    """A clock that goes on by a second at each question."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s
