"""Open Inference Protocol v2: requests and responses as bytes, with the binary tensor extension.

Pure. The protocol: https://github.com/kserve/open-inference-protocol; the extension: Triton's
"binary tensor data". A model has one input and three outputs:

    images          UINT8 [n, height, width, 3], RGB, 1 to `MAX_PICTURES` pictures
    probabilities   FP32 [n, top], the largest ones of the fused answer, best first
    labels          BYTES [n, top], their classes
    used            BYTES [n], the devices that each answer is made of: "n100, laptop-cpu"

`top` is five, or the number of classes where there are fewer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct, field

from mdp.gateway.refusals import Refusal
from mdp.pictures.crop import Pixels
from mdp.requests.prediction import TOP_K, Prediction

INPUT = "images"
OUTPUTS = {"probabilities": "FP32", "labels": "BYTES", "used": "BYTES"}
MAX_PICTURES = 64
#: One length of a shape, at most far more than a body has bytes: Python does not say a product of
#: thousands of digits.
Length = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
#: JSON that is decoded in a tenth of a millisecond.
QUICK_BYTES = 16 * 1024
#: Says where the JSON ends and the binary tensors begin.
JSON_LENGTH = "inference-header-content-length"


class RequestTensor(Struct):
    """One input as a request names it."""

    name: str
    shape: list[Length]
    datatype: str
    parameters: dict[str, Any] = field(default_factory=dict)
    data: msgspec.Raw = msgspec.Raw()


class WantedOutput(Struct):
    """One output that a request names."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)


class _Request(Struct):
    inputs: list[RequestTensor]
    outputs: list[WantedOutput] = field(default_factory=list)
    id: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request of the protocol, decoded."""

    id: str
    #: uint8 `[n, height, width, 3]`.
    pictures: Pixels
    #: Output -> whether its data follows the JSON in binary, in the order wanted.
    outputs: dict[str, bool]
    #: The request's own deadline, in milliseconds per picture; None without one. Unchecked.
    deadline_ms: Any


def metadata(model: str, num_classes: int) -> dict[str, Any]:
    """A model's inputs and outputs, as `/v2/models/{model}` gives them."""
    return {
        "name": model,
        "platform": "mdp_fleet",
        "inputs": [{"name": INPUT, "datatype": "UINT8", "shape": [-1, -1, -1, 3]}],
        "outputs": [
            {"name": name, "datatype": datatype, "shape": _shape(name, -1, min(TOP_K, num_classes))}
            for name, datatype in OUTPUTS.items()
        ],
    }


def json_bytes(body: bytes | bytearray, json_length: str | None) -> int:
    """Length of a request's JSON part; that of the whole body without a valid `json_length`."""
    known = json_length is not None and _is_length(json_length)
    return int(json_length or 0) if known else len(body)


def _shape(output: str, pictures: int, top: int) -> list[int]:
    """The shape of an output of so many `pictures`, -1 where it varies."""
    return [pictures] if output == "used" else [pictures, top]


def is_quick(body: bytes | bytearray, json_length: str | None) -> bool:
    """Tell whether reading a request takes no longer than handing it to a thread."""
    return json_bytes(body, json_length) <= QUICK_BYTES


def _is_length(text: str) -> bool:
    # Python reads no number of thousands of digits.
    return text.isascii() and text.isdigit() and len(text) < 20


