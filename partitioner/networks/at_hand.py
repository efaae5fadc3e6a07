"""Every network with pretrained weights at hand: in a folder, in packages, in timm's cache.

All are files under timm's tensor names. Nothing is fetched unless it is asked for by name.
"""

import importlib.util
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mdp.errors import InputError
from mdp.extras import WEIGHTS, install
from mdp.formats.bundle import sha256_of
from partitioner.estimates.catalogue import catalogue
from partitioner.networks.convert import convert
from partitioner.networks.families import Backbone, check_known, create, own_classifier
from partitioner.networks.teacher import teacher_spec
from partitioner.run.weights import weights_in
from partitioner.torchvision_shim import import_timm

#: Packages of the extra `weights` by the network whose weights they hold, all of ImageNet-1k; their
#: tensors have other names, in timm's order.
PACKAGES = {f"tf_{package.removesuffix('_pytorch_model')}": package for package in WEIGHTS}
Source = Literal["folder", "package", "timm's cache"]
_LICENCE_OF_PACKAGES = "Apache-2.0"
_UNKNOWN_LICENCE = "not stated"
#: Pixels of a network without a recipe.
_SIDE = 224
#: Files of weights in a repository of the Hugging Face hub; the first that is there is taken.
_HUB_FILES = ("model.safetensors", "pytorch_model.bin")
#: Folders of timm's repositories in the hub's cache.
_HUB_FOLDERS = "models--timm--"


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of one network."""

    #: timm's name of the network.
    name: str
    path: Path
    source: Source
    licence: str = _UNKNOWN_LICENCE


@dataclass(frozen=True, slots=True)
class WeightsDescription:
    """The network of some weights, at the recipe that timm knows."""

    parameters: int
    #: Side of the recipe's pictures in pixels.
    image_size: int
    #: Rows of the classifier; 0 without one.
    classes: int


def weights_at_hand(folder: Path | None, download: Iterable[str] = ()) -> dict[str, Path]:
    """timm's name of every network with weights -> their file; raises InputError for none at all.

    As `find_weights`.
    """
    found = find_weights(folder, download)
    if not found:
        raise InputError(
            f"no weights of any network are at hand: {install('weights')}, or give a folder of "
            "timm's: --weights FOLDER"
        )
    return {name: weights.path for name, weights in found.items()}


def find_weights(folder: Path | None, download: Iterable[str] = ()) -> dict[str, Weights]:
    """Weights by timm's name of the network: of `folder`, else of a package, else timm's cache.

    Those of the networks `download` that are nowhere else are fetched by timm. Raises InputError
    for an unusable folder or package, and for what cannot be fetched.
    """
    found = {weights.name: weights for weights in _find_cached()}
    found |= {weights.name: weights for weights in _find_packaged()}
    if folder is not None:
        found |= {name: Weights(name, path, "folder") for name, path in weights_in(folder).items()}
    for name in download:
        if name not in found:
            found[name] = _fetch(name)
    return dict(sorted(found.items()))


def describe(weights: Weights) -> WeightsDescription:
    """The network of these weights; raises InputError where they are not its own."""
    config = check_known(weights.name).get_pretrained_cfg(weights.name)
    side = config.input_size[-1] if config else _SIDE
    classifier = own_classifier(weights.name, weights.path)
    classes = 0 if classifier is None else classifier.out_features
    network = create(
        Backbone(weights.name, side), classes, weights.path, own_classes=classifier is not None
    )
    return WeightsDescription(sum(p.numel() for p in network.parameters()), side, classes)


def cache_folder() -> Path:
    """The folder of converted weights: `mdp/weights` in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "mdp" / "weights"


def _find_packaged() -> Iterator[Weights]:
    """Weights of installed packages, converted once for each content of their file."""
    for name, package in PACKAGES.items():
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            continue
        files = [f for at in spec.submodule_search_locations for f in Path(at).rglob("*.pth")]
        if len(files) != 1:
            raise InputError(
                f"package {package}: expected one .pth file, found {len(files)}: install it again"
            )
        # By content: another version of the package has other weights.
        path = cache_folder() / sha256_of(files[0])[:32] / f"{name}.safetensors"
        if not path.exists():
            convert(name, files[0], path)
        yield Weights(name, path, "package", _LICENCE_OF_PACKAGES)


def _find_cached() -> Iterator[Weights]:
    """Weights that timm has fetched before: of networks whose latency is known, as it names them.

    Other recipes than a network's first are left out, as are those that timm keeps elsewhere.
    """
    from huggingface_hub import constants

    timm = import_timm()
    for folder in sorted(Path(constants.HF_HUB_CACHE).glob(f"{_HUB_FOLDERS}*")):
        repository = folder.name.removeprefix(_HUB_FOLDERS)
        name = repository.partition(".")[0]
        config = timm.get_pretrained_cfg(name) if timm.is_model(name) else None
        if config is None or config.hf_hub_id != f"timm/{repository}":
            continue
        path = _in_hub_cache(config)
        if path is not None and (name in catalogue() or _is_plain(name)):
            yield _of_timm(name, path, config)


def _in_hub_cache(config: Any) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    for file in (config.hf_hub_filename, *_HUB_FILES):
        if file and isinstance(path := try_to_load_from_cache(config.hf_hub_id, file), str):
            return Path(path)
    return None


def _fetch(name: str) -> Weights:
    """Weights fetched into timm's cache; raises InputError."""
    from huggingface_hub import hf_hub_download

    config = check_known(name).get_pretrained_cfg(name)
    if config is None or not config.hf_hub_id:
        raise InputError(f"--pretrained: timm has no weights of {name!r} to fetch")
    # Without a network the hub's client logs every retry.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        path = hf_hub_download(config.hf_hub_id, config.hf_hub_filename or _HUB_FILES[0])
    except Exception as error:  # the hub's, of connections and of files share no base
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise InputError(
            f"--pretrained: timm's weights of {name!r} cannot be fetched: {reason}; where there is "
            "no network, give them in a folder: --weights FOLDER"
        ) from error
    return _of_timm(name, Path(path), config)


def _of_timm(name: str, path: Path, config: Any) -> Weights:
    return Weights(name, path, "timm's cache", config.license or _UNKNOWN_LICENCE)


def _is_plain(name: str) -> bool:
    """Tell whether it is a vision transformer that can be cut after each layer."""
    try:
        teacher_spec(name, {})
    except InputError:
        return False
    return True
