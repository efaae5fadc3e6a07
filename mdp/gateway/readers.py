"""Readers of server-sent events: few at a time, each counted until its connection ends."""

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mdp.gateway.refusals import busy

#: Readers of events at a time: all callers' together, and one's.
MAX_WATCHERS, MAX_WATCHERS_OF_ONE = 32, 16
#: Between two signs of life at most.
QUIET_S = 10.0
_KIND = "text/event-stream"


class EventStream(StreamingResponse):
    """Server-sent events inside a block, `reading`, from the response's start to its end.

    The block ends as well where the reader has left before the first event.
    """

    def __init__(
        self, events: AsyncIterator[bytes], reading: AbstractContextManager[object]
    ) -> None:
        super().__init__(events, media_type=_KIND)
        self._reading = reading

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._reading:
            await super().__call__(scope, receive, send)


class Readers:
    """The readers of all streams of one server."""

    def __init__(self) -> None:
        self._by_caller: Counter[str] = Counter()

    def stream(
        self,
        request: Request,
        events: AsyncIterator[bytes],
        reading: AbstractContextManager[object] | None = None,
    ) -> Response:
        """Answer with `events`, inside `reading`; raises Refusal where there are too many."""
        if request.method == "HEAD":
            return Response(media_type=_KIND)
        caller, readers = request.state.caller, self._by_caller
        if readers[caller] >= MAX_WATCHERS_OF_ONE or readers.total() >= MAX_WATCHERS:
            raise busy(
                f"expected at most {MAX_WATCHERS_OF_ONE} readers of events of one caller at a "
                f"time, and {MAX_WATCHERS} of all"
            )
        return EventStream(events, self._count(caller, reading or nullcontext()))

    @contextmanager
    def _count(self, caller: str, reading: AbstractContextManager[object]) -> Iterator[None]:
        # From the start, as requests arrive together.
        self._by_caller[caller] += 1
        try:
            with reading:
                yield
        finally:
            self._by_caller[caller] -= 1
            # Without those that have none.
            self._by_caller += Counter()
