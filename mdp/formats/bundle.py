"""Bundle: an exported plan, with the measured accuracy of every arrival subset."""

import hashlib
import os
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from mdp.errors import ConfigError, InputError
from mdp.files import MAX_JSON_BYTES, Record, decode_content, read_regular
from mdp.formats.model_file import ModelFile
from mdp.formats.plan import Assignment, Plan
from mdp.formats.profile import Fraction, NonNegativeFloat, Precision, RuntimeName
from mdp.formats.signing import BundleKey, check_signature
from mdp.fusion.anomaly_table import DEFAULT_GOOD_RATE
from mdp.fusion.cascade import Cascade
from mdp.fusion.fuse import Fusion, FusionWeights, list_subsets, sizes_not_listed

MANIFEST: Final = "manifest.json"
FUSION: Final = "fusion.json"

#: Joins the labels of one item where they do not exclude each other, as in `bent+scratched`; and
#: what stands for an item of which none holds.
JOINED_BY: Final = "+"
NO_LABEL: Final = "none"

Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
BundleName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]


class FileEntry(Record, frozen=True):
    """One file of the bundle."""

    sha256: Sha256
    size_bytes: Annotated[int, Meta(ge=0)]


class MemberAccuracy(Record, frozen=True):
    """A sub-model on its own, through its bag head."""

    k: int
    device: str
    accuracy: Fraction


class PerRule(Record, frozen=True):
    """One number for each fusion rule, a fraction; `boosted` is None without boost heads."""

    stacked: Fraction
    bagged: Fraction
    boosted: Fraction | None = None

    def under(self, rule: Fusion) -> float:
        """The number of `rule`; without boost heads, a boosted answer is a bagged one."""
        value: float | None = getattr(self, rule)
        return self.bagged if value is None else value


class SubsetAccuracy(PerRule, frozen=True, kw_only=True):
    """One arrival subset under each fusion rule, as fractions of the pictures.

    With several labels an item, a picture is right where all of its labels are; the expected
    calibration error is that of each label by itself, over all of them.
    """

    members: tuple[int, ...]
    #: Expected calibration error: how far the top probability is from the accuracy, on average.
    ece: PerRule | None = None


class SizeAccuracy(Record, frozen=True):
    """Accuracy of a sample of the arrival subsets of a size with too many to list."""

    size: Annotated[int, Meta(ge=1)]
    #: Number of measured subsets.
    sampled: Annotated[int, Meta(ge=1)]
    mean: PerRule
    lowest: PerRule
    #: Mean expected calibration error.
    ece: PerRule


class CascadeAccuracy(Record, frozen=True):
    """A cascade with every member, as fractions of the evaluation's pictures."""

    #: The members of the first stage.
    first: tuple[int, ...]
    #: Escalated pictures, and right answers of all.
    escalated: PerRule
    accuracy: PerRule


class SubsetRejection(Record, frozen=True, omit_defaults=True):
    """Items that one arrival subset, or the subsets of one size on average, takes for unknown."""

    size: Annotated[int, Meta(ge=1)]
    #: Share of the evaluation's pictures, all of which are of a class.
    known: Fraction
    #: Share of the pictures of no class, and the area under the ROC curve of both.
    unknown: Fraction | None = None
    auc: Fraction | None = None
    #: Ascending; empty for the unlisted subsets of the size.
    members: tuple[int, ...] = ()


class Rejection(Record, frozen=True, omit_defaults=True):
    """Measurements of the answer that an item is none of the classes."""

    #: The rate of known items that the thresholds are made for.
    rate: Fraction
    subsets: list[SubsetRejection]
    #: Pictures of no class.
    unknown_pictures: Annotated[int, Meta(ge=0)] = 0


class TeacherAccuracy(Record, frozen=True, omit_defaults=True):
    """The teacher, on the evaluation's pictures unless others are named."""

    accuracy: Fraction
    #: Pictures' name and number of an earlier evaluation that this one could not repeat.
    data: str | None = None
    pictures: Annotated[int, Meta(ge=1)] | None = None


class SubsetLabels(Record, frozen=True):
    """Stacked answers of one arrival subset, label by label, as fractions."""

    members: tuple[int, ...]
    #: Of the items that are told to have the label, those that have it; None where none is told.
    precision: tuple[Fraction | None, ...]
    #: Of the items that have the label, those that are told to have it.
    recall: tuple[Fraction, ...]
    #: Decisions that are right, of all labels.
    each: Fraction


