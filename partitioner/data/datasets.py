"""Labelled pictures: the digits that scikit-learn carries, or a class-per-folder tree.

With `cameras`, a class has a folder for each scene, with one picture per camera:
`<class>/<scene>/<camera>.jpg`. A scene counts as one picture and falls into one split whole; one
without a picture of every camera is for training alone.

A folder `unknown` beside the classes is none of them: its pictures show what answers are to call
unknown. None is trained on; half of them choose the score of novelty, the others measure it.

With several labels an item, folders name sets of labels (`label_sets`): they take the place of the
classes in splits, and may differ between a folder to train on and one to test with.

Splits depend on paths alone: runs of different seeds are trained and measured on the same pictures.
"""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as dataclass_replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mdp.errors import InputError
from mdp.formats.bundle import NO_LABEL
from mdp.pictures.crop import Pixels
from partitioner.data.class_names import alike, fold
from partitioner.data.label_sets import (
    Held,
    LabelSets,
    check_held,
    check_labels_apart,
    remark_on_classes,
    remark_on_sets,
)

DIGITS = "digits"
#: Shares of a class: held out for the test, and of the rest for calibration.
TEST_SHARE, CALIBRATION_SHARE = 0.2, 0.1
#: The folder of pictures that are of no class, and the share of them that measures.
UNKNOWN, UNKNOWN_TEST_SHARE = "unknown", 0.5
#: What the targets of such pictures are.
NO_CLASS = -1
#: Folders that hold the test split beside `train`; the first that exists is taken.
TEST_FOLDERS = ("test", "val")

#: Folders that file systems and archivers leave beside pictures.
STRAY_FOLDERS = frozenset(
    {"__MACOSX", "@eaDir", "$RECYCLE.BIN", "System Volume Information", "lost+found"}
)
#: Endings of the formats that are read, and what the most common ones begin with: a file of another
#: ending is a picture if its content says so.
ENDINGS = frozenset({
    ".avif", ".bmp", ".dds", ".dib", ".gif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg",
    ".jpx", ".mpo", ".pbm", ".pcx", ".pgm", ".png", ".pnm", ".ppm", ".qoi", ".sgi", ".tga", ".tif",
    ".tiff", ".webp",
})  # fmt: skip
#: Of these a new picture by the same camera has the size of the old one, in bytes too.
_UNCOMPRESSED = frozenset({
    ".bmp", ".dds", ".dib", ".pbm", ".pgm", ".pnm", ".ppm", ".sgi", ".tga", ".tif", ".tiff",
})  # fmt: skip
#: Bytes in the middle of such a file that tell one from another.
_SAMPLE_BYTES = 4096
_BEGINNINGS = (b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"II*\0", b"MM\0*")

#: The pictures of one scene by the names of their cameras.
Scene = Mapping[str, Path]
Source = Path | Pixels | Scene
SplitName = Literal["train", "calibration", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "calibration", "test")


