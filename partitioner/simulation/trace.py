"""The raw record of a simulation."""

from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class Trace:
    """One entry per request, in the order of their ends, and figures per device."""

    #: Of each request: number, from 0; latency in seconds; index into `subsets`.
    numbers: "array[int]" = field(default_factory=lambda: array("q"))
    latencies_s: "array[float]" = field(default_factory=lambda: array("d"))
    subset: "array[int]" = field(default_factory=lambda: array("q"))
    #: Whether a requested member is missing; whether a cascade's first stage was sure.
    partial: "array[int]" = field(default_factory=lambda: array("b"))
    sure: "array[int]" = field(default_factory=lambda: array("b"))
    #: Arrival subset, ascending k, empty without an answer -> its index.
    subsets: dict[tuple[int, ...], int] = field(default_factory=dict)
    #: Rungs of its members, empty where all are at the top -> index; of each request, its index.
    rungs: dict[tuple[int, ...], int] = field(default_factory=lambda: {(): 0})
    rung: "array[int]" = field(default_factory=lambda: array("q"))
    #: Virtual seconds from the first request to the last answer.
    span_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)
    #: Failures of each device.
    falls: dict[str, int] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    #: Requests sent to devices.
    asks: int = 0

    def by_subset(self) -> dict[tuple[int, ...], NDArray[np.int64]]:
        """Arrival subset -> positions of its requests in this trace."""
        index = np.frombuffer(self.subset, dtype=np.int64) if self.subset else np.zeros(0, np.int64)
        return {members: np.flatnonzero(index == i) for members, i in self.subsets.items()}

    def by_rungs(self, places: NDArray[np.int64]) -> dict[tuple[int, ...], NDArray[np.int64]]:
        """Rungs of the members -> those of `places`, positions in this trace, with them."""
        if len(self.rungs) == 1:
            return {(): places}
        index = np.frombuffer(self.rung, dtype=np.int64)[places]
        return {rungs: places[index == i] for rungs, i in self.rungs.items() if (index == i).any()}
