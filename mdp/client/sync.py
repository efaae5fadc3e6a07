"""Client: waits for the answers of sessions in the calling thread.

It drives its sockets there, so that a call costs no hand-over between threads, and starts no thread
that stays; only pictures are decoded beside it, so that a slow decoder cannot hold up an answer.
"""

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, Self, Unpack, overload

from mdp.arguments import Errors, Raising, Streaming, Watching, check_pictures, check_timeout_s
from mdp.client.base import (
    CONNECT_SHARE,
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
from mdp.errors import InferenceError, InputError, PictureError
from mdp.pictures.decoders import Decoding
from mdp.requests.capture import DEFAULT_WITHIN_MS, Moment
from mdp.requests.deadline import Deadline, check_deadline_ms
from mdp.requests.prediction import Prediction
from mdp.transport import FORKED, this_process

#: A thread that waits for another one's turn looks up so often, though it is told.
_CHECK_S = 0.25

#: How long it waits at least.
_SOON_S = 0.001
#: How often a thread that decodes looks whether it has to see to calls under way.
_TEND_S = 0.005


class _Waiting:
    """A call of a thread that may have to wait while another one sees to all calls."""

    __slots__ = ("_context", "call", "deadline", "error", "question", "told")

    def __init__(self, question: Question, deadline: Deadline, call: Call | None = None) -> None:
        """A call that is to be begun, or one that has been."""
        self.question, self.deadline = question, deadline
        self.call = call
        if call is not None:
            call.done = self._end
        #: What kept it from being begun.
        self.error: BaseException | None = None
        #: Set as it has ended, or as this thread is to take its turn.
        self.told = threading.Event()
        # A trace goes on in this thread's own context.
        self._context = copy_context()

    def begin(self, connection: FleetConnection) -> None:
        """Begin the call, in the turn of any thread."""
        try:
            submit = connection.dispatcher.submit
            self.call = self._context.run(submit, self.question, self.deadline, self._end)
        except Exception as error:
            self.error = error
            self.told.set()

    def _end(self, _: Call) -> None:
        self.told.set()

    @property
    def over(self) -> bool:
        """Tell whether there is an answer, or will be none."""
        return self.error is not None or (self.call is not None and self.call.answer is not None)

    def result(self) -> Prediction:
        """The prediction; raises what stands in its place."""
        if self.error is not None:
            raise self.error
        assert self.call is not None, "no answer yet"
        return self.call.result()


class Client(BaseClient, Closing):
    """Classifies pictures with a fleet; threads may share it, their calls are under way together.

    One thread at a time has its turn, and sees to the calls of all.

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
        #: One object for each thread that waits for a turn of its own.
        self._claims: set[object] = set()
        #: Calls whose threads wait for another one's turn.
        self._followers: dict[_Waiting, None] = {}
        #: Connections of before a reload that calls still use; changed in a turn only.
        self._former: list[FleetConnection] = []
        try:
            self._wait(self._connection.step, self._options.timeout_s, self._connection.is_settled)
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
        maps: bool = False,
    ) -> Prediction:
        """The fleet's answer for what the devices' own cameras see; no picture travels.

        `at` is the moment that is asked for, a reading of `time.monotonic()`; a device that has no
        frame `within_ms` of it is missing. With `maps`, each camera says where its picture differs
        from good ones, in 256 bytes more. Raises InputError, also for `maps` of a bundle without
        anomaly heads, or InferenceError as `classify` does.
        """
        deadline = self._deadline(deadline_ms)
        question = self._camera_question(at, within_ms, maps=maps)
        user = object()
        connection = self._connection_of_call(user)
        try:
            return self._ask(connection, question, deadline)
        finally:
            self._leave(connection, user)

    @overload
    def watch(self, *, errors: Raising = ..., **how: Unpack[Watching]) -> Iterator[Prediction]: ...

    @overload
    def watch(
        self, *, errors: Errors, **how: Unpack[Watching]
    ) -> Iterator[Prediction | InferenceError]: ...

    def watch(self, *, errors: Errors = "raise", **how: Unpack[Watching]) -> Iterator[Any]:
        """Classify what the devices' own cameras see, again and again, every `every_ms` (100).

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
        begun: deque[_Begun] = deque()
        try:
            for picture in pictures:
                begun.append(self._begin(picture, Deadline(self._clock(), float(how.deadline_ms))))
                if len(begun) >= how.in_flight:
                    yield self._outcome(begun.popleft(), how.errors)
            while begun:
                yield self._outcome(begun.popleft(), how.errors)
        finally:
            # Whoever reads the stream has left.
            with ExitStack() as left:
                for call in begun:
                    left.callback(self._leave, call.connection, call)
                for call in begun:
                    self._give_up(call)

    def _give_up(self, call: "_Begun") -> None:
        """Have nobody asked any more for a call whose answer nobody takes."""
        if call.error is not None or self._closed or self._process is not this_process():
            return
        connection, waiting = call.connection, call.waiting

        def abandon() -> None:
            if waiting.call is not None:
                connection.dispatcher.abandon(waiting.call)

        connection.arrivals.append(abandon)
        if self._take_turn(0.0):
            with self._holding():
                # Another thread may have closed this client.
                if not self._closed:
                    self._step(connection, 0.0)
        else:
            self._wake()

    def _begin(self, picture: PictureOrScene, deadline: Deadline) -> "_Begun":
        """Begin a call, whose connection stays open until its answer is taken."""
        call = _Begun()
        call.connection = connection = self._connection_of_call(call)
        try:
            call.waiting = _Waiting(
                self._cut(connection, picture, deadline, tending=True), deadline
            )
            self._hand_in(connection, call.waiting)
        except (InferenceError, PictureError) as error:
            call.error = error
        except BaseException:
            self._leave(connection, call)
            raise
        return call

    def _outcome(
        self, call: "_Begun", errors: Errors
    ) -> Prediction | InferenceError | PictureError:
        """The answer of a call of a stream, or the error in its place."""
        try:
            if call.error is not None:
                raise call.error
            return self._await_answer(call.connection, call.waiting)
        except (InferenceError, PictureError) as error:
            if errors == "raise":
                raise
            return error
        finally:
            self._leave(call.connection, call)

    def _hand_in(self, connection: FleetConnection, waiting: _Waiting) -> None:
        """Have a call begun: in this thread's turn or, if another one has its turn, in that."""
        self._check_usable()
        connection.arrivals.append(partial(waiting.begin, connection))
        if self._take_turn(0.0):
            with self._holding():
                self._step(connection, 0.0)
        else:
            self._wake()

    def _await_answer(self, connection: FleetConnection, waiting: _Waiting) -> Prediction:
        """The answer of a call that was handed in; another thread's turn may bring it as well."""
        self._followers[waiting] = None
        try:
            while not waiting.over:
                if self._process is not this_process():
                    raise InputError(FORKED)
                if not self._claims and self._take_turn(0.0):
                    with self._holding():
                        while not waiting.over and not self._claims:
                            self._step(connection)
                        if waiting.over:
                            # Before the turn ends, so that another thread is told of that.
                            del self._followers[waiting]
                            return waiting.result()
                left_s = waiting.deadline.remaining_s(self._clock())
                if waiting.call is None and not left_s:
                    raise self._too_late(waiting.deadline, "another thread's call is under way")
                waiting.told.wait(min(max(left_s, _SOON_S), _CHECK_S))
                waiting.told.clear()
        finally:
            if self._followers.pop(waiting, waiting) is None and self._holder is None:
                # This thread may have been told to take its turn.
                self._tell_follower()
        return waiting.result()

    def status(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> list[DeviceStatus]:
        """The status of every device of the fleet, waiting at most `timeout_s` for slow ones.

        Raises DeadlineExceeded if another thread's call is under way for longer than that.
        """
        check_timeout_s(timeout_s)
        with self._in_turn(Deadline(self._clock(), timeout_s * 1e3)):
            asked = self._ask_all()
            step = partial(self._step, self._connection)
            self._wait(step, timeout_s, lambda: self._all_told(asked))
            return self._device_statuses(asked)

    def reload(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Read fleet.toml, its bundle and the key again, and use them from the next call on.

        Connects first, waiting at most `timeout_s`, while other threads go on asking; calls under
        way end as they began. Raises ConfigError if anything is wrong: then nothing changes.
        """
        check_timeout_s(timeout_s)
        self._check_usable()
        connection = FleetConnection(self._options, self._clock, stacklevel=2)
        adopted = False
        try:
            self._wait(connection.step, timeout_s, connection.is_settled)
            self._claim()
            with self._holding():
                self._check_usable()
                former = self._adopt(connection)
                adopted = True
                # The end of a turn closes it once no call uses it: one may still cut its picture.
                self._former.append(former)
                # Each ends by its deadline.
                while former.dispatcher.busy or former.arrivals:
                    self._step(former)
        finally:
            if not adopted:
                connection.transport.close()

    def close(self) -> None:
        """Close the connections; the client cannot be used afterwards.

        Another thread's call that is under way ends first, by its deadline; in the middle of this
        thread's own one, in a signal handler, that call closes at its end.
        """
        self._closed = True
        if self._process is this_process() and self._holder != threading.get_ident():
            self._claim()
            with self._holding():
                while self._is_awaited():
                    self._step(self._connection, _TEND_S)
                self._close_all()

    def __enter__(self) -> Self:
        self._check_usable()
        return self

    def _classify(self, picture: PictureOrScene, deadline: Deadline) -> Prediction:
        user = object()
        connection = self._connection_of_call(user)
        try:
            question = self._cut(connection, picture, deadline)
            return self._ask(connection, question, deadline)
        finally:
            self._leave(connection, user)

    def _ask(
        self, connection: FleetConnection, question: Question, deadline: Deadline
    ) -> Prediction:
        self._check_usable()
        if not self._take_turn(0.0):
            if self._holder == threading.get_ident():
                raise self._too_late(deadline, "this thread's own call is under way")
            waiting = _Waiting(question, deadline)
            self._hand_in(connection, waiting)
            return self._await_answer(connection, waiting)
        with self._holding():
            self._check_usable()
            connection.take_in()
            call = connection.dispatcher.submit(question, deadline)
            try:
                while call.answer is None and not self._claims:
                    self._step(connection)
            except BaseException:  # Ctrl-C
                connection.dispatcher.abandon(call)
                raise
            if call.answer is not None:
                return call.result()
            waiting = _Waiting(question, deadline, call)
            # Before the turn ends, so that its end is not the client's.
            self._followers[waiting] = None
        return self._await_answer(connection, waiting)

    @contextmanager
    def _in_turn(self, deadline: Deadline) -> Iterator[None]:
        self._check_usable()
        if not self._claim(deadline.remaining_s(self._clock())):
            self._tell_follower()
            raise self._too_late(deadline, "another thread's call is under way")
        with self._holding():
            self._check_usable()
            yield

    def _take_turn(self, timeout_s: float) -> bool:
        """Tell whether this thread gets its turn; not amid its own, in a signal handler."""
        return self._holder != threading.get_ident() and self._turn.acquire(timeout=timeout_s)

    def _claim(self, timeout_s: float = -1.0) -> bool:
        """Tell whether this thread gets its turn; one that sees to calls under way gives it up."""
        own = object()
        self._claims.add(own)
        self._wake()
        try:
            return self._take_turn(timeout_s)
        finally:
            self._claims.discard(own)

    def _holding(self) -> "_Turn":
        """This thread's turn, which it has got, until the end."""
        return _Turn(self)

    def _open(self) -> tuple[FleetConnection, ...]:
        """The connection of new calls, and those of before a reload that calls still use."""
        return (self._connection, *self._former)

    def _wake(self) -> None:
        """Have the thread whose turn it is look up, whatever it waits for."""
        for connection in self._open():
            connection.transport.wake()

    def _step(self, connection: FleetConnection, timeout_s: float = math.inf) -> None:
        """Take a step on `connection`; calls of before or after a reload go on beside it."""
        if self._former:
            for other in self._open():
                if other is not connection and (other.arrivals or other.dispatcher.busy):
                    other.step(0.0)
                    # Both cannot be waited for at once.
                    timeout_s = min(timeout_s, _TEND_S)
        connection.step(timeout_s)

    def _leave(self, connection: FleetConnection, user: object) -> None:
        """End a call's use of its connection; one of before a reload closes with the last."""
        connection.users.discard(user)
        if not connection.users and connection in self._former and self._take_turn(0.0):
            with self._holding():
                pass  # its end closes the connection, as the end of another thread's turn does

    def _close_unused(self) -> None:
        """Close connections of before a reload that no call uses any more."""
        for connection in [one for one in self._former if not one.users]:
            self._former.remove(connection)
            connection.transport.close()

    def _close_all(self) -> None:
        for connection in self._open():
            connection.transport.close()
        self._former.clear()

    def _end_turn(self) -> None:
        """Let another thread take its turn, if one waits."""
        if self._former:
            self._close_unused()
        if self._closed and not self._is_awaited():
            self._close_all()
        self._holder = None
        self._turn.release()
        if self._claims:
            return
        if self._followers:
            self._tell_follower()
        elif (
            not self._closed and any(one.arrivals for one in self._open()) and self._take_turn(0.0)
        ):
            # Of a stream, whose thread does not wait yet.
            with self._holding():
                self._step(self._connection, 0.0)

    def _is_awaited(self) -> bool:
        """Tell whether another thread waits for a call that has not ended.

        One that began to wait only after the connections were closed gets an error, no answer.
        """
        return not self._connection.transport.closed and any(
            not waiting.over for waiting in tuple(self._followers)
        )

    def _tell_follower(self) -> None:
        """Have one thread that waits take its turn: the last one, which has to wait longest."""
        for waiting in reversed(tuple(self._followers)):
            if not waiting.over:
                waiting.told.set()
                return

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
        if not self._take_turn(0.0):
            # The thread whose turn it is sees to all calls.
            return _TEND_S
        with self._holding():
            self._step(connection, 0.0)
            return max(0.0, connection.dispatcher.next_wake_s() - self._clock())

    def _wait(
        self, step: Callable[[float], None], timeout_s: float, reached: Callable[[], bool]
    ) -> None:
        until_s = self._clock() + timeout_s
        while not reached() and (left_s := until_s - self._clock()) > 0:
            step(left_s)


class _Turn:
    """A thread's turn to see to all calls, from entering to leaving the block."""

    __slots__ = ("_client",)

    def __init__(self, client: Client) -> None:
        self._client = client

    def __enter__(self) -> None:
        self._client._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._client._end_turn()


class _Begun:
    """A call of a stream, which uses its connection until its answer is taken."""

    __slots__ = ("connection", "error", "waiting")

    connection: FleetConnection
    waiting: _Waiting

    def __init__(self) -> None:
        #: What stands in the place of an answer, where the call could not be begun.
        self.error: InferenceError | PictureError | None = None


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
    deadline = Deadline(time.monotonic(), check_deadline_ms(deadline_ms))
    timeout_s = options.get("timeout_s", CONNECT_TIMEOUT_S)
    check_timeout_s(timeout_s)
    options["timeout_s"] = min(timeout_s, CONNECT_SHARE * deadline.ms / 1e3)
    with Client(fleet, **options) as client:
        return client._classify(picture, deadline)
