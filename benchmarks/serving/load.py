"""Whole answers under load: calls that wait in the client, overload, and devices in trouble.

    python -m benchmarks.serving --only load
    python -m benchmarks.serving.load --before COMMIT     # beside another commit, in turns
    python -m benchmarks.serving.load --beside 6          # also beside six busy processes

Three stub agents, each a process of its own, wait 5 ms for each picture of 224 pixels, so that they
need none of the machine's cores, and answer at most some 190 a second. Callers are of one process:

    gather       50 calls at once, 3 s each
    loop N       N callers, each asks again as it is answered; 4 x 16: of four clients
    stream       `AsyncClient.stream` with 32 in flight
    threads N    N threads share one `Client`
    twice        calls at random moments, twice as many as fit, 200 ms each; 4 x: of four clients
    crowd        64 callers with 200 ms each, of which about 35 fit; refused ones ask again at once
    slow         a loop of 32; one agent waits 15 ms
    dies         a loop of 32, in the middle of which one agent is killed
    full         a loop of 8; the queue of one agent is full of others' requests
    one          one caller of a `Client` whose agents do not wait, for the time of a single call

`whole` answers have every member. A call is `late` if its caller had to wait longer than its
deadline. `fair` is the fewest whole answers of a client over the most. The capacity is that of
`loop 32` in the same run. With `--before`, the same script, with the packages of that commit, takes
turns with this one, scenario by scenario. With `--beside`, every turn is also played beside so many
busy processes, each time after the same without; what fits is then measured beside them as well.
"""

import asyncio
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import zmq

import mdp
from benchmarks.harness.options import arguments
from benchmarks.harness.tables import table
from mdp.cli.bench import noise_picture
from mdp.errors import InferenceError
from mdp.formats.bundle import Bundle
from mdp.protocol.messages import Infer, encode
from mdp.testing.agents import AgentFleet
from mdp.testing.bundles import write_bundle
from mdp.testing.processes import PATIENCE_S, LineProcess, until

ROOT = Path(__file__).resolve().parents[2]
STUB = (sys.executable, str(ROOT / "benchmarks" / "harness" / "stub_agent.py"))
SIDE, WORK_MS, SLOW_MS = 224, 5.0, 15.0
PLENTY_MS, TIGHT_MS = 3000.0, 200.0
CLIENTS = 4
#: Requests that four strangers keep in the queue of one agent.
STRANGERS, THEIRS, LEAST_FULL = 4, 150, 400
#: How often they fill it again.
REFILL_S = 0.05
TURNS, SECONDS = 5, 4.0


class Tally:
    """Outcomes of calls."""

    def __init__(self) -> None:
        self.whole: dict[int, int] = dict.fromkeys(range(CLIENTS), 0)
        self.partial = self.none = self.late = 0
        self.worst_ms = 0.0
        #: Why devices are missing from answers, by code.
        self.reasons: Counter[str] = Counter()
        self.latencies_ms: list[float] = []
        self.started_s = time.monotonic()
        self.ended_s = self.started_s

    def count(self, answer: object, started_s: float, deadline_ms: float, client: int) -> None:
        """One call has ended now."""
        self.ended_s = time.monotonic()
        took_ms = (self.ended_s - started_s) * 1e3
        if took_ms > deadline_ms:
            self.late += 1
            self.worst_ms = max(self.worst_ms, took_ms - deadline_ms)
        if not isinstance(answer, mdp.Prediction):
            self.none += 1
            return
        self.latencies_ms.append(took_ms)
        if answer.partial:
            self.partial += 1
            self.reasons.update(str(code) for code in answer.missing_codes.values())
        else:
            self.whole[client] += 1

    def row(self, clients: int) -> dict[str, Any]:
        whole = sum(self.whole.values())
        calls = max(1, whole + self.partial + self.none)
        each = [self.whole[number] for number in range(clients)]
        return {
            "calls": calls,
            "whole": whole / calls,
            "partial": self.partial / calls,
            "none": self.none / calls,
            "whole_per_s": whole / max(1e-9, self.ended_s - self.started_s),
            "p50_ms": median(self.latencies_ms) if self.latencies_ms else 0.0,
            "late": self.late,
            "worst_ms": self.worst_ms,
            "fair": min(each) / max(1, *each),
            "reasons": dict(self.reasons),
        }


