"""Train members of several families by patient distillation on one accelerator.

    python -m benchmarks.families.train JOBS.json DATA OUT --minutes 8

Several processes may share one OUT: each claims the next free job. A job leaves
NAME.safetensors (float16), NAME.json, and NAME.npz, both heads on the calibration and the test
split (pictures resampled as in training), as benchmarks.families.measure keeps them.
"""

import argparse
import io
import json
import lzma
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from partitioner.data.crops import View
from partitioner.data.datasets import SPLITS, SplitName
from partitioner.data.live_views import Draw, Drawing, Pictures, views_of, whole_boxes
from partitioner.networks.families import Backbone, FamilyMember
from partitioner.run.progress import Progress
from partitioner.run.settings import MemberSchedule
from partitioner.torchvision_shim import import_timm
from partitioner.training.live import Recipe, distil, placed
from partitioner.training.student import BatchTargets, Student

#: Teachers in this type; students' weights and the optimiser's state stay float32.
HALF = torch.bfloat16
#: Default schedule of members.
SCHEDULE = MemberSchedule(
    batch_size=512,
    learning_rate=1e-3,
    weight_decay=0.02,
    distillation=1.0,
    temperature=1.0,
    boost_weight=1.0,
)


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    data: str
    backbone: Backbone
    #: Pretrained weights in the data folder, or empty for a start from scratch.
    weights: str
    recipe: Recipe
    seed: int = 0
    #: The job whose network teaches, "teacher" for the untouched one, or empty for the labels.
    teacher: str = ""
    max_seconds: float = 600.0
    #: The jobs before it in a chain: its boost head adds to the sum of theirs.
    after: tuple[str, ...] = ()
    #: The job whose weights it starts from.
    start: str = ""
    #: Whether it imitates the feature of the last one of `after`.
    imitates: bool = False


def recipe_of(entry: dict[str, Any], seed: int, *, taught: bool, imitates: bool) -> Recipe:
    """The recipe of one entry; without a teacher its labels teach."""
    given = {"batch_size" if key == "batch" else key: value for key, value in entry.items()}
    drawing = {key: given.pop(key) for key in ("min_area", "mixed") if key in given}
    average, autocast = given.pop("average", 0.998), given.pop("autocast", "bf16")
    given |= {} if taught else {"distillation": 0.0}
    schedule = msgspec.structs.replace(SCHEDULE, stack_weight=0.5 * imitates, **given)
    return Recipe(schedule, Drawing(**drawing), autocast, seed, average)


def read_jobs(path: Path) -> list[Job]:
    """The jobs of a JSON file, in the order in which they are to be done."""
    return [
        Job(
            **entry
            | {
                "backbone": Backbone(*entry["backbone"]),
                "recipe": recipe_of(
                    entry["recipe"],
                    entry.get("seed", 0),
                    taught=bool(entry.get("teacher")),
                    imitates=entry.get("imitates", False),
                ),
            }
        )
        for entry in json.loads(path.read_text())
    ]


def read_pack(folder: Path, name: str, split: SplitName, device: torch.device) -> Pictures:
    """One split of a pack as `benchmarks.families.pack` writes it."""
    meta = json.loads((folder / f"{name}.json").read_text())
    targets = meta[split]["targets"]
    decoded = folder / f"{name}.{split}.npy"
    if not decoded.is_file():
        raw = (folder / f"{name}.bin").read_bytes()
        raw = lzma.decompress(raw) if raw.startswith(b"\xfd7zXZ") else raw
        packed = [other for other in SPLITS if other in meta]
        sizes = np.concatenate([meta[other]["sizes"] for other in packed])
        starts = np.concatenate([[0], np.cumsum(sizes)])
        first = sum(len(meta[other]["sizes"]) for other in packed[: packed.index(split)])

        def pixels_of(number: int) -> np.ndarray[Any, Any]:
            data = raw[starts[number] : starts[number + 1]]
            return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            np.save(
                decoded, np.stack(list(pool.map(pixels_of, range(first, first + len(targets)))))
            )
    pixels = np.load(decoded)
    return Pictures(
        pixels=torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().to(device),
        targets=torch.tensor(targets, device=device),
        num_classes=len(meta["labels"]),
    )


