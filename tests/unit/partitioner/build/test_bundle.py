"""A build in one process: what it reads, and how often."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from msgspec.structs import replace  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from mdp.errors import InputError  # noqa: E402
from mdp.files import write_toml  # noqa: E402
from mdp.formats.profile import read_profile  # noqa: E402
from partitioner.build import bundle, inputs, teacher, train  # noqa: E402
from partitioner.build.bundle import build_bundle  # noqa: E402
from partitioner.config import BuildConfig, Given, parse_arguments  # noqa: E402
from partitioner.data import datasets  # noqa: E402
from partitioner.data.datasets import open_dataset  # noqa: E402
from partitioner.networks.teacher import build_teacher, teacher_spec  # noqa: E402
from partitioner.planner import make_plan  # noqa: E402
from partitioner.run.folder import RunFolder  # noqa: E402
from partitioner.training.world import World  # noqa: E402
from tests.support.models.runs import QUIET, SHARED_ARGS, SHARED_MS, write_profiles  # noqa: E402
from tests.support.models.trees import CLASSES, write_scenes  # noqa: E402

pytestmark = pytest.mark.torch
TEACHER = "vit_tiny_patch16_224"


class Stopped(Exception):
    """The training has begun."""


def count(monkeypatch: pytest.MonkeyPatch, *places: tuple[Any, str]) -> Counter[str]:
    """The calls of these functions by name, from now on."""
    calls = Counter[str]()

    def watch(module: Any, name: str) -> None:
        function = getattr(module, name)

        def counted(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return function(*args, **options)

        monkeypatch.setattr(module, name, counted)

    for place in places:
        watch(*place)
    return calls


@pytest.fixture
def config(tmp_path: Path) -> BuildConfig:
    """A teacher with given weights and labels, two cameras, and a device too slow for its own."""
    alpha, _ = write_profiles(tmp_path)
    profile = read_profile(alpha)
    slow = [replace(point, latency_ms=1e5 * point.latency_ms) for point in profile.latency]
    write_toml(tmp_path / "slow.toml", replace(profile, name="slow", latency=slow))
    arguments = parse_arguments(SHARED_ARGS)
    given = build_teacher(teacher_spec(TEACHER, arguments), 5, pretrained=False)
    save_file(given.network.state_dict(), tmp_path / "t.safetensors")
    (tmp_path / "labels.txt").write_text("\n".join(("cat", *CLASSES, "dog")))
    (tmp_path / "weights").mkdir()
    settings = {
        "plan.teacher": TEACHER,
        "plan.teacher_args": arguments,
        "plan.profiles": [alpha, str(tmp_path / "slow.toml")],
        "plan.cameras": {"alpha": "left", "slow": "right"},
        "plan.latency_ms": SHARED_MS,
        "plan.families": ["ViT"],
        "plan.anyway": True,
        "run.data": str(write_scenes(tmp_path / "scenes", each=10)),
        "run.weights": str(tmp_path / "weights"),
        "run.teacher_checkpoint": str(tmp_path / "t.safetensors"),
        "run.teacher_labels": str(tmp_path / "labels.txt"),
        "schedule.epochs": 1,
    }
    return Given(None, settings).build()


def test_every_input_is_read_once(
    config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count(
        monkeypatch,
        (datasets, "_list_folder"),
        (inputs, "open_dataset"),
        (inputs, "read_profiles"),
        (make_plan, "read_profiles"),
        (inputs, "teacher_spec"),
        (inputs, "weights_in"),
        (teacher, "sha256_of"),
        (teacher, "count_classes"),
        (teacher, "read_names"),
    )

    def stop(*_: object) -> None:
        raise Stopped

    monkeypatch.setattr(train, "ensure_teacher", stop)
    with pytest.raises(Stopped):
        build_bundle(config, tmp_path / "bundle", QUIET)
    # The settings that are written are those of the teacher and of the one camera that is left.
    run = RunFolder(tmp_path / "bundle.run")
    assert run.plan().cameras == ["left"]
    assert run.settings().teacher.rows == [1, 2, 3]
    left = open_dataset(config.options.data, cameras=["left"])
    assert run.settings().data.train == left.train.digest[:32]
    assert calls.pop("_list_folder") == 2  # one of them by this test
    assert set(calls.values()) == {1}
    assert len(calls) == 7


def test_what_this_build_cannot_do_is_said_before_anything_is_read(
    config: BuildConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count(monkeypatch, (inputs, "open_dataset"), (inputs, "read_profiles"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    measured = replace(config, options=replace(config.options, minutes=1.0))
    several = World(rank=0, size=2, local_rank=0, local_size=2)
    for wanted, out, options, message in (
        (config, "mine", {}, "mine: expected a new folder or a bundle to replace"),
        (config, "b", {"name": "a b"}, "--name: expected letters"),
        (measured, "b", {"crew": tmp_path}, "--crew: a build by measurement trains on this machi"),
        (measured, "b", {}, "torchrun: expected one process for a build by measurement"),
    ):
        if message.startswith("torchrun"):
            monkeypatch.setattr(bundle, "world", lambda: several)
        with pytest.raises(InputError, match=message):
            build_bundle(wanted, tmp_path / out, QUIET, **options)
    assert not calls
    assert not (tmp_path / "b.run").exists()