class Scenario(NamedTuple):
    """A disturbance of a fleet."""

    kind: str
    callers: int = 1
    clients: int = 1
    deadline_ms: float = PLENTY_MS
    #: Of the capacity, for calls at random moments.
    times: float = 0.0
    fleet: str = "even"


SCENARIOS = {
    "loop 32": Scenario("loop", 32),
    "gather": Scenario("gather", 50),
    "loop 64": Scenario("loop", 64),
    "4 x loop 16": Scenario("loop", 64, CLIENTS),
    "stream": Scenario("stream", 32),
    "threads 8": Scenario("threads", 8),
    "threads 64": Scenario("threads", 64),
    "loop 8": Scenario("loop", 8),
    "twice": Scenario("random", deadline_ms=TIGHT_MS, times=2.0),
    "4 x twice": Scenario("random", clients=CLIENTS, deadline_ms=TIGHT_MS, times=2.0),
    "crowd": Scenario("loop", 64, deadline_ms=TIGHT_MS),
    "slow": Scenario("loop", 32, fleet="slow"),
    "slow, twice": Scenario("random", deadline_ms=TIGHT_MS, times=2.0, fleet="slow"),
    "dies": Scenario("dies", 32, deadline_ms=1000.0),
    "full": Scenario("full", 8),
    "one": Scenario("threads", 1, fleet="idle"),
}
#: Milliseconds that each agent of a fleet waits, and the load by which is known what fits.
TIMES_MS = {"even": (WORK_MS,) * 3, "slow": (WORK_MS, WORK_MS, SLOW_MS), "idle": (0.0,) * 3}
LOADS = {"even": "loop 32", "slow": "slow", "idle": "one"}


