"""Tiny bundles, made without torch and onnx: their models tell red, green and blue apart."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from mdp.files import write_json
from mdp.formats import bundle
from mdp.formats.plan import Assignment, Plan, PredictedMs, Rung, SubModelSpec, TeacherSpec
from mdp.fusion import fuse
from mdp.pictures.crop import Pixels
from mdp.testing.onnx_writer import FLOAT, UINT8, Node, Value, onnx_model

LABELS = ["blue", "green", "red"]
#: Columns of an RGB mean that speak for each label.
CHANNELS = np.array([[0, 0, 1], [0, 1, 0], [1, 0, 0]], dtype=np.float32)
DEVICES = ("alpha", "beta", "gamma")
SIZES = (16, 12, 8)


def colour_model(
    image_size: int,
    boost_scale: float,
    bag_scale: float,
    num_classes: int = len(LABELS),
    comment_bytes: int = 0,
    work: int = 0,
) -> bytes:
    """An ONNX file: uint8 `[N, S, S, 3]` -> two heads whose logits grow with each colour's mean.

    Only some 64 pixels are looked at, so that a large picture takes no longer than a small one.
    Classes after the third repeat the colours. So many products of matrices as `work` says, of 33
    million multiplications for a picture, take time and change nothing.
    """
    mean = "plain" if work else "mean"
    nodes = [
        Node("Slice", ["images", "from", "to", "axes", "steps"], ["some"], {}),
        Node("Cast", ["some"], ["floats"], {"to": FLOAT}),
        Node("ReduceMean", ["floats"], [mean], {"axes": [1, 2], "keepdims": 0}),
        *(_work(work) if work else ()),
        Node("MatMul", ["mean", "boost_weight"], ["boost"], {}),
        Node("MatMul", ["mean", "bag_weight"], ["bag"], {}),
    ]
    channels = np.resize(CHANNELS, (num_classes, 3)).T
    weights = {
        f"{head}_weight": channels * np.float32(scale / 255)
        for head, scale in (("boost", boost_scale), ("bag", bag_scale))
    }
    step = max(1, image_size // 8)
    slicing = {"from": [0, 0], "to": [image_size] * 2, "axes": [1, 2], "steps": [step] * 2}
    if work:
        weights["work/wide"] = np.full((_ROWS, 3, _WIDTH), 1e-3, np.float32)
        weights["work/square"] = np.full((_WIDTH, _WIDTH), 1 / _WIDTH, np.float32)
        weights["work/none"] = np.zeros(1, np.float32)
    return onnx_model(
        nodes,
        [Value("images", UINT8, ["N", image_size, image_size, 3])],
        [Value(head, FLOAT, ["N", num_classes]) for head in ("boost", "bag")],
        weights | {name: np.array(values, np.int64) for name, values in slicing.items()},
        "x" * comment_bytes,
    )


#: Rows and columns of the matrix that work is done with, for each picture.
_ROWS, _WIDTH = 512, 256


def _work(count: int) -> list[Node]:
    """Nodes that make `mean` of `plain` with `count` products, which are multiplied by zero."""
    wide = [f"work/{number}" for number in range(count + 1)]
    products = [
        Node("MatMul", [before, "work/square"], [after], {}) for before, after in pairwise(wide)
    ]
    return [
        Node("MatMul", ["plain", "work/wide"], [wide[0]], {}),
        *products,
        Node("ReduceMean", [wide[-1]], ["work/row"], {"axes": [2], "keepdims": 1}),
        Node("ReduceMean", ["work/row"], ["work/one"], {"axes": [0], "keepdims": 0}),
        Node("Mul", ["work/one", "work/none"], ["work/nothing"], {}),
        Node("Add", ["plain", "work/nothing"], ["mean"], {}),
    ]


def colour_plan(devices: tuple[str, ...] = DEVICES, sizes: tuple[int, ...] = SIZES) -> Plan:
    """A plan with one assignment per device, as unequal as `sizes`."""
    return Plan(
        teacher=TeacherSpec(name="vit_tiny_patch16_224", shape=shape(32)),
        target_ms=50.0,
        refused=False,
        reason="",
        assignments=[
            Assignment(
                k=k,
                device=device,
                submodel=shape(size),
                predicted_ms=PredictedMs(compute=1.0, network=1.0, total=2.0),
                memory_bytes=1_000_000,
                provider="CPUExecutionProvider",
                threads=1,
                why="for tests",
            )
            for k, (device, size) in enumerate(zip(devices, sizes, strict=True))
        ],
    )


def shape(image_size: int) -> SubModelSpec:
    """A ViT shape, as a plan wants one; what a colour model computes is another thing."""
    return SubModelSpec(
        image_size=image_size, patch_size=4, embed_dim=8, depth=1, num_heads=1, mlp_ratio=2.0
    )


def with_rungs(assignment: Assignment, rungs: int) -> Assignment:
    """The assignment with so many rungs, each twice as quick as the one above."""
    lower = [
        Rung(
            accuracy=0.5 - 0.1 * rung,
            compute_ms=assignment.predicted_ms.compute / 2**rung,
            memory_bytes=assignment.memory_bytes,
            scales=(2.0**rung, 2.0**rung),
            why="for tests",
            submodel=assignment.submodel,
        )
        for rung in range(1, rungs)
    ]
    return replace(assignment, rungs=tuple(lower))


def lowest_accuracy(count: int) -> bundle.LowestRungs:
    """Accuracies at the lowest rungs: half of those at the top."""
    halves = [
        replace(
            top, boosted=top.under("boosted") / 2, stacked=top.stacked / 2, bagged=top.bagged / 2
        )
        for top in map(subset_accuracy, fuse.list_subsets(range(count)))
    ]
    sizes = tuple(size_accuracy(size) for size in fuse.sizes_not_listed(count))
    return bundle.LowestRungs(subsets=halves, sizes=sizes)


def subset_accuracy(members: tuple[int, ...]) -> bundle.SubsetAccuracy:
    """Accuracies that differ for every subset and rule, so that tests can tell which was used.

    All three members stacked are right about every colour picture, as is written here.
    """
    base = min(1.0, round(0.7 + 0.09 * len(members) + 0.01 * sum(members), 4))
    return bundle.SubsetAccuracy(
        members=members,
        boosted=base - 0.1,
        stacked=base,
        bagged=round(base - 0.05, 4),
        ece=bundle.PerRule(boosted=0.3, stacked=0.1, bagged=0.2),
    )


def size_accuracy(size: int) -> bundle.SizeAccuracy:
    """Accuracies that differ for every size and rule, for the sizes that are not listed."""
    more = min(size / 100, 0.5)
    mean = bundle.PerRule(boosted=0.2 + more, stacked=0.5 + more, bagged=0.4 + more)
    lowest = bundle.PerRule(boosted=0.01, stacked=0.03, bagged=0.02)
    ece = bundle.PerRule(boosted=0.3, stacked=0.1, bagged=0.2)
    return bundle.SizeAccuracy(size=size, sampled=48, mean=mean, lowest=lowest, ece=ece)


def write_bundle(
    folder: Path,
    *,
    name: str = "colours",
    devices: tuple[str, ...] = DEVICES,
    sizes: tuple[int, ...] = SIZES,
    bag_scale: float = 4.0,
    labels: Sequence[str] = LABELS,
    evaluated: bool = True,
    comment_bytes: int = 0,
    rungs: int = 1,
    work: int = 0,
    several: bool = False,
) -> Path:
    """Write a whole bundle into `folder`, which it returns; another `bag_scale`, another digest.

    One sub-model for each of `devices`, of the picture size of `sizes`. With the default labels it
    is right about every `colour_picture`. The accuracies that it lists are made up, and differ for
    every subset of members; without `evaluated` it lists none. Each model is larger by a comment.
    Of more than one of `rungs` each has logits half as large as the one above, and a quarter of the
    top one's `work`. With `several` labels an item it is right about every `mixed_picture`.
    """
    plan = colour_plan(devices, sizes)
    if rungs > 1:
        lower = [with_rungs(assignment, rungs) for assignment in plan.assignments]
        plan = replace(plan, assignments=lower)
    files: dict[str, bundle.FileEntry] = {}
    for k, size in enumerate(sizes):
        for rung in range(rungs):
            path = folder / bundle.model_path(k, rung)
            path.parent.mkdir(parents=True, exist_ok=True)
            scales = (2.0 / (k + 1) / 2**rung, (bag_scale + k) / 2**rung)
            products = work // 4**rung
            path.write_bytes(colour_model(size, *scales, len(labels), comment_bytes, products))
            files[bundle.model_path(k, rung)] = bundle.file_entry(path)
    count = len(sizes)
    subsets = fuse.list_subsets(range(count))
    weights = fuse.FusionWeights(
        num_classes=len(labels),
        subsets=[
            fuse.SubsetWeights(members=s, a=(0.5,) * len(s), b=(1.0 / len(s),) * len(s))
            for s in subsets
        ],
        by_size=tuple(
            fuse.SizeWeights(size=size, a=(0.5,) * count, b=(1.0 / size,) * count)
            for size in fuse.sizes_not_listed(count)
        ),
    )
    if several:
        weights = several_weights(subsets, len(labels))
    write_json(folder / bundle.FUSION, weights)
    files[bundle.FUSION] = bundle.file_entry(folder / bundle.FUSION)
    evaluation = bundle.Evaluation(
        data="colours",
        data_digest="0" * 64,
        pictures=100,
        teacher=bundle.TeacherAccuracy(accuracy=0.99),
        members=[
            bundle.MemberAccuracy(k=k, device=device, accuracy=0.5)
            for k, device in enumerate(devices)
        ],
        subsets=[subset_accuracy(subset) for subset in subsets],
        sizes=tuple(size_accuracy(size) for size in fuse.sizes_not_listed(count)),
        lowest=lowest_accuracy(count) if rungs > 1 else UNSET,
        by_label=[subset_labels(subset, len(labels)) for subset in subsets] if several else UNSET,
    )
    manifest = bundle.Manifest(
        name=name,
        labels=list(labels),
        plan=plan,
        files=files,
        provenance={"made_by": "mdp.testing"},
        evaluation=evaluation if evaluated else None,
        labels_per_item="several" if several else UNSET,
    )
    write_json(folder / bundle.MANIFEST, manifest)
    return folder


def colour_picture(label: str, height: int = 40, width: int = 60) -> Pixels:
    """A noisy uint8 `[H, W, 3]` picture whose answer is `label`."""
    noise = np.random.default_rng(0).integers(0, 80, size=(height, width, 3), dtype=np.uint8)
    picture: Pixels = noise + (CHANNELS[LABELS.index(label)] * 120).astype(np.uint8)
    return picture


#: Log-odds of a label that a colour model gives nothing.
_ABSENT = -1.8


def several_weights(subsets: Sequence[tuple[int, ...]], num_classes: int) -> fuse.FusionWeights:
    """Weights of labels that do not exclude each other: the mean of the members' log-odds."""
    return fuse.FusionWeights(
        num_classes=num_classes,
        subsets=[
            fuse.SubsetWeights(
                members=members,
                a=(),
                b=(1.0 / len(members),) * len(members),
                bias=(_ABSENT,) * num_classes,
                thresholds=(0.5,) * num_classes,
            )
            for members in subsets
        ],
    )


def subset_labels(members: tuple[int, ...], num_classes: int) -> bundle.SubsetLabels:
    """Shares of one subset's answers, label by label, made up."""
    share = round(0.6 + 0.1 * len(members), 4)
    return bundle.SubsetLabels(
        members=members,
        precision=(share,) * num_classes,
        recall=(share - 0.1,) * num_classes,
        each=share,
    )


def mixed_picture(labels: Sequence[str], height: int = 40, width: int = 60) -> Pixels:
    """A noisy picture of which all of `labels` hold, and no other."""
    noise = np.random.default_rng(0).integers(0, 80, size=(height, width, 3), dtype=np.uint8)
    picture: Pixels = noise
    for label in labels:
        picture = picture + (CHANNELS[LABELS.index(label)] * 120).astype(np.uint8)
    return picture
