"""Networks with given weights: measured, chosen, taught the classes, and served."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file

from mdp.errors import InputError
from mdp.formats.bundle import Bundle
from mdp.formats.plan import SubModelSpec, read_plan
from partitioner import api
from partitioner.assembly import write
from partitioner.build.inputs import BuildInputs
from partitioner.build.measured import fine_tuning, training
from partitioner.build.measured.build import MeasuredBuild, build_measured
from partitioner.build.measured.fine_tuning import FineTuningRecipe, fine_tune
from partitioner.cli.main import main
from partitioner.config import Given
from partitioner.data import live_views
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import open_dataset
from partitioner.data.live_views import Drawing
from partitioner.export import evaluate
from partitioner.networks.families import Backbone, FamilyMember, create
from partitioner.networks.feature_distance import features_at
from partitioner.pilot import measure
from partitioner.pilot.features import cut_features
from partitioner.pilot.linear import Classifier, leave_groups_out
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from tests.support.clock import Clock, TickingClock
from tests.support.command_lines import run_here
from tests.support.models.trees import CLASSES, write_scenes, write_tree

pytestmark = pytest.mark.torch
VIT = "test_vit"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small vision transformer, and a network that no catalogue has."""
    folder = tmp_path_factory.mktemp("weights")
    for name in (VIT, "test_efficientnet"):
        torch.manual_seed(0)
        state = create(Backbone(name, 160), 5).state_dict()
        save_file(state, folder / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("pictures") / "tree", each=50)


def inputs_of(weights: Path, data: Path, **options: Any) -> BuildInputs:
    """The inputs of a build of a few milliseconds; `options` are keys of a configuration."""
    return BuildInputs.read(Given(None, given_options(weights, data) | options).build())


def given_options(weights: Path, data: Path) -> dict[str, Any]:
    """Keys of a configuration."""
    return {
        "run.data": str(data),
        "run.weights": str(weights),
        "run.minutes": 0,
        "plan.profiles": ["n100"],
        "plan.latency_ms": 5.0,
    }


def partition(command: str, weights: Path, tree: Path, *words: object) -> CompletedProcess[str]:
    """A command of `mdp-partition` for one device and very few milliseconds."""
    given = ("--weights", weights, "--data", tree, "--profiles", "n100", "--latency-ms", 1.0)
    return run_here(main, "mdp-partition", command, *given, *words)


def know_nothing(features: Any, _: Any, num_classes: int, **__: float) -> Classifier:
    """A classifier that takes all classes for equally likely, in place of a fitted one."""
    return Classifier(np.zeros((num_classes, features.shape[1])), np.zeros(num_classes))


def run(inputs: BuildInputs, out: Path, **options: Any) -> tuple[Bundle, MeasuredBuild]:
    """The bundle, and the outcome of its build."""
    folder = RunFolder(Path(f"{out}.run"))
    found = build_measured(inputs, out, folder, "bundle", Progress(), **options)
    return Bundle.open(out), found


