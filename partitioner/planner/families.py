"""Members that a plan may have: plain ViTs of the teacher's, and networks of other families. Pure.

By default a plan has plain ViTs, and networks whose pretrained weights are at hand: what can be
built well with what there is. A network without weights trains from scratch, which takes far more
pictures than most users have, so it is planned only where it was named.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mdp.errors import InputError
from mdp.formats.plan import NetworkSpec, SubModelSpec
from partitioner.estimates.catalogue import Network, catalogue
from partitioner.planner.design_space import MIN_IMAGE_SHARE

#: What the plain ViTs are called among families, and what names every family.
PLAIN_VIT, EVERY = "ViT", "all"
#: The largest picture of a network, relative to the teacher's. Networks reduce pictures 32 times
#: where a ViT of small pictures has patches of 4, so enlarged ones serve them better.
MAX_IMAGE_SHARE = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Families:
    """The families of which members may be."""

    vits: bool = True
    networks: tuple[NetworkSpec, ...] = ()


def families_of(
    named: Sequence[str] | None,
    weights: Collection[str] | None,
    teacher: SubModelSpec,
    num_classes: int,
) -> Families:
    """Families and networks that were `named`, of those there are; by default as `weights` allow.

    `weights` are the networks whose pretrained weights are at hand, None where no folder was given.
    Raises InputError for an unknown name, and for a family without weights where a folder was.
    """
    networks: list[Network] = []
    if named is None:
        networks = [n for n in catalogue().values() if weights is not None and n.name in weights]
        if weights is not None and not networks:
            there = ", ".join(sorted(weights)) or "no weights"
            raise InputError(
                f"--weights: expected a file named after a network of the catalogue, such as "
                f"{next(iter(catalogue()))}.safetensors, found {there}"
            )
    for name in named or ():
        networks += [n for n in _networks_of(name, weights) if n not in networks]
    vits = named is None or bool({PLAIN_VIT.lower(), EVERY} & {name.lower() for name in named})
    low, high = (share * teacher.image_size for share in (MIN_IMAGE_SHARE, MAX_IMAGE_SHARE))
    specs = [
        network.spec(size, num_classes)
        for network in networks
        for size in (network.sizes_of_weights if weights else sorted(network.costs))
        if low <= size <= high
    ]
    if not vits and not specs:
        sizes = sorted({size for network in networks for size in network.costs})
        raise InputError(
            f"--families {' '.join(named or ())}: expected a network for pictures of {low:g} to "
            f"{high:g} px, half to three times the teacher's; theirs are {sizes[0]} to "
            f"{sizes[-1]} px"
        )
    return Families(vits=vits, networks=tuple(specs))


def _networks_of(name: str, weights: Collection[str] | None) -> list[Network]:
    """The networks that a name stands for; with weights only those that have them."""
    every = list(catalogue().values())
    families = dict.fromkeys(network.family for network in every)
    wanted = name.lower()
    found = [
        network
        for network in every
        if wanted in (EVERY, network.family.lower(), network.name.lower())
    ]
    if wanted == PLAIN_VIT.lower():
        return []
    if not found:
        raise InputError(
            f"--families: expected {PLAIN_VIT}, {', '.join(families)}, the name of one of their "
            f"networks or {EVERY}, got {name!r}"
        )
    if weights is None:
        return found
    there = [network for network in found if network.name in weights]
    if not there and wanted != EVERY:
        raise InputError(
            f"--families {name}: expected weights of one of "
            f"{', '.join(network.name for network in found)} in --weights, found none"
        )
    return there
