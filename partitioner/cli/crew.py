"""`mdp-partition crew`: train on the owner's own devices together."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mdp import console
from mdp.errors import InputError, PlanRefused
from mdp.files import NAME, NAME_FORM
from mdp.formats.plan import read_plan
from mdp.logs import quiet_libraries
from partitioner.cli.common import JsonOption, interruptible, prepare, say
from partitioner.cli.options import add_config_options
from partitioner.config import Given
from partitioner.run.progress import Progress

if TYPE_CHECKING:
    from partitioner.crew.planning.facts import Facts
    from partitioner.crew.planning.propose import Proposal
    from partitioner.crew.planning.syncplan import SyncPlan
    from partitioner.crew.planning.work import Work

app = console.new_app("Train on several of your own devices together.", "mdp-partition crew")

PlanOption = Annotated[Path, typer.Option(help="The plan.toml of mdp-partition plan.")]
CrewOption = Annotated[
    Path, typer.Option(help="Folder of facts.toml, crew.toml and crew.key, as `build --crew`.")
]
_SETTINGS = (
    *("run.data", "run.limit_train", "run.limit_test", "run.teacher_checkpoint"),
    *("run.teacher_labels", "run.weights", "teacher_schedule.epochs", "schedule.epochs"),
    "run.threads",
)


@app.command(cls=console.list_options("--trainers"))
@add_config_options(*_SETTINGS)
def probe(
    *,
    given: Given,
    plan: PlanOption,
    crew: CrewOption,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT of this machine, private, where the others join.")
    ],
    trainers: Annotated[list[str], typer.Option(help="Names of the others.")],
    name: Annotated[str, typer.Option(help="Name of this machine.")] = "coordinator",
    wait: Annotated[float, typer.Option(help="Seconds to wait for the others.", min=0)] = 600.0,
    json: JsonOption = False,
) -> None:
    """Measure how quickly every trainer trains, and the links between them; writes facts.toml.

    The others run `mdp-partition crew join` meanwhile.

    Example: mdp-partition crew probe --plan plan.toml --data photos/ --crew crew/
    --listen 192.168.1.10:47100 --trainers tower nuc
    """
    config = given.training()
    with interruptible(f"{crew} is as it was"):
        prepare(config.options.threads)
        from partitioner.build.inputs import TrainingInputs
        from partitioner.build.settings import run_settings
        from partitioner.crew.bus.address import parse_address, text_of
        from partitioner.crew.folder import CrewFolder
        from partitioner.crew.run import data_digest
        from partitioner.crew.run import probe as measure

        names, folder = [name, *trainers], CrewFolder(crew)
        if len(set(names)) < len(names):
            raise InputError(f"--trainers: expected names that differ, got {', '.join(names)}")
        for one in names:
            # As the file of facts has to have them.
            if re.match(NAME, one) is None:
                option = "--name" if one == name else "--trainers"
                raise InputError(f"{option} {one}: expected {NAME_FORM}")
        address = text_of(*parse_address(listen))
        chosen = read_plan(plan)
        chosen.require_teacher()
        inputs = TrainingInputs.of_plan(config, chosen)
        settings = run_settings(inputs)
        folder.token()
        Progress().note(
            f"copy {folder.key} to {', '.join(trainers)}, and there, with its own --name: "
            f"mdp-partition crew join {address} --name {trainers[0]} --key crew.key --data ... "
            "--run ..."
        )
        facts = measure(
            address,
            names,
            folder,
            chosen,
            settings,
            data_digest(inputs.data),
            Progress(),
            wait_s=wait,
        )
    missing = [one for one in names if one not in facts.names]
    if missing:
        Progress().note(f"not there, and left out: {', '.join(missing)}")
    say(json, facts, f"measured {len(facts.trainer)} trainers: {folder.facts_file}")


@app.command("plan")
@add_config_options(*_SETTINGS)
def plan_crew(
    *,
    given: Given,
    plan: PlanOption,
    crew: CrewOption,
    exact: Annotated[
        bool, typer.Option("--exact", help="Only plans that give the weights of one process.")
    ] = False,
    anyway: Annotated[
        bool, typer.Option("--anyway", "--force", help="Keep a plan that is refused.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Decide which trainers train which network, and predict the seconds; writes crew.toml.

    A plan that is not 10 % quicker than the quickest trainer alone is refused with exit code 4.

    Example: mdp-partition crew plan --plan plan.toml --data photos/ --crew crew/
    """
    from partitioner.crew.folder import CrewFolder
    from partitioner.crew.planning.losses import loss_words
    from partitioner.crew.planning.propose import choose, propose
    from partitioner.crew.planning.syncplan import write_plan

    folder = CrewFolder(crew)
    with interruptible("nothing was written"):
        facts, work = folder.facts(), _work(given, plan)
        _note_shared_machines(facts)
        proposals = propose(facts, work, allowed="exact" if exact else "recorded")
        try:
            best = choose(proposals, facts, work)
        except PlanRefused:
            together = [proposal for proposal in proposals if len(proposal.trainers) > 1]
            if not (anyway and together):
                _show(proposals, work, json)
                raise
            best = together[0]
        _show(proposals, work, json)
        write_plan(folder.plan_file, best.plan)
    Progress().note(f"{best.words}, about {best.seconds:,.1f} s: {folder.plan_file}")
    for line in loss_words(best.plan, work):
        Progress().note(line)


