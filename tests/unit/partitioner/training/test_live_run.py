"""A run that is taught live: what it asks, what it keeps, and what it refuses."""

import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mdp.errors import InputError  # noqa: E402
from mdp.formats.plan import NetworkSpec, Plan  # noqa: E402
from partitioner.build import settings  # noqa: E402
from partitioner.data.datasets import open_dataset  # noqa: E402
from partitioner.data.live_views import Draw  # noqa: E402
from partitioner.run.folder import RunFolder  # noqa: E402
from partitioner.run.progress import Progress  # noqa: E402
from partitioner.run.settings import TrainingConfig  # noqa: E402
from partitioner.training import live  # noqa: E402
from partitioner.training.context import TrainingContext  # noqa: E402
from partitioner.training.loop import TrainingDiverged  # noqa: E402
from partitioner.training.losses import centre  # noqa: E402
from partitioner.training.student import BatchTargets  # noqa: E402
from partitioner.training.teacher import ensure_teacher  # noqa: E402
from partitioner.training.world import World  # noqa: E402
from tests.support.models.runs import CHAINED, QUIET, config_of, tiny_plan  # noqa: E402
from tests.support.models.training import train  # noqa: E402
from tests.support.models.trees import write_tree  # noqa: E402

pytestmark = pytest.mark.torch


def plan() -> Plan:
    """A network, and a plain ViT of a region after it."""
    made = tiny_plan()
    first, last = made.assignments
    network = NetworkSpec(name="test_efficientnet", image_size=32, parameters=1, macs=1)
    first = msgspec.structs.replace(first, submodel=None, network=network)
    return msgspec.structs.replace(made, assignments=[first, last])


@dataclass
class Trained:
    work: TrainingContext
    tree: Path

    def training_config(self, **options: Any) -> TrainingConfig:
        known: dict[str, Any] = {"epochs": 2, "teaching": "live", "schedule": CHAINED}
        return config_of(self.tree, **known | options)

    def train(self, run: Path, **options: Any) -> TrainingContext:
        data = open_dataset(str(self.tree))
        return train(RunFolder(run), plan(), data, self.training_config(**options), QUIET)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("live")
    tree = write_tree(folder / "tree", each=20)
    options = config_of(tree, epochs=2, teaching="live", schedule=CHAINED)
    work = train(RunFolder(folder / "run"), plan(), open_dataset(str(tree)), options, QUIET)
    return Trained(work, tree)


