"""Decodes pictures in threads beside their calls, a bounded number at a time.

A decoder cannot be stopped. For a call that has ended it runs on and keeps its slot, is counted,
and is the reason in messages when other pictures do not get a slot in time.
"""

import fcntl
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Generic, TypeVar

from mdp.errors import PictureError

T = TypeVar("T")

#: Pictures decoded at a time in one process.
SLOTS = 4
#: Pictures that take more memory than this are decoded one at a time.
LARGE_BYTES = 64_000_000
#: How long a thread waits for the next picture before it ends.
IDLE_S = 2.0
#: How often a decoder that waits for memory checks whether its call has given up.
_CHECK_S = 0.05

NOT_DECODED = "the picture was not decoded by then"


class Decoding(Generic[T]):
    """One picture's decoding; waits like a thread."""

    def __init__(self, decoders: "Decoders", work: Callable[[], T], done: Callable[[], None]):
        self._decoders = decoders
        self._work = work
        self._done = done
        self._ended = threading.Event()
        self._value: T
        self._error: BaseException | None = None
        self.started = False
        #: Whether its call has ended.
        self.abandoned = False

    def is_alive(self) -> bool:
        """Tell whether there is no result yet."""
        return not self._ended.is_set()

    def join(self, timeout: float) -> None:
        """Wait for the result for at most `timeout` seconds."""
        self._ended.wait(timeout)

    def result(self) -> T:
        """The decoded picture; raises what decoding raised."""
        if self._error is not None:
            raise self._error
        return self._value

    def abandon(self) -> str:
        """Give up waiting; returns why there is no result."""
        return self._decoders.abandon(self)

    def run(self) -> None:
        """Decode, in a thread of `decoders`."""
        _CURRENT.decoding = self
        try:
            self._value = self._work()
        except BaseException as error:  # raised again in the caller's thread
            self._error = error
        finally:
            _CURRENT.decoding = None

    def end(self) -> None:
        """Hand the result over."""
        del self._work
        self._ended.set()
        self._done()


class Decoders:
    """At most `slots` threads, each of which ends after `idle_s` without a picture to decode."""

    def __init__(self, slots: int = SLOTS, idle_s: float = IDLE_S) -> None:
        self._slots, self._idle_s = slots, idle_s
        self.reset()

    def limit(self, slots: int) -> None:
        """Decode at most `slots` pictures at a time from now on."""
        self._slots = slots

    def reset(self) -> None:
        """Forget everything: a forked child has none of its parent's threads."""
        self._lock = threading.Lock()
        self._running: set[Decoding[Any]] = set()
        self._waiting: deque[Decoding[Any]] = deque()
        #: Threads that have nothing to do, and what each of them takes next.
        self._idle = 0
        self._begun: queue.SimpleQueue[Decoding[Any]] = queue.SimpleQueue()

    @property
    def orphans(self) -> int:
        """The number of decoders that run for calls that have ended."""
        with self._lock:
            return sum(each.abandoned for each in self._running)

    def start(self, work: Callable[[], T], done: Callable[[], None] = lambda: None) -> Decoding[T]:
        """Decode by `work` as soon as a slot is free; `done` is called in the decoder's thread."""
        decoding = Decoding(self, work, done)
        with self._lock:
            if len(self._running) >= self._slots:
                self._waiting.append(decoding)
                return decoding
            # Starting a thread takes longer than decoding a small picture.
            if self._idle:
                self._idle -= 1
                self._begun.put(decoding)
            else:
                # Raises where the system has no thread to give.
                threading.Thread(
                    target=self._run, args=(decoding, self._begun), name="cut", daemon=True
                ).start()
            self._begin(decoding)
        return decoding

    def abandon(self, decoding: Decoding[Any]) -> str:
        """Count `decoding` as abandoned, or let it wait no longer; returns why it has no result."""
        with self._lock:
            decoding.abandoned = True
            if decoding.started:
                return NOT_DECODED
            if decoding in self._waiting:
                self._waiting.remove(decoding)
            abandoned = sum(each.abandoned for each in self._running)
            return (
                f"{NOT_DECODED}: {len(self._running)} others are being decoded, "
                f"{abandoned} of them for calls that have ended"
            )

    def _begin(self, decoding: Decoding[Any]) -> None:
        decoding.started = True
        self._running.add(decoding)

    def _run(self, first: Decoding[Any], begun: "queue.SimpleQueue[Decoding[Any]]") -> None:
        decoding: Decoding[Any] | None = first
        while decoding is not None:
            decoding.run()
            following = self._next_after(decoding)
            decoding.end()
            decoding = following or self._wait_for_next(begun)

    def _next_after(self, decoding: Decoding[Any]) -> Decoding[Any] | None:
        """Free the slot of `decoding`; returns what has waited for it."""
        with self._lock:
            self._running.discard(decoding)
            if not self._waiting:
                self._idle += 1
                return None
            following = self._waiting.popleft()
            self._begin(following)
            return following

    def _wait_for_next(self, begun: "queue.SimpleQueue[Decoding[Any]]") -> Decoding[Any] | None:
        """Wait in an idle thread; returns None where nothing has come, and the thread ends."""
        while True:
            with suppress(queue.Empty):
                return begun.get(timeout=self._idle_s)
            with self._lock:
                # Otherwise something is on its way to this thread or another.
                if self._idle:
                    self._idle -= 1
                    return None


#: For files and Pillow's pictures, whose decoding may take any time.
DECODERS = Decoders()
#: For arrays, which are only cropped, without a decoder.
CUTTERS = Decoders()


class _Current(threading.local):
    decoding: Decoding[Any] | None = None


_CURRENT = _Current()
_LARGE = threading.Lock()
#: A file that processes lock which decode large pictures in turns; None: each on its own.
_SHARED: int | None = None


def take_turns(descriptor: int) -> None:
    """Decode large pictures in turns with other processes that have opened the same file.

    One that dies frees its turn.
    """
    global _SHARED
    _SHARED = descriptor


def _forget() -> None:
    """A forked child has no decoders, and holds no memory."""
    global _LARGE
    _LARGE = threading.Lock()
    DECODERS.reset()
    CUTTERS.reset()


os.register_at_fork(after_in_child=_forget)


@contextmanager
def memory_for(needed_bytes: int) -> Iterator[None]:
    """Reserve a picture's memory during decoding; raises PictureError.

    In sum this is one large picture's and `SLOTS` small ones'.
    """
    if needed_bytes <= LARGE_BYTES:
        yield
        return
    current, large, shared = _CURRENT.decoding, _LARGE, _SHARED
    while not large.acquire(timeout=_CHECK_S):
        _check_wanted(current)
    try:
        with nullcontext() if shared is None else _lock_file(shared, current):
            yield
    finally:
        large.release()


@contextmanager
def _lock_file(descriptor: int, current: "Decoding[Any] | None") -> Iterator[None]:
    """Hold a file's lock, which belongs to the process."""
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            # Both say that another process holds it.
            time.sleep(_CHECK_S)
            _check_wanted(current)
        else:
            break
    try:
        yield
    finally:
        fcntl.lockf(descriptor, fcntl.LOCK_UN)


def _check_wanted(current: "Decoding[Any] | None") -> None:
    if current is not None and current.abandoned:
        raise PictureError("its call has ended before there was memory to decode it")