def test_depths_are_measured_and_the_chosen_cut_is_what_the_bundle_serves(
    weights: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []

    def count(name: str, side: int, *rest: Any) -> Any:
        passes.append((name, side))
        return cut_features(name, side, *rest)

    monkeypatch.setattr(measure, "cut_features", count)
    monkeypatch.setattr(write, "features_at", _refuse(features_at, most=0))
    monkeypatch.setattr(write.Assembly, "_estimate", _refuse(write.Assembly._estimate, most=0))
    inputs = inputs_of(weights, tree, **{"plan.latency_ms": 1.5})
    bundle, found = run(inputs, tmp_path / "bundle")
    # One pass at each size measures, and what it found is not computed again.
    assert passes
    assert len(passes) == len(set(passes))
    pilot, depth = found.to_json()["pilot"], len(create(Backbone(VIT, 160), 0).blocks)
    measured = {(one["network"], one["image_size"], one["depth"]) for one in pilot["candidates"]}
    assert {of for of, _, _ in measured} == {VIT}
    assert {layers for _, _, layers in measured} == set(range(1, depth + 1))
    plan, evaluation = bundle.manifest.plan, bundle.manifest.evaluation
    assert plan.target_ms == 1.5
    assert evaluation is not None
    for assignment, member in zip(plan.assignments, evaluation.members, strict=True):
        assert isinstance(assignment.submodel, SubModelSpec)
        chosen = pilot["chosen"][assignment.device]
        assert chosen["network"] == (
            f"{VIT}, first {assignment.submodel.depth} layers at "
            f"{assignment.submodel.image_size} px"
        )
        # A cut with random weights still tells rings from stripes; both were measured by pictures
        # that the classifier had not seen.
        assert member.accuracy > 0.6
        assert member.accuracy == pytest.approx(chosen["accuracy"], abs=0.25)
        assert chosen["latency_ms"] <= 1.5
        assert assignment.predicted_ms.total == pytest.approx(chosen["latency_ms"], abs=1e-3)
    assert bundle.manifest.provenance[f"given_{VIT}"].startswith(f"{VIT}.safetensors, sha256 ")
    together = pilot["together"]
    assert together["low"] < together["accuracy"] <= together["high"] <= 1
    assert not found.taught


def test_features_of_a_depth_are_those_of_the_network_cut_there(weights: Path, tree: Path) -> None:
    pictures = open_dataset(str(tree)).calibration
    (views,) = load_views(pictures, [View(64)], tree.parent / "views", Progress(), "test")
    found = cut_features(VIT, 64, weights / f"{VIT}.safetensors", [1, 2], views, lambda *_: None)
    for depth in (1, 2):
        backbone = Backbone(VIT, 64, depth, "tokens")
        member = FamilyMember(backbone, 3, weights / f"{VIT}.safetensors").eval()
        with torch.inference_mode():
            pixels = torch.from_numpy(np.array(views)).permute(0, 3, 1, 2).float()
            own = member(pixels).feature.numpy()
        # Measured in bf16 where the processor has it.
        assert found[depth] == pytest.approx(own, abs=0.1)


def test_each_device_with_a_camera_is_measured_on_its_own_pictures(
    weights: Path, tmp_path: Path
) -> None:
    scenes = write_scenes(tmp_path / "scenes", each=24)
    inputs = inputs_of(
        weights,
        scenes,
        **{
            "plan.profiles": ["n100", "laptop-cpu"],
            "plan.latency_ms": 1.0,
            "plan.cameras": {"n100": "left", "laptop-cpu": "right"},
        },
    )
    bundle, found = run(inputs, tmp_path / "bundle")
    plan = bundle.manifest.plan
    assert {a.device: a.camera for a in plan.assignments} == {"n100": "left", "laptop-cpu": "right"}
    train = inputs.data.train
    whole = [source for source in train.sources if len(source) == 2]  # type: ignore[arg-type]
    assert found.pilot.count == len(whole) == len(train) - 1
    assert bundle.manifest.labels == sorted(CLASSES)
    evaluation = bundle.manifest.evaluation
    assert evaluation is not None
    assert {subset.members for subset in evaluation.subsets} == {(0,), (1,), (0, 1)}


def test_what_time_is_left_trains_the_chosen_network_and_the_better_weights_are_served(
    weights: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "fit", know_nothing)
    inputs = inputs_of(weights, tree, **{"run.minutes": 1.5, "plan.latency_ms": 1.0})
    bundle, found = run(inputs, tmp_path / "bundle", clock=TickingClock())
    (taught,) = found.taught.values()
    assert taught.record.epochs > 1
    losses = taught.record.losses
    assert losses["0"] == pytest.approx(math.log(3), abs=0.01)
    assert taught.record.share > 0
    assert losses[f"{taught.record.share:g}"] == min(losses.values())
    assert found.frozen is not None
    before, after = (
        report.evaluation.members[0].accuracy for report in (found.frozen, found.report)
    )
    assert after > before
    (words,) = found.to_json()["trained"]
    assert bundle.manifest.provenance[f"trained_{words}"] == taught.words
    assert "trained weights are kept" in taught.words
    assert not list(Path(f"{tmp_path / 'bundle'}.run").glob("checkpoint-*"))


def test_a_network_that_training_made_worse_stays_frozen(
    weights: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: Any, **__: Any) -> FineTuningRecipe:
        return FineTuningRecipe(learning_rate=0.5, classifier_rate=1.0, drawing=Drawing())

    monkeypatch.setattr(training, "recipe_of", too_large)
    inputs = inputs_of(weights, tree, **{"run.minutes": 2.4, "plan.latency_ms": 1.0})
    bundle, found = run(inputs, tmp_path / "bundle", clock=TickingClock())
    (taught,) = found.taught.values()
    assert taught.record.share == 0
    assert taught.path is None
    assert "frozen is kept" in taught.words
    assert found.frozen is None
    assert "trained" not in " ".join(bundle.manifest.provenance)


def test_a_bundle_is_built_at_a_place_relative_to_where_one_stands(
    weights: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inputs = inputs_of(weights, tree, **{"run.minutes": 2.4, "plan.latency_ms": 1.0})
    bundle, found = run(inputs, Path("bundle"), clock=TickingClock())
    assert bundle.manifest.evaluation is not None
    assert found.taught


def test_a_training_holds_no_more_pictures_than_its_memory_takes(
    weights: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []

    def hold(member: FamilyMember, pictures: live_views.Pictures, *rest: Any, **more: Any) -> Any:
        held.append(pictures)
        return fine_tune(member, pictures, *rest, **more)

    # 64 pixels wide, drawn from pictures of 80.
    monkeypatch.setattr(training, "_MEMORY_BYTES", 60 * 3 * 80**2)
    monkeypatch.setattr(training, "fine_tune", hold)
    inputs = inputs_of(weights, tree, **{"run.minutes": 1.2, "plan.latency_ms": 1.0})
    run(inputs, tmp_path / "bundle", clock=TickingClock())
    (pictures,) = held
    assert len(inputs.data.train) > 60
    assert pictures.pixels.shape == (60, 3, 80, 80)
    assert torch.bincount(pictures.targets).min() == 20


def test_too_few_minutes_are_said_and_train_nothing(
    weights: Path, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = inputs_of(weights, tree, **{"run.minutes": 0.1, "plan.latency_ms": 1.0})
    _, found = run(inputs, tmp_path / "bundle", clock=TickingClock())
    assert not found.taught
    shown = capsys.readouterr().err
    assert "s of --minutes 0.1 are left to train it, an epoch of 108 pictures takes" in shown
    assert "epochs of" not in shown
    # Whoever waits sees the choice before anything is trained.
    assert "n100: test_vit, first " in shown
    assert "all together: predicted " in shown


def test_the_minutes_hold_with_the_check_and_the_bundle_of_what_was_trained(
    weights: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that goes on by what each part of the work takes, a picture at a time."""
    clock, took = Clock(), 0.02
    monkeypatch.setattr(measure, "fit", know_nothing)

    def slowly(module: Any, name: str, seconds_of: Callable[..., float]) -> None:
        function = getattr(module, name)

        def slow(*args: Any, **rest: Any) -> Any:
            clock.now_s += seconds_of(*args)
            return function(*args, **rest)

        monkeypatch.setattr(module, name, slow)

    slowly(training, "_cross_entropies", lambda _, views, __: took * len(views))
    # The first pass sets everything up: no measure of the pace.
    first_s = iter([15.0])
    slowly(training, "_predict", lambda *_: next(first_s, 0.0))
    slowly(fine_tuning, "_step", lambda *args: 3 * took * args[5].batch)
    slowly(write, "features_at", lambda _, __, pixels, ___: 2 * took * len(pixels))
    slowly(write, "to_onnx", lambda *_: 4.0)
    slowly(evaluate, "member_contribution", lambda _, pixels, *__: took * len(pixels))
    inputs = inputs_of(weights, tree, **{"run.minutes": 2.0, "plan.latency_ms": 1.0})
    begun_s = clock.now_s
    _, found = run(inputs, tmp_path / "bundle", clock=clock)
    (taught,) = found.taught.values()
    assert taught.path is not None
    assert taught.record.epochs > 3
    assert 90 < clock.now_s - begun_s <= 120


@pytest.mark.parametrize("minutes", [1.0, 3.0])
def test_where_no_epoch_fits_the_minutes_that_would_do_are_said(
    weights: Path, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], minutes: float
) -> None:
    """Also where measuring took the time in which an epoch's pace would be measured."""

    class Slow(Clock):
        """A clock that goes on by ten seconds at each question: a slow network's."""

        def __call__(self) -> float:
            self.now_s += 10
            return self.now_s

    inputs = inputs_of(weights, tree, **{"run.minutes": minutes, "plan.latency_ms": 1.0})
    _, found = run(inputs, tmp_path / "bundle", clock=Slow())
    assert not found.taught
    shown = capsys.readouterr().err
    assert re.search(
        rf"stays frozen: \d+ s of --minutes {minutes:g} are left to train it, an epoch of \d+ "
        r"pictures takes about \d+: --minutes \d+ has time for 6 epochs",
        shown,
    )


def test_a_build_that_was_stopped_goes_on_from_its_checkpoint(
    weights: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(weights, tree, **{"run.minutes": 2.0, "plan.latency_ms": 1.0})

    class Stopped(Exception):
        pass

    class Until(TickingClock):
        def __call__(self) -> float:
            if self.now_s > 60:
                raise Stopped
            return super().__call__()

    with pytest.raises(Stopped):
        run(inputs, tmp_path / "bundle", clock=Until())
    folder = Path(f"{tmp_path / 'bundle'}.run")
    (checkpoint,) = folder.glob("checkpoint-*")
    before = torch.load(checkpoint, weights_only=True)
    assert Bundle.open(tmp_path / "bundle").manifest.evaluation is not None
    monkeypatch.setattr(measure, "leave_groups_out", _refuse(leave_groups_out, most=1))
    _, found = run(inputs, tmp_path / "bundle", clock=TickingClock())
    (taught,) = found.taught.values()
    assert taught.record.seconds == pytest.approx(before["planned"], abs=3)
    assert taught.record.seconds > before["seconds"] > 20


def _refuse(function: Callable[..., Any], most: int) -> Callable[..., Any]:
    """`function`, which may be called `most` times: what is kept is not computed again."""
    left = iter(range(most))

    def counted(*args: Any) -> Any:
        next(left)
        return function(*args)

    return counted


def test_weights_of_another_folder_are_not_taken_for_a_run(
    weights: Path, tree: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bundle.run"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="expected a new, an empty or a run folder"):
        run(inputs_of(weights, tree), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_where_nothing_fits_no_run_folder_is_left(
    weights: Path, tree: Path, tmp_path: Path
) -> None:
    """Whoever then trains a teacher instead is not told that the folder is another build's."""
    with pytest.raises(InputError, match=r"nothing fits 'n100'"):
        run(inputs_of(weights, tree, **{"plan.latency_ms": 0.01}), tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_build_by_measurement_is_not_that_of_a_training(
    weights: Path, tree: Path, tmp_path: Path
) -> None:
    run(inputs_of(weights, tree, **{"plan.latency_ms": 1.0}), tmp_path / "bundle")
    with pytest.raises(InputError, match=r"bundle\.run: .* found that of a build by measurement"):
        RunFolder(tmp_path / "bundle.run").check_new()


def test_a_finished_build_is_made_again_from_what_is_kept(
    weights: Path, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(weights, tree, **{"plan.latency_ms": 1.0})
    first, _ = run(inputs, tmp_path / "bundle")
    kept = list((tmp_path / "bundle.run" / "pilot").glob("*.npz"))
    assert kept
    monkeypatch.setattr(measure, "cut_features", _refuse(cut_features, most=1))
    again, _ = run(inputs, tmp_path / "bundle")
    assert again.digest == first.digest
    # A damaged file is measured anew, and what a killed build left is removed.
    kept[0].write_bytes(b"not a file of numpy")
    left = tmp_path / "bundle.run" / "members-killed"
    left.mkdir()
    (left / "member-0.safetensors").write_bytes(b"half")
    monkeypatch.undo()
    assert run(inputs, tmp_path / "bundle")[0].digest == first.digest
    assert not left.exists()


def test_a_plan_is_made_by_measurement_too(weights: Path, tree: Path, tmp_path: Path) -> None:
    done = partition("plan", weights, tree, "--out", tmp_path / "plan.toml")
    assert done.returncode == 0, done.stderr
    assert "* n100: test_vit, first " in done.stdout
    assert "all together: predicted " in done.stdout
    plan = read_plan(tmp_path / "plan.toml")
    (one,) = plan.assignments
    assert one.predicted_ms.total < plan.target_ms == 1.0
    assert "of pictures left out of its fit" in one.why


def test_the_command_prints_what_was_predicted_beside_what_was_measured(
    weights: Path, tree: Path, tmp_path: Path
) -> None:
    out, folder = tmp_path / "bundle", tmp_path / "run"
    words = ("--minutes", 0, "--out", out, "--run", folder)
    done = partition("build", weights, tree, *words)
    assert done.returncode == 0, done.stderr
    share = r"[\d.]+%"
    predicted = rf"predicted {share} \({share} to {share} on a test split of 30\), measured {share}"
    assert re.search(predicted, done.stdout)
    digest = Bundle.open(out).digest
    assert f"{out}: 1 sub-model, digest {digest}" in done.stdout
    # The run folder keeps what was measured, and no pictures or weights that are in the bundle.
    assert {path.name for path in folder.iterdir()} == {".lock", "cache", "measured.json", "pilot"}
    assert not list((folder / "cache").iterdir())
    # It knows its pictures: measured on them again the bundle has the same accuracies.
    again = run_here(main, "mdp-partition", "evaluate", "--bundle", out, "--run", folder, "--json")
    assert again.returncode == 0, again.stderr
    before = Bundle.open(out).manifest.evaluation
    assert before is not None
    assert json.loads(again.stdout)["members"][0]["accuracy"] == before.members[0].accuracy
    refused = partition("build", weights, tree, *words, "--crew", tmp_path)
    assert refused.returncode == 2
    assert "--crew: a build by measurement trains on this machine" in refused.stderr
    assert Bundle.open(out).digest == digest
    # From Python it is the same build, which goes on from what the command kept.
    config = Given(None, given_options(weights, tree) | {"plan.latency_ms": 1.0}).build()
    report = api.build(config, out, run=folder)
    assert Bundle.open(out).digest == digest
    assert Bundle.open(out).manifest.evaluation == report.evaluation


def test_cameras_of_like_devices_share_one_network_in_training(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pictures of a scene that lacks a camera are trained on as well."""
    held = []

    def hold(member: FamilyMember, pictures: live_views.Pictures, *rest: Any, **more: Any) -> Any:
        held.append(pictures)
        return fine_tune(member, pictures, *rest, **more)

    monkeypatch.setattr(training, "fine_tune", hold)
    scenes = write_scenes(tmp_path / "scenes", each=24)
    inputs = inputs_of(
        weights,
        scenes,
        **{
            "plan.profiles": ["n100*2"],
            "plan.latency_ms": 1.0,
            "plan.cameras": {"n100-1": "left", "n100-2": "right"},
            "run.minutes": 2.0,
        },
    )
    bundle, found = run(inputs, tmp_path / "bundle", clock=TickingClock())
    assert len(set(found.pilot.choice.rows.values())) == 1
    (taught,) = found.taught.values()
    assert taught.record.epochs > 0
    assert inputs.data.incomplete == {"right": 1}
    (pictures,) = held
    assert len(pictures.pixels) == 2 * len(inputs.data.train) - 1
    first, second = bundle.manifest.plan.assignments
    assert (first.camera, second.camera) == ("left", "right")
    # Each file also tells the distance of its own camera's features.
    made_of = bundle.manifest.provenance
    assert made_of["model_0"] == made_of["model_1"]
