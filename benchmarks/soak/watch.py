"""Memory, descriptors, sockets and threads of processes, once a second, and the trend of memory."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: Stretches of a run whose means count as independent.
BLOCKS = 20
#: Shares of a run: least time of a process whose trend counts, and its beginning that does not
#: count, as caches fill and connections come.
LONG, WARM_UP = 0.5, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    at_s: float
    process: str
    pid: int
    rss_bytes: int
    files: int
    sockets: int
    threads: int


def read_held(process: str, pid: int) -> Held | None:
    """Resources of process `pid` now; None if it has ended."""
    folder = Path(f"/proc/{pid}")
    try:
        pages = int((folder / "statm").read_text().split()[1])
        links = [os.path.realpath(link) for link in (folder / "fd").iterdir()]
        threads = sum(1 for _ in (folder / "task").iterdir())
    except OSError:
        return None
    return Held(
        at_s=time.monotonic(), process=process, pid=pid, rss_bytes=pages * PAGE_BYTES,
        files=len(links), sockets=sum("socket:" in link for link in links), threads=threads,
    )  # fmt: skip


class Watch:
    """Samples the processes that `pids` names, once a second, in a thread of its own."""

    def __init__(self, pids: Callable[[], Mapping[str, int]]) -> None:
        self.samples: list[Held] = []
        self._pids = pids
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")

    def now(self) -> dict[str, Held]:
        found = (read_held(process, pid) for process, pid in self._pids().items())
        return {held.process: held for held in found if held is not None}

    def _run(self) -> None:
        while not self._over.wait(1.0):
            self.samples += self.now().values()

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def trends(samples: Sequence[Held], seconds: float) -> list[dict[str, Any]]:
    """The trend of memory of each process that lived for `LONG` of a run of `seconds`."""
    rows: list[dict[str, Any]] = []
    for process, pid in sorted({(sample.process, sample.pid) for sample in samples}):
        own = [sample for sample in samples if sample.pid == pid]
        own = [sample for sample in own if sample.at_s >= own[0].at_s + WARM_UP * seconds]
        if len(own) < BLOCKS:
            continue
        at_s = np.array([sample.at_s for sample in own])
        if np.ptp(at_s) < LONG * seconds:
            continue
        rss = np.array([sample.rss_bytes for sample in own], dtype=float) / 2**20
        slope, margin = slope_per_hour(at_s, rss)
        row = {"process": process, "seconds": round(float(np.ptp(at_s)))}
        row |= {"first_mib": round(float(rss[:10].mean()), 2)}
        row |= {"last_mib": round(float(rss[-10:].mean()), 2)}
        rows.append(
            row | {"mib_per_hour": round(slope, 3), "mib_per_hour_margin": round(margin, 3)}
        )
    return rows


def slope_per_hour(at_s: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Slope of `values` per hour and half of its 95 % interval, from the means of BLOCKS stretches.

    Neighbouring samples are dependent; means over long stretches hardly are.
    """
    edges = np.linspace(at_s[0], at_s[-1], BLOCKS + 1)
    places = np.clip(np.searchsorted(edges, at_s, side="right") - 1, 0, BLOCKS - 1)
    filled = [place for place in range(BLOCKS) if (places == place).any()]
    hours = np.array([at_s[places == place].mean() for place in filled]) / 3600
    means = np.array([values[places == place].mean() for place in filled])
    if np.ptp(means) == 0:
        # The fit's error would be the root of a rounding error, which may be negative.
        return 0.0, 0.0
    fit = stats.linregress(hours, means)
    return float(fit.slope), float(stats.t.ppf(0.975, len(filled) - 2) * fit.stderr)


def find_growth(before: Mapping[str, Held], after: Mapping[str, Held]) -> list[str]:
    """Every increased count of files, sockets or threads, in words."""
    return [
        f"{process}: {what} {getattr(held, what)} -> {getattr(after[process], what)}"
        for process, held in before.items()
        if process in after
        for what in ("files", "sockets", "threads")
        if getattr(after[process], what) > getattr(held, what)
    ]


def as_rows(held: Mapping[str, Held]) -> dict[str, dict[str, Any]]:
    """For a result file."""
    return {process: asdict(one) | {"at_s": None} for process, one in held.items()}
