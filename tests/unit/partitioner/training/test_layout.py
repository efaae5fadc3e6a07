"""Pictures reach every network in training contiguously, whatever they come from."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from mdp.formats.plan import NetworkSpec, Plan  # noqa: E402
from partitioner.data.datasets import open_dataset  # noqa: E402
from partitioner.networks.families import Backbone, create  # noqa: E402
from partitioner.networks.submodel import Normalise  # noqa: E402
from partitioner.networks.teacher import build_teacher  # noqa: E402
from partitioner.run.folder import RunFolder  # noqa: E402
from partitioner.run.settings import Augmentation, Teaching  # noqa: E402
from tests.support.models.runs import CHAINED, QUIET, config_of, tiny_plan  # noqa: E402
from tests.support.models.training import train  # noqa: E402
from tests.support.models.trees import write_tree  # noqa: E402

pytestmark = pytest.mark.torch
NETWORK = "test_efficientnet"


def plan() -> Plan:
    """A network with pretrained weights, and a plain ViT after it."""
    made = tiny_plan()
    first, last = made.assignments
    network = NetworkSpec(name=NETWORK, image_size=32, parameters=1, macs=1)
    first = msgspec.structs.replace(first, submodel=None, network=network)
    return msgspec.structs.replace(made, assignments=[first, last])


@pytest.fixture
def strides(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """For each batch that a network normalised: was it trained on, and was it contiguous."""
    seen: list[tuple[bool, bool]] = []
    forward = Normalise.forward

    def spied(self: Normalise, pixels: Any) -> Any:
        found = forward(self, pixels)
        seen.append((torch.is_grad_enabled(), pixels.is_contiguous() and found.is_contiguous()))
        return found

    monkeypatch.setattr(Normalise, "forward", spied)
    return seen


@pytest.mark.parametrize("teaching", ["kept", "live"])
def test_every_batch_is_contiguous(
    teaching: Teaching, strides: list[tuple[bool, bool]], tmp_path: Path
) -> None:
    tree = write_tree(tmp_path / "tree", each=8)
    (tmp_path / "weights").mkdir()
    torch.manual_seed(0)
    pretrained = create(Backbone(NETWORK, 32), 3).state_dict()
    save_file(pretrained, tmp_path / "weights" / f"{NETWORK}.safetensors")
    given = build_teacher(plan().require_teacher(), 5, pretrained=False).network.state_dict()
    save_file(given, tmp_path / "teacher.safetensors")
    wanted = config_of(
        tree,
        epochs=1,
        teaching=teaching,
        schedule=CHAINED,
        weights=str(tmp_path / "weights"),
        teacher_checkpoint=str(tmp_path / "teacher.safetensors"),
    )
    mixed = Augmentation(variants=2, mixup=0.5)
    wanted = msgspec.structs.replace(wanted, augmentation=mixed)
    train(RunFolder(tmp_path / "run"), plan(), open_dataset(str(tree)), wanted, QUIET)
    trained = [contiguous for with_gradient, contiguous in strides if with_gradient]
    # Three trainings: the teacher's, the network's, and the plain ViT's.
    assert len(trained) >= 3
    # The teacher's probe and logits, the network's probe, and the predecessor's outputs.
    assert len(strides) - len(trained) >= 4
    assert all(contiguous for _, contiguous in strides)
