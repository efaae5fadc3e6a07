"""The plan that `crew tune` keeps beside the best of those made by hand, over links of 20 Mbit/s.

    sudo python -m benchmarks.crew.tune

Trainers, cables and the 16 plans of `benchmarks.crew.net`: computing is played by sleeping. First
the lines are measured as `crew probe` does and the candidates are tried as `crew tune` does: its
coordinator, jobs, trials and choice, twelve ways of 1 + 5 steps. Then the plan that it keeps is
trained once more among those made by hand, of which each has as many steps. Rounds have 16 steps on
both sides, as their length is no one's choice. Once all ways are allowed, and once those that give
the weights of one process, beside the hand-made ones that do. Needs root and iproute2. Writes
benchmarks/results/crew-tune.json.
"""

import json
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import distributed

from benchmarks.crew.net import (
    LINES,
    MBIT,
    PICTURES,
    PORT,
    SIZE,
    TRAINERS,
    base,
    facts_of,
    namespaces,
    plans,
    run_in,
)
from benchmarks.crew.played import NETWORK, Case, Trainer, seconds, take_part
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from partitioner.crew.averaging.groups import TrainerGroups
from partitioner.crew.bus.control import Coordinator, CoordinatorClient, log_lines
from partitioner.crew.bus.store import connect, serve_store
from partitioner.crew.coordinator.jobs import Jobs
from partitioner.crew.coordinator.membership import MembershipMachine
from partitioner.crew.coordinator.run import CrewRun
from partitioner.crew.coordinator.schedule import SynchronousSchedule
from partitioner.crew.coordinator.watch import Watch
from partitioner.crew.history import parts_of
from partitioner.crew.planning.facts import Facts
from partitioner.crew.planning.flows import Links
from partitioner.crew.planning.methods import Allowed
from partitioner.crew.planning.syncplan import NetworkSync, SyncPlan, is_exact
from partitioner.crew.planning.tuning import (
    Tried,
    judge,
    to_tune,
    trial_jobs,
    trial_schedule,
    trials_of,
)
from partitioner.crew.planning.work import NetworkWork, Work
from partitioner.crew.worker.trial import Drawn, try_candidates
from partitioner.crew.worker.worker import enter
from partitioner.run.settings import MemberSchedule

RESULT = RESULTS / "crew-tune.json"
AIM = 0.95
BATCH = TRAINERS * PICTURES
#: Steps of a round: an eighth of the epoch is the planner's longest.
ROUND_STEPS = 16
WORK = Work(
    networks=(
        NetworkWork(
            name=NETWORK, size_bytes=SIZE, pictures=8 * ROUND_STEPS * BATCH, epochs=1, batch=BATCH
        ),
    )
)
#: What is asked for: name of the case -> what is allowed.
ASKED: dict[str, Allowed] = {"any": "any", "exact": "exact"}
_PATIENCE = timedelta(seconds=600)


class TuningTrainer(Trainer):
    """One process that may be a trainer of a tuning, too."""

    def run(self) -> dict[str, Any]:
        """Train, or try candidates; what it took."""
        return self._tune(ASKED[self.case.name]) if self.case.name in ASKED else super().run()

    def _tune(self, allowed: Allowed) -> dict[str, Any]:
        """Be the coordinator of a tuning, or join it; the coordinator returns what was tried."""
        said = [json.loads((self.folder / f"said-{n}.json").read_text()) for n in range(TRAINERS)]
        facts = facts_of(said)
        alike = to_tune(SyncPlan(), facts, WORK, allowed)
        trials, names, host = trials_of(alike), facts.names, self.cases.hosts[0]
        port = self.cases.port + 2 + self.cases.cases.index(self.case)
        log, coordinator = self.folder / f"{self.case.name}.jsonl", None
        jobs = trial_jobs(trials, names)
        if self.rank == 0:
            of_job = {job.name: sync for job, sync in zip(jobs[:-1], trials, strict=True)}

            def schedule_of(job: str, members: set[int], _: Any) -> Any:
                if job not in of_job:
                    return SynchronousSchedule(job, 1)
                return trial_schedule(job, of_job[job], BATCH, members, TRAINERS)

            given = Jobs(jobs)
            run = CrewRun(MembershipMachine("d", given.by, {}), given, schedule_of, whole=True)
            store = serve_store(host, port, "")
            coordinator = Coordinator(store, run, Watch(600.0, 600.0), log)
        joined = connect(host, port, "", wait_s=60.0)
        client = CoordinatorClient(joined)
        client.join(names[self.rank], "d")
        enter(client)
        joined.set(f"name/{client.rank}", names[self.rank].encode())
        own = self.cases.hosts[self.rank]
        groups = TrainerGroups(
            joined.another(_PATIENCE),
            client.rank,
            own,
            client.has_committed,
            _PATIENCE.total_seconds(),
        )
        try_candidates(trials, facts, client, groups, joined, self._draw)
        distributed.barrier()
        client.close()
        if coordinator is None:
            return {}
        coordinator.close()
        parts = parts_of(log_lines(log), list(of_job))
        return {"tried": msgspec.to_builtins(judge(alike, parts))}

    def _draw(self, name: str) -> Drawn:
        """The played network, which takes its time for the pictures of each share."""
        played = Trainer(self.case, self.cases, self.rank, self.folder)
        schedule = MemberSchedule(epochs=1, batch_size=BATCH, learning_rate=1e-4)
        return Drawn(played.module, played.loss_of, schedule)