@dataclass(frozen=True, slots=True)
class PictureSet:
    """Labelled pictures in a fixed order; `targets[N]` index the data set's labels.

    With several labels an item they index its sets of labels.
    """

    #: What `mdp.pictures.crop.load_picture` takes, or scenes of it.
    sources: Sequence[Source]
    #: Path below the data folder, in POSIX notation.
    names: tuple[str, ...]
    targets: NDArray[np.int64]
    #: sha256 over every picture's name, label, and size in bytes (of files that are not compressed
    #: with bytes from the middle; of arrays all pixels).
    digest: str

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Class names, sorted, and three splits that share no picture.

    No sub-model is trained on `calibration`, nor is the teacher; stacking weights are fitted there.
    """

    source: str
    labels: tuple[str, ...]
    train: PictureSet
    calibration: PictureSet
    test: PictureSet
    #: Files that lie among the pictures and are none: ending, or stray folder -> how many.
    left_out: Mapping[str, int] = field(default_factory=dict)
    #: Scenes without a picture of one of the cameras asked for: camera -> how many.
    incomplete: Mapping[str, int] = field(default_factory=dict)
    #: Pictures of cameras that were not asked for: camera -> how many.
    others: Mapping[str, int] = field(default_factory=dict)
    #: The cameras of scenes, sorted.
    cameras: tuple[str, ...] = ()
    #: Pictures of no class, with `NO_CLASS` as targets: to choose the score of novelty by, and to
    #: measure it.
    unknown: PictureSet | None = None
    unknown_test: PictureSet | None = None
    #: With several labels an item, the sets of them that targets index; None: labels exclude each
    #: other.
    sets: LabelSets | None = None
    #: Splits the files that were found as scenes of other cameras.
    split_anew: "Callable[[Sequence[str]], Dataset] | None" = field(
        default=None, repr=False, compare=False
    )

    def for_cameras(self, cameras: Sequence[str]) -> "Dataset":
        """The data set of `cameras` instead, as `open_dataset` gives it; no folder is read again.

        Scenes that lack a picture of other cameras alone are complete then, so splits may differ.
        """
        if sorted(set(cameras)) == list(self.cameras):
            return self
        assert self.split_anew is not None
        return self.split_anew(cameras)

    def flags(self, pictures: PictureSet) -> Held:
        """Tell whether each label holds of each picture `[N, L]`, with several labels an item."""
        assert self.sets is not None
        return self.sets.flags(pictures.targets)

    @property
    def set_names(self) -> tuple[str, ...]:
        """Names of what targets index: the labels, or with several an item the sets of them."""
        return self.labels if self.sets is None else self.sets.names

    @property
    def remark(self) -> str:
        """One line about what was left out; empty where that is nothing."""
        lacking = ", ".join(f"{n:,} without {camera!r}" for camera, n in self.incomplete.items())
        scenes = f"{self.source}: scenes of which nothing is measured: {lacking}" if lacking else ""
        others = ", ".join(f"{n:,} of camera {camera!r}" for camera, n in self.others.items())
        unused = f"{self.source}: pictures that no device uses: {others}" if others else ""
        # A folder `None` is a label beside the name of items without any.
        names = self.labels if self.sets is None else (*self.labels, NO_LABEL)
        twins = ", ".join(" and ".join(some) for some in alike(names))
        same = f"{self.source}: classes whose names differ in case, `_` or `-` alone: {twins}"
        known = ", ".join(repr(name) for name in self.labels if fold(name) == UNKNOWN)
        nothing = f"{self.source}: {known} is taken for a class: items of none are in {UNKNOWN!r}"
        sets = remark_on_classes(self.labels) if self.sets is None else remark_on_sets(self.sets)
        together = f"{self.source}: {sets}" if sets else ""
        parts = (
            self._strays,
            scenes,
            unused,
            same if twins else "",
            nothing if known and self.sets is None else "",
            together,
        )
        return "; ".join(filter(None, parts))

    @property
    def _strays(self) -> str:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.left_out.items()))
        count = sum(self.left_out.values())
        files = "file that is no picture" if count == 1 else "files that are no pictures"
        return f"{self.source}: left out {count:,} {files}: {kinds}" if count else ""

    def split(self, name: SplitName) -> PictureSet:
        """The split called `name`."""
        return {"train": self.train, "calibration": self.calibration, "test": self.test}[name]


def thin_out(pictures: PictureSet, limit: int, *, least: int = 0) -> PictureSet:
    """At most `limit` pictures, evenly from all classes: sources are sorted by class.

    A class with fewer than `least` among them gets more, as far as it has any.
    """
    if len(pictures) <= limit:
        return pictures
    rows = np.linspace(0, len(pictures) - 1, limit).astype(np.int64)
    if least:
        first = np.unique(pictures.targets, return_index=True)[1]
        more = first[:, None] + np.arange(least)
        same = (
            pictures.targets[np.minimum(more, len(pictures) - 1)] == pictures.targets[first, None]
        )
        few = np.bincount(pictures.targets[rows], minlength=pictures.targets[-1] + 1) < least
        inside = same & few[pictures.targets[first], None] & (more < len(pictures))
        rows = np.union1d(rows, more[inside])
    rule = f"{limit}, {least} of a class" if least else f"{limit}"
    digest = hashlib.sha256(f"{pictures.digest} {rule}".encode()).hexdigest()
    return _rows_of(pictures, rows.tolist(), digest)


def choose_rows(pictures: PictureSet, rows: Sequence[int]) -> PictureSet:
    """The pictures `rows`, in that order."""
    if list(rows) == list(range(len(pictures))):
        return pictures
    digest = hashlib.sha256(f"{pictures.digest} rows {list(rows)}".encode()).hexdigest()
    return _rows_of(pictures, rows, digest)


def _rows_of(pictures: PictureSet, rows: Sequence[int], digest: str) -> PictureSet:
    return PictureSet(
        sources=[pictures.sources[row] for row in rows],
        names=tuple(pictures.names[row] for row in rows),
        targets=pictures.targets[list(rows)],
        digest=digest,
    )


@dataclass(frozen=True, slots=True)
class _Sample:
    source: Source
    name: str
    target: int


@dataclass(frozen=True, slots=True)
class _Tree:
    """The pictures of each class in a class-per-folder tree."""

    path: Path
    #: Whether its scenes are for the test alone.
    held_out: bool
    #: Names of its folders, and the index of each one's class or set of labels.
    folders: list[str]
    targets: list[int]
    files: list[list[Path]]


@dataclass(frozen=True, slots=True)
class _Listing:
    """The files of a folder: one tree, or one to train on and one to test with."""

    root: Path
    trees: list[_Tree]
    #: Pictures of no class, and their folder, by the folder that this is in: "", "train" or a test
    #: folder.
    unknown: Mapping[str, tuple[Path, list[Path]]]
    #: Files that are no pictures: ending, or stray folder -> how many.
    left_out: Mapping[str, int]
    #: None where labels exclude each other.
    sets: LabelSets | None = None


@dataclass(slots=True)
class _Reading:
    """The cameras that are looked for, and scenes and pictures that are not complete."""

    cameras: Sequence[str]
    incomplete: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)
    partial: list[_Sample] = field(default_factory=list)  # scenes that lack a camera
    unknown: dict[str, list[_Sample]] = field(default_factory=dict)


def open_dataset(
    source: str,
    *,
    limit_train: int | None = None,
    limit_test: int | None = None,
    cameras: Sequence[str] = (),
    several: bool = False,
) -> Dataset:
    """Find and split the pictures of `source`, `digits` or a folder; none is decoded yet.

    With `cameras` the folder holds scenes; those that lack some are in `train` alone.
    `limit_train` bounds train and calibration together, `limit_test` the test split; both take
    the same share of every class. With `several` labels an item, folders name sets of labels.
    Raises InputError naming what was found and what was expected.
    """
    if several and source == DIGITS:
        raise InputError(f"{DIGITS}: expected a folder with several labels an item, has one each")
    listing = None if source == DIGITS else _list_folder(Path(source), several=several)
    return _split(source, listing, limit_train, limit_test, cameras)


def open_scenes(source: str, cameras: Sequence[str] = ()) -> PictureSet:
    """All scenes below a folder that have a picture of every camera, without classes.

    Without `cameras`, all pictures. How deep a scene lies does not matter; targets are `NO_CLASS`.
    Raises InputError.
    """
    root = Path(source)
    if not root.is_dir():
        raise InputError(f"{source}: expected a folder of scenes, found none")
    files, others = _files(root)
    if not files:
        found = f"only {sum(others.values())} other files" if others else "no file"
        raise InputError(f"{source}: expected pictures, found {found}")
    reading = _Reading(sorted(set(cameras)))
    found_there = _samples_of(root, files, NO_CLASS, reading)
    prefix = f"{root.name}/"
    return _picture_set(
        [
            dataclass_replace(sample, name=sample.name.removeprefix(prefix))
            for sample in found_there
            if not _lacks(sample.source, reading)
        ]
    )


def _split(
    source: str,
    listing: _Listing | None,
    limit_train: int | None,
    limit_test: int | None,
    cameras: Sequence[str],
) -> Dataset:
    """The pictures or scenes of a listing, of the digits without one, in splits."""
    reading = _Reading(sorted(set(cameras)))
    sets = None if listing is None else listing.sets
    # A set of labels may be of one split alone: what counts is that every label is in each.
    fewest = (3, 2, 1) if sets is None else (0, 0, 0)
    if listing is None:
        if cameras:
            raise InputError(f"{DIGITS}: expected a folder of scenes with cameras, has none")
        labels, pool = _digits()
        kept, test = _hold_out(labels, pool, TEST_SHARE, least=3, where=source)
    else:
        labels, kept, test = _read_listing(listing, reading)
    kept = _limit(labels, kept, limit_train, "--limit-train", least=fewest[1])
    test = _limit(labels, test, limit_test, "--limit-test", least=fewest[2])
    train, calibration = _hold_out(labels, kept, CALIBRATION_SHARE, least=fewest[1], where=source)
    room = limit_train and max(0, limit_train - len(kept))
    partial_scenes = _limit(labels, reading.partial, room, "--limit-train", least=0)
    unknown, unknown_test = _unknown_halves(reading.unknown)
    splits = {
        "training": _picture_set(train + partial_scenes),
        "calibration": _picture_set(calibration),
        "test": _picture_set(test),
    }
    if sets is not None:
        for split, pictures in splits.items():
            check_held(sets, pictures.targets, f"{source}: {split} split")
    return Dataset(
        source=source,
        labels=tuple(labels) if sets is None else sets.labels,
        train=splits["training"],
        calibration=splits["calibration"],
        test=splits["test"],
        left_out={} if listing is None else listing.left_out,
        incomplete=dict(reading.incomplete),
        others=dict(reading.others),
        cameras=tuple(reading.cameras),
        unknown=_picture_set(unknown) if unknown else None,
        unknown_test=_picture_set(unknown_test) if unknown_test else None,
        sets=sets,
        split_anew=partial(_split, source, listing, limit_train, limit_test),
    )


def _unknown_halves(found: Mapping[str, list[_Sample]]) -> tuple[list[_Sample], list[_Sample]]:
    """(to choose the score by, to measure it): a test folder's own measure, else some of all."""
    measured = [sample for below in TEST_FOLDERS for sample in found.get(below, ())]
    others = [s for below, samples in found.items() if below not in TEST_FOLDERS for s in samples]
    if measured:
        return others, measured
    others.sort(key=lambda s: hashlib.sha256(s.name.encode()).digest())
    count = math.ceil(UNKNOWN_TEST_SHARE * len(others))
    return others[count:], others[:count]


