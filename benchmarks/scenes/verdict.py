"""Trained cameras round an item, against networks on one camera and one network for all views.

    python -m benchmarks.scenes.verdict --parts parts/ --tiny tinyimagenet40/val --weights FOLDER \
        --scratch FOLDER --minutes 10 --seed 0 --ways cameras networks views

PARTS has scenes of four cameras, `<class>/<scene>/<camera>.jpg`, classes in pairs of near twins;
TINY a folder for each class of other things; WEIGHTS has files by timm's names. One class of each
of three pairs, drawn by the seed, is left out: its items are unknown. The others are learned from
50 scenes of a class and measured on 25. Ways, each in the same minutes:

    cameras    `mdp-partition build` with a device for each camera
    networks   the same with as many devices that all see the camera that was best in `cameras`
    views      the network that `cameras` chose, which takes the largest of each feature over all
               views of an item (Su and others, Multi-view convolutional neural networks for 3D
               shape recognition, ICCV 2015, arXiv 1505.00880), on one device

Rows are added to benchmarks/results/scenes-verdict.json, in place of earlier ones of the same way
and seed.
"""

import math
import os
import shutil
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

# torch reads it when it is loaded; use_threads says why.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, format_machine, read_result
from benchmarks.harness.tables import table
from benchmarks.scenes.few import CAMERAS
from benchmarks.scenes.figure import picture
from benchmarks.scenes.twins import RESULT as SURFACES
from benchmarks.scenes.unknown import OTHERS
from mdp.files import write_json
from mdp.formats.bundle import Bundle, Evaluation
from mdp.fusion.fuse import Contribution, FusionWeights, fuse, weights_for
from mdp.fusion.novelty import doubt, energy
from partitioner.build.bundle import build_bundle
from partitioner.build.measured.fine_tuning import (
    rate,
    recipe_of,
    side_at,
    train_but_for_statistics,
)
from partitioner.config import Given
from partitioner.data.crops import View, load_views, picture_of
from partitioner.data.datasets import Dataset, PictureSet, open_dataset
from partitioner.data.live_views import Draws, Pictures
from partitioner.estimates.catalogue import catalogue
from partitioner.export.evaluate import measure_rejection, run_on
from partitioner.fusion.novelty_fit import area_under_curve
from partitioner.networks.at_hand import weights_at_hand
from partitioner.networks.families import Backbone, FamilyMember
from partitioner.pilot.candidates import FrozenNetwork
from partitioner.pilot.features import network_features
from partitioner.pilot.linear import fit, leave_groups_out
from partitioner.run.progress import Progress
from partitioner.training.compute import own_threads, quicker_autocast, use_threads
from partitioner.training.live import Averaged
from partitioner.training.loop import parameter_groups
from partitioner.training.synchroniser import MAX_GRADIENT_NORM

RESULT = RESULTS / "scenes-verdict.json"
DEVICES = "raspberry-pi-5*4"
#: Scenes of a class that are learned from; the others are measured.
LEARNED = 50
#: Pairs of which one class is left out.
LEFT_OUT = 3
WAYS = ("cameras", "networks", "views")


