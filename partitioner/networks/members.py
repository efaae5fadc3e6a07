"""Builds members of every family."""

from pathlib import Path
from typing import Any

from torch import nn

from mdp.errors import InputError
from mdp.formats.plan import Spec, SubModelSpec
from partitioner.networks.families import Backbone, FamilyMember, check_known
from partitioner.networks.submodel import SubModel, check_trunks
from partitioner.torchvision_shim import import_timm

Member = SubModel | FamilyMember


def build_member(
    spec: Spec, num_classes: int, *, trunks: int = 1, weights: Path | None = None
) -> Member:
    """A member with random weights, or a network with pretrained `weights`.

    Raises InputError for an impossible spec, and for weights of another architecture.
    """
    if isinstance(spec, SubModelSpec):
        return SubModel(spec, num_classes, trunks)
    return FamilyMember(Backbone(spec.name, spec.image_size), num_classes, weights)


def check_member(spec: Spec, trunks: int) -> None:
    """Raise InputError unless `build_member` can build it; builds nothing."""
    if isinstance(spec, SubModelSpec):
        check_trunks(spec, trunks)
        return
    check_known(spec.name)
    if trunks > 1:
        raise InputError(f"schedule.trunks: expected 1 for {spec.name}, which is no plain ViT")


def deployed(module: nn.Module) -> nn.Module:
    """The served form: branches of one linear map summed, batch norms folded.

    By timm's `reparameterize_model`, a copy where the module has such parts.
    """
    import_timm()
    from timm.utils.model import reparameterize_model

    reparameterize: Any = reparameterize_model
    served: nn.Module = reparameterize(module.eval())
    return served
