"""The kinds of pictures, as bytes or arrays."""

import io
import os
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mdp.errors import PictureError
from mdp.pictures.headers import HeaderReader

Pixels = NDArray[np.uint8]

#: A larger picture is refused before its pixels are decoded.
MAX_PIXELS = 100_000_000
#: Pipes and file objects are read whole before they are decoded: MAX_PIXELS, uncompressed.
MAX_PIPE_BYTES = 4 * MAX_PIXELS


class Readable(Protocol):
    """A file object, opened in binary mode."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; none at the end."""
        ...


@runtime_checkable
class TensorLike(Protocol):
    """The used part of a `torch.Tensor`, without an import of torch."""

    def is_floating_point(self) -> bool:
        """Tell whether its values are of a floating type."""
        ...

    def detach(self) -> Any:
        """The same values without a gradient."""
        ...


Encoded = str | os.PathLike[str] | bytes | bytearray | memoryview | Readable
#: A path; an encoded file's bytes, or a file object that gives them from where it stands; a Pillow
#: image; a uint8 array `[H, W]`, `[H, W, 1]`, `[H, W, 3]` or `[H, W, 4]`; a torch tensor
#: `[1, H, W]`, `[3, H, W]` or `[4, H, W]` of uint8, or of floats from 0 to 1. Four channels are
#: RGBA and are laid on white.
Picture = Encoded | Image.Image | Pixels | TensorLike
EXPECTED = "expected a path, bytes, a binary file, a Pillow image, a uint8 array or a torch tensor"


def array_of(tensor: TensorLike) -> Pixels:
    """`tensor[C, H, W]` as an array `[H, W, C]` of uint8; raises PictureError."""
    values = tensor.detach()
    shape, dtype = list(values.shape), str(values.dtype)
    floats = tensor.is_floating_point()
    if len(shape) != 3 or shape[0] not in (1, 3, 4) or not (floats or dtype == "torch.uint8"):
        raise PictureError(
            "expected a tensor [1, H, W], [3, H, W] or [4, H, W] of uint8, or of floats from 0 to "
            f"1, got {dtype} {shape}"
        )
    # NumPy has no bfloat16.
    values = values.float() if floats else values
    array: Pixels | NDArray[np.floating] = values.cpu().numpy().transpose(1, 2, 0)
    if array.dtype == np.uint8:
        return array.astype(np.uint8, copy=False)
    if array.size and not (array.min() >= 0 and array.max() <= 1):
        raise PictureError(
            f"expected a tensor of floats from 0 to 1, got {array.min():g} to {array.max():g}: one "
            "that was normalised for a network is no picture any more"
        )
    return np.rint(array * 255).astype(np.uint8)


def name_of(source: Encoded) -> str:
    """The name of `source` in messages."""
    if isinstance(source, bytes | bytearray | memoryview):
        return "the given bytes"
    if isinstance(source, str | os.PathLike):
        return str(source)
    name = getattr(source, "name", None)
    return name if isinstance(name, str) else "the given file"


def reader_of(source: Encoded) -> HeaderReader:
    """The encoded file that `source` is or names.

    What is not seekable, as decoders need it, is read whole. Raises OSError, ValueError or
    PictureError.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        return HeaderReader(io.BytesIO(source))
    if isinstance(source, str | os.PathLike):
        raw = io.FileIO(os.fspath(source))
        if raw.seekable():
            return HeaderReader(raw)
        with io.BufferedReader(raw) as pipe:
            return HeaderReader(io.BytesIO(_whole(pipe, name_of(source), "a pipe")))
    return HeaderReader(io.BytesIO(_whole(source, name_of(source), "a file object")))


def _whole(stream: Readable, name: str, kind: str) -> bytes:
    """The rest of `stream`."""
    content = bytearray()
    while True:
        try:
            part = stream.read(MAX_PIPE_BYTES + 1 - len(content))
        except Exception as error:  # file objects raise any type
            raise PictureError(f"{name}: cannot be read: {error}") from error
        if not isinstance(part, bytes):
            what = type(part).__name__
            raise PictureError(f"{name}: expected a file that gives bytes, this one gives {what}")
        content += part
        if len(content) > MAX_PIPE_BYTES:
            raise PictureError(f"{name}: expected at most {MAX_PIPE_BYTES:,} bytes from {kind}")
        if not part:
            return bytes(content)
