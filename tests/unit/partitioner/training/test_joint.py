"""The joint pass: random arrival subsets, the loss of their answer, and what becomes of it."""

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mdp.formats.bundle import Bundle  # noqa: E402
from mdp.fusion.fuse import FusionWeights, SubsetWeights  # noqa: E402
from partitioner import pipeline as steps  # noqa: E402
from partitioner.data.crops import view_of  # noqa: E402
from partitioner.data.datasets import open_dataset  # noqa: E402
from partitioner.export import write as export  # noqa: E402
from partitioner.run.folder import RunFolder  # noqa: E402
from partitioner.training.context import Work  # noqa: E402
from partitioner.training.joint import Ensemble, JointLoss, arrivals  # noqa: E402
from partitioner.training.losses import distillation_loss  # noqa: E402
from partitioner.training.student import Student  # noqa: E402
from partitioner.training.teacher import ensure_targets, ensure_teacher  # noqa: E402
from tests.support.models.runs import CHAINED, QUIET, asked, tiny_plan  # noqa: E402
from tests.support.models.trees import write_tree  # noqa: E402

pytestmark = pytest.mark.torch


def test_arrivals_are_never_empty_and_miss_members_as_asked() -> None:
    random = np.random.default_rng(0)
    drawn = [arrivals(4, 0.3, random) for _ in range(4000)]
    assert all(subset and list(subset) == sorted(set(subset)) for subset in drawn)
    share = np.mean([k in subset for subset in drawn for k in range(4)])
    assert share == pytest.approx(0.7, abs=0.02)
    assert {arrivals(3, 0.0, random) for _ in range(50)} == {(0, 1, 2)}
    assert {len(arrivals(3, 0.999999, random)) for _ in range(50)} == {1}


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> tuple[Work, Path]:
    folder = tmp_path_factory.mktemp("joined")
    tree = write_tree(folder / "tree", each=20)
    work = steps.train_step(
        RunFolder(folder / "run"), tiny_plan(), open_dataset(str(tree)),
        asked(tree, epochs=2, joint_epochs=2, schedule=CHAINED), QUIET,
    )  # fmt: skip
    return work, tree


def test_it_moves_every_member_and_keeps_what_came_before(joined: tuple[Work, Path]) -> None:
    work, _ = joined
    for assignment in work.plan.assignments:
        alone = work.load_member(assignment, joint=False).state_dict()
        together = work.load_member(assignment).state_dict()
        assert alone.keys() == together.keys()
        assert not torch.equal(alone["bag.weight"], together["bag.weight"])
        assert not torch.equal(alone["boost.weight"], together["boost.weight"])
    curves = msgspec.json.decode(work.run.curves.read_bytes())
    assert len(curves["joint"]) == 2
    assert {"loss", "stacked", "bag", "seconds"} <= curves["joint"][0].keys()
    assert not work.run.checkpoint("joint").exists()


def test_a_bundle_is_made_of_what_it_left(joined: tuple[Work, Path], tmp_path: Path) -> None:
    work, _ = joined
    # One member is enough to see which weights are taken; the teacher is not what this is about.
    plan = msgspec.structs.replace(work.plan, assignments=work.plan.assignments[:1])
    work = dataclasses.replace(work, plan=plan)
    work.run.teacher_onnx.touch()
    export.export_bundle(work, tmp_path / "b", "b")
    model = (tmp_path / "b/submodels/0/model.onnx").read_bytes()
    together = work.load_member(work.plan.assignments[0]).bag.bias.detach().numpy()
    assert together.tobytes() in model
    digest = Bundle.open(tmp_path / "b").manifest.provenance["run_digest"]
    assert digest == work.run.digest(work.plan)


def test_it_is_done_only_once(joined: tuple[Work, Path]) -> None:
    work, tree = joined
    before = [work.run.joint(k).stat().st_mtime_ns for k in (0, 1)]
    steps.train_step(
        work.run, work.plan, work.data,
        asked(tree, epochs=2, joint_epochs=2, schedule=CHAINED), QUIET,
    )  # fmt: skip
    assert [work.run.joint(k).stat().st_mtime_ns for k in (0, 1)] == before


def test_the_loss_is_that_of_the_subset_that_was_drawn(joined: tuple[Work, Path]) -> None:
    work, _ = joined
    targets = ensure_targets(work, ensure_teacher(work, None))
    stacking = FusionWeights(
        num_classes=3,
        subsets=[
            SubsetWeights(
                members=members, a=tuple(0.5 + k for k in members), b=(2.0,) * len(members)
            )
            for members in ((0,), (1,), (0, 1))
        ],
    )
    network = Ensemble([Student(work.load_member(a)) for a in work.plan.assignments]).eval()
    seen = []
    network.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    variants = work.variants
    pixels = [[variants.view(view_of(a), v) for v in range(2)] for a in work.plan.assignments]
    settings = work.settings
    loss_of = JointLoss(
        settings.joint_schedule, settings.schedule, pixels, variants, targets, stacking
    )
    index = np.arange(8)
    drawn = set()
    for epoch in range(8):
        with torch.no_grad():
            losses = loss_of(network, index, epoch)
        members = tuple(seen[-1])
        drawn.add(members)
        with torch.no_grad():
            outputs = network(seen[-1])
        fused = sum((0.5 + k) * outputs[k].boost + 2 * outputs[k].bag for k in members)
        wanted = distillation_loss(
            fused, work.variants.labels(0)[index],
            torch.from_numpy(np.asarray(targets[(2 + epoch) % 2][index], dtype=np.float32)),
            distillation=0.5, temperature=2.0, label_smoothing=0.0,
        )  # fmt: skip
        assert float(losses["stacked"]) == pytest.approx(float(wanted), rel=1e-4)
        whole = float(losses["stacked"]) + 0.3 * float(losses["bag"])
        assert float(losses["loss"]) == pytest.approx(whole, rel=1e-5)
    assert len(drawn) > 1
