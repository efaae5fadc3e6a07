"""Calls of the gateway over HTTP: a picture as a file, or some as a tensor."""

import http.client
import io
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import local
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.soak.pictures import DEVICES, LEVELS, picture_of
from benchmarks.soak.tally import Answer, CallFailed, Outcome

#: The name of the fleet at the gateway.
MODEL = "colours"
#: Shorter than a gateway keeps a connection without requests.
IDLE_S = 5.0
#: Nothing waits so long unless it fails.
SOCKET_S = 120.0


class Callers:
    """One connection for each thread that calls; it stays open, and is made anew once it fails."""

    def __init__(self, host: str, deadline_ms: float) -> None:
        self._host, self._deadline_ms = host, deadline_ms
        self._own = local()
        self._files = [_png(number) for number in range(LEVELS**3)]

    def classify(self, numbers: Sequence[int]) -> list[Outcome]:
        """The answer for one picture, sent as a file."""
        (number,) = numbers
        path = f"/v2/models/{MODEL}/classify?deadline_ms={self._deadline_ms:g}"
        return self._ask(path, self._files[number], {}, _parse_classify, numbers)

    def infer(self, numbers: Sequence[int]) -> list[Outcome]:
        """The answers for some pictures, sent as one tensor."""
        body, headers = tensor(numbers, self._deadline_ms)
        return self._ask(f"/v2/models/{MODEL}/infer", body, headers, parse_infer, numbers)

    def _ask(
        self, path: str, body: bytes, headers: Mapping[str, str], read: Any, numbers: Sequence[int]
    ) -> list[Outcome]:
        began_s = time.monotonic()
        try:
            with self._connection() as connection:
                connection.request("POST", path, body, dict(headers))
                response = connection.getresponse()
                content = response.read()
        except (OSError, http.client.HTTPException):
            # The gateway has ended, or is not there.
            answers: Sequence[Answer | CallFailed] = [CallFailed("connection")] * len(numbers)
        else:
            took = response.status == 200
            answers = (
                read(json.loads(content)) if took else [refusal(response.status)] * len(numbers)
            )
        took_s = time.monotonic() - began_s
        return [(answer, took_s) for answer in answers]

    @contextmanager
    def _connection(self) -> Iterator[http.client.HTTPConnection]:
        known, used_s = getattr(self._own, "connection", (None, 0.0))
        if known is not None and time.monotonic() - used_s > IDLE_S:
            known.close()
        connection = known or http.client.HTTPConnection(self._host, timeout=SOCKET_S)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        finally:
            self._own.connection = connection, time.monotonic()


def _png(number: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture_of(number)).save(file, "PNG")
    return file.getvalue()


def refusal(status: int) -> CallFailed:
    return CallFailed(f"HTTP {status}")


def tensor(numbers: Sequence[int], deadline_ms: float) -> tuple[bytes, dict[str, str]]:
    """Body and headers of an inference request with the pictures as a binary tensor."""
    pixels = np.stack([picture_of(number) for number in numbers])
    images = {
        "name": "images",
        "shape": pixels.shape,
        "datatype": "UINT8",
        "parameters": {"binary_data_size": pixels.nbytes},
    }
    asked = {"inputs": [images], "parameters": {"deadline_ms": deadline_ms}}
    head = json.dumps(asked).encode()
    return head + pixels.tobytes(), {"Inference-Header-Content-Length": str(len(head))}


def _parse_classify(told: Mapping[str, Any]) -> list[Answer]:
    """The answer of the gateway's own route."""
    return [
        Answer(
            label=told["label"],
            probability=told["probability"],
            used=told["used"],
            missing=list(told["missing"]),
            bundle=told["bundle"],
        )
    ]


def parse_infer(told: Mapping[str, Any]) -> list[Answer]:
    """The answers of the protocol's route, one for each picture.

    `used` and `missing` of the parameters are about all pictures together. Which devices are in
    each answer, and so which of those are missing from it, is known of one picture alone, or where
    the gateway has an output `used`.
    """
    outputs = {output["name"]: output for output in told["outputs"]}
    count, top = outputs["labels"]["shape"]
    together = told["parameters"]
    known = count == 1 or "used" in outputs
    used = outputs["used"]["data"] if "used" in outputs else [together["used"]] * count
    # A replica goes by its member's name: both may be missing, by either name.
    missing = {_member(part.partition(":")[0]) for part in together["missing"].split("; ")}
    answers = []
    for place in range(count):
        devices = used[place].split(", ")
        there = {_member(name) for name in devices}
        others = [device for device in DEVICES if device in missing and device not in there]
        answers.append(
            Answer(
                label=outputs["labels"]["data"][place * top],
                probability=outputs["probabilities"]["data"][place * top],
                used=devices,
                missing=others if known else None,
                bundle=None,
            )
        )
    return answers


def _member(name: str) -> str:
    """The member of a device or of its replica: `beta` of `beta/second`."""
    return name.partition("/")[0]
