"""How long teacher and members take for one picture: onnxruntime, one thread, in turns."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import nn

from benchmarks.accuracy.results import Latency
from benchmarks.accuracy.shapes import Shapes, even, shape_name
from benchmarks.harness.machine import describe_machine
from mdp.files import write_bytes
from mdp.formats.plan import SubModelSpec
from mdp.runtimes.onnxruntime import open_session
from partitioner.export.sessions import latency_ms, run_of
from partitioner.export.write import ServedMember, ServedTeacher, to_onnx
from partitioner.networks.submodel import SubModel
from partitioner.networks.teacher import build_teacher
from partitioner.run.progress import Progress

#: Each model is asked so many times, block by block, so that drift of the machine meets all.
ROUNDS = 9
_TEACHER = "teacher"


def measure(shapes: Shapes, num_classes: int, progress: Progress) -> Latency:
    """Median over rounds of each model's median; the weights do not matter and are untrained.

    Also measures shapes of one head with two: a head is a thousandth of a member.
    """
    machine = describe_machine()
    members = {shape_name(spec): spec for spec in _every(shapes)}
    with TemporaryDirectory(prefix="mdp-latency-") as folder:
        sessions = _sessions(shapes, members, num_classes, Path(folder), progress)
        random = np.random.default_rng(0)
        times_ms: dict[str, list[float]] = {name: [] for name in sessions}
        with progress.task("measuring latency", ROUNDS) as advance:
            for _ in range(ROUNDS):
                for name, session in sessions.items():
                    size = session.get_inputs()[0].shape[1]
                    pixels = random.integers(0, 256, (8, size, size, 3), dtype=np.uint8)
                    times_ms[name].append(latency_ms(run_of(session), pixels))
                advance(1, "")
    found = {name: float(np.median(values)) for name, values in times_ms.items()}
    teacher_ms = found.pop(_TEACHER)
    return Latency(machine=machine, rounds=ROUNDS, teacher_ms=teacher_ms, shapes_ms=found)


def _every(shapes: Shapes) -> Iterable[SubModelSpec]:
    return (*shapes.members, *shapes.singles, *(even(spec) for spec in shapes.members))


def _sessions(
    shapes: Shapes,
    members: Mapping[str, SubModelSpec],
    num_classes: int,
    folder: Path,
    progress: Progress,
) -> dict[str, Any]:
    teacher = shapes.teacher()
    models: dict[str, tuple[nn.Module, int, list[str]]] = {
        name: (ServedMember(SubModel(spec, num_classes)), spec.image_size, ["boost", "bag"])
        for name, spec in members.items()
    }
    served = ServedTeacher(build_teacher(teacher, num_classes, pretrained=False))
    models[_TEACHER] = (served, teacher.shape.image_size, ["logits"])
    sessions = {}
    with progress.task("exporting", len(models)) as advance:
        for number, (name, (module, image_size, outputs)) in enumerate(models.items()):
            path = folder / f"{number}.onnx"
            write_bytes(path, to_onnx(module, image_size, outputs, {}))
            sessions[name] = open_session(path)
            advance(1, name)
    return sessions
