"""Client: waits for the answers of sessions in the calling thread.

It drives its sockets there, so that a call costs no hand-over between threads, and starts no thread
that stays; only pictures are decoded beside it, so that a slow decoder cannot hold up an answer.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, Unpack, overload

from mdp.arguments import Errors, Raising, Streaming, Watching, check_pictures, check_timeout_s
from mdp.client.base import (
    CONNECT_TIMEOUT_S,
    DEFAULT_DEADLINE_MS,
    BaseClient,
    Connecting,
    FleetConnection,
    StreamOptions,
    WatchOptions,
)
from mdp.client.crops import PictureOrScene, is_quick
from mdp.client.dispatcher import Call
from mdp.client.questions import PictureQuestion, Question
from mdp.client.status import DeviceStatus
from mdp.closing import Closing
from mdp.errors import InferenceError, PictureError
from mdp.pictures.decoders import Decoding
from mdp.requests.capture import DEFAULT_WITHIN_MS, Moment
from mdp.requests.deadline import Deadline, checked_deadline_ms
from mdp.requests.prediction import Prediction
from mdp.transport import this_process

#: How often a thread checks whether another one's turn has also brought its own answer.
_CHECK_S = 0.005

#: The most of its deadline that `classify` waits for the agents.
_CONNECT_SHARE = 0.5


class Client(BaseClient, Closing):
    """Classifies pictures with a fleet; calls from several threads take turns.

    with mdp.Client.connect("fleet.toml") as client:
        prediction = client.classify("cat.jpg", deadline_ms=80)
    """

    def __init__(self, fleet: str | os.PathLike[str], **options: Unpack[Connecting]) -> None:
        """See `connect`, which does the same."""
        super().__init__(fleet, **options)
        # Reentrant: Ctrl-C between getting it and letting it go must not keep `close` waiting.
        self._turn = threading.RLock()
        #: The thread whose turn it is.
        self._holder: int | None = None
        try:
            self._wait(self._connection, self._options.timeout_s, self._connection.settled)
        except BaseException:  # Ctrl-C while it waits
            self.close()
            raise

    def classify(
        self, picture: PictureOrScene, *, deadline_ms: float = DEFAULT_DEADLINE_MS
    ) -> Prediction:
        """The fleet's answer for a path, an encoded file's bytes, a binary file, a Pillow image, a
        uint8 array `[H, W]`, `[H, W, 3]` or `[H, W, 4]`, or a torch tensor `[C, H, W]` of uint8 or
        of floats from 0 to 1; normalised ones are refused. For a bundle of several cameras, such a
        picture of each, by the cameras' names.

        A binary file is read from its position, in another thread. The deadline counts from this
        call, decoding and cropping included. Raises InputError, PictureError, or InferenceError if
        no device contributes in time.
        """
        return self._classify(picture, self._deadline(deadline_ms))

    def look(
        self,
        *,
        deadline_ms: float = DEFAULT_DEADLINE_MS,
        at: Moment = "latest",
        within_ms: float = DEFAULT_WITHIN_MS,
    ) -> Prediction:
        """The fleet's answer for what the devices' own cameras see; no picture travels.

        `at` is the moment that is asked for, a reading of `time.monotonic()`; a device that has no
        frame `within_ms` of it is missing. Raises InputError, or InferenceError as `classify` does.
        """
        deadline = self._deadline(deadline_ms)
        question = self._camera_question(at, within_ms)
        with self._in_use() as connection:
            return self._answered(connection, question, deadline)

    @overload
    def watch(self, *, errors: Raising = ..., **how: Unpack[Watching]) -> Iterator[Prediction]: ...

    @overload
    def watch(
        self, *, errors: Errors, **how: Unpack[Watching]
    ) -> Iterator[Prediction | InferenceError]: ...

    def watch(self, *, errors: Errors = "raise", **how: Unpack[Watching]) -> Iterator[Any]:
        """What the devices' own cameras see, again and again: one look every `every_ms` (100).

        One look is under way at a time; a slow one delays the next. `deadline_ms` and `within_ms`
        are those of `look`. With `errors="yield"` an InferenceError takes the place of its look's
        answer.
        """
        return self._watch(WatchOptions(errors=errors, **how))

    def _watch(self, how: WatchOptions) -> Iterator[Prediction | InferenceError]:
        while True:
            started_s = self._clock()
            answer: Prediction | InferenceError
            try:
                answer = self.look(deadline_ms=how.deadline_ms, within_ms=how.within_ms)
            except InferenceError as error:
                if how.errors == "raise":
                    raise
                answer = error
            yield answer
            answered = isinstance(answer, Prediction)
            time.sleep(how.pause_s(self._clock() - started_s, answered=answered))

    @overload
    def stream(
        self, pictures: Iterable[PictureOrScene], *, errors: Raising = ..., **how: Unpack[Streaming]
    ) -> Iterator[Prediction]: ...

    @overload
    def stream(
        self, pictures: Iterable[PictureOrScene], *, errors: Errors, **how: Unpack[Streaming]
    ) -> Iterator[Prediction | InferenceError | PictureError]: ...

    def stream(
        self,
        pictures: Iterable[PictureOrScene],
        *,
        errors: Errors = "raise",
        **how: Unpack[Streaming],
    ) -> Iterator[Any]:
        """Answers for `pictures` in their order, with up to `in_flight` (2) of them under way.

        Each deadline counts from when its picture was taken from `pictures`. With
        `errors="yield"` an InferenceError or PictureError takes the place of its picture's answer.
        """
        check_pictures(pictures)
        return self._stream(iter(pictures), StreamOptions(errors=errors, **how))

    @overload
    def classify_many(
        self, pictures: Iterable[PictureOrScene], *, errors: Raising = ..., **how: Unpack[Streaming]
    ) -> list[Prediction]: ...

    @overload
    def classify_many(
        self, pictures: Iterable[PictureOrScene], *, errors: Errors, **how: Unpack[Streaming]
    ) -> list[Prediction | InferenceError | PictureError]: ...

    def classify_many(
        self,
        pictures: Iterable[PictureOrScene],
        *,
        errors: Errors = "raise",
        **how: Unpack[Streaming],
    ) -> list[Any]:
        """All answers of `stream`, which takes the same arguments, in a list."""
        return list(self.stream(pictures, errors=errors, **how))

    def _stream(
        self, pictures: Iterator[PictureOrScene], how: StreamOptions
    ) -> Iterator[Prediction | InferenceError | PictureError]:
        waiting: deque[Callable[[], Prediction]] = deque()
        for picture in pictures:
            waiting.append(self._begun(picture, Deadline(self._clock(), how.deadline_ms)))
            if len(waiting) >= how.in_flight:
                yield _outcome(waiting.popleft(), how.errors)
        while waiting:
            yield _outcome(waiting.popleft(), how.errors)

    def _begun(self, picture: PictureOrScene, deadline: Deadline) -> Callable[[], Prediction]:
        """Begin a call; returns what waits for its answer."""
        try:
            with self._in_use() as connection:
                question = self._cut(connection, picture, deadline, tending=True)
                with self._in_turn(deadline):
                    return partial(
                        self._awaited, connection, self._submit(connection, question, deadline)
                    )
        except (InferenceError, PictureError) as error:
            return partial(_raise, error)

    def _awaited(self, connection: FleetConnection, call: Call) -> Prediction:
        """The answer of a call under way, which another thread's turn may bring as well."""
        while call.answer is None:
            self._check_usable()
            if self._taken(_CHECK_S):
                with self._holding():
                    while call.answer is None:
                        connection.step()
        return call.result()

    def status(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> list[DeviceStatus]:
        """How every device of the fleet is, waiting at most `timeout_s` for those that are slow.

        Raises DeadlineExceeded if another thread's call is under way for longer than that.
        """
        check_timeout_s(timeout_s)
        with self._in_turn(Deadline(self._clock(), timeout_s * 1e3)):
            asked = self._ask_all()
            self._wait(self._connection, timeout_s, lambda: self._all_told(asked))
            return self._device_statuses(asked)

    def reload(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Read fleet.toml, its bundle and the key again, and use them from the next call on.

        Connects first, waiting at most `timeout_s`, while other threads go on asking; calls under
        way end as they began. Raises ConfigError if anything is wrong: then nothing changes.
        """
        check_timeout_s(timeout_s)
        self._check_usable()
        connection = FleetConnection(self._options, self._clock, stacklevel=2)
        try:
            self._wait(connection, timeout_s, connection.settled)
            self._turn.acquire()
            with self._holding():
                connection = self._adopt(connection)
                # Each ends by its deadline.
                while connection.dispatcher.busy:
                    connection.step()
        finally:
            # The former one or, if that failed, the new one. Where a call still cuts its picture,
            # the sockets close with the last reference.
            if not connection.users:
                connection.transport.close()

    def close(self) -> None:
        """Close the connections; the client cannot be used afterwards.

        Another thread's call that is under way ends first, by its deadline; in the middle of this
        thread's own one, in a signal handler, that call closes at its end.
        """
        self._closed = True
        if self._process is this_process() and self._holder != threading.get_ident():
            with self._turn:
                self._transport.close()

    def __enter__(self) -> Self:
        self._check_usable()
        return self

    def _classify(self, picture: PictureOrScene, deadline: Deadline) -> Prediction:
        with self._in_use() as connection:
            return self._answered(connection, self._cut(connection, picture, deadline), deadline)

    def _answered(
        self, connection: FleetConnection, question: Question, deadline: Deadline
    ) -> Prediction:
        with self._in_turn(deadline):
            call = self._submit(connection, question, deadline)
            while call.answer is None:
                connection.step()
        return call.result()

    def _submit(self, connection: FleetConnection, question: Question, deadline: Deadline) -> Call:
        # Connections that went or came since the last call are settled before any is asked.
        connection.step(0.0)
        return connection.dispatcher.submit(question, deadline)

    @contextmanager
    def _in_turn(self, deadline: Deadline) -> Iterator[None]:
        self._check_usable()
        if not self._taken(deadline.left_s(self._clock())):
            raise self._too_late(deadline, "another thread's call is under way")
        with self._holding():
            yield

    def _taken(self, timeout_s: float) -> bool:
        """Whether this thread gets its turn; not in the middle of its own, in a signal handler."""
        return self._holder != threading.get_ident() and self._turn.acquire(timeout=timeout_s)

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """This thread's turn, which it has got, until the end."""
        self._holder = threading.get_ident()
        try:
            self._check_usable()
            yield
        finally:
            if self._closed:
                self._transport.close()
            self._holder = None
            self._turn.release()

    def _cut(
        self,
        connection: FleetConnection,
        picture: PictureOrScene,
        deadline: Deadline,
        *,
        tending: bool = False,
    ) -> PictureQuestion:
        """Every member's crop; a decoder that is not done in time is left to itself.

        With `tending`, calls under way are not kept waiting for it.
        """
        if is_quick(picture):
            return connection.cut(picture)
        cutter = connection.start_cut(picture)
        try:
            self._join(connection, cutter, deadline.decide_s, tending=tending)
        finally:
            why = cutter.abandon() if cutter.is_alive() else ""
        if why:
            raise self._too_late(deadline, why)
        return cutter.result()

    def _join(
        self, connection: FleetConnection, cutter: Decoding[Any], until_s: float, *, tending: bool
    ) -> None:
        """Wait for `cutter` until `until_s`; calls under way are decided in time meanwhile."""
        while cutter.is_alive() and (left_s := until_s - self._clock()) > 0:
            cutter.join(min(left_s, self._tend(connection)) if tending else left_s)

    def _tend(self, connection: FleetConnection) -> float:
        """Take in what has come for calls under way; seconds until the next has to be decided."""
        if not self._taken(0.0):
            # The thread whose turn it is sees to all calls.
            return _CHECK_S
        with self._holding():
            connection.step(0.0)
            return max(0.0, connection.dispatcher.next_wake_s() - self._clock())

    def _wait(
        self, connection: FleetConnection, timeout_s: float, reached: Callable[[], bool]
    ) -> None:
        until_s = self._clock() + timeout_s
        while not reached() and (left_s := until_s - self._clock()) > 0:
            connection.step(left_s)


def _outcome(
    wait: Callable[[], Prediction], errors: Errors
) -> Prediction | InferenceError | PictureError:
    try:
        return wait()
    except (InferenceError, PictureError) as error:
        if errors == "raise":
            raise
        return error


def _raise(error: InferenceError | PictureError) -> Prediction:
    raise error


def classify(
    fleet: str | os.PathLike[str],
    picture: PictureOrScene,
    *,
    deadline_ms: float = DEFAULT_DEADLINE_MS,
    **options: Unpack[Connecting],
) -> Prediction:
    """One picture's answer: connect to the agents of fleet.toml, ask, close.

    The deadline counts from this call; up to half of it is spent on waiting for the agents. Takes
    the options of `Client.connect`, and raises what that and `Client.classify` raise. Several
    pictures are answered sooner by one `Client`.
    """
    deadline = Deadline(time.monotonic(), checked_deadline_ms(deadline_ms))
    timeout_s = options.get("timeout_s", CONNECT_TIMEOUT_S)
    check_timeout_s(timeout_s)
    options["timeout_s"] = min(timeout_s, _CONNECT_SHARE * deadline.ms / 1e3)
    with Client(fleet, **options) as client:
        return client._classify(picture, deadline)