@contextmanager
def waiting_agents(times_ms: Sequence[float]) -> Iterator[AgentFleet]:
    """Stub agents that wait so long for each picture."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        names = tuple(f"device-{number}" for number in range(len(times_ms)))
        write_bundle(folder / "bundle", devices=names, sizes=(SIDE,) * len(names))
        with AgentFleet(folder, folder / "bundle") as fleet:
            for device, each_ms in zip(names, times_ms, strict=True):
                fleet.start(device, "--work-ms", each_ms, program=STUB, wait_for=None)
            for agent in fleet.agents.values():
                agent.wait_for("READY")
            fleet.write()
            yield fleet


async def ask(
    client: mdp.AsyncClient, picture: Any, deadline_ms: float, tally: Tally, number: int = 0
) -> None:
    started_s = time.monotonic()
    answer: object = None
    with suppress(InferenceError):
        answer = await client.classify(picture, deadline_ms=deadline_ms)
    tally.count(answer, started_s, deadline_ms, number)


async def connect_clients(
    stack: AsyncExitStack, fleet: AgentFleet, count: int
) -> list[mdp.AsyncClient]:
    """Clients whose agents have all answered, as often as it takes to know their times."""
    path, picture = fleet.folder / "fleet.toml", noise_picture(SIDE)
    clients = []
    for _ in range(count):
        client = await stack.enter_async_context(
            mdp.AsyncClient.connect(path, timeout_s=PATIENCE_S)
        )
        until_s = time.monotonic() + PATIENCE_S
        while (await client.classify(picture, deadline_ms=PATIENCE_S * 1e3)).partial:
            assert time.monotonic() < until_s, "agents do not answer"
        for _ in range(16):
            await client.classify(picture, deadline_ms=PATIENCE_S * 1e3)
        clients.append(client)
    return clients


def gaps(seed: int) -> Iterator[float]:
    """Between calls that come at random, of mean 1; a simulation of this seed has the same."""
    from partitioner.simulation.models import RandomStreams, SampleStream, exponential

    stream = SampleStream(RandomStreams(seed), "", "arrivals", exponential)
    while True:
        yield stream.next()


async def at_random(
    clients: Sequence[mdp.AsyncClient], rate: float, calls: int, deadline_ms: float, seed: int,
    tally: Tally,
) -> None:  # fmt: skip
    """Calls as a Poisson process, of the clients in turns."""
    picture, between = noise_picture(SIDE), gaps(seed)
    under_way, due_s = set(), time.monotonic()
    for number in range(calls):
        due_s += next(between) / rate
        await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        own = number % len(clients)
        call = asyncio.create_task(ask(clients[own], picture, deadline_ms, tally, own))
        under_way.add(call)
        call.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)


async def loop(
    clients: Sequence[mdp.AsyncClient], callers: int, seconds: float, deadline_ms: float,
    tally: Tally,
) -> None:  # fmt: skip
    """Callers that ask again as they are answered."""
    picture, until_s = noise_picture(SIDE), time.monotonic() + seconds

    async def caller(number: int) -> None:
        own = number % len(clients)
        while time.monotonic() < until_s:
            await ask(clients[own], picture, deadline_ms, tally, own)
            # One that is refused at once keeps no other from running.
            await asyncio.sleep(0)

    await asyncio.gather(*(caller(number) for number in range(callers)))


async def stream_calls(
    client: mdp.AsyncClient, in_flight: int, seconds: float, deadline_ms: float, tally: Tally
) -> None:
    picture, until_s = noise_picture(SIDE), time.monotonic() + seconds

    async def pictures() -> AsyncIterator[Any]:
        while time.monotonic() < until_s:
            yield picture

    stream = client.stream(pictures(), deadline_ms=deadline_ms, in_flight=in_flight, errors="yield")
    async for answer in stream:
        took_ms = getattr(answer, "latency_ms", 0.0)
        tally.count(answer, time.monotonic() - took_ms / 1e3, deadline_ms, 0)


def call_in_threads(
    path: Path, threads: int, seconds: float, deadline_ms: float, tally: Tally
) -> None:
    """Threads that share a client."""
    picture, lock = noise_picture(SIDE), threading.Lock()
    with mdp.Client.connect(path, timeout_s=PATIENCE_S) as client:
        for _ in range(16):
            client.classify(picture, deadline_ms=PATIENCE_S * 1e3)
        tally.started_s = time.monotonic()
        until_s = tally.started_s + seconds

        def caller() -> None:
            while time.monotonic() < until_s:
                started_s, answer = time.monotonic(), None
                with suppress(InferenceError):
                    answer = client.classify(picture, deadline_ms=deadline_ms)
                with lock:
                    tally.count(answer, started_s, deadline_ms, 0)

        callers = [threading.Thread(target=caller) for _ in range(threads)]
        for each in callers:
            each.start()
        for each in callers:
            each.join()


def flood(folder: Path, device: str, address: str) -> None:
    """Keep the queue of an agent full until standard input ends, as clients of another kind."""
    bundle, context = Bundle.open(folder), zmq.Context()
    infer = Infer(
        request_id=1, digest=bundle.digest, k=bundle.assignment(device).k,
        budget_ms=3_600_000.0, image_size=SIDE, encoding="raw",
    )  # fmt: skip
    request = encode(infer, bytes(SIDE * SIDE * 3))
    dealers = [context.socket(zmq.DEALER) for _ in range(STRANGERS)]
    out = dict.fromkeys(dealers, 0)
    poller = zmq.Poller()
    poller.register(sys.stdin, zmq.POLLIN)
    for dealer in dealers:
        dealer.linger = 0
        dealer.connect(address)
        poller.register(dealer, zmq.POLLIN)
    due_s = time.monotonic()
    while True:
        # What is refused is not asked again at once, which would cost the agent all of its time.
        due = time.monotonic() >= due_s
        due_s += due * REFILL_S
        for dealer in dealers if due else ():
            with suppress(zmq.Again):
                while out[dealer] < THEIRS:
                    dealer.send_multipart(request, zmq.NOBLOCK)
                    out[dealer] += 1
        for ready, _ in poller.poll(10):
            if not isinstance(ready, zmq.Socket):
                return
            ready.recv_multipart()
            out[ready] -= 1


@contextmanager
def strangers(fleet: AgentFleet, device: str) -> Iterator[None]:
    """Bare clients that keep the queue of an agent full."""
    where = ["--flood", device, "--bundle", fleet.bundle, "--at", fleet.agents[device].address]
    command = [sys.executable, str(Path(__file__).resolve()), *where]
    with LineProcess("strangers", command):
        with fleet.client() as client:
            until(lambda: full(client, device), "the queue is full")
        yield


def full(client: mdp.Client, device: str) -> bool:
    statuses = {status.device: status for status in client.status(timeout_s=PATIENCE_S)}
    return (statuses[device].queued or 0) >= LEAST_FULL


async def play(
    fleet: AgentFleet, asked: Scenario, seconds: float, capacity: float, seed: int
) -> dict[str, Any]:
    """One scenario; the row of its outcomes."""
    tally = Tally()
    if asked.kind == "threads":
        path = fleet.folder / "fleet.toml"
        await asyncio.to_thread(
            call_in_threads, path, asked.callers, seconds, asked.deadline_ms, tally
        )
        return tally.row(1)
    async with AsyncExitStack() as stack:
        clients = await connect_clients(stack, fleet, asked.clients)
        picture, deadline_ms = noise_picture(SIDE), asked.deadline_ms
        tally.started_s = time.monotonic()
        if asked.kind == "random":
            rate = asked.times * capacity
            await at_random(clients, rate, round(rate * seconds), deadline_ms, seed, tally)
        elif asked.kind == "gather":
            until_s = time.monotonic() + seconds
            while time.monotonic() < until_s:
                every = (ask(clients[0], picture, deadline_ms, tally) for _ in range(asked.callers))
                await asyncio.gather(*every)
        elif asked.kind == "stream":
            await stream_calls(clients[0], asked.callers, seconds, deadline_ms, tally)
        elif asked.kind == "full":
            with strangers(fleet, "device-2"):
                tally = Tally()
                await loop(clients, asked.callers, seconds, deadline_ms, tally)
        elif asked.kind == "dies":
            asyncio.get_running_loop().call_later(
                seconds / 2, fleet.agents["device-2"].process.kill
            )
            await loop(clients, asked.callers, seconds, deadline_ms, tally)
        else:
            await loop(clients, asked.callers, seconds, deadline_ms, tally)
    if asked.kind == "dies":
        fleet.restart("device-2", "--work-ms", WORK_MS, program=STUB)
    return tally.row(asked.clients)


def serve() -> None:
    """Play what comes on standard input, a line of JSON each."""
    with ExitStack() as stack:
        fleets: dict[str, AgentFleet] = {}
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            told = json.loads(line)
            asked = Scenario(*told["scenario"])
            if asked.fleet not in fleets:
                times_ms = TIMES_MS[asked.fleet]
                fleets[asked.fleet] = stack.enter_context(waiting_agents(times_ms))
            fleet = fleets[asked.fleet]
            row = asyncio.run(play(fleet, asked, told["seconds"], told["capacity"], told["seed"]))
            print(json.dumps(row), flush=True)


def side(root: Path, log: Path) -> LineProcess:
    """This script with the packages of `root`."""
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    process = LineProcess(
        str(root), command, log, environment={"PYTHONPATH": str(root)}, patience_s=PATIENCE_S * 2,
        own_session=True,
    )  # fmt: skip
    process.line("ready")
    return process


@contextmanager
def sides(before: str) -> Iterator[dict[str, LineProcess]]:
    """`now` and, for a commit, `before`."""
    # Not above: this script also runs with the harness of another commit, which may not have it.
    from benchmarks.harness.commits import unpack

    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        roots = {"now": ROOT}
        if before:
            roots["before"] = unpack(before, folder / "before")
        both = {
            side_: stack.enter_context(side(root, folder / f"{side_}.log"))
            for side_, root in roots.items()
        }
        yield both
        for process in both.values():
            # It ends its agents.
            process.finish()


def run(
    *, quick: bool, before: str = "", only: Sequence[str] = (), turns: int = TURNS,
    seconds: float = SECONDS, beside: int = 0,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Every scenario, all sides in turns, idle and beside so many busy processes.

    Yields medians over the turns, and totals of late calls.
    """
    # Not above, as in `sides`.
    from benchmarks.harness.busy import busy, loads, name_with

    turns, seconds = (1, 0.5) if quick else (turns, seconds)
    both_loads = loads(beside)
    #: Of a fleet beside so many.
    capacity = {(fleet, load): 1.0 for fleet in LOADS for load in both_loads}
    wanted = only or tuple(SCENARIOS)
    # What fits is measured first.
    bases = {LOADS[SCENARIOS[name].fleet] for name in wanted}
    with sides(before) as both:
        for name, asked in SCENARIOS.items():
            if name not in wanted and name not in bases:
                continue
            found: dict[tuple[str, int], list[dict[str, Any]]] = {
                (one, load): [] for load in both_loads for one in both
            }
            for turn, load in product(range(turns), both_loads):
                told = {
                    "scenario": asked, "seconds": seconds,
                    "capacity": capacity[asked.fleet, load], "seed": turn,
                }  # fmt: skip
                with busy(load):
                    for one, process in both.items():
                        process.say(json.dumps(told))
                        row = process.line("a row", 20 * seconds + PATIENCE_S)
                        found[one, load].append(json.loads(row))
            if name in bases:
                for load in both_loads:
                    rows = found["now", load]
                    capacity[asked.fleet, load] = median(row["whole_per_s"] for row in rows)
            for (one, load), rows in found.items():
                reasons = sum((Counter(row.pop("reasons")) for row in rows), Counter[str]())
                middle = {key: float(np.median([row[key] for row in rows])) for key in rows[0]}
                yield {
                    "scenario": name,
                    "side": name_with(one, load),
                    **middle,
                    "late": sum(row["late"] for row in rows),
                    "worst_ms": max(row["worst_ms"] for row in rows),
                    "of_capacity": middle["whole_per_s"] / capacity[asked.fleet, load],
                    "reasons": dict(reasons),
                    "turns": rows,
                }


