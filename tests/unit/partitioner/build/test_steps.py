"""A tiny run, step by step: what is trained, kept, exported, measured, and done only once."""

import dataclasses
import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mdp.errors import ConfigError, InputError, PlanRefused  # noqa: E402
from mdp.formats.bundle import Bundle  # noqa: E402
from mdp.formats.plan import TeacherSpec  # noqa: E402
from mdp.fusion.fuse import fuse, list_subsets, weights_for  # noqa: E402
from mdp.runtimes.onnxruntime import open_session  # noqa: E402
from partitioner.build import steps  # noqa: E402
from partitioner.build.inputs import TrainingInputs  # noqa: E402
from partitioner.build.settings import run_settings  # noqa: E402
from partitioner.data.datasets import Dataset, open_dataset  # noqa: E402
from partitioner.data.memmaps import load  # noqa: E402
from partitioner.data.variants import Variants  # noqa: E402
from partitioner.export import write as export  # noqa: E402
from partitioner.export.evaluate import Report, evaluate, subset_accuracies, write_report  # noqa: E402
from partitioner.export.sessions import member_contribution, open_member, run_session  # noqa: E402
from partitioner.networks.weight_init import TrainedMember, init_from  # noqa: E402
from partitioner.run.folder import RunFolder  # noqa: E402
from partitioner.run.progress import Progress  # noqa: E402
from partitioner.run.settings import Teaching  # noqa: E402
from partitioner.training import loop, members  # noqa: E402
from partitioner.training.context import TrainingContext  # noqa: E402
from partitioner.training.members import initial_member  # noqa: E402
from partitioner.training.teacher import ensure_teacher  # noqa: E402
from tests.support.models.runs import CHAINED, QUIET, config_of, spec, tiny_plan  # noqa: E402
from tests.support.models.training import train  # noqa: E402
from tests.support.models.trees import CLASSES, write_tree  # noqa: E402

pytestmark = pytest.mark.torch


@dataclass
class Built:
    """A finished tiny run and its bundle."""

    work: TrainingContext
    tree: Path
    bundle: Path
    errors: dict[int, float]

    @property
    def data(self) -> Dataset:
        return self.work.data


def train_tiny(tree: Path, run: Path, **options: Any) -> TrainingContext:
    return train(
        RunFolder(run), tiny_plan(), open_dataset(str(tree)), config_of(tree, **options), QUIET
    )


def read_test_answers(work: TrainingContext) -> np.ndarray:
    return load(work.run.answers(work.data.test.digest[:16]))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    tree = write_tree(folder / "tree", each=40)
    work = train_tiny(tree, folder / "b.run", epochs=12, schedule=CHAINED)
    errors = steps.export_step(work, folder / "b", "patterns")
    assert errors is not None
    return Built(work, tree, folder / "b", errors)


