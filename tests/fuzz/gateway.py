"""Targets: what comes over HTTP, up to the call of a fleet, which answers here without devices."""

import asyncio
import functools
import ipaddress
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import httptools
import numpy as np

from mdp.formats.bundle import Bundle
from mdp.formats.fleet import Fleet, FleetEntry
from mdp.gateway import infer
from mdp.gateway.access import OPEN, Tokens, check_request
from mdp.gateway.app import Gateway
from mdp.gateway.bodies import parse_upload
from mdp.gateway.devices import Roll
from mdp.gateway.fleets import ServedFleet
from mdp.gateway.refusals import Refusal
from mdp.pictures.crop import Picture
from mdp.requests.prediction import Prediction
from mdp.testing.bundles import DEVICES, LABELS, write_bundle
from tests.fuzz.target import Structure, Target, refuse, scratch

MODEL = "colours"
TOKEN = "a-token-of-some-length"
TOKENS = Tokens([TOKEN])
_SAFE = ("GET", "HEAD", "OPTIONS")
_HOST = re.compile(r"(\[(?P<ipv6>[^\[\]]*)\]|(?P<name>[^:\[\]]*))(:[0-9]*)?")


def turn_down(refusal: Refusal) -> bool:
    """False, for a request that is the client's fault."""
    assert 400 <= refusal.status < 500, f"{refusal.status}: {refusal}"
    return refuse(refusal)


def answer() -> Prediction:
    """One picture's answer, that lacks a device."""
    return Prediction(
        label=LABELS[0],
        probability=0.75,
        top=tuple((label, 1 / (place + 1)) for place, label in enumerate(LABELS)),
        mode="stacked",
        used=tuple(DEVICES[:2]),
        missing={DEVICES[2]: "late"},
        expected_accuracy=None,
        latency_ms=1.0,
        deadline_ms=100.0,
        members=(),
        bundle="ab" * 32,
    )


# A form: the value of Content-Type in a line, and the body.


def read_form(data: bytes) -> bool:
    """The picture in a body, alone or in a form: a part of what was sent, and not copied about."""
    content_type, _, body = data.partition(b"\n")
    try:
        picture = bytes(parse_upload(content_type.decode("latin-1"), bytearray(body)))
    except Refusal as refusal:
        return turn_down(refusal)
    assert picture, "an empty picture"
    assert picture in body, "a picture that was not sent"
    return True


def form(*parts: tuple[str, bytes], boundary: str = "b0") -> bytes:
    """A form of parts, each with its headers and content."""
    body = b"".join(
        f"--{boundary}\r\n{headers}\r\n\r\n".encode() + content + b"\r\n"
        for headers, content in parts
    )
    return (
        f"multipart/form-data; boundary={boundary}\n".encode() + body + f"--{boundary}--".encode()
    )


_FILE = 'Content-Disposition: form-data; name="picture"; filename="a.png"'
_FIELD = 'Content-Disposition: form-data; name="deadline_ms"'


def _forms() -> Mapping[str, bytes]:
    return {
        "alone": b"image/png\n\x89PNG\r\n",
        "no-type": b"\n\xff\xd8\xff",
        "file": form((_FILE, b"\x89PNG\r\n--b\r\n--c0")),
        "fields": form((_FIELD, b"80"), (f"{_FILE}\r\nContent-Type: image/png", b"\x89PNG")),
        "long": form((_FILE, b"--bound" * 9), boundary="bound" * 13),
    }


# A request of the Open Inference Protocol: the length of its JSON in a line, or an empty one, and
# the body.


def read_inference(data: bytes) -> bool:
    """An inference request, and the response to it: as many answers as it has pictures."""
    line, _, body = data.partition(b"\n")
    length = line.decode("latin-1") or None
    try:
        infer.is_quick(body, length)
        asked = infer.read_request(bytearray(body), length)
    except Refusal as refusal:
        return turn_down(refusal)
    pictures = asked.pictures
    assert pictures.dtype == np.uint8
    assert pictures.ndim == 4
    assert pictures.shape[3] == 3
    assert 1 <= len(pictures) <= infer.MAX_PICTURES
    # Every number of a JSON takes two bytes or more.
    assert 0 < pictures.nbytes <= len(body)
    content, json_length = infer.respond(MODEL, asked, [answer()] * len(pictures))
    told = json.loads(content[:json_length])
    assert [output["name"] for output in told["outputs"]] == list(asked.outputs)
    assert all(output["shape"][0] == len(pictures) for output in told["outputs"])
    binary = [
        output["parameters"]["binary_data_size"]
        for output in told["outputs"]
        if "data" not in output
    ]
    assert len(content) - (json_length or len(content)) == sum(binary)
    return True