COLUMNS = (
    ("calls", "{scenario}"),
    ("code", "{side}"),
    ("whole", "{whole:.1%}"),
    ("partial", "{partial:.2%}"),
    ("no answer", "{none:.1%}"),
    ("whole a second", "{whole_per_s:.0f}"),
    ("of capacity", "{of_capacity:.2f}"),
    ("p50 ms", "{p50_ms:.2f}"),
    ("late", "{late:.0f}"),
    ("by, ms", "{worst_ms:.1f}"),
    ("fair", "{fair:.2f}"),
)


def main() -> None:
    asked = arguments(
        __doc__, "quick", "serve", before="", only=tuple(SCENARIOS), turns=TURNS,
        seconds=SECONDS, beside=0, flood="", bundle="", at="",
    )  # fmt: skip
    if asked.serve:
        serve()
        return
    if asked.flood:
        flood(Path(asked.bundle), asked.flood, asked.at)
        return
    only = () if asked.only == tuple(SCENARIOS) else asked.only
    rows = run(
        quick=asked.quick, before=asked.before, only=only, turns=asked.turns,
        seconds=asked.seconds, beside=asked.beside,
    )  # fmt: skip
    for number, row in enumerate(rows):
        text = table([row], *COLUMNS).splitlines()
        print(*(text[2:] if number else text), sep="\n", flush=True)


if __name__ == "__main__":
    main()
