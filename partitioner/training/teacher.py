"""The teacher of a run: load it, train it if asked, and keep its logits."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from mdp.files import Record, read_json, write_bytes, write_json
from mdp.formats.plan import TeacherSpec
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import Dataset, SplitName
from partitioner.data.memmaps import Array, Index, Views, load, load_weights
from partitioner.networks.linear_probe import fit_classifier
from partitioner.networks.submodel import init_weights
from partitioner.networks.teacher import Teacher, build_teacher
from partitioner.networks.teacher_weights import load_teacher, start_classifier
from partitioner.run.curves import Curve
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.run.settings import TeacherFacts
from partitioner.training.cached_outputs import BATCH, batch, device_of, keep_outputs
from partitioner.training.compute import training_device
from partitioner.training.context import TrainingContext
from partitioner.training.distributed import all_exist
from partitioner.training.largest_logits import Answers, Keep, LargestLogits
from partitioner.training.loop import BatchLoss, derive_seed, train_stage
from partitioner.training.losses import centre


class Right(Record, frozen=True):
    """Right answers of a network, and their number of pictures."""

    right: int
    of: int

    @property
    def share(self) -> float:
        """Above 0 and below 1: half a right and half a wrong picture are added."""
        return (self.right + 0.5) / (self.of + 1)


@dataclass(frozen=True, slots=True)
class GivenTeacher:
    """A teacher whose weights are the user's file or timm's, and the pictures of a run."""

    run: RunFolder
    spec: TeacherSpec
    facts: TeacherFacts
    data: Dataset
    checkpoint: Path | None
    progress: Progress

    def pixels(self, split: SplitName) -> Views:
        """A split `[N, S, S, 3]` as the teacher sees it, unchanged."""
        view = View(self.spec.shape.image_size)
        what = f"{split} split, {view.image_size} px for the teacher"
        return load_views(self.data.split(split), [view], self.run.cache, self.progress, what)[0]

    def build(self) -> Teacher:
        """The teacher with a classifier for the data's classes; raises InputError.

        A fitted linear probe is kept in the run's cache.
        """
        if self.facts.pretrained:
            self.progress.note(f"getting timm's weights of {self.spec.name}")
        count = len(self.data.labels)
        teacher = load_teacher(self.spec, count, self.checkpoint, self.facts.rows)
        if self.facts.classes == "probe":
            path = self.run.cache / f"classifier-{self._digest}.safetensors"
            if not path.exists():
                self._fit(teacher, path)
            start_classifier(teacher, **load_weights(path))
        return teacher

    def accuracy(self) -> float:
        """Accuracy on the calibration pictures, above 0 and below 1."""
        path = self._accuracy
        if not path.exists():
            teacher = self.build()
            logits = self.outputs(teacher, "calibration", pre_logits=False)
            targets = torch.from_numpy(self.data.calibration.targets)
            right = int((logits.cpu().argmax(dim=1) == targets).sum())
            write_json(path, Right(right, len(targets)))
        return read_json(path, Right).share

    @property
    def is_measured(self) -> bool:
        """Tell whether the accuracy is known already."""
        return self._accuracy.exists()

    @property
    def _accuracy(self) -> Path:
        return self.run.cache / f"accuracy-{self._digest}.json"

    def _fit(self, teacher: Teacher, path: Path) -> None:
        count = len(self.data.train)
        features = self.outputs(teacher, "train", pre_logits=True)
        targets = torch.from_numpy(self.data.train.targets).to(features.device)
        weight, bias = fit_classifier(features, targets, len(self.data.labels))
        write_bytes(path, save({"weight": weight.cpu().contiguous(), "bias": bias.cpu()}))
        self.progress.note(f"teacher: a linear probe fitted on {count:,} training pictures")

    def outputs(self, teacher: Teacher, split: SplitName, *, pre_logits: bool) -> Tensor:
        """Logits `[N, C]`, or the classifier's inputs `[N, D]`; float32."""
        pixels, network = self.pixels(split), teacher.eval().to(training_device()).network
        found: list[Tensor] = []
        head: Any = network
        what = f"teacher's {'features' if pre_logits else 'logits'}, {split} split"
        with self.progress.task(what, len(pixels)) as advance, torch.inference_mode():
            for start in range(0, len(pixels), BATCH):
                index = np.arange(start, min(start + BATCH, len(pixels)))
                seen = teacher.normalise(batch(pixels, index, device_of(teacher)))
                found.append(head.forward_head(head.forward_features(seen), pre_logits=pre_logits))
                advance(len(index), "")
        return torch.cat(found)

    @property
    def _digest(self) -> str:
        """Identifies the weights, the classifier and the pictures."""
        facts = msgspec.structs.replace(self.facts, file=None)
        made_of = [facts, self.data.train.digest, self.data.calibration.digest]
        return hashlib.sha256(msgspec.json.encode(made_of, order="sorted")).hexdigest()[:16]