def classes_of(options: Namespace) -> tuple[list[str], list[str]]:
    """Classes that are taught, and the near twins of some of them that are not, by the seed."""
    names = sorted(path.name for path in options.parts.iterdir() if path.is_dir())
    random = np.random.default_rng(options.seed)
    pairs = random.permutation(len(names) // 2)[:LEFT_OUT]
    twins = {names[2 * pair + int(random.integers(2))] for pair in pairs}
    return [name for name in names if name not in twins], sorted(twins)


def tree(options: Namespace, name: str, classes: Sequence[str], camera: str = "") -> Path:
    """A folder of links to the scenes of `classes`, in train/ and test/; of one camera's pictures
    where one is given.
    """
    root: Path = options.scratch / f"{name}-{options.seed}"
    if root.exists():
        return root
    made = root.with_suffix(".part")
    shutil.rmtree(made, ignore_errors=True)
    for label in classes:
        for number, scene in enumerate(sorted((options.parts / label).iterdir())):
            folder = made / ("train" if number < LEARNED else "test") / label
            folder.mkdir(parents=True, exist_ok=True)
            if camera:
                (folder / f"{scene.name}.jpg").symlink_to((scene / f"{camera}.jpg").resolve())
            else:
                (folder / scene.name).symlink_to(scene.resolve())
    made.rename(root)
    return root


def other_things(options: Namespace) -> PictureSet:
    """Scenes of photographs, four of one class as what four cameras see."""
    sources: list[Mapping[str, Path]] = []
    for folder in sorted(path for path in options.tiny.iterdir() if path.is_dir()):
        files = sorted(path for path in folder.rglob("*") if path.is_file())[:OTHERS]
        for start in range(0, len(files) - len(CAMERAS) + 1, len(CAMERAS)):
            chosen = files[start : start + len(CAMERAS)]
            sources.append(dict(zip(CAMERAS, chosen, strict=True)))
    count = len(sources)
    return PictureSet(
        sources=sources,
        names=tuple(str(number) for number in range(count)),
        targets=np.zeros(count, dtype=np.int64),
        digest="verdict-other-things",
    )


def unknown_items(options: Namespace) -> dict[str, PictureSet]:
    """Scenes of no class that is taught, by kind."""
    twins = open_dataset(str(tree(options, "twins", classes_of(options)[1])), cameras=CAMERAS)
    return {"near twins": twins.test, "other things": other_things(options)}


def build(options: Namespace, name: str, data: Path, cameras: Sequence[str]) -> dict[str, Any]:
    """A row of what `mdp-partition build` makes of `data`, frozen and trained."""
    devices = [f"raspberry-pi-5-{number}" for number in range(1, len(CAMERAS) + 1)]
    config = Given(
        None,
        {
            "run.data": str(data),
            "run.weights": str(options.weights),
            "run.minutes": options.minutes,
            "run.seed": options.seed,
            "plan.profiles": [DEVICES],
            "plan.latency_ms": options.latency_ms,
            **({"plan.cameras": dict(zip(devices, cameras, strict=True))} if cameras else {}),
        },
    ).build()
    out: Path = options.scratch / f"{name}-{options.seed}-{options.minutes:g}"
    begun_s, run = time.monotonic(), Path(f"{out}.run")
    built = build_bundle(config, out, Progress(), run=run)
    assert built is not None
    assert built.measured is not None
    measured, bundle = built.measured, Bundle.open(out)
    pilot = measured.to_json()["pilot"]
    row: dict[str, Any] = {
        "networks": sorted({one["network"] for one in pilot["chosen"].values()}),
        "predicted": measured.pilot.choice.together,
        "trained": measured.to_json()["trained"],
        "seconds": time.monotonic() - begun_s,
        "frozen": by_size((measured.frozen or built.report).evaluation),
        **by_size(built.report.evaluation),
    }
    if cameras:
        fusion = bundle.fusion_weights()
        assert fusion.novelty
        progress, cache = Progress(), run / "cache"
        cache.mkdir(exist_ok=True)
        seen = open_dataset(str(data), cameras=CAMERAS)
        known, *_ = run_on(bundle, seen.test, "test", cache, progress)
        answered = fuse_all(known, fusion)
        row["pairs"] = list(pairs_of(options, answered, seen.test.targets))
        row["unknown"] = {}
        for kind, pictures in unknown_items(options).items():
            strange, *_ = run_on(bundle, pictures, kind, cache, progress)
            if kind == "near twins":
                row["of_their_class"] = auc_of_predicted(answered, fuse_all(strange, fusion))
            found = measure_rejection(known, fusion, fusion.novelty, strange).subsets
            row["unknown"][kind] = [
                {
                    "auc": _mean([one.auc for one in found if one.size == size]),
                    "rejected": _mean([one.unknown for one in found if one.size == size]),
                    "known_rejected": _mean([one.known for one in found if one.size == size]),
                }
                for size in range(1, len(CAMERAS) + 1)
            ]
    return row


def fuse_all(contributions: Mapping[int, Contribution], fusion: FusionWeights) -> np.ndarray:
    """Logits `[N, C]` of all cameras together, less their mean over the classes."""
    weights = weights_for(tuple(sorted(contributions)), "stacked", fusion)
    logits = np.asarray(fuse(contributions, weights), dtype=np.float64)
    found: np.ndarray = logits - logits.mean(axis=1, keepdims=True)
    return found


def pairs_of(
    options: Namespace, logits: np.ndarray, targets: np.ndarray
) -> Iterator[dict[str, Any]]:
    """Of each pair whose classes are both taught: how often its items are taken for one of the two,
    and how often the right one of the two has the larger logit.
    """
    classes = classes_of(options)[0]
    names = sorted(path.name for path in options.parts.iterdir() if path.is_dir())
    for first, second in zip(names[::2], names[1::2], strict=True):
        if first in classes and second in classes:
            both = [classes.index(first), classes.index(second)]
            rows = np.isin(targets, both)
            taken = np.take(both, logits[rows][:, both].argmax(axis=1))
            yield {
                "classes": [first, second],
                "pair": float(np.isin(logits[rows].argmax(axis=1), both).mean()),
                "within": float((taken == targets[rows]).mean()),
            }


def auc_of_predicted(known: np.ndarray, unknown: np.ndarray) -> float:
    """Area under the ROC curve by the energy of unknown items `[U, C]` beside those known ones that
    are taken for the same class, over the classes that they are taken for.
    """
    taken, own = unknown.argmax(axis=1), known.argmax(axis=1)
    areas = [
        (np.sum(taken == c), area_under_curve(energy(known[own == c]), energy(unknown[taken == c])))
        for c in np.unique(taken)
        if (own == c).any()
    ]
    counts, values = zip(*areas, strict=True)
    return float(np.average(values, weights=counts))


def _mean(values: Sequence[float | None]) -> float:
    return float(np.mean([value for value in values if value is not None]))


def by_size(evaluation: Evaluation) -> dict[str, Any]:
    """Accuracy of each member alone, and the means over subsets of each size, fused and averaged;
    the worst with one missing.
    """
    sizes = range(1, len(evaluation.members) + 1)
    subsets = {size: [s for s in evaluation.subsets if len(s.members) == size] for size in sizes}
    return {
        "alone": [member.accuracy for member in evaluation.members],
        "by_size": [_mean([one.stacked for one in subsets[size]]) for size in sizes],
        "averaged": [_mean([one.bagged for one in subsets[size]]) for size in sizes],
        "one_missing": min(one.stacked for one in subsets[len(evaluation.members) - 1]),
    }


class LargestOverViews(nn.Module):
    """One network that takes the largest of each feature over an item's views."""

    def __init__(self, member: FamilyMember) -> None:
        super().__init__()
        self.member = member

    def forward(self, views: Tensor) -> Tensor:
        """Logits `[B, C]` of pixels `[V, B, 3, S, S]` in 0..255, of any number of views V."""
        found: Tensor = self.member.bag(self.features(views).amax(dim=0))
        return found

    def features(self, views: Tensor) -> Tensor:
        """Features `[V, B, D]`."""
        flat = self.member.normalise(views.flatten(0, 1).contiguous())
        found: Tensor = self.member.trunk(flat)
        return found.view(*views.shape[:2], -1)


@dataclass(frozen=True, slots=True)
class SceneViews:
    """Pixels `[V, N, S, S, 3]` of scenes, and their classes `[N]`."""

    pixels: np.ndarray
    targets: np.ndarray

    @classmethod
    def of(cls, pictures: PictureSet, side: int, cache: Path, what: str) -> "SceneViews":
        views = [View(side, camera=camera) for camera in CAMERAS]
        loaded = load_views(pictures, views, cache, Progress(), what)
        return cls(np.stack(loaded), pictures.targets)

    def tensor(self) -> Tensor:
        """Pixels `[V, N, 3, S, S]`."""
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(self.pixels, 4, 2)))


