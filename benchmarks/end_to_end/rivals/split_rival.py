"""The teacher with tensors split over all devices: computing measured, exchanging calculated.

Every device computes its part of every layer at the same time as the others; the slowest counts.
What exchanging adds follows from its bytes and from what the link was measured to carry.
"""

import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import msgspec

from benchmarks.end_to_end.outcomes import Answers, LinkFound, SplitFound
from benchmarks.end_to_end.rivals import frames
from benchmarks.end_to_end.rivals.part import Ask, Pass
from benchmarks.end_to_end.rivals.rivals import content, view
from benchmarks.end_to_end.rivals.split import SUMS_PER_LAYER, sum_bytes, sum_s
from benchmarks.end_to_end.setup import TensorSplit

#: Bytes with which the link is filled, and how often it is measured.
_FILLING, _TRIPS, _FILLINGS = 500_000, 50, 3
#: What Ethernet, IP and TCP add to 1,448 bytes of content, in bytes of an interface's counter.
WIRE_FACTOR = 1514 / 1448


class SplitDevices:
    """Connections to the devices that have parts of every layer."""

    def __init__(self, split: TensorSplit) -> None:
        self._connections = [frames.connect(*address) for address in split.addresses]
        self._threads = ThreadPoolExecutor(len(self._connections))

    def passes(self, count: int) -> list[list[Pass]]:
        """For each device, `count` passes made at the same time as the others'."""
        return list(self._threads.map(lambda c: _ask(c, Ask(passes=count)), self._connections))

    def measure_link(self) -> LinkFound:
        """What goes between the client and the first device."""
        device = self._connections[0]
        trips_s = [_seconds(device, b"") for _ in range(_TRIPS)]
        filled_s = min(_seconds(device, bytes(_FILLING)) for _ in range(_FILLINGS))
        trip_s = median(trips_s)
        return LinkFound(bandwidth_bps=_FILLING * 8 / (filled_s - trip_s), round_trip_s=trip_s)

    def close(self) -> None:
        self._threads.shutdown()
        for connection in self._connections:
            connection.close()


def _ask(connection: socket.socket, ask: Ask) -> list[Pass]:
    frames.send(connection, msgspec.msgpack.encode(ask))
    return msgspec.msgpack.decode(frames.receive(connection), type=list[Pass])


def _seconds(connection: socket.socket, filling: bytes) -> float:
    started_s = time.perf_counter()
    _ask(connection, Ask(passes=0, filling=filling))
    return time.perf_counter() - started_s


def request(picture: Path, image_size: int) -> tuple[int, float]:
    """Bytes of a picture for each device, and the client's milliseconds to make them."""
    started_s = time.perf_counter()
    data = content(view(picture, image_size), "jpeg")
    return len(data), (time.perf_counter() - started_s) * 1e3


class Exchange:
    def __init__(self, split: TensorSplit, link: LinkFound, value_bytes: int) -> None:
        devices = len(split.addresses)
        each_bytes = sum_bytes(split.values, value_bytes, devices) * WIRE_FACTOR
        sums = SUMS_PER_LAYER * split.layers
        # The measured bandwidth is of content, without what goes around it.
        one_s = sum_s(each_bytes / WIRE_FACTOR, link.bandwidth_bps, link.round_trip_s)
        self.sent_bytes = each_bytes * devices * sums
        self.ms = one_s * 1e3 * sums
        self.carried_ms = (one_s - link.round_trip_s) * 1e3 * sums


def calculated(
    name: str,
    *,
    split: TensorSplit,
    link: LinkFound,
    exchange: Exchange,
    passes: Sequence[Sequence[Pass]],
    requests: Sequence[tuple[int, float]],
    reply_bytes: int,
) -> tuple[Answers, SplitFound]:
    """Latency of every pass, the throughput that its slower half allows, and bytes."""
    latencies, computing, ends = [], [], []
    for number, devices in enumerate(zip(*passes, strict=True)):
        data_bytes, client_ms = requests[number % len(requests)]
        compute_ms = split.layers * (
            max(one.attention_ms for one in devices) + max(one.mlp_ms for one in devices)
        )
        sent = data_bytes * len(devices) + reply_bytes
        end_ms = (
            client_ms
            + link.round_trip_s * 1e3
            + sent * 8e3 / link.bandwidth_bps
            + max(one.embedding_ms for one in devices)
            + devices[0].head_ms
        )
        computing.append(compute_ms)
        ends.append(end_ms)
        latencies.append(compute_ms + exchange.ms + end_ms)
    picture_bytes = median(data for data, _ in requests) * len(passes) + reply_bytes
    # With several under way, one computes while another one exchanges.
    own_ms = [
        split.layers * median(one.attention_ms + one.mlp_ms for one in device) for device in passes
    ]
    busiest_ms = max(*own_ms, exchange.carried_ms)
    answers = Answers(
        name=name,
        latency_ms=latencies,
        per_s=[1e3 / busiest_ms],
        sent_bytes=[exchange.sent_bytes + picture_bytes * WIRE_FACTOR],
        calculated=True,
    )
    found = SplitFound(compute_ms=median(computing), exchange_ms=exchange.ms, ends_ms=median(ends))
    return answers, found