def _digits() -> tuple[list[str], list[_Sample]]:
    """scikit-learn's handwritten digits: 1,797 scans of 8x8 pixels with 16 grey levels."""
    from sklearn.datasets import load_digits

    scans = load_digits()
    grey = np.asarray(scans.images / 16 * 255, dtype=np.uint8)
    pictures = np.repeat(grey[..., np.newaxis], 3, axis=3)
    samples = [
        _Sample(picture, f"{target}/{index:04d}.png", int(target))
        for index, (picture, target) in enumerate(zip(pictures, scans.target, strict=True))
    ]
    return [str(digit) for digit in range(10)], samples


def _list_folder(root: Path, *, several: bool) -> _Listing:
    """The files of a class-per-folder tree, or of two; raises InputError."""
    listing = _list_trees(root, several=several)
    if not several:
        return listing
    for folder, _ in listing.unknown.values():
        raise InputError(
            f"{folder}: expected no pictures of an unknown kind with several labels an item: items "
            "without any label are in a folder `none`"
        )
    sets = LabelSets.of((name for tree in listing.trees for name in tree.folders), str(root))
    for tree in listing.trees:
        tree.targets[:] = [sets.place(folder, str(tree.path)) for folder in tree.folders]
    return dataclass_replace(listing, sets=sets)


