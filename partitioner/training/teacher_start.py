"""A teacher with weights at hand: its classifier made the data's, and how often it is right."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from mdp.files import Record, read_json, write_bytes, write_json
from mdp.formats.plan import TeacherSpec
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import Dataset, SplitName
from partitioner.data.memmaps import Views, load_weights
from partitioner.networks.teacher import Teacher
from partitioner.networks.teacher_weights import given_teacher, start_classifier
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.run.settings import TeacherFacts
from partitioner.training.cached_outputs import BATCH, batch, device_of
from partitioner.training.compute import training_device
from partitioner.training.linear_probe import fit_classifier


class Right(Record, frozen=True):
    """How many of how many pictures a network is right on."""

    right: int
    of: int

    @property
    def share(self) -> float:
        """Above 0 and below 1: half a picture right and half a picture wrong are added."""
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

        What a linear probe has learned is kept in the run's cache.
        """
        if self.facts.pretrained:
            self.progress.note(f"getting timm's weights of {self.spec.name}")
        count = len(self.data.labels)
        teacher = given_teacher(self.spec, count, self.checkpoint, self.facts.rows)
        if self.facts.classes == "probe":
            path = self.run.cache / f"classifier-{self._digest}.safetensors"
            if not path.exists():
                self._fit(teacher, path)
            start_classifier(teacher, **load_weights(path))
        return teacher

    def accuracy(self) -> float:
        """Share of the calibration pictures that it is right on, above 0 and below 1."""
        path = self.run.cache / f"accuracy-{self._digest}.json"
        if not path.exists():
            teacher = self.build()
            logits = self.outputs(teacher, "calibration", pre_logits=False)
            targets = torch.from_numpy(self.data.calibration.targets)
            right = int((logits.cpu().argmax(dim=1) == targets).sum())
            write_json(path, Right(right, len(targets)))
        return read_json(path, Right).share

    def _fit(self, teacher: Teacher, path: Path) -> None:
        count = len(self.data.train)
        features = self.outputs(teacher, "train", pre_logits=True)
        targets = torch.from_numpy(self.data.train.targets).to(features.device)
        weight, bias = fit_classifier(features, targets, len(self.data.labels))
        write_bytes(path, save({"weight": weight.cpu().contiguous(), "bias": bias.cpu()}))
        self.progress.note(f"teacher: a linear probe fitted on {count:,} training pictures")

    def outputs(self, teacher: Teacher, split: SplitName, *, pre_logits: bool) -> Tensor:
        """Logits `[N, C]`, or what the classifier reads `[N, D]`; float32."""
        pixels, network = self.pixels(split), teacher.eval().to(training_device()).network
        found: list[Tensor] = []
        head: Any = network
        what = f"teacher's {'features' if pre_logits else 'answers'}, {split} split"
        with self.progress.task(what, len(pixels)) as advance, torch.inference_mode():
            for start in range(0, len(pixels), BATCH):
                index = np.arange(start, min(start + BATCH, len(pixels)))
                seen = teacher.normalise(batch(pixels, index, device_of(teacher)))
                found.append(head.forward_head(head.forward_features(seen), pre_logits=pre_logits))
                advance(len(index), "")
        return torch.cat(found)

    @property
    def _digest(self) -> str:
        """Names the weights, the way to the data's classes and the pictures."""
        facts = msgspec.structs.replace(self.facts, file=None)
        made_of = [facts, self.data.train.digest, self.data.calibration.digest]
        return hashlib.sha256(msgspec.json.encode(made_of, order="sorted")).hexdigest()[:16]
