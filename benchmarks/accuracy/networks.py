"""Trained and untouched networks: their logits on both splits, and what a picture takes here.

Logits of trained networks come with them, from the machine that trained them; logits of untouched
ones, and those that did not come, are computed here by the product's export and its crops.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import nn

from benchmarks.families.train import Job
from benchmarks.harness.turns import in_turns
from mdp.files import write_bytes
from mdp.fusion.fuse import Contribution
from partitioner.assembly.imported import HEADS, timm_module
from partitioner.assembly.members import Model, read_names, rows_of
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import Dataset, SplitName, open_dataset
from partitioner.export.sessions import contribution, open_session
from partitioner.export.write import ServedMember, to_onnx
from partitioner.networks.families import Backbone, FamilyMember
from partitioner.run.progress import Progress

#: A training that was cut short below this share of its epochs does not count.
WHOLE = 0.95
#: Rounds in which networks take turns, and runs of each in a round.
ROUNDS, RUNS = 8, 9
UNTOUCHED = "untouched"
#: How names of jobs begin, and the data sets' names.
PREFIXES = {"cifar": "cifar10", "tiny": "tinyimagenet40", "nette": "imagenette"}
VIT, LITE = "vit_tiny_patch16_224", "tf_efficientnet_lite"
#: Public weights that are evaluated as they are, where the data's classes are among theirs.
PUBLIC = {
    f"{weights}-{size}": (weights, Backbone(model, size))
    for weights, model, sizes in (
        ("lite0", LITE + "0", (128, 152, 192, 224)),
        ("lite1", LITE + "1", (128, 160, 192)),
        ("lite2", LITE + "2", (128, 160)),
        ("vit", VIT, (96, 128, 224)),
    )
    for size in sizes
}


@dataclass(frozen=True, slots=True)
class Network:
    """A network with the logits of both of its heads on the calibration and the test split."""

    name: str
    #: What it is and at which size, as in its job's name: "lite0-40".
    body: str
    #: How it was trained, as in its job's name; empty: taught by the teacher, same view.
    kind: str
    seed: int
    #: Milliseconds of one picture here.
    ms: float
    calibration: Contribution
    test: Contribution


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
    def has_public(self) -> bool:
        """Whether the data's classes are among those of the public weights."""
        return set(self.data.labels) <= set(self._public_names())

    def of_public(self, body: str) -> tuple[Contribution, Contribution]:
        """Logits of untouched public weights on both splits."""
        weights, backbone = PUBLIC[body]
        file = self._weights / f"{weights}.safetensors"
        names = self._public_names()
        model = Model(
            device=body, labels="imagenet1k.txt", timm=backbone.name, weights=file.name,
            image_size=backbone.image_size,
        )  # fmt: skip
        rows = rows_of(names, self.data.labels, {}, model.labels)
        return self._both(
            f"{UNTOUCHED}-{body}",
            lambda: timm_module(model, file, len(names), rows),
            backbone.image_size,
        )

    def of_trained(self, job: Job, weights: Path) -> tuple[Contribution, Contribution]:
        """Logits of a trained network on both splits, by the product's export and crops."""

        def module() -> nn.Module:
            member = FamilyMember(job.backbone, len(self.data.labels))
            state = load_file(weights)
            member.load_state_dict(
                {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
            )
            return ServedMember(member).eval()

        return self._both(job.name, module, job.backbone.image_size)

    def random(self, body: str, backbone: Backbone) -> Path:
        """A served model of this body with random weights: all that latency asks for."""
        file = self._folder / f"random-{body}.onnx"
        if not file.is_file():
            member = FamilyMember(backbone, len(self.data.labels))
            content = to_onnx(ServedMember(member).eval(), backbone.image_size, HEADS, {})
            write_bytes(file, content)
        return file

    def times_ms(self, bodies: Mapping[str, Backbone]) -> dict[str, float]:
        """Milliseconds of one picture, of all bodies in turns; measured once, and kept."""
        kept = self._folder / "latency.json"
        if kept.is_file():
            found: dict[str, float] = json.loads(kept.read_text())
            if set(bodies) <= set(found):
                return found
        files = {body: self.random(body, backbone) for body, backbone in bodies.items()}
        found = timed(files, {body: backbone.image_size for body, backbone in bodies.items()})
        kept.write_text(json.dumps(found, indent=1))
        return found

    def _public_names(self) -> list[str]:
        return read_names(self._weights / "imagenet1k.txt")

    def _both(self, name: str, module: Any, size: int) -> tuple[Contribution, Contribution]:
        kept = self._folder / f"{name}.npz"
        if not kept.is_file():
            file = self._folder / f"{name}.onnx"
            write_bytes(file, to_onnx(module(), size, HEADS, {}))
            session = open_session(file)
            heads: dict[str, Any] = {}
            splits: tuple[SplitName, ...] = ("calibration", "test")
            for split in splits:
                views = load_views(
                    self.data.split(split), [View(size)], self._folder / "views", Progress(),
                    f"{split}, {size} px",
                )[0]  # fmt: skip
                both = contribution(session, views)
                heads |= {split[0] + "b": both.boost, split[0] + "g": both.bag}
            np.savez(kept, **heads)
        return of_file(kept)


def of_file(path: Path) -> tuple[Contribution, Contribution]:
    """The logits `[N, C]` of both heads on the calibration and the test split, as float32."""
    kept = {key: values.astype(np.float32) for key, values in np.load(path).items()}
    return Contribution(kept["cb"], kept["cg"]), Contribution(kept["tb"], kept["tg"])


def timed(files: Mapping[str, Path], sizes: Mapping[str, int]) -> dict[str, float]:
    """Least median processor time of one picture on one thread; the networks take turns."""
    random = np.random.default_rng(0)
    runs = {}
    for name, file in files.items():
        pixels = random.integers(0, 256, (1, sizes[name], sizes[name], 3), dtype=np.uint8)
        runs[name] = partial(open_session(file).run, None, {"images": pixels})
    blocks = in_turns(runs, ROUNDS, least=RUNS, clock=time.process_time)
    return {name: min(float(np.median(block)) for block in own) for name, own in blocks.items()}


def whole(jobs: Sequence[Job], folder: Path) -> list[Job]:
    """The jobs whose networks came, and were trained for as long as was asked."""
    found = []
    for job in jobs:
        told = folder / f"{job.name}.json"
        logits, weights = told.with_suffix(".npz"), told.with_suffix(".safetensors")
        if told.is_file() and (logits.is_file() or weights.is_file()):
            epochs = json.loads(told.read_text())["epochs"]
            if epochs >= WHOLE * job.recipe.epochs:
                found.append(job)
    return found


def networks_of(
    store: Store, jobs: Sequence[Job], planned: Sequence[Job], folder: Path
) -> list[Network]:
    """The networks of one data set, trained and untouched, with what each takes here.

    `planned` have their latency measured, whether they came or not.
    """
    bodies = {parts_of(job.name)[0]: job.backbone for job in planned}
    public = {f"public-{body}": backbone for body, (_, backbone) in PUBLIC.items()}
    times_ms = store.times_ms(bodies | (public if store.has_public else {}))
    found = []
    for job in jobs:
        body, kind, seed = parts_of(job.name)
        both = logits_of(store, job, folder)
        if both is not None:
            found.append(Network(job.name, body, kind, seed, times_ms[body], *both))
    if store.has_public:
        for body in PUBLIC:
            both = store.of_public(body)
            ms = times_ms[f"public-{body}"]
            found.append(Network(f"{body}-{UNTOUCHED}", body, UNTOUCHED, 0, ms, *both))
    return found


def logits_of(store: Store, job: Job, folder: Path) -> tuple[Contribution, Contribution] | None:
    """What came with the network, or what its weights give here; None where neither is there."""
    kept, weights = folder / f"{job.name}.npz", folder / f"{job.name}.safetensors"
    if kept.is_file() and "tb" in np.load(kept):
        return of_file(kept)
    return store.of_trained(job, weights) if weights.is_file() else None


def has_both(place: Path) -> bool:
    """Whether weights and test logits of a network came."""
    kept = place.with_suffix(".npz")
    return place.with_suffix(".safetensors").is_file() and kept.is_file() and "tb" in np.load(kept)


def checked(store: Store, job: Job, folder: Path) -> dict[str, Any]:
    """Test logits that came with a network against those of its export here."""
    came = of_file(folder / f"{job.name}.npz")[1]
    own = store.of_trained(job, folder / f"{job.name}.safetensors")[1]
    targets = store.data.test.targets
    labels = [both.bag.argmax(axis=1) for both in (came, own)]
    return {
        "name": job.name,
        "pictures": len(targets),
        "came": float((labels[0] == targets).mean()),
        "exported": float((labels[1] == targets).mean()),
        "same_label": float((labels[0] == labels[1]).mean()),
    }


def unseen_of(data: Dataset, prefix: str) -> np.ndarray[Any, Any] | None:
    """Which test pictures `[N]` have names that begin so, if any has."""
    mask = np.array([Path(name).name.startswith(prefix) for name in data.test.names])
    return mask if mask.any() else None
