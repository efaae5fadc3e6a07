"""Changes to a scenario, each simulated beside it for every deadline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mdp.errors import InputError
from mdp.files import Record
from partitioner.simulation.answer_accuracy import AnswerAccuracy
from partitioner.simulation.models import DeviceModel, Scenario
from partitioner.simulation.outcome import Outcome, run_scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One change to a scenario, and its name."""

    name: str
    change: Callable[[Scenario], Scenario]


class Comparison(Record, frozen=True):
    """Outcomes at one deadline: of the fleet unchanged, and with each change."""

    deadline_ms: float
    base: Outcome
    what_if: dict[str, Outcome]


def without(*devices: str) -> WhatIf:
    """Lose `devices`."""
    lost = frozenset(devices)
    return WhatIf(
        name=f"without {', '.join(devices)}",
        change=lambda scenario: replace(scenario, lost=scenario.lost | lost),
    )


def each_lost(scenario: Scenario) -> list[WhatIf]:
    """One what-if per device; nothing for a fleet of one."""
    if len(scenario.devices) == 1:
        return []
    return [without(device.name) for device in scenario.devices]


def add_device(device: DeviceModel) -> WhatIf:
    """Add a device, the last replica of its member."""
    return WhatIf(
        name=f"with {device.name} for sub-model {device.k}",
        change=lambda scenario: replace(scenario, devices=(*scenario.devices, device)),
    )


def in_stages(first: frozenset[int], names: str, escalated: float) -> WhatIf:
    """Ask members `first` before the others, which a share `escalated` of the requests needs."""
    return WhatIf(
        name=f"cascade, {names} first",
        change=lambda scenario: replace(scenario, first=first, escalated=escalated),
    )


def hedge_after(after_ms: float) -> WhatIf:
    """Ask another replica after `after_ms` without an answer."""
    return WhatIf(
        name=f"hedged after {after_ms:g} ms",
        change=lambda scenario: replace(scenario, hedge_after_s=after_ms / 1e3),
    )


def at_one_rung(name: str, place: int) -> WhatIf:
    """Have each device run at one of its rungs alone, the `place`-th of its list."""

    def pin(device: DeviceModel) -> DeviceModel:
        return replace(device, rung=range(1 + len(device.rungs))[place])

    return WhatIf(
        name=name,
        change=lambda scenario: replace(
            scenario, devices=tuple(pin(device) for device in scenario.devices)
        ),
    )


def compare(
    scenario: Scenario,
    deadlines_ms: Sequence[float],
    what_ifs: Sequence[WhatIf],
    accuracy: AnswerAccuracy,
    done: Callable[[str], None] = lambda what: None,
) -> list[Comparison]:
    """Simulate every deadline and what-if; `done` gets the name of each finished simulation.

    Raises InputError for two what-ifs of one name.
    """
    names = [what_if.name for what_if in what_ifs]
    if len(set(names)) != len(names):
        raise InputError(f"the same change is asked for twice: {', '.join(names)}")
    compared = []
    for deadline_ms in deadlines_ms:
        here = replace(scenario, deadline_ms=deadline_ms)
        base = run_scenario(here, accuracy)
        done(f"{deadline_ms:g} ms")
        changed = {}
        for what_if in what_ifs:
            changed[what_if.name] = run_scenario(what_if.change(here), accuracy)
            done(f"{deadline_ms:g} ms {what_if.name}")
        compared.append(Comparison(deadline_ms=deadline_ms, base=base, what_if=changed))
    return compared
