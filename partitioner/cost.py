"""What a ViT sub-model costs on a device: MACs, bytes, milliseconds. Plain functions.

Counting is exact for timm's VisionTransformer with a class token, a learned position for every
token, and two linear heads (boost and bag). Latency is predicted from a profile's measured points
by a fitted formula whose terms all grow with the model; how far it may be off is not promised yet.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from mdp.errors import InputError
from mdp.plan import Encoding, PredictedMs, SubModelSpec
from mdp.profile import DeviceProfile, LatencyPoint, Link

_HEADS = 2
_CHANNELS = 3
_BYTES_PER_VALUE = {"fp32": 4, "fp16": 2, "bf16": 4, "int8": 4, "int8-static": 4}

#: Message header and ZeroMQ framing of one request or reply, estimated from the wire format.
FRAMING_BYTES = 400
#: Bytes of a JPEG crop of `mdp.crop.encode_jpeg` (quality 92): tables and headers, and per pixel.
#: Median over 24 photographs at 112 px; it was 0.54 at 32 px and 0.35 at 224 px.
JPEG_FIXED_BYTES, JPEG_BYTES_PER_PIXEL = 620.0, 0.40
#: Milliseconds to encode and decode one pixel of a JPEG crop: 2.4e-5 was measured with Pillow on
#: a Zen 4 server core at 112 px, doubled for small boards.
JPEG_MS_PER_PIXEL = 5e-5
#: A lossy encoding has to save at least this much to be worth what it costs in accuracy.
JPEG_MIN_SAVING_MS = 2.0

#: Resident bytes that an inference session takes whatever the model, and per byte of weights:
#: growth of a process with onnxruntime 1.31 on x86 for eight ViTs from 0.2 to 343 MB was 12 MB
#: plus 1.3 to 2.0 times the weights (some are kept a second time, packed for the kernels).
SESSION_BYTES, BYTES_PER_WEIGHT_BYTE = 12_000_000, 2.0


def tokens(spec: SubModelSpec) -> int:
    """Length of the token sequence: the patches and the class token."""
    return (spec.image_size // spec.patch_size) ** 2 + 1


def hidden_dim(spec: SubModelSpec) -> int:
    """Width of the MLP's hidden layer, rounded as timm does."""
    return int(spec.embed_dim * spec.mlp_ratio)


def parameters(spec: SubModelSpec, num_classes: int) -> int:
    """Learned numbers of the served sub-model, both heads included."""
    width, hidden = spec.embed_dim, hidden_dim(spec)
    embedding = (_CHANNELS * spec.patch_size**2 + 1) * width + (1 + tokens(spec)) * width
    attention = (width + 1) * 3 * width + (width + 1) * width
    mlp = (width + 1) * hidden + (hidden + 1) * width
    norms = 2 * 2 * width
    heads = _HEADS * (width + 1) * num_classes
    return embedding + spec.depth * (attention + mlp + norms) + 2 * width + heads


def macs(spec: SubModelSpec, num_classes: int) -> int:
    """Multiply-accumulates of one picture's matrix products, both heads included."""
    width, length = spec.embed_dim, tokens(spec)
    embedding = (length - 1) * _CHANNELS * spec.patch_size**2 * width
    projections = length * width * (4 * width + 2 * hidden_dim(spec))
    attention = 2 * length * length * width
    return embedding + spec.depth * (projections + attention) + _HEADS * width * num_classes


def weight_bytes(spec: SubModelSpec, num_classes: int) -> int:
    """Bytes of the learned numbers as stored."""
    return parameters(spec, num_classes) * _BYTES_PER_VALUE[spec.precision]


def activation_bytes(spec: SubModelSpec) -> int:
    """Most bytes of one picture's activations alive at once: the widest step of one layer."""
    width, length = spec.embed_dim, tokens(spec)
    residual = length * width
    attention = 4 * residual + 2 * spec.num_heads * length * length
    mlp = residual + 2 * length * hidden_dim(spec)
    pixels = _CHANNELS * spec.image_size**2
    values = max(residual + max(attention, mlp), pixels + residual)
    return values * _BYTES_PER_VALUE[spec.precision] + pixels


