"""Worker processes that answer a gateway's pictures: started, chosen among, and started again.

What is handed over and why is in docs/adr/0029-workers-of-a-gateway.md.
"""

import asyncio
import itertools
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mdp.closing import Closing
from mdp.errors import AgentError, WireError
from mdp.gateway.handover import (
    Answered,
    DevicesLeftOut,
    Failed,
    FromWorker,
    Opening,
    WorkerFleet,
    WorkerReady,
    ask,
    encode,
    error_of,
    read_from_worker,
)
from mdp.gateway.refusals import busy
from mdp.pictures.crop import Picture
from mdp.requests.prediction import Prediction
from mdp.tracing import current_traceparent

#: A worker's program, before its descriptors; modules of the current folder are none of it.
COMMAND = (sys.executable, "-P", "-m", "mdp.gateway.worker")
#: Pictures that a worker decodes at a time: beside one that takes long there is room for others.
SLOTS = 2
#: Seconds for a worker's imports and its fleets, on a busy board.
START_S = 60.0
#: Seconds past the end of a request after which its caller waits no longer, and after which its
#: worker, whose clients end all calls in time, is taken to hang.
GRACE_S, HANGS_S = 0.5, 5.0
#: Seconds between two looks for workers that hang.
LOOK_S = 1.0
#: Pauses before a worker is started again: none for one that has lived so long, else growing ones.
LIVED_S, FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 1.0, 30.0


def pause_s(lived_s: float, former_s: float) -> float:
    """Seconds until a worker that has lived so long is started again, after a `former_s` pause."""
    if lived_s >= LIVED_S:
        return 0.0
    return min(max(FIRST_PAUSE_S, 2 * former_s), LONGEST_PAUSE_S)


def why_it_ended(code: int | None) -> str:
    """A process's exit code in words; None for one that was still there."""
    if code is None:
        return "it was ended, as it did not answer"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


@dataclass(slots=True, eq=False)
class _HandedRequest:
    """A request that a worker answers."""

    answered: asyncio.Future[list[Prediction]]
    #: By the clock of the pool.
    due_s: float