def _list_trees(root: Path, *, several: bool) -> _Listing:
    left_out = Counter[str]()
    inside = _folders(root, "a folder of pictures, one sub-folder per class", left_out)
    tests = [name for name in TEST_FOLDERS if name in inside]
    unknown: dict[str, tuple[Path, list[Path]]] = {}
    if "train" in inside and tests:
        train = _list_tree(root, "train", left_out, left_out, unknown)
        test = _list_tree(root, tests[0], left_out, left_out, unknown)
        if several:
            check_labels_apart(train.folders, test.folders, str(root), tests[0])
        elif train.folders != test.folders:
            odd = sorted(set(train.folders) ^ set(test.folders))
            raise InputError(
                f"{root}: expected the same classes in train/ and {tests[0]}/, "
                f"but only one of them has {', '.join(odd[:5])}"
            )
        if UNKNOWN in inside:
            unknown[""] = root / UNKNOWN, _list_class(root / UNKNOWN, left_out)
        return _Listing(root, [train, test], unknown, dict(left_out))
    if inside == ["train"]:
        raise InputError(f"{root}: expected val/ or test/ beside train/, found neither")
    # Strays at the root were counted as it was read.
    tree = _list_tree(root, "", left_out, Counter(), unknown)
    return _Listing(root, [tree], unknown, dict(left_out))


