"""The figures of docs/results/deployed.md: what was started, in seconds and megabytes."""

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.page import Page
from benchmarks.harness.results import read_result
from benchmarks.harness.tables import table

#: Part -> its heading, and what each figure of it is.
PARTS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "containers": (
        "Images, and a fleet of three by podman",
        {
            "base_mb": "base: Debian with Python and pip",
            "agent_built_s": "agent: built, its wheel among it, without a network",
            "agent_added_mb": "agent: beyond the base",
            "gateway_built_s": "gateway: built, its wheel among it, without a network",
            "gateway_added_mb": "gateway: beyond the base",
            "agent_resident_mb": "agent: resident, the largest of three",
            "gateway_resident_mb": "gateway: resident",
            "answer_ms": "an answer of all three over HTTP, mean of 20",
            "missed_s": "an agent killed: until an answer of the other two",
            "back_s": "started again: until an answer of all",
            "moved_s": "replaced at another address, its part pulled anew: until an answer of all",
            "agent_stops_s": "SIGTERM until the agent's end, exit code 0",
            "gateway_stops_s": "SIGTERM until the gateway's end, exit code 0",
        },
    ),
    "compose": (
        "The same images by Docker Compose",
        {
            "up_s": "`up` until an answer of all three",
            "back_s": "an agent killed: until Docker has started it and all answer",
        },
    ),
    "arm64": (
        "The agent's image of 64-bit ARM, emulated",
        {
            "base_mb": "base: Debian with Python and pip",
            "agent_built_s": "agent: built by emulated programs",
            "agent_added_mb": "agent: beyond the base",
            "ready_s": "started: until READY",
            "answer_s": "a client's first answer",
        },
    ),
    "trainer": (
        "The image `trainer`, and the chart's job in two containers",
        {
            "trainer_built_s": "trainer: built, its wheel among it, without a network",
            "trainer_added_mb": "trainer: beyond the base, with torch's CPU build",
            "trained_s": "a tiny training by torchrun in both, from their start to their end",
        },
    ),
    "systemd": (
        "A unit under systemd",
        {
            "installed_s": "`mdp-agent install` until READY",
            "back_s": "killed: until READY, with `RestartSec=100ms`",
            "hung_s": "stopped by SIGSTOP: until READY, with `WatchdogSec=3`",
            "reloaded_s": "`systemctl reload` until another bundle is served",
            "stopped_s": "`systemctl stop`, drained, with success",
            "booted_s": "the machine started anew: until READY",
            "exposure": "`systemd-analyze security` (less is better)",
        },
    ),
    "walk": (
        "From a bare Debian, as typed",
        {
            "commands": "commands",
            "installed_s": "until READY",
            "rebooted_s": "and after a reboot until READY",
        },
    ),
    "playbook": (
        "The Ansible role",
        {
            "boards": "boards",
            "played_s": "first play, one board after the other, until READY",
            "again_s": "again: nothing changed, no agent interrupted",
        },
    ),
    "growing": (
        "Growing",
        {
            "agents": "simulated agents",
            "fleets": "fleets",
            "gateways": "gateways, each with all fleets",
            "answer_ms": "an answer of a fleet's ten agents, mean",
            "gateway_resident_mb": "gateway: resident, the largest of them",
        },
    ),
}


def figures() -> str:
    """A table for each part that was measured."""
    parts = read_result("deployed")["parts"]
    return "\n\n".join(part_figures(name, parts[name]) for name in PARTS if name in parts)


def part_figures(name: str, part: Mapping[str, Any]) -> str:
    """Heading, set-up and table of one part."""
    heading, labels = PARTS[name]
    machine, values = part["machine"], part["values"]
    engines = "".join(f"{engine} {version}, " for engine, version in part["engines"].items())
    low, high = part["load"]
    set_up = (
        f"{engines}{machine['cores']} virtual cores, {machine['processor']}, "
        f"load {low:g} to {high:g}, {part['date']}."
    )
    rows = [(label, written(key, values[key])) for key, label in labels.items() if key in values]
    return f"### {heading}\n\n{set_up}\n\n" + table(rows, ("", "{0[0]}"), ("", "{0[1]}"))


def written(key: str, value: float) -> str:
    """A figure with the unit that its key ends in."""
    name, _, unit = key.rpartition("_")
    if not name or unit not in ("s", "ms", "mb"):
        return f"{value:g}"
    digits = 1 if unit == "s" and value < 10 else 0
    return f"{value:.{digits}f} {unit.replace('mb', 'MB')}"


PAGE = Page("benchmarks.deployed", figures)