@pytest.fixture(scope="module")
def short(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch, for tests to copy and change."""
    run = tmp_path_factory.mktemp("short") / "run"
    return train_tiny(built.tree, run, epochs=1, schedule=CHAINED).run.path


@pytest.fixture
def traced(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """The members of `built` are not traced once more: that takes seconds each."""
    models = {
        a.vit.image_size: (built.bundle / f"submodels/{a.k}/model.onnx").read_bytes()
        for a in built.work.plan.assignments
    }
    monkeypatch.setattr(export, "to_onnx", lambda module, image_size, *_: models[image_size])


def test_a_finished_run_has_weights_curves_and_no_checkpoints(built: Built) -> None:
    names = {path.name for path in built.work.run.path.iterdir()}
    assert {"settings.json", "plan.toml", "teacher.safetensors", "curves.json"} <= names
    assert {"member-0.safetensors", "member-1.safetensors"} <= names
    assert not [name for name in names if name.startswith("checkpoint")]
    curves = msgspec.json.decode(built.work.run.curves.read_bytes())
    assert {name: len(curve) for name, curve in curves.items()} == {
        "teacher": 12, "member-0": 12, "member-1": 8,
    }  # fmt: skip
    assert "stack" not in curves["member-0"][0]
    assert curves["member-1"][-1]["stack"] < curves["member-1"][0]["stack"]
    assert curves["member-0"][-1]["boost"] < curves["member-0"][0]["boost"]


def test_the_sum_and_the_feature_are_kept_for_the_successor(built: Built) -> None:
    work, kept = built.work, built.work.run.predecessors
    first = work.plan.assignments[0]
    seen, index = work.member_pixels(first, "train"), np.arange(7)
    pixels = torch.from_numpy(np.array(seen[index])).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.inference_mode():
        output = work.load_member(first)(pixels)
    assert np.allclose(load(kept / "sum-0-0.npy")[index], output.boost, atol=2e-2)
    assert np.allclose(load(kept / "feature-0-0.npy")[index], output.feature, atol=2e-2)


def test_a_finished_run_only_fills_gaps(built: Built, short: Path, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(short, tmp_path / "run"))
    shutil.rmtree(run.predecessors)
    train_tiny(built.tree, run.path, epochs=1, schedule=CHAINED)
    assert not run.predecessors.exists()
    wanted = run.member(1).read_bytes()
    run.member(1).unlink()
    train_tiny(built.tree, run.path, epochs=1, schedule=CHAINED)
    assert run.member(1).read_bytes() == wanted


def test_later_members_may_be_trained_for_fewer_epochs(built: Built, tmp_path: Path) -> None:
    schedule = CHAINED | {"later_share": 0.5}
    work = train_tiny(built.tree, tmp_path / "run", epochs=2, schedule=schedule)
    curves = msgspec.json.decode(work.run.curves.read_bytes())
    assert {name: len(curve) for name, curve in curves.items()} == {
        "teacher": 2, "member-0": 2, "member-1": 1,
    }  # fmt: skip
    # One epoch sees one variant, so nobody asks member 0 about the other one.
    assert {path.name for path in work.run.predecessors.iterdir()} == {
        "sum-0-0.npy", "feature-0-0.npy",
    }  # fmt: skip


@pytest.mark.parametrize("start", ["auto", "teacher"])
def test_later_members_start_from_an_earlier_one(built: Built, start: str) -> None:
    schedule = msgspec.structs.replace(built.work.settings.schedule, start=start)
    settings = msgspec.structs.replace(built.work.settings, schedule=schedule)
    work = dataclasses.replace(built.work, settings=settings)
    teacher = ensure_teacher(work, None)
    earlier = work.load_member(work.plan.assignments[0])
    later = work.plan.assignments[1]
    expected = work.new_member(later)
    init_from(expected.trunk, TrainedMember(earlier.trunk) if start == "auto" else teacher)
    found = initial_member(work, later, teacher).trunk.state_dict()
    for name, value in expected.trunk.state_dict().items():
        assert torch.equal(found[name], value), name


def test_a_member_larger_than_those_before_starts_from_the_teacher(built: Built) -> None:
    first, second = built.work.plan.assignments
    # Their order turned round: 12 px and 8 wide first, which 16 wide cannot be cut from.
    turned = [
        msgspec.structs.replace(second, k=0, submodel=second.submodel),
        msgspec.structs.replace(first, k=1),
    ]
    plan = msgspec.structs.replace(built.work.plan, assignments=turned)
    run = RunFolder(built.work.run.path)
    run.member = lambda k: built.work.run.member(1 - k)  # type: ignore[method-assign]
    work = dataclasses.replace(built.work, run=run, plan=plan)
    teacher = ensure_teacher(work, None)
    expected = work.new_member(turned[1])
    init_from(expected.trunk, teacher)
    found = initial_member(work, turned[1], teacher).trunk.state_dict()
    for name, value in expected.trunk.state_dict().items():
        assert torch.equal(found[name], value), name


def test_teacher_answers_are_kept_for_every_split_and_variant(built: Built) -> None:
    run, data = built.work.run, built.data
    digest = built.work.variants.digest
    shapes = {path.name: load(path).shape for path in run.cache.glob("teacher-*.npy")}
    assert shapes == {
        run.answers(f"{digest}-0-logits").name: (len(data.train), 3),
        run.answers(f"{digest}-1-logits").name: (len(data.train), 3),
        run.answers(data.calibration.digest[:16]).name: (len(data.calibration), 3),
        run.answers(data.test.digest[:16]).name: (len(data.test), 3),
    }
    assert np.abs(read_test_answers(built.work).mean(axis=1)).max() < 1e-5


def test_another_teacher_would_be_asked_anew(built: Built, tmp_path: Path) -> None:
    other = RunFolder(tmp_path)
    other.teacher.write_bytes(built.work.run.teacher.read_bytes() + b" ")
    assert other.answers("x").name != built.work.run.answers("x").name


def test_the_seed_decides_the_weights(built: Built, short: Path, tmp_path: Path) -> None:
    second = train_tiny(built.tree, tmp_path / "two", epochs=1, schedule=CHAINED)
    third = train_tiny(built.tree, tmp_path / "three", epochs=1, seed=1, schedule=CHAINED)
    runs = (RunFolder(short), second.run, third.run)
    weights = [run.member(1).read_bytes() for run in runs]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


def test_the_bundle_is_whole_and_says_where_it_comes_from(built: Built) -> None:
    bundle = Bundle.open(built.bundle)
    manifest = bundle.manifest
    assert manifest.labels == list(CLASSES)
    assert manifest.plan == tiny_plan()
    for name in manifest.files:
        bundle.verified(name)
    assert "re-implemented from the abstract" in manifest.provenance["method"]
    assert manifest.provenance["torch"] == metadata.version("torch")
    assert [s.members for s in bundle.fusion_weights().subsets] == list_subsets([0, 1])
    assert manifest.evaluation is None


def plan_in(built: Built, precision: str) -> TrainingContext:
    """The same run, as if its first sub-model had been planned in another precision."""
    first, second = built.work.plan.assignments
    submodel = msgspec.structs.replace(first.vit, precision=precision)
    assignments = [msgspec.structs.replace(first, submodel=submodel), second]
    plan = msgspec.structs.replace(built.work.plan, assignments=assignments)
    return dataclasses.replace(built.work, plan=plan)


@pytest.mark.usefixtures("traced")
def test_a_planned_precision_is_exported_and_fused_as_it_is(built: Built, tmp_path: Path) -> None:
    import onnx

    export.export_bundle(plan_in(built, "int8"), tmp_path / "b", "patterns")
    bundle, before = Bundle.open(tmp_path / "b"), Bundle.open(built.bundle)
    model = onnx.load(bundle.verified("submodels/0/model.onnx"))
    assert "MatMulInteger" in {node.op_type for node in model.graph.node}
    assert bundle.manifest.files["submodels/1/model.onnx"].sha256 == (
        before.manifest.files["submodels/1/model.onnx"].sha256
    )
    ours, theirs = bundle.fusion_weights().subsets, before.fusion_weights().subsets
    assert ours[0] != theirs[0]
    assert ours[1] == theirs[1]


@pytest.mark.usefixtures("traced")
def test_ranges_need_more_pictures_than_there_are(built: Built, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="int8-static: expected at least 32 calibration pictures"):
        export.export_bundle(plan_in(built, "int8-static"), tmp_path / "b", "patterns")
    assert not list(tmp_path.iterdir())
    work = plan_in(built, "int8-static")
    with pytest.raises(InputError, match=r"^sub-model 0 for \S+ could not .*: int8-static: expect"):
        steps.check_members(work.plan, work.data)


def test_models_carry_essentials_and_no_path_of_this_machine(built: Built) -> None:
    import onnx

    path = built.bundle / "submodels/1/model.onnx"
    model = onnx.load(path)
    properties = {entry.key: entry.value for entry in model.metadata_props}
    assert properties == {
        "mdp_format_version": "1", "mdp_bundle": "patterns", "mdp_k": "1",
        "mdp_device": "beta", "mdp_image_size": "12", "mdp_num_classes": "3",
        "mdp_precision": "fp32",
    }  # fmt: skip
    content = path.read_bytes()
    assert str(Path(torch.__file__).parent.parent).encode() not in content
    assert b"stack_trace" not in content


def test_models_take_any_batch_of_bytes(built: Built) -> None:
    session = open_session(built.bundle / "submodels/0/model.onnx")
    (given,) = session.get_inputs()
    assert (given.name, given.type, given.shape[1:]) == ("images", "tensor(uint8)", [8, 8, 3])
    assert isinstance(given.shape[0], str)
    assert [output.name for output in session.get_outputs()] == ["boost", "bag"]
    pixels = np.random.default_rng(0).integers(0, 256, (11, 8, 8, 3), dtype=np.uint8)
    (alone,), (together,) = (run_session(session, pixels, ["bag"], batch) for batch in (1, 11))
    assert np.allclose(alone, together, atol=1e-5)


def test_parity_was_measured_and_a_wrong_model_is_an_error(built: Built, tmp_path: Path) -> None:
    assert set(built.errors) == {0, 1}
    assert max(built.errors.values()) < 1e-4
    member = built.work.load_member(built.work.plan.assignments[0])
    with torch.no_grad():
        member.bag.bias[1] += 0.01
    pixels = built.work.member_pixels(built.work.plan.assignments[0], "test")
    with pytest.raises(export.ParityError, match=r"differs from torch by 1\.00e-02 on 24 pictures"):
        export.check_parity(
            built.bundle / "submodels/0/model.onnx", export.ServedMember(member), pixels,
            ["boost", "bag"],
        )  # fmt: skip


def measure(bundle: Bundle, data: Dataset, run: RunFolder | None) -> Report:
    with TemporaryDirectory() as cache:
        return evaluate(bundle, data, run, Path(cache), QUIET)


def test_evaluation_is_what_fusion_of_the_files_gives(built: Built) -> None:
    bundle = Bundle.open(built.bundle)
    report = measure(bundle, built.data, built.work.run)
    write_report(bundle, report)
    evaluation = Bundle.open(built.bundle).manifest.evaluation
    assert evaluation == report.evaluation
    assert evaluation.pictures == 24
    assert evaluation.data_digest == built.data.test.digest
    contributions = {}
    for assignment in bundle.manifest.plan.assignments:
        runtime = open_member(bundle.model(assignment.k), assignment, len(bundle.manifest.labels))
        pixels = built.work.member_pixels(assignment, "test")
        contributions[assignment.k] = member_contribution(runtime, pixels, assignment)
    weights = weights_for((0, 1), "stacked", bundle.fusion_weights())
    right = fuse(contributions, weights).argmax(axis=1) == built.data.test.targets
    assert bundle.expected_accuracy((0, 1), "stacked") is None
    assert Bundle.open(built.bundle).expected_accuracy((0, 1), "stacked") == right.mean()
    assert evaluation.subsets == subset_accuracies(
        contributions, bundle.fusion_weights(), built.data.test.targets
    )
    assert evaluation.teacher is not None
    assert evaluation.teacher.accuracy > 0.8
    assert evaluation.members[0].accuracy > 0.6


def never_evaluated(path: Path) -> Bundle:
    return Bundle(path, msgspec.structs.replace(Bundle.open(path).manifest, evaluation=None))


def test_without_the_run_the_teacher_is_left_out(built: Built) -> None:
    bundle = never_evaluated(built.bundle)
    with_run = measure(bundle, built.data, built.work.run).evaluation
    without = measure(bundle, built.data, None).evaluation
    assert without.teacher is None
    assert without.subsets == with_run.subsets


def test_other_pictures_ask_the_teacher_anew(built: Built, tmp_path: Path) -> None:
    other = open_dataset(str(write_tree(tmp_path / "other", each=10, seed=9)))
    bundle = Bundle.open(built.bundle)
    report = measure(bundle, other, built.work.run)
    assert report.evaluation.pictures == 6
    assert report.evaluation.teacher is not None


def test_the_exported_teacher_answers_as_the_trained_one(built: Built) -> None:
    pixels = built.work.teacher_pixels("test")
    (logits,) = run_session(open_session(built.work.run.teacher_onnx), pixels, ["logits"])
    kept = read_test_answers(built.work)
    assert np.allclose(logits - logits.mean(axis=1, keepdims=True), kept, atol=1e-4)


def test_other_classes_are_refused(built: Built, tmp_path: Path) -> None:
    other = open_dataset(str(write_tree(tmp_path, each=5, classes=("cross", "ring"))))
    with pytest.raises(InputError, match=r"expected the 3 classes of .*, but only one .* stripes"):
        measure(Bundle.open(built.bundle), other, None)


@pytest.mark.usefixtures("traced")
def test_a_damaged_bundle_is_exported_again(built: Built, tmp_path: Path) -> None:
    out = tmp_path / "b"
    shutil.copytree(built.bundle, out)
    assert steps.export_step(built.work, out, "patterns") is None
    (out / "fusion.json").write_text("{}")
    assert steps.export_step(built.work, out, "patterns") is not None
    Bundle.open(out).fusion_weights()


@pytest.mark.usefixtures("traced")
def test_pictures_of_no_class_that_came_since_are_fitted_to(built: Built, tmp_path: Path) -> None:
    out, data = tmp_path / "b", built.work.data
    shutil.copytree(built.bundle, out)
    known = dataclasses.replace(data, unknown=data.test)
    work = dataclasses.replace(built.work, data=known)
    assert steps.export_step(work, out, "patterns") is not None
    bundle = Bundle.open(out)
    assert bundle.manifest.provenance["unknown_digest"] == data.test.digest
    novelty = bundle.fusion_weights().novelty
    assert novelty
    assert novelty.unknown == len(data.test)
    assert steps.export_step(work, out, "patterns") is None


def test_something_else_is_not_replaced(built: Built, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(InputError, match="expected a new folder or a bundle to replace"):
        steps.export_step(built.work, tmp_path, "patterns")
    (tmp_path / "manifest.json").write_text('{"name": "other tool"}')
    with pytest.raises(ConfigError, match=r"manifest\.json"):
        steps.export_step(built.work, tmp_path, "patterns")
    assert (tmp_path / "mine").read_text() == "keep"


@contextmanager
def one_picture_more(tree: Path) -> Iterator[None]:
    """The tree as somebody adds to it, until the end of the block."""
    picture = tree / "ring" / "new.png"
    picture.write_bytes((tree / "ring" / "000.png").read_bytes())
    try:
        yield
    finally:
        picture.unlink()


def test_nothing_is_measured_on_pictures_that_may_have_been_trained_on(built: Built) -> None:
    bundle, run = Bundle.open(built.bundle), built.work.run
    with steps.inputs_of(bundle, run.path, None) as inputs:
        assert inputs.data.train.digest == built.data.train.digest
    expected = r"train split changed since .*b\.run was made"
    with one_picture_more(built.tree), pytest.raises(InputError, match=expected):
        steps.inputs_of(bundle, run.path, None).__enter__()
    moved = built.tree.rename(built.tree.parent / "moved")
    try:
        with pytest.raises(InputError, match=r"tree: not there any more.*name the pictures with"):
            steps.inputs_of(bundle, run.path, None).__enter__()
    finally:
        moved.rename(built.tree)


def test_another_runs_teacher_is_left_out(built: Built, short: Path, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(short, tmp_path / "other.run"))
    shutil.copy(built.work.run.teacher_onnx, run.teacher_onnx)
    bundle = never_evaluated(built.bundle)
    report = measure(bundle, built.data, run)
    assert report.evaluation.teacher is None
    report = measure(bundle, built.data, built.work.run)
    assert report.evaluation.teacher is not None


def test_damaged_weights_are_named(built: Built, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(built.work.run.path, tmp_path / "run"))
    work = dataclasses.replace(built.work, run=run)
    for path in (run.teacher, run.member(0)):
        kept = path.read_bytes()
        path.write_bytes(kept[:100])
        if path == run.teacher:
            run.teacher_onnx.unlink()
        with pytest.raises(InputError, match=f"{path.name}: damaged; remove it to have it made"):
            export.export_bundle(work, tmp_path / "b", "b")
        path.write_bytes(kept)
        shutil.copy(built.work.run.teacher_onnx, run.teacher_onnx)


def test_a_teacher_that_knows_nothing_is_refused(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", each=8)
    with pytest.raises(InputError, match=r"does not know these 3 classes: give --teacher-epochs N"):
        train(
            RunFolder(tmp_path / "run"), tiny_plan(), open_dataset(str(tree)),
            msgspec.structs.replace(
                config_of(tree), teacher_schedule=msgspec.structs.replace(
                    config_of(tree).teacher_schedule, epochs=0
                )
            ),
            QUIET,
        )  # fmt: skip


def test_a_given_checkpoint_teaches_as_it_is(built: Built, tmp_path: Path) -> None:
    tree, checkpoint = built.tree, str(built.work.run.teacher)
    wanted = config_of(tree, epochs=1, teacher_checkpoint=checkpoint)
    wanted = msgspec.structs.replace(
        wanted, teacher_schedule=msgspec.structs.replace(wanted.teacher_schedule, epochs=0)
    )
    work = train(RunFolder(tmp_path / "run"), tiny_plan(), open_dataset(str(tree)), wanted, QUIET)
    assert np.array_equal(read_test_answers(work), read_test_answers(built.work))
    assert work.settings.teacher.checkpoint is not None
    assert work.settings.teacher_schedule.learning_rate == pytest.approx(1e-4)


def test_photographs_are_mirrored_and_digits_are_not(built: Built) -> None:
    spec_ = tiny_plan().require_teacher()
    photographs = run_settings(TrainingInputs.of(config_of(built.tree), built.data, spec_))
    digits = run_settings(TrainingInputs.of(config_of("digits"), open_dataset("digits"), spec_))
    assert (photographs.augmentation.flip, digits.augmentation.flip) == (True, False)
    wanted = msgspec.structs.replace(
        config_of("digits"),
        augmentation=msgspec.structs.replace(config_of("").augmentation, flip=True),
    )
    found = run_settings(TrainingInputs.of(wanted, open_dataset("digits"), spec_))
    assert found.augmentation.flip is True


def test_a_run_of_settings_that_are_gone_is_refused_by_key(short: Path, tmp_path: Path) -> None:
    run = RunFolder(shutil.copytree(short, tmp_path / "run"))
    settings = msgspec.json.decode(run.settings_file.read_bytes())
    settings["schedule"]["boost_target"] = "probabilities"
    run.settings_file.write_bytes(msgspec.json.encode(settings))
    with pytest.raises(ConfigError, match=r"settings\.json.*boost_target"):
        steps.reopen(run, QUIET)


def test_a_class_without_a_calibration_picture_is_named(tmp_path: Path) -> None:
    data = open_dataset(str(write_tree(tmp_path / "tree", each=8)))
    calibration = dataclasses.replace(
        data.calibration, targets=np.zeros_like(data.calibration.targets)
    )
    with pytest.raises(InputError, match="every class in the calibration split, found none of ri"):
        train(
            RunFolder(tmp_path / "run"), tiny_plan(),
            dataclasses.replace(data, calibration=calibration), config_of(tmp_path / "tree"), QUIET,
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_plans_that_cannot_be_trained(tmp_path: Path) -> None:
    data = open_dataset("digits")
    run = RunFolder(tmp_path / "run")
    refused = msgspec.structs.replace(tiny_plan(), refused=True, reason="no use")
    with pytest.raises(PlanRefused, match="no use"):
        train(run, refused, data, config_of("digits"), QUIET)
    teacher = TeacherSpec(
        name="vit_tiny_patch16_224", args=tiny_plan().require_teacher().args, shape=spec(16, 24)
    )
    wrong = msgspec.structs.replace(tiny_plan(), teacher=teacher)
    with pytest.raises(ConfigError, match=r"teacher.*shape\.image_size was 16, is now 12"):
        train(run, wrong, data, config_of("digits"), QUIET)
    assert not run.path.exists()


def pictures_of(run: RunFolder) -> dict[str, int]:
    """The cut pictures of a run folder, by the beginning of their names, in bytes."""
    found: dict[str, int] = {}
    for kind in ("views", "view", "canvas", "labels"):
        sizes = [path.stat().st_size for path in run.cache.glob(f"{kind}-*.npy")]
        found |= {kind: sum(sizes)} if sizes else {}
    return found


@pytest.mark.parametrize("teaching", ["kept", "live"])
def test_the_room_for_pictures_is_known_before(
    teaching: Teaching, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "remove_pictures", lambda *_: None)
    monkeypatch.setattr(Variants, "remove_views", lambda *_: None)
    monkeypatch.setattr(Variants, "_remove_base", lambda *_: None)
    said = io.StringIO()
    work = train(
        RunFolder(tmp_path), tiny_plan(), built.data,
        config_of(built.tree, epochs=2, teaching=teaching), Progress(said),
    )  # fmt: skip
    header_bytes = 128
    files = len(list(work.run.cache.glob("[vc][ia]*-*.npy")))
    there = sum(pictures_of(work.run).values())
    assert there == work.picture_bytes() + files * header_bytes
    room = f"{tmp_path}: takes up to {work.picture_bytes() / 1e6:,.0f} MB of cut pictures"
    assert room in said.getvalue()


def test_a_finished_training_keeps_no_pictures_and_can_be_repeated_in_part(
    built: Built, tmp_path: Path
) -> None:
    work = train_tiny(built.tree, tmp_path, epochs=2, schedule=CHAINED)
    assert set(pictures_of(work.run)) == {"views"}
    digests = {path.name.split("-")[1] for path in work.run.cache.glob("views-*")}
    assert digests == {work.data.calibration.digest[:16], work.data.test.digest[:16]}
    wanted = work.run.member(1).read_bytes()
    work.run.member(1).unlink()
    again = train_tiny(built.tree, tmp_path, epochs=2, schedule=CHAINED)
    assert again.run.member(1).read_bytes() == wanted
    assert set(pictures_of(again.run)) == {"views"}
    # Nothing is cut for a training that is finished.
    work.run.remove_pictures()
    assert not work.run.predecessors.exists()
    train_tiny(built.tree, tmp_path, epochs=2, schedule=CHAINED)
    assert pictures_of(work.run) == {}


def test_variants_are_not_kept_longer_than_they_are_needed(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    fit = loop.train_stage

    def spied(*args: Any) -> Any:
        found = fit(*args)
        cache = tmp_path / "cache"
        seen.append(sorted(path.name[:10] for path in cache.glob("view-*")))
        return found

    monkeypatch.setattr(members, "train_stage", spied)
    work = train_tiny(built.tree, tmp_path, epochs=2)
    # The teacher's are gone once it answered; the second sub-model sees one variant.
    assert seen == [["view-8px-0"], []]
    assert not list(work.run.cache.glob("view-*"))


def test_an_evaluation_leaves_no_pictures_of_its_own(built: Built, tmp_path: Path) -> None:
    shutil.copytree(built.work.run.path, tmp_path / "run")
    run = RunFolder(tmp_path / "run")
    run.remove_pictures()
    bundle = Bundle.open(built.bundle)
    with steps.inputs_of(bundle, run.path, None) as inputs:
        assert inputs.run is not None
        evaluate(bundle, inputs.data, inputs.run, inputs.cache, QUIET)
        assert pictures_of(run)
    assert pictures_of(run) == {}
