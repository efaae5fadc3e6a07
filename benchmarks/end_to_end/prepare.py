"""What one run needs before anybody is asked: models, measured speeds, plans and bundles."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from msgspec import structs
from PIL import Image

from benchmarks.end_to_end.machines import DEVICES, Network
from benchmarks.end_to_end.rivals.pieces import write_stages
from mdp.errors import InputError
from mdp.files import write_bytes, write_toml
from mdp.formats.plan import Assignment, Plan, TeacherSpec, read_plan
from mdp.formats.profile import DeviceProfile, LatencyPoint, Link, Provenance, read_profile
from mdp.pictures.crop import Pixels
from partitioner.estimates.latency import Way, fit_latency, predict
from partitioner.estimates.macs import memory_bytes
from partitioner.estimates.network import choose_encoding
from partitioner.export.write import ServedTeacher, to_onnx
from partitioner.networks.teacher import build_teacher, teacher_spec

NUM_CLASSES = 1000
SEED = 0
#: A shipped profile whose points with one thread were measured, on one machine.
MEASURED = "laptop-cpu"
MEMORY_BYTES = 2_000_000_000
_SOURCE = "benchmarks.end_to_end"

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """A teacher of random weights, as a whole and in pieces."""

    spec: TeacherSpec
    whole: Path
    #: Mean milliseconds of the teacher on every device, all of them computing.
    teacher_ms: list[float]
    stages: list[Path]


def make_models(name: str, network: Network, folder: Path, seconds: float, note: Note) -> Models:
    """Draw a teacher, export it, time it on every device and cut it for them."""
    torch.manual_seed(SEED)
    spec = teacher_spec(name, {})
    teacher = build_teacher(spec, NUM_CLASSES, pretrained=False).eval()
    note(f"exporting {name}")
    whole = folder / "teacher.onnx"
    size = spec.shape.image_size
    write_bytes(whole, to_onnx(ServedTeacher(teacher), size, ["logits"], {}))
    note("timing it on all devices at once")
    teacher_ms = time_teacher(network, whole, seconds)
    speeds = [1 / ms for ms in teacher_ms]
    note("cutting it into stages")
    return Models(
        spec=spec,
        whole=whole,
        teacher_ms=teacher_ms,
        stages=write_stages(teacher, speeds, folder / "stages"),
    )


def time_teacher(network: Network, model: Path, seconds: float) -> list[float]:
    """Mean milliseconds of `model` on each device while the others compute it as well."""
    command = [sys.executable, "-m", "benchmarks.end_to_end.rivals.speed", "--model", model,
               "--seconds", seconds]  # fmt: skip
    with ExitStack() as stack:
        running = [
            stack.enter_context(network.running(device, "speed", command)) for device in DEVICES
        ]
        for process in running:
            process.say("")
        lines = [process.line_with("MEAN") for process in running]
    return [float(line.split()[1]) for line in lines]


def write_profiles(models: Models, link: Link, folder: Path) -> list[Path]:
    """A profile of each device: points of another machine, brought to the teacher's time here."""
    measured = read_profile(MEASURED)
    one_thread = [point for point in measured.latency if point.threads == 1]
    known = structs.replace(measured, threads=1, latency=one_thread)
    model = fit_latency(known, Way(threads=1))
    expected_ms = predict(known, model, models.spec.shape, NUM_CLASSES).compute
    paths = []
    for device, teacher_ms in zip(DEVICES, models.teacher_ms, strict=True):
        paths.append(folder / f"{device.name}.toml")
        profile = scaled(device.name, one_thread, teacher_ms / expected_ms, link)
        write_toml(paths[-1], profile)
    return paths