def features_of(network: LargestOverViews, pixels: Tensor) -> Tensor:
    """Features `[V, N, D]` of pixels `[V, N, 3, S, S]`."""
    with torch.inference_mode():
        return torch.cat(
            [
                network.features(pixels[:, start : start + 32].float())
                for start in range(0, pixels.shape[1], 32)
            ],
            dim=1,
        )


def logits_of(network: LargestOverViews, features: Tensor, views: Sequence[int]) -> np.ndarray:
    """Logits `[N, C]` of some views, by features `[V, N, D]`."""
    with torch.inference_mode():
        found: np.ndarray = network.member.bag(features[list(views)].amax(dim=0)).numpy()
    return found


def train_views(options: Namespace, data: Dataset, side: int) -> dict[str, Any]:
    """A row of one network that sees all views, trained as long as the bundles."""
    begun_s, name = time.monotonic(), options.network
    cache = options.scratch / f"views-cache-{options.seed}"
    cache.mkdir(exist_ok=True)
    weights = weights_at_hand(options.weights)[name]
    torch.manual_seed(options.seed)
    member = FamilyMember(Backbone(name, side, pooling="stages"), len(data.labels), weights).eval()
    network = LargestOverViews(member)
    learned = SceneViews.of(data.train, math.ceil(1.25 * side), cache, "train")
    # The classifier is fitted to the frozen features first, as those of the bundles.
    whole = SceneViews.of(data.train, side, cache, "train, whole")
    features = [
        network_features(name, side, weights, one, lambda *_: None).read for one in whole.pixels
    ]
    largest, groups = np.max(features, axis=0), np.arange(len(data.train))
    held_out = leave_groups_out(largest, data.train.targets, groups, len(data.labels))
    fitted = fit(
        largest, data.train.targets, len(data.labels),
        penalty=held_out.penalty, sharpness=held_out.sharpness,
    )  # fmt: skip
    with torch.no_grad():
        member.bag.weight.copy_(torch.from_numpy(fitted.weight))
        member.bag.bias.copy_(torch.from_numpy(fitted.bias))
    test = SceneViews.of(data.test, side, cache, "test")
    row: dict[str, Any] = {
        "networks": [f"{name} at {side} px"],
        "frozen": measure_views(network.eval(), test),
    }
    left_s = 60 * options.minutes - (time.monotonic() - begun_s) - options.serving_s
    epochs = _fine_tune(network, learned, left_s, options.seed, name)
    row |= measure_views(network, test)
    row["trained"] = {f"{name} at {side} px": {"seconds": left_s, "epochs": epochs}}
    row["seconds"] = time.monotonic() - begun_s
    pixels = test.tensor()
    row["unknown"] = {
        kind: [
            {"auc": one}
            for one in _separation(
                network, pixels, SceneViews.of(pictures, side, cache, kind).tensor()
            )
        ]
        for kind, pictures in unknown_items(options).items()
    }
    files = [picture_of(source, camera) for source in data.test.sources for camera in CAMERAS]
    sizes = [file.stat().st_size for file in files if isinstance(file, Path)]
    row["picture_bytes"] = len(CAMERAS) * float(np.mean(sizes))
    return row