class Confusion(Record, frozen=True):
    """Two classes that all members together often take for each other."""

    labels: tuple[str, str]
    #: Of both classes.
    pictures: Annotated[int, Meta(ge=1)]
    #: Of these, those of either that are taken for the other.
    confused: Annotated[int, Meta(ge=1)]


class LowestRungs(Record, frozen=True):
    """The arrival subsets with every device that has rungs at its lowest one."""

    subsets: list[SubsetAccuracy]
    #: As of the top rungs.
    sizes: tuple[SizeAccuracy, ...] = ()


class Evaluation(Record, frozen=True):
    """Measurements on a held-out split, from which each answer's expected accuracy is taken."""

    data: str
    #: Identity of the pictures and labels.
    data_digest: Sha256
    pictures: Annotated[int, Meta(ge=1)]
    teacher: TeacherAccuracy | None
    members: list[MemberAccuracy]
    subsets: list[SubsetAccuracy]
    #: The sizes whose subsets are not listed above; none up to 8 members.
    sizes: tuple[SizeAccuracy, ...] = ()
    #: None where the bundle has no cascade.
    cascade: CascadeAccuracy | None = None
    #: Early exit of older bundles, which is ignored.
    early: Any = None
    #: Not written where the bundle cannot say whether an item is one of the classes.
    rejection: Rejection | UnsetType = UNSET
    #: Not written where no device has rungs; all else is of the top ones.
    lowest: LowestRungs | UnsetType = UNSET
    #: Not written where labels exclude each other.
    by_label: list[SubsetLabels] | UnsetType = UNSET
    #: The most frequent first; not written where there are none.
    confusions: tuple[Confusion, ...] | UnsetType = UNSET


class TriedPrecision(Record, frozen=True):
    """One way of running a sub-model that `mdp-partition quantize` has tried."""

    precision: Precision
    runtime: RuntimeName
    kept: bool
    #: Why it was kept or not.
    reason: str
    #: Milliseconds of one picture on the device, and of fp32 in the same measurement.
    compute_ms: NonNegativeFloat | None = None
    fp32_ms: NonNegativeFloat | None = None
    #: Fused accuracy lost on the calibration pictures by this member alone, a fraction.
    loss: Annotated[float, Meta(ge=-1, le=1)] | None = None


class QuantizedMember(Record, frozen=True):
    """The trials of one sub-model."""

    k: int
    device: str
    #: Source of the milliseconds.
    measured: str
    tried: list[TriedPrecision]


class BeforeAfter(Record, frozen=True):
    """Stacked accuracy of one arrival subset in fp32 and as served now, fractions."""

    members: tuple[int, ...]
    fp32: Fraction
    now: Fraction


class Quantization(Record, frozen=True):
    """The trials by which the precisions of a bundle were chosen."""

    #: Largest accepted loss of fused accuracy on the calibration pictures, a fraction.
    max_loss: Fraction
    calibration_pictures: Annotated[int, Meta(ge=1)]
    test_pictures: Annotated[int, Meta(ge=1)]
    #: With all members; the test pictures did not decide.
    calibration: BeforeAfter
    test: BeforeAfter
    #: The subset with the largest loss on the test pictures.
    worst: BeforeAfter
    members: list[QuantizedMember]


class InspectedMember(Record, frozen=True):
    """The anomaly head of one sub-model."""

    k: int
    device: str
    #: The layers that it reads, and their grids, in words.
    layers: str
    #: Bytes that it adds to the model's file.
    added_bytes: Annotated[int, Meta(ge=0)]
    #: The model's time with it over that without, on the machine that fitted it.
    time_ratio: Annotated[float, Meta(gt=0)]
    #: Area under the ROC curve of pictures with a planted patch, beside good ones; and that of the
    #: fp32 model, where the member is served in another precision and that was given.
    planted_auc: Fraction
    fp32_planted_auc: Fraction | None = None
    #: The share of such pictures that the member finds alone, at the rate of good ones that answers
    #: are made for; None of bundles that predate it.
    planted_found: Fraction | None = None


class Inspection(Record, frozen=True):
    """The fit of the anomaly heads by `mdp-partition inspect`."""

    data: str
    #: Identity of the good scenes' pictures.
    data_digest: Sha256
    good: Annotated[int, Meta(ge=1)]
    members: list[InspectedMember]
    #: Defective scenes that shares found were measured on, and their folder's name.
    defective: Annotated[int, Meta(ge=0)] = 0
    defects: str | None = None
    #: The rate of rejected good items that was asked for, which so few scenes may not support.
    rate: Annotated[float, Meta(gt=0, le=0.5)] = DEFAULT_GOOD_RATE


