"""The sub-models whose latency is predicted and measured."""

from itertools import pairwise

import numpy as np

from benchmarks.harness.models import vit
from mdp.files import Record
from mdp.formats.plan import SubModelSpec
from mdp.formats.profile import PositiveInt
from partitioner.estimates.macs import macs
from partitioner.export.probe_encoders import DESIGN, design_specs
from partitioner.planner.design_space import KERNEL_MULTIPLE, sub_model_grid

#: Other shapes than those on which the formula was developed.
SEED = 23
UNSEEN = 38
#: More than this takes over 0.1 s a picture on one core, and the whole run too long.
MAX_MACS = 3_000_000_000
_CLASSES = (10, 100, 1000)
_PATCH_SIZES = (4, 8, 14, 16, 32)
_HEAD_SIZES = (16, 24, 32, 48, 64)
_MLP_RATIOS = (2.0, 2.5, 3.0, 4.0)
_TOKENS, _WIDTHS, _DEPTHS = (15, 260), (40, 640), (1, 12)
#: Sub-models of each teacher, with its classes, that a plan may hold.
PLANNABLE = 12
_TEACHERS = (
    (vit(224, 16, 384, 12, 6), 1000),
    (vit(224, 16, 192, 12, 3), 100),
    (vit(32, 4, 192, 9, 3), 10),
)


class Case(Record, frozen=True):
    spec: SubModelSpec
    num_classes: PositiveInt


def probed() -> set[SubModelSpec]:
    """The sub-models that a probe measures, to which latency models are fitted."""
    return {spec for tier in DESIGN for spec in design_specs(tier)}


def unseen(count: int = UNSEEN, seed: int = SEED) -> list[Case]:
    """Random sub-models, evenly over the logarithms of tokens, width and depth; none is `probed`.

    The sizes of pictures, patches and heads, the MLP ratios and the classes are random as well.
    """
    rng = np.random.default_rng(seed)
    known, found = probed(), list[Case]()
    while len(found) < count:
        case = _random_case(rng)
        if case is None or case.spec in known or macs(case.spec, case.num_classes) > MAX_MACS:
            continue
        known.add(case.spec)
        found.append(case)
    return found


def plannable(count: int = PLANNABLE, seed: int = SEED) -> list[Case]:
    """`count` sub-models of each teacher from the grid that the planner searches.

    Evenly over the logarithm of their MACs; none is `probed`. ViT-S and ViT-Tiny at 224 pixels,
    and a small teacher for pictures of 32.
    """
    rng = np.random.default_rng(seed)
    known = probed()
    found = []
    for teacher, classes in _TEACHERS:
        cases = [
            Case(spec=spec, num_classes=classes)
            for spec in sub_model_grid(teacher)
            if spec.embed_dim % KERNEL_MULTIPLE["cpu"] == 0 and spec not in known
        ]
        size = np.log([macs(case.spec, classes) for case in cases])
        bounds = np.linspace(size.min(), min(size.max(), np.log(MAX_MACS)), count + 1)
        for low, high in pairwise(bounds):
            within = np.flatnonzero((size >= low) & (size <= high))
            found.append(cases[int(rng.choice(within))])
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
