"""One distilled ViT on the fastest device: what a user does who decomposes nothing.

Knowledge distillation (Hinton, Vinyals and Dean, arXiv 1503.02531) into the shape of `Ground`, with
labels and teacher mixed as in our bag heads. Which shape of at most the fastest member's cost is
chosen by accuracy.py on the calibration split. Without that device there is no answer.
"""

from benchmarks.rivals.classifier import TaughtLoss, asked, new_classifier, train
from benchmarks.rivals.ground import Ground
from benchmarks.rivals.outcome import Outcome, measured
from mdp.formats.plan import SubModelSpec
from mdp.fusion.fuse import Logits, probabilities
from partitioner.export.evaluate import accuracy
from partitioner.networks.weight_init import inherit


def run(ground: Ground) -> Outcome:
    (spec,) = ground.shapes
    calibration, test = student(ground, "single", spec)
    data = ground.work.data
    subset = measured((0,), {"alone": probabilities(test)}, data.test.targets)
    return Outcome(
        shapes=ground.shapes,
        alone=[subset.accuracy["alone"]],
        subsets=[subset],
        headline="alone",
        calibration=accuracy(calibration, data.calibration.targets),
    )


def student(ground: Ground, name: str, spec: SubModelSpec) -> tuple[Logits, Logits]:
    """Logits `[N, C]` on calibration and test of a distilled ViT that is trained where missing."""
    module = new_classifier(ground, name, spec, ground.num_classes)
    if ground.work.settings.schedule.start == "teacher":
        inherit(module.trunk, ground.teacher)
    epochs = ground.work.settings.schedule.epochs
    train(ground, name, module, lambda: TaughtLoss(ground, ground.train_pixels(spec)), epochs)
    calibration, test = (ground.pixels(spec, split) for split in ("calibration", "test"))
    return asked(module, calibration)[0], asked(module, test)[0]