class Manifest(Record, frozen=True, kw_only=True):
    """The content of `manifest.json`."""

    #: Not written where each item has exactly one label. First, so that readers that predate it
    #: name it when they refuse.
    labels_per_item: Literal["several"] | UnsetType = UNSET
    name: BundleName
    labels: Annotated[list[str], Meta(min_length=2, max_length=100_000)]
    plan: Plan
    #: Relative POSIX path -> entry, for every file beside the manifest.
    files: dict[str, FileEntry]
    provenance: dict[str, str]
    #: None until `mdp-partition evaluate` has run.
    evaluation: Evaluation | None = None
    #: None unless `mdp-partition quantize` has chosen the precisions.
    quantisation: Quantization | None = None
    #: None where no cascade was fitted, or no first stage was sure enough.
    cascade: Cascade | None = None
    #: Early exit of older bundles, which is ignored.
    early: Any = None
    #: Not written unless `mdp-partition inspect` has given the models anomaly heads.
    inspection: Inspection | UnsetType = UNSET
    format_version: Literal[1] = 1

    def __post_init__(self) -> None:
        if self.several:
            self._check_several()
        elif self.evaluation is not None and self.evaluation.by_label:
            raise ValueError("`evaluation.by_label` needs `labels_per_item`")
        if len(set(self.labels)) != len(self.labels):
            raise ValueError("`labels` name a class twice")
        for path in self.files:
            _check_relative(path)
        for path in (*model_paths(self.plan), FUSION):
            if path not in self.files:
                raise ValueError(f"`files` lacks {path}")
        count = len(self.plan.assignments)
        if self.evaluation is not None:
            _check_measured("evaluation", self.evaluation, count)
            for one in self.evaluation.confusions or ():
                if not set(one.labels) <= set(self.labels) or len(set(one.labels)) < 2:
                    raise ValueError(f"`evaluation.confusions` name {', '.join(one.labels)}")
            lowest = self.evaluation.lowest
            if bool(lowest) != any(a.lower for a in self.plan.assignments):
                raise ValueError("`evaluation.lowest` goes with `rungs` in the plan")
            if lowest:
                _check_measured("evaluation.lowest", lowest, count)
        if self.cascade is not None and not set(self.cascade.first) < set(range(count)):
            raise ValueError(f"`cascade.first` has to be some and not all of {count} members")

    @property
    def several(self) -> bool:
        """Tell whether several labels, or none, may hold of one item."""
        return self.labels_per_item == "several"

    def _check_several(self) -> None:
        """Raise ValueError for labels that cannot be joined, and what goes with one label alone."""
        for label in self.labels:
            if not label or JOINED_BY in label or label == NO_LABEL:
                raise ValueError(f"`labels` hold {label!r}: not with several labels an item")
        if self.cascade is not None or any(a.lower for a in self.plan.assignments):
            raise ValueError("a cascade or rungs need one label an item, got several")
        if self.evaluation is not None:
            count = len(self.labels)
            found = self.evaluation.by_label or []
            if [one.members for one in found] != [one.members for one in self.evaluation.subsets]:
                raise ValueError("`evaluation.by_label` has to list the subsets of `evaluation`")
            if any(len(one.recall) != count or len(one.precision) != count for one in found):
                raise ValueError(f"`evaluation.by_label` needs a number for each of {count} labels")


def _check_measured(key: str, found: Evaluation | LowestRungs, count: int) -> None:
    """Raise ValueError unless every arrival subset of `count` members can be looked up."""
    unlisted = sizes_not_listed(count)
    listed = sorted(subset.members for subset in found.subsets)
    if listed != sorted(list_subsets(range(count))):
        which = f" but those of the sizes {unlisted}, where only prefixes are" if unlisted else ""
        raise ValueError(f"`{key}.subsets` have to list every arrival subset once{which}")
    if sorted(entry.size for entry in found.sizes) != unlisted:
        raise ValueError(f"`{key}.sizes` have to list each of the sizes {unlisted} once")


def _check_relative(path: str) -> None:
    parts = PurePosixPath(path).parts
    strange = "\\" in path or ":" in path or not path.isprintable()
    if not parts or path.startswith("/") or ".." in parts or strange:
        raise ValueError(f"`files` holds {path!r}: expected a relative path inside the bundle")