def ensure_teacher(work: TrainingContext, checkpoint: Path | None) -> Teacher:
    """The trained teacher: from the run folder if it is there, else made as the settings say.

    `checkpoint` is the user's file to start from. Raises InputError where it does not fit.
    """
    run, schedule, variants = work.run, work.settings.teacher_schedule, work.variants
    if all_exist(run.teacher):
        teacher = _random(work)
        teacher.load_state_dict(load_weights(run.teacher))
        return teacher.eval()
    every = range(variants.count if schedule.epochs else 0)

    def prepare() -> tuple[Teacher, BatchLoss, None]:
        # The first process downloads or refuses, the others find the files.
        teacher = initial_teacher(work, checkpoint)
        pixels = [variants.view(work.teacher_view, v) for v in every]
        labels = [variants.labels(v) for v in every]

        def loss_of(network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
            variant, device = epoch % len(every), device_of(network)
            logits = network(batch(pixels[variant], index, device)).float()
            wanted = labels[variant][index].to(device)
            smoothing = schedule.label_smoothing
            return {"loss": F.cross_entropy(logits, wanted, label_smoothing=smoothing)}

        return teacher, loss_of, None

    def keep(teacher: Teacher, curve: Curve) -> None:
        if curve:
            run.keep_curve("teacher", curve)
        write_bytes(run.teacher, save(teacher.state_dict()))

    stage = work.stage("teacher", "training the teacher", schedule)
    return train_stage(stage, prepare, keep, work.progress).eval()


def _random(work: TrainingContext) -> Teacher:
    return build_teacher(work.plan.require_teacher(), len(work.data.labels), pretrained=False)


def initial_teacher(work: TrainingContext, checkpoint: Path | None) -> Teacher:
    """The teacher before its training; raises InputError where `checkpoint` does not fit."""
    facts, spec = work.settings.teacher, work.plan.require_teacher()
    torch.manual_seed(derive_seed(work.settings.seed, "teacher", "init"))
    if facts.pretrained or checkpoint is not None:
        return GivenTeacher(work.run, spec, facts, work.singles, checkpoint, work.progress).build()
    teacher = _random(work)
    init_weights(teacher.network)
    return teacher


def keep_of(work: TrainingContext) -> Keep | None:
    """The part of the teacher's logits for training pictures that is kept; None for all."""
    count = work.settings.answers_keep
    return None if count is None else Keep(count, work.settings.schedule.temperature)


def target_files(work: TrainingContext) -> list[Path]:
    """The files of the finished teacher's logits, by variant; none where teaching is live."""
    variants = work.variants
    count = variants.count if work.settings.teaching == "kept" else 0
    keep = work.settings.answers_keep
    what = "logits" if keep is None else f"logits-{keep}"
    return [work.run.answers(f"{variants.digest}-{v}-{what}") for v in range(count)]


def load_targets(work: TrainingContext) -> list[Answers]:
    """The finished teacher's logits `[N, C]` by variant, from `target_files`."""
    kept, classes = map(load, target_files(work)), len(work.data.labels)
    if work.settings.answers_keep is None:
        return list(kept)
    return [LargestLogits(one, classes) for one in kept]


def ensure_targets(work: TrainingContext, teacher: Teacher) -> list[Answers]:
    """The teacher's centred logits `[N, C]` for each variant of the train split.

    None where teaching is live. Those for calibration and test are kept too.
    """
    variants, count, kept = work.variants, len(work.singles.train), target_files(work)
    teacher.to(training_device())
    missing = [v for v, path in enumerate(kept) if not path.exists()]
    if missing:
        what, done = f"teacher's logits, {len(kept)} variants", (len(kept) - len(missing)) * count
        with work.progress.task(what, len(kept) * count, done=done) as advance:
            for variant in missing:
                keep_outputs(
                    [kept[variant]],
                    logits_of(teacher, variants.view(work.teacher_view, variant)),
                    count,
                    arithmetic=work.settings.autocast,
                    dtype=np.float16,
                    advance=advance,
                    keep=keep_of(work),
                )
    for split in ("calibration", "test"):
        _ensure_plain(work, teacher, split)
    return load_targets(work)


def _ensure_plain(work: TrainingContext, teacher: Teacher, split: SplitName) -> None:
    """Keep the teacher's fp32 logits for an unchanged split."""
    path = plain_answers_file(work, split)
    if path.exists():
        return
    pixels = work.teacher_pixels(split)
    with work.progress.task(f"teacher's logits, {split} split", len(pixels)) as advance:
        keep_outputs(
            [path],
            logits_of(teacher, pixels),
            len(pixels),
            arithmetic="fp32",
            dtype=np.float32,
            advance=advance,
        )
    note_accuracy(work, split)


def plain_answers_file(work: TrainingContext, split: SplitName) -> Path:
    """The file of the finished teacher's fp32 logits for an unchanged split."""
    return work.run.answers(work.singles.split(split).digest[:16])


def note_accuracy(work: TrainingContext, split: SplitName) -> None:
    """Say how good the teacher's kept logits for a split are."""
    targets = work.singles.split(split).targets
    right = accuracy(load(plain_answers_file(work, split)), targets)
    work.progress.note(f"teacher: {right:.1%} on {len(targets):,} {split} pictures")


def logits_of(teacher: Teacher, pixels: Views) -> Callable[[Index], list[Tensor]]:
    """A function from indices of pictures to the teacher's centred logits."""
    # Centred in float32: in bf16 the difference of two large logits loses its digits.
    device = device_of(teacher)
    return lambda index: [centre(teacher(batch(pixels, index, device)).float())]


def accuracy(logits: Array, targets: Index) -> float:
    """Share of the rows of `logits[N, C]` whose largest entry is the target's."""
    return float((logits.argmax(axis=1) == targets).mean())
