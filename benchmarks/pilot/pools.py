"""Pools of labelled pictures, and features of frozen networks on them, kept on disk."""

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mdp.errors import InputError
from mdp.files import write_json
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import PictureSet
from partitioner.data.memmaps import Views
from partitioner.pilot.candidates import FrozenNetwork
from partitioner.pilot.features import Features, cut_features, network_features
from partitioner.run.progress import Progress

#: The pictures that every pool of it is drawn from are in their names' hashes' order.
CAMERAS = ("back", "left", "right", "top")


@dataclass(frozen=True, slots=True)
class PicturePool:
    """PoolPictures of one folder: at most `each` of a class, some more of the classes `more`."""

    #: Below the folder of all data sets; it has a folder for each class.
    folder: str
    each: int
    more: Mapping[str, int]
    #: Part of the names of the files that count.
    holding: str = ""
    #: The files of a class that are not counted, in their order.
    skipped: int = 0
    #: The first and the last name of the files that count, by the alphabet; empty: all. Where the
    #: last comes before the first, it goes on from the alphabet's end at its beginning.
    names: tuple[str, str] | tuple[()] = ()
    #: The first classes, by the alphabet; 0: all.
    classes: int = 0

    @property
    def name(self) -> str:
        """The pool in a file's name."""
        some = f"{self.classes}-classes" if self.classes else ""
        parts = (*self.folder.split("/"), self.holding, str(self.skipped), *self.names, some)
        return "-".join(filter(None, parts))

    @property
    def scenes(self) -> bool:
        """True where a class has a folder for each scene, with a picture of every camera."""
        return self.folder == "parts"

    def read(self, data: Path) -> "PoolPictures":
        """The pool's pictures; raises InputError where the folder is not there."""
        root = data / self.folder
        if not root.is_dir():
            raise InputError(f"{root}: expected a folder for each class, found none")
        labels = sorted(one.name for one in root.iterdir() if one.is_dir())
        labels = labels[: self.classes or None]
        sources, targets, groups = list[Path](), list[int](), list[int]()
        for target, label in enumerate(labels):
            count = self.more.get(label, self.each)
            found = sorted((root / label).iterdir(), key=_hash)
            found = [one for one in found if self.holding in one.name and self._counts(one.name)]
            for one in found[self.skipped : self.skipped + count]:
                group = groups[-1] + 1 if groups else 0
                views = [one / f"{camera}.jpg" for camera in CAMERAS] if self.scenes else [one]
                sources += views
                targets += [target] * len(views)
                groups += [group] * len(views)
        return PoolPictures(tuple(labels), tuple(sources), np.array(targets), np.array(groups))

    def _counts(self, name: str) -> bool:
        if not self.names:
            return True
        first, last = self.names
        if first <= last:
            return first <= name <= last
        return name >= first or name <= last


def _hash(path: Path) -> bytes:
    return hashlib.sha256(path.name.encode()).digest()


@dataclass(frozen=True, slots=True)
class PoolPictures:
    """Single pictures in the order of their classes; a scene's in the order of `CAMERAS`."""

    labels: tuple[str, ...]
    sources: tuple[Path, ...]
    targets: NDArray[np.int64]
    #: A scene, or a picture by itself.
    groups: NDArray[np.int64]

    @property
    def picture_set(self) -> PictureSet:
        """The pictures as views are cut from them."""
        names = tuple(str(path) for path in self.sources)
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
        return PictureSet(self.sources, names, self.targets, digest)


@dataclass(frozen=True, slots=True)
class FeatureStore:
    """Features of a pool's pictures by candidate, read from `cache` or computed."""

    data: Path
    weights: Mapping[str, Path]
    cache: Path
    progress: Progress

    def load(
        self, pool: PicturePool, candidates: Sequence[FrozenNetwork]
    ) -> tuple[PoolPictures, dict[int, Features]]:
        """The pool's pictures, and features `[N, D]` by the candidate's place."""
        pictures = pool.read(self.data)
        passes: dict[tuple[str, int], dict[int, int]] = {}
        for row, one in enumerate(candidates):
            passes.setdefault((one.name, one.spec.image_size), {})[one.depth] = row
        found: dict[int, Features] = {}
        for (name, side), by_depth in passes.items():
            path = self.cache / f"{pool.name}-{len(pictures.sources)}-{name}-{side}"
            features = self._pass(path, pictures, name, side, sorted(by_depth))
            found |= {row: features[depth] for depth, row in by_depth.items()}
        return pictures, found

    def _pass(
        self, path: Path, pictures: PoolPictures, name: str, side: int, depths: Sequence[int]
    ) -> Mapping[int, Features]:
        """Features of one network at one size by depth, memory-mapped."""
        files = {depth: path.with_name(f"{path.name}-{depth}.npy") for depth in depths}
        if not all(file.exists() for file in files.values()):
            wanted = pictures.picture_set
            (pixels,) = load_views(wanted, [View(side)], self.cache, self.progress, path.name)
            compute = _compute(name, side, self.weights[name], depths)
            wall, processor = time.perf_counter(), time.process_time()
            with self.progress.task(path.name, len(pixels)) as advance:
                features = compute(pixels, advance)
            took = {
                "network": name,
                "image_size": side,
                "pictures": len(pixels),
                "candidates": len(depths),
                "seconds": time.perf_counter() - wall,
                "processor_s": time.process_time() - processor,
            }
            write_json(path.with_name(f"{path.name}.seconds.json"), took)
            for depth, file in files.items():
                np.save(file, features[depth].astype(np.float32))
        return {depth: np.load(file, mmap_mode="r") for depth, file in files.items()}

    def seconds(self) -> list[Mapping[str, float]]:
        """Seconds that every pass took."""
        return [json.loads(path.read_text()) for path in sorted(self.cache.glob("*.seconds.json"))]


def _compute(
    name: str, side: int, weights: Path, depths: Sequence[int]
) -> Callable[[Views, Callable[[int, str], None]], Mapping[int, Features]]:
    if list(depths) == [0]:
        return lambda pixels, advance: {
            0: network_features(name, side, weights, pixels, advance).read
        }
    return lambda pixels, advance: cut_features(name, side, weights, depths, pixels, advance)