def _separation(network: LargestOverViews, known: Tensor, strange: Tensor) -> list[float]:
    """The area under the ROC curve by number of views: the better of energy and doubt."""
    found, seen = [], [features_of(network, pixels) for pixels in (known, strange)]
    for size in range(1, len(CAMERAS) + 1):
        areas = []
        for views in combinations(range(len(CAMERAS)), size):
            both = [logits_of(network, features, views) for features in seen]
            areas.append([area_under_curve(*map(score, both)) for score in (energy, doubt)])
        found.append(float(np.mean(areas, axis=0).max()))
    return found


def measure_views(network: LargestOverViews, test: SceneViews) -> dict[str, Any]:
    """Accuracies by number of views, as `by_size`."""
    features = features_of(network, test.tensor())
    found = {
        views: float((logits_of(network, features, views).argmax(axis=1) == test.targets).mean())
        for size in range(1, len(CAMERAS) + 1)
        for views in combinations(range(len(CAMERAS)), size)
    }
    sizes = range(1, len(CAMERAS) + 1)
    return {
        "alone": [found[view,] for view in range(len(CAMERAS))],
        "by_size": [_mean([v for key, v in found.items() if len(key) == size]) for size in sizes],
        "one_missing": min(v for key, v in found.items() if len(key) == len(CAMERAS) - 1),
    }


