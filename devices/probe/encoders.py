"""The encoders that a probe measures: graphs without weights that come along, and their completion.

`devices/probe/encoders_data/graphs.tar.xz` holds ONNX graphs of the shapes and precisions that
`index.json` lists, exported as MDP serves them, without their large tensors. Those are drawn here,
so that a device measures a complete model without torch, without onnx and without a download.
"""

import hashlib
import tarfile
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from mdp.errors import AgentError
from mdp.files import Record
from mdp.formats.plan import NetworkSpec, Spec, SubModelSpec

INDEX, GRAPHS = "index.json", "graphs.tar.xz"
#: How soon a shape is measured: the first tier spans all of them thinly, each next one fills in.
Tier = Literal["quick", "core", "full"]

#: ONNX's numbers of the element types that occur (onnx.proto3, TensorProto.DataType).
_DTYPES: dict[int, type[np.generic]] = {
    1: np.float32,
    2: np.uint8,
    3: np.int8,
    6: np.int32,
    7: np.int64,
    10: np.float16,
}
#: Numbers drawn once and repeated through every tensor: drawing all would take longer than loading.
_DRAWN = 1 << 20


class Tensor(Record, frozen=True, array_like=True):
    """A tensor that was left out of a graph, and between which values it lay."""

    name: str
    data_type: int
    dims: list[Annotated[int, Meta(gt=0)]]
    low: float
    high: float


def one_of(submodel: SubModelSpec | None, network: NetworkSpec | None) -> Spec:
    """The one of the two that is there."""
    spec = network if submodel is None else submodel
    assert spec is not None
    return spec


class Encoder(Record, frozen=True):
    """One graph: its shape and precision, its tier, its file in the archive, and what it lacks."""

    tier: Tier
    file: str
    #: Nodes of each operator, to recognise a graph by.
    operators: dict[str, int]
    #: Bytes of the completed model.
    model_bytes: Annotated[int, Meta(gt=0)]
    #: One of the two: a plain ViT's shape, or a network of another family.
    submodel: SubModelSpec | None = None
    network: NetworkSpec | None = None

    @property
    def spec(self) -> Spec:
        """Whichever of the two it is."""
        return one_of(self.submodel, self.network)

    @property
    def name(self) -> str:
        """Shape and precision as one word."""
        return self.file.removesuffix(".onnx")


class Index(Record, frozen=True):
    """What comes along, and with which versions it was made."""

    num_classes: int
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    versions: dict[str, str]
    encoders: list[Encoder]


def folder() -> Path:
    """Where index and graphs lie."""
    return Path(str(resources.files("devices.probe"))) / "encoders_data"


def read_index(where: Path | None = None) -> Index:
    """What comes along; raises AgentError when it is damaged."""
    path = (where or folder()) / INDEX
    try:
        index = msgspec.json.decode(path.read_bytes(), type=Index)
    except (OSError, msgspec.DecodeError) as error:
        raise AgentError(f"{path}: the encoders that come with mdp-agent: {error}") from error
    graphs = path.with_name(GRAPHS)
    if not graphs.is_file() or hashlib.sha256(graphs.read_bytes()).hexdigest() != index.sha256:
        raise AgentError(f"{graphs}: is not the file that {INDEX} describes; install MDP anew")
    return index


def extract(into: Path, where: Path | None = None) -> None:
    """Unpack all graphs, and beside each the list of what it lacks."""
    with tarfile.open((where or folder()) / GRAPHS, "r:xz") as archive:
        # Debian 12's Python, 3.11.2, knows no filters yet; the archive comes along with its hash.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(into)


def tensors_file(graph: Path) -> Path:
    """Where the list of tensors that `graph` lacks lies."""
    return graph.with_suffix(".tensors")


def complete(graph: Path, out: Path, seed: int = 0) -> None:
    """Write the graph with all its tensors drawn, as a bundle's model.onnx is written."""
    tensors = msgspec.msgpack.decode(tensors_file(graph).read_bytes(), type=list[Tensor])
    drawn = np.random.default_rng(seed).random(_DRAWN, dtype=np.float32)
    parts = [_initializer(tensor, drawn, at) for at, tensor in enumerate(tensors)]
    with out.open("wb") as file:
        file.write(graph.read_bytes())
        # Two protobuf messages written one after the other are one with the lists joined, so the
        # tensors need no rewriting of the graph (protobuf's encoding guide, "Last One Wins").
        file.write(_key(7) + _varint(sum(map(len, parts))))
        for part in parts:
            file.write(part)


def draw(tensor: Tensor, drawn: NDArray[np.float32], at: int) -> NDArray[np.generic]:
    """Evenly spread values of the tensor's range; `at` keeps two tensors from being the same.

    The range is that of the tensor left out, so scales stay positive and nothing grows into
    infinity; values next to zero but not zero, which processors are slow with, are next to
    impossible.
    """
    count = int(np.prod(tensor.dims))
    unit = np.resize(np.roll(drawn, 7919 * at), count)
    dtype = np.dtype(_DTYPES[tensor.data_type])
    values = tensor.low + (tensor.high - tensor.low) * unit
    return (np.rint(values) if dtype.kind in "iu" else values).astype(dtype)


def _initializer(tensor: Tensor, drawn: NDArray[np.float32], at: int) -> bytes:
    """GraphProto.initializer = 5: a TensorProto with dims 1, data_type 2, name 8, raw_data 9."""
    name, values = tensor.name.encode(), draw(tensor, drawn, at)
    little_endian = values.astype(values.dtype.newbyteorder("<")).tobytes()
    body = b"".join(
        [
            *(b"\x08" + _varint(size) for size in tensor.dims),
            b"\x10" + _varint(tensor.data_type),
            _key(8) + _varint(len(name)) + name,
            _key(9) + _varint(len(little_endian)),
        ]
    )
    return b"".join([_key(5), _varint(len(body) + len(little_endian)), body, little_endian])


def _key(field: int) -> bytes:
    """A protobuf field of bytes."""
    return bytes([field << 3 | 2])


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
