"""Write the list of networks that are trained, for benchmarks.families.train.

python -m benchmarks.families.jobs jobs.json [--small]

`--small` lists the ablations of pretraining, chain, boosting and stacking distillation that two
cores train in an hour: 8,000 pictures of CIFAR-10, five epochs, labels only, three seeds.
"""

import json
import sys
from pathlib import Path
from typing import Any

VIT, LITE, CS3 = "vit_tiny_patch16_224", "tf_efficientnet_lite", "cs3darknet_focus_s"
Recipe = dict[str, Any]
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
TEACHER: Recipe = {"weight_decay": 0.05, "mixed": 0.4, "min_area": 0.4}
SEEDS = (0, 1, 2)


def cifar10() -> list[dict[str, Any]]:
    """Small budgets (0.6 ms and 1.5 ms a picture), all ablations."""
    taught = "cifar-teacher"
    lite = FINE | SMALL | {"learning_rate": 1.5e-3}
    vit = FINE_VIT | SMALL | {"learning_rate": 8e-4}
    scratch = SCRATCH | SMALL | {"learning_rate": 4e-3}
    bodies: dict[str, tuple[list[str | int], str, float, Recipe]] = {
        "cs3-64": ([CS3, 64, 0], "", 30, scratch),
        "lite0-40": ([LITE + "0", 40, 0], "lite0", 20, lite),
        "vit4-48": ([VIT, 48, 4], "vit", 20, vit),
        "lite0-96": ([LITE + "0", 96, 0], "lite0", 12, lite | {"batch": 512}),
        "lite1-64": ([LITE + "1", 64, 0], "lite1", 14, lite | {"batch": 512}),
        "vit6-64": ([VIT, 64, 6], "vit", 16, vit | {"batch": 512}),
        "resnet10-64": (["resnet10t", 64, 0], "", 24, scratch),
    }

    def one(body: str, kind: str = "", seed: int = 0, **more: Any) -> dict[str, Any]:
        backbone, weights, epochs, recipe = bodies[body]
        name = "-".join(part for part in ("cifar", body, kind, f"s{seed}") if part)
        return job(
            name, "cifar10", backbone, more.pop("weights", weights), more.pop("epochs", epochs),
            recipe | more.pop("recipe", {}), more.pop("teacher", taught), seed, **more,
        )  # fmt: skip

    teacher = TEACHER | {"learning_rate": 3e-4, "average": 0.997, "batch": 512}
    first = [
        job(taught, "cifar10", [VIT, 128, 0], "vit", 16, teacher),
        one("cs3-64", "labels", teacher=""),
        one("vit4-48", "labels", teacher=""),
        one("cs3-64"),
        one("vit4-48"),
        one("lite0-40"),
        one("cs3-64", seed=1),
        one("lite0-40", seed=1),
        one("vit4-48", seed=1),
        one("lite0-40", "labels", teacher=""),
    ]
    chain = [
        one("lite0-40", "boost", after=["cifar-cs3-64-s0"]),
        one("vit4-48", "boost", after=["cifar-cs3-64-s0", "cifar-lite0-40-boost-s0"]),
        one("lite0-40", "stack", after=["cifar-cs3-64-s0"], imitates=True),
        one(
            "vit4-48", "stack", after=["cifar-cs3-64-s0", "cifar-lite0-40-stack-s0"], imitates=True
        ),
        one("lite0-40", "chain", seed=1, start="cifar-lite0-40-s0", epochs=14),
        one("lite0-40", "chain", seed=2, start="cifar-lite0-40-s0", epochs=14),
        one("vit4-48", "chain", seed=1, start="cifar-vit4-48-s0", epochs=14),
    ]
    other = [
        one("lite0-96"),
        one("vit6-64"),
        one("cs3-64", seed=2),
        one("lite0-40", seed=2),
        one("vit4-48", seed=2),
        one("lite0-40", "scratch", weights="", recipe={"learning_rate": 4e-3}),
        one("vit4-48", "scratch", weights=""),
        one("cs3-64", "short", epochs=7),
        one("lite0-40", "short", epochs=5),
        one("vit4-48", "short", epochs=5),
        one("lite1-64"),
        one("resnet10-64"),
        one("cs3-64", "half", recipe={"distillation": 0.5}),
        one("lite0-40", "half", recipe={"distillation": 0.5}),
        one("vit4-48", "half", recipe={"distillation": 0.5}),
    ]
    return first + chain + other