def built(job: Job, folder: Path, num_classes: int) -> FamilyMember:
    """The network of a job before its training; a pretrained classifier's rows start both heads."""
    weights = folder / f"{job.weights}.trunk.safetensors" if job.weights else None
    member = FamilyMember(job.backbone, num_classes, weights, boosting=True)
    heads = load_file(folder / "heads.safetensors")
    if f"{job.weights}.{job.data}.weight" in heads and not job.backbone.depth:
        classifier = nn.Linear(member.width, num_classes)
        with torch.no_grad():
            classifier.weight.copy_(heads[f"{job.weights}.{job.data}.weight"])
            classifier.bias.copy_(heads[f"{job.weights}.{job.data}.bias"])
        member.start_heads(classifier)
    return member


class Teacher:
    """A trained or untouched member that answers for the views of a batch."""

    def __init__(self, member: FamilyMember, pixels: Tensor, *, compiled: bool = False) -> None:
        self.member, self._pixels = member.eval().requires_grad_(False), pixels
        placed(self.member, pixels.device)
        self.member.trunk.to(HALF)
        self._trunk: Any = torch.compile(self.member.trunk) if compiled else self.member.trunk

    def __call__(self, draw: Draw) -> Tensor:
        output: Tensor = self.member.bag(self.feature(draw))
        return output

    def boost(self, draw: Draw) -> Tensor:
        """Boost logits `[B, C]`."""
        assert self.member.boost is not None
        output: Tensor = self.member.boost(self.feature(draw))
        return output

    @torch.no_grad()
    def feature(self, draw: Draw) -> Tensor:
        """The last feature `[B, D]`."""
        views = draw.views(self._pixels, View(self.member.backbone.image_size))
        feature: Tensor = self._trunk(self.member.normalise(views).to(HALF))
        return feature.float()


@torch.no_grad()
def answers(
    network: Callable[[Tensor], Tensor], pictures: Tensor, image_size: int, batch: int = 500
) -> Tensor:
    """Logits `[N, C]`, float32, of `network` (views in, logits out) on whole pictures."""
    found = []
    for start in range(0, len(pictures), batch):
        chunk = pictures[start : start + batch]
        boxes = whole_boxes(len(chunk), pictures.device)
        flips = torch.ones(len(chunk), device=pictures.device)
        found.append(network(views_of(chunk, boxes, flips, image_size)))
    return torch.cat(found)


