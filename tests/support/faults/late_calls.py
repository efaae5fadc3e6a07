"""Calls in virtual time to three devices, of which one is late at times: how many wait for it."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count, cycle
from pathlib import Path

from mdp.protocol.messages import Infer, StatusRequest, decode
from mdp.requests.prediction import Prediction
from tests.support.exchanges import Desk

#: Round trips of the others, of the late one when it is in time, and of words how a device is.
USUAL_S, TOLD_S = 0.005, 0.001
THREE = (("alpha", 0), ("beta", 1), ("gamma", 2))


@dataclass(frozen=True, slots=True)
class Asked:
    """One call and what became of it."""

    began_s: float
    deadline_ms: float
    #: Whether it waited until its deadline, and whether it was complete.
    waited: bool
    whole: bool
    reason: str


def play(
    folder: Path,
    takes_s: Callable[[float], float],
    *,
    calls: int,
    deadlines_ms: Sequence[float] = (100.0,),
    every_s: float = 0.0,
) -> list[Asked]:
    """One call after the other, begun `every_s` apart or later; gamma takes `takes_s(now_s)`."""
    desk = Desk(folder, THREE)
    order, under_way, seen = count(), list[tuple[float, int, str, int, bool]](), list[Asked]()
    deadlines = cycle(deadlines_ms)

    def pass_on() -> None:
        sent, desk.transport.sent = desk.transport.sent, []
        for device, frames in sent:
            message, now_s = decode(frames).message, desk.clock.now_s
            assert isinstance(message, Infer | StatusRequest)
            asks = isinstance(message, StatusRequest)
            trip_s = TOLD_S if asks else takes_s(now_s) if device == "gamma" else USUAL_S
            answer = (now_s + trip_s, next(order), device, message.request_id, asks)
            heappush(under_way, answer)

    def pass_until(until_s: float) -> None:
        """Whatever comes until then, or until the call is answered."""
        while not desk.answers:
            wake_s = desk.dispatcher.next_wake_s()
            if under_way and under_way[0][0] <= min(wake_s, until_s):
                desk.clock.now_s, _, device, number, asks = heappop(under_way)
                if asks:
                    desk.tell(device)
                else:
                    desk.reply(device, number)
            elif wake_s <= until_s:
                desk.clock.now_s = wake_s
                desk.dispatcher.tick()
            else:
                desk.clock.now_s = until_s
                return
            pass_on()

    for _ in range(calls):
        began_s, deadline_ms = desk.clock.now_s, next(deadlines)
        desk.submit(deadline_ms)
        pass_on()
        pass_until(float("inf"))
        answer = desk.answers.pop()
        reason = answer.missing.get("gamma", "") if isinstance(answer, Prediction) else str(answer)
        seen.append(Asked(began_s, deadline_ms, reason == "late", reason == "", reason))
        pass_until(max(desk.clock.now_s, began_s + every_s))
    return seen


def late_in(share: float, late_s: float, seed: int = 1) -> Callable[[float], float]:
    """Late by chance."""
    draw = random.Random(seed).random
    return lambda now_s: late_s if draw() < share else USUAL_S
