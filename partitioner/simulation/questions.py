"""The what-ifs: a base scenario, what is changed in each, and all of them for every deadline."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mdp.errors import InputError
from mdp.files import Record
from partitioner.simulation.models import DeviceModel, Scenario
from partitioner.simulation.outcome import Outcome, play
from partitioner.simulation.worth import Worth


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One change to a scenario, and what to call it."""

    name: str
    change: Callable[[Scenario], Scenario]


class Answer(Record, frozen=True):
    """One deadline: what the fleet does as it is, and with each change."""

    deadline_ms: float
    base: Outcome
    what_if: dict[str, Outcome]


def without(*devices: str) -> WhatIf:
    """The same fleet from which `devices` are gone."""
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


def added(device: DeviceModel) -> WhatIf:
    """One more device, asked after those that serve its member already."""
    return WhatIf(
        name=f"with {device.name} for sub-model {device.k}",
        change=lambda scenario: replace(scenario, devices=(*scenario.devices, device)),
    )


def in_stages(first: frozenset[int], names: str, escalated: float) -> WhatIf:
    """Members `first`, called `names`, asked before the others; a share of them is not sure."""
    return WhatIf(
        name=f"cascade, {names} first",
        change=lambda scenario: replace(scenario, first=first, escalated=escalated),
    )


def hedged(after_ms: float) -> WhatIf:
    """The next replica asked beside one that has not answered after so long."""
    return WhatIf(
        name=f"hedged after {after_ms:g} ms",
        change=lambda scenario: replace(scenario, hedge_after_s=after_ms / 1e3),
    )


def answer(
    scenario: Scenario,
    deadlines_ms: Sequence[float],
    what_ifs: Sequence[WhatIf],
    worth: Worth,
    done: Callable[[str], None] = lambda what: None,
) -> list[Answer]:
    """Simulate everything that was asked; `done` is called after each simulation with its name."""
    names = [what_if.name for what_if in what_ifs]
    if len(set(names)) != len(names):
        raise InputError(f"the same change is asked for twice: {', '.join(names)}")
    answers = []
    for deadline_ms in deadlines_ms:
        here = replace(scenario, deadline_ms=deadline_ms)
        base = play(here, worth)
        done(f"{deadline_ms:g} ms")
        changed = {}
        for what_if in what_ifs:
            changed[what_if.name] = play(what_if.change(here), worth)
            done(f"{deadline_ms:g} ms {what_if.name}")
        answers.append(Answer(deadline_ms=deadline_ms, base=base, what_if=changed))
    return answers
