"""`mdp-partition simulate`: accuracy, latency and load of a fleet in virtual time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mdp import console
from mdp.errors import InputError
from mdp.files import read_toml
from mdp.formats.bundle import Bundle, CascadeAccuracy
from mdp.formats.packaged import bundle_by_name
from mdp.formats.plan import Plan, read_plan
from mdp.formats.profile import DeviceProfile, profiles_in_package, read_profile, read_profiles
from mdp.requests.deadline import check_deadline_ms
from partitioner.cli.common import JsonOption
from partitioner.estimates import latency_quantiles
from partitioner.estimates.accuracy import read_shipped_law
from partitioner.run.plan_settings import check_client_mbit
from partitioner.run.progress import Progress
from partitioner.simulation import answer_accuracy, setup
from partitioner.simulation.models import Load, LogNormal, Scenario
from partitioner.simulation.what_ifs import (
    Comparison,
    WhatIf,
    add_device,
    at_one_rung,
    compare,
    each_lost,
    hedge_after,
    in_stages,
    without,
)

#: With more devices, losses are only simulated where --lose names some.
MOST_LOST = 16
#: Classes of a plan that names no number, as in `mdp-partition plan`.
_PLAN_CLASSES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """The subject of a simulation: a plan, its classes, and the accuracy of its answers."""

    name: str
    plan: Plan
    num_classes: int
    accuracy: answer_accuracy.AnswerAccuracy
    #: Measured figures of its cascade, if any.
    cascade: CascadeAccuracy | None = None


def add_to(app: typer.Typer) -> None:
    """Give `app` this command."""
    lists = console.list_options("--profiles", "--deadline-ms", "--lose", "--add")
    app.command(cls=lists)(simulate)


def simulate(
    *,
    deadline_ms: Annotated[list[float], typer.Option(help="Deadlines to try, one or more.")],
    bundle: Annotated[
        Path | None,
        typer.Option(callback=bundle_by_name, help="Bundle folder to simulate, or a name."),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="Or a plan.toml, before it is built.")] = None,
    profiles: Annotated[
        list[str] | None,
        typer.Option(help="Profiles of the plan's devices; default: shipped ones by name."),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests for each deadline.")] = 10_000,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second, a Poisson process; default: one at a time a client."),
    ] = None,
    burst: Annotated[
        float, typer.Option(help="By which --rate is multiplied in each tenth second.")
    ] = 1.0,
    clients: Annotated[int, typer.Option(help="Callers, each with a connection of its own.")] = 1,
    replicas: Annotated[int, typer.Option(help="Replicas of every device, itself included.")] = 1,
    lose: Annotated[
        list[str] | None,
        typer.Option(help="What if these are lost, together; default: each in turn."),
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option(help="What if PROFILE also serves a sub-model: PROFILE=K, or each in turn."),
    ] = None,
    hedge_ms: Annotated[
        float | None, typer.Option(help="What if a replica is asked too after so long.")
    ] = None,
    client_mbit: Annotated[
        float | None,
        typer.Option(
            help="Bandwidth of each client's network port in Mbit/s; default: the plan's; inf: no "
            "limit."
        ),
    ] = None,
    assume: Annotated[
        Path | None,
        typer.Option(
            help="TOML file of what neither plan nor profiles have: sigma, jitter_ms, loss, "
            "mean_down_s, detect_s (docs/explanation/simulator.md)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of all random numbers.", min=0)] = 0,
    json: JsonOption = False,
) -> None:
    """Predict accuracy, latency and load of a fleet, and what changes with a device.

    Sessions and fusion are those that serve; devices, links and failures are modelled from the
    profiles, in virtual time.

    Example: mdp-partition simulate --bundle examples/bundles/cifar10 --deadline-ms 5 10 20
    --rate 100 --clients 4
    """
    for value in deadline_ms:
        _check_positive("--deadline-ms", value)
        check_deadline_ms(value)
    for option, count in (
        ("--requests", requests), ("--clients", clients), ("--replicas", replicas)
    ):  # fmt: skip
        if count < 1:
            raise InputError(f"{option}: expected at least 1, got {count}")
    for option, given in (("--rate", rate), ("--burst", burst), ("--hedge-ms", hedge_ms)):
        if given is not None:
            _check_positive(option, given)
    if burst != 1 and rate is None:
        raise InputError("--burst: expected --rate beside it")
    if client_mbit is not None:
        check_client_mbit(client_mbit)
    assumed = setup.Assumptions() if assume is None else read_toml(assume, setup.Assumptions)
    subject = _subject(bundle, plan)
    scenario = Scenario(
        devices=setup.device_models(
            subject.plan,
            _profiles(subject.plan, profiles),
            subject.num_classes,
            assumed,
            copies=replicas,
        ),
        load=Load(requests=requests, clients=clients, rate_per_s=rate, burst=burst),
        deadline_ms=deadline_ms[0],
        seed=seed,
        before=LogNormal(
            median_s=latency_quantiles.CLIENT_SEND_MS * len(subject.plan.assignments) / 1e3
        ),
        after_s=latency_quantiles.CLIENT_FUSE_MS / 1e3,
        late_s=setup.LATE_S,
        detect_s=assumed.detect_s,
        client_bps=_client_bps(subject.plan, client_mbit),
    )
    what_ifs = _what_ifs(scenario, subject, assumed, lose, add, hedge_ms)
    total = len(deadline_ms) * (1 + len(what_ifs))
    with Progress().task("simulating", total) as advance:
        compared = compare(
            scenario, deadline_ms, what_ifs, subject.accuracy, lambda what: advance(1, what)
        )
    _show(subject, scenario, assumed, compared, json)


def _client_bps(plan: Plan, client_mbit: float | None) -> float:
    """Bandwidth of a client's port: the option's, else the plan's, else no limit."""
    if client_mbit is not None:
        return 1e6 * client_mbit
    return math.inf if plan.client_bps is None else plan.client_bps