@app.command()
@add_config_options(*_SETTINGS)
def tune(
    *,
    given: Given,
    plan: PlanOption,
    crew: CrewOption,
    exact: Annotated[
        bool, typer.Option("--exact", help="Only ways that give the weights of one process.")
    ] = False,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the others.", min=0)] = 600.0,
    json: JsonOption = False,
) -> None:
    """Try ways to train each network with its crew, and keep the quickest; rewrites crew.toml.

    The 12 with the least predicted seconds are run for a few steps each. The others run
    `mdp-partition crew join` meanwhile. Where one does not come, or is lost, crew.toml stays as it
    was (exit code 3).

    Example: mdp-partition crew tune --plan plan.toml --data photos/ --crew crew/
    """
    config = given.training()
    with interruptible(f"{crew} is as it was"):
        prepare(config.options.threads)
        from partitioner.build.inputs import TrainingInputs
        from partitioner.build.settings import run_settings
        from partitioner.crew.folder import CrewFolder
        from partitioner.crew.planning.tuning import to_tune, trials_of
        from partitioner.crew.run import data_digest
        from partitioner.crew.run import tune as try_out
        from partitioner.crew.workload import workload

        folder, chosen = CrewFolder(crew), read_plan(plan)
        chosen.require_teacher()
        facts = folder.facts()
        inputs = TrainingInputs.of_plan(config, chosen)
        work = workload(chosen, config, inputs.data)
        sync = folder.plan(work)
        alike = to_tune(sync, facts, work, "exact" if exact else "recorded")
        if not alike:
            raise InputError(
                f"{folder.plan_file}: expected a network of several trainers with measured lines, "
                "and no keys but those that `crew plan` writes: nothing to try"
            )
        names = sorted({name for one in alike for name in one.crew} - {facts.names[0]})
        Progress().note(
            f"{len(trials_of(alike))} trials with {', '.join(names)}, which run: mdp-partition "
            f"crew join {facts.trainer[0].address} --name {names[0]} --key crew.key --data ... "
            "--run ..."
        )
        found = try_out(
            folder, sync, work, alike, chosen, run_settings(inputs), data_digest(inputs.data),
            Progress(), wait_s=wait,
        )  # fmt: skip
    if json:
        console.print_json(found)
        return
    print(f"{'predicted':>11}  {'measured':>11}  of a step")
    for one in found.tried:
        kept = "  kept" if one.kept else ""
        where = f"{', '.join(one.networks)}: {one.words}{kept}"
        print(f"{one.predicted_s:9.3f} s  {one.measured_s:9.3f} s  {where}")
    Progress().note(f"{folder.plan_file}, and what was tried: {folder.tuned_file}")


