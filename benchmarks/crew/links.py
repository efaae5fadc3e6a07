"""Cost of links that are 100 times slower to a training whose plan is made anew.

    python -m benchmarks.crew.links

Predicted, by the planner's own formulas: nothing is trained. Four equal trainers at one switch, at
1 Gbit/s and at 10 Mbit/s, train four members (epochs 20 and 14), or fine-tune a teacher (2 epochs)
on 50,000 pictures; networks and their work are of two heads and MLP ratio 4. Beside the plan that
is made anew: averaging all gradients of everybody, and the quickest trainer alone. Writes
benchmarks/results/crew-links.json.
"""

from collections.abc import Callable
from typing import Any

from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.errors import PlanRefused
from mdp.files import write_json
from partitioner.crew.planning.facts import Facts, Line, Trainer
from partitioner.crew.planning.propose import Proposal, choose, propose, quickest_alone
from partitioner.crew.planning.syncplan import is_exact_plan
from partitioner.crew.planning.work import NetworkWork, Work

RESULT = RESULTS / "crew-links.json"
PICTURES, BATCH, TRAINERS = 50_000, 64, 4
#: Megabit/s to seconds of a message, one way.
LINKS = {1000: 0.0001, 10: 0.005}
#: Network: megabytes of its parameters, GFLOP of a step of 64 pictures, whether it is the teacher.
NETWORKS = {
    "96 x 3 at 32 px": (1.44, 2.3, False),
    "384 x 3 at 160 px": (22.8, 226.0, False),
    "640 x 5 at 208 px": (106.0, 1708.0, False),
    "ViT-B/16 at 224 px, teacher": (349.2, 6745.0, True),
}
#: Two cores in fp32 and in bf16, and a small GPU.
GFLOPS = (27.0, 110.0, 5000.0)
#: What is asked for, and what would do.
MOST, AIM = 3.5, 1.5


def facts(gflops: float, mbit: float, trainers: int = TRAINERS) -> Facts:
    """Equal trainers at one switch."""
    names = [f"t{n}" for n in range(trainers)]
    rate = mbit * 1e6 / 8
    return Facts(
        trainer=tuple(
            Trainer(name=name, address="10.0.0.1", memory_bytes=2**36, gflops=gflops)
            for name in names
        ),
        line=tuple(
            Line(a=a, b=b, latency_s=LINKS[int(mbit)], bytes_per_s=rate, back_bytes_per_s=rate)
            for i, a in enumerate(names)
            for b in names[i + 1 :]
        ),
    )


def work(network: str) -> Work:
    """A teacher, or four members of one shape."""
    megabytes, gflop, is_teacher = NETWORKS[network]
    names = ["teacher"] if is_teacher else [f"member-{k}" for k in range(4)]
    return Work(
        networks=tuple(
            NetworkWork(
                name=name,
                size_bytes=megabytes * 1e6,
                pictures=PICTURES,
                epochs=2 if is_teacher else (14 if k else 20),
                batch=BATCH,
                gflop_per_picture=gflop / BATCH,
            )
            for k, name in enumerate(names)
        )
    )


def averaging_gradients(proposals: list[Proposal]) -> Proposal:
    """The quickest exact plan in which every trainer trains every network."""
    return min(
        (
            proposal
            for proposal in proposals
            if is_exact_plan(proposal.plan)
            and all(len(sync.crew) == TRAINERS for sync in proposal.plan.network)
        ),
        key=lambda proposal: proposal.seconds,
    )


def row(network: str, gflops: float) -> dict[str, Any]:
    """One network on one kind of trainers, at both rates."""
    found: dict[str, Any] = {"network": network, "gflops": gflops}
    for mbit in LINKS:
        some, asked = facts(gflops, mbit), work(network)
        proposals = propose(some, asked)
        alone = quickest_alone(proposals)
        assert alone is not None
        chosen = _choose(proposals, some, asked, alone)
        found[f"{mbit} Mbit/s"] = {
            "planned_s": round(chosen.seconds, 1),
            "plan": chosen.words,
            "methods": sorted({f"{s.what} {s.codec}" for s in chosen.plan.network if s.by[1:]}),
            "gradients_of_all_s": round(averaging_gradients(proposals).seconds, 1),
            "alone_s": round(alone.seconds, 1),
        }
    quick, slow = (found[f"{mbit} Mbit/s"] for mbit in LINKS)
    for key in ("planned_s", "gradients_of_all_s"):
        found[f"times slower, {key.removesuffix('_s')}"] = round(slow[key] / quick[key], 2)
    return found


def _choose(proposals: list[Proposal], some: Facts, asked: Work, alone: Proposal) -> Proposal:
    """The planner's choice, and where it refuses, what it offers instead."""
    try:
        return choose(proposals, some, asked)
    except PlanRefused:
        return alone


def figures() -> str:
    rows = read_result(RESULT.stem)["rows"]

    def slower(gflops: float) -> Callable[[str], str]:
        some = {row["network"]: row for row in rows if row["gflops"] == gflops}
        return lambda network: f"{some[network]['times slower, planned']:.2f}"

    columns = [(f"{g:,.0f} GFLOP/s", slower(g)) for g in GFLOPS[1:]]
    return table(NETWORKS, ("network", "{0}"), *columns)


PAGE = Page("benchmarks.crew.links", figures)


def main() -> None:
    rows = [row(network, gflops) for network in NETWORKS for gflops in GFLOPS]
    write_json(RESULT, {"most": MOST, "aim": AIM, "pictures": PICTURES, "rows": rows})
    PAGE.write()


if __name__ == "__main__":
    main()
