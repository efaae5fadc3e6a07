"""A worker process of a gateway: answers pictures that come over a socket, until that ends.

    python -m mdp.gateway.worker SOCKET LOCK

Both are descriptors that the gateway hands on: its socket, and a file by which workers decode large
pictures in turns. Signals are the gateway's: it drains, and then closes the socket.
"""

import asyncio
import logging
import signal
import socket
import sys
import warnings
from contextlib import suppress
from pathlib import Path

from mdp.client.aio import AsyncClient
from mdp.client.base import begun_at
from mdp.client.following import FollowedFiles
from mdp.errors import MDPError
from mdp.gateway.fleets import IN_FLIGHT, WATCH_S
from mdp.gateway.handover import (
    Answered,
    Asked,
    DevicesLeftOut,
    FromWorker,
    Opening,
    WorkerFleet,
    WorkerReady,
    encode,
    failure_of,
    pictures_of,
    read_to_worker,
)
from mdp.logs import errors_written, quiet_libraries
from mdp.pictures.decoders import DECODERS, take_turns
from mdp.requests.prediction import Prediction
from mdp.tracing import continuing, set_up

_LOG = logging.getLogger(__name__)


class FollowedFleet:
    """A client of one fleet, which follows fleet file and bundle."""

    def __init__(self, fleet: WorkerFleet) -> None:
        """Connect; raises ConfigError."""
        path = Path(fleet.path)
        self._client = AsyncClient(
            path,
            opinions=True,
            fusion=fleet.fusion,
            key=fleet.key,
            insecure=fleet.insecure,
            cascade=fleet.cascade,
        )
        # The gateway says it.
        self._files = FollowedFiles(path, self._client, lambda text: None)
        self._left_out: frozenset[str] = frozenset()

    async def answer(self, asked: Asked, content: memoryview) -> list[Prediction]:
        """Answers to the pictures of a request; raises what a client raises."""
        pictures, deadline_ms = pictures_of(asked, content), asked.deadline_ms
        with continuing(asked.traceparent):
            if len(pictures) == 1:
                with begun_at(asked.at_s):
                    return [await self._client.classify(pictures[0], deadline_ms=deadline_ms)]
            # The deadline is each picture's.
            return await self._client.classify_many(
                pictures, deadline_ms=deadline_ms, in_flight=IN_FLIGHT
            )

    def leave_out(self, devices: frozenset[str]) -> None:
        """Do without `devices` in later calls, as far as the fleet has them."""
        self._left_out = devices
        known = {entry.device for entry in self._client.fleet.devices}
        # A changed fleet may have no others, as the gateway finds too.
        self._client.leave_out(*(devices & known if known - devices else ()))

    async def follow(self) -> None:
        """Read changed files again, over and over."""
        while True:
            await asyncio.sleep(WATCH_S)
            with self._files.following() as changed:
                if changed:
                    await self._client.reload()
                    self.leave_out(self._left_out)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()


class PictureWorker:
    """The answering end of a gateway's socket."""

    def __init__(self, writer: asyncio.StreamWriter, fleets: dict[str, FollowedFleet]) -> None:
        self._writer, self._fleets = writer, fleets
        self._answering: set[asyncio.Task[None]] = set()

    def take(self, message: Asked | DevicesLeftOut, content: memoryview) -> None:
        """Begin what a message asks for."""
        if isinstance(message, DevicesLeftOut):
            self._fleets[message.model].leave_out(frozenset(message.devices))
            return
        task = asyncio.create_task(self._answer(message, content))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, asked: Asked, content: memoryview) -> None:
        told: FromWorker
        try:
            answers = await self._fleets[asked.model].answer(asked, content)
            told = Answered(number=asked.number, answers=answers)
        except MDPError as error:
            told = failure_of(asked.number, error)
        except Exception as error:
            _LOG.exception("a worker of the gateway")
            told = failure_of(asked.number, error)
        self._writer.writelines(encode(told))


async def answer_all(place: socket.socket) -> int:
    """Answer what comes over `place` until it ends; returns the exit code."""
    reader, writer = await asyncio.open_connection(sock=place)
    opening, _ = await read_to_worker(reader)
    assert isinstance(opening, Opening)
    DECODERS.limit(opening.slots)
    fleets: dict[str, FollowedFleet] = {}
    try:
        for name, fleet in opening.fleets.items():
            fleets[name] = FollowedFleet(fleet)
    except MDPError as error:
        writer.writelines(encode(failure_of(0, error)))
        await writer.drain()
        return error.exit_code
    writer.writelines(encode(WorkerReady()))
    worker = PictureWorker(writer, fleets)
    following = [asyncio.create_task(fleet.follow()) for fleet in fleets.values()]
    # The gateway has ended, or gives this worker up.
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            message, content = await read_to_worker(reader)
            assert not isinstance(message, Opening)
            worker.take(message, content)
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)
    for each in fleets.values():
        each.close()
    return 0


def main() -> None:
    """Run a worker over the descriptors that the command line names."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    quiet_libraries()
    set_up("mdp-gateway")
    place, lock = map(int, sys.argv[1:])
    take_turns(lock)
    # The gateway has said it already.
    warnings.simplefilter("ignore")
    with errors_written():
        code = asyncio.run(answer_all(socket.socket(fileno=place)))
    sys.exit(code)


if __name__ == "__main__":
    main()
