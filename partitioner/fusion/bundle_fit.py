"""Fit everything of a bundle that its calibration logits decide."""

from collections.abc import Mapping
from pathlib import Path

from mdp.files import write_json
from mdp.formats.bundle import FUSION, FileEntry, file_entry, model_path
from mdp.formats.plan import Plan
from mdp.fusion.cascade import Cascade
from mdp.fusion.fuse import Contribution
from partitioner.fusion.cascade_fit import fit_cascade
from partitioner.fusion.stacking import Targets, fit_fusion


def fit_bundle(
    folder: Path, plan: Plan, contributions: Mapping[int, Contribution], targets: Targets
) -> tuple[dict[str, FileEntry], Cascade | None]:
    """Write the fusion weights into `folder`; returns the manifest's `files` and `cascade`.

    `contributions` are the members' logits `[N, C]` of the calibration pictures, `targets` `[N]`
    their labels; the models are in `folder` already. Raises InputError for logits that are not
    finite.
    """
    fusion = fit_fusion(contributions, targets)
    write_json(folder / FUSION, fusion)
    names = [*(model_path(a.k) for a in plan.assignments), FUSION]
    files = {name: file_entry(folder / name) for name in names}
    return files, fit_cascade(plan, contributions, targets, fusion)
