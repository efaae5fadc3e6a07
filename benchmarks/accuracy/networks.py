"""Trained and untouched networks: their logits on both splits, and what a picture takes here.

Logits of trained networks on whole pictures come with them, from the machine that trained them; all
others are computed here by the product's export and its crops, when they are asked for.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.torch import load_file
from torch import nn

from benchmarks.harness.results import RESULTS
from benchmarks.harness.turns import in_turns
from mdp.files import write_bytes
from mdp.formats.plan import Region
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import load_picture
from mdp.runtimes.onnxruntime import open_session
from partitioner.assembly.imported import HEADS, timm_module
from partitioner.assembly.members import Model, read_names, rows_of
from partitioner.data.crops import View, load_views, picture_of
from partitioner.data.datasets import Dataset, SplitName, open_dataset
from partitioner.data.memmaps import Views
from partitioner.export.sessions import run_session
from partitioner.export.write import ServedMember, to_onnx
from partitioner.networks.families import Backbone, FamilyMember
from partitioner.regions import REGIONS
from partitioner.run.progress import Progress

#: The trainings: data, network, start, teacher and recipe of each.
TRAININGS = RESULTS / "trainings.json"
#: A training that was cut short below this share of its epochs is a candidate, and no evidence of
#: what a part of the method brings.
FULL, BRIEF = 0.95, "brief"
#: Trained by an earlier recipe.
FIRST = "first"
#: Rounds in which networks take turns, and runs of each in a round.
ROUNDS, RUNS = 30, 9
#: Of networks that only latency is measured of.
_CLASSES = 10
UNTOUCHED = "untouched"
#: What jobs call public weights that teach as they are.
UNTOUCHED_TEACHER = "teacher"
VIT, LITE = "vit_tiny_patch16_224", "tf_efficientnet_lite"
#: timm's names of public weights.
MODELS = {"lite0": LITE + "0", "lite1": LITE + "1", "lite2": LITE + "2", "vit": VIT}
#: Public weights that are evaluated as they are, where the data's classes are among theirs.
PUBLIC = (
    "lite0-128", "lite0-152", "lite0-192", "lite0-224", "lite1-128", "lite1-160", "lite1-192",
    "vit-224",
)  # fmt: skip
WHOLE = "whole"
#: What networks that the page names see, by name.
SEEN: dict[str, Region] = dict(
    zip(
        (WHOLE, "centre88", "centre75", "topleft", "bottomright", "topright", "bottomleft"),
        REGIONS,
        strict=True,
    )
)


#: Shorter side of pictures of which parts smaller than 88 % are tried: at 32 px they lose.
DETAILED_PX = 100


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One training of the list."""

    name: str
    data: str
    backbone: Backbone
    #: Public weights that it starts from, or empty for a start from nothing.
    weights: str
    epochs: float
    #: The job whose network teaches, "teacher" for the untouched one, or empty for the labels.
    teacher: str


def read_jobs(path: Path) -> list[TrainingJob]:
    """The trainings of a list."""
    return [
        TrainingJob(
            name=entry["name"],
            data=entry["data"],
            backbone=Backbone(*entry["backbone"]),
            weights=entry["weights"],
            epochs=entry["recipe"]["epochs"],
            teacher=entry["teacher"],
        )
        for entry in json.loads(path.read_text())
    ]


@dataclass(frozen=True, slots=True)
class Network:
    """A network that sees one part of the picture, or all of it."""

    name: str
    #: What it is and at which size, as in its job's name: "lite0-40".
    body: str
    #: How it was trained, as in its job's name; empty: taught by the teacher, same view.
    kind: str
    seed: int
    #: Milliseconds of one picture here.
    ms: float
    #: Logits of both of its heads on a split.
    logits: Callable[[SplitName], Contribution]
    #: One of `SEEN`.
    seen: str = WHOLE


def parts_of(name: str) -> tuple[str, str, int]:
    """Body, kind and seed of a job's name, which is DATA-BODY[-KIND]-sSEED or DATA-teacher."""
    parts = name.split("-")[1:]
    seed = int(parts.pop()[1:]) if parts[-1][1:].isdecimal() and parts[-1][0] == "s" else 0
    if parts == ["teacher"]:
        return "teacher", "teacher", seed
    kind = "" if parts[-1].isdecimal() else parts.pop()
    return "-".join(parts), kind, seed