def _read_listing(
    listing: _Listing, reading: _Reading
) -> tuple[list[str], list[_Sample], list[_Sample]]:
    """Labels, and the samples to train on and to test with."""
    labels = listing.trees[0].folders if listing.sets is None else list(listing.sets.names)
    several = listing.sets is not None
    for below, (folder, files) in listing.unknown.items():
        found = _samples_of(folder, files, NO_CLASS, reading)
        reading.unknown[below] = [sample for sample in found if not _lacks(sample.source, reading)]
    kept, *tests = [_samples(tree, reading) for tree in listing.trees]
    if not tests:
        least = 0 if several else 3
        kept, test = _hold_out(labels, kept, TEST_SHARE, least=least, where=str(listing.root))
        return labels, kept, test
    for tree, samples, least in zip(listing.trees, (kept, *tests), (2, 1), strict=True):
        if not several:
            _check_counts(labels, samples, least=least, where=str(tree.path))
    return labels, kept, tests[0]


def _folders(folder: Path, expected: str, left_out: Counter[str]) -> list[str]:
    """Names of the visible folders inside `folder` that may hold pictures, sorted."""
    try:
        with os.scandir(folder) as entries:
            found = sorted(e.name for e in entries if e.is_dir() and not e.name.startswith("."))
    except OSError as error:
        raise InputError(f"{folder}: expected {expected}: {error.strerror}") from error
    _count_strays(folder, found, left_out)
    return [name for name in found if name not in STRAY_FOLDERS]


def _count_strays(folder: Path, names: list[str], left_out: Counter[str]) -> None:
    for name in STRAY_FOLDERS & set(names):
        if count := sum(len(files) for _, _, files in os.walk(folder / name)):
            left_out[name] += count


def _list_tree(
    root: Path,
    below: str,
    left_out: Counter[str],
    strays: Counter[str],
    unknown: dict[str, tuple[Path, list[Path]]],
) -> _Tree:
    """The pictures of the class-per-folder tree `root/below`; those of no class go to `unknown`.

    Counts other files, and `strays` at its root.
    """
    path = root / below
    folders = _folders(path, "one folder per class", strays)
    labels = [name for name in folders if name != UNKNOWN]
    if len(labels) < 2:
        found = f"only {labels[0]!r}" if labels else "none"
        if UNKNOWN in folders:
            found += f" beside {UNKNOWN!r}, whose pictures are of no class"
        raise InputError(f"{path}: expected at least 2 class folders, found {found}")
    files = []
    for label in labels:
        if not label.isprintable():
            raise InputError(f"{path}: class folder {label!r}: expected a printable name")
        files.append(_list_class(path / label, left_out))
    if UNKNOWN in folders:
        unknown[below] = path / UNKNOWN, _list_class(path / UNKNOWN, left_out)
    return _Tree(path, below in TEST_FOLDERS, labels, list(range(len(labels))), files)


def _list_class(folder: Path, left_out: Counter[str]) -> list[Path]:
    """The pictures of one class folder, at least one; counts other files."""
    files, others = _files(folder)
    if not files:
        found = f"only {sum(others.values())} other files" if others else "no file"
        of = "no class" if folder.name == UNKNOWN else f"class {folder.name!r}"
        raise InputError(f"{folder}: expected pictures of {of}, found {found}")
    left_out.update(others)
    return files