@app.command()
@add_config_options(*_SETTINGS)
def simulate(
    *,
    given: Given,
    plan: PlanOption,
    crew: CrewOption,
    plot: Annotated[Path | None, typer.Option(help="FILE.svg: who does what when.")] = None,
    json: JsonOption = False,
) -> None:
    """Predict the schedule of crew.toml, as it is or as you changed it: who does what when.

    Example: mdp-partition crew simulate --plan plan.toml --data photos/ --crew crew/ --plot who.svg
    """
    from mdp.files import write_bytes
    from partitioner.crew.folder import CrewFolder
    from partitioner.crew.planning.losses import loss_words
    from partitioner.crew.planning.picture import schedule_svg
    from partitioner.crew.planning.propose import predict

    folder = CrewFolder(crew)
    with interruptible("nothing was written"):
        work, facts = _work(given, plan), folder.facts()
        _note_shared_machines(facts)
        proposal = predict(folder.plan(work), facts, work)
        if proposal is None:
            raise InputError(
                f"{folder.plan_file}: cannot be predicted: expected measured paces and lines, and "
                "rounds of at least four steps of the slowest trainer"
            )
        if plot is not None:
            write_bytes(plot, schedule_svg(proposal.spans).encode())
    spans = [
        {"trainer": span.trainer, "what": span.what, "start_s": span.start_s, "end_s": span.end_s}
        for span in proposal.spans
    ]
    if json:
        losses = _losses(proposal.plan, work)
        console.print_json({"seconds": proposal.seconds, "loss_percent": losses, "spans": spans})
        return
    for span in proposal.spans:
        print(f"{span.start_s:9,.1f} to {span.end_s:9,.1f} s  {span.trainer:12} {span.what}")
    print(f"{proposal.words}: {proposal.seconds:,.1f} s")
    for line in loss_words(proposal.plan, work):
        print(line)


@app.command()
def join(
    coordinator: Annotated[str, typer.Argument(help="HOST:PORT of the coordinator.")],
    *,
    name: Annotated[str, typer.Option(help="Name of this trainer in the plan.")],
    data: Annotated[str, typer.Option(help="This machine's copy of the pictures.")],
    key: Annotated[Path, typer.Option(help="Copy of the coordinator's crew.key.")],
    run: Annotated[Path, typer.Option(help="Folder that keeps what is done here.")],
    threads: Annotated[int, typer.Option(help="Threads to train with; 0: one per core.")] = 0,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for the coordinator.", min=0)
    ] = 3600.0,
) -> None:
    """Take part in a coordinator's probe, tuning or training, with an own copy of the pictures.

    Example: mdp-partition crew join 192.168.1.10:47100 --name tower --data photos/
    --key crew.key --run photos.run
    """
    quiet_libraries()
    with interruptible(f"what is finished is kept in {run}"), _alone():
        prepare(threads)
        from partitioner.crew import run as crew_run
        from partitioner.crew.folder import token_of

        token = token_of(key)
        crew_run.join(coordinator, name, token, data, run, Progress(), wait_s=wait)
    print(f"{name}: the coordinator has ended")


def costs(crew: Path | None) -> dict[str, object]:
    """Costs of the last training for each trainer of a crew, for JSON; without a crew nothing."""
    if crew is None:
        return {}
    from partitioner.crew.folder import CrewFolder
    from partitioner.crew.history import costs as costs_in

    return {"crew": costs_in(CrewFolder(crew).log)}


@contextmanager
def _alone() -> Iterator[None]:
    from partitioner.training.world import world

    if world().size > 1:
        raise InputError("torchrun: expected one process for each trainer of a crew")
    yield


def _note_shared_machines(facts: "Facts") -> None:
    """Predictions add the paces of trainers that divide the cores of one machine."""
    for names in facts.machines:
        if len(names) > 1:
            Progress().note(
                f"{', '.join(names)} have one address: if they share a machine, expect less than "
                "predicted, as each pace counts as a machine's own"
            )


def _work(given: Given, plan: Path) -> Any:
    from partitioner.build.inputs import open_pictures
    from partitioner.crew.workload import workload

    config, chosen = given.training(), read_plan(plan)
    return workload(chosen, config, open_pictures(config.options, chosen.cameras))


def _losses(plan: "SyncPlan", work: "Work") -> dict[str, list[float] | None]:
    """The measured loss of each network that does not get the weights of one process, or null."""
    from partitioner.crew.planning.losses import losses

    return {name: loss and [*loss] for name, loss in losses(plan, work).items()}


def _show(proposals: "list[Proposal]", work: "Work", json: bool) -> None:
    if json:
        rows = [{"trainers": sorted(p.trainers), "chain": p.plan.chain, "seconds": p.seconds,
                 "loss_percent": _losses(p.plan, work)}
                for p in proposals]  # fmt: skip
        console.print_json(rows)
        return
    for proposal in proposals:
        print(f"{proposal.seconds:12,.1f} s  {proposal.words}")