def model_path(k: int, rung: int = 0) -> str:
    """Path of sub-model `k`'s ONNX file inside a bundle, at the top rung or so many below it."""
    return f"submodels/{k}/{f'rung-{rung}' if rung else 'model'}.onnx"


def model_paths(plan: Plan) -> list[str]:
    """Paths of all ONNX files of a bundle of `plan`."""
    return [model_path(a.k, n) for a in plan.assignments for n in range(1 + len(a.lower))]


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_entry(path: Path) -> FileEntry:
    """Hash and size of a file as the manifest keeps them."""
    return FileEntry(sha256=sha256_of(path), size_bytes=path.stat().st_size)


def bundle_digest(manifest: Manifest) -> str:
    """Identity of what the devices run: labels, assignments and models, without measurements.

    Each request carries it, so that no answer mixes two bundles.
    """
    models = [manifest.files[model_path(a.k)].sha256 for a in manifest.plan.assignments]
    essence = [
        manifest.format_version,
        manifest.labels,
        [_identity(assignment) for assignment in manifest.plan.assignments],
        models,
    ]
    rungs = [
        [a.k, rung.runtime, rung.spec.precision, manifest.files[model_path(a.k, number)].sha256]
        for a in manifest.plan.assignments
        for number, rung in enumerate(a.lower, 1)
    ]
    if rungs:
        essence.append(rungs)
    if manifest.several:
        essence.append("several")
    return hashlib.sha256(msgspec.json.encode(essence, order="sorted")).hexdigest()


def _identity(assignment: Assignment) -> dict[str, object]:
    """The keys of an assignment in the digest: without later ones that change no answer."""
    content: dict[str, object] = msgspec.to_builtins(assignment)
    del content["batch"], content["spin"]
    # Of rungs the digest has the models, not what was measured of them.
    content.pop("rungs", None)
    # Without the unused family and an absent camera, which older bundles lack.
    return {
        key: value
        for key, value in content.items()
        if key not in ("submodel", "network", "camera") or value is not None
    }


def _read_inside(folder: Path, name: str, most_bytes: int, size_bytes: int | None = None) -> bytes:
    """Content of the file `name` of a bundle folder; raises ConfigError."""
    path = folder / name
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"{path}: leads out of the bundle")
        if name != MANIFEST and not path.is_file():
            raise ConfigError(f"{path}: missing, but listed in {MANIFEST}")
        found = path.stat().st_size
    except (OSError, RuntimeError) as error:  # RuntimeError: a cycle of links
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    if size_bytes is not None and found != size_bytes:
        raise ConfigError(f"{path}: expected {size_bytes} bytes, found {found}")
    content, _ = read_regular(path, most_bytes)
    return content


