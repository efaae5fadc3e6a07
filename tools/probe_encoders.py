"""Make the graphs without weights that `mdp-agent probe` measures.

    python -m tools.probe_encoders --out devices/probe/encoders_data

Every graph is an untrained sub-model, exported and quantized like a bundle's members. Its large
tensors are replaced by their range; the device draws random ones, so that onnxruntime optimises the
graph like a trained one.
"""

import argparse
import hashlib
import io
import lzma
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from mdp.files import write_bytes, write_json
from mdp.formats.plan import NetworkSpec, Spec, SubModelSpec
from mdp.formats.profile import Precision
from mdp.pictures.crop import Pixels
from partitioner.estimates.catalogue import catalogue
from partitioner.export.quantize import MIN_RANGE_PICTURES, quantize_model
from partitioner.export.write import ServedMember, to_onnx
from partitioner.networks.families import Backbone, FamilyMember, ServedFamily
from partitioner.networks.submodel import SubModel
from partitioner.torchvision_shim import import_timm

#: Few, so that the heads are negligible: encoders are counted without them.
NUM_CLASSES = 10
#: Tensors of more bytes are taken out of the graph.
KEPT_BYTES = 64

#: image_size, patch_size, embed_dim, depth, num_heads, mlp_ratio. Token counts from 5 to 197,
#: widths 32 to 768, depths 1 to 12, head sizes 16 to 64, MLP ratios 2 to 4, MACs from 60 thousand
#: to 17 billion. Every tier spans all of them, so that the points of an interrupted probe do too.
DESIGN: dict[str, tuple[tuple[int, int, int, int, int, float], ...]] = {
    "quick": (
        (8, 4, 32, 1, 2, 4.0),
        (16, 4, 48, 2, 3, 4.0),
        (32, 4, 64, 2, 2, 4.0),
        (32, 4, 96, 4, 3, 4.0),
        (56, 8, 128, 3, 4, 2.0),
        (32, 4, 192, 4, 3, 4.0),
        (224, 16, 64, 3, 4, 3.0),
        (112, 16, 192, 6, 3, 4.0),
        (224, 16, 192, 2, 3, 4.0),
        (96, 16, 768, 2, 12, 4.0),
        (160, 16, 384, 4, 6, 4.0),
        (224, 16, 384, 2, 6, 4.0),
    ),
    "core": (
        (12, 4, 192, 2, 6, 2.0),
        (24, 4, 48, 4, 1, 4.0),
        (64, 16, 32, 8, 2, 4.0),
        (112, 8, 64, 1, 1, 4.0),
        (28, 4, 256, 2, 4, 2.0),
        (48, 4, 96, 2, 6, 3.0),
        (128, 16, 256, 4, 8, 3.0),
        (224, 32, 384, 3, 12, 4.0),
        (48, 4, 128, 6, 2, 4.0),
        (160, 16, 192, 12, 3, 4.0),
        (224, 16, 768, 1, 12, 4.0),
        (224, 16, 384, 12, 6, 4.0),
    ),
    "full": (
        (8, 4, 64, 4, 2, 4.0),
        (12, 4, 96, 3, 2, 2.0),
        (20, 4, 64, 6, 4, 3.0),
        (144, 16, 48, 3, 3, 4.0),
        (52, 4, 32, 2, 1, 4.0),
        (40, 8, 96, 12, 3, 4.0),
        (16, 4, 384, 3, 6, 4.0),
        (80, 8, 256, 1, 8, 2.0),
        (96, 8, 192, 1, 12, 4.0),
        (192, 32, 128, 8, 4, 4.0),
        (208, 16, 128, 3, 8, 2.0),
        (32, 8, 768, 1, 12, 4.0),
        (36, 4, 384, 1, 8, 3.0),
        (32, 4, 128, 12, 4, 4.0),
        (192, 16, 256, 6, 4, 4.0),
        (176, 16, 384, 8, 6, 4.0),
        (224, 16, 192, 12, 3, 4.0),
        (224, 16, 768, 12, 12, 4.0),
    ),
}
#: Precisions beyond fp32, and the tiers that have them.
TIERS_OF: dict[Precision, tuple[str, ...]] = {
    "fp32": ("quick", "core", "full"),
    "int8": ("quick", "core", "full"),
    "int8-static": ("quick", "core"),
    "fp16": ("quick", "core"),
}
#: Networks of other families and sides of their pictures in pixels.
NETWORKS: dict[str, tuple[tuple[str, int], ...]] = {
    "quick": (
        ("mobilenetv4_conv_small", 128),
        ("efficientnet_b0", 160),
        ("repvit_m1_0", 160),
        ("levit_192", 224),
    ),
    "core": (
        ("mobilenetv4_conv_small", 224),
        ("tf_efficientnet_lite0", 128),
        ("tf_efficientnet_lite0", 192),
        ("hgnetv2_b0", 128),
        ("hgnetv2_b2", 192),
        ("efficientvit_b1", 160),
        ("fastvit_t8", 160),
        ("tiny_vit_5m_224", 160),
        ("mobilenetv4_hybrid_medium", 192),
        ("mobilenetv3_large_100", 160),
    ),
    "full": (),
}
#: Precisions of networks.
NETWORK_PRECISIONS: tuple[Precision, ...] = ("fp32", "int8-static")
_PACKAGES = ("torch", "timm", "onnx", "onnxscript", "onnxruntime")


def design_specs(tier: str) -> list[SubModelSpec]:
    """The shapes of one tier, in fp32."""
    return [
        SubModelSpec(
            image_size=image_size,
            patch_size=patch_size,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
        )
        for image_size, patch_size, embed_dim, depth, num_heads, mlp_ratio in DESIGN[tier]
    ]


