"""Client: waits for the answers of sessions in the calling thread.

It drives its sockets there, so that a call costs no hand-over between threads, and starts no thread
that stays; only pictures are decoded beside it, so that a slow decoder cannot hold up an answer.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self, Unpack, overload

from mdp import arguments
from mdp.arguments import Errors, Raising, Streaming, Watching
from mdp.client.base import CONNECT_TIMEOUT_S, DEFAULT_DEADLINE_MS, Connection, Link, given
from mdp.client.crops import View, is_quick
from mdp.client.dispatcher import Answer, Outcome
from mdp.client.status import DeviceStatus
from mdp.errors import InferenceError, PictureError
from mdp.fusion.fuse import Fusion
from mdp.pictures.crop import Picture
from mdp.pictures.decoders import Decoding
from mdp.requests.capture import (
    DEFAULT_EVERY_MS,
    DEFAULT_WITHIN_MS,
    Glance,
    Moment,
    checked_every_ms,
    glance_at,
)
from mdp.requests.deadline import checked_deadline_ms
from mdp.requests.hedging import DEFAULT_SHARE
from mdp.requests.prediction import Prediction
from mdp.transport import this_process

#: How often a thread looks whether another one's turn has also brought its own answer.
_LOOK_S = 0.005

#: What a call asks with, a picture's views or a look, and the link whose bundle wants those views.
Cut = tuple[Link, Mapping[int, View] | Glance]


class Client(Connection):
    """Classifies pictures with a fleet; calls from several threads take turns.

    with mdp.Client.connect("fleet.toml") as client:
        prediction = client.classify("cat.jpg", deadline_ms=80)
    """

    def __init__(
        self,
        fleet: str | os.PathLike[str],
        *,
        fusion: Fusion = "stacked",
        key: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        timeout_s: float = CONNECT_TIMEOUT_S,
        hedge_after_ms: float | None = None,
        hedge_share: float = DEFAULT_SHARE,
        cascade: bool = False,
    ) -> None:
        """See `connect`, which does the same."""
        arguments.check_timeout_s(timeout_s)
        super().__init__(
            fleet,
            fusion=fusion,
            key=key,
            insecure=insecure,
            hedge_after_ms=hedge_after_ms,
            hedge_share=hedge_share,
            cascade=cascade,
        )
        self._turn = threading.Lock()
        #: The thread whose turn it is.
        self._holder: int | None = None
        try:
            self._wait(self._link, timeout_s, self._link.settled)
        except BaseException:  # Ctrl-C while it waits
            self.close()
            raise

    @classmethod
    def connect(
        cls,
        fleet: str | os.PathLike[str],
        *,
        fusion: Fusion = "stacked",
        key: str | os.PathLike[str] | None = None,
        insecure: bool = False,
        timeout_s: float = CONNECT_TIMEOUT_S,
        hedge_after_ms: float | None = None,
        hedge_share: float = DEFAULT_SHARE,
        cascade: bool = False,
    ) -> Self:
        """Connect to the agents of fleet.toml; those not there after `timeout_s` may come later.

        `key` is this client's secret key file, instead of the one that the fleet file names;
        `insecure` allows plain text to other machines, of which a warning is given. A device that
        has not answered after `hedge_after_ms`, or after what 95 % of its recent answers took, has
        its replica asked beside it, for at most `hedge_share` of all requests. With
        `cascade`, a few members are asked first, and the others only where their answer is not sure
        (docs/explanation/calls.md). Raises ConfigError if the fleet, its bundle or a key is wrong,
        and with `cascade` if the bundle does not say whom to ask first.
        """
        return cls(
            fleet,
            fusion=fusion,
            key=key,
            insecure=insecure,
            timeout_s=timeout_s,
            hedge_after_ms=hedge_after_ms,
            hedge_share=hedge_share,
            cascade=cascade,
        )

    def classify(self, picture: Picture, *, deadline_ms: float = DEFAULT_DEADLINE_MS) -> Prediction:
        """The fleet's answer for a path, a Pillow image or a uint8 array `[H, W, 3]`.

        The deadline counts from this call, decoding and cropping included. Raises InputError,
        PictureError, or InferenceError if no device contributes in time.
        """
        started_s = self._clock()
        return self._answered(picture, started_s, checked_deadline_ms(deadline_ms))

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
        started_s = self._clock()
        deadline_ms = checked_deadline_ms(deadline_ms)
        glance = glance_at(at, within_ms=within_ms, now_s=started_s)
        return self._answered(glance, started_s, deadline_ms)

    @overload
    def watch(self, *, errors: Raising = ..., **how: Unpack[Watching]) -> Iterator[Prediction]: ...

    @overload
    def watch(
        self, *, errors: Errors, **how: Unpack[Watching]
    ) -> Iterator[Prediction | InferenceError]: ...

    def watch(
        self,
        *,
        every_ms: float = DEFAULT_EVERY_MS,
        deadline_ms: float = DEFAULT_DEADLINE_MS,
        within_ms: float = DEFAULT_WITHIN_MS,
        errors: Errors = "raise",
    ) -> Iterator[Prediction] | Iterator[Prediction | InferenceError]:
        """What the devices' own cameras see, again and again: one look every `every_ms`.

        One look is under way at a time; a slow one delays the next. With `errors="yield"` an
        InferenceError takes the place of its look's answer.
        """
        arguments.check_errors(errors)
        deadline_ms, every_ms = checked_deadline_ms(deadline_ms), checked_every_ms(every_ms)
        glance_at("latest", within_ms=within_ms, now_s=self._clock())
        return self._watch(every_ms, deadline_ms, within_ms, errors)

    def _watch(
        self, every_ms: float, deadline_ms: float, within_ms: float, errors: Errors
    ) -> Iterator[Prediction | InferenceError]:
        while True:
            started_s = self._clock()
            answer: Answer
            try:
                answer = self.look(deadline_ms=deadline_ms, within_ms=within_ms)
            except InferenceError as error:
                answer = error
            yield answer if errors == "yield" else given(answer)
            time.sleep(max(0.0, started_s + every_ms / 1e3 - self._clock()))

    @overload
    def stream(
        self, pictures: Iterable[Picture], *, errors: Raising = ..., **how: Unpack[Streaming]
    ) -> Iterator[Prediction]: ...

    @overload
    def stream(
        self, pictures: Iterable[Picture], *, errors: Errors, **how: Unpack[Streaming]
    ) -> Iterator[Prediction | InferenceError | PictureError]: ...

    def stream(
        self,
        pictures: Iterable[Picture],
        *,
        deadline_ms: float = DEFAULT_DEADLINE_MS,
        in_flight: int = 2,
        errors: Errors = "raise",
    ) -> Iterator[Prediction] | Iterator[Prediction | InferenceError | PictureError]:
        """Answers for `pictures` in their order, with up to `in_flight` of them under way.

        Each deadline counts from when its picture was taken from `pictures`. With
        `errors="yield"` an InferenceError or PictureError takes the place of its picture's answer.
        """
        arguments.check_stream(pictures, in_flight, errors)
        deadline_ms = checked_deadline_ms(deadline_ms)
        return self._stream(iter(pictures), deadline_ms, in_flight, errors)

    def _stream(
        self, pictures: Iterator[Picture], deadline_ms: float, in_flight: int, errors: Errors
    ) -> Iterator[Prediction | InferenceError | PictureError]:
        waiting: deque[list[Outcome]] = deque()
        exhausted = False
        while waiting or not exhausted:
            while not exhausted and len(waiting) < in_flight:
                try:
                    picture = next(pictures)
                except StopIteration:
                    exhausted = True
                    break
                started_s = self._clock()
                waiting.append([])
                try:
                    cut = self._cut_in_time(picture, started_s, deadline_ms, tending=True)
                    with self._in_turn(started_s, deadline_ms):
                        self._submit(picture, cut, started_s, deadline_ms, waiting[-1])
                except (InferenceError, PictureError) as error:
                    waiting[-1].append(error)
            if not waiting:
                break
            answer = self._awaited(waiting.popleft())
            yield answer if errors == "yield" else given(answer)

    def _awaited(self, answers: list[Outcome]) -> Outcome:
        """The answer of a call under way, which another thread's turn may bring as well."""
        while not answers:
            self._check_usable()
            if self._turn.acquire(timeout=_LOOK_S):
                with self._holding():
                    while not answers:
                        self._step()
        return answers[0]

    def status(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> list[DeviceStatus]:
        """How every device of the fleet is, waiting at most `timeout_s` for those that are slow.

        Raises DeadlineExceeded if another thread's call is under way for longer than that.
        """
        arguments.check_timeout_s(timeout_s)
        with self._in_turn(self._clock(), timeout_s * 1e3):
            asked = self._ask_all()
            self._wait(self._link, timeout_s, lambda: self._all_told(asked))
            return self._device_statuses(asked)

    def reload(self, *, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Read fleet.toml, its bundle and the key again, and use them from the next call on.

        Connects first, waiting at most `timeout_s`, while other threads go on asking; calls under
        way end as they began. Raises ConfigError if anything is wrong: then nothing changes.
        """
        arguments.check_timeout_s(timeout_s)
        self._check_usable()
        link = Link(self._options, self._clock, stacklevel=2)
        try:
            self._wait(link, timeout_s, link.settled)
            self._turn.acquire()
            with self._holding():
                # Each ends by its deadline.
                while self._exchange.busy:
                    self._step()
                link = self._adopt(link)
        finally:
            # The former one or, if that failed, the new one.
            link.transport.close()

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _answered(
        self, asked: Picture | Glance, started_s: float, deadline_ms: float
    ) -> Prediction:
        answers: list[Outcome] = []
        cut = self._cut_in_time(asked, started_s, deadline_ms)
        with self._in_turn(started_s, deadline_ms):
            self._submit(asked, cut, started_s, deadline_ms, answers)
            while not answers:
                self._step()
        return given(answers[0])

    @contextmanager
    def _in_turn(self, started_s: float, deadline_ms: float) -> Iterator[None]:
        self._check_usable()
        if not self._turn.acquire(timeout=self._left_s(started_s, deadline_ms)):
            raise self._too_late(deadline_ms, "another thread's call is under way")
        with self._holding():
            yield

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

    def _cut_in_time(
        self,
        picture: Picture | Glance,
        started_s: float,
        deadline_ms: float,
        *,
        tending: bool = False,
    ) -> Cut:
        """Every member's view; a decoder that is not done in time is left to itself.

        With `tending`, calls under way are not kept waiting for it.
        """
        self._check_usable()
        link = self._link
        if isinstance(picture, Glance):
            return link, picture
        if is_quick(picture):
            return link, link.views(picture)
        cutter = link.start_views(picture)
        try:
            until_s = self._clock() + self._left_s(started_s, deadline_ms)
            self._join(cutter, until_s, tending=tending)
        finally:
            why = cutter.abandon() if cutter.is_alive() else ""
        if why:
            raise self._too_late(deadline_ms, why)
        return link, cutter.result()

    def _join(self, cutter: Decoding[dict[int, View]], until_s: float, *, tending: bool) -> None:
        """Wait for `cutter` until `until_s`; calls under way are decided in time meanwhile."""
        while cutter.is_alive() and (left_s := until_s - self._clock()) > 0:
            cutter.join(min(left_s, self._tend()) if tending else left_s)

    def _tend(self) -> float:
        """Take in what has come for calls under way; seconds until the next has to be decided."""
        if not self._turn.acquire(blocking=False):
            # The thread whose turn it is sees to all calls.
            return _LOOK_S
        with self._holding():
            self._exchange.handle(self._transport.poll(0))
            self._exchange.tick()
            return max(0.0, self._exchange.next_wake_s() - self._clock())

    def _submit(
        self,
        picture: Picture | Glance,
        cut: Cut,
        started_s: float,
        deadline_ms: float,
        answers: list[Outcome],
    ) -> None:
        link, views = cut
        if link is not self._link:
            # Another thread has reloaded since: its bundle may want other views.
            link, views = self._cut_in_time(picture, started_s, deadline_ms)
        # Connections that went or came since the last call are settled before anyone is asked.
        link.exchange.handle(link.transport.poll(0))
        link.exchange.submit(
            views, started_s=started_s, deadline_ms=deadline_ms, done=answers.append
        )

    def _step(self) -> None:
        """Wait for the next event or the next moment to decide, and take it in."""
        left_s = self._exchange.next_wake_s() - self._clock()
        self._exchange.handle(self._transport.poll(max(0.0, left_s)))
        self._exchange.tick()

    def _wait(self, link: Link, timeout_s: float, reached: Callable[[], bool]) -> None:
        until_s = self._clock() + timeout_s
        while not reached() and (left_s := until_s - self._clock()) > 0:
            wake_s = link.exchange.next_wake_s() - self._clock()
            link.exchange.handle(link.transport.poll(max(0.0, min(left_s, wake_s))))
            link.exchange.tick()