def tinyimagenet40() -> list[dict[str, Any]]:
    """Budgets of 3 and 6 ms a picture."""
    data, taught = "tinyimagenet40", "tiny-teacher"
    teacher = TEACHER | {"learning_rate": 5e-5, "average": 0.99, "batch": 256}
    bodies: dict[str, tuple[list[str | int], str, float, Recipe]] = {
        "lite0-152": ([LITE + "0", 152, 0], "lite0", 12, FINE),
        "lite1-128": ([LITE + "1", 128, 0], "lite1", 12, FINE),
        "vit8-96": ([VIT, 96, 8], "vit", 20, FINE_VIT),
        "lite0-224": ([LITE + "0", 224, 0], "lite0", 8, FINE | {"batch": 256}),
        "lite1-192": ([LITE + "1", 192, 0], "lite1", 8, FINE | {"batch": 256}),
        "vit12-128": ([VIT, 128, 0], "vit", 16, FINE_VIT),
    }

    def one(body: str, kind: str = "", seed: int = 0, **more: Any) -> dict[str, Any]:
        backbone, weights, epochs, recipe = bodies[body]
        name = "-".join(part for part in ("tiny", body, kind, f"s{seed}") if part)
        return job(
            name, data, backbone, weights, epochs, recipe, more.pop("teacher", taught), seed, **more
        )

    return [
        job(taught, data, [VIT, 192, 0], "vit", 6, teacher),
        one("lite0-152", "labels", teacher=""),
        one("vit8-96", "labels", teacher=""),
        *(one(body, seed=seed) for seed in SEEDS for body in ("lite0-152", "vit8-96", "lite1-128")),
        one("lite1-128", "labels", teacher=""),
        one("lite1-128", "boost", after=["tiny-lite0-152-s0"]),
        one("vit8-96", "boost", after=["tiny-lite0-152-s0", "tiny-lite1-128-boost-s0"]),
        one("lite0-224"),
        one("vit12-128"),
        one("lite1-192"),
    ]  # fmt: skip


def imagenette() -> list[dict[str, Any]]:
    """Members of at most a fifth of the teacher's latency; the teacher is the untouched ViT-Ti."""
    bodies: dict[str, tuple[list[str | int], str, float, Recipe]] = {
        "lite0-192": ([LITE + "0", 192, 0], "lite0", 10, FINE | {"batch": 256}),
        "lite1-160": ([LITE + "1", 160, 0], "lite1", 10, FINE | {"batch": 256}),
        "vit10-112": ([VIT, 112, 10], "vit", 20, FINE_VIT),
    }
    return [
        job(f"nette-{name}-s{seed}", "imagenette", *body, "teacher", seed)
        for seed in SEEDS for name, body in bodies.items()
    ]  # fmt: skip


def small() -> list[dict[str, Any]]:
    """Pairs of EfficientNet-Lite0 and a ViT of four blocks, each part of the method apart."""
    recipe = FINE | {"min_area": 0.6, "mixed": 0.2, "batch": 128, "average": 0.98}
    found = []

    def one(kind: str, seed: int, part: str = "", rate: float = 1e-3, **more: Any) -> str:
        backbone: list[str | int] = [LITE + "0", 40, 0] if kind == "lite0" else [VIT, 48, 4]
        name = "-".join(word for word in ("small", kind, part, f"s{seed}") if word)
        weights = more.pop("weights", "lite0" if kind == "lite0" else "vit")
        precision = "fp32" if kind == "lite0" else "bf16"
        given = recipe | {"learning_rate": rate, "autocast": precision}
        found.append(job(name, "cifar10", backbone, weights, 5, given, "", seed, **more))
        return name

    for seed in SEEDS:
        lite, vit = one("lite0", seed), one("vit4", seed)
        one("vit4", seed, "scratch", 2e-3, weights="")
        one("vit4", seed, "boost", after=[lite])
        one("vit4", seed, "stack", after=[lite], imitates=True)
        one("vit4", seed + 10, "chain", start=vit)
    for seed in SEEDS:
        one("lite0", seed + 10, "chain", start=f"small-lite0-s{seed}")
    return found


def jobs() -> list[dict[str, Any]]:
    """All of them, in the order in which they are done."""
    return cifar10() + tinyimagenet40() + imagenette()


def job(
    name: str,
    data: str,
    backbone: list[str | int],
    weights: str,
    epochs: float,
    recipe: Recipe,
    teacher: str = "",
    seed: int = 0,
    **more: Any,
) -> dict[str, Any]:
    """One entry of the list; see `benchmarks.families.train.Job`."""
    return {
        "name": name, "data": data, "backbone": backbone, "weights": weights, "seed": seed,
        "teacher": teacher, "recipe": {"epochs": epochs} | recipe,
    } | more  # fmt: skip


if __name__ == "__main__":
    listed = small() if sys.argv[2:] == ["--small"] else jobs()
    Path(sys.argv[1]).write_text(json.dumps(listed, indent=1))
