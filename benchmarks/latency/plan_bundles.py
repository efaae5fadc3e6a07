"""Bundles of untrained members for plans whose latency is measured."""

import shutil
from pathlib import Path

from msgspec import structs

from benchmarks.latency.models import model_file
from benchmarks.latency.shapes import Case
from mdp.files import write_json
from mdp.formats.bundle import FUSION, MANIFEST, Bundle, Manifest, file_entry, model_path
from mdp.formats.plan import Plan
from mdp.fusion.fuse import FusionWeights, SubsetWeights, listed_subsets

NUM_CLASSES = 100


def case_of(plan: Plan, k: int) -> Case:
    spec = structs.replace(plan.assignments[k].vit, precision="fp32")
    return Case(spec=spec, num_classes=NUM_CLASSES)


def write_plan_bundle(folder: Path, models: Path, plan: Plan) -> Bundle:
    """The plan's untrained sub-models as a bundle; its answers mean nothing."""
    members = range(len(plan.assignments))
    for k in members:
        file = model_file(models, case_of(plan, k), plan.assignments[k].vit.precision)
        (folder / model_path(k)).parent.mkdir(parents=True)
        shutil.copyfile(file, folder / model_path(k))
    subsets = [
        SubsetWeights(members=s, a=(0.5,) * len(s), b=(1.0 / len(s),) * len(s))
        for s in listed_subsets(members)
    ]
    write_json(folder / FUSION, FusionWeights(num_classes=NUM_CLASSES, subsets=subsets))
    paths = [*(model_path(k) for k in members), FUSION]
    manifest = Manifest(
        name="untrained",
        labels=[f"class-{index}" for index in range(NUM_CLASSES)],
        plan=plan,
        files={path: file_entry(folder / path) for path in paths},
        provenance={"made_by": "benchmarks/latency/plans.py"},
    )
    write_json(folder / MANIFEST, manifest)
    return Bundle.open(folder)