def _samples(tree: _Tree, reading: _Reading) -> list[_Sample]:
    """Pictures or whole scenes of a tree, named by their path below it."""
    samples = []
    for folder, target, files in zip(tree.folders, tree.targets, tree.files, strict=True):
        for sample in _samples_of(tree.path / folder, files, target, reading):
            if not _lacks(sample.source, reading):
                samples.append(sample)
            elif not tree.held_out:
                reading.partial.append(sample)
    return samples


def _samples_of(
    folder: Path, files: Sequence[Path], target: int, reading: _Reading
) -> list[_Sample]:
    """The samples of one class folder, scenes that lack a camera among them."""
    scenes = _scenes(folder, files, reading) if reading.cameras else {p: p for p in files}
    return [
        _Sample(source, f"{folder.name}/{path.relative_to(folder).as_posix()}", target)
        for path, source in scenes.items()
    ]


def _lacks(source: Source, reading: _Reading) -> bool:
    return isinstance(source, Mapping) and len(source) < len(reading.cameras)


def _scenes(folder: Path, files: Sequence[Path], reading: _Reading) -> Mapping[Path, Source]:
    """The scenes of one class by folder; raises InputError where none has every camera."""
    scenes: dict[Path, dict[str, Path]] = {}
    for file in files:
        if file.parent == folder:
            raise InputError(f"{file}: expected a folder for each scene, found a picture")
        scene = scenes.setdefault(file.parent, {})
        if (other := scene.setdefault(file.stem, file)) != file:
            raise InputError(
                f"{file}: camera {file.stem!r} has another picture there: {other.name}"
            )
    known: dict[Path, Source] = {}
    for place, scene in scenes.items():
        reading.incomplete.update(c for c in reading.cameras if c not in scene)
        reading.others.update(c for c in scene if c not in reading.cameras)
        if there := {c: scene[c] for c in reading.cameras if c in scene}:
            known[place] = there
    if all(_lacks(scene, reading) for scene in known.values()):
        names = ", ".join(sorted({camera for scene in scenes.values() for camera in scene})[:9])
        raise InputError(
            f"{folder}: expected scenes with a picture each of {', '.join(reading.cameras)}, "
            f"found none among {len(scenes):,} (cameras there: {names})"
        )
    return known


def _files(folder: Path) -> tuple[list[Path], Counter[str]]:
    """Every visible picture below `folder`, sorted by path, and how many other files by kind."""
    found: list[Path] = []
    others: Counter[str] = Counter()

    def stop(error: OSError) -> None:
        raise InputError(f"{error.filename}: cannot be read: {error.strerror}") from error

    walked: set[tuple[int, int]] = set()
    for here, folders, files in os.walk(folder, onerror=stop, followlinks=True):
        place = Path(here).stat()
        if (place.st_dev, place.st_ino) in walked:
            # Links may lead back: each folder is read once.
            folders.clear()
            continue
        walked.add((place.st_dev, place.st_ino))
        _count_strays(Path(here), folders, others)
        kept = (n for n in folders if not n.startswith(".") and n not in STRAY_FOLDERS)
        folders[:] = sorted(kept)
        for path in (Path(here, name) for name in files if not name.startswith(".")):
            if _is_picture(path):
                _check_name(path)
                found.append(path)
            else:
                others[path.suffix.lower() or "without an ending"] += 1
    return sorted(found, key=lambda path: path.as_posix()), others


