"""The process of `mdp.testing.relay`; it needs the standard library only."""

import asyncio
import contextlib
import json
import random
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

#: Bytes that travel together, about what fits into one packet.
SEGMENT_BYTES = 1448
#: Linux never sends again sooner than this (TCP_RTO_MIN).
RETRANSMIT_S = 0.2
#: Segments on the way in one direction; beyond, the sender has to wait.
WINDOW = 64
#: How soon a change of the link is noticed by what waits.
LOOK_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The present behaviour of the link, in both directions."""

    #: One way, in seconds.
    delay_s: float = 0.0
    #: Bits per second; None for no limit.
    rate_bps: float | None = None
    #: Chance of each segment to be lost and sent again.
    loss: float = 0.0
    #: Nothing moves.
    silent: bool = False
    #: Connections are reset, and new ones too, for so long, and let be for as long.
    flap_s: float | None = None


_WELL = Link()


class _Passage:
    """The work of the relay's process; `link` and `troubles` may be used by another thread."""

    def __init__(self, address: str, seed: int) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.link = _WELL
        #: Segments lost and connections reset so far.
        self.troubles = 0
        self._to = (host, int(port))
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: set[asyncio.StreamWriter] = set()
        #: Whether a flapping link is down at this moment.
        self._down = False
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="relay")
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        tasks: set[asyncio.Task[None]] = set()

        async def on_accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            try:
                await self._relay(reader, writer)
            except asyncio.CancelledError:
                if not self._over.is_set():
                    raise
            finally:
                tasks.discard(task)

        server = await asyncio.start_server(on_accept, sock=self._listener)
        flapping = asyncio.create_task(self._flap())
        await self._over.wait()
        server.close()
        for task in [flapping, *tasks]:
            task.cancel()
        await asyncio.gather(flapping, *tasks, return_exceptions=True)

    async def _flap(self) -> None:
        while True:
            if self.link.flap_s is None:
                await asyncio.sleep(LOOK_S)
                continue
            self._down = True
            for writer in list(self._open):
                self._reset(writer)
            await asyncio.sleep(self.link.flap_s)
            self._down = False
            await asyncio.sleep(self.link.flap_s or 0.0)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._down:
            self._reset(writer)
            return
        try:
            await self._while(lambda: self.link.silent)
            there, agent = await asyncio.open_connection(*self._to)
        except OSError:
            self._reset(writer)
            return
        self._open |= {writer, agent}
        try:
            await _first_to_end(self._carry(reader, agent), self._carry(there, writer))
        finally:
            self._open -= {writer, agent}
            for end in (writer, agent):
                # Whoever was cut off learns of it, as by a peer that has gone.
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what comes, in order, until either side ends."""
        way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(WINDOW)
        await _first_to_end(self._take_in(reader, way), self._give_out(way, writer))

    async def _take_in(
        self, reader: asyncio.StreamReader, way: "asyncio.Queue[tuple[float, bytes]]"
    ) -> None:
        free_s = 0.0
        with contextlib.suppress(OSError):
            while data := await reader.read(SEGMENT_BYTES):
                link = self.link
                free_s = max(free_s, self._loop.time()) + self._retransmissions_s(link)
                if link.rate_bps is not None:
                    free_s += len(data) * 8 / link.rate_bps
                await way.put((free_s + link.delay_s, data))
        await way.put((free_s, b""))

    async def _give_out(
        self, way: "asyncio.Queue[tuple[float, bytes]]", writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while True:
                due_s, data = await way.get()
                # A link that has become well lets what waits go at once.
                await self._while(lambda: self.link != _WELL and self._loop.time() < due_s)  # noqa: B023
                await self._while(lambda: self.link.silent)
                if not data:
                    return
                writer.write(data)
                await writer.drain()

    def _retransmissions_s(self, link: Link) -> float:
        """Seconds of all retransmissions that one segment needs."""
        wait_s, timeout_s = 0.0, RETRANSMIT_S
        while self._random.random() < link.loss:
            wait_s, timeout_s = wait_s + timeout_s, 2 * timeout_s
            self.troubles += 1
        return wait_s

    async def _while(self, holds: Callable[[], bool]) -> None:
        while holds():
            await asyncio.sleep(LOOK_S)

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        """End a connection as a peer does that has forgotten it (RST)."""
        self.troubles += 1
        peer = writer.get_extra_info("socket")
        if peer is not None:
            with contextlib.suppress(OSError):
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    def close(self) -> None:
        """End every connection, the listener and the thread."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()


async def _first_to_end(*works: "asyncio._CoroutineLike[None]") -> None:
    """Run `works` side by side until one of them ends, then end the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    """Say where to connect, then take one link a line and answer with the troubles so far."""
    passage = _Passage(sys.argv[1], int(sys.argv[2]))
    print(passage.address, flush=True)
    for line in sys.stdin:
        passage.link = Link(**json.loads(line))
        print(passage.troubles, flush=True)
    passage.close()


if __name__ == "__main__":
    main()
