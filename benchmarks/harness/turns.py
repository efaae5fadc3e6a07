"""Times of several functions that take turns, so that drift of the machine affects all alike."""

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

Name = TypeVar("Name")


def in_turns(
    runs: Mapping[Name, Callable[[], object]],
    rounds: int,
    *,
    least: int,
    seconds: float = 0.0,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, list[list[float]]]:
    """Milliseconds of every call, by name and round.

    In each round each is called `warm_up` times uncounted, then `least` times or for `seconds`.
    """
    found: dict[Name, list[list[float]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            for _ in range(warm_up):
                run()
            block: list[float] = []
            while len(block) < least or sum(block) < seconds * 1e3:
                started_s = clock()
                run()
                block.append((clock() - started_s) * 1e3)
            found[name].append(block)
    return found