class Bundle:
    """A bundle folder whose manifest has been read; files are verified on access."""

    def __init__(self, path: Path, manifest: Manifest, manifest_content: bytes = b"") -> None:
        self.path = path
        self.manifest = manifest
        #: The parsed bytes, which are also the signed ones.
        self.manifest_content = manifest_content
        self.digest = bundle_digest(manifest)
        #: Of the top rungs and, where there are some, of the lowest.
        self._accuracy: list[dict[tuple[int, ...] | int, PerRule]] = []
        if manifest.evaluation is not None:
            measurements: list[Evaluation | LowestRungs] = [manifest.evaluation]
            if manifest.evaluation.lowest:
                measurements.append(manifest.evaluation.lowest)
            for measured in measurements:
                listed = {subset.members: subset for subset in measured.subsets}
                self._accuracy.append(listed | {entry.size: entry.mean for entry in measured.sizes})
        self._rejection: dict[tuple[int, ...] | int, float] = {}
        if manifest.evaluation is not None and manifest.evaluation.rejection:
            rejections = manifest.evaluation.rejection.subsets
            self._rejection = {one.members or one.size: one.known for one in rejections}

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, signed_by: BundleKey | None = None) -> "Bundle":
        """Read the manifest of the bundle folder `path`; raises ConfigError.

        With `signed_by`, the signature of the manifest is checked before anything of it is parsed.
        """
        path = Path(path)
        try:
            found = path.is_dir()
        except OSError as error:  # a name longer than any file system takes
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        if not found:
            raise ConfigError(f"{path}: expected a bundle folder with a {MANIFEST}")
        content = _read_inside(path, MANIFEST, MAX_JSON_BYTES)
        if signed_by is not None:
            check_signature(path / MANIFEST, content, signed_by)
        manifest = decode_content(path / MANIFEST, content, Manifest, msgspec.json.decode)
        return cls(path, manifest, content)

    def require_one_label(self, what: str) -> None:
        """Raise InputError where several labels may hold of one item, which `what` cannot do."""
        if self.manifest.several:
            raise InputError(
                f"{self.path}: {what}: expected a bundle with one label an item, of this one "
                "several may hold"
            )

    def assignment(self, device: str) -> Assignment:
        """The assignment of `device`; raises ConfigError with the known devices."""
        found = self.manifest.plan.assignment_of(device)
        if found is None:
            known = ", ".join(a.device for a in self.manifest.plan.assignments)
            raise ConfigError(
                f"{self.path / MANIFEST}: no assignment for device {device!r} (there are: {known})"
            )
        return found

    def content(self, name: str) -> bytes:
        """A listed file, after a check of size and hash; raises ConfigError."""
        entry = self.manifest.files[name]
        content = _read_inside(self.path, name, entry.size_bytes, entry.size_bytes)
        found = hashlib.sha256(content).hexdigest()
        if found != entry.sha256:
            raise ConfigError(f"{self.path / name}: expected sha256 {entry.sha256}, found {found}")
        return content

    def verified(self, name: str) -> Path:
        """Path of a listed file, after a check of size and hash; raises ConfigError."""
        self.content(name)
        return self.path / name

    def model(self, k: int, rung: int = 0) -> ModelFile:
        """Sub-model `k` as the bytes that were checked, at one rung; raises ConfigError."""
        path = model_path(k, rung)
        return ModelFile(self.path / path, self.content(path))

    def fusion_weights(self) -> FusionWeights:
        """The verified stacking weights; raises ConfigError."""
        path = self.path / FUSION
        weights = decode_content(path, self.content(FUSION), FusionWeights, msgspec.json.decode)
        if weights.num_classes != len(self.manifest.labels):
            raise ConfigError(
                f"{path}: key `num_classes`: expected {len(self.manifest.labels)}, "
                f"the number of labels, got {weights.num_classes}"
            )
        if weights.several != self.manifest.several:
            kind = "several labels" if self.manifest.several else "one label"
            raise ConfigError(
                f"{path}: key `thresholds`: they go with several labels an item, {MANIFEST} has "
                f"{kind}"
            )
        count = len(self.manifest.plan.assignments)
        if weights.agreement and len(weights.agreement) != count:
            raise ConfigError(
                f"{path}: key `agreement`: expected a number for each of {count} assignments, got "
                f"{len(weights.agreement)}"
            )
        if weights.anomaly and len(weights.anomaly.tails) != count:
            raise ConfigError(
                f"{path}: key `anomaly.tails`: expected one for each of {count} assignments, got "
                f"{len(weights.anomaly.tails)}"
            )
        for shared in weights.by_size:
            if len(shared.b) != count:
                raise ConfigError(
                    f"{path}: key `by_size`: expected weights of {count} members, the number of "
                    f"assignments, got {len(shared.b)}"
                )
        return weights

    def expected_accuracy(
        self, members: tuple[int, ...], rule: Fusion, rungs: tuple[int, ...] = ()
    ) -> float | None:
        """Measured accuracy of ascending `members` under `rule`, or None if never measured.

        Of a subset that is not listed, the mean over the subsets of its size. With the `rungs` that
        they answered by, it was measured where all are at the top, or each is at its lowest.
        """
        lower = self.manifest.plan.assignments
        if not any(rungs):
            measured = self._accuracy[:1]
        elif rungs == tuple(len(lower[k].lower) for k in members):
            measured = self._accuracy[1:]
        else:
            return None
        found = [of.get(members) or of.get(len(members)) for of in measured]
        return found[0].under(rule) if found and found[0] else None

    def known_rejected(self, members: tuple[int, ...]) -> float | None:
        """Measured share of known items that ascending `members` take for unknown, or None.

        Of a subset that is not listed, the mean over the subsets of its size.
        """
        found = self._rejection.get(members)
        return self._rejection.get(len(members)) if found is None else found

    def cascade_accuracy(self, rule: Fusion) -> float | None:
        """Measured accuracy of the bundle's cascade under `rule`, or None if never measured."""
        evaluation = self.manifest.evaluation
        if evaluation is None or evaluation.cascade is None:
            return None
        return evaluation.cascade.accuracy.under(rule)