def _check_positive(option: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise InputError(f"{option}: expected a number above 0, got {value:g}")


def _subject(bundle: Path | None, plan: Path | None) -> _Subject:
    if (bundle is None) == (plan is None):
        raise InputError("expected either --bundle or --plan")
    if plan is not None:
        chosen = read_plan(plan)
        return _Subject(
            name=str(plan),
            plan=chosen,
            num_classes=chosen.num_classes or _PLAN_CLASSES,
            accuracy=answer_accuracy.PredictedSubsets(chosen, read_shipped_law().law),
        )
    assert bundle is not None
    opened = Bundle.open(bundle)
    evaluation = opened.manifest.evaluation
    return _Subject(
        name=str(bundle),
        plan=opened.manifest.plan,
        num_classes=len(opened.manifest.labels),
        accuracy=answer_accuracy.MeasuredSubsets(opened),
        cascade=None if evaluation is None else evaluation.cascade,
    )


def _profiles(plan: Plan, given: Sequence[str] | None) -> dict[str, DeviceProfile]:
    """The named profiles, and shipped ones for devices of the plan that none was named for."""
    found = setup.by_name(read_profiles(given or []))
    shipped = profiles_in_package()
    for part in setup.parts_of(plan):
        if part.device not in found and part.device in shipped:
            found[part.device] = read_profile(shipped[part.device])
    return found


def _what_ifs(
    scenario: Scenario,
    subject: _Subject,
    assumed: setup.Assumptions,
    lose: Sequence[str] | None,
    add: Sequence[str] | None,
    hedge_ms: float | None,
) -> list[WhatIf]:
    names = [device.name for device in scenario.devices]
    for name in lose or []:
        if name not in names:
            known = ", ".join(names[:MOST_LOST])
            raise InputError(f"--lose: expected one of {known}, got {name!r}")
    what_ifs = []
    if lose:
        what_ifs.append(without(*dict.fromkeys(lose)))
    elif len(names) <= MOST_LOST:
        what_ifs += each_lost(scenario)
    if subject.cascade is not None:
        first = subject.cascade.first
        called = " + ".join(subject.plan.assignments[k].device for k in first)
        escalated = subject.cascade.escalated.stacked
        what_ifs.append(in_stages(frozenset(first), called, escalated))
    if any(device.rungs for device in scenario.devices):
        what_ifs += [at_one_rung("always the top rung", 0)]
        what_ifs += [at_one_rung("always the lowest rung", -1)]
    additions = [one for text in add or [] for one in _additions(text, subject, assumed)]
    what_ifs += additions
    if hedge_ms is not None:
        hedge = hedge_after(hedge_ms)
        if len(scenario.members()) < len(names):
            what_ifs.append(hedge)
        elif not additions:
            raise InputError("--hedge-ms: no sub-model has a replica; see --replicas and --add")
        what_ifs += [_both(addition, hedge) for addition in additions]
    return what_ifs


def _both(first: WhatIf, second: WhatIf) -> WhatIf:
    return WhatIf(
        name=f"{first.name}, {second.name}",
        change=lambda scenario: second.change(first.change(scenario)),
    )


def _additions(text: str, subject: _Subject, assumed: setup.Assumptions) -> list[WhatIf]:
    """Changes of the fleet by `PROFILE=K`, or of `PROFILE` for every sub-model."""
    path, separator, number = text.rpartition("=")
    count = len(subject.plan.assignments)
    if not separator:
        path, ks = text, list(range(count))
    elif number.isdecimal() and int(number) < count:
        ks = [int(number)]
    else:
        raise InputError(f"--add {text}: expected a sub-model from 0 to {count - 1} after '='")
    profile = read_profile(path)
    return [
        add_device(setup.replica_model(subject.plan, profile, k, subject.num_classes, assumed))
        for k in ks
    ]


def _show(
    subject: _Subject,
    scenario: Scenario,
    assumed: setup.Assumptions,
    compared: Sequence[Comparison],
    json: bool,
) -> None:
    load, client_bps = scenario.load, scenario.client_bps
    limited = math.isfinite(client_bps)
    if json:
        console.print_json(
            {
                "simulated": subject.name,
                "accuracy_source": subject.accuracy.source,
                "load": load,
                "seed": scenario.seed,
                "client_bps": client_bps if limited else None,
                "assumed": assumed,
                "deadlines": compared,
            }
        )
        return
    from partitioner.cli.simulate_tables import print_comparisons

    who = f"{load.clients} client{'s' if load.clients > 1 else ''}"
    how = f"{load.rate_per_s:g} requests a second" if load.rate_per_s else "one request at a time"
    how += f", {load.burst:g} times as many in each tenth second" if load.burst != 1 else ""
    notes = [
        f"accuracy: {subject.accuracy.source}; a request without an answer counts as wrong",
        f"virtual time: {compared[0].base.span_s:,.0f} s; device failures: "
        f"{sum(part.falls for part in compared[0].base.devices.values())}",
        "assumed: "
        + ", ".join(
            f"{name} {value:g}"
            for name in setup.Assumptions.__struct_fields__
            if (value := getattr(assumed, name)) is not None
        ),
    ]
    if limited:
        notes.append(f"crops of a client share its port of {client_bps / 1e6:g} Mbit/s")
    title = f"{subject.name}, simulated: {load.requests:,} requests, {who}, {how}"
    print_comparisons(compared, title, notes)