class Worker:
    """Does one job after another until none is left or the time is over."""

    def __init__(self, jobs: list[Job], folder: Path, out: Path, until_s: float) -> None:
        self.jobs, self.folder, self.out, self.until_s = jobs, folder, out, until_s
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        #: Teachers are the same in many jobs; students are not worth the time to compile.
        self.compiles = self.device.type == "cuda"
        self._packs: dict[tuple[str, str], Pictures] = {}

    def pack(self, data: str, split: SplitName) -> Pictures:
        if (data, split) not in self._packs:
            self._packs[data, split] = read_pack(self.folder, data, split, self.device)
        return self._packs[data, split]

    def run(self) -> None:
        while time.monotonic() < self.until_s - 15:
            job = next((job for job in self.jobs if self._ready(job) and self._claimed(job)), None)
            if job is not None:
                self._do(job)
            elif all(self._is_claimed(job) for job in self.jobs):
                return
            else:
                time.sleep(1)

    def _ready(self, job: Job) -> bool:
        """Whether the files that the job needs are there; `.ready` marks a whole pack."""
        others = {job.teacher, job.start, *job.after} - {"", "teacher"}
        own = all((self.out / f"{name}.json").is_file() for name in others)
        needed = [self.folder / f"{job.data}.ready"]
        if job.weights:
            needed.append(self.folder / f"{job.weights}.trunk.safetensors")
        return own and all(path.is_file() for path in needed)

    def _is_claimed(self, job: Job) -> bool:
        return (self.out / f"{job.name}.claimed").exists()

    def _claimed(self, job: Job) -> bool:
        try:
            (self.out / f"{job.name}.claimed").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _member_of(self, name: str) -> FamilyMember:
        job = next(job for job in self.jobs if job.name == name)
        member = built(job, self.folder, self.pack(job.data, "train").num_classes)
        state = load_file(self.out / f"{name}.safetensors")
        member.load_state_dict(
            {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
        )
        return member.to(self.device)

    def _do(self, job: Job) -> None:
        started_s = time.monotonic()
        torch.manual_seed(job.seed)
        pictures = self.pack(job.data, "train")
        teach = None
        if job.teacher == "teacher":
            untouched = Job("", job.data, Backbone("vit_tiny_patch16_224", 224), "vit", job.recipe)
            member = built(untouched, self.folder, pictures.num_classes).to(self.device)
            teach = Teacher(member, pictures.pixels, compiled=self.compiles)
        elif job.teacher:
            teach = Teacher(self._member_of(job.teacher), pictures.pixels, compiled=self.compiles)
        before = [Teacher(self._member_of(name), pictures.pixels) for name in job.after]

        @torch.no_grad()
        def taught(draw: Draw) -> BatchTargets:
            labels = draw.labels(pictures)
            return BatchTargets(
                labels=labels,
                teacher=teach(draw) if teach else torch.zeros_like(labels),
                before=torch.stack([one.boost(draw) for one in before]).sum(0) if before else None,
                imitated=before[-1].feature(draw) if job.imitates else None,
            )

        member = (
            self._member_of(job.start)
            if job.start
            else (built(job, self.folder, pictures.num_classes))
        )
        student = Student(member, before[-1].member.width if job.imitates else None)
        placed(student, self.device)
        until_s = min(self.until_s - 10, started_s + job.max_seconds)
        curve = distil(
            student, View(job.backbone.image_size), taught, pictures,
            replace(job.recipe, until_s=until_s), job.name, Progress(),
        )  # fmt: skip
        took = {
            "seconds": sum(epoch["seconds"] for epoch in curve),
            "epochs": len(curve),
            "loss": curve[-1]["loss"],
        }
        heads: dict[str, Any] = {}
        right = {}
        for split in SPLITS[1:]:
            if split not in json.loads((self.folder / f"{job.data}.json").read_text()):
                continue
            held = self.pack(job.data, split)
            both = answers(
                lambda x: torch.cat(member(x)[:2], dim=1), held.pixels, job.backbone.image_size
            )
            boost, bag = both.chunk(2, dim=1)
            right[split] = (bag.argmax(dim=1) == held.targets).float().mean().item()
            heads |= {split[0] + "b": boost.cpu().numpy(), split[0] + "g": bag.cpu().numpy()}
        np.savez(self.out / f"{job.name}.npz", **heads)
        state = {
            k: (v.half() if v.is_floating_point() else v).contiguous().cpu()
            for k, v in member.state_dict().items()
        }
        save_file(state, self.out / f"{job.name}.safetensors")
        found = took | right | {"total_s": time.monotonic() - started_s}
        (self.out / f"{job.name}.json").write_text(json.dumps(found))
        print(f"{job.name}: DONE {found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, required=True)
    asked = parser.parse_args()
    timm = import_timm()
    timm.layers.set_fused_attn(torch.cuda.is_available())
    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.suppress_errors = True
    torch.set_float32_matmul_precision("high")
    asked.out.mkdir(parents=True, exist_ok=True)
    Worker(
        read_jobs(asked.jobs), asked.data, asked.out, time.monotonic() + asked.minutes * 60
    ).run()


if __name__ == "__main__":
    main()
