"""A clock that tests set."""


class Clock:
    """Seconds that pass only where a test changes `now_s`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s
