"""timm can be imported beside a torchvision that cannot load its operators."""

import importlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch

BROKEN = "operator torchvision::nms does not exist"


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_timm_can_be_imported_in_a_fresh_interpreter() -> None:
    shown = python(
        "from partitioner.torchvision_shim import import_timm\n"
        "print(import_timm().create_model('vit_tiny_patch16_224', depth=1).embed_dim)"
    )
    assert shown == "192\n"


def test_operators_are_declared_only_where_they_are_missing() -> None:
    code = (
        "import torch\n"
        "calls = []\n"
        "class Library:\n"
        "    def __init__(self, *args): calls.append(args)\n"
        "    def define(self, schema): calls.append(schema)\n"
        "real, torch.library.Library = torch.library.Library, Library\n"
        "from partitioner import torchvision_shim\n"
    )
    missing = python(code + "torchvision_shim.declare_operators(); print(calls)")
    assert missing.count("Tensor dets") == 2
    assert "('torchvision', 'DEF')" in missing
    present = (
        "lib = real('torchvision', 'DEF')\n"
        "lib.define('nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
        "torchvision_shim.declare_operators(); print(calls)"
    )
    assert python(code + present) == "[]\n"


def test_another_failure_of_torchvision_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    from partitioner import torchvision_shim

    def fail(name: str) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(RuntimeError, match="something else"):
        torchvision_shim.import_timm()
