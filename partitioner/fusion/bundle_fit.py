"""Fit everything of a bundle that its calibration logits decide."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from mdp.files import write_json
from mdp.formats.bundle import FUSION, FileEntry, file_entry, model_paths
from mdp.formats.plan import Plan
from mdp.fusion.cascade import Cascade
from mdp.fusion.fuse import Contribution, FusionWeights
from mdp.requests.camera_drift import at_least, labels_beside, weights_beside
from partitioner.fusion.cascade_fit import fit_cascade
from partitioner.fusion.novelty_fit import fit_novelty
from partitioner.fusion.several_fit import Flags, fit_several_fusion
from partitioner.fusion.stacking import Targets, calibrate_members, fit_fusion


@dataclass(frozen=True, slots=True)
class TrainingAnswers:
    """Members' answers to training pictures, by classifiers that were fitted without them."""

    #: By member, logits `[S, C]`.
    contributions: Mapping[int, Contribution]
    #: Classes `[S]`, or sets of labels.
    targets: Targets
    #: Members whose network was trained since, on these very pictures: their answers are those of
    #: the network before.
    outdated: frozenset[int] = frozenset()


def fit_bundle(
    folder: Path,
    plan: Plan,
    contributions: Mapping[int, Contribution],
    targets: Targets,
    *,
    more: TrainingAnswers | None = None,
    unknown: Mapping[int, Contribution] | None = None,
    note: Callable[[str], None] = lambda line: None,
    distance: bool = False,
) -> tuple[dict[str, FileEntry], Cascade | None]:
    """Write the fusion weights into `folder`; returns the manifest's `files` and `cascade`.

    `contributions` are the members' logits `[N, C]` of the calibration pictures, `targets` `[N]`
    their labels. The fusion weights alone are fitted to `more` answers too. `unknown` are the
    members' logits `[U, C]` of pictures of no class. The models are in `folder` already. `note` is
    told where the pictures are too few for the default rate of rejected known items. With
    `distance`, all models tell that of their features in their logits. Raises InputError for logits
    that are not finite.
    """
    if more is None:
        fusion = fit_fusion(contributions, targets)
    else:
        fusion = _fit_to_both(contributions, targets, more)
    if plan.cameras and len(contributions) > 1:
        fusion = replace(fusion, agreement=agreement(contributions, fusion))
    fusion = replace(
        fusion, novelty=fit_novelty(contributions, fusion, unknown, note, distance=distance)
    )
    write_json(folder / FUSION, fusion)
    names = [*model_paths(plan), FUSION]
    files = {name: file_entry(folder / name) for name in names}
    return files, fit_cascade(plan, contributions, targets, fusion)


def _fit_to_both(
    contributions: Mapping[int, Contribution], targets: Targets, more: TrainingAnswers
) -> FusionWeights:
    """The fusion weights of calibration pictures and of others, each of these by itself.

    A network before its training says how good the trained one is beside the other members, and
    which errors it shares with them: what a few calibration pictures do not. Its logits are brought
    to the trained one's size.
    """
    answers = dict(more.contributions)
    if more.outdated:
        now = calibrate_members(contributions, targets)
        before = calibrate_members(answers, more.targets)
        for k in more.outdated:
            ratio = np.float32(before[k].factor / now[k].factor)
            answers[k] = Contribution.of([ratio * head for head in answers[k].heads])
    together = {
        k: Contribution.of(
            [np.concatenate(pair) for pair in zip(one.heads, answers[k].heads, strict=True)]
        )
        for k, one in contributions.items()
    }
    return fit_fusion(together, np.concatenate([targets, more.targets]))


def agreement(
    contributions: Mapping[int, Contribution], fusion: FusionWeights
) -> tuple[float, ...]:
    """The share of pictures on which each of ascending members agrees with the others, at least.

    `contributions` are logits `[N, C]` of scenes, of which those count where the others are sure.
    """
    weights, bias = weights_beside(tuple(contributions), frozenset(), fusion)
    counted, agreed = np.zeros((2, len(contributions)), dtype=np.int64)
    for logits in np.stack([one.bag for one in contributions.values()], axis=1):
        for row, (own, others) in enumerate(labels_beside(logits, weights, bias)):
            counted[row] += others is not None
            agreed[row] += own == others
    pairs = zip(agreed.tolist(), counted.tolist(), strict=True)
    return tuple(round(at_least(*pair), 4) for pair in pairs)


def fit_bundle_of_several(
    folder: Path,
    plan: Plan,
    contributions: Mapping[int, Contribution],
    held: Flags,
    more: tuple[Mapping[int, Contribution], Flags] | None = None,
) -> dict[str, FileEntry]:
    """Write fusion weights of several labels an item into `folder`; returns the manifest's `files`.

    `contributions` are the members' log-odds `[N, L]` of the calibration pictures, `held` `[N, L]`
    says which labels hold. Such answers tell neither unknown items nor covered cameras, and no
    first stage of a cascade is sure of them.
    """
    if more is not None:
        answers, more_held = more
        contributions = {
            k: Contribution(None, np.concatenate([one.bag, answers[k].bag]))
            for k, one in contributions.items()
        }
        held = np.concatenate([held, more_held])
    write_json(folder / FUSION, fit_several_fusion(contributions, held))
    return {name: file_entry(folder / name) for name in (*model_paths(plan), FUSION)}
