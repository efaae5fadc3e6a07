"""What a public network is worth: its published accuracy, carried to the user's pictures. Pure."""

import numpy as np

from mdp.errors import InputError
from mdp.formats.plan import NetworkSpec, Region, SubModelSpec
from partitioner.estimates.accuracy_law import (
    AccuracyLaw,
    capabilities,
    capability_of,
    features,
)
from partitioner.estimates.catalogue import network_of

#: A published plain ViT, of which the teacher's published accuracy is predicted by its shape.
_VIT_S = SubModelSpec(
    image_size=224, patch_size=16, embed_dim=384, depth=12, num_heads=6, mlp_ratio=4.0
)
_VIT_S_TOP1 = 0.814


def network_capability(
    law: AccuracyLaw,
    teacher: SubModelSpec,
    teacher_accuracy: float,
    spec: NetworkSpec,
    region: Region,
) -> float:
    """Capability of a network beside a teacher that is right on that share of the user's pictures.

    Raises InputError for a network that the catalogue does not have.
    """
    network = network_of(spec)
    if network is None:
        raise InputError(f"{spec.name}: expected a network of the catalogue")
    published = capability_of(network.top1 / 100)
    shrunk = max(0.0, float(np.log(network.image_size / spec.image_size)))
    published *= float(np.exp(-0.5 * shrunk))
    top = capability_of(teacher_accuracy)
    reference = float(capabilities(law, _VIT_S_TOP1, features(_VIT_S, [teacher]))[0])
    area = (region.right - region.left) * (region.bottom - region.top)
    lost = top * law.exponents[4] * float(np.log(1 / area))
    return top * published / reference * float(np.exp(-lost))
