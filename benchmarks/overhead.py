"""What a call costs beyond computing, against a bare ZeroMQ exchange of the same bytes.

    python -m benchmarks.overhead

Three agents on loopback serve 224x224 crops with models that take next to no time. Beside them
three processes with nothing but a ROUTER answer the same frames with frames of the same size. Both
are asked in turns, a block each, so that drift of the machine meets both. Reported are a call's
latency less its slowest member's own computing, the bare round trip to all three, and the ratio.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import zmq

from benchmarks.machine import describe_machine
from mdp import Client
from mdp.bench import noise_picture, overhead_ms, percentiles
from mdp.bundle import Bundle
from mdp.fleet import new_fleet
from mdp.wire import Infer, Result, encode
from tests.support.bundles import LABELS, write_bundle

RESULTS = Path(__file__).parent / "results" / "overhead.json"
SIDE = 224
ECHO = """
import sys, zmq
router = zmq.Context().socket(zmq.ROUTER)
router.linger = 0
port = router.bind_to_random_port("tcp://127.0.0.1")
print(port, flush=True)
reply = [bytes(int(size)) for size in sys.argv[1:]]
while True:
    peer = router.recv_multipart()[0]
    router.send_multipart([peer, *reply])
"""


@contextmanager
def agents(bundle: Bundle, folder: Path) -> Iterator[Path]:
    """fleet.toml of one running agent per assignment of `bundle`."""
    with ExitStack() as stack:
        addresses = [
            f"{a.device}={stack.enter_context(agent(bundle, a.device))}"
            for a in bundle.manifest.plan.assignments
        ]
        new_fleet(bundle, addresses, folder / "fleet.toml")
        yield folder / "fleet.toml"


@contextmanager
def agent(bundle: Bundle, device: str) -> Iterator[str]:
    """Address of a running agent that is READY."""
    program = str(Path(sys.executable).parent / "mdp-agent")
    where = ["--bind", "tcp://127.0.0.1:0", "--threads", "1", "--json"]
    command = [program, "run", "--bundle", str(bundle.path), "--device", device, *where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] == "READY":
                    yield str(event["address"])
                    break
        finally:
            process.terminate()


@contextmanager
def echoes(count: int, reply_sizes: Sequence[int]) -> Iterator[list[int]]:
    """Ports of `count` processes that answer anything with frames of `reply_sizes` bytes."""
    command = [sys.executable, "-c", ECHO, *map(str, reply_sizes)]
    with ExitStack() as stack:
        ports = []
        for _ in range(count):
            process = stack.enter_context(
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            ports.append(int(process.stdout.readline()))
        yield ports


class BareClient:
    """A DEALER per peer, no more: what a careful user of pyzmq would write."""

    def __init__(self, ports: Sequence[int], frames: Sequence[bytes]) -> None:
        self._context = zmq.Context()
        self._frames = frames
        self._poller = zmq.Poller()
        self._dealers = []
        for port in ports:
            dealer = self._context.socket(zmq.DEALER)
            dealer.linger = 0
            dealer.connect(f"tcp://127.0.0.1:{port}")
            self._dealers.append(dealer)
            self._poller.register(dealer, zmq.POLLIN)

    def round_trip_ms(self) -> float:
        """Send to all, wait for all."""
        started_s = time.perf_counter()
        for dealer in self._dealers:
            dealer.send_multipart(self._frames)
        waiting = len(self._dealers)
        while waiting:
            for dealer, _ in self._poller.poll():
                dealer.recv_multipart()
                waiting -= 1
        return (time.perf_counter() - started_s) * 1e3

    def close(self) -> None:
        """Close the sockets."""
        for dealer in self._dealers:
            dealer.close()
        self._context.term()


def message_sizes(num_classes: int) -> tuple[list[bytes], list[int]]:
    """The frames of a request, and the sizes of a reply's, as this protocol has them."""
    infer = Infer(
        request_id=1, digest="0" * 64, k=0, budget_ms=987.654, image_size=SIDE, encoding="raw"
    )
    request = [bytes(frame) for frame in encode(infer, bytes(SIDE * SIDE * 3))]
    result = Result(request_id=1, num_classes=num_classes, queue_ms=0.123, compute_ms=0.456)
    return request, [len(frame) for frame in encode(result, bytes(8 * num_classes))]


def measure(devices: int, blocks: int, per_block: int) -> dict[str, object]:
    """Both exchanges in turns; milliseconds at p50 and p99, and their ratios."""
    names = tuple(f"device-{number}" for number in range(devices))
    request, reply_sizes = message_sizes(len(LABELS))
    overheads: list[float] = []
    bare: list[float] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        bundle = Bundle.open(write_bundle(folder / "b", devices=names, sizes=(SIDE,) * devices))
        client = stack.enter_context(Client.connect(stack.enter_context(agents(bundle, folder))))
        bare_client = BareClient(stack.enter_context(echoes(devices, reply_sizes)), request)
        stack.callback(bare_client.close)
        picture = noise_picture(SIDE)
        for block in range(blocks + 1):
            predictions = [client.classify(picture) for _ in range(per_block)]
            trips = [bare_client.round_trip_ms() for _ in range(per_block)]
            if block:  # the first one warms up
                assert not any(prediction.partial for prediction in predictions)
                overheads += [overhead_ms(prediction) for prediction in predictions]
                bare += trips
    ours, theirs = percentiles(overheads, (50, 99)), percentiles(bare, (50, 99))
    return {
        "agents": devices,
        "requests": len(overheads),
        "overhead_ms": ours,
        "bare_ms": theirs,
        "ratio": {point: ours[point] / theirs[point] for point in ours},
    }


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description="Client overhead against bare ZeroMQ.")
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 3, 8])
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--per-block", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    machine = describe_machine()
    rows = [measure(count, options.blocks, options.per_block) for count in options.agents]
    print(f"{'agents':>6} {'overhead p50':>13} {'p99':>7} {'bare p50':>9} {'p99':>7} {'ratio':>6}")
    for row in rows:
        ours, theirs, ratio = row["overhead_ms"], row["bare_ms"], row["ratio"]
        print(
            f"{row['agents']:>6} {ours['p50']:>13.2f} {ours['p99']:>7.2f} "
            f"{theirs['p50']:>9.2f} {theirs['p99']:>7.2f} {ratio['p50']:>6.2f}"
        )
    options.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