def _fine_tune(
    network: LargestOverViews, learned: SceneViews, seconds: float, seed: int, name: str
) -> float:
    """Train in place by the recipe of measured networks; returns the epochs."""
    member = network.member
    recipe = recipe_of(FrozenNetwork(name, catalogue()[name].spec(224, 0)), flips=True)
    groups = [
        {**group, "peak": recipe.learning_rate}
        for group in parameter_groups(network, recipe.weight_decay)
    ]
    optimiser = torch.optim.AdamW(groups, lr=0.0, fused=True)
    pixels = [Pictures(one, torch.from_numpy(learned.targets), member.bag.out_features)
              for one in learned.tensor()]  # fmt: skip
    # As many views in a step as those of the bundles' trainings; each view is cropped by itself.
    batch, device = recipe.batch // 2, torch.device("cpu")
    order = Draws(len(learned.targets), batch, recipe.drawing, seed, device)
    crops = Draws(len(learned.targets), batch, recipe.drawing, seed + 1, device)
    averaged = Averaged(network, recipe.average)
    begun_s, steps = time.monotonic(), 0
    train_but_for_statistics(network)
    while (done := (time.monotonic() - begun_s) / seconds) < 1:
        for group in optimiser.param_groups:
            group["lr"] = rate(done) * group["peak"]
        side, draw = side_at(done, member.backbone.image_size, recipe), order()
        seen = []
        for one in pixels:
            shown = replace(crops(), rows=draw.rows, share=draw.share)
            seen.append(shown.views(one.pixels, View(side)))
        enabled = quicker_autocast() == "bf16"
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            logits = network(torch.stack(seen)).float()
        loss = F.cross_entropy(
            logits, draw.labels(pixels[0]), label_smoothing=recipe.label_smoothing
        )
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(network.parameters(), MAX_GRADIENT_NORM)
        optimiser.step()
        averaged.step()
        steps += 1
    averaged.into_network()
    return steps / order.per_epoch


def rows_of(options: Namespace) -> Iterator[dict[str, Any]]:
    """A row for each of the asked ways."""
    classes, _ = classes_of(options)
    scenes = tree(options, "scenes", classes)
    for way in options.ways:
        if way == "cameras":
            row = build(options, way, scenes, CAMERAS)
        else:
            before = next(one for one in read_rows() if _key(one) == (options.seed, "cameras"))
            best = CAMERAS[int(np.argmax(before["alone"]))]
            if way == "networks":
                pictures = tree(options, f"scenes-{best}", classes, best)
                row = {**build(options, way, pictures, ()), "camera": best}
            else:
                options.network, _, words = before["networks"][0].partition(" at ")
                options.serving_s = 40.0
                data = open_dataset(str(scenes), cameras=CAMERAS)
                row = train_views(options, data, int(words.removesuffix(" px")))
        yield {"seed": options.seed, "way": way, "classes": len(classes), **row}


def read_rows() -> list[dict[str, Any]]:
    return list(read_result(RESULT.stem)["rows"]) if RESULT.exists() else []


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["seed"], row["way"]


#: What the page calls a way.
NAMED = {
    "cameras": "four cameras, a network each",
    "networks": "four networks on the best camera",
    "views": "one network that sees all views",
}