def test_a_stopped_run_goes_on_after_its_last_finished_member(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(shutil.copytree(trained.work.run.path, tmp_path / "run"))
    wanted = run.member(1).read_bytes()
    run.member(1).unlink()
    begun: list[str] = []
    distil = live.distil

    def spied(*args: Any) -> Any:
        begun.append(args[5])
        return distil(*args)

    monkeypatch.setattr(live, "distil", spied)
    trained.train(run.path)
    assert begun == ["training sub-model 1 for beta"]
    assert run.member(1).read_bytes() == wanted


def test_teacher_and_predecessor_are_asked_on_the_same_view(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    work, teacher = trained.work, ensure_teacher(trained.work, None)
    asked_for: list[Callable[[Draw], BatchTargets]] = []

    def kept(*args: Any) -> list[dict[str, float]]:
        asked_for.append(args[2])
        return []

    monkeypatch.setattr(live, "distil", kept)
    runner = live.LiveRun.of(work, teacher)
    first, last = work.plan.assignments
    runner.train(last, work.new_member(last))
    rows = torch.arange(5)
    whole = torch.tensor([0.0, 0.0, 1.0, 1.0]).expand(5, 4)
    found = asked_for[0](Draw(rows, whole, torch.ones(5), torch.ones(5)))
    seen = torch.from_numpy(np.array(work.member_pixels(first, "train")[:5])).permute(0, 3, 1, 2)
    member = work.load_member(first)
    with torch.inference_mode():
        output = member.of_normalised(member.normalise(seen.float()))
    assert found.before is not None
    assert found.imitated is not None
    torch.testing.assert_close(found.before, output.boost, atol=1e-2, rtol=0)
    torch.testing.assert_close(found.imitated, output.feature, atol=1e-2, rtol=0)
    assert found.teacher.shape == (5, 3)
    torch.testing.assert_close(found.teacher, centre(found.teacher))
    assert found.labels.argmax(dim=1).tolist() == work.data.train.targets[:5].tolist()


def test_without_boosting_no_predecessor_is_asked(trained: Trained, tmp_path: Path) -> None:
    work = trained.train(tmp_path / "run", schedule={})
    curves = msgspec.json.decode(work.run.curves.read_bytes())
    assert set(curves["member-1"][0]) == {"loss", "bag", "seconds"}
    assert [work.load_member(a).heads for a in work.plan.assignments] == [["bag"], ["bag"]]


def test_a_training_that_diverges_says_so_and_keeps_nothing(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "learning_rate", lambda *_: float("nan"))
    with pytest.raises(TrainingDiverged, match="sub-model 0 for alpha: a loss or weight is"):
        trained.train(tmp_path / "run")
    assert not RunFolder(tmp_path / "run").member(0).exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"schedule": {"patience": 3}}, "schedule.patience 3: expected 0"),
        (
            {"augmentation": {"rand_augment": "rand-m6-n2"}},
            "augmentation.rand_augment rand-m6-n2: expected",
        ),
        ({"answers_keep": 2}, "run.answers_keep 2: expected none: no answers are kept"),
        ({"augmentation": {"erasing": 0.1}}, "augmentation.erasing 0.1: expected 0"),
        ({"augmentation": {"cutmix": 0.5}}, "augmentation.cutmix 0.5: expected 0"),
        ({"untrained": True}, "augmentation.variants 2: expected none: every view is drawn anew"),
    ],
)
def test_what_live_teaching_does_not_have_is_refused(
    trained: Trained, changed: dict[str, Any], said: str
) -> None:
    options = trained.training_config(**{key: changed[key] for key in changed if key == "schedule"})
    augmentation = msgspec.structs.replace(options.augmentation, **changed.get("augmentation", {}))
    options = msgspec.structs.replace(options, augmentation=augmentation)
    if "answers_keep" in changed:
        kept = msgspec.structs.replace(options.options, answers_keep=changed["answers_keep"])
        options = msgspec.structs.replace(options, options=kept)
    if "untrained" in changed:
        teacher = msgspec.structs.replace(options.teacher_schedule, epochs=0)
        options = msgspec.structs.replace(options, teacher_schedule=teacher)
    with pytest.raises(
        InputError, match=f'run.teaching = "live": {said}.*or run.teaching = "kept"'
    ):
        settings.teaching_of(options, plan(), trained.work.data, QUIET)


def test_several_processes_and_pictures_that_do_not_fit_are_refused(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, data = trained.training_config(), trained.work.data
    with monkeypatch.context() as patch:
        patch.setattr(settings, "world", lambda: World(rank=0, size=2, local_rank=0, local_size=2))
        with pytest.raises(InputError, match="expected one process, torchrun started 2"):
            settings.teaching_of(options, plan(), data, QUIET)
    monkeypatch.setattr(settings, "memory_bytes", lambda device: 100_000)
    # The finest view has 32 px.
    needed = f"{3 * 32 * 32 * len(data.train):,} bytes, expected at most 50,000"
    with pytest.raises(InputError, match=f"pictures of 32 px take {needed}"):
        settings.teaching_of(options, plan(), data, QUIET)


def test_auto_is_live_on_an_accelerator_that_can(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decided(options: TrainingConfig) -> tuple[str, str]:
        auto = msgspec.structs.replace(options.options, teaching="auto")
        options = msgspec.structs.replace(options, options=auto)
        said = io.StringIO()
        found = settings.teaching_of(options, plan(), trained.work.data, Progress(said))
        return found, said.getvalue()

    assert decided(trained.training_config()) == ("kept", "")
    monkeypatch.setattr(settings, "training_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(settings, "memory_bytes", lambda device: 80_000_000_000)
    assert decided(trained.training_config()) == ("live", "")
    found, said = decided(trained.training_config(schedule={"patience": 3}))
    assert found == "kept"
    assert said.startswith("the teacher's kept answers teach, not live ones: schedule.patience 3")