def case_of(name: str, sync: NetworkSync, facts: Facts) -> Case:
    """A plan that was kept, as those made by hand are trained."""
    links = Links(facts)
    common = base(
        name=name, route=sync.way, shards=sync.shards, codec=sync.codec,
        uplink=tuple(links.capacities[f"{one} up"] for one in facts.names),
    )  # fmt: skip
    if sync.what == "gradients":
        return replace(common, bucket_bytes=sync.bucket_bytes or SIZE + 1)
    return replace(common, how="rounds", steps=ROUND_STEPS, every=sync.round_pictures)


def gives_weights_of_one(case: Case) -> bool:
    """Tell whether a plan made by hand gives the weights of one process."""
    sync = NetworkSync(name=NETWORK, codec=case.codec, route=case.route)
    return case.how == "gradients" and is_exact(sync)


def compare(kept: Mapping[str, Tried], took: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row for each plan that was kept, beside the best made by hand; `took` are seconds a step.

    They are by case, of the plans that were kept as `case_of` has them: "tuned, NAME".
    """
    rows: list[dict[str, Any]] = []
    for name, one in kept.items():
        rivals = [case for case in plans() if name == "any" or gives_weights_of_one(case)]
        best = min(rivals, key=lambda case: took[case.name])
        trained_s = took[f"tuned, {name}"]
        rows.append(
            {
                "allowed": name,
                "words": one.words,
                "predicted_s": one.predicted_s,
                "trial_s": one.measured_s,
                "trained_s": round(trained_s, 3),
                "best": best.name,
                "best_s": round(took[best.name], 3),
                "pace": round(took[best.name] / trained_s, 3),
            }
        )
    return rows


def figures() -> str:
    rows = read_result(RESULT.stem)["kept"]
    return table(
        rows,
        ("allowed", "{allowed}"),
        ("kept", "{words}"),
        ("predicted, measured in the trial", "{predicted_s:.3f}, {trial_s:.3f} s"),
        ("trained", "{trained_s:.3f} s"),
        (f"best of {len(plans())} by hand", "{best} {best_s:.3f} s"),
        ("pace of the best", "{pace:.2f}"),
    )


PAGE = Page("benchmarks.crew.tune", figures)


def main() -> None:
    """Measure and write."""
    machine = describe_machine()
    tries = [LINES, *(Case(name=name, how="gradients", picture_s=base().picture_s,
                           pictures=PICTURES, steps=1, layers=base().layers, width=base().width)
                      for name in ASKED)]  # fmt: skip
    with namespaces(TRAINERS) as machines:
        said = run_in(machines, tries, PORT, "benchmarks.crew.tune")
        tried = {name: msgspec.convert(said[0][name]["tried"], list[Tried]) for name in ASKED}
        kept = {name: next(one for one in some if one.kept) for name, some in tried.items()}
        facts = facts_of(said)
        tuned = [case_of(f"tuned, {name}", one.sync, facts) for name, one in kept.items()]
        trained = run_in(machines, [*plans(), *tuned], PORT + 100, "benchmarks.crew.tune")
    took = {case.name: seconds(case.name, trained) / case.steps for case in [*plans(), *tuned]}
    result: dict[str, Any] = {
        "machine": machine,
        "computing": "played by sleeping",
        "link_mbit_per_s": MBIT,
        "network_bytes": SIZE,
        "aim": AIM,
        "kept": compare(kept, took),
        "seconds of a step by hand": {case.name: round(took[case.name], 3) for case in plans()},
        "tried": {name: msgspec.to_builtins(some) for name, some in tried.items()},
    }
    write_json(RESULT, result)
    PAGE.write()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        torch.manual_seed(7)
        take_part(trainer=TuningTrainer)
    else:
        main()
