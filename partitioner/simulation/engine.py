"""Discrete-event simulation of clients and devices: the serving sessions, in virtual time.

The event loop stands for `mdp.client.dispatcher`, a transport and a clock, for many clients at
once: it starts sessions, delivers their messages and replies, and wakes them.
"""

import gc
import math
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count, repeat
from typing import Any

import numpy as np

from mdp.fusion.fuse import Contribution
from mdp.requests.choice import Choice
from mdp.requests.deadline import Deadline, check_deadline_ms, reserve_s
from mdp.requests.in_flight import InFlight
from mdp.requests.reason import UNREACHABLE, Reason
from mdp.requests.request import Request
from mdp.requests.session import Action, DeviceFailed, Finish, Replied, Session, Stages, TimePassed
from partitioner.simulation import models
from partitioner.simulation.device import Push, QueuedRequest, SimulatedDevice, UpDownTimes
from partitioner.simulation.port import ClientPort
from partitioner.simulation.trace import Trace

#: Replies carry no logits: fusion follows the simulation, for all requests of a subset at once.
_NOTHING = np.zeros(0, dtype=np.float32)
_CONTRIBUTION = Contribution(_NOTHING, _NOTHING)

#: Replaces every finished session.
_OVER = Session(Choice({}, {}, {}), decide_s=0.0)
_OVER.finished = True

Callback = Callable[[float, Any], None]
#: Virtual seconds, running number, callback, argument.
Event = tuple[float, int, Callback, Any]


def _pusher(events: list[Event], number: Callable[[], int]) -> Push:
    """A function that puts an event into `events`."""

    def push(at_s: float, callback: Callback, argument: Any) -> None:
        heappush(events, (at_s, number(), callback, argument))

    return push


class _Client:
    """One caller: its book of requests, with its own order of replicas, and its port."""

    __slots__ = ("book", "port", "turns_s", "wakes")

    def __init__(self, book: "InFlight[_Call]", port: ClientPort | None, cascade: bool) -> None:
        self.book = book
        #: Whether calls want to be told the time before they have to decide.
        self.wakes = book.hedge is not None or cascade
        #: None: as much as there is leaves at once.
        self.port = port
        #: When requests that wait are to be looked at next.
        self.turns_s = math.inf


class _Call:
    """One request in flight."""

    __slots__ = ("client", "number", "place", "session", "started_s", "woken_s")

    def __init__(self, client: _Client, session: Session, place: int, started_s: float) -> None:
        self.client, self.session = client, session
        #: Its place among all calls, and its number in its client's book.
        self.place, self.number = place, client.book.begin(self)
        self.started_s = started_s
        #: When it was last to be told the time, before it has to decide.
        self.woken_s = math.inf


