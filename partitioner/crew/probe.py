"""Measures the facts that a plan of a crew needs: paces of trainers, latency and rate of links.

Real optimiser steps on random pictures, and real messages; no picture of the user is read.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from partitioner.networks.submodel import Member
from partitioner.networks.teacher import Teacher
from partitioner.run.settings import Autocast
from partitioner.training.compute import training_device

Clock = Callable[[], float]
#: Steps that are not timed, and those that are.
WARM_UP, TIMED = 3, 5
#: Messages for the latency and the rate of a link.
PINGS, PING_BYTES, LOADS, LOAD_BYTES = 20, 8, 3, 1_000_000


class LineSpeed(NamedTuple):
    """One link as seen from one end: seconds of a message one way, bytes a second out and in."""

    latency_s: float
    out_bytes_s: float
    in_bytes_s: float


def training_pace(
    network: Member | Teacher, image_size: int, batch_size: int, autocast: Autocast,
    clock: Clock = time.perf_counter,
) -> float:  # fmt: skip
    """Pictures a second of forward, backward and AdamW on batches of `batch_size`."""
    network = network.to(training_device()).train()
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-6)
    pixels = _pixels(batch_size, image_size)
    labels = torch.zeros(batch_size, dtype=torch.int64, device=pixels.device)

    def step() -> None:
        optimiser.zero_grad(set_to_none=True)
        with _arithmetic(autocast):
            loss = F.cross_entropy(_logits(network, pixels).float(), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    return batch_size / _seconds(step, clock)


def answering_pace(
    network: Member | Teacher, image_size: int, batch_size: int, autocast: Autocast,
    clock: Clock = time.perf_counter,
) -> float:  # fmt: skip
    """Pictures a second of a frozen network."""
    network = network.to(training_device()).eval()
    pixels = _pixels(batch_size, image_size)

    def step() -> None:
        with torch.inference_mode(), _arithmetic(autocast):
            _logits(network, pixels)

    return batch_size / _seconds(step, clock)


def _logits(network: nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    if isinstance(network, Member):
        return network.of_normalised(network.normalise(pixels)).bag
    logits: torch.Tensor = network(pixels)
    return logits


def _pixels(batch_size: int, image_size: int) -> torch.Tensor:
    drawn = np.random.default_rng(0).integers(0, 256, (batch_size, 3, image_size, image_size))
    return torch.from_numpy(drawn.astype(np.float32)).to(training_device())


def _arithmetic(autocast: Autocast) -> torch.autocast:
    return torch.autocast(training_device().type, torch.bfloat16, enabled=autocast == "bf16")


def _seconds(step: Callable[[], None], clock: Clock) -> float:
    """Median seconds of a step."""
    device = training_device()

    def timed() -> float:
        started_s = clock()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - started_s

    return statistics.median([timed() for _ in range(WARM_UP + TIMED)][WARM_UP:])


def line_speed(group: Any, rank: int, clock: Clock = time.perf_counter) -> LineSpeed:
    """The link of the two trainers of a gloo `group`; both call it, `rank` is the own one in it."""
    ping, load = (torch.zeros(count, dtype=torch.uint8) for count in (PING_BYTES, LOAD_BYTES))

    def trip(out: torch.Tensor, back: torch.Tensor) -> float:
        started_s = clock()
        for mine, message in ((rank == 0, out), (rank != 0, back)):
            if mine:
                group.send([message], 1 - rank, 0).wait()
            else:
                group.recv([message], 1 - rank, 0).wait()
        return clock() - started_s

    latency_s = statistics.median(trip(ping, ping) for _ in range(PINGS)) / 2
    rates = []
    for out, back in ((load, ping), (ping, load)):
        trip_s = min(trip(out, back) for _ in range(LOADS))
        rates.append(LOAD_BYTES / max(trip_s - 2 * latency_s, 1e-9))
    return LineSpeed(latency_s, *(rates if rank == 0 else reversed(rates)))
