"""What rules of meeting keep of the pace of trainers that slow down, in virtual time.

    python -m benchmarks.crew.slowness

Steps take one unit, messages and means none; the share is that of the steps which all could have
finished without waiting, in 3,000 units. *Constant*: the last trainer is 3 times slower. *Spells*:
each trainer is 5 times slower in a tenth of the spells of 20 units, drawn by SHA-256. Rounds are
the schedule of a real run (`partitioner.crew.machine`); the other rules are a few lines each. With
steps of one length a round's share depends on how its length falls in with that of the spells, so
that rounds are given for numbers of steps within a sixteenth: least, mean and most. Nothing is
measured, so the machine is not named.
"""

import json
from collections.abc import Callable, Sequence

from benchmarks.harness.results import RESULTS
from partitioner.crew.machine.simulate import Paced, Scenario, simulate, spells, steady

UNITS = 3000.0
LOCAL_STEPS = 16
Slowed = Callable[[int, float], float]
#: Name -> seconds of each trainer's step, and what slows them down.
CASES: dict[str, tuple[tuple[float, ...], Slowed]] = {
    "constant, n=4": ((1.0, 1.0, 1.0, 3.0), steady),
    "spells, n=4": ((1.0,) * 4, spells()),
    "spells, n=8": ((1.0,) * 8, spells()),
}


def alone(rank: int, step_s: float, slowed: Slowed) -> int:
    """Steps of one trainer that waits for nobody."""
    steps, at_s = 0, step_s * slowed(rank, 0.0)
    while at_s <= UNITS:
        steps += 1
        at_s += step_s * slowed(rank, at_s)
    return steps


def together(paces: Sequence[float], slowed: Slowed, shares: Sequence[float], steps: int) -> int:
    """All wait for each other after so many own steps, each of a share of what n steps are."""
    at_s, done = 0.0, 0
    while True:
        ends_s = []
        for rank, (step_s, share) in enumerate(zip(paces, shares, strict=True)):
            end_s = at_s
            for _ in range(steps):
                end_s += step_s * share * len(paces) * slowed(rank, end_s)
            ends_s.append(end_s)
        at_s = max(ends_s)
        if at_s > UNITS:
            return done
        done += len(paces) * steps


def rounds(paces: Sequence[float], slowed: Slowed, every: int) -> int:
    """Steps in rounds that end by the steps of all together."""
    scenario = Scenario(
        trainers=tuple(Paced(name=f"t{rank}", step_s=step) for rank, step in enumerate(paces)),
        every_pictures=every,
        batches=10**6,
        until_s=UNITS,
        slowed=slowed,
    )
    return simulate(scenario).steps()


def kept_of(paces: Sequence[float], slowed: Slowed) -> dict[str, object]:
    """Rule -> share of the steps that all could have finished."""
    best = sum(alone(rank, step_s, slowed) for rank, step_s in enumerate(paces))
    count, speed = len(paces), sum(1 / step_s for step_s in paces)
    equal, by_pace = [1 / count] * count, [1 / step_s / speed for step_s in paces]
    shares: dict[str, object] = {
        "best_steps": best,
        "every step, equal shares (DDP)": round(together(paces, slowed, equal, 1) / best, 3),
        "every step, shares by pace": round(together(paces, slowed, by_pace, 1) / best, 3),
        f"every {LOCAL_STEPS} own steps (local SGD)": round(
            together(paces, slowed, equal, LOCAL_STEPS) / best, 3
        ),
    }
    for each in (16, 64):
        lengths = range(count * each * 15 // 16, count * each * 17 // 16 + 1, max(1, each // 16))
        found = [rounds(paces, slowed, every) / best for every in lengths]
        shares[f"everyone, rounds of {count * each} steps of all"] = {
            "least": round(min(found), 3),
            "mean": round(sum(found) / len(found), 3),
            "most": round(max(found), 3),
        }
    return shares


def main() -> None:
    result = {name: kept_of(*case) for name, case in CASES.items()}
    path = RESULTS / "crew-slowness.json"
    path.write_text(json.dumps({"units": UNITS, "cases": result}, indent=1) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
