"""Write the list of networks that were trained, for benchmarks.families.train.

python -m benchmarks.families.jobs jobs.json
"""

import json
import sys
from pathlib import Path
from typing import Any

VIT, LITE = "vit_tiny_patch16_224", "tf_efficientnet_lite"
Recipe = dict[str, float]
#: Pretrained starts: convolutional, and vision transformers. From scratch: steeper and longer.
FINE: Recipe = {
    "learning_rate": 7e-4, "weight_decay": 0.02, "min_area": 0.3, "mixed": 0.5, "average": 0.995,
}  # fmt: skip
FINE_VIT: Recipe = FINE | {"learning_rate": 5e-4, "average": 0.997}
SCRATCH: Recipe = {
    "learning_rate": 3e-3, "weight_decay": 0.03, "min_area": 0.25, "mixed": 0.7, "average": 0.998,
}  # fmt: skip
#: Small pictures: larger crops, larger batches.
SMALL: Recipe = {"min_area": 0.4, "batch": 1024}
TEACHER: Recipe = {"weight_decay": 0.05, "mixed": 0.3}


def jobs() -> list[dict[str, Any]]:
    """All of them, in the order in which they were done."""
    cifar, tiny, nette = "cifar10", "tinyimagenet40", "imagenette"
    fine, fine_vit = FINE | SMALL, FINE_VIT | SMALL | {"learning_rate": 8e-4}
    cifar_fine = fine | {"learning_rate": 1.5e-3}
    cifar_scratch = SCRATCH | SMALL | {"learning_rate": 4e-3}
    cifar_teacher = TEACHER | {
        "learning_rate": 3e-4, "min_area": 0.5, "average": 0.995, "batch": 512,
    }  # fmt: skip
    tiny_teacher = TEACHER | {
        "learning_rate": 5e-5, "min_area": 0.4, "average": 0.99, "batch": 256,
    }  # fmt: skip
    by_cifar, by_tiny = "cifar-teacher", "tiny-teacher"
    return [
        job(by_cifar, cifar, [VIT, 128, 0], "vit", 8, cifar_teacher),
        job("nette-lite0-152-s0", nette, [LITE + "0", 152, 0], "lite0", 18, FINE, "teacher"),
        job("cifar-lite0-40-s0", cifar, [LITE + "0", 40, 0], "lite0", 14, cifar_fine, by_cifar),
        job("nette-vit8-96-s0", nette, [VIT, 96, 8], "vit", 50, FINE_VIT, "teacher"),
        job(by_tiny, tiny, [VIT, 192, 0], "vit", 4, tiny_teacher),
        job(
            "cifar-mnv4s-80-s0", cifar, ["mobilenetv4_conv_small", 80, 0], "", 24,
            cifar_scratch, by_cifar, most_s=80,
        ),
        job(
            "nette-hgnet-176-s0", nette, ["hgnetv2_b0", 176, 0], "", 80, SCRATCH, "teacher",
            most_s=150,
        ),
        job("tiny-lite0-152-s0", tiny, [LITE + "0", 152, 0], "lite0", 12, FINE, by_tiny),
        job("tiny-vit8-96-s0", tiny, [VIT, 96, 8], "vit", 20, FINE_VIT, by_tiny),
        job("tiny-lite1-128-s0", tiny, [LITE + "1", 128, 0], "lite1", 12, FINE, by_tiny),
        job("cifar-vit4-48-s0", cifar, [VIT, 48, 4], "vit", 16, fine_vit, by_cifar, most_s=60),
        job(
            "cifar-hgnet-64-s0", cifar, ["hgnetv2_b0", 64, 0], "", 24, cifar_scratch, by_cifar,
            most_s=80,
        ),
        job("tiny-lite2-120-s0", tiny, [LITE + "2", 120, 0], "lite2", 12, FINE, by_tiny),
        job("nette-lite1-128-s0", nette, [LITE + "1", 128, 0], "lite1", 18, FINE, "teacher"),
        job("cifar-lite0-40-s1", cifar, [LITE + "0", 40, 0], "lite0", 14, cifar_fine, by_cifar, 1),
        job("tiny-lite0-152-s1", tiny, [LITE + "0", 152, 0], "lite0", 12, FINE, by_tiny, 1),
        job(
            "tiny-hgnet-176-s0", tiny, ["hgnetv2_b0", 176, 0], "", 60, SCRATCH, by_tiny, most_s=140,
        ),
        job(
            "cifar-lite1-32-s0", cifar, [LITE + "1", 32, 0], "lite1", 14, cifar_fine, by_cifar,
            most_s=60,
        ),
        job("tiny-lite0-152-s2", tiny, [LITE + "0", 152, 0], "lite0", 12, FINE, by_tiny, 2),
        job("cifar-lite0-40-s2", cifar, [LITE + "0", 40, 0], "lite0", 14, cifar_fine, by_cifar, 2),
    ]  # fmt: skip


def job(
    name: str,
    data: str,
    backbone: list[str | int],
    weights: str,
    epochs: float,
    recipe: Recipe,
    teacher: str = "",
    seed: int = 0,
    *,
    most_s: float = 600,
) -> dict[str, Any]:
    """One entry of the list; see `benchmarks.families.train.Job`."""
    return {
        "name": name, "data": data, "backbone": backbone, "weights": weights, "seed": seed,
        "teacher": teacher, "max_seconds": most_s, "recipe": {"epochs": epochs} | recipe,
    }  # fmt: skip


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(jobs(), indent=1))