class Simulation:
    """One run of a scenario; `run` may be called once."""

    def __init__(self, scenario: models.Scenario) -> None:
        self.scenario = scenario
        self.trace = Trace()
        # Fusing has to end within the reserve.
        reserved_s = reserve_s(check_deadline_ms(scenario.deadline_ms))
        self._after_s = min(scenario.after_s, reserved_s)
        streams = models.RandomStreams(scenario.seed)
        self._streams, self._before = (
            streams,
            models.seconds(scenario.before, streams, "", "before"),
        )
        self._gaps = models.SampleStream(streams, "", "arrivals", models.exponential)
        self._choices = models.SampleStream(streams, "", "clients", models.uniform)
        self._certainties = models.SampleStream(streams, "", "certainty", models.uniform)
        late = scenario.late_s
        #: Delay of the client's waking, call by call.
        self._late_s = (
            models.seconds(late, streams, "", "late").next
            if isinstance(late, models.LogNormal | models.MeasuredSeconds)
            else repeat(late).__next__
        )
        self._events: list[Event] = []
        #: Failures and recoveries, far ahead: a heap of their own keeps the other one small.
        self._turns: list[Event] = []
        # The running number orders events of one moment, so that callbacks are never compared.
        self._number = number = count().__next__
        self._push, self._turn = _pusher(self._events, number), _pusher(self._turns, number)
        self._devices = {
            model.name: SimulatedDevice(
                model, streams, self._push, self._on_reply, scenario.client_bps
            )
            for model in scenario.devices
        }
        #: Disconnected devices; replaced and never changed, as sessions keep it.
        self._gone = dict.fromkeys(sorted(scenario.lost), UNREACHABLE)
        self._clients = self._make_clients()
        #: When calls want to be told the time. Most have ended by then, and one event stands for
        #: all: that of the first which has not, at `_rings_s`.
        self._alarms: list[tuple[float, int, _Call]] = []
        self._rings_s = math.inf
        self._arrived = self._submitted = 0

    def _make_clients(self) -> list[_Client]:
        scenario, members = self.scenario, self.scenario.members()
        k_of = {device.name: device.k for device in scenario.devices}
        hedge_share = 0.0 if scenario.hedge_after_s is None else scenario.hedge_share
        rungs = {
            device.k: (1.0, *device.rungs)
            for device in scenario.devices
            if device.rungs and device.rung is None
        }
        return [
            _Client(
                InFlight(
                    {
                        k: names if number % len(names) == 0 else models.Rotated(names, number)
                        for k, names in members.items()
                    },
                    k_of,
                    chance=models.chance(self._streams, number),
                    hedge_after_s=scenario.hedge_after_s,
                    hedge_share=hedge_share,
                    first=scenario.first,
                    rungs=rungs,
                ),
                ClientPort(scenario.client_bps, self._push)
                if scenario.client_bps < math.inf
                else None,
                bool(scenario.first),
            )
            for number in range(scenario.load.clients)
        ]

    def run(self) -> Trace:
        """Simulate until every request has its outcome."""
        for model in self.scenario.devices:
            if model.name not in self.scenario.lost:
                self._start_failures(model.name)
        self._begin_load()
        events, turns = self._events, self._turns
        ended, wanted = self.trace.numbers, self.scenario.load.requests
        now_s = 0.0
        while len(ended) < wanted:
            soonest = turns if turns and not (events and events[0] < turns[0]) else events
            now_s, _, callback, argument = heappop(soonest)
            callback(now_s, argument)
        self.trace.span_s = now_s
        for name, device in self._devices.items():
            device.settle(now_s)
            self.trace.busy_s[name] = device.busy_s
            self.trace.falls[name] = device.epoch
            self.trace.counts[name] = device.counts
            self.trace.asks += device.asked
        return self.trace

    # Callers.

    def _begin_load(self) -> None:
        load = self.scenario.load
        if load.rate_per_s is not None:
            self._await_arrival(0.0, load.rate_per_s)
            return
        for client in self._clients[: load.requests]:
            self._prepare(0.0, client)

    def _await_arrival(self, now_s: float, rate_per_s: float) -> None:
        burst = self.scenario.load.burst if int(now_s) % 10 == 9 else 1.0
        self._push(now_s + self._gaps.next() / (burst * rate_per_s), self._arrive, rate_per_s)

    def _arrive(self, now_s: float, rate_per_s: float) -> None:
        """A request of a random client."""
        self._arrived += 1
        if self._arrived < self.scenario.load.requests:
            self._await_arrival(now_s, rate_per_s)
        client = self._clients[int(self._choices.next() * len(self._clients))]
        before_s = self._before.next()
        if before_s:
            self._push(now_s + before_s, self._submit, (client, now_s))
        else:
            self._submit(now_s, (client, now_s))

    def _prepare(self, started_s: float, client: _Client) -> None:
        """Begin a call; its request is sent once the picture is cut."""
        self._push(started_s + self._before.next(), self._submit, (client, started_s))

    def _submit(self, now_s: float, begun: tuple[_Client, float]) -> None:
        if self._submitted == self.scenario.load.requests:
            return
        client, started_s = begun
        book = client.book
        decide_s = Deadline(started_s, self.scenario.deadline_ms).decide_s
        choice = book.choose(now_s, self._gone, decide_s)
        stages = self._stages(book, choice, now_s, decide_s) if self.scenario.first else None
        session = Session(choice, decide_s=decide_s, hedge=book.hedge, stages=stages)
        call = _Call(client, session, self._submitted, started_s)
        self._submitted += 1
        self._act(call, session.start(now_s), now_s)
        if not session.finished:
            self._wake_at(decide_s + self._late_s(), call)
        if book.held:
            self._give_turns(now_s, client)
        for name in book.due(now_s):
            if name not in self._gone:
                number = book.number()
                book.on_status_request(number, name, now_s)
                self._devices[name].ask(now_s, self._on_status, (client, number))

    def _stages(
        self, book: InFlight[_Call], choice: Choice, now_s: float, decide_s: float
    ) -> Stages:
        sure = self._certainties.next() >= self.scenario.escalated
        by_s = book.others_by_s(choice, now_s, decide_s)
        return Stages(self.scenario.first, by_s, lambda _: sure)

    def _on_status(self, now_s: float, told: tuple[tuple[_Client, int], str]) -> None:
        (client, number), name = told
        client.book.on_status(number, name, None, now_s)

    # Sessions.

    def _act(self, call: _Call, actions: list[Action], now_s: float) -> None:
        for action in actions:
            if isinstance(action, Finish):
                self._finish(call, action, now_s)
            elif not call.session.finished and not call.client.book.holds(call.number, action):
                self._send(call, action, now_s)

    def _send(self, call: _Call, request: Request, now_s: float) -> None:
        if request.device in self._gone:
            # It failed after this request had begun.
            failed = DeviceFailed(device=request.device, reason=UNREACHABLE, now_s=now_s)
            self._act(call, call.session.handle(failed), now_s)
        else:
            device, client = self._devices[request.device], call.client
            if client.port is None:
                device.send(now_s, call, request.budget_ms / 1e3)
            else:
                client.port.send(now_s, (device, call, request.budget_ms / 1e3))
            client.book.on_send(call.number, request)
            if client.wakes:
                self._wake_before(call)

    def _give_turns(self, now_s: float, client: _Client) -> None:
        """Send what has waited for its turn, or fail it."""
        book = client.book
        while turn := book.next_turn(now_s):
            call, device = book.calls[turn.number], turn.request.device
            if not call.session.waits_for(device):
                continue
            if turn.reason is None:
                self._send(call, turn.request, now_s)
            else:
                failed = DeviceFailed(device=device, reason=turn.reason, now_s=now_s)
                self._act(call, call.session.handle(failed), now_s)
        wake_s = book.wake_s()
        if wake_s < client.turns_s:
            client.turns_s = wake_s
            self._push(max(now_s, wake_s), self._look_at_turns, client)

    def _look_at_turns(self, now_s: float, client: _Client) -> None:
        if now_s >= client.turns_s:
            client.turns_s = math.inf
            self._give_turns(now_s, client)

    def _wake_before(self, call: _Call) -> None:
        session = call.session
        # Once for all members asked at one moment.
        if call.woken_s != session.wake_s < session.decide_s:
            call.woken_s = session.wake_s
            self._wake_at(call.woken_s, call)

    def _wake_at(self, at_s: float, call: _Call) -> None:
        heappush(self._alarms, (at_s, self._number(), call))
        if at_s < self._rings_s:
            self._rings_s = at_s
            self._push(at_s, self._ring, None)

    def _ring(self, now_s: float, _: None) -> None:
        """Wake every call that is due, and drop those that have ended."""
        if now_s != self._rings_s:
            # Superseded by an earlier wake-up.
            return
        alarms = self._alarms
        while alarms and (alarms[0][0] <= now_s or alarms[0][2].session.finished):
            self._wake(now_s, heappop(alarms)[2])
        self._rings_s = math.inf
        if alarms:
            self._rings_s = alarms[0][0]
            self._push(self._rings_s, self._ring, None)

    def _wake(self, now_s: float, call: _Call) -> None:
        if call.session.finished:
            return
        self._act(call, call.session.handle(TimePassed(now_s=now_s)), now_s)
        if call.client.wakes and not call.session.finished:
            # Another member's hedge may be due later.
            self._wake_before(call)
        if call.client.book.held:
            self._give_turns(now_s, call.client)

    def _on_reply(self, now_s: float, job: QueuedRequest) -> None:
        call, device = job.call, job.device
        event: Replied | DeviceFailed
        if job.refusal is not None:
            event = DeviceFailed(device=device.name, reason=Reason(job.refusal), now_s=now_s)
        else:
            event = Replied(
                device=device.name,
                contribution=_CONTRIBUTION,
                queue_ms=job.queue_s * 1e3,
                compute_ms=job.took_s * 1e3,
                now_s=now_s,
                rung=job.rung,
            )
        actions = call.client.book.handle(call.number, event)
        if job.refusal is None:
            device.late += actions is None
            device.used += actions is not None
        if actions is not None:
            self._act(call, actions, now_s)
        if call.client.book.held:
            self._give_turns(now_s, call.client)

    def _finish(self, call: _Call, finish: Finish, now_s: float) -> None:
        call.client.book.on_decision(call.number, now_s)
        # Its alarm keeps the call until the deadline; free the session now.
        call.session = _OVER
        trace = self.trace
        members = tuple(finish.arrived)
        trace.numbers.append(call.place)
        trace.latencies_s.append(now_s + self._after_s - call.started_s)
        trace.subset.append(trace.subsets.setdefault(members, len(trace.subsets)))
        rungs = tuple([arrival.rung for arrival in finish.arrived.values()])
        at_top = not any(rungs)
        trace.rung.append(0 if at_top else trace.rungs.setdefault(rungs, len(trace.rungs)))
        trace.partial.append(bool(finish.missing))
        trace.sure.append(finish.stage == "first")
        if self.scenario.load.rate_per_s is None:
            self._prepare(now_s + self._after_s + self.scenario.load.think_s, call.client)

    # Failures of devices.

    def _start_failures(self, name: str) -> None:
        device = self._devices[name]
        lives = UpDownTimes(device.model, self._streams)
        if not lives.starts_up:
            device.up = False
            self._gone[name] = UNREACHABLE
        if not lives.constant:
            turn = self._fall if lives.starts_up else self._rise
            self._turn(lives.length_s(lives.starts_up), turn, (device, lives))

    def _fall(self, now_s: float, life: tuple[SimulatedDevice, UpDownTimes]) -> None:
        device, lives = life
        device.fall(now_s)
        self._turn(now_s + self.scenario.detect_s, self._disconnect, (device, device.epoch))
        self._turn(now_s + lives.length_s(False), self._rise, life)

    def _rise(self, now_s: float, life: tuple[SimulatedDevice, UpDownTimes]) -> None:
        device, lives = life
        # A recovered host resets the old connections.
        self._disconnect(now_s, (device, device.epoch))
        device.up = True
        self._turn(now_s + self.scenario.reconnect_s, self._connect, (device, device.epoch))
        self._turn(now_s + lives.length_s(True), self._fall, life)

    def _disconnect(self, now_s: float, life: tuple[SimulatedDevice, int]) -> None:
        device, epoch = life
        if epoch != device.epoch or device.up or device.name in self._gone:
            return
        self._gone = {**self._gone, device.name: UNREACHABLE}
        for client in self._clients:
            for number, actions in client.book.on_loss(device.name, now_s):
                call = client.book.calls.get(number)
                if call is not None:
                    self._act(call, actions, now_s)
            if client.book.held:
                self._give_turns(now_s, client)

    def _connect(self, now_s: float, life: tuple[SimulatedDevice, int]) -> None:
        device, epoch = life
        if epoch == device.epoch and device.up:
            self._gone = {name: why for name, why in self._gone.items() if name != device.name}
            for client in self._clients:
                client.book.on_connect(device.name, now_s)


def simulate(scenario: models.Scenario) -> Trace:
    """Run `scenario`, deterministically; raises InputError."""
    # Requests leave no reference cycles (tested); collecting takes a quarter of the time with ten
    # thousand devices.
    collects = gc.isenabled()
    gc.disable()
    try:
        return Simulation(scenario).run()
    finally:
        if collects:
            gc.enable()
