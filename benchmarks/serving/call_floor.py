"""What a call costs when all is left out that a client could do without.

    python -m benchmarks.serving.call_floor [--agents 1 3 8]     # half a minute each

A bare client asks stub agents with ready frames; then, step by step, it does what no client can
leave out: it decodes the replies and finds their logits finite, fuses them and makes the answer,
cuts the picture and encodes the requests. It knows no deadline, no health, no replicas and no other
calls. Beside it this project's client, all in turns. Medians of a call's microseconds less the
slowest agent's own computing.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.serving_fleet import ServedFleet, asked_bare, stub_fleet
from mdp.cli.bench import noise_picture
from mdp.client.crops import Cutter
from mdp.protocol.messages import Buffer, Infer, Result, contribution_of, decode, encode
from mdp.requests.prediction import Judge
from mdp.requests.session import Arrival, Finish

SIDE = 224
_BUDGET_MS = 200.0
BLOCKS, PER_BLOCK = 60, 100
STEPS = ("bare", "decoding", "and the answer", "and cutting, encoding", "this client")


class Floor:
    """A bare client that does as many of the steps as it is told."""

    def __init__(self, fleet: ServedFleet, stack: ExitStack) -> None:
        bundle = fleet.bundle
        bare = stack.enter_context(asked_bare(fleet, side=SIDE))
        self._poller, self._requests = bare.poller, bare.requests
        self._device_of = dict(zip([s for s, _ in self._requests], fleet.addresses, strict=True))
        self._assignments = {d: bundle.assignment(d) for d in fleet.addresses}
        self._digest = bundle.digest
        self._cutter = Cutter({a.k: a for a in self._assignments.values()})
        self._judge = Judge(bundle, "stacked")
        self._picture = noise_picture(SIDE)

    def call_us(self, steps: int) -> float:
        """One call with the first `steps` of what cannot be left out."""
        started_s = time.perf_counter()
        self._send(encoding=steps > 2)
        replies: list[list[bytes]] = []
        arrived: dict[int, Arrival] = {}
        while len(replies) < len(self._requests):
            for dealer, _ in self._poller.poll():
                replies.append(dealer.recv_multipart())
                if steps:
                    self._arrive(arrived, dealer, replies[-1])
        if steps > 1:
            self._judge.conclude(
                Finish(arrived=dict(sorted(arrived.items())), missing={}, timed_out=False),
                latency_ms=lambda: (time.perf_counter() - started_s) * 1e3,
                deadline_ms=_BUDGET_MS,
            )
        took_us = (time.perf_counter() - started_s) * 1e6
        return took_us - 1e3 * max(_result(frames)[0].compute_ms for frames in replies)

    def _send(self, *, encoding: bool) -> None:
        if not encoding:
            for dealer, request in self._requests:
                dealer.send_multipart(request)
            return
        views = self._cutter.views(self._picture)
        for dealer, _ in self._requests:
            k = self._assignments[self._device_of[dealer]].k
            infer = Infer(
                request_id=1, digest=self._digest, k=k, budget_ms=_BUDGET_MS,
                image_size=views[k].image_size, encoding=views[k].encoding,
            )  # fmt: skip
            dealer.send_multipart(encode(infer, views[k].pixels))

    def _arrive(self, arrived: dict[int, Arrival], dealer: Any, frames: list[bytes]) -> None:
        (result, logits), device = _result(frames), self._device_of[dealer]
        arrived[self._assignments[device].k] = Arrival(
            device=device,
            contribution=contribution_of(logits),
            queue_ms=result.queue_ms,
            compute_ms=result.compute_ms,
            network_ms=0.0,
        )


def _result(frames: list[bytes]) -> tuple[Result, Buffer]:
    envelope = decode(frames)
    assert isinstance(envelope.message, Result), envelope.message
    return envelope.message, envelope.buffers[0]


def measure(agents: int) -> dict[str, float]:
    """Median microseconds of every step, in turns after one that warms up."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        fleet = stack.enter_context(stub_fleet(Path(name), agents, side=SIDE, keys=False))
        client = stack.enter_context(fleet.client())
        floor, picture = Floor(fleet, stack), noise_picture(SIDE)

        def ours_us() -> float:
            started_s = time.perf_counter()
            answer = client.classify(picture)
            took_us = (time.perf_counter() - started_s) * 1e6
            return took_us - 1e3 * max(member.compute_ms for member in answer.members)

        calls: list[Callable[[], float]] = [
            *(lambda steps=steps: floor.call_us(steps) for steps in range(len(STEPS) - 1)),
            ours_us,
        ]  # fmt: skip
        taken: dict[str, list[float]] = {step: [] for step in STEPS}
        for number in range(BLOCKS + 1):
            for step, call in zip(STEPS, calls, strict=True):
                block_us = [call() for _ in range(PER_BLOCK)]
                taken[step] += block_us if number else []
    return {step: float(np.median(us)) for step, us in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="What no client can leave out.")
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 3, 8])
    options = parser.parse_args()
    for agents in options.agents:
        found = measure(agents)
        cells = [f"{step} {us:.0f} us ({us / found['bare']:.2f})" for step, us in found.items()]
        print(f"{agents} agents: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
