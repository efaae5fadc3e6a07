"""Run methods with seeds, choose what is tuned, and keep every outcome."""

from collections.abc import Sequence
from functools import partial

import msgspec

from benchmarks.accuracy.methods import DEFAULT_RATE, METHODS, OURS, choices
from benchmarks.accuracy.results import (
    Choice,
    Latency,
    Results,
    ResultsFile,
    Run,
    TeacherResult,
    Trial,
    if_free,
)
from benchmarks.accuracy.shapes import cost
from benchmarks.accuracy.site import Request, Site, ground_for, make_teacher, prepare, request_for
from benchmarks.harness.timed import Task, TimedProgress
from mdp.errors import InputError
from mdp.files import read_json, write_json
from partitioner.run.progress import Progress

_TUNED_WITH = 0


def known(methods: Sequence[str] | None) -> list[str]:
    """The methods asked for, or all; raises InputError for one that there is not."""
    wanted = list(METHODS) if methods is None else list(dict.fromkeys(methods))
    for name in wanted:
        if name not in METHODS:
            raise InputError(f"--methods: expected some of {', '.join(METHODS)}, got {name!r}")
    return wanted


def run_all(site: Site, file: ResultsFile, methods: Sequence[str], seeds: Sequence[int]) -> None:
    """Every method with every seed, unless the file has it or another process is at it."""
    progress = Progress()
    make_teacher(site)
    for seed in seeds:
        teacher = prepare(site, seed)
        results = keep_teacher(file, teacher)
        for name in methods:
            request = _request(site, results, name, seed)
            if request is None:
                progress.note(f"{name}: is what {OURS} is, left out")
                continue
            progress.note(f"seed {seed}, {name}")
            results = _run_once(site, file, request, progress)


def tune(site: Site, file: ResultsFile, methods: Sequence[str]) -> None:
    """Try every choice of every method with seed 0; variations of ours take ours'."""
    progress = Progress()
    make_teacher(site)
    teacher = prepare(site, _TUNED_WITH)
    keep_teacher(file, teacher)
    for name in dict.fromkeys(METHODS[name].tuned_as or name for name in methods):
        for choice in choices(name, site.shapes):
            request = request_for(site, name, _TUNED_WITH, choice)
            progress.note(f"tuning {name}: {request.choice}")
            with if_free(site.lock(request.name)) as free:
                if not free:
                    progress.note("another process is at it")
                    continue
                trial = Trial(choice=choice, calibration=performed(site, request).calibration)
                file.change(partial(Results.with_trial, method=name, trial=trial))


def keep_latency(file: ResultsFile, latency: Latency) -> None:
    file.change(lambda there: msgspec.structs.replace(there, latency=latency))


def keep_teacher(file: ResultsFile, teacher: TeacherResult) -> Results:
    return file.change(lambda there: msgspec.structs.replace(there, teacher=teacher))


def _request(site: Site, results: Results, name: str, seed: int) -> Request | None:
    """What to run for a method; None for a variation of ours that varies nothing."""
    choice = results.chosen(METHODS[name].tuned_as or name)
    choice = choice or Choice(learning_rate=DEFAULT_RATE)
    request = request_for(site, name, seed, choice)
    if METHODS[name].tuned_as == OURS and name != OURS:
        ours = request_for(site, OURS, seed, choice)
        if ours.made_of == request.made_of:
            return None
    return request


def _run_once(site: Site, file: ResultsFile, request: Request, progress: Progress) -> Results:
    """Run, and keep it in the file; returns what the file holds then."""
    with if_free(site.lock(request.name)) as free:
        results = file.read()
        before = results.run(request.method, request.seed)
        if before is not None and before.made_of == request.made_of:
            return results
        if not free:
            progress.note("another process is at it")
            return results
        run = performed(site, request)
        return file.change(lambda there: there.with_run(run))


def performed(site: Site, request: Request) -> Run:
    """The finished run; its folder keeps it, so that a tuned choice is not run twice."""
    ground = ground_for(site, request)
    kept = ground.work.run.path / "outcome.json"
    if kept.is_file():
        return read_json(kept, Run)
    outcome = METHODS[request.method].run(ground)
    progress = ground.work.progress
    tasks = progress.tasks if isinstance(progress, TimedProgress) else []
    settings = request.settings
    run = Run(
        method=request.method,
        seed=request.seed,
        choice=request.choice,
        made_of=request.made_of,
        settings=msgspec.to_builtins(
            {"schedule": settings.schedule, "joint_schedule": settings.joint_schedule}
        ),
        members=list(outcome.shapes),
        alone=outcome.alone,
        subsets=outcome.subsets,
        headline=outcome.headline,
        calibration=outcome.calibration,
        tasks=tasks,
        train_s=sum(task.wall_s for task in tasks),
        train_cpu_s=sum(task.cpu_s for task in tasks),
        cost_ratio=_cost_ratio(request, tasks),
        notes=outcome.notes,
    )
    write_json(kept, run)
    return run


def _cost_ratio(request: Request, tasks: Sequence[Task]) -> float | None:
    """Processor time of everything over that of the largest member; None for the rivals."""
    largest = max(range(len(request.shapes)), key=lambda k: cost(request.shapes[k]))
    alone = [t.cpu_s for t in tasks if t.what.startswith(f"training sub-model {largest} ")]
    return sum(task.cpu_s for task in tasks) / sum(alone) if alone else None
