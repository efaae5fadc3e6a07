"""MACs, parameters and bytes of a sub-model.

Counting is exact for timm's VisionTransformer with a class token, a learned position for every
token, and two linear heads, as with boosting; without, a member has one head less. A network of
another family has its MACs and parameters in its spec.
"""

import math

from mdp.formats.plan import NetworkSpec, Spec, SubModelSpec
from mdp.formats.profile import Precision

_HEADS = 2
_CHANNELS = 3
#: Bytes of a stored number outside quantized matrix products; the runtime converts bf16 from fp32.
_BYTES_PER_VALUE: dict[Precision, int] = {
    "fp32": 4,
    "fp16": 2,
    "bf16": 4,
    "int8": 4,
    "int8-static": 4,
}
#: Upper bound for other networks: two times 128 channels at half the picture's side.
_VALUES_PER_PIXEL = 64
_QUANTIZED = ("int8", "int8-static")
#: A scale in fp32 and a zero point in int8 for each quantized channel or tensor.
_SCALE_BYTES = 5

#: Resident bytes of an inference session, and per byte of weights: a process with onnxruntime 1.31
#: on x86 grows by 12 to 14 MB plus 1.1 to 2.0 times the weights, for ViTs from 0.2 to 343 MB in
#: fp32 and from 0.3 to 23 MB in int8 (some weights are also kept packed for the kernels).
SESSION_BYTES, BYTES_PER_WEIGHT_BYTE = 14_000_000, 2.0


def tokens(spec: SubModelSpec) -> int:
    """Length of the token sequence: the patches and the class token."""
    return (spec.image_size // spec.patch_size) ** 2 + 1


def hidden_dim(spec: SubModelSpec) -> int:
    """Width of the MLP's hidden layer, rounded as timm does."""
    return int(spec.embed_dim * spec.mlp_ratio)


def layer_weights(spec: SubModelSpec) -> int:
    """Weights of one layer's four matrix products."""
    return spec.embed_dim * (4 * spec.embed_dim + 2 * hidden_dim(spec))


def parameters(spec: Spec, num_classes: int) -> int:
    """Parameters of the served sub-model, both heads included."""
    if isinstance(spec, NetworkSpec):
        return spec.parameters
    width, hidden = spec.embed_dim, hidden_dim(spec)
    embedding = (_CHANNELS * spec.patch_size**2 + 1) * width + (1 + tokens(spec)) * width
    biases = 3 * width + width + hidden + width
    norms = 2 * 2 * width
    heads = _HEADS * (width + 1) * num_classes
    return embedding + spec.depth * (layer_weights(spec) + biases + norms) + 2 * width + heads


def macs(spec: Spec, num_classes: int) -> int:
    """Multiply-accumulates of one picture's matrix products, both heads included."""
    if isinstance(spec, NetworkSpec):
        return spec.macs
    width, length = spec.embed_dim, tokens(spec)
    embedding = (length - 1) * _CHANNELS * spec.patch_size**2 * width
    attention = 2 * length * length * width
    layers = spec.depth * (length * layer_weights(spec) + attention)
    return embedding + layers + _HEADS * width * num_classes


def weight_bytes(spec: Spec, num_classes: int) -> int:
    """Bytes of the stored parameters; of a network in int8 without those that stay in fp32.

    int8 holds the weights of the layers' matrix products and of the heads in one byte each, with a
    scale and a zero point per output channel; the patch embedding, norms, biases and positions stay
    fp32. int8-static leaves the heads too, and has a scale and a zero point per product's input.
    """
    count = parameters(spec, num_classes)
    if spec.precision not in _QUANTIZED:
        return count * _BYTES_PER_VALUE[spec.precision]
    if isinstance(spec, NetworkSpec):
        return count
    quantized = spec.depth * layer_weights(spec)
    scales = spec.depth * (5 * spec.embed_dim + hidden_dim(spec))
    if spec.precision == "int8":
        quantized += _HEADS * spec.embed_dim * num_classes
        scales += _HEADS * num_classes
    else:
        scales += 4 * spec.depth
    rest = (count - quantized) * _BYTES_PER_VALUE[spec.precision]
    return quantized + _SCALE_BYTES * scales + rest


def activation_bytes(spec: Spec, batch: int = 1) -> int:
    """Peak bytes of activations while the exported graph runs in its order, pixels included.

    Nothing is computed in place and views take no memory. The peak is the GELU, the split into
    queries, keys and values, the attention maps, or the normalisation of the pixels.
    """
    if isinstance(spec, NetworkSpec):
        values = _VALUES_PER_PIXEL * spec.image_size**2
        return batch * (values * _BYTES_PER_VALUE[spec.precision] + _CHANNELS * spec.image_size**2)
    width, length = spec.embed_dim, tokens(spec)
    maps = spec.num_heads * length * length
    pixels = _CHANNELS * spec.image_size**2
    values = max(
        length * (width + 3 * hidden_dim(spec)),
        7 * length * width,
        2 * length * width + 2 * maps,
        2 * pixels,
    )
    return batch * (values * _BYTES_PER_VALUE[spec.precision] + pixels)


def memory_bytes(spec: Spec, num_classes: int) -> int:
    """Growth of the agent's process by serving this sub-model."""
    weights = BYTES_PER_WEIGHT_BYTE * weight_bytes(spec, num_classes)
    return math.ceil(SESSION_BYTES + weights + activation_bytes(spec))
