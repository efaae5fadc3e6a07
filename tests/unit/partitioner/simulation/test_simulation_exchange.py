"""The simulator's loop does what `mdp.client.dispatcher` does: the same requests, the same
fates.
"""

from collections.abc import Mapping
from dataclasses import replace
from heapq import heappop, heappush
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdp.client.crops import Cutter
from mdp.client.dispatcher import Answer, Call, Dispatcher
from mdp.client.questions import PictureQuestion
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import Fleet, FleetEntry
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Picture
from mdp.protocol.messages import (
    Buffer,
    Failure,
    Infer,
    Result,
    Status,
    StatusRequest,
    decode,
    encode,
    logits_buffer,
)
from mdp.requests.deadline import Deadline
from mdp.requests.prediction import Prediction
from mdp.testing.bundles import DEVICES, LABELS, colour_picture, write_bundle
from mdp.transport import Received
from partitioner.simulation.device import QueuedRequest, SimulatedDevice
from partitioner.simulation.engine import simulate
from partitioner.simulation.models import (
    DeviceModel,
    Jittered,
    Load,
    LogNormal,
    RandomStreams,
    Scenario,
    chance,
)

RED: Picture = colour_picture("red")
LOGITS = logits_buffer(Contribution(np.zeros(3, np.float32), np.zeros(3, np.float32)))


class RealClient:
    """A real exchange over simulated devices, in virtual time: one caller, one by one."""

    def __init__(self, bundle: Bundle, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now_s = 0.0
        self.connected = {d.name for d in scenario.devices} - scenario.lost
        self.refused: dict[str, str] = {}
        self.answers: list[Answer] = []
        self._digest, self._ks = bundle.digest, {d.name: d.k for d in scenario.devices}
        self._events: list[tuple[float, int, Any, Any]] = []
        self._count = 0
        streams = RandomStreams(scenario.seed)
        self._devices = {
            model.name: SimulatedDevice(model, streams, self._push, self._reply)
            for model in scenario.devices
        }
        entries = [
            FleetEntry(device=d.name, address=f"tcp://127.0.0.1:{7000 + n}", k=d.k)
            for n, d in enumerate(scenario.devices)
        ]
        self._dispatcher = Dispatcher(
            Fleet(bundle=str(bundle.path), devices=entries),
            bundle,
            self,
            clock=lambda: self.now_s,
            fusion="stacked",
            hedge_after_s=scenario.hedge_after_s,
            hedge_share=0.0 if scenario.hedge_after_s is None else scenario.hedge_share,
            chance=chance(streams, 0),
        )
        self._question = PictureQuestion(Cutter(self._dispatcher.assignments).views(RED))

    def run(self) -> list[Answer]:
        self._push(0.0, self._submit, None)
        while len(self.answers) < self.scenario.load.requests:
            wake_s = self._dispatcher.next_wake_s()
            if self._events and self._events[0][0] <= wake_s:
                self.now_s, _, callback, argument = heappop(self._events)
                callback(self.now_s, argument)
            else:
                self.now_s = wake_s
                self._dispatcher.tick()
        return self.answers

    def send(self, device: str, frames: list[Buffer]) -> bool:
        if device not in self.connected:
            return False
        infer = decode(frames).message
        if isinstance(infer, StatusRequest):
            self._devices[device].ask(self.now_s, self._deliver_status, infer.request_id)
            return True
        assert isinstance(infer, Infer)
        self._devices[device].send(self.now_s, infer.request_id, infer.budget_ms / 1e3)
        return True

    def _push(self, at_s: float, callback: Any, argument: Any) -> None:
        self._count += 1
        heappush(self._events, (at_s, self._count, callback, argument))

    def _submit(self, now_s: float, _: None) -> None:
        deadline = Deadline(now_s, self.scenario.deadline_ms)
        self._dispatcher.submit(self._question, deadline, self._done)

    def _done(self, call: Call) -> None:
        assert call.answer is not None
        self.answers.append(call.answer)
        self._push(self.now_s + self.scenario.load.think_s, self._submit, None)

    def _deliver_status(self, now_s: float, told: tuple[int, str]) -> None:
        request_id, device = told
        status = Status(
            request_id=request_id,
            device=device,
            state="READY",
            bundle="colours",
            digest=self._digest,
            k=self._ks[device],
            provider="",
            fallback=False,
            reason="",
            queued=0,
            counts={},
        )
        self._dispatcher.handle([Received(device, encode(status))])

    def _reply(self, now_s: float, job: QueuedRequest) -> None:
        if job.refusal is not None:
            code: Any = job.refusal
            frames = encode(Failure(request_id=job.call, code=code, text="no"))
        else:
            result = Result(
                request_id=job.call,
                num_classes=len(LABELS),
                queue_ms=job.queue_s * 1e3,
                compute_ms=job.took_s * 1e3,
            )
            frames = encode(result, LOGITS)
        self._dispatcher.handle([Received(job.device.name, frames)])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.open(write_bundle(tmp_path_factory.mktemp("simulated") / "bundle"))


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    names = [(name, k) for k, name in enumerate(DEVICES)]
    names += draw(st.sampled_from([[], [("alpha/attic", 0)], [("beta/b", 1), ("beta/c", 1)]]))
    devices = tuple(
        DeviceModel(
            name=name,
            k=k,
            compute=LogNormal(median_s=draw(st.sampled_from([0.002, 0.010, 0.030])), sigma=0.6),
            delay=Jittered(round_trip_s=0.002, jitter_s=0.001),
            turnaround_s=draw(st.sampled_from([0.0, 0.002])),
            loss=draw(st.sampled_from([0.0, 0.1])),
        )
        for name, k in names
    )
    return Scenario(
        devices=devices,
        load=Load(requests=60, think_s=draw(st.sampled_from([0.0, 0.02]))),
        deadline_ms=draw(st.sampled_from([8.0, 25.0, 60.0])),
        seed=draw(st.integers(0, 10_000)),
        hedge_after_s=draw(st.sampled_from([None, 0.006])),
        lost=frozenset(draw(st.sets(st.sampled_from([d.name for d in devices]), max_size=1))),
    )


@settings(max_examples=60)
@given(scenario=scenarios())
def test_as_a_real_client_fares(bundle: Bundle, scenario: Scenario) -> None:
    real = RealClient(bundle, scenario).run()
    trace = simulate(replace(scenario))
    ks: Mapping[str, int] = {d.name: d.k for d in scenario.devices}
    subsets = {place: members for members, place in trace.subsets.items()}
    for position, answer in enumerate(real):
        members = subsets[trace.subset[position]]
        latency_ms = trace.latencies_s[position] * 1e3
        if isinstance(answer, Prediction):
            assert members == tuple(ks[device] for device in answer.used)
            assert trace.partial[position] == answer.partial
            assert latency_ms == pytest.approx(answer.latency_ms)
        else:
            assert members == ()
