"""Pictures, profiles and models for quantising the colour bundle, made without torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from mdp.files import write_json
from mdp.formats.bundle import MANIFEST, Bundle, file_entry, model_path
from mdp.formats.profile import DeviceProfile, LatencyPoint, Provenance, read_profile
from mdp.testing.bundles import CHANNELS, LABELS, SIZES, colour_model, shape
from partitioner.export.quantize import Way

#: Of each class; 36 of all are for calibration, 90 for the test.
EACH = 150


def write_colours(root: Path) -> Path:
    """A tree of noisy pictures, some of which are hard to tell."""
    random = np.random.default_rng(3)
    for label in LABELS:
        (root / label).mkdir(parents=True)
        for number in range(EACH):
            noise = random.integers(0, 120, (12, 12, 3))
            bump = CHANNELS[LABELS.index(label)] * random.uniform(0, 40)
            Image.fromarray((noise + bump).astype(np.uint8)).save(root / label / f"{number}.png")
    return root


def profile_of(device: str, times: Mapping[Way, float], *, measured: bool = True) -> DeviceProfile:
    """Profile of the colour bundle's shapes: fp32 takes 1 ms, other ways as said."""
    points = [
        LatencyPoint(
            **msgspec.structs.asdict(shape(size)) | {"precision": way[0], "runtime": way[1]},
            threads=1,
            latency_ms=latency_ms,
        )
        for size in SIZES
        for way, latency_ms in {("fp32", "onnxruntime"): 1.0, **times}.items()
    ]
    like = read_profile("n100")
    method: Literal["measured", "estimated"] = "measured" if measured else "estimated"
    latency = Provenance(method=method, source=f"by a test, on no {device}")
    return msgspec.structs.replace(
        like, name=device, latency=points, provenance={**like.provenance, "latency": latency}
    )


def fragile_model(image_size: int, scale: float) -> onnx.ModelProto:
    """A colour model whose activations carry a large constant, which 8 bits cannot."""
    model = onnx.load_from_string(colour_model(image_size, scale, scale))
    lifted = numpy_helper.from_array(np.array([1e5], dtype=np.float32), "constant")
    model.graph.initializer.append(lifted)
    for product in model.graph.node:
        if product.op_type == "MatMul":
            product.input[0] = "lifted"
    at = next(n for n, node in enumerate(model.graph.node) if node.op_type == "ReduceMean")
    model.graph.node.insert(at + 1, helper.make_node("Add", ["mean", "constant"], ["lifted"]))
    return model


def put_models(folder: Path, models: Mapping[int, onnx.ModelProto]) -> Bundle:
    """Exchange models of a bundle, hashes included."""
    bundle = Bundle.open(folder)
    files = dict(bundle.manifest.files)
    for k, model in models.items():
        path = folder / model_path(k)
        path.write_bytes(model.SerializeToString())
        files[model_path(k)] = file_entry(path)
    write_json(folder / MANIFEST, msgspec.structs.replace(bundle.manifest, files=files))
    return Bundle.open(folder)


def with_numbers(model: bytes, value: float) -> bytes:
    """The model as a failed quantization would leave it: `value` for every scale."""
    loaded = onnx.load_from_string(model)
    for tensor in loaded.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            broken = np.full(tuple(tensor.dims), value, dtype=np.float32)
            tensor.CopyFrom(numpy_helper.from_array(broken, tensor.name))
    content: bytes = loaded.SerializeToString()
    return content
