"""A run whose members are of two families: what each starts from, learns and leaves behind."""

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from mdp.errors import InputError  # noqa: E402
from mdp.formats.bundle import Bundle  # noqa: E402
from mdp.formats.plan import NetworkSpec, Plan  # noqa: E402
from partitioner.assembly import class_rows  # noqa: E402
from partitioner.build import steps  # noqa: E402
from partitioner.build.inputs import PretrainedWeights, TrainingInputs  # noqa: E402
from partitioner.build.plan import networks_that_know  # noqa: E402
from partitioner.data.datasets import open_dataset  # noqa: E402
from partitioner.data.memmaps import load, load_weights  # noqa: E402
from partitioner.export.evaluate import evaluate  # noqa: E402
from partitioner.export.sessions import contribution, open_member  # noqa: E402
from partitioner.networks.families import Backbone, create  # noqa: E402
from partitioner.networks.teacher import build_teacher  # noqa: E402
from partitioner.networks.weight_init import TrainedMember, init_from  # noqa: E402
from partitioner.run.folder import RunFolder  # noqa: E402
from partitioner.run.weights import weights_in  # noqa: E402
from partitioner.training.context import TrainingContext  # noqa: E402
from partitioner.training.members import initial_member  # noqa: E402
from partitioner.training.teacher import ensure_teacher  # noqa: E402
from tests.support.models.runs import CHAINED, QUIET, config_of, spec, tiny_plan  # noqa: E402
from tests.support.models.training import train  # noqa: E402
from tests.support.models.trees import write_tree  # noqa: E402

pytestmark = pytest.mark.torch
#: A convolutional network of timm with batch norms and 0.4 million numbers.
NAME = "test_efficientnet"
SIDE = 32
#: Names of the classes of its pretrained weights.
SEVEN = ["a", "stripes", "b", "cross", "c", "ring", "d"]


def mixed_plan(name: str = NAME) -> Plan:
    """A network, and a plain ViT after it."""
    plan = tiny_plan()
    first, last = plan.assignments
    network = NetworkSpec(name=name, image_size=SIDE, parameters=1, macs=1)
    first = msgspec.structs.replace(first, submodel=None, network=network)
    return msgspec.structs.replace(plan, assignments=[first, last])


def train_mixed(tree: Path, run: Path, plan: Plan | None = None, **options: Any) -> TrainingContext:
    return train(
        RunFolder(run), plan or mixed_plan(), open_dataset(str(tree)),
        config_of(tree, schedule=CHAINED, **options), QUIET,
    )  # fmt: skip


@dataclass
class Built:
    """A finished run and its bundle."""

    work: TrainingContext
    tree: Path
    weights: Path
    bundle: Path
    errors: dict[int, float]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("mixed")
    tree = write_tree(folder / "tree", each=30)
    weights = folder / "weights"
    weights.mkdir()
    torch.manual_seed(5)
    torch.save(create(Backbone(NAME, SIDE), 7).state_dict(), weights / f"{NAME}.in1k.pth")
    (weights / "labels.txt").write_text("\n".join(SEVEN))
    work = train_mixed(tree, folder / "b.run", epochs=2, weights=str(weights))
    errors = steps.export_step(work, folder / "b", "mixed")
    assert errors is not None
    return Built(work, tree, weights, folder / "b", errors)


def test_a_network_starts_from_its_weights_and_a_vit_from_an_earlier_vit(built: Built) -> None:
    work, (network, vit) = built.work, built.work.plan.assignments
    teacher = ensure_teacher(work, None)
    pretrained = torch.load(built.weights / f"{NAME}.in1k.pth", weights_only=True)
    stem = initial_member(work, network, teacher).state_dict()["trunk.conv_stem.weight"]
    assert torch.equal(stem, pretrained["conv_stem.weight"])
    settings = msgspec.structs.replace(work.settings.schedule, learning_rate=None)
    unsaid = replace(work, settings=msgspec.structs.replace(work.settings, schedule=settings))
    assert [unsaid.schedule_of(k).learning_rate for k in (0, 1)] == [0.0003, 0.002]
    later = msgspec.structs.replace(vit, k=2, device="gamma", submodel=spec(8, 8))
    plan = msgspec.structs.replace(work.plan, assignments=[network, vit, later])
    longer = replace(work, plan=plan)
    expected = longer.new_member(later).trunk
    init_from(expected, TrainedMember(work.load_member(vit).trunk))
    found = initial_member(longer, later, teacher).trunk.state_dict()
    assert all(torch.equal(value, found[key]) for key, value in expected.state_dict().items())


