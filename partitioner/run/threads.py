"""Jobs side by side in threads, for work that leaves Python's lock alone: models that run."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from partitioner.run.progress import Progress

Job = TypeVar("Job")
Found = TypeVar("Found")


def side_by_side(
    do: Callable[[Job], Found], jobs: Sequence[Job], progress: Progress, what: str
) -> list[Found]:
    """Results of `do` for each of `jobs`, in their order, as many at a time as there are cores.

    The first error ends it; jobs that have not begun are left undone.
    """
    with (
        progress.task(what, len(jobs)) as advance,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        waiting = [pool.submit(do, job) for job in jobs]
        try:
            found = []
            for one in waiting:
                found.append(one.result())
                advance(1, "")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return found
