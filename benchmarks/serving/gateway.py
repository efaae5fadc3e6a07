"""Answers over HTTP, beside the Python client's from the same agents.

    python -m benchmarks.serving --only gateway      # about 1 minute

Three stub agents; a gateway process. One caller asks the client and the gateway in turns, over one
connection that stays open: pixels (as a binary tensor), and a JPEG file. Then several callers ask
at once for some seconds, and the client has as many calls under way. The callers are threads of one
process on the same machine, whose time counts.
"""

import http.client
import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from PIL import Image

from benchmarks.harness.resampling import ratio_interval
from benchmarks.harness.serving_fleet import client_of, stub_fleet
from benchmarks.harness.turns import in_turns
from mdp import Client
from mdp.cli.bench import noise_picture, percentiles
from mdp.pictures.crop import Pixels
from mdp.testing.processes import LineProcess

NAME = "gateway"
SIDE, AGENTS = 224, 3
DEADLINE_MS = 10_000.0
ROUNDS, CALLS = 8, 100
CALLERS, SECONDS = 8, 5.0
MODEL = "/v2/models/colours"
CLIENT, GATEWAY = "client", "gateway"


class Caller:
    """One connection that stays open."""

    def __init__(self, host: str) -> None:
        self._connection = http.client.HTTPConnection(host)

    def ask(self, path: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
        """The answer, which has all members."""
        self._connection.request("POST", path, body, headers)
        response = self._connection.getresponse()
        content = response.read()
        answer: dict[str, Any] = json.loads(content)
        assert response.status == 200, content
        assert not answer.get("parameters", answer)["degraded"], content
        return answer


def jpeg(pixels: Pixels) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def tensor(pixels: Pixels) -> tuple[bytes, dict[str, str]]:
    """Body and headers of an inference request with one binary tensor."""
    images = {
        "name": "images",
        "shape": [1, *pixels.shape],
        "datatype": "UINT8",
        "parameters": {"binary_data_size": pixels.nbytes},
    }
    head = json.dumps({"inputs": [images]}).encode()
    return head + pixels.tobytes(), {"Inference-Header-Content-Length": str(len(head))}


class Server(NamedTuple):
    """Address of a server, and its process."""

    host: str
    pid: int


@contextmanager
def gateway(fleet: Path, root: Path | None = None, workers: int = 1) -> Iterator[Server]:
    """A gateway process, with the packages in `root` if given."""
    command = [Path(sys.executable).parent / "mdp", "gateway", "--bind", "127.0.0.1:0", "--json"]
    more = ["--fleet", f"colours={fleet}", "--deadline-ms", DEADLINE_MS]
    if workers > 1:
        more += ["--workers", workers]
    packages = {} if root is None else {"PYTHONPATH": str(root)}
    with LineProcess("gateway", [*command, *more], environment=packages) as process:
        yield Server(urlsplit(json.loads(process.line())["url"]).netloc, process.process.pid)


def measure(what: str, client: Client, host: str) -> dict[str, Any]:
    """One caller in turns, then many at once."""
    pixels = noise_picture(SIDE)
    if what == "JPEG":
        picture: Pixels | bytes = jpeg(pixels)
        asked: tuple[str, bytes, dict[str, str]] = (f"{MODEL}/classify", jpeg(pixels), {})
    else:
        picture, asked = pixels, (f"{MODEL}/infer", *tensor(pixels))
    one = Caller(host)
    runs: dict[str, Callable[[], object]] = {
        CLIENT: lambda: client.classify(picture, deadline_ms=DEADLINE_MS),
        GATEWAY: lambda: one.ask(*asked),
    }
    times = in_turns(runs, ROUNDS, least=CALLS, warm_up=10)
    latency_ms = {name: percentiles([*chain(*blocks)], (50, 99)) for name, blocks in times.items()}
    return {
        "what": what,
        "client_ms": latency_ms[CLIENT],
        "gateway_ms": latency_ms[GATEWAY],
        "added_ms": latency_ms[GATEWAY]["p50"] - latency_ms[CLIENT]["p50"],
        "ratio_95": ratio_interval(times[GATEWAY], times[CLIENT], 50),
        "client_per_s": _client_rate(client, picture),
        "gateway_per_s": _gateway_rate(host, asked),
        "callers": CALLERS,
    }


def _client_rate(client: Client, picture: Pixels | bytes) -> float:
    started_s, answers = time.perf_counter(), 0
    for _ in client.stream(repeat(picture), deadline_ms=DEADLINE_MS, in_flight=CALLERS):
        answers += 1
        if time.perf_counter() - started_s > SECONDS:
            break
    return answers / (time.perf_counter() - started_s)


def _gateway_rate(host: str, asked: tuple[str, bytes, dict[str, str]]) -> float:
    until_s = time.perf_counter() + SECONDS

    def call(_: int) -> int:
        caller, answers = Caller(host), 0
        while time.perf_counter() < until_s:
            caller.ask(*asked)
            answers += 1
        return answers

    with ThreadPoolExecutor(CALLERS) as pool:
        return sum(pool.map(call, range(CALLERS))) / SECONDS


def run(*, quick: bool) -> Iterator[dict[str, Any]]:
    with (
        stub_fleet(AGENTS, side=SIDE) as fleet,
        client_of(fleet) as client,
        gateway(fleet.folder / "fleet.toml") as server,
    ):
        for what in ("pixels",) if quick else ("pixels", "JPEG"):
            yield measure(what, client, server.host)


COLUMNS = (
    ("picture", "{what}"),
    ("client, p50 ms", "{client_ms[p50]:.2f}"),
    ("p99", "{client_ms[p99]:.2f}"),
    ("gateway, p50 ms", "{gateway_ms[p50]:.2f}"),
    ("p99", "{gateway_ms[p99]:.2f}"),
    ("added at p50, ms", "{added_ms:.2f}"),
    ("client, answers a second, 8 under way", "{client_per_s:.0f}"),
    ("gateway, 8 callers", "{gateway_per_s:.0f}"),
)
