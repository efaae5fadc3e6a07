"""Teachers with given weights: other classes by name or by a linear probe, and what is told."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from mdp.errors import InputError  # noqa: E402
from partitioner.build.teacher import TeacherSource  # noqa: E402
from partitioner.data.datasets import Dataset, open_dataset  # noqa: E402
from partitioner.data.memmaps import load_weights  # noqa: E402
from partitioner.export.write import teacher_provenance  # noqa: E402
from partitioner.networks.teacher import Teacher, build_teacher  # noqa: E402
from partitioner.networks.weight_init import init_from  # noqa: E402
from partitioner.run.folder import RunFolder  # noqa: E402
from partitioner.run.settings import TeacherFacts, TrainingConfig  # noqa: E402
from partitioner.training import teacher as teacher_module  # noqa: E402
from partitioner.training.members import initial_member  # noqa: E402
from partitioner.training.teacher import ensure_teacher  # noqa: E402
from tests.support.models.runs import QUIET, config_of, tiny_plan  # noqa: E402
from tests.support.models.training import train  # noqa: E402
from tests.support.models.trees import CLASSES, write_tree  # noqa: E402

pytestmark = pytest.mark.torch
#: What the weights answer: the data's classes among others, one under another name.
NAMES = ["cat", CLASSES[2], "dog", CLASSES[0], "the other"]
ROWS = [3, 4, 1]
#: The checkpoint's own recipe.
RECIPE = {"mean": "0.4,0.5,0.6", "std": "0.2,0.25,0.3"}


@dataclass
class Given:
    """A tree of pictures and a checkpoint of five classes with its labels and a map."""

    folder: Path
    data: Dataset
    source: Teacher

    def training_config(self, *, epochs: int = 0, **options: Any) -> TrainingConfig:
        wanted = config_of(
            self.folder / "tree", epochs=1, teacher_checkpoint=str(self.folder / "t.safetensors"),
            **options,
        )  # fmt: skip
        schedule = msgspec.structs.replace(wanted.teacher_schedule, epochs=epochs)
        return msgspec.structs.replace(wanted, teacher_schedule=schedule)

    def by_name(self) -> TrainingConfig:
        return self.training_config(
            teacher_labels=str(self.folder / "labels.txt"), teacher_map=str(self.folder / "map.tsv")
        )

    def accuracy(self, run: RunFolder) -> float:
        """Of the teacher with a linear probe."""
        teacher = self.source_of(self.training_config())
        run.check_teacher(teacher.facts)
        return teacher.accuracy(run, self.data, QUIET)

    def facts(self, wanted: TrainingConfig) -> TeacherFacts:
        return self.source_of(wanted).facts

    def source_of(self, wanted: TrainingConfig) -> TeacherSource:
        return TeacherSource(PLAN.require_teacher(), wanted, self.data.labels)


def _plan() -> Any:
    plan = tiny_plan()
    assert plan.teacher is not None
    teacher = msgspec.structs.replace(plan.teacher, args=plan.teacher.args | RECIPE)
    return msgspec.structs.replace(plan, teacher=teacher)


PLAN = _plan()


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    folder = tmp_path_factory.mktemp("given")
    tree = write_tree(folder / "tree", each=24)
    torch.manual_seed(0)
    source = build_teacher(PLAN.require_teacher(), 5, pretrained=False).eval()
    with torch.no_grad():
        for weights in source.network.parameters():
            weights.add_(0.3 * torch.randn_like(weights))
    save_file(source.network.state_dict(), folder / "t.safetensors")
    (folder / "labels.txt").write_text("\n".join(NAMES) + "\n")
    (folder / "map.tsv").write_text(f"{CLASSES[1]}\tthe other\n")
    return Given(folder, open_dataset(str(tree)), source)


def train_given(given: Given, run: Path, wanted: TrainingConfig) -> Any:
    return train(RunFolder(run), PLAN, given.data, wanted, QUIET)


def test_rows_cut_by_name_teach_and_are_told(given: Given, tmp_path: Path) -> None:
    work = train_given(given, tmp_path / "run", given.by_name())
    assert (work.settings.teacher.classes, work.settings.teacher.rows) == ("names", ROWS)
    teacher = ensure_teacher(work, None)
    pixels = 255 * torch.rand(4, 3, 12, 12)
    with torch.inference_mode():
        assert torch.allclose(teacher(pixels), given.source(pixels)[:, ROWS], atol=1e-5)
    start = work.new_member(work.plan.assignments[0])
    init_from(start.trunk, given.source)
    found = initial_member(work, work.plan.assignments[0], teacher).trunk.state_dict()
    for name, value in start.trunk.state_dict().items():
        assert torch.equal(found[name], value), name
    told = teacher_provenance(work)
    assert told["teacher_weights"] == f"t.safetensors, sha256 {work.settings.teacher.checkpoint}"
    assert told["teacher_normalisation"] == "mean 0.4 0.5 0.6, std 0.2 0.25 0.3, of pixels 0..1"
    assert told["teacher_pooling"] == "token"
    assert told["teacher_classes"] == "rows of its own classifier, cut by class names"

    # The same weights may lie elsewhere, but no others may go on here.
    moved = tmp_path / "moved.safetensors"
    moved.write_bytes((given.folder / "t.safetensors").read_bytes())
    options = msgspec.structs.replace(given.by_name().options, teacher_checkpoint=str(moved))
    train_given(given, tmp_path / "run", msgspec.structs.replace(given.by_name(), options=options))
    with pytest.raises(InputError, match=r"run: trained with another teacher: .*classes was names"):
        given.accuracy(RunFolder(tmp_path / "run"))


def test_other_classes_get_a_linear_probe_once(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, wanted = RunFolder(tmp_path / "run"), given.training_config()
    share = given.accuracy(run)
    # What it has learned is kept: nothing is fitted or counted again.
    monkeypatch.delattr(teacher_module, "fit_classifier")
    assert given.accuracy(run) == share
    work = train_given(given, run.path, wanted)
    assert work.settings.teacher.classes == "probe"
    answers = np.load(work.run.answers(given.data.calibration.digest[:16]))
    right = int((answers.argmax(axis=1) == given.data.calibration.targets).sum())
    assert share == (right + 0.5) / (len(answers) + 1)
    assert share > 0.5
    with pytest.raises(InputError, match="tree: expected a new, an empty or a run folder"):
        given.accuracy(RunFolder(given.folder / "tree"))


def test_a_linear_probe_is_where_further_training_starts(given: Given, tmp_path: Path) -> None:
    work = train_given(given, tmp_path / "run", given.training_config(epochs=1))
    assert work.settings.teacher_schedule.learning_rate == pytest.approx(1e-4)
    (kept,) = work.run.cache.glob("classifier-*.safetensors")
    probe = load_weights(kept)["weight"]
    network: Any = ensure_teacher(work, None).network
    assert 0 < (network.head.weight - probe).abs().max() < 0.1 * probe.abs().max()


@pytest.mark.parametrize(
    ("file", "content", "options", "message"),
    [
        ("labels.txt", "a\nb\nc\nd\n", {}, "labels.txt: names 4 classes, expected 5: as many as "),
        (
            "map.tsv",
            "",
            {},
            f"has no class named {CLASSES[1]} of the data (1 of 3 classes missing): give "
            "--teacher-map FILE with their names there, or no --teacher-labels for a linear probe",
        ),
        ("none", "", {"teacher_labels": None}, "--teacher-map: expected --teacher-labels beside"),
        ("none", "", {"teacher_checkpoint": None}, "--teacher-labels: expected --teacher-check"),
    ],
)
def test_labels_that_do_not_fit(
    given: Given, tmp_path: Path, file: str, content: str, options: dict[str, Any], message: str
) -> None:
    wanted = given.by_name().options
    changed = {"labels.txt": "teacher_labels", "map.tsv": "teacher_map"}.get(file)
    if changed:
        (tmp_path / file).write_text(content)
        options = {changed: str(tmp_path / file)}
    asked_for = msgspec.structs.replace(
        given.by_name(), options=msgspec.structs.replace(wanted, **options)
    )
    with pytest.raises(InputError, match=re.escape(message)) as told:
        given.facts(asked_for)
    assert "\n" not in str(told.value)
