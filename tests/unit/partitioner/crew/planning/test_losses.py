"""The words on a plan's loss: what was measured of its networks, or that nothing was."""

from typing import Any

import pytest
from msgspec.structs import replace

from partitioner.crew.planning.losses import MEASURED, loss_increase, loss_words, losses
from partitioner.crew.planning.methods import Allowed
from partitioner.crew.planning.propose import propose
from partitioner.crew.planning.syncplan import NetworkSync, RequestedGroups, SyncPlan
from partitioner.crew.planning.work import NetworkWork, Start, Work
from tests.unit.partitioner.crew.planning.fleets import three


def network(name: str, start: Start) -> NetworkWork:
    return NetworkWork(name=name, size_bytes=6e6, pictures=20_000, epochs=20, start=start)


def two(first: Start, second: Start) -> Work:
    return Work(networks=(network("member-0", first), network("member-1", second)))


def proposed(work: Work, allowed: Allowed = "recorded") -> SyncPlan:
    """The best plan in which all take part in all."""
    found = propose(three(), work, allowed=allowed, chains=("strict",))
    return next(proposal.plan for proposal in found if len(proposal.trainers) == 3)


def test_the_planner_proposes_what_lost_less_and_says_what_it_loses() -> None:
    work = two("given", "cut")
    plan = proposed(work)
    assert [sync.what for sync in plan.network] == ["parameters"] * 2
    assert [sync.step_size for sync in plan.network] == ["auto", "given"]
    given, cut = loss_words(plan, work)
    least, most = MEASURED["given", "auto"]
    assert given == (
        f"member-0: in rounds {least:+.1f} to {most:+.1f} % of test loss against averaged "
        "gradients, measured of given weights (small ViTs, four equal trainers, two epochs, one "
        "to three seeds); --exact loses nothing"
    )
    least, most = MEASURED["cut", "given"]
    assert cut.startswith(f"member-1: in rounds {least:+.1f} to {most:+.1f} % of test loss")


def test_what_was_not_measured_is_said_so() -> None:
    work = two("cut", "cut")
    plan = proposed(work)
    assert [sync.step_size for sync in plan.network] == ["given", "given"]
    sent = [replace(sync, codec="fp16") for sync in plan.network]
    assert loss_words(replace(plan, network=tuple(sent)), work) == [
        "member-0, member-1: what this way loses was not measured of weights cut from the teacher "
        "or an earlier sub-model; --exact loses nothing"
    ]


def test_exact_plans_and_single_trainers_lose_nothing() -> None:
    work = two("drawn", "given")
    exact = proposed(work, "exact")
    assert len(exact.of("member-0").by) > 1
    assert losses(exact, work) == {}
    alone = [NetworkSync(name=n.name, what="parameters", by=("nuc",)) for n in work.networks]
    assert loss_words(SyncPlan(network=tuple(alone)), work) == []


def test_networks_of_which_the_same_is_known_share_a_line() -> None:
    work = Work(networks=tuple(network(f"member-{k}", "drawn") for k in range(3)))
    rounds = [
        NetworkSync(
            name=f"member-{k}", what="parameters", codec="int8", every_pictures=64 * (1 + k)
        )
        for k in range(3)
    ]
    (line,) = loss_words(SyncPlan(network=tuple(rounds)), work)
    assert line.startswith("member-0, member-1, member-2: in rounds ")


@pytest.mark.parametrize(
    "more",
    [
        {"codec": "fp16"},
        {"period": "grows"},
        {"moments": 2},
        {"when": "background"},
        {"meet": RequestedGroups()},
        {"mask": 0.1},
        {"what": "gradients"},
    ],
    ids=str,
)
def test_other_ways_have_no_figure(more: dict[str, Any]) -> None:
    kept: dict[str, Any] = {"what": "parameters", "codec": "int8"}
    assert loss_increase(NetworkSync(name="member-0", **kept), "drawn") is not None
    assert loss_increase(NetworkSync(name="member-0", **kept | more), "drawn") is None
