"""The sub-models whose latency is predicted and measured: a grid to fit to, and unseen ones."""

import numpy as np
from msgspec import structs

from mdp.files import Record
from mdp.plan import SubModelSpec
from mdp.profile import PositiveInt
from partitioner.cost import macs, tokens

#: Other shapes than those on which the formula was developed.
SEED = 11
UNSEEN = 38
#: More than this takes over 0.1 s a picture on one core, and the whole run too long.
MAX_MACS = 3_000_000_000
_CLASSES = (10, 100, 1000)
_PATCH_SIZES = (4, 8, 14, 16, 32)
_HEAD_SIZES = (16, 24, 32, 48, 64)
_MLP_RATIOS = (2.0, 2.5, 3.0, 4.0)
_TOKENS, _WIDTHS, _DEPTHS = (6, 260), (32, 640), (1, 12)


class Case(Record, frozen=True):
    """A sub-model with its classes."""

    spec: SubModelSpec
    num_classes: PositiveInt


#: image_size, patch_size, embed_dim, depth, num_heads, mlp_ratio: what a probe would measure.
_GRID = (
    (8, 4, 32, 1, 2, 4.0), (16, 4, 48, 2, 3, 4.0), (32, 4, 64, 2, 2, 4.0),
    (32, 4, 96, 4, 3, 4.0), (56, 8, 128, 3, 4, 2.0), (32, 4, 192, 4, 3, 4.0),
    (224, 16, 64, 3, 4, 3.0), (112, 16, 192, 6, 3, 4.0), (224, 16, 192, 2, 3, 4.0),
    (96, 16, 768, 2, 12, 4.0), (160, 16, 384, 4, 6, 4.0), (224, 16, 384, 2, 6, 4.0),
    (12, 4, 192, 2, 6, 2.0), (24, 4, 48, 4, 1, 4.0), (64, 16, 32, 8, 2, 4.0),
    (112, 8, 64, 1, 1, 4.0), (28, 4, 256, 2, 4, 2.0), (48, 4, 96, 2, 6, 3.0),
    (128, 16, 256, 4, 8, 3.0), (224, 32, 384, 3, 12, 4.0), (48, 4, 128, 6, 2, 4.0),
    (160, 16, 192, 12, 3, 4.0), (224, 16, 768, 1, 12, 4.0), (224, 16, 384, 12, 6, 4.0),
    (8, 4, 64, 4, 2, 4.0), (12, 4, 96, 3, 2, 2.0), (20, 4, 64, 6, 4, 3.0),
    (144, 16, 48, 3, 3, 4.0), (52, 4, 32, 2, 1, 4.0), (40, 8, 96, 12, 3, 4.0),
    (16, 4, 384, 3, 6, 4.0), (80, 8, 256, 1, 8, 2.0), (96, 8, 192, 1, 12, 4.0),
    (192, 32, 128, 8, 4, 4.0), (208, 16, 128, 3, 8, 2.0), (32, 8, 768, 1, 12, 4.0),
    (36, 4, 384, 1, 8, 3.0), (32, 4, 128, 12, 4, 4.0), (192, 16, 256, 6, 4, 4.0),
    (176, 16, 384, 8, 6, 4.0), (224, 16, 192, 12, 3, 4.0),
)  # fmt: skip


def grid() -> list[Case]:
    """What the fit is given where no probe's profile is."""
    names = ("image_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio")
    specs = [SubModelSpec(**dict(zip(names, row, strict=True))) for row in _GRID]
    return [Case(spec=spec, num_classes=10) for spec in specs]


def unseen(count: int = UNSEEN, seed: int = SEED) -> list[Case]:
    """Random sub-models, evenly over the logarithms of tokens, width and depth; none is in `grid`.

    The sizes of pictures, patches and heads, the MLP ratios and the classes are random as well.
    """
    rng = np.random.default_rng(seed)
    known, found = {case.spec for case in grid()}, list[Case]()
    while len(found) < count:
        case = _random_case(rng)
        if case is None or case.spec in known or macs(case.spec, case.num_classes) > MAX_MACS:
            continue
        known.add(case.spec)
        found.append(case)
    return found


def _random_case(rng: np.random.Generator) -> Case | None:
    head = int(rng.choice(_HEAD_SIZES))
    patch = int(rng.choice(_PATCH_SIZES))
    heads = round(_log_uniform(rng, *_WIDTHS) / head)
    side = round(_log_uniform(rng, *_TOKENS) ** 0.5)
    depth = round(_log_uniform(rng, *_DEPTHS))
    mlp_ratio, classes = float(rng.choice(_MLP_RATIOS)), int(rng.choice(_CLASSES))
    if heads < 1 or not _WIDTHS[0] <= heads * head <= _WIDTHS[1] or side * patch > 320:
        return None
    spec = SubModelSpec(
        image_size=side * patch,
        patch_size=patch,
        embed_dim=heads * head,
        depth=depth,
        num_heads=heads,
        mlp_ratio=mlp_ratio,
    )
    return Case(spec=spec, num_classes=classes)


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def file_stem(case: Case) -> str:
    """A name for the case's model, made of its shape."""
    spec = case.spec
    parts = (spec.image_size, spec.patch_size, spec.embed_dim, spec.depth, spec.num_heads)
    return "-".join(map(str, (*parts, spec.mlp_ratio, case.num_classes)))


def with_precision(case: Case, precision: str) -> SubModelSpec:
    """The case's shape in another precision."""
    return structs.replace(case.spec, precision=precision)


def describe(case: Case) -> str:
    """A case as a person reads it."""
    spec = case.spec
    return (
        f"{spec.image_size} px / {spec.patch_size}, {tokens(spec)} tokens, {spec.embed_dim} wide, "
        f"{spec.depth} deep, {spec.num_heads} heads, MLP x{spec.mlp_ratio:g}"
    )
