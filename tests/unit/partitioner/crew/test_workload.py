"""Work of a crew, and how long its members may wait for each other."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

pytest.importorskip("torch")

from mdp.formats.plan import NetworkSpec
from partitioner.crew.planning.facts import Facts, Line, Trainer
from partitioner.crew.planning.methods import Methods
from partitioner.crew.planning.syncplan import NetworkSync, RequestedGroups, SyncPlan, WholeGroup
from partitioner.crew.planning.work import NetworkWork, Work
from partitioner.crew.workload import longest_s, workload
from partitioner.data.datasets import open_dataset
from tests.support.models.runs import config_of, tiny_plan
from tests.support.models.trees import write_scenes
from tests.unit.partitioner.crew.planning.fleets import two_sites

pytestmark = pytest.mark.torch


def test_members_learn_their_cameras_pictures_and_shared_ones_are_trained_once(
    tmp_path: Path,
) -> None:
    data = open_dataset(str(write_scenes(tmp_path / "scenes", each=8)), cameras=("left", "right"))
    plan, scenes = tiny_plan(), len(data.train)
    first = replace(plan.assignments[0], camera="left")
    plan = replace(plan, assignments=[first, replace(first, k=1, device="beta", camera="right")])
    own = {n.name: n.pictures for n in workload(plan, config_of("scenes"), data).networks}
    # One scene lacks the right camera.
    assert own == {"teacher": 2 * scenes - 1, "member-0": scenes, "member-1": scenes - 1}
    shared = workload(plan, config_of("scenes", schedule={"shared": True}), data)
    assert {n.name: n.pictures for n in shared.networks} == dict.fromkeys(
        ("teacher", "member-0"), 2 * scenes - 1
    )
    assert shared.answers is not None
    assert shared.answers.pictures == 2 * (2 * scenes - 1)


def test_the_weights_that_networks_begin_with(tmp_path: Path) -> None:
    data, plan = open_dataset(str(write_scenes(tmp_path / "scenes", each=8))), tiny_plan()
    lite = NetworkSpec(name="tf_lite0", image_size=32, parameters=10, macs=10)
    second = replace(plan.assignments[1], submodel=None, network=lite)
    plan = replace(plan, assignments=[plan.assignments[0], second])
    weights = tmp_path / "weights"
    weights.mkdir()

    def starts(**options: Any) -> dict[str, str]:
        return {n.name: n.start for n in workload(plan, config_of("d", **options), data).networks}

    assert starts() == {"teacher": "drawn", "member-0": "cut", "member-1": "drawn"}
    (weights / "tf_lite0.safetensors").touch()
    given = starts(teacher_checkpoint="t.pth", weights=str(weights), schedule={"start": "scratch"})
    assert given == {"teacher": "given", "member-0": "drawn", "member-1": "given"}


def test_slow_steps_and_means_are_waited_for() -> None:
    work = Work(networks=(NetworkWork(name="member-0", size_bytes=85e6, pictures=640, epochs=1),))
    paces = {"coordinator": 2.0, "nuc": 0.5}
    trainers = tuple(
        Trainer(
            name=name, address="127.0.0.1", memory_bytes=10**10, pictures_per_s={"member-0": pace}
        )
        for name, pace in paces.items()
    )
    line = Line(a="coordinator", b="nuc", latency_s=0.0, bytes_per_s=1e6, back_bytes_per_s=1e6)
    facts = Facts(trainer=trainers, line=(line,))
    gradients = SyncPlan(network=(NetworkSync(name="member-0"),))
    rounds = SyncPlan(network=(NetworkSync(name="member-0", what="parameters"),))
    # A batch of 64 on the slower one, and a ring of two at 0.85 of 1 MB/s.
    assert longest_s(gradients, facts, work) == pytest.approx(64 / 0.5 + 100)
    assert longest_s(gradients, facts, work, validated=640) == pytest.approx(640 / 0.5 + 100)
    # Somebody may enter, who gets three means in fp32 within four times that.
    assert longest_s(rounds, facts, work) == pytest.approx(150)
    # A round shorter than four steps is not predicted, but its mean takes as long.
    short = NetworkSync(name="member-0", what="parameters", every_pictures=64)
    assert Methods(facts, "any").predict(work.networks[0], short) is None
    assert longest_s(SyncPlan(network=(short,)), facts, work) == pytest.approx(150)
    coded = replace(short, codec="int8", route="two_phase")
    assert longest_s(SyncPlan(network=(coded,)), facts, work) == pytest.approx(150)
    assert longest_s(gradients, Facts(trainer=trainers), work) == pytest.approx(128)
    unknown = Facts(trainer=tuple(replace(t, pictures_per_s={}) for t in trainers))
    assert longest_s(gradients, unknown, work) == 0.0


def test_pairs_on_request_may_share_a_trunk() -> None:
    work = Work(networks=(NetworkWork(name="member-0", size_bytes=40e6, pictures=640, epochs=1),))
    pairs = NetworkSync(name="member-0", what="parameters", meet=RequestedGroups())
    # Two pairs cross at once; alone one takes 8 s at 0.85 of 40 Mbit/s. All in a ring take longer.
    longest = longest_s(SyncPlan(network=(pairs,)), two_sites(), work)
    whole = replace(pairs, meet=WholeGroup())
    entering = 1.5 * Methods(two_sites(), "any").mean_s(work.networks[0], whole)
    assert longest == pytest.approx(max(2 * 8 / 0.85, entering))