def memory_bytes(spec: SubModelSpec, num_classes: int) -> int:
    """Bytes by which serving this sub-model makes the agent's process grow."""
    weights = BYTES_PER_WEIGHT_BYTE * weight_bytes(spec, num_classes)
    return math.ceil(SESSION_BYTES + weights + activation_bytes(spec))


def traffic_bytes(spec: SubModelSpec) -> int:
    """Bytes that the element-wise steps of one picture read or write: norms, GELU, softmax."""
    length = tokens(spec)
    values = length * (spec.embed_dim + hidden_dim(spec)) + spec.num_heads * length * length
    return spec.depth * values * _BYTES_PER_VALUE[spec.precision]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyModel:
    """Milliseconds of one picture = sum of non-negative coefficients times growing terms.

    Dispatch costs a fixed time and a time per layer, matrix products go at a rate, weights and
    element-wise values go through memory at a bandwidth (the roofline model of Williams, Waterman
    and Patterson, CACM 2009, with its terms added up instead of the largest taken). As no term
    shrinks and no coefficient is negative, a larger model is never predicted to be faster.
    """

    fixed_ms: float
    layer_ms: float
    mac_ms: float
    traffic_byte_ms: float
    weight_byte_ms: float

    def predict_ms(self, spec: SubModelSpec, num_classes: int) -> float:
        """Predicted compute milliseconds of one picture."""
        coefficients = (
            self.fixed_ms,
            self.layer_ms,
            self.mac_ms,
            self.traffic_byte_ms,
            self.weight_byte_ms,
        )
        terms = _terms(spec, num_classes)
        return sum(c * term for c, term in zip(coefficients, terms, strict=True))


def _terms(spec: SubModelSpec, num_classes: int) -> tuple[float, float, float, float, float]:
    return (
        1.0,
        float(spec.depth),
        float(macs(spec, num_classes)),
        float(traffic_bytes(spec)),
        float(weight_bytes(spec, num_classes)),
    )


def spec_of(point: LatencyPoint) -> SubModelSpec:
    """The shape that a profile's latency point was measured with."""
    return SubModelSpec(
        image_size=point.image_size,
        patch_size=point.patch_size,
        embed_dim=point.embed_dim,
        depth=point.depth,
        num_heads=point.num_heads,
        mlp_ratio=point.mlp_ratio,
        precision=point.precision,
    )


def matching_points(profile: DeviceProfile) -> list[LatencyPoint]:
    """The latency points to fit: those with the profile's threads, else also those with fewer.

    Fewer threads are slower, so the fallback errs on the safe side. Raises InputError when fewer
    than three points are left.
    """
    exact = [point for point in profile.latency if point.threads == profile.threads]
    if len(exact) >= _MIN_POINTS:
        return exact
    fewer = [point for point in profile.latency if point.threads <= profile.threads]
    if len(fewer) >= _MIN_POINTS:
        return fewer
    raise InputError(
        f"profile {profile.name!r}: expected at least {_MIN_POINTS} `latency` points with "
        f"{profile.threads} threads or fewer, found {len(fewer)}"
    )


_MIN_POINTS = 3


def fit_latency(profile: DeviceProfile) -> LatencyModel:
    """Fit the latency formula to a profile, minimising squared relative errors.

    Points are encoders without a classifier, so they are counted with no classes. With fewer than
    six points the two memory terms stay out, lest the fit follow the noise. Raises InputError.
    """
    points = matching_points(profile)
    terms = np.array([_terms(spec_of(point), 0) for point in points])
    measured_ms = np.array([point.latency_ms for point in points])
    used = 5 if len(points) > 5 else 3
    relative = terms[:, :used] / measured_ms[:, None]
    coefficients = non_negative_least_squares(relative, np.ones(len(points)))
    fixed, layer, mac, traffic, weight = [*coefficients, 0.0, 0.0][:5]
    return LatencyModel(
        fixed_ms=fixed, layer_ms=layer, mac_ms=mac, traffic_byte_ms=traffic, weight_byte_ms=weight
    )