def figures() -> str:
    """Figures of the page."""
    result = read_result(RESULT.stem)
    rows = sorted(result["rows"], key=lambda row: (row["seed"], WAYS.index(row["way"])))
    sizes = range(1, len(CAMERAS) + 1)

    def lines() -> Iterator[dict[str, Any]]:
        for row in rows:
            for state, found in (("frozen", row["frozen"]), ("trained", row)):
                yield {**found, "state": state, "named": NAMED[row["way"]], "row": row}

    def percent(value: float) -> str:
        return f"{100 * value:.1f}"

    def of_unknown(kind: str, key: str, size: int) -> tuple[str, Any]:
        def cell(row: Mapping[str, Any]) -> str:
            value = row["unknown"][kind][size - 1].get(key)
            if value is None:
                return "-"
            return f"{value:.3f}" if key == "auc" else percent(value)

        return f"{size}", cell

    unknown = [row for row in rows if "unknown" in row]
    blocks = [
        f"Per cent of test items answered rightly; {format_machine(result['machine'])}.",
        table(
            lines(),
            ("draw", lambda one: one["row"]["seed"]),
            ("", "{named}"),
            ("", "{state}"),
            ("best alone", lambda one: percent(max(one["alone"]))),
            *((f"{n}", lambda one, n=n: percent(one["by_size"][n - 1])) for n in sizes),
            ("averaged", lambda one: percent(one["averaged"][-1]) if "averaged" in one else "-"),
            ("one missing, at least", lambda one: percent(one["one_missing"])),
            ("network", lambda one: ", ".join(one["row"]["networks"])),
            (
                "epochs",
                lambda one: (
                    ", ".join(f"{t['epochs']:.1f}" for t in one["row"]["trained"].values())
                    if one["state"] == "trained"
                    else ""
                ),
            ),
        ),
    ]
    for kind in ("near twins", "other things"):
        blocks += [
            f"Area under the ROC curve, {kind}, trained, by the number of views:",
            table(
                unknown,
                ("draw", "{seed}"),
                ("", lambda row: NAMED[row["way"]]),
                *(of_unknown(kind, "auc", size) for size in sizes),
            ),
        ]
    blocks += [
        "Per cent of other things rejected, and of known test items, at the stated 2 %:",
        table(
            [row for row in unknown if row["way"] == "cameras"],
            ("draw", "{seed}"),
            *((f"others, {n}", of_unknown("other things", "rejected", n)[1]) for n in sizes),
            *((f"known, {n}", of_unknown("other things", "known_rejected", n)[1]) for n in sizes),
        ),
    ]
    drawn = {row["seed"]: row for row in unknown if "pairs" in row}
    blocks += [
        "Near twins: how far apart their surfaces are in a picture; per cent of test items of the "
        "two that four trained cameras take for one of them, and in which the right one of the two "
        "has the larger logit:",
        table(
            read_result(SURFACES.stem)["rows"],
            ("pair", lambda row: " / ".join(row["classes"])),
            ("pixels apart, mean", "{mean_px:.2f}"),
            ("two draws of the first", "{of_itself_px:.2f}"),
            ("surface over a pixel apart", lambda row: f"{row['over_a_pixel']:.0%}"),
            ("of another colour", lambda row: f"{row['other_colour']:.0%}"),
            *(
                (f"draw {seed}: {named}", pair_of(row, key))
                for key, named in (("pair", "one of the two"), ("within", "the right one"))
                for seed, row in sorted(drawn.items())
            ),
        ),
        "Area under the ROC curve of near twins beside the known items that are taken for the same "
        "class, by four cameras: "
        + ", ".join(f"{row['of_their_class']:.3f}" for _, row in sorted(drawn.items()))
        + ".",
    ]
    return "\n\n".join(blocks)


def pair_of(row: Mapping[str, Any], key: str) -> Callable[[Mapping[str, Any]], str]:
    """Per cent of a pair in a draw; where one of the two was left out, that."""

    def cell(surfaces: Mapping[str, Any]) -> str:
        found = [one[key] for one in row["pairs"] if one["classes"] == surfaces["classes"]]
        return f"{100 * found[0]:.0f}" if found else "one left out"

    return cell


PAGE = Page("benchmarks.scenes.verdict", figures, picture)


def main() -> None:
    options = arguments(
        __doc__, parts=Path, tiny=Path, weights=Path, scratch=Path, minutes=10.0, latency_ms=12.0,
        seed=0, ways=WAYS,
    )  # fmt: skip
    use_threads(own_threads())
    options.scratch.mkdir(parents=True, exist_ok=True)
    machine = describe_machine()
    for row in rows_of(options):
        others = [one for one in read_rows() if _key(one) != _key(row)]
        write_json(RESULT, {"machine": machine, "rows": [*others, row]})


if __name__ == "__main__":
    main()