def read_request(body: bytes | bytearray, json_length: str | None) -> InferRequest:
    """The request in `body`, whose JSON part has `json_length` bytes, or all; raises Refusal."""
    # Views: neither part is copied.
    whole = memoryview(body)
    head, rest = whole, whole[:0]
    if json_length is not None:
        if not _is_length(json_length) or int(json_length) > len(body):
            raise Refusal(
                400, f"{JSON_LENGTH}: expected 0 to {len(body)}, got {json_length[:20]!r}"
            )
        head, rest = whole[: int(json_length)], whole[int(json_length) :]
    try:
        request = msgspec.json.decode(head, type=_Request)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(400, f"inference request: {error}") from error
    if len(request.inputs) != 1 or request.inputs[0].name != INPUT:
        names = ", ".join(repr(tensor.name) for tensor in request.inputs[:4]) or "none"
        raise Refusal(400, f"inputs: expected one named {INPUT!r}, got {names}")
    return InferRequest(
        id=request.id,
        pictures=_pictures(request.inputs[0], rest),
        outputs=_outputs_of(request),
        deadline_ms=request.parameters.get("deadline_ms"),
    )


def _pictures(tensor: RequestTensor, rest: memoryview) -> Pixels:
    if tensor.datatype != "UINT8":
        raise Refusal(400, f"input {INPUT!r}: expected datatype UINT8, got {tensor.datatype[:20]}")
    shape = tensor.shape
    if len(shape) != 4 or shape[3] != 3 or min(shape) < 1 or shape[0] > MAX_PICTURES:
        raise Refusal(
            400,
            f"input {INPUT!r}: expected shape [n, height, width, 3] of 1 to {MAX_PICTURES} "
            f"pictures, got {shape[:8]}",
        )
    size, given = math.prod(shape), tensor.parameters.get("binary_data_size")
    if given is None:
        if rest:
            raise Refusal(400, f"expected no bytes after the JSON, got {len(rest)}")
        return _from_json(bytes(tensor.data), shape)
    if bytes(tensor.data) not in (b"", b"null"):
        raise Refusal(400, f"input {INPUT!r}: expected `data` or `binary_data_size`, got both")
    if given != size or len(rest) != size:
        raise Refusal(
            400,
            f"input {INPUT!r}: expected {size} bytes for shape {shape}, got binary_data_size "
            f"{str(given)[:20]} and {len(rest)} bytes",
        )
    return np.frombuffer(rest, np.uint8).reshape(shape)


def _from_json(raw: bytes, shape: list[int]) -> Pixels:
    expected = f"input {INPUT!r}: expected `data` of whole numbers from 0 to 255 for shape {shape}"
    if not raw.startswith(b"["):
        raise Refusal(400, f"{expected}, got none")
    # Before any memory is taken: an empty list takes 20 times its text, an array of strings the
    # longest for each.
    n, height, width, _ = shape
    lists = 1 + n * (1 + height * (1 + width))
    if b'"' in raw or b"{" in raw or raw.count(b"[") > lists:
        raise Refusal(400, f"{expected}, got others")
    try:
        values = np.asarray(msgspec.json.decode(raw))
    except (ValueError, OverflowError) as error:  # ragged, or numbers beyond 64 bits
        raise Refusal(400, f"{expected}, got lists of different lengths") from error
    if values.dtype.kind not in "iu" or values.min(initial=0) < 0 or values.max(initial=0) > 255:
        raise Refusal(400, f"{expected}, got others")
    if values.size != math.prod(shape) or (values.ndim > 1 and list(values.shape) != shape):
        raise Refusal(400, f"{expected}, got shape {list(values.shape)}")
    return values.astype(np.uint8).reshape(shape)


def _outputs_of(request: _Request) -> dict[str, bool]:
    everywhere = request.parameters.get("binary_data_output", False)
    wanted = request.outputs or [WantedOutput(name) for name in OUTPUTS]
    outputs: dict[str, bool] = {}
    for output in wanted:
        if output.name not in OUTPUTS or output.name in outputs:
            names = ", ".join(OUTPUTS)
            raise Refusal(
                400, f"outputs: expected {names}, each at most once, got {output.name[:40]!r}"
            )
        if "classification" in output.parameters:
            raise Refusal(400, "outputs: classification is not offered: ask for labels")
        outputs[output.name] = output.parameters.get("binary_data", everywhere) is True
    return outputs