def parse_inference(data: bytes) -> Any:
    """The JSON as a tree, and the binary tensor after it."""
    line, _, body = data.partition(b"\n")
    end = int(line) if line else len(body)
    return [json.loads(body[:end]), body[end:], bool(line)]


def render_inference(tree: Any) -> bytes:
    """The inverse of `parse_inference`; raises ValueError or TypeError."""
    request, tail, announced = tree
    if not isinstance(tail, bytes):
        raise ValueError("the tensor is bytes")
    head = json.dumps(request).encode()
    return (str(len(head)).encode() if announced else b"") + b"\n" + head + tail


def inference(tail: bytes = b"", *, announced: bool = False, **changes: Any) -> bytes:
    """One request of a picture of two pixels."""
    images: dict[str, Any] = {"name": "images", "shape": [1, 1, 2, 3], "datatype": "UINT8"}
    more = changes.pop("more", {})
    return render_inference([{"inputs": [images | changes], **more}, tail, announced])


def _inferences() -> Mapping[str, bytes]:
    size = {"binary_data_size": 6}
    binary = {"outputs": [{"name": "labels", "parameters": {"binary_data": True}}], "id": "7"}
    return {
        "flat": inference(data=[0, 1, 2, 253, 254, 255]),
        "nested": inference(data=[[[[0, 1, 2], [3, 4, 5]]]]),
        "binary": inference(bytes(range(6)), announced=True, parameters=size),
        "two": inference(
            shape=[2, 1, 1, 3], data=[0] * 6, more={"parameters": {"deadline_ms": 80}}
        ),
        "out": inference(bytes(6), announced=True, parameters=size, more=binary),
        "all": inference(data=[0] * 6, more={"parameters": {"binary_data_output": True}}),
    }


# A request as text: "+" where the gateway has tokens, else "-"; its method and target; headers in
# lines; an empty line; the body.


class Parsed:
    """A request of such a text, which may be any bytes."""

    def __init__(self, data: bytes) -> None:
        head, _, self.body = data.partition(b"\n\n")
        first, *lines = head.decode("latin-1").split("\n")
        self.has_tokens = first.startswith("+")
        self.method, _, target = first[1:].partition(" ")
        self.target, _, self.query = target.partition("?")
        pairs = (line.partition(":") for line in lines)
        # As a server hands them on.
        self.headers = [(name.strip().lower(), value.strip()) for name, _, value in pairs]

    @property
    def path(self) -> str:
        return unquote(self.target)

    def first(self, name: str) -> str | None:
        """The first header of this name, which is the one that is read."""
        return next((value for known, value in self.headers if known == name), None)


def check_let_in(asked: Parsed) -> None:
    """Conditions of a request that was let in, said in another way than the product."""
    if asked.has_tokens:
        scheme, _, token = (asked.first("authorization") or "").partition(" ")
        assert asked.path in OPEN or (scheme.lower(), token.strip()) == ("bearer", TOKEN)
    else:
        host = asked.first("host") or ""
        named = _HOST.fullmatch(host)
        assert named, f"no host: {host}"
        name = named["ipv6"] or named["name"]
        assert name.lower() == "localhost" or ipaddress.ip_address(name).is_loopback, host
    origin = asked.first("origin")
    if origin and asked.method not in _SAFE:
        # HTTPS may end in front of the gateway.
        own = [f"{scheme}://{asked.first('host')}" for scheme in ("http", "https")]
        assert origin in own, origin
    if asked.path not in OPEN:
        assert asked.first("sec-fetch-site") in (None, "none", "same-origin")


def read_access(data: bytes) -> bool:
    """The decision to let a request in, by its headers."""
    asked = Parsed(data)
    headers = dict(reversed(asked.headers))
    tokens = TOKENS if asked.has_tokens else Tokens([])
    try:
        check_request(asked.method, asked.path, headers, tokens)
    except Refusal as refusal:
        return turn_down(refusal)
    check_let_in(asked)
    return True


