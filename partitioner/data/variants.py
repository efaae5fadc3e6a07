"""The train split as R variants of every picture, kept on disk, and as each network sees them.

A variant is made once, as a square canvas; every view is cut from that canvas by the code that
serves. So teacher and sub-models see the same variant of a picture, whatever their size and region.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mdp.pictures.crop import Pixels, side_for
from partitioner.data.augment import Augmenter, mix, own_randomness
from partitioner.data.crops import View, cut, load_views, views_file
from partitioner.data.datasets import PictureSet
from partitioner.data.memmaps import Array, Index, Views, load, new_array, rows
from partitioner.run.progress import Progress
from partitioner.run.settings import Augmentation

#: Pixels of canvas from which on several processes make them: starting one takes seconds.
_MANY_PIXELS = 50_000_000
_CHUNK = 512


def canvas_side(views: Iterable[View]) -> int:
    """Side in pixels of a square picture that is as fine as the finest of `views`."""
    return max(side_for(view.region, view.image_size) for view in views)


@dataclass(frozen=True, slots=True)
class Variants:
    """Folder of the variants of one train split, and the recipe for them."""

    pictures: PictureSet
    num_classes: int
    augmentation: Augmentation
    seed: int
    #: How many there are, the unchanged one included.
    count: int
    #: The teacher's view, and those that a client will cut from one decoded picture.
    teacher: View
    members: tuple[View, ...]
    cache: Path
    progress: Progress

    @property
    def image_size(self) -> int:
        """Side of a canvas in pixels: as fine as the finest view."""
        return canvas_side((self.teacher, *self.members))

    def view(self, view: View, variant: int) -> Views:
        """Views `[N, S, S, 3]` of one variant, memory-mapped; made where missing."""
        if variant == 0:
            together = self.members if view in self.members else (view,)
            sizes = dict.fromkeys(f"{v.image_size} px" for v in together)
            what = f"train split, {', '.join(sizes)}"
            arrays = load_views(self.pictures, together, self.cache, self.progress, what)
            return arrays[together.index(view)]
        canvas = self._canvas(variant)
        if view == View(self.image_size):
            return load(canvas)
        path = self._path(f"view-{view.name}", variant)
        if not path.exists():
            self._cut(load(canvas), view, path)
        return load(path)

    def labels(self, variant: int) -> "Labels":
        """Labels as probabilities: one for the class, unless mixed."""
        mixed = None
        if variant and self.augmentation.mixes:
            self._canvas(variant)
            mixed = load(self._path("labels", variant))
        return Labels(self.pictures.targets, self.num_classes, mixed)

    @property
    def digest(self) -> str:
        """Names these variants of these pictures."""
        made_of = msgspec.json.encode(
            [self.augmentation, self.seed, self.image_size, self.pictures.digest], order="sorted"
        )
        return hashlib.sha256(made_of).hexdigest()[:16]

    def _path(self, what: str, variant: int) -> Path:
        return self.cache / f"{what}-{self.digest}-{variant}.npy"

    def _canvas(self, variant: int) -> Path:
        path = self._path("canvas", variant)
        if not path.exists():
            with own_randomness():
                self._make(variant, path)
            self._remove_base()
        return path

    def _remove_base(self) -> None:
        """Remove the plain pictures that canvases are made of, once all are made."""
        base = View(self.image_size)
        made = all(self._path("canvas", v).exists() for v in range(1, self.count))
        if made and base not in (self.teacher, *self.members):
            views_file(self.pictures, [base], self.cache, base).unlink(missing_ok=True)

    def remove_views(self, view: View) -> None:
        """Remove a network's views of the variants that are made of canvases."""
        for variant in range(1, self.count):
            self._path(f"view-{view.name}", variant).unlink(missing_ok=True)

    def _make(self, variant: int, path: Path) -> None:
        """Move, colour and erase every picture by itself, then mix them if asked to."""
        plain = self.view(View(self.image_size), 0)
        shape = plain.shape
        augmented = _Augmented(plain, self.augmentation, self.seed, variant)
        what = f"variant {variant} of {self.count - 1}"
        with (
            new_array(path, np.uint8, shape) as canvases,
            self.progress.task(what, len(plain)) as advance,
        ):
            done = 0
            for chunk in _load_chunks(augmented):
                canvases[done : done + len(chunk)] = chunk
                done += len(chunk)
                advance(len(chunk), "")
            if self.augmentation.mixes:
                kept = self._path("labels", variant)
                with new_array(kept, np.float16, (len(plain), self.num_classes)) as labels:
                    labels[np.arange(len(plain)), self.pictures.targets] = 1
                    key = (self.seed, variant)
                    mix(canvases, labels, self.pictures.targets, self.augmentation, key)

    def _cut(self, canvases: Views, view: View, path: Path) -> None:
        shape = (len(canvases), view.image_size, view.image_size, 3)
        with new_array(path, np.uint8, shape) as array:
            for number, canvas in enumerate(canvases):
                array[number] = cut(np.asarray(canvas), view)


@dataclass(frozen=True, slots=True)
class Labels:
    """One variant's labels; a batch of them is made when it is asked for."""

    targets: Index
    num_classes: int
    #: Probabilities `[N, C]` of mixed pictures.
    mixed: Array | None = None

    def part(self, of: slice) -> "Labels":
        """The labels of some of the pictures."""
        mixed = None if self.mixed is None else self.mixed[of]
        return Labels(self.targets[of], self.num_classes, mixed)

    def __getitem__(self, index: Index) -> Tensor:
        """Probabilities `[B, C]`, float32, of the pictures `index`."""
        if self.mixed is not None:
            return rows(self.mixed, index)
        targets = torch.from_numpy(self.targets[index])
        return torch.nn.functional.one_hot(targets, self.num_classes).float()


class _Augmented(Dataset[Pixels]):
    """One variant, picture by picture, for torch's DataLoader."""

    def __init__(self, plain: Views, augmentation: Augmentation, seed: int, variant: int) -> None:
        # Other processes get the file's name, for a memory-mapped array would travel in full, and
        # make their own transforms, for these cannot be unpacked before timm is imported our way.
        self.file = Path(str(getattr(plain, "filename", "")))
        self.shape, self.seed, self.variant = plain.shape, seed, variant
        self.augmentation = augmentation

    @cached_property
    def plain(self) -> Views:
        """The pictures as they are."""
        return load(self.file)

    @cached_property
    def augmenter(self) -> Augmenter:
        """timm's transforms."""
        return Augmenter(self.augmentation, self.shape[1])

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, number: int) -> Pixels:
        return self.augmenter.variant(
            np.asarray(self.plain[number]), self.seed, number, self.variant
        )


def _load_chunks(augmented: _Augmented) -> Iterator[Pixels]:
    """Chunks `[B, S, S, 3]` in order, by as many processes as torch has threads where it pays."""
    several = torch.get_num_threads() > 1 and math.prod(augmented.shape) // 3 >= _MANY_PIXELS
    loader: DataLoader[Pixels] = DataLoader(
        augmented,
        batch_size=_CHUNK,
        collate_fn=np.stack,
        num_workers=torch.get_num_threads() if several else 0,
        multiprocessing_context="spawn" if several else None,
    )
    yield from loader
