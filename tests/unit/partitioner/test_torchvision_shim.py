"""timm can be imported beside a torchvision that cannot load its operators."""

import importlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.torch

BROKEN = "operator torchvision::nms does not exist"


def test_operators_are_declared_only_where_they_are_missing() -> None:
    code = (
        "import torch\n"
        "calls = []\n"
        "class Library:\n"
        "    def __init__(self, *args): calls.append(args)\n"
        "    def define(self, schema): calls.append(schema)\n"
        "real, torch.library.Library = torch.library.Library, Library\n"
        "from partitioner import torchvision_shim\n"
        "torchvision_shim.declare_operators(); print(calls)\n"
        "calls.clear()\n"
        "lib = real('torchvision', 'DEF')\n"
        "lib.define('nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')\n"
        "torchvision_shim.declare_operators(); print(calls)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    missing, present = (done.stdout + done.stderr).splitlines()
    assert missing.count("Tensor dets") == 2
    assert "('torchvision', 'DEF')" in missing
    assert present == "[]"


def test_a_plain_import_of_timm_works_after_it() -> None:
    from partitioner.torchvision_shim import import_timm

    timm = import_timm()
    assert importlib.import_module("timm") is timm
    assert timm.is_model("vit_tiny_patch16_224")


def test_another_failure_of_torchvision_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    from partitioner import torchvision_shim

    def fail(name: str) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(RuntimeError, match="something else"):
        torchvision_shim.import_timm()
