"""The Open Inference Protocol as bytes: what is read, what is refused, what is written."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from mdp.gateway.infer import MAX_PICTURES, is_quick, metadata, parameters_of, read_request, respond
from mdp.gateway.refusals import Refusal
from mdp.requests.prediction import Prediction
from mdp.requests.reason import NOT_NEEDED

PIXELS = np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)


def images(**changes: Any) -> dict[str, Any]:
    whole = {"name": "images", "shape": [1, 2, 2, 3], "datatype": "UINT8", "data": [*range(12)]}
    return {key: value for key, value in (whole | changes).items() if value is not None}


def body(*inputs: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"inputs": list(inputs), **more}).encode()


def answer(label: str = "red", **changes: Any) -> Prediction:
    other = "blue" if label == "red" else "red"
    whole = Prediction(
        label=label,
        probability=0.75,
        top=((label, 0.75), (other, 0.25)),
        mode="stacked",
        used=("alpha", "beta"),
        missing={},
        expected_accuracy=0.875,
        latency_ms=4.0,
        deadline_ms=100.0,
        members=(),
    )
    return msgspec.structs.replace(whole, **changes)


def test_pixels_arrive_flat_nested_and_in_binary() -> None:
    in_binary = body(images(data=None, parameters={"binary_data_size": 12}))
    for given, length in (
        (body(images()), None),
        (body(images(data=PIXELS.tolist())), None),
        (in_binary + PIXELS.tobytes(), str(len(in_binary))),
    ):
        request = read_request(given, length)
        assert (request.pictures == PIXELS).all()
        assert request.outputs == {"probabilities": False, "labels": False, "used": False}
        assert request.deadline_ms is None


def test_outputs_in_binary_are_asked_for_one_by_one_or_together() -> None:
    together = body(images(), parameters={"binary_data_output": True, "deadline_ms": 50})
    request = read_request(together, None)
    assert request.outputs == {"probabilities": True, "labels": True, "used": True}
    assert request.deadline_ms == 50
    one = [{"name": "labels", "parameters": {"binary_data": True}}]
    assert read_request(body(images(), outputs=one), None).outputs == {"labels": True}


SHAPE = r"expected shape \[n, height, width, 3\]"
VALUES = "whole numbers from 0 to 255"
BINARY = {"binary_data_size": 12}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (b"", "inference request"),
        (b"[1]", "inference request: Expected `object`"),
        (b"\xff" * 40, "inference request"),
        (b'{"inputs": ' + b"[" * 100_000, "inference request"),
        (body(), "expected one named 'images', got none"),
        (body(images(), images()), "got 'images', 'images'"),
        (body(images(name="input")), "got 'input'"),
        (body(images(datatype="FP32")), "expected datatype UINT8, got FP32"),
        (body(images(shape=[2, 2, 3])), SHAPE),
        (body(images(shape=[1, 2, 2, 4])), SHAPE),
        (body(images(shape=[1, -2, -2, 3])), SHAPE),
        (body(images(shape=[MAX_PICTURES + 1, 1, 1, 3])), SHAPE),
        # Their product has more digits than Python says.
        (body(images(shape=[1, 10**4290, 10**4290, 3])), r"2147483647 - at `\$.inputs\[0\].shape"),
        (body(images(shape=[1, 2**31, 1, 3])), "Expected `int` <= 2147483647"),
        (body(images(shape=[1, -(2**31) - 1, 1, 3])), "Expected `int` >= -2147483648"),
        (body(images(shape=[1, 2**31 - 1, 2**31 - 1, 3])), r"\[1, 2147483647, 2147483647, 3\]"),
        (body(images(data=None, parameters={"binary_data_size": 10**4290})), "size 1000000"),
        (body(images(data=[*range(11)])), r"got shape \[11\]"),
        (body(images(data=[[*range(6)], [*range(6)]])), r"got shape \[2, 6\]"),
        (body(images(data=[[1], [1, 2]])), "different lengths"),
        (body(images(data=[0.5] * 12)), VALUES),
        (body(images(data=[True] * 12)), VALUES),
        (body(images(data=[-1] * 12)), VALUES),
        (body(images(data=[256] * 12)), VALUES),
        (body(images(data=[2**70] * 12)), VALUES),
        (body(images(data=["0"] * 12)), VALUES),
        # An array of these would take 15 GiB.
        (body(images(data=["0" * 2_000_000] + ["1"] * 2_000)), VALUES),
        (body(images(data=[[]] * 12)), VALUES),
        (body(images(data=[{}] * 12)), VALUES),
        (body(images(data=None)), "got none"),
        (body(images(parameters=BINARY)), "got both"),
        (body(images(data=None, parameters=BINARY)), "expected 12 bytes .* and 0 bytes"),
        (body(images(), outputs=[{"name": "boxes"}]), "got 'boxes'"),
        (body(images(), outputs=[{"name": "labels"}] * 2), "at most once"),
    ],
)
def test_what_is_refused(given: bytes, said: str) -> None:
    with pytest.raises(Refusal, match=said) as refused:
        read_request(given, None)
    assert refused.value.status == 400


@pytest.mark.parametrize("length", ["-1", "9999", "x", "\u00b2", "9" * 5000])
def test_a_length_of_the_json_that_cannot_be(length: str) -> None:
    assert is_quick(body(images()), length)
    with pytest.raises(Refusal, match="inference-header-content-length: expected 0 to"):
        read_request(body(images()), length)


def test_a_response_in_json_says_what_it_is_made_of() -> None:
    late = answer("blue", used=("alpha",), missing={"beta": "late"}, expected_accuracy=0.5)
    request = read_request(body(images(), id="7"), None)
    content, json_length = respond("colours", request, [answer(), late])
    assert json_length is None
    assert content.endswith(b"}\n")
    told = json.loads(content)
    assert (told["model_name"], told["id"]) == ("colours", "7")
    assert told["parameters"] == {
        "degraded": True,
        "mode": "stacked",
        "used": "alpha",
        "missing": "beta: late",
        "latency_ms": 4.0,
        "expected_accuracy": 0.5,
    }
    assert told["outputs"] == [
        {
            "name": "probabilities",
            "datatype": "FP32",
            "shape": [2, 2],
            "data": [0.75, 0.25, 0.75, 0.25],
        },
        {
            "name": "labels",
            "datatype": "BYTES",
            "shape": [2, 2],
            "data": ["red", "blue", "blue", "red"],
        },
        {"name": "used", "datatype": "BYTES", "shape": [2], "data": ["alpha, beta", "alpha"]},
    ]


def test_parameters_say_whether_all_items_are_known() -> None:
    known = answer(known=True, novelty=-1.5, known_rejected=0.02)
    strange = answer(known=False, novelty=0.5, known_rejected=0.01)
    found = parameters_of([known, strange])
    assert (found["known"], found["novelty"], found["known_rejected"]) == (False, 0.5, 0.02)
    assert parameters_of([known])["known"] is True
    cannot = parameters_of([strange, answer()])
    assert not {"known", "novelty", "known_rejected"} & cannot.keys()
    assert "known_rejected" not in parameters_of(
        [msgspec.structs.replace(known, known_rejected=None)]
    )


def test_a_response_in_binary() -> None:
    request = read_request(body(images(), parameters={"binary_data_output": True}), None)
    content, json_length = respond("colours", request, [answer(expected_accuracy=None)])
    assert json_length is not None
    told = json.loads(content[:json_length])
    sizes = [output["parameters"]["binary_data_size"] for output in told["outputs"]]
    assert sizes == [8, 15, 15]
    assert "expected_accuracy" not in told["parameters"]
    tail = content[json_length:]
    assert np.frombuffer(tail[:8], "<f4").tolist() == [0.75, 0.25]
    assert tail[8:23] == b"\x03\0\0\0red\x04\0\0\0blue"
    assert tail[23:] == b"\x0b\0\0\0alpha, beta", "and nothing behind it"


def test_the_subset_of_each_picture_is_what_a_caller_can_check_it_by() -> None:
    request = read_request(body(images(), outputs=[{"name": "used"}]), None)
    subsets = [("alpha", "beta"), ("beta",), ("alpha",)]
    content, _ = respond("colours", request, [answer(used=subset) for subset in subsets])
    told = json.loads(content)
    (output,) = told["outputs"]
    assert (output["shape"], output["data"]) == ([3], ["alpha, beta", "beta", "alpha"])
    assert told["parameters"]["used"] == "", "no device is in all of them"
    wanted = {each["name"]: each["shape"] for each in metadata("colours", 10)["outputs"]}
    assert wanted == {"probabilities": [-1, 5], "labels": [-1, 5], "used": [-1]}


def test_a_cascade_that_was_sure_is_not_degraded() -> None:
    assert not answer(missing={"beta": str(NOT_NEEDED)}).degraded
    assert answer(missing={"beta": str(NOT_NEEDED), "gamma": "late"}).degraded


def test_labels_that_hold_of_each_picture() -> None:
    one = answer("red", holds=(("red", 0.75),))
    found = parameters_of([one, msgspec.structs.replace(one, label="none", holds=())])
    assert json.loads(found["holds"]) == [["red"], []]
    assert "holds" not in parameters_of([answer()])