class WorkerProcess:
    """One worker process, from its start to its end."""

    def __init__(self, opening: Opening, lock: int) -> None:
        """Start a process, which is there once `wait_until_ready` has returned.

        Raises AgentError where the system has none to give.
        """
        self._ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*COMMAND, str(theirs.fileno()), str(lock)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), lock),
                    # Ctrl-C is the gateway's.
                    process_group=0,
                )
            except OSError as error:
                self._ours.close()
                raise AgentError(f"a worker cannot be started: {error.strerror}") from error
        self.pid = self._process.pid
        # Of one that has ended at once, its code says more.
        with suppress(OSError):
            self._ours.sendall(b"".join(encode(opening)))
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self.begun_s = time.monotonic()
        self.waiting: dict[int, _HandedRequest] = {}
        #: Whether it was told that it is given up.
        self.killed = False

    async def wait_until_ready(self) -> None:
        """Wait until it has opened its fleets; raises MDPError where it cannot."""
        self._ours.setblocking(False)
        self._reader, self._writer = await asyncio.open_connection(sock=self._ours)
        try:
            async with asyncio.timeout(START_S):
                message = await read_from_worker(self._reader)
        except TimeoutError as error:
            raise AgentError(f"a worker has not started within {START_S:g} s") from error
        except (asyncio.IncompleteReadError, ConnectionError, WireError) as error:
            code = await asyncio.to_thread(self.end)
            raise AgentError(f"a worker has not started: {why_it_ended(code)}") from error
        if isinstance(message, Failed):
            raise error_of(message)
        assert isinstance(message, WorkerReady)

    async def next_message(self) -> FromWorker | None:
        """Its next message; None at its end."""
        with suppress(asyncio.IncompleteReadError, ConnectionError, WireError):
            return await read_from_worker(self._reader)
        return None

    def send(self, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        """Send a message; one that has ended gets nothing."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.writelines(parts)

    def kill(self) -> None:
        """End it at once: its socket ends, and with it what waits."""
        self.killed = True
        self._process.kill()

    def end(self) -> int | None:
        """Wait for its end after its socket's, briefly; returns its code, None if it was killed."""
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return None
        return None if self.killed else code

    def hang_up(self) -> None:
        """Close this end of its socket."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._ours.close()


class Workers(Closing):
    """So many workers of one gateway."""

    def __init__(
        self,
        count: int,
        fleets: Mapping[str, WorkerFleet],
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start `count` processes that serve `fleets`; `report` gets a line on each that dies."""
        self.count = count
        self._opening = Opening(fleets=dict(fleets), slots=SLOTS)
        self._report, self._clock = report, clock
        # Not named: it is there as long as someone has it.
        self._lock = tempfile.TemporaryFile()  # noqa: SIM115
        self._left_out: dict[str, list[str]] = {}
        self._numbers = itertools.count(1)
        #: Those that answer, the one asked longest ago first.
        self._ready: list[WorkerProcess] = []
        self._tasks: list[asyncio.Task[None]] = []
        #: How many have died.
        self.died = 0
        self._starting = [self._start() for _ in range(count)]

    @property
    def ready(self) -> int:
        """The number of workers that answer now."""
        return len(self._ready)

    @property
    def pids(self) -> list[int]:
        """The processes that answer now."""
        return [worker.pid for worker in self._ready]

    def _start(self) -> WorkerProcess:
        return WorkerProcess(self._opening, self._lock.fileno())

    async def open(self) -> None:
        """Wait until all answer, and watch over them from then on; raises MDPError."""
        starting, self._starting = self._starting, []
        try:
            for worker in starting:
                await worker.wait_until_ready()
        except BaseException:
            for worker in starting:
                worker.hang_up()
                worker.kill()
                worker.end()
            raise
        for worker in starting:
            self._welcome(worker)
            self._tasks.append(asyncio.create_task(self._keep(worker)))
        self._tasks.append(asyncio.create_task(self._look()))

    def _welcome(self, worker: WorkerProcess) -> None:
        for model, devices in self._left_out.items():
            worker.send(encode(DevicesLeftOut(model=model, devices=devices)))
        self._ready.insert(0, worker)

    async def _keep(self, worker: WorkerProcess) -> None:
        """Take in what a worker says, and start another one after it, over and over."""
        paused_s = 0.0
        while True:
            while (message := await worker.next_message()) is not None:
                self._take(worker, message)
            self._ready.remove(worker)
            why = await self._end(worker)
            self.died += 1
            paused_s = pause_s(self._clock() - worker.begun_s, paused_s)
            later = f" in {paused_s:g} s" if paused_s else ""
            self._report(f"a worker of the gateway has ended ({why}): another starts{later}")
            await asyncio.sleep(paused_s)
            worker = await self._start_again(paused_s)
            self._welcome(worker)

    async def _end(self, worker: WorkerProcess) -> str:
        """See a worker off, and refuse what it was asked; returns why it has ended."""
        worker.hang_up()
        for waiting in worker.waiting.values():
            if not waiting.answered.done():
                waiting.answered.set_exception(busy("the worker with this request has ended"))
                # Its caller may have left.
                waiting.answered.exception()
        worker.waiting.clear()
        return why_it_ended(await asyncio.to_thread(worker.end))

    async def _start_again(self, paused_s: float) -> WorkerProcess:
        """Start one more process until one answers."""
        while True:
            try:
                worker = await asyncio.to_thread(self._start)
                try:
                    await worker.wait_until_ready()
                except BaseException:
                    worker.hang_up()
                    worker.kill()
                    worker.end()
                    raise
            except Exception as error:
                # A bundle may be half written, memory short for a while.
                paused_s = pause_s(0.0, paused_s)
                self._report(f"no further worker of the gateway: {error}; again in {paused_s:g} s")
                await asyncio.sleep(paused_s)
            else:
                return worker

    def _take(self, worker: WorkerProcess, message: FromWorker) -> None:
        if isinstance(message, WorkerReady):
            return
        waiting = worker.waiting.pop(message.number, None)
        # None where its caller no longer waits.
        if waiting is None or waiting.answered.done():
            return
        if isinstance(message, Answered):
            waiting.answered.set_result(message.answers)
        else:
            waiting.answered.set_exception(error_of(message))

    async def _look(self) -> None:
        """Kill workers that hang, over and over."""
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = self._clock()
            for worker in self._ready:
                if any(now_s > waiting.due_s + HANGS_S for waiting in worker.waiting.values()):
                    worker.kill()

    async def classify(
        self, model: str, pictures: Sequence[Picture], deadline_ms: float, turns: int = 1
    ) -> list[Prediction]:
        """A worker's answers to `pictures`, asked in so many `turns` of one deadline each.

        Raises what a client raises, and Refusal where no worker is there or answers.
        """
        if not self._ready:
            raise busy("no worker of the gateway is there: another starts")
        worker = min(self._ready, key=lambda each: len(each.waiting))
        # Among equals the next one is next.
        self._ready.remove(worker)
        self._ready.append(worker)
        number, begun_s = next(self._numbers), self._clock()
        wait_s = turns * deadline_ms / 1e3
        waiting = _HandedRequest(asyncio.get_running_loop().create_future(), begun_s + wait_s)
        worker.waiting[number] = waiting
        trace = current_traceparent()
        worker.send(ask(number, model, pictures, deadline_ms, begun_s, trace))
        try:
            async with asyncio.timeout(wait_s + GRACE_S):
                return await waiting.answered
        except TimeoutError as error:
            raise busy("the worker with this request does not answer") from error

    def leave_out(self, model: str, devices: Iterable[str]) -> None:
        """Have all workers do without `devices` in later calls."""
        self._left_out[model] = list(devices)
        for worker in self._ready:
            worker.send(encode(DevicesLeftOut(model=model, devices=self._left_out[model])))

    async def aclose(self) -> None:
        """End all workers; requests under way get no answer."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.close()

    def close(self) -> None:
        """End all workers, outside the loop that they were opened in."""
        for worker in self._starting:
            # It would end only after its imports.
            worker.kill()
        ending, self._ready, self._starting = [*self._ready, *self._starting], [], []
        for worker in ending:
            worker.hang_up()
        for worker in ending:
            worker.end()
        self._lock.close()
