"""The encoders that a probe measures: shipped graphs, completed with random weights.

`devices/probe/encoders_data/graphs.tar.xz` holds ONNX graphs of the shapes and precisions in
`index.json`, exported as MDP serves them, without their large tensors. These are drawn here, so
that a device needs neither torch, onnx nor a download.
"""

import hashlib
import tarfile
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.random import default_rng
from numpy.typing import NDArray

from mdp.errors import AgentError
from mdp.files import Record
from mdp.formats.plan import NetworkSpec, Spec, SubModelSpec, one_spec

INDEX, GRAPHS = "index.json", "graphs.tar.xz"
#: In which order shapes are measured: the first tier spans all of them, later ones fill in.
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
#: Numbers drawn once and repeated in every tensor: drawing all would take longer than loading.
_DRAWN = 1 << 20


class LeftOutTensor(Record, frozen=True, array_like=True):
    """A tensor that was left out of a graph, and its range."""

    name: str
    data_type: int
    dims: list[Annotated[int, Meta(gt=0)]]
    low: float
    high: float


class Encoder(Record, frozen=True):
    """One graph: shape, precision, tier and file in the archive."""

    tier: Tier
    file: str
    #: Number of nodes by operator.
    operators: dict[str, int]
    #: Bytes of the completed model.
    model_bytes: Annotated[int, Meta(gt=0)]
    #: One of the two: a plain ViT's shape, or a network of another family.
    submodel: SubModelSpec | None = None
    network: NetworkSpec | None = None

    @property
    def spec(self) -> Spec:
        """The ViT's shape or the network."""
        return one_spec(self.submodel, self.network)

    @property
    def name(self) -> str:
        """Shape and precision as one word."""
        return self.file.removesuffix(".onnx")


class Index(Record, frozen=True):
    """The shipped encoders, and the versions that made them."""

    num_classes: int
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    versions: dict[str, str]
    encoders: list[Encoder]


def folder() -> Path:
    """Folder of index and graphs."""
    return Path(str(resources.files("devices.probe"))) / "encoders_data"


def read_index(where: Path | None = None) -> Index:
    """The shipped encoders; raises AgentError if they are damaged."""
    path = (where or folder()) / INDEX
    try:
        index = msgspec.json.decode(path.read_bytes(), type=Index)
    except (OSError, msgspec.DecodeError) as error:
        raise AgentError(f"{path}: the encoders of mdp-agent: {error}") from error
    graphs = path.with_name(GRAPHS)
    if not graphs.is_file() or hashlib.sha256(graphs.read_bytes()).hexdigest() != index.sha256:
        raise AgentError(f"{graphs}: is not the file that {INDEX} describes; reinstall MDP")
    return index


def extract(into: Path, where: Path | None = None) -> None:
    """Unpack all graphs, and beside each the list of its missing tensors."""
    with tarfile.open((where or folder()) / GRAPHS, "r:xz") as archive:
        # Debian 12's Python 3.11.2 has no filters; the archive's hash was checked.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(into)


def complete(graph: Path, out: Path, seed: int = 0) -> None:
    """Write the graph with all its tensors drawn, as a bundle's model.onnx is written."""
    tensors = msgspec.msgpack.decode(
        graph.with_suffix(".tensors").read_bytes(), type=list[LeftOutTensor]
    )
    drawn = default_rng(seed).random(_DRAWN, dtype=np.float32)
    parts = [_initializer(tensor, drawn, at) for at, tensor in enumerate(tensors)]
    with out.open("wb") as file:
        file.write(graph.read_bytes())
        # Concatenated protobuf messages are one message with joined lists, so the graph is not
        # rewritten (protobuf's encoding guide, "Last One Wins").
        file.write(_key(7) + _varint(sum(map(len, parts))))
        for part in parts:
            file.write(part)


def draw(tensor: LeftOutTensor, drawn: NDArray[np.float32], at: int) -> NDArray[np.generic]:
    """Uniform values in the tensor's range; `at` makes tensors differ.

    In the original's range scales stay positive and activations finite, and subnormal values, which
    are slow on processors, hardly occur.
    """
    count = int(np.prod(tensor.dims))
    unit = np.resize(np.roll(drawn, 7919 * at), count)
    dtype = np.dtype(_DTYPES[tensor.data_type])
    values = tensor.low + (tensor.high - tensor.low) * unit
    return (np.rint(values) if dtype.kind in "iu" else values).astype(dtype)


def _initializer(tensor: LeftOutTensor, drawn: NDArray[np.float32], at: int) -> bytes:
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