def _check_name(path: Path) -> None:
    """Raise InputError for a name that no file of a run could hold."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{os.fsencode(path)!r}: expected a name in UTF-8: rename it") from error


def _is_picture(path: Path) -> bool:
    """By its ending, or else by how it begins. Whether it can be decoded shows later."""
    if path.suffix.lower() in ENDINGS:
        return True
    try:
        with path.open("rb") as file:
            begin = file.read(12)
    except OSError:
        return False
    return begin.startswith(_BEGINNINGS) or (begin[:4] == b"RIFF" and begin[8:] == b"WEBP")


def _check_counts(labels: list[str], samples: list[_Sample], *, least: int, where: str) -> None:
    counts = np.bincount([sample.target for sample in samples], minlength=len(labels))
    scenes = any(isinstance(sample.source, Mapping) for sample in samples)
    for label, count in zip(labels, counts, strict=True):
        if count < least:
            kind = "scene" if scenes else "picture"
            every = " with a picture of every camera" if scenes else ""
            raise InputError(
                f"{where}: class {label!r} has {count} {kind}{'' if count == 1 else 's'}{every}, "
                f"expected at least {least} so that one can be held out"
            )


def _by_class(labels: list[str], samples: list[_Sample]) -> list[list[_Sample]]:
    """Each class's samples in the order of their names' hashes: shuffled, and always the same."""
    classes: list[list[_Sample]] = [[] for _ in labels]
    for sample in samples:
        classes[sample.target].append(sample)
    for members in classes:
        members.sort(key=lambda s: hashlib.sha256(s.name.encode()).digest())
    return classes


def _hold_out(
    labels: list[str], samples: list[_Sample], share: float, *, least: int, where: str
) -> tuple[list[_Sample], list[_Sample]]:
    """(kept, held out): `share` of every class is held out, at least one picture of each.

    With a `least` of 0 a class of one picture stays whole.
    """
    _check_counts(labels, samples, least=least, where=where)
    kept: list[_Sample] = []
    held_out: list[_Sample] = []
    for members in _by_class(labels, samples):
        count = max(1, round(share * len(members))) if len(members) > 1 else int(least > 0)
        held_out += members[:count]
        kept += members[count:]
    return kept, held_out


def _limit(
    labels: list[str], samples: list[_Sample], limit: int | None, option: str, *, least: int
) -> list[_Sample]:
    """At most `limit` samples, the same share of every class and at least `least` of each."""
    if limit is None or limit >= len(samples):
        return samples
    if limit < least * len(labels):
        raise InputError(
            f"{option}: expected at least {least * len(labels)}, "
            f"{least} for each of {len(labels)} classes, got {limit}"
        )
    classes = _by_class(labels, samples)
    quotas = [max(least, limit * len(members) // len(samples)) for members in classes]
    # Rounding leaves some over, or, with tiny classes, takes some too many: even out in turn.
    step = 1 if sum(quotas) < limit else -1
    order = sorted(range(len(labels)), key=lambda c: -len(classes[c]))
    while sum(quotas) != limit:
        for c in order:
            if sum(quotas) != limit and least <= quotas[c] + step <= len(classes[c]):
                quotas[c] += step
    return [s for members, quota in zip(classes, quotas, strict=True) for s in members[:quota]]


def _fingerprint(path: Path) -> str:
    """The size of a file in bytes, and for a format without compression some of its content."""
    try:
        size = path.stat().st_size
        if path.suffix.lower() not in _UNCOMPRESSED:
            return str(size)
        with path.open("rb") as file:
            file.seek(max(0, (size - _SAMPLE_BYTES) // 2))
            return f"{size} {hashlib.sha256(file.read(_SAMPLE_BYTES)).hexdigest()}"
    except OSError:  # a link to nothing: named with the other broken pictures
        return "-1"


def _picture_set(samples: list[_Sample]) -> PictureSet:
    samples = sorted(samples, key=lambda sample: (sample.target, sample.name))
    digest = hashlib.sha256()
    for sample in samples:
        if isinstance(sample.source, Path):
            content = _fingerprint(sample.source)
        elif isinstance(sample.source, Mapping):
            content = ",".join(f"{c} {_fingerprint(path)}" for c, path in sample.source.items())
        else:
            content = hashlib.sha256(sample.source.tobytes()).hexdigest()
        digest.update(f"{sample.name}\0{content}\0{sample.target}\n".encode())
    return PictureSet(
        sources=[sample.source for sample in samples],
        names=tuple(sample.name for sample in samples),
        targets=np.array([sample.target for sample in samples], dtype=np.int64),
        digest=digest.hexdigest(),
    )
