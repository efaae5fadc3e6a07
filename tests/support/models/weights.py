"""Stand-ins for what weights come from: a package, and the cache of timm's downloads."""

import importlib
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from partitioner.networks import at_hand
from partitioner.networks.families import Backbone, create

#: A small network, whose weights the stand-in package holds.
NETWORK = "test_efficientnet"
_PACKAGE = "stand_in_weights"
_COMMIT = "0" * 40


def only_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights be found below `folder` alone, whatever is installed or cached."""
    monkeypatch.setattr(at_hand, "PACKAGES", {NETWORK: _PACKAGE})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.syspath_prepend(str(folder / "site"))


def write_package(folder: Path, *, network: str = NETWORK, classes: int = 9) -> Path:
    """Install a package of weights with foreign names, which cannot be imported."""
    package = folder / "site" / _PACKAGE
    (package / "models").mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    torch.manual_seed(4)
    state = create(Backbone(network, 160), classes).state_dict()
    foreign = {f"_{n}.{key.rpartition('.')[2]}": v for n, (key, v) in enumerate(state.items())}
    torch.save(foreign, package / "models" / "other.pth")
    importlib.invalidate_caches()
    return package


def add_to_hub_cache(folder: Path, repository: str, file: str = "model.safetensors") -> Path:
    """An empty file in the cache, as if timm had fetched it from its `repository`."""
    root = folder / "hub" / f"models--timm--{repository}"
    path = root / "snapshots" / _COMMIT / file
    path.parent.mkdir(parents=True)
    path.touch()
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(_COMMIT)
    return path