class Still(ServedFleet):
    """A fleet without devices, that answers at once."""

    def __init__(self) -> None:
        self.name = MODEL
        folder = scratch("http") / "bundle"
        self.bundle = Bundle.open(folder if folder.exists() else write_bundle(folder))
        entries = [
            FleetEntry(device=name, address=f"tcp://127.0.0.1:{9000 + k}", k=k)
            for k, name in enumerate(DEVICES)
        ]
        self.roll = Roll(Fleet(bundle="bundle", devices=entries), self.bundle, "stacked")
        self.workers = None
        self.changed = lambda: None
        self._client: Any = SimpleNamespace(leave_out=lambda *names: None)

    async def classify(self, pictures: Sequence[Picture], deadline_ms: float) -> list[Prediction]:
        assert 0 < deadline_ms <= 60_000
        return [answer()] * len(pictures)

    async def look(self, deadline_ms: float, *, maps: bool = False) -> Prediction:
        return (await self.classify([b""], deadline_ms))[0]


@functools.cache
def _app(has_tokens: bool) -> Any:
    return Gateway({MODEL: Still()}, 250.0).app(TOKENS if has_tokens else Tokens([]))


class _Head:
    """The headers of a request, as the server's parser has them."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))


def _headers(asked: Parsed) -> list[tuple[bytes, bytes]]:
    """Headers that the server hands on; raises httptools.HttpParserError where it refuses."""
    target = f"{asked.target}?{asked.query}" if asked.query else asked.target
    lines = [f"{asked.method} {target} HTTP/1.1", *(f"{k}: {v}" for k, v in asked.headers)]
    head = _Head()
    # What is to be upgraded is handed on as it is.
    with suppress(httptools.HttpParserUpgrade):
        text = "\r\n".join([*lines, "", ""])
        httptools.HttpRequestParser(head).feed_data(text.encode("latin-1"))
    return head.headers


async def _request(asked: Parsed) -> tuple[int, bytes]:
    """Status and body of the gateway's response; the client leaves once it has sent all.

    Raises httptools.HttpParserError for what the server does not hand on.
    """
    headers = _headers(asked)
    scope = {
        "type": "http",
        "method": asked.method,
        "scheme": "http",
        "path": asked.path,
        "raw_path": asked.target.encode("latin-1"),
        "query_string": asked.query.encode("latin-1"),
        "headers": headers,
        "client": ("127.0.0.1", 50000),
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }
    waiting: list[dict[str, Any]] = [
        {"type": "http.request", "body": asked.body, "more_body": False},
        {"type": "http.disconnect"},
    ]
    status, content = 0, b""

    async def receive() -> dict[str, Any]:
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    async def send(message: Any) -> None:
        nonlocal status, content
        status = message.get("status", status)
        content += message.get("body", b"")

    await _app(asked.has_tokens)(scope, receive, send)
    return status, content


def read_request(data: bytes) -> bool:
    """A whole request: it is answered, or refused in words, and never by an unforeseen error."""
    asked = Parsed(data)
    try:
        status, content = asyncio.run(_request(asked))
    except httptools.HttpParserError:
        return False
    if status not in (401, 403):
        check_let_in(asked)
    assert 200 <= status < 500 or status == 503, f"{status}: {content!r}"
    if status >= 400 and asked.method != "HEAD" and asked.path != "/v2/health/ready":
        told = json.loads(content)
        assert told["error"] or not told.get("ready", True)
    return status < 400


def request(
    method: str, target: str, body: bytes = b"", has_tokens: bool = False, **headers: str
) -> bytes:
    """A request as text."""
    known = {"host": "127.0.0.1:8080"} | {k.replace("_", "-"): v for k, v in headers.items()}
    if has_tokens:
        known["authorization"] = f"Bearer {TOKEN}"
    lines = [f"{'-+'[has_tokens]}{method} {target}", *(f"{k}: {v}" for k, v in known.items())]
    return "\n".join(lines).encode("latin-1") + b"\n\n" + body


def parse_request(data: bytes) -> Any:
    """Its words, in lists."""
    asked = Parsed(data)
    words = ["+" if asked.has_tokens else "-", asked.method, asked.target, asked.query]
    return [words, [list(pair) for pair in asked.headers], asked.body]


def render_request(tree: Any) -> bytes:
    """The inverse of `parse_request`; raises ValueError or TypeError."""
    (sign, method, target, query), headers, body = tree
    first = f"{sign}{method} {target}" + (f"?{query}" if query else "")
    lines = [first, *(f"{name}: {value}" for name, value in headers)]
    if not isinstance(body, bytes):
        raise ValueError("the body is bytes")
    return "\n".join(lines).encode("latin-1", "replace") + b"\n\n" + body


_MODEL = f"/v2/models/{MODEL}"


def _doors() -> Mapping[str, bytes]:
    origin = "http://127.0.0.1:8080"
    return {
        "own-page": request(
            "PUT", f"{_MODEL}/devices/alpha", origin=origin, sec_fetch_site="same-origin"
        ),
        "ipv6": request("GET", "/fleets", host="[::1]:8080"),
        "name": request("POST", f"{_MODEL}/infer", host="localhost"),
        "token": request("POST", f"{_MODEL}/classify", has_tokens=True, host="a.example"),
        "open": b"+GET /v2/health/live\nhost: a.example\n\n",
    }


def _requests() -> Mapping[str, bytes]:
    length, _, tensor = _inferences()["binary"].partition(b"\n")
    kind, _, upload = _forms()["file"].partition(b"\n")
    put = f"{_MODEL}/devices/{DEVICES[0]}"
    seeds = {
        "classify": request("POST", f"{_MODEL}/classify?deadline_ms=80", b"\x89PNG"),
        "form": request("POST", f"{_MODEL}/classify", upload, content_type=kind.decode()),
        "infer": request(
            "POST", f"{_MODEL}/infer", tensor, inference_header_content_length=length.decode()
        ),
        "json": request("POST", f"{_MODEL}/infer", _inferences()["two"][1:], has_tokens=True),
        "off": request("PUT", put, b'{"in_use": false}'),
        "on": request("PUT", put, b'{"in_use": true}', origin="http://127.0.0.1:8080"),
        "look": request("GET", f"{_MODEL}/look?deadline_ms=1e3"),
        "watch": request("GET", f"{_MODEL}/watch?every_ms=100&deadline_ms=80"),
        "events": request("GET", "/events"),
        "metrics": request("GET", "/metrics", accept="application/openmetrics-text"),
        "page": request("HEAD", "/"),
    }
    return seeds | {name: request("GET", path) for name, path in (
        ("server", "/v2"), ("model", _MODEL), ("fleets", "/fleets"),
    )}  # fmt: skip


_HEADERS = (b"host: ", b"origin: ", b"sec-fetch-site: ", b"authorization: Bearer ")
_PLACES = (b"localhost", b"127.0.0.1", b"[::1]", b"http://", b"same-origin", TOKEN.encode())

TARGETS = (
    Target(
        name="form",
        read=read_form,
        seeds=_forms,
        share=0.03,
        words=(
            *(b"multipart/form-data; boundary=", b"\r\n", b"--b0", b"--b0--", b"\r\n\r\n"),
            *(b"Content-Disposition: form-data;", b'filename="', b"filename*=UTF-8''", b'name="'),
        ),
    ),
    Target(
        name="inference",
        read=read_inference,
        seeds=_inferences,
        share=0.03,
        structure=Structure(parse=parse_inference, render=render_inference),
        words=(b'"data":', b'"shape":', b'"parameters":', b'"binary_data_size":', b"[[[["),
    ),
    Target(
        name="access",
        read=read_access,
        seeds=_doors,
        share=0.05,
        max_bytes=512,
        structure=Structure(parse=parse_request, render=render_request),
        words=(*_HEADERS, *_PLACES),
    ),
    Target(
        name="http",
        read=read_request,
        seeds=_requests,
        share=0.01,
        max_bytes=2048,
        structure=Structure(parse=parse_request, render=render_request),
        words=(
            *_HEADERS,
            *_PLACES,
            *(b"content-type: ", b"content-length: ", b"content-encoding: ", b"accept: "),
            *(b"deadline_ms=", b"every_ms=", b"%00", b"%2f", b"/v2/models/", b'{"in_use": true}'),
        ),
    ),
)
