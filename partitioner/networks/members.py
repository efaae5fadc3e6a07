"""Builds members of every family."""

from pathlib import Path
from typing import Any

from torch import nn

from mdp.formats.plan import Spec, SubModelSpec
from partitioner.networks.families import Backbone, FamilyMember, check_known
from partitioner.networks.submodel import Member, SubModel
from partitioner.torchvision_shim import import_timm


def build_member(
    spec: Spec, num_classes: int, *, boosting: bool = False, weights: Path | None = None
) -> Member:
    """A member with random weights, or a network with pretrained `weights`.

    Raises InputError for an impossible spec, and for weights of another architecture.
    """
    if isinstance(spec, SubModelSpec):
        return SubModel(spec, num_classes, boosting=boosting)
    backbone = Backbone(spec.name, spec.image_size)
    return FamilyMember(backbone, num_classes, weights, boosting=boosting)


def check_member(spec: Spec) -> None:
    """Raise InputError unless `build_member` can build it; builds nothing."""
    if not isinstance(spec, SubModelSpec):
        check_known(spec.name)


def to_served_form(module: nn.Module) -> nn.Module:
    """The served form: branches of one linear map summed, batch norms folded.

    By timm's `reparameterize_model`, a copy where the module has such parts.
    """
    import_timm()
    from timm.utils.model import reparameterize_model

    reparameterize: Any = reparameterize_model
    served: nn.Module = reparameterize(module.eval())
    return served