def network_specs(tier: str) -> list[NetworkSpec]:
    """The networks of one tier, in fp32."""
    return [catalogue()[name].spec(size, NUM_CLASSES) for name, size in NETWORKS[tier]]


def make_random_network(spec: NetworkSpec, seed: int = 0) -> bytes:
    """An exported fp32 network with random weights, branches re-parametrised."""
    torch.manual_seed(seed)
    backbone = Backbone(spec.name, spec.image_size)
    member = FamilyMember(backbone, NUM_CLASSES, boosting=True).eval()
    _perturb(member)
    import_timm()
    from timm.utils.model import reparameterize_model

    member.trunk = reparameterize_model(member.trunk)
    return to_onnx(ServedFamily(member), spec.image_size, member.heads, {})


def _perturb(module: nn.Module) -> None:
    """Make untrained biases and norms different, as equal tensors would be merged."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.mul_(1 + 0.02 * torch.rand_like(buffer))


def make_random_model(spec: SubModelSpec, seed: int = 0) -> bytes:
    """An exported fp32 sub-model with random weights."""
    torch.manual_seed(seed)
    submodel = SubModel(spec, NUM_CLASSES, boosting=True)
    _perturb(submodel)
    return to_onnx(ServedMember(submodel), spec.image_size, submodel.heads, {})


def calibration(image_size: int) -> Pixels:
    """Pictures of noise: latency does not depend on the ranges."""
    shape = (MIN_RANGE_PICTURES, image_size, image_size, 3)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def without_tensors(model: Any) -> tuple[bytes, list[Any]]:
    """The graph without its large tensors, and of each: name, type, dims, least, largest value."""
    import onnx

    kept, taken = [], []
    for tensor in model.graph.initializer:
        values = onnx.numpy_helper.to_array(tensor)
        if values.nbytes <= KEPT_BYTES:
            kept.append(tensor)
            continue
        low, high = float(values.min()), float(values.max())
        if values.dtype != np.int64:  # indices, which have to be exact
            low, high = (float(f"{edge:.3g}") for edge in (low, high))
        taken.append([tensor.name, tensor.data_type, list(tensor.dims), low, high])
    graph = onnx.ModelProto()
    graph.CopyFrom(model)
    # Shapes stay, as onnxruntime fuses by them.
    del graph.graph.initializer[:]
    graph.graph.initializer.extend(kept)
    return graph.SerializeToString(deterministic=True), taken


def operators(model: Any) -> dict[str, int]:
    """Nodes of each operator."""
    return dict(sorted(Counter(node.op_type for node in model.graph.node).items()))


def name_of(spec: Spec) -> str:
    """Shape and precision as one word, for instance `vit-224-16-192x12-h3-m4-int8`."""
    if isinstance(spec, NetworkSpec):
        return f"{spec.name}-{spec.image_size}-{spec.precision}"
    return (
        f"vit-{spec.image_size}-{spec.patch_size}-{spec.embed_dim}x{spec.depth}"
        f"-h{spec.num_heads}-m{spec.mlp_ratio:g}-{spec.precision}"
    )


def make(tiers: Iterable[str], out: Path, cache: Path) -> None:
    """Write index and archive into `out`; `cache` keeps exports."""
    entries, files = [], {}
    for tier in tiers:
        of_vits: list[Precision] = [p for p, tiers in TIERS_OF.items() if tier in tiers]
        specs: list[Spec] = [*design_specs(tier), *network_specs(tier)]
        for spec in specs:
            model = _load_or_export(spec, cache)
            for precision in of_vits if isinstance(spec, SubModelSpec) else NETWORK_PRECISIONS:
                wanted = msgspec.structs.replace(spec, precision=precision)
                entry, graph, tensors = make_one(model, wanted)
                entries.append({**entry, "tier": tier})
                files[entry["file"]] = graph
                files[entry["file"].removesuffix(".onnx") + ".tensors"] = tensors
            print(name_of(spec), flush=True)
    content = archive(files)
    write_bytes(out / "graphs.tar.xz", content)
    index = {
        "num_classes": NUM_CLASSES,
        "sha256": hashlib.sha256(content).hexdigest(),
        "versions": {package: metadata.version(package) for package in _PACKAGES},
        "encoders": entries,
    }
    write_json(out / "index.json", index)


def _load_or_export(spec: Spec, cache: Path) -> bytes:
    path = cache / f"{name_of(spec)}.onnx"
    if not path.is_file():
        if isinstance(spec, NetworkSpec):
            content = make_random_network(spec)
        else:
            content = make_random_model(spec)
        write_bytes(path, content)
    return path.read_bytes()


def make_one(model: bytes, spec: Spec) -> tuple[dict[str, Any], bytes, bytes]:
    """Index entry without its tier, graph, and list of tensors of fp32 `model` in a precision."""
    import onnx

    pictures = calibration(spec.image_size) if spec.precision == "int8-static" else None
    kind = "submodel" if isinstance(spec, SubModelSpec) else "network"
    content = quantize_model(model, spec.precision, pictures, whole=kind == "network")
    converted = onnx.load_from_string(content)
    graph, tensors = without_tensors(converted)
    entry = {
        kind: msgspec.to_builtins(spec),
        "file": f"{name_of(spec)}.onnx",
        "operators": operators(converted),
        "model_bytes": len(content),
    }
    return entry, graph, msgspec.msgpack.encode(tensors)


def archive(files: dict[str, bytes]) -> bytes:
    """A tar.xz of `files`, the same bytes for the same files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return lzma.compress(packed.getvalue(), preset=9)


def main() -> None:
    """Make all graphs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("devices/probe/encoders_data"))
    parser.add_argument("--cache", type=Path, help="keeps exports, to go on where it was stopped")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(DESIGN, arguments.out, arguments.cache or Path(folder))


if __name__ == "__main__":
    main()