def relative_errors(model: LatencyModel, points: Sequence[LatencyPoint]) -> list[float]:
    """Predicted over measured minus one, for each point."""
    return [model.predict_ms(spec_of(point), 0) / point.latency_ms - 1 for point in points]


def non_negative_least_squares(a: NDArray[np.float64], b: NDArray[np.float64]) -> list[float]:
    """The x >= 0 that minimises |a x - b|, for `a` of a few columns and `b` not zero.

    The best x solves the plain least squares of the columns it uses (Lawson and Hanson, 1974, ch.
    23), so with few columns trying every choice of them is exact and simpler than their active-set
    method.
    """
    scale = np.linalg.norm(a, axis=0)
    scaled = a / np.where(scale > 0, scale, 1.0)
    best, best_error = np.zeros(a.shape[1]), float(np.linalg.norm(b))
    for size in range(1, a.shape[1] + 1):
        for columns in combinations(range(a.shape[1]), size):
            chosen = list(columns)
            solution = np.linalg.lstsq(scaled[:, chosen], b, rcond=None)[0]
            error = float(np.linalg.norm(scaled[:, chosen] @ solution - b))
            if solution.min() >= 0 and error < best_error * (1 - 1e-9):
                best = np.zeros(a.shape[1])
                best[chosen], best_error = solution, error
    return [float(value) for value in best / np.where(scale > 0, scale, 1.0)]


def request_bytes(image_size: int, encoding: Encoding) -> float:
    """Bytes of one request: the crop as raw uint8 RGB, or estimated as JPEG, and its framing."""
    pixels = image_size * image_size
    if encoding == "raw":
        return _CHANNELS * pixels + FRAMING_BYTES
    return JPEG_FIXED_BYTES + JPEG_BYTES_PER_PIXEL * pixels + FRAMING_BYTES


def reply_bytes(num_classes: int) -> float:
    """Bytes of one reply: both heads' fp32 logits and the framing."""
    return _HEADS * num_classes * 4 + FRAMING_BYTES


def network_ms(link: Link, image_size: int, num_classes: int, encoding: Encoding) -> float:
    """Milliseconds to send one crop, get its logits back and, for JPEG, code and decode it.

    Both directions count. Every device is taken to have its link to itself.
    """
    sent = request_bytes(image_size, encoding) + reply_bytes(num_classes)
    coding_ms = JPEG_MS_PER_PIXEL * image_size**2 if encoding == "jpeg" else 0.0
    return link.round_trip_s * 1e3 + sent * 8e3 / link.bandwidth_bps + coding_ms


def choose_encoding(link: Link, image_size: int, num_classes: int) -> Encoding:
    """Raw pixels, unless JPEG saves enough time on this link to be worth its loss."""
    raw = network_ms(link, image_size, num_classes, "raw")
    jpeg = network_ms(link, image_size, num_classes, "jpeg")
    return "jpeg" if raw - jpeg >= JPEG_MIN_SAVING_MS else "raw"


def predict(
    profile: DeviceProfile, model: LatencyModel, spec: SubModelSpec, num_classes: int
) -> PredictedMs:
    """Predicted milliseconds of one picture on one device, to the microsecond."""
    encoding = choose_encoding(profile.link, spec.image_size, num_classes)
    network = round(network_ms(profile.link, spec.image_size, num_classes, encoding), 3)
    compute = round(model.predict_ms(spec, num_classes), 3)
    return PredictedMs(compute=compute, network=network, total=round(compute + network, 3))