class Store:
    """Models and logits that were made here, kept in a folder so that they are made once."""

    def __init__(self, folder: Path, data: str, weights: Path) -> None:
        self.data = open_dataset(data)
        self._folder, self._weights = folder / Path(data).name, weights
        self._folder.mkdir(parents=True, exist_ok=True)

    @property
    def parts(self) -> tuple[str, ...]:
        """Parts that networks may see: small ones only of pictures that have detail to show."""
        first = load_picture(picture_of(self.data.calibration.sources[0], None))
        shape = first.size if isinstance(first, Image.Image) else first.shape[:2]
        return tuple(SEEN) if min(shape) >= DETAILED_PX else (WHOLE, "centre88")

    @property
    def has_public(self) -> bool:
        """Tell whether the data's classes are among those of the public weights."""
        return set(self.data.labels) <= set(self._public_names())

    def of_public(self, body: str, split: SplitName, seen: str = WHOLE) -> Contribution:
        """Logits of untouched public weights."""
        backbone = public(body)
        file = self._weights / f"{body.split('-')[0]}.safetensors"
        names = self._public_names()
        model = Model(
            device=body, labels="imagenet1k.txt", timm=backbone.name, weights=file.name,
            image_size=backbone.image_size,
        )  # fmt: skip
        rows = rows_of(names, self.data.labels, {}, model.labels)
        return self._of(
            f"{UNTOUCHED}-{body}",
            lambda: timm_module(model, file, len(names), rows),
            backbone,
            split,
            seen,
            HEADS,
        )

    def of_trained(
        self, job: TrainingJob, weights: Path, split: SplitName, seen: str = WHOLE
    ) -> Contribution:
        """Logits of a trained network, by the product's export and crops."""

        def module() -> nn.Module:
            member = FamilyMember(job.backbone, len(self.data.labels), boosting=True)
            state = load_file(weights)
            member.load_state_dict(
                {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
            )
            return ServedMember(member).eval()

        return self._of(job.name, module, job.backbone, split, seen, ["boost", "bag"])

    def _public_names(self) -> list[str]:
        return read_names(self._weights / "imagenet1k.txt")

    def _of(
        self,
        name: str,
        module: Callable[[], nn.Module],
        backbone: Backbone,
        split: SplitName,
        seen: str,
        heads: Sequence[str],
    ) -> Contribution:
        kept = self._folder / f"{name}{_at(seen)}.{split}.npz"
        if not kept.is_file():
            size = backbone.image_size
            file = self._folder / f"{name}.onnx"
            if not file.is_file():
                write_bytes(file, to_onnx(module(), size, heads, {}))
            views = self._views(size, split, seen)
            logits = run_session(open_session(file), views, heads)
            named: dict[str, Any] = dict(zip(heads, logits, strict=True))
            np.savez(kept, **named)
        found = np.load(kept)
        return Contribution.of([found[head] for head in heads])

    def _views(self, size: int, split: SplitName, seen: str) -> Views:
        """A split `[N, S, S, 3]` as a member sees it; parts are cut together."""
        parts = [WHOLE] if seen == WHOLE else [name for name in self.parts if name != WHOLE]
        views = load_views(
            self.data.split(split), [View(size, SEEN[part]) for part in parts],
            self._folder / "views", Progress(), f"{split}, {size} px",
        )  # fmt: skip
        return views[parts.index(seen)]


def public(body: str) -> Backbone:
    """Of public weights and a picture size: "lite0-128"."""
    weights, size = body.split("-")
    return Backbone(MODELS[weights], int(size))


def times_ms(folder: Path, backbones: Iterable[Backbone]) -> dict[Backbone, float]:
    """Milliseconds of one picture on one thread, of all in turns; measured once, and kept.

    Least median of processor time over rounds, with random weights and ten classes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {f"{b.name}-{b.image_size}-{b.depth}": b for b in backbones}
    kept = folder / "latency.json"
    found: dict[str, float] = json.loads(kept.read_text()) if kept.is_file() else {}
    if not set(wanted) <= set(found):
        random = np.random.default_rng(0)
        runs = {}
        for name, backbone in wanted.items():
            file, size = folder / f"{name}.onnx", backbone.image_size
            if not file.is_file():
                member = FamilyMember(backbone, _CLASSES)
                write_bytes(file, to_onnx(ServedMember(member).eval(), size, HEADS, {}))
            pixels = random.integers(0, 256, (1, size, size, 3), dtype=np.uint8)
            runs[name] = partial(open_session(file).run, None, {"images": pixels})
        blocks = in_turns(runs, ROUNDS, least=RUNS, clock=time.process_time)
        found = {name: min(float(np.median(one)) for one in own) for name, own in blocks.items()}
        kept.write_text(json.dumps(found, indent=1))
    return {backbone: found[name] for name, backbone in wanted.items()}


def came(jobs: Sequence[TrainingJob], folder: Path) -> dict[str, str]:
    """The kinds of the networks that came, by name; a taught one that was cut short is `BRIEF`.

    Cut short, other kinds say nothing: what they are compared with was not.
    """
    found = {}
    for job in jobs:
        told = folder / f"{job.name}.json"
        there = came_with(told.with_suffix(""), "test") is not None
        if told.is_file() and (there or told.with_suffix(".safetensors").is_file()):
            kind = parts_of(job.name)[1]
            if json.loads(told.read_text())["epochs"] >= FULL * job.epochs:
                found[job.name] = kind
            elif kind == "":
                found[job.name] = BRIEF
    return found


def networks_of(
    store: Store, jobs: Sequence[TrainingJob], folder: Path, ms: Mapping[Backbone, float]
) -> list[Network]:
    """The networks of one data set, trained and untouched, with what each takes here.

    Those that fleets may have are there once for each part of the picture.
    """
    found = []
    kinds = came(jobs, folder)
    for job in (job for job in jobs if job.name in kinds):
        body, _, seed = parts_of(job.name)
        kind, weights = kinds[job.name], folder / f"{job.name}.safetensors"
        for seen in store.parts if kind in ("", BRIEF, FIRST) and weights.is_file() else (WHOLE,):
            logits = cache(partial(logits_of, store, job, folder, seen=seen))
            name = f"{job.name}{_at(seen)}"
            found.append(Network(name, body, kind, seed, ms[job.backbone], logits, seen))
    if store.has_public:
        teaches = any(job.teacher == UNTOUCHED_TEACHER for job in jobs)
        for body in PUBLIC:
            backbone = public(body)
            if backbone.name == VIT and not teaches:
                continue
            for seen in store.parts if backbone.name != VIT else (WHOLE,):
                logits = cache(partial(store.of_public, body, seen=seen))
                name = f"{body}-{UNTOUCHED}{_at(seen)}"
                found.append(Network(name, body, UNTOUCHED, 0, ms[backbone], logits, seen))
    return found


def _at(seen: str) -> str:
    return "" if seen == WHOLE else f"@{seen}"


def came_with(place: Path, split: SplitName) -> Contribution | None:
    """Logits that came with a network, as float32."""
    file = place.with_suffix(".npz")
    kept = np.load(file) if file.is_file() else {}
    boost, bag = (split[0] + head for head in "bg")
    if boost not in kept:
        return None
    return Contribution(kept[boost].astype(np.float32), kept[bag].astype(np.float32))


def logits_of(
    store: Store, job: TrainingJob, folder: Path, split: SplitName, seen: str = WHOLE
) -> Contribution:
    """Logits that came with the network, or that its weights give where not both splits came."""
    came = came_with(folder / job.name, split)
    if seen != WHOLE or came is None or came_with(folder / job.name, "test") is None:
        return store.of_trained(job, folder / f"{job.name}.safetensors", split, seen)
    return came


def unseen_of(data: Dataset, prefix: str) -> np.ndarray[Any, Any] | None:
    """Test pictures `[N]` whose names begin so, if any does."""
    mask = np.array([Path(name).name.startswith(prefix) for name in data.test.names])
    return mask if mask.any() else None
