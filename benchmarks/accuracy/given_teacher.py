"""How accurate a given teacher is on other classes and at other picture sizes, nothing trained.

    python -m benchmarks.accuracy.given_teacher --teacher-checkpoint FILE --data FOLDER \
        [--teacher-labels FILE] [--teacher-arg img_size=160] [--limit-train N] [--limit-test N]

The figures of docs/results/real-pictures.md. With labels its classifier is cut to the data's
classes; without, a linear probe is fitted, and ridge regression on one-hot labels to the same
features beside it, penalty and temperature of both chosen on every fifth training picture. Prints
accuracy and cross-entropy on the test split and, of Imagenette, on the pictures of ImageNet's own
validation set, which pretraining has not seen.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from partitioner.config import parse_arguments
from partitioner.data.datasets import Dataset, open_dataset
from partitioner.networks.linear_probe import SHARPNESS, fit_classifier
from partitioner.networks.teacher import teacher_spec
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.run.settings import (
    Asked,
    Augmentation,
    MemberSchedule,
    RunOptions,
    TeacherSchedule,
)
from partitioner.run_setup import teacher_facts
from partitioner.training.compute import use_threads
from partitioner.training.teacher import GivenTeacher

#: What a name of a picture holds that pretraining on ImageNet's training set has not seen.
UNSEEN = "ILSVRC2012_val_"
RIDGE_PENALTIES = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


def ridge(x: Tensor, targets: Tensor, num_classes: int, penalty: float) -> tuple[Tensor, Tensor]:
    """Weight `[D, C]` and bias `[C]` of ridge regression on centred features and one-hot labels."""
    wanted = F.one_hot(targets, num_classes).to(x)
    bias = wanted.mean(dim=0)
    gram = x.T @ x + penalty * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(gram, x.T @ (wanted - bias)), bias


def fit_ridge(features: Tensor, targets: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Weight `[C, D]` and bias `[C]`, penalty and temperature chosen on every fifth picture."""
    mean, scale = features.mean(dim=0), features.std(dim=0, correction=0).clamp_min(1e-6)
    x = (features - mean) / scale
    held_out = torch.arange(len(x)) % 5 == 4
    found = []
    for penalty in RIDGE_PENALTIES:
        weight, bias = ridge(x[~held_out], targets[~held_out], num_classes, penalty)
        logits = x[held_out] @ weight + bias
        for sharpness in (4 * factor for factor in SHARPNESS):
            loss = float(F.cross_entropy(sharpness * logits, targets[held_out]))
            found.append((loss, penalty, sharpness))
    _, penalty, sharpness = min(found)
    weight, bias = ridge(x, targets, num_classes, penalty)
    weight = weight / scale[:, None]
    return sharpness * weight.T, sharpness * (bias - mean @ weight)


def told(what: str, logits: Tensor, targets: Tensor) -> str:
    """Accuracy and cross-entropy of `logits[N, C]` in a line."""
    right = float((logits.argmax(dim=1) == targets).double().mean())
    return f"{what}: {right:.1%} of {len(targets):,}, cross-entropy " + (
        f"{float(F.cross_entropy(logits, targets)):.3f}"
    )


def measure(given: GivenTeacher, data: Dataset) -> None:
    """Print the teacher's accuracy, and where a probe is fitted the one by ridge regression."""
    teacher, count = given.build(), len(data.labels)
    targets = torch.from_numpy(data.test.targets)
    if given.facts.classes != "probe":
        logits = given.outputs(teacher, "test", pre_logits=False)
        print(told("test pictures", logits, targets))
        unseen = torch.tensor([UNSEEN in name for name in data.test.names])
        if unseen.any():
            print(told("of these unseen", logits[unseen], targets[unseen]))
        return
    features = given.outputs(teacher, "train", pre_logits=True)
    seen, test = (
        torch.from_numpy(data.train.targets),
        given.outputs(teacher, "test", pre_logits=True),
    )
    for name, fit in (("linear probe", fit_classifier), ("ridge regression", fit_ridge)):
        started_s = time.perf_counter()
        weight, bias = fit(features, seen, count)
        took_s = time.perf_counter() - started_s
        print(told(name, test @ weight.T + bias, targets) + f", fitted in {took_s:.1f} s")


def main() -> None:
    """Measure one teacher on one data set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--teacher", default="vit_tiny_patch16_224")
    parser.add_argument("--teacher-arg", nargs="*", default=[])
    parser.add_argument("--teacher-checkpoint", required=True)
    parser.add_argument("--teacher-labels")
    parser.add_argument("--data", required=True)
    parser.add_argument("--limit-train", type=int)
    parser.add_argument("--limit-test", type=int)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    use_threads(options.threads)
    asked = Asked(
        options=RunOptions(
            data=options.data,
            teacher_checkpoint=options.teacher_checkpoint,
            teacher_labels=options.teacher_labels,
        ),
        teacher_schedule=TeacherSchedule(),
        schedule=MemberSchedule(),
        augmentation=Augmentation(),
    )
    data = open_dataset(
        options.data, limit_train=options.limit_train, limit_test=options.limit_test
    )
    spec = teacher_spec(options.teacher, parse_arguments(options.teacher_arg))
    facts = teacher_facts(asked, data, spec)
    with tempfile.TemporaryDirectory(prefix="given-teacher-") as folder:
        run, checkpoint = RunFolder(Path(folder)), Path(options.teacher_checkpoint)
        measure(GivenTeacher(run, spec, facts, data, checkpoint, Progress()), data)


if __name__ == "__main__":
    main()
