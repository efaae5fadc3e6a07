"""Fixtures and hooks that every test shares."""

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings
from zmq.utils.garbage import gc as uncopied

from mdp.imports import silence_onnxruntime

# Threads that sleep while they wait, as the tests may share the cores with anyone. OpenMP reads
# this when torch is loaded, hence before any test module imports it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Tests import it themselves, too.
silence_onnxruntime()

# Reproducible by default; HYPOTHESIS_PROFILE=explore looks for new cases, and nightly for many.
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.register_profile("nightly", database=None, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

#: After so many new objects the collector looks for cycles.
NEW_OBJECTS = 50_000

# A script that runs the tests in the background has them, and every process they start, ignore
# Ctrl-C, which some of them are about.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Freeze what importing the tests and torch has made: nobody need walk through it.

    Nor need the collector come every 700 objects: torch's exporter makes and keeps millions.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails a test that leaves behind a thread, a file, a socket or a child process."""
    # From the first frame that is not copied, pyzmq keeps a thread and sockets for this process.
    if not uncopied.is_alive():
        uncopied.start()
    assert uncopied._push_socket is not None
    before = _count_held()
    yield
    until_s = time.monotonic() + 10
    while any(now > then for now, then in zip(_count_held(), before, strict=True)):
        assert time.monotonic() < until_s, (
            f"threads, files, children: {before} -> {_count_held()}; threads: "
            f"{', '.join(thread.name for thread in threading.enumerate())}"
        )
        gc.collect()
        time.sleep(0.01)


def _count_held() -> tuple[int, int, int]:
    process = psutil.Process()
    return threading.active_count(), process.num_fds(), len(process.children(recursive=True))
