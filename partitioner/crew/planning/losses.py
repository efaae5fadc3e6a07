"""Loss of rounds against averaged gradients, as it was measured: what is said of a plan. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import replace

from partitioner.crew.planning.syncplan import NetworkSync, StepSize, SyncPlan, is_exact
from partitioner.crew.planning.work import Start, Work


class LossIncrease(NamedTuple):
    """Test loss over that of averaged gradients, in percent, means over seeds.

    The least and the most of what was measured: at the default step size of both, and each side at
    the best one of several.
    """

    least: float
    most: float


#: Of rounds of an eighth of an epoch with one seed (benchmarks.crew.lengths), and of a sixteenth
#: with three (benchmarks.crew.factors), in int8; a test compares it with both results.
MEASURED: Mapping[tuple[Start, StepSize], LossIncrease] = {
    ("given", "given"): LossIncrease(2.0, 5.3),
    ("given", "auto"): LossIncrease(-1.2, 1.9),
    ("drawn", "given"): LossIncrease(2.0, 6.4),
    ("drawn", "auto"): LossIncrease(1.9, 2.7),
    ("cut", "given"): LossIncrease(1.4, 2.1),
    ("cut", "auto"): LossIncrease(1.2, 1.9),
}
#: That with less loss in rounds of equal length, each at its best, of what was measured.
STEP_SIZES: Mapping[Start, StepSize] = {"given": "auto", "drawn": "auto", "cut": "given"}
#: Keys that change nothing, or what was measured at several values.
_ANY = ("by", "every_pictures", "route", "shards", "step_size")
_WEIGHTS: Mapping[Start, str] = {
    "given": "given weights",
    "drawn": "drawn weights",
    "cut": "weights cut from the teacher or an earlier sub-model",
}


def loss_increase(sync: NetworkSync, start: Start) -> LossIncrease | None:
    """The loss that rounds add to a network; None where that was not measured."""
    plain = NetworkSync(name=sync.name, what="parameters", codec="int8")
    chosen = {key: getattr(sync, key) for key in _ANY}
    return MEASURED.get((start, sync.step_size)) if sync == replace(plain, **chosen) else None


def losses(plan: SyncPlan, work: Work) -> dict[str, LossIncrease | None]:
    """The loss added to networks that do not get the weights of one process, by name."""
    found = {}
    for network in work.networks:
        sync = plan.of(network.name)
        if not (is_exact(sync) or len(sync.crew) == 1):
            found[network.name] = loss_increase(sync, network.start)
    return found


def loss_words(plan: SyncPlan, work: Work) -> list[str]:
    """A line on each group of networks of which the same is known."""
    alike: dict[tuple[Start, LossIncrease | None], list[str]] = {}
    for name, loss in losses(plan, work).items():
        alike.setdefault((work.of(name).start, loss), []).append(name)
    return [_line(names, *known) for known, names in alike.items()]


def _line(names: list[str], start: Start, loss: LossIncrease | None) -> str:
    who, weights = ", ".join(names), _WEIGHTS[start]
    if loss is None:
        return f"{who}: what this way loses was not measured of {weights}; --exact loses nothing"
    return (
        f"{who}: in rounds {loss.least:+.1f} to {loss.most:+.1f} % of test loss against averaged "
        f"gradients, measured of {weights} (small ViTs, four equal trainers, two epochs, one to "
        "three seeds); --exact loses nothing"
    )
