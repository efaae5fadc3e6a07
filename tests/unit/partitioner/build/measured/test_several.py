"""A build of labels that do not exclude each other, from folders to the measured bundle."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file

from mdp.errors import InputError
from mdp.formats.bundle import Bundle, SubsetLabels
from mdp.formats.plan import read_plan
from mdp.fusion.fuse import fuse, labels_held, sigmoid, weights_for
from partitioner import api
from partitioner.assembly import write
from partitioner.build.inputs import BuildInputs
from partitioner.build.measured.build import build_measured
from partitioner.build.measured.fine_tuning import binary_losses
from partitioner.cli import tables
from partitioner.cli.main import main
from partitioner.config import Given
from partitioner.data.datasets import open_dataset
from partitioner.data.live_views import Draw, Pictures
from partitioner.export.evaluate import run_members
from partitioner.networks.families import Backbone, create
from partitioner.networks.feature_distance import attach_distance
from partitioner.pilot import measure
from partitioner.pilot.linear import Classifier
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from tests.support.clock import TickingClock
from tests.support.command_lines import run_here
from tests.support.models.trees import CLASSES, pattern, write_tree

pytestmark = pytest.mark.torch
VIT = "test_vit"
#: Every set of two of the labels; `stripes` is alone or with neither.
SETS = ("cross", "ring", "cross+ring", "stripes", "none")


def draw(labels: tuple[str, ...], random: np.random.Generator) -> Image.Image:
    """Patterns beside each other on a noisy ground, each in a half of its own."""
    pixels = random.uniform(0, 40, (32, 32, 3))
    for place, label in enumerate(labels):
        part = np.asarray(pattern(label, random), np.float64)
        pixels[8:24, 16 * place : 16 * place + 16] += part
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def write_sets(root: Path, each: int, cameras: tuple[str, ...] = ()) -> Path:
    """Pictures, or scenes of cameras, of every set of labels."""
    random = np.random.default_rng(0)
    for name in SETS:
        labels = () if name == "none" else tuple(name.split("+"))
        for number in range(each):
            files = [f"{number:03d}/{one}.png" for one in cameras] or [f"{number:03d}.png"]
            for file in files:
                path = root / name / file
                path.parent.mkdir(parents=True, exist_ok=True)
                draw(labels, random).save(path)
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    torch.manual_seed(0)
    save_file(create(Backbone(VIT, 160), 5).state_dict(), folder / f"{VIT}.safetensors")
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sets(tmp_path_factory.mktemp("sets") / "tree", 40)


def options(weights: Path, data: Path, **changes: Any) -> dict[str, Any]:
    """Keys of a configuration."""
    return {
        "run.data": str(data),
        "run.labels": "several",
        "run.minutes": 0,
        "run.weights": str(weights),
        "plan.profiles": ["n100"],
        "plan.latency_ms": 1.0,
        **changes,
    }


def inputs_of(weights: Path, data: Path, **changes: Any) -> BuildInputs:
    return BuildInputs.read(Given(None, options(weights, data, **changes)).build())


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sets(tmp_path_factory.mktemp("scenes") / "scenes", 30, ("left", "right"))


@pytest.fixture(scope="module")
def built(
    weights: Path, scenes: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Bundle, Any, Path]:
    """A bundle of two cameras, its build, and the folder of its pictures' views."""
    folder = tmp_path_factory.mktemp("built")
    inputs = inputs_of(
        weights,
        scenes,
        **{
            "plan.profiles": ["n100", "raspberry-pi-5"],
            "plan.latency_ms": 2.0,
            "plan.cameras": {"n100": "left", "raspberry-pi-5": "right"},
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write, "attach_distance", _refuse)
        found = build_measured(
            inputs, folder / "bundle", RunFolder(folder / "run"), "bundle", Progress()
        )
    return Bundle.open(folder / "bundle"), found, folder


def _refuse(*_: Any) -> None:
    """In place of the distance of features, which is told in the logits' mean."""
    raise AssertionError(attach_distance.__name__)


def test_two_cameras_answer_with_sets_of_labels(built: tuple[Bundle, Any, Path]) -> None:
    bundle, found, _ = built
    manifest = bundle.manifest
    assert manifest.several
    assert manifest.labels == list(CLASSES)
    assert manifest.cascade is None
    fusion = bundle.fusion_weights()
    assert not fusion.novelty
    assert not fusion.agreement
    assert [len(one.thresholds or ()) for one in fusion.subsets] == [3, 3, 3]
    evaluation = manifest.evaluation
    assert evaluation is not None
    alone, together = evaluation.subsets[:2], evaluation.subsets[2]
    # Of a guess 20 % are right.
    assert together.stacked > 0.5
    assert together.stacked >= max(one.stacked for one in alone) - 0.1
    assert evaluation.by_label
    assert [one.members for one in evaluation.by_label] == [(0,), (1,), (0, 1)]
    assert min(evaluation.by_label[2].recall) > 0.3
    low, high = found.pilot.between(evaluation.pictures)
    assert low - 0.15 < together.stacked < high + 0.15


def test_the_models_outputs_are_log_odds_of_each_label(
    built: tuple[Bundle, Any, Path], scenes: Path
) -> None:
    bundle, _, folder = built
    data = open_dataset(str(scenes), cameras=("left", "right"), several=True)
    logits, *_ = run_members(bundle, data, folder, Progress())
    held = data.flags(data.test)
    for one in logits.values():
        shares = sigmoid(one.bag)
        assert shares.mean(axis=0) == pytest.approx(held.mean(axis=0), abs=0.15)
        assert shares[held].mean() > shares[~held].mean() + 0.2
    fusion = bundle.fusion_weights()
    weights = weights_for((0, 1), "stacked", fusion)
    told = labels_held(sigmoid(fuse(logits, weights)), weights)
    evaluation = bundle.manifest.evaluation
    assert evaluation is not None
    assert (told == held).all(axis=1).mean() == pytest.approx(evaluation.subsets[2].stacked)


def test_a_finished_bundle_is_measured_again_on_sets_of_its_labels(
    built: tuple[Bundle, Any, Path], scenes: Path, tmp_path: Path
) -> None:
    bundle, _, _ = built
    again = api.evaluate(bundle.path, data=str(scenes))
    assert bundle.manifest.evaluation is not None
    assert again.evaluation.subsets == bundle.manifest.evaluation.subsets
    odd = write_sets(tmp_path / "odd", 6, ("left", "right"))
    for name in ("cross", "cross+ring"):
        (odd / name).rename(odd / name.replace("cross", "plus"))
    with pytest.raises(InputError, match=r"expected the 3 labels of .* only one .* cross, plus"):
        api.evaluate(bundle.path, data=str(odd))


def test_what_time_is_left_trains_by_binary_cross_entropy(
    weights: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a classifier that knows nothing: every label starts at one half."""

    def know_nothing(features: Any, held: Any, *_: Any) -> Classifier:
        return Classifier(np.zeros((held.shape[1], features.shape[1])), np.zeros(held.shape[1]))

    monkeypatch.setattr(measure, "fit_several", know_nothing)
    inputs = inputs_of(weights, tree, **{"run.minutes": 4, "plan.latency_ms": 1.0})
    run = RunFolder(tmp_path / "run")
    found = build_measured(
        inputs, tmp_path / "bundle", run, "bundle", Progress(), clock=TickingClock()
    )
    (taught,) = found.taught.values()
    losses = taught.record.losses
    assert losses["0"] == pytest.approx(3 * math.log(2), abs=0.01), "summed over the labels"
    assert taught.record.share > 0
    assert losses[f"{taught.record.share:g}"] == min(losses.values())
    assert found.frozen is not None
    # More than how common each label is.
    shares = inputs.data.flags(inputs.data.train).mean(axis=0)
    common = -(shares * np.log(shares) + (1 - shares) * np.log(1 - shares)).sum()
    assert min(losses.values()) < common - 0.1
    frozen, trained = (one.evaluation.subsets[0] for one in (found.frozen, found.report))
    assert trained.stacked >= frozen.stacked
    assert Bundle.open(tmp_path / "bundle").manifest.several


def test_a_set_of_one_item_counts_as_others_do_in_what_is_predicted(tmp_path: Path) -> None:
    """Its labels are known from other sets; of classes a single picture is never right."""
    for name, count in {"cross": 8, "ring": 8, "none": 8, "cross+ring": 1}.items():
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.png").touch()
    data = open_dataset(str(tmp_path), several=True)
    assert (data.train.targets == data.set_names.index("cross+ring")).sum() == 1
    pictures = measure.PilotPictures.of(data, 100)
    assert pictures.remark_on_single(data.set_names) == ""
    apart = replace(pictures, held=None)
    assert apart.remark_on_single(data.set_names).endswith("what is predicted: cross+ring")


def test_a_step_learns_from_a_teachers_answers_to_each_label() -> None:
    held = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    pictures = Pictures(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.arange(2), 2, held)
    draw = Draw(torch.tensor([1, 0]), torch.zeros(2, 4), torch.ones(2), torch.tensor([1.0, 0.75]))
    labels = draw.labels(pictures)
    assert labels.tolist() == [[1.0, 1.0], [1.0, 0.25]], "mixed with the neighbour"
    losses = binary_losses(torch.zeros(2, 2), labels)
    assert losses.tolist() == pytest.approx([2 * math.log(2)] * 2)


def test_the_command_prints_the_shares_of_each_label(
    weights: Path, tree: Path, tmp_path: Path
) -> None:
    out = tmp_path / "bundle"
    words: tuple[object, ...] = ("--weights", weights, "--data", tree, "--profiles", "n100")
    words += ("--latency-ms", "1.0", "--minutes", "0")
    done = run_here(main, "mdp-partition", "build", *words, "--labels", "several", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "every label right" in done.stdout
    for label in CLASSES:
        assert label in done.stdout
    assert "twice as many" not in done.stderr
    told = run_here(main, "mdp-partition", "evaluate", "--bundle", out, "--json")
    assert len(json.loads(told.stdout)["by_label"][0]["recall"]) == 3
    listed = run_here(
        main, "mdp-partition", "data", "--data", tree, "--labels", "several", "--json"
    )
    assert json.loads(listed.stdout)["splits"]["train"]["classes"].keys() == set(SETS)


def test_names_with_markup_stand_in_tables_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in ("train", "test"):
        for name in ("[red]", "cut[b]", "[red]+cut[b]", "none"):
            folder = tmp_path / "[dim]" / place / name
            folder.mkdir(parents=True)
            for number in range(8):
                (folder / f"{number}.png").touch()
    data = open_dataset(str(tmp_path / "[dim]"), several=True)
    tables.print_data(data)
    shares = SubsetLabels(members=(0,), precision=(0.5, None), recall=(0.5, 0.0), each=0.5)
    Console().print(tables._by_label([shares], data.labels))
    shown = capsys.readouterr().out
    assert shown.count("[red]") == 3
    assert "[red]+cut[b]" in shown
    assert "never told" in shown


def test_kept_predictions_are_of_one_kind_of_labels(
    weights: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits = []
    left_out = measure._predict_left_out

    def count(*given: Any) -> Any:
        fits.append(given)
        return left_out(*given)

    monkeypatch.setattr(measure, "_predict_left_out", count)
    counts = []
    for number, labels in enumerate(("several", "several", "one")):
        inputs = inputs_of(weights, tree, **{"run.labels": labels})
        run = RunFolder(tmp_path / "run")
        build_measured(inputs, tmp_path / f"bundle-{number}", run, "bundle", Progress())
        counts.append(len(fits))
    assert counts[0] > 0
    # The classifiers that are served are fitted again, candidates are not.
    assert counts[1] - counts[0] < counts[0]
    assert counts[2] - counts[1] >= counts[0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"plan.teacher": "vit_tiny_patch16_224", "run.minutes": None},
            "run.labels: several labels an item are of a build by measurement",
        ),
        ({"plan.profiles": ["n100*9"]}, "expected at most 8 devices, got 9"),
        ({"run.data": "digits"}, "digits: expected a folder with several labels an item"),
    ],
)
def test_what_a_build_of_several_labels_cannot_do(
    weights: Path, tree: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(InputError, match=told):
        inputs_of(weights, tree, **changes)


def test_a_plan_is_by_measurement_or_has_one_label(
    weights: Path, tree: Path, tmp_path: Path
) -> None:
    given = ("--data", tree, "--labels", "several", "--profiles", "n100", "--latency-ms", "1.0")
    words = ("plan", *given, "--out", tmp_path / "plan.toml")
    done = run_here(main, "mdp-partition", *words, "--weights", weights)
    assert done.returncode == 0, done.stderr
    assert len(read_plan(tmp_path / "plan.toml").assignments) == 1
    done = run_here(main, "mdp-partition", *words, "--teacher", "vit_tiny_patch16_224")
    assert done.returncode == 2
    assert "--labels: several labels an item are of a build by measurement" in done.stderr


def test_a_bundle_of_several_labels_is_neither_quantized_nor_given_rungs(
    built: tuple[Bundle, Any, Path], scenes: Path, tmp_path: Path
) -> None:
    bundle, _, _ = built
    for words in (
        ("quantize", "--bundle", bundle.path, "--data", scenes),
        ("assemble", "--bundle", bundle.path, "--data", scenes, "--rungs", "int8"),
    ):
        done = run_here(main, "mdp-partition", *words, "--out", tmp_path / "out")
        assert done.returncode == 2
        assert "expected a bundle with one label an item" in done.stderr
        assert not (tmp_path / "out").exists()


def test_a_bundle_of_classes_is_not_measured_on_sets_of_labels(
    weights: Path, tmp_path: Path, tree: Path
) -> None:
    plain = write_tree(tmp_path / "plain", each=30)
    inputs = inputs_of(weights, plain, **{"run.labels": "one"})
    build_measured(inputs, tmp_path / "bundle", RunFolder(tmp_path / "run"), "bundle", Progress())
    with pytest.raises(InputError, match=r"cross\+ring, none; labels exclude each other there"):
        api.evaluate(tmp_path / "bundle", data=str(tree))
