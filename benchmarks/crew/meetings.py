"""Meetings of some trainers at a time beside means of all, in virtual time.

    python -m benchmarks.crew.meetings

The schedules are those of real crews; steps and means are played, messages take no time. Slow
periods: 8 trainers that are five times slower in a tenth of all periods of 20 steps; 7 such of
which one comes and goes by the minute, each time as a new trainer that is there for 40 steps, goes
in mid-step and is known to be lost 10 steps later; and 4 of which one is three times slower. The
share kept is the steps done over those of trainers that never wait, in 3,000 steps, from the least
to the most of four draws. Each way is played with meetings after each step and after 16. Sites: two
of two trainers with 400 Mbit/s, a trunk of 40 Mbit/s between them, a network of 4 MB in fp32, steps
of 0.25 s; seconds of means by the flows of `crew plan`. Rows are in the order of the steps that a
trainer takes from one mean over the trunk to the next: who does not cross it trains on meanwhile,
so these are more than the rounds. What the ways lose is `benchmarks.crew.spread`'s. Writes
benchmarks/results/crew-meetings.json.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from partitioner.crew.coordinator.neighbours import Neighbours
from partitioner.crew.coordinator.partial import OnRequest, Shuffled, draw_by
from partitioner.crew.coordinator.rounds import RoundLengths
from partitioner.crew.coordinator.schedule import LocalSgdSchedule
from partitioner.crew.coordinator.simulate import (
    NETWORK,
    CrewScenario,
    CrewTrace,
    Paced,
    simulate,
    slow_periods,
    steady,
)
from partitioner.crew.messages import Meet
from partitioner.crew.planning.facts import Facts, Line, Trainer, Trunk
from partitioner.crew.planning.flows import Links, Route

RESULT = RESULTS / "crew-meetings.json"
UNITS, DRAWS = 3000.0, 4
#: Of an epoch that never ends.
BATCHES = 10**6
MBIT, NETWORK_BYTES, STEP_S = 1e6 / 8, 4e6, 0.25
SITES = {"a0": "a", "a1": "a", "b0": "b", "b1": "b"}
#: Seconds of the trainings between sites.
SITES_S = 2000.0

Pace = Callable[[int, float], float]
#: The schedule of so many trainers, by a number to draw with.
Making = Callable[[int, int], LocalSgdSchedule]


def all_every(steps: int) -> Making:
    """Rounds of so many steps of each, by the pictures of all."""
    return lambda n, draw: LocalSgdSchedule(
        NETWORK, RoundLengths(steps * n, BATCHES, 1), expected=range(n)
    )


def requested(steps: int, **more: Any) -> Making:
    """Groups on request, each after so many steps of its own."""
    return lambda n, draw: OnRequest(
        NETWORK, RoundLengths(steps * n, BATCHES, 1), expected=range(n), draw=draw_by(draw), **more
    )


def pairs(steps: int, cross_every: int, sites: Sequence[str]) -> Making:
    """Pairs, drawn after so many steps of each, of which one crosses now and then."""
    return lambda n, draw: Shuffled(
        NETWORK,
        RoundLengths(steps * n, BATCHES, 1),
        expected=range(n),
        draw=draw_by(draw),
        cross_every=cross_every,
        site_of=sites.__getitem__,
    )


def neighbours(steps: int, **more: Any) -> Making:
    """A ring, in which each publishes after so many steps of its own."""
    return lambda n, draw: Neighbours(
        NETWORK, RoundLengths(steps * n, BATCHES, 1), expected=range(n), **more
    )


EVERYONE, SHUFFLED = 'meet = {kind = "everyone"}', 'meet = {kind = "shuffled"}'
REQUESTED = 'meet = {kind = "on_request"}'
PUBLISHED = 'meet = {kind = "on_request", reach = inf, divide = true}'
NEIGHBOURS = 'meet = {kind = "neighbours"}'
WIDER = 'meet = {kind = "neighbours", gap = 8}'
STALE = 'meet = {kind = "neighbours", gap = 8, backup = 0, stale = 8, skip = 1}'
SLOW: dict[str, tuple[str, Making]] = {
    "all, after 1 step each": (EVERYONE, all_every(1)),
    "shuffled pairs, after 1 step each": (SHUFFLED, pairs(1, 4, [""] * 100)),
    "on request, after 1 step": (REQUESTED, requested(1)),
    "on request as published, after 1 step": (PUBLISHED, requested(1, reach=math.inf, divide=True)),
    "neighbours, after 1 step": (NEIGHBOURS, neighbours(1)),
    "neighbours further apart, after 1 step": (WIDER, neighbours(1, gap=8)),
    "neighbours, staleness alone, after 1 step": (
        STALE,
        neighbours(1, gap=8, backup=0, stale=8, skip=1),
    ),
    "all, after 4 steps each": (EVERYONE, all_every(4)),
    "all, after 16 steps each": (EVERYONE, all_every(16)),
    "shuffled pairs, after 16 steps each": (SHUFFLED, pairs(16, 4, [""] * 100)),
    "on request, after 16 steps": (REQUESTED, requested(16)),
    "neighbours, after 16 steps": (NEIGHBOURS, neighbours(16)),
}
#: Seconds for which one that comes and goes is there, and of them how long it is away again.
STAY_S, AWAY_S = 60.0, 20.0
#: Trainers with it.
COMING = 7


def steps_of(trainers: Sequence[Paced], slowed: Pace) -> int:
    """Steps of trainers that never wait."""
    steps = 0
    for rank, trainer in enumerate(trainers):
        at_s, end_s = trainer.joins_s, min(UNITS, trainer.lost_s)
        while (at_s := at_s + trainer.step_s * slowed(rank, at_s)) <= end_s:
            steps += 1
    return steps


def steady_crew(*paces: float) -> list[Paced]:
    """Trainers that are there all the time."""
    return [Paced(name=f"t{i}", step_s=pace) for i, pace in enumerate(paces)]


def coming_crew() -> list[Paced]:
    """Those that stay, and one that comes and goes; each time it is a new trainer."""
    found = steady_crew(*(1.0,) * (COMING - 1))
    for turn in range(int(UNITS / STAY_S)):
        joins_s = turn * STAY_S
        lost_s = joins_s + STAY_S - AWAY_S - 0.5
        found.append(Paced(name=f"c{turn}", step_s=1.0, joins_s=joins_s, lost_s=lost_s))
    return found


def kept(
    making: Making, trainers: Sequence[Paced], n: int, slowed: Pace, draws: int
) -> list[float]:
    """Shares of their paces that trainers keep, by draw; the first `n` begin together."""
    scenario = CrewScenario(
        trainers=tuple(trainers), every_pictures=1, batches=BATCHES, until_s=UNITS, slowed=slowed
    )
    best = steps_of(trainers, slowed)
    return [round(simulate(scenario, making(n, draw)).steps() / best, 3) for draw in range(draws)]


def in_slow_periods() -> list[dict[str, Any]]:
    """Shares of each way; where nothing is drawn, once."""
    rows = []
    for name, (line, making) in SLOW.items():
        draws = DRAWS if "shuffled" in line or "on_request" in line else 1
        found = {
            "slow periods": kept(making, steady_crew(*(1.0,) * 8), 8, slow_periods(), draws),
            "coming": kept(making, coming_crew(), COMING, slow_periods(), draws),
            "constant": kept(making, steady_crew(1.0, 1.0, 1.0, 3.0), 4, steady, draws),
        }
        rows.append({"name": name, "line": line, **found})
        print(rows[-1], flush=True)
    return rows


def two_sites() -> Facts:
    """The fleet with a trunk."""
    trainers = tuple(
        Trainer(name=name, address=f"127.0.0.{i}", memory_bytes=2**40, site=site)
        for i, (name, site) in enumerate(SITES.items(), 1)
    )
    names = list(SITES)
    lines = tuple(
        Line(a=a, b=b, latency_s=0.0, bytes_per_s=rate, back_bytes_per_s=rate)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        for rate in [(400 if SITES[a] == SITES[b] else 40) * MBIT]
    )
    trunk = Trunk(name="trunk", inside=("b0", "b1"), bytes_per_s=40 * MBIT)
    return Facts(trainer=trainers, line=lines, trunk=(trunk,))


def crossings(trace: CrewTrace) -> int:
    """Means over the trunk."""
    sites = list(SITES.values())
    told = (action for _, _, actions in trace.log for action in actions)
    members = {action.seq: action.members for action in told if isinstance(action, Meet)}
    return sum(len({sites[rank] for rank in some}) > 1 for some in members.values())


def over_a_trunk() -> list[dict[str, Any]]:
    """Steps each second of a trainer, and steps and bytes from crossing to crossing, by the way."""
    links, names, n = Links(two_sites()), list(SITES), len(SITES)

    def mean_s(route: Route) -> Callable[[tuple[int, ...]], float]:
        @cache
        def seconds(members: tuple[int, ...]) -> float:
            return links.mean(route, [names[rank] for rank in members]).of(NETWORK_BYTES)

        return seconds

    ring, tiers = mean_s("ring"), mean_s("two_tier")
    every = tuple(range(n))
    rows: list[dict[str, Any]] = [
        # A ring of four crosses the trunk once each way, with 3 / 2 of the network.
        {"name": "gradients (ring)", "line": 'what = "gradients"', "steps": 1.0,
         "steps_per_s": round(1 / (STEP_S + ring(every)), 2), "trunk_mb": 1.5 * NETWORK_BYTES / 1e6}
    ]  # fmt: skip
    sites = list(SITES.values())
    ways: list[tuple[str, str, Making, Callable[[tuple[int, ...]], float]]] = []
    for steps in (2, 4, 6, 8, 10):
        two_tier = f'route = "two_tier", every {steps} steps'
        ways.append(
            (f"two-tier mean of all every {steps} steps", two_tier, all_every(steps), tiers)
        )
    for rounds, which in ((2, "second"), (4, "fourth"), (8, "eighth")):
        line = f'meet = {{kind = "shuffled", cross_every = {rounds}}}, every step'
        name = f"pairs every step, one across in each {which} round"
        ways.append((name, line, pairs(1, rounds, sites), ring))
    for name, line, making, seconds in ways:
        trainers = tuple(Paced(name=trainer, step_s=STEP_S) for trainer in names)
        scenario = CrewScenario(
            trainers=trainers, every_pictures=1, batches=BATCHES, until_s=SITES_S, mean_s=seconds
        )
        traces = [simulate(scenario, making(n, draw)) for draw in range(DRAWS)]
        done = sum(trace.steps() for trace in traces) / n
        between = done / sum(crossings(trace) for trace in traces)
        rows.append(
            {
                "name": name,
                "line": line,
                "steps": round(between, 1),
                "steps_per_s": round(done / DRAWS / SITES_S, 2),
                # Two leaders, or the two of a pair, send each other the network once.
                "trunk_mb": round(NETWORK_BYTES / 1e6 / between, 2),
            }
        )
    return sorted(rows, key=lambda row: float(row["steps"]))


def figures() -> str:
    """Both tables."""
    result = read_result(RESULT.stem)

    def shares(key: str) -> Callable[[dict[str, Any]], str]:
        return lambda row: f"{min(row[key]):.2f} to {max(row[key]):.2f}"

    return "\n\n".join(
        (
            table(
                result["slow periods"],
                ("who meets", "{name}"),
                ("crew.toml", "`{line}`"),
                ("8, slow periods", shares("slow periods")),
                ("7, slow periods, one comes and goes", shares("coming")),
                ("4, one 3 x slower", shares("constant")),
            ),
            table(
                result["two sites"],
                ("averaged", "{name}"),
                ("crew.toml", "`{line}`"),
                ("steps from one crossing to the next", "{steps:.1f}"),
                ("steps/s of each", "{steps_per_s:.2f}"),
                ("MB over the trunk a step, each way", "{trunk_mb:.2f}"),
            ),
        )
    )


PAGE = Page("benchmarks.crew.meetings", figures)


def main() -> None:
    """Simulate and write."""
    # What `benchmarks.crew.spread` has added stays.
    known = read_result(RESULT.stem) if RESULT.exists() else {}
    found = {"slow periods": in_slow_periods(), "two sites": over_a_trunk()}
    write_json(RESULT, known | found)
    PAGE.write()


if __name__ == "__main__":
    main()