def rows_for(built: Built, names: list[str], folder: Path, **options: Any) -> dict[str, list[int]]:
    """Rows that the heads start as where `folder` has weights, and labels.txt with `names`."""
    weights = Path(shutil.copy(built.weights / f"{NAME}.in1k.pth", folder))
    if names:
        (folder / "labels.txt").write_text("\n".join(names))
    wanted = config_of(built.tree, weights=str(folder), **options)
    files = {NAME: weights}
    return PretrainedWeights(wanted.options, built.work.data.labels, files).class_rows(files)


def test_heads_start_as_rows_of_matching_names(built: Built, tmp_path: Path) -> None:
    work, network = built.work, built.work.plan.assignments[0]
    assert rows_for(built, SEVEN, tmp_path) == work.settings.class_rows == {NAME: [3, 5, 1]}
    found = initial_member(work, network, ensure_teacher(work, None))
    pretrained = torch.load(built.weights / f"{NAME}.in1k.pth", weights_only=True)
    for head in (found.boost, found.bag):
        assert head is not None
        assert torch.equal(head.weight, pretrained["classifier.weight"][[3, 5, 1]])
        assert torch.equal(head.bias, pretrained["classifier.bias"][[3, 5, 1]])


def test_weights_are_read_once_for_their_classes(
    built: Built, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, files = config_of(built.tree, weights=str(built.weights)), weights_in(built.weights)
    pretrained = PretrainedWeights(wanted.options, built.work.data.labels, files)
    assert pretrained.class_rows([NAME]) == {NAME: [3, 5, 1]}
    monkeypatch.delattr(class_rows, "own_classifier")
    assert pretrained.class_rows([NAME]) == {NAME: [3, 5, 1]}
    assert pretrained.of([NAME]) == files
    with pytest.raises(InputError, match=f"expected weights of other.*there are: {NAME}"):
        pretrained.of(["other"])


def test_labels_of_the_teacher_count_where_there_are_as_many(built: Built, tmp_path: Path) -> None:
    labels, other = tmp_path / "seven.txt", tmp_path / "three.txt"
    labels.write_text("ring\nx\ncross\ny\nstripes\nz\nlast")
    other.write_text("ring\ncross\nstripes")
    assert rows_for(built, [], tmp_path, teacher_labels=str(labels)) == {NAME: [2, 0, 4]}
    assert rows_for(built, [], tmp_path, teacher_labels=str(other)) == {}
    with pytest.raises(InputError, match=r"labels.txt: names 3 classes, expected 7: as many as"):
        rows_for(built, ["ring", "cross", "stripes"], tmp_path, teacher_labels=str(labels))


def test_imagenet_s_names_count_where_no_others_are_given(built: Built, tmp_path: Path) -> None:
    weights = tmp_path / f"{NAME}.pth"
    torch.save(create(Backbone(NAME, SIDE), 1000).state_dict(), weights)

    def rows(*labels: str, **options: Any) -> dict[str, list[int]]:
        wanted = config_of(built.tree, weights=str(tmp_path), **options)
        return PretrainedWeights(wanted.options, labels, {NAME: weights}).class_rows([NAME])

    assert rows("Golf_ball", "tench") == {NAME: [574, 0]}
    assert rows("crane", "tench") == rows("tench", "our cat") == {}
    # Names that are given decide, and a name that is twice among ImageNet's is once among them.
    (tmp_path / "labels.txt").write_text("\n".join([*map(str, range(998)), "crane", "tench"]))
    assert rows("tench", "crane") == {NAME: [999, 998]}
    assert rows("golf ball", "tench") == {}


def test_a_plan_knows_which_networks_start_with_rows_beside_such_a_teacher(
    built: Built, tmp_path: Path
) -> None:
    spec_, checkpoint = built.work.plan.require_teacher(), tmp_path / "t.safetensors"
    save_file(build_teacher(spec_, 7, pretrained=False).network.state_dict(), checkpoint)
    labels = str(built.weights / "labels.txt")

    def known(epochs: int, **options: Any) -> set[str]:
        wanted = config_of(built.tree, weights=str(built.weights), **options)
        schedule = msgspec.structs.replace(wanted.teacher_schedule, epochs=epochs)
        wanted = msgspec.structs.replace(wanted, teacher_schedule=schedule)
        return networks_that_know(TrainingInputs.of(wanted, built.work.data, spec_))

    given = {"teacher_checkpoint": str(checkpoint)}
    assert known(0, **given, teacher_labels=labels) == {NAME}
    assert known(2, **given, teacher_labels=labels) == known(0, **given) == known(2) == set()


def test_heads_start_as_a_probe_without_names(built: Built, tmp_path: Path) -> None:
    assert rows_for(built, list("abcdefg"), tmp_path) == {}
    settings = msgspec.structs.replace(built.work.settings, class_rows={})
    work, network = replace(built.work, settings=settings), built.work.plan.assignments[0]
    found = initial_member(work, network, ensure_teacher(work, None)).eval()
    assert found.boost is not None
    assert torch.equal(found.boost.weight, found.bag.weight)
    seen = torch.from_numpy(np.array(work.member_pixels(network, "train"))).permute(0, 3, 1, 2)
    with torch.inference_mode():
        output = found.of_normalised(found.normalise(seen.float()))
    right = output.bag.argmax(dim=1).numpy() == work.data.train.targets
    assert right.mean() > 0.6


def test_a_trained_networks_outputs_are_kept_for_its_successor(built: Built) -> None:
    work, index = built.work, np.arange(9)
    network = work.plan.assignments[0]
    member = work.load_member(network)
    seen = torch.from_numpy(np.array(work.member_pixels(network, "train")[index]))
    with torch.inference_mode():
        output = member.of_normalised(member.normalise(seen.permute(0, 3, 1, 2).float()))
    kept = load(work.run.predecessors / "sum-0-0.npy")[index]
    assert output.boost is not None
    assert np.allclose(kept, output.boost, atol=2e-2)


def test_every_member_is_exported_as_it_was_trained(built: Built) -> None:
    assert sorted(built.errors) == [0, 1]
    bundle = Bundle.open(built.bundle)
    network = bundle.manifest.plan.assignments[0]
    assert network.spec.outline == NAME
    pixels = built.work.member_pixels(network, "test")[:8]
    served = contribution(
        open_member(bundle.model(0), network, len(bundle.manifest.labels)), pixels, 8
    )
    member = built.work.load_member(network)
    with torch.inference_mode():
        x = member.normalise(torch.from_numpy(np.array(pixels)).permute(0, 3, 1, 2).float())
        assert np.allclose(served.bag, member.of_normalised(x).bag, atol=1e-3)
    report = evaluate(bundle, built.work.data, built.work.run, built.work.run.cache, QUIET)
    assert report.evaluation.subsets[-1].members == (0, 1)


def test_resumed_statistics(built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    shutil.copytree(built.work.run.path, run)
    for file in ("member-0", "member-1"):
        (run / f"{file}.safetensors").unlink()
    from partitioner.training import checkpoint, loop

    kept = checkpoint.save

    def stopping(*state: Any) -> None:
        kept(*state)
        raise KeyboardInterrupt

    options: dict[str, Any] = {"epochs": 2, "weights": str(built.weights)}
    with monkeypatch.context() as patch:
        patch.setattr(loop, "save", stopping)
        with pytest.raises(KeyboardInterrupt):
            train_mixed(built.tree, run, **options)
    train_mixed(built.tree, run, **options)
    before, after = (
        load_weights(folder / "member-0.safetensors") for folder in (built.work.run.path, run)
    )
    assert "trunk.bn1.running_mean" in before
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("nobodys_net", {}, "nobodys_net: timm .* has no such model"),
        (NAME, {"weights": "."}, f"expected weights of {NAME} in {NAME}.safetensors"),
        (NAME, {"weights": "absent"}, "--weights: expected a folder of weights, got 'absent'"),
    ],
)
def test_a_network_that_cannot_be_trained_is_refused_before_anything_is(
    built: Built,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=said):
        train_mixed(built.tree, tmp_path / "run", mixed_plan(name), **options)
    assert not (tmp_path / "run").exists()


def test_weights_of_another_architecture_are_refused(built: Built, tmp_path: Path) -> None:
    torch.save(create(Backbone("test_vit", SIDE), 0).state_dict(), tmp_path / f"{NAME}.pt")
    work = built.work
    wrong = replace(work, weights={0: tmp_path / f"{NAME}.pt"})
    with pytest.raises(InputError, match=r"expected the tensors of EfficientNet, but .* differ"):
        initial_member(wrong, work.plan.assignments[0], ensure_teacher(work, None))