def scaled(name: str, points: Sequence[LatencyPoint], factor: float, link: Link) -> DeviceProfile:
    """A device that takes `factor` times as long for everything."""
    estimated = Provenance(
        method="estimated",
        source=f"{_SOURCE}: {factor:.3f} times the one-thread points of profiles/{MEASURED}.toml, "
        "so that the teacher takes as long as measured on this device",
    )
    given = Provenance(method="estimated", source=f"{_SOURCE}: as the benchmark sets it up")
    latency = [
        structs.replace(point, latency_ms=point.latency_ms * factor, p10_ms=None, p90_ms=None)
        for point in points
    ]
    numbers = dict.fromkeys(("threads", "memory_bytes", "link", "availability"), given)
    return DeviceProfile(
        name=name, kind="cpu", provider="CPUExecutionProvider", threads=1,
        memory_bytes=MEMORY_BYTES, link=link, latency=latency,
        provenance=numbers | {"latency": estimated},
    )  # fmt: skip


def make_bundle(
    spec: TeacherSpec, profiles: Sequence[Path], target_ms: float, folder: Path
) -> tuple[Plan, Path]:
    """What `mdp-partition plan --anyway` and `export --untrained` make of it: plan, and bundle."""
    folder.mkdir(parents=True)
    path = folder / "found.toml"
    _partition("plan", "--teacher", spec.name, "--profiles", *profiles,
               "--latency-ms", f"{target_ms:.1f}", "--anyway", "--out", path)  # fmt: skip
    plan = read_plan(path)
    return plan, export_untrained(plan, folder)


def export_untrained(plan: Plan, folder: Path) -> Path:
    """The bundle folder of a plan, with random weights."""
    path, bundle = folder / "plan.toml", folder / "bundle"
    write_toml(path, plan)
    _partition("export", "--untrained", "--plan", path, "--labels", NUM_CLASSES, "--out", bundle)
    return bundle


def plan_alone(plan: Plan, link: Link) -> Plan | None:
    """The best that the planner found for one device within the same target, as a plan."""
    alone = plan.single_device
    if alone is None or alone.submodel is None:
        return None
    spec = alone.spec
    assignment = Assignment(
        k=0,
        device=alone.device,
        submodel=alone.submodel,
        network=alone.network,
        predicted_ms=alone.predicted_ms,
        memory_bytes=memory_bytes(spec, NUM_CLASSES),
        provider="CPUExecutionProvider",
        threads=1,
        why="the best that one device can do alone",
        encoding=choose_encoding(link, spec.image_size, NUM_CLASSES),
    )
    accuracy = None
    if alone.accuracy is not None and plan.accuracy is not None:
        accuracy = structs.replace(plan.accuracy, all_in=alone.accuracy, expected=alone.accuracy)
    return structs.replace(
        plan, assignments=[assignment], single_device=None, replicas=[], left_out={},
        accuracy=accuracy, deadline_ms=None,
    )  # fmt: skip


def _partition(*options: object) -> None:
    """Run `mdp-partition`; raises InputError with what it said."""
    program = str(Path(sys.executable).parent / "mdp-partition")
    command = [program, *map(str, options), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"mdp-partition {options[0]}: {' '.join(done.stderr.split())}")


def write_pictures(folder: Path, count: int) -> list[Path]:
    """Pictures such as a camera hands over: JPEG files of 640 by 480 pixels."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:03}.jpg" for number in range(count)]
    for seed, path in enumerate(paths):
        Image.fromarray(camera_pixels(seed)).save(path, "JPEG", quality=90)
    return paths


def camera_pixels(seed: int) -> Pixels:
    """A random picture `[480, 640, 3]` with the spectrum of natural ones, its colours much alike.

    Amplitudes fall with the frequency to the power of 1.5. Those of photographs fall with about 1
    (Field, JOSA A 4 (1987)), but theirs also have smooth places; with 1.5 a view of 224 pixels
    takes as many bytes as photographs did: 0.35 a pixel (`partitioner.estimates.network`).
    """
    rng = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(480)[:, None] * 480, np.fft.rfftfreq(640)[None, :] * 640)
    frequency[0, 0] = 1.0
    light, *colours = (
        np.fft.irfft2(np.exp(2j * np.pi * rng.random(frequency.shape)) / frequency**1.5, (480, 640))
        for _ in range(4)
    )
    pixels = np.stack([light + 0.3 * colour for colour in colours], axis=-1)
    pixels = 128 + 50 * (pixels - pixels.mean()) / pixels.std()
    return np.asarray(np.clip(pixels, 0, 255), dtype=np.uint8)