def respond(
    model: str, request: InferRequest, predictions: Sequence[Prediction]
) -> tuple[bytes, int | None]:
    """The response's body, and where its JSON ends if binary tensors follow it."""
    top = min(len(prediction.top) for prediction in predictions)
    outputs: list[dict[str, Any]] = []
    tail = b""
    for name, binary in request.outputs.items():
        values = [value for each in predictions for value in _values(name, each, top)]
        shape = _shape(name, len(predictions), top)
        output: dict[str, Any] = {"name": name, "datatype": OUTPUTS[name], "shape": shape}
        if binary:
            data = _binary(values)
            tail += data
            output["parameters"] = {"binary_data_size": len(data)}
        else:
            output["data"] = values
        outputs.append(output)
    answer: dict[str, Any] = {
        "model_name": model,
        "parameters": parameters_of(predictions),
        "outputs": outputs,
    }
    if request.id:
        answer["id"] = request.id
    head = msgspec.json.encode(answer)
    if not any(request.outputs.values()):
        return head + b"\n", None
    return head + tail, len(head)


def _values(output: str, prediction: Prediction, top: int) -> list[Any]:
    """The values that one picture's answer adds to an output."""
    match output:
        case "used":
            return [", ".join(prediction.used)]
        case "labels":
            return [label for label, _ in prediction.top[:top]]
        case _:
            return [share for _, share in prediction.top[:top]]


def _binary(values: Sequence[Any]) -> bytes:
    if values and isinstance(values[0], str):
        texts = [value.encode() for value in values]
        return b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    return np.asarray(values, "<f4").tobytes()


def to_json(model: str, prediction: Prediction) -> dict[str, Any]:
    """The JSON that `/classify` and `/look` answer."""
    return {"model": model, "degraded": prediction.degraded, **prediction.to_dict()}


def parameters_of(predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Parts of the answers, in the protocol's strings, numbers and booleans.

    `degraded` if any lacks a device; `used` by all (the output of that name has each one's),
    `missing` from any, the lowest expected accuracy, the longest latency; `known` if all items are,
    the largest `novelty`, and the largest `known_rejected`; `normal` if all are like the good ones,
    the largest `anomaly`, `defects_missed`, `defects_missed_most` and `good_rejected`, where these
    are known of all. Where several labels may hold, `holds` has those of each picture, as JSON.
    """
    missing: Mapping[str, str] = {
        device: reason for each in predictions for device, reason in each.missing.items()
    }
    used = [name for name in predictions[0].used if all(name in each.used for each in predictions)]
    accuracies = [each.expected_accuracy for each in predictions]
    parameters: dict[str, Any] = {
        "degraded": any(each.degraded for each in predictions),
        "mode": ", ".join(sorted({each.mode for each in predictions})),
        "used": ", ".join(used),
        "missing": "; ".join(f"{device}: {reason}" for device, reason in missing.items()),
        "latency_ms": max(each.latency_ms for each in predictions),
    }
    measured = [value for value in accuracies if value is not None]
    if len(measured) == len(accuracies):
        parameters["expected_accuracy"] = min(measured)
    if any(each.holds is not None for each in predictions):
        told = [[label for label, _ in each.holds or ()] for each in predictions]
        parameters["holds"] = msgspec.json.encode(told).decode()
    scores = [each.novelty for each in predictions if each.novelty is not None]
    if len(scores) == len(predictions):
        parameters["known"] = all(each.known for each in predictions)
        parameters["novelty"] = max(scores)
    rejected = [each.known_rejected for each in predictions if each.known_rejected is not None]
    if len(rejected) == len(predictions):
        parameters["known_rejected"] = max(rejected)
    if all(each.normal is not None for each in predictions):
        parameters["normal"] = all(each.normal for each in predictions)
    for name in ("anomaly", "good_rejected", "defects_missed", "defects_missed_most"):
        values = [getattr(each, name) for each in predictions]
        if None not in values:
            parameters[name] = max(values)
    return parameters
