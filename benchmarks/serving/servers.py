"""The gateway beside LitServe and MLServer, one stub model behind each.

    python3 -m venv runs/servers
    runs/servers/bin/pip install litserve==0.2.19 mlserver==1.7.1 pillow
    python -m benchmarks.serving --only servers      # about 2 minutes

Each gets the same picture of 224x224 pixels in the way that it takes one: the gateway pixels as a
binary tensor and a JPEG file as it is; LitServe either as a multipart upload; MLServer either in
base64, as it reads no binary tensors, and numbers in JSON cost it four times the processor time.
Gateway, LitServe's worker and MLServer each decode the JPEG file. The gateway's model is one stub
agent, a process of its own, as LitServe's worker is; MLServer's is in the server's process, with
no worker to hand pictures to (`parallel_workers=0`). One caller asks all in turns, over
connections that stay open; then several at once ask each for some seconds, in turns too. The
callers are threads of one process on the same machine, whose time counts but in `cpu_ms`:
processor time of a server's processes per answer, which other load changes little.
"""

import base64
import http.client
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.harness.resampling import ratio_interval
from benchmarks.harness.serving_fleet import client_of, stub_fleet
from benchmarks.harness.turns import in_turns
from benchmarks.serving.gateway import MODEL, SIDE, gateway, jpeg, tensor
from mdp.cli.bench import noise_picture, percentiles
from mdp.pictures.crop import Pixels
from mdp.testing.processes import PATIENCE_S, LineProcess, until

PYTHON = Path("runs/servers/bin/python")
PROGRAM = Path(__file__).with_name("other_server.py")
OURS, OTHERS = "gateway", ("litserve", "mlserver")
ROUNDS, CALLS = 6, 60
CALLERS, RATE_ROUNDS, SECONDS = 8, 4, 2.0
FORM = {"Content-Type": "multipart/form-data; boundary=cut"}


class Asked(NamedTuple):
    """A request to one server."""

    host: str
    path: str
    body: bytes
    headers: dict[str, str]


def form(content: bytes) -> bytes:
    head = b'--cut\r\nContent-Disposition: form-data; name="picture"; filename="a"\r\n\r\n'
    return head + content + b"\r\n--cut--\r\n"


def in_base64(content: bytes) -> bytes:
    data = [base64.b64encode(content).decode()]
    images = {"name": "images", "datatype": "BYTES", "shape": [1], "data": data}
    return json.dumps({"inputs": [images]}).encode()


def requests(what: str, pixels: Pixels, hosts: dict[str, str]) -> dict[str, Asked]:
    """The same picture for each server."""
    file, as_it_is = jpeg(pixels), {"Content-Type": "application/json"}
    if what == "JPEG":
        ours: tuple[str, bytes, dict[str, str]] = (f"{MODEL}/classify", file, {})
        upload = file
    else:
        ours = (f"{MODEL}/infer", *tensor(pixels))
        upload = pixels.tobytes()
    return {
        OURS: Asked(hosts[OURS], *ours),
        "litserve": Asked(hosts["litserve"], "/classify", form(upload), FORM),
        "mlserver": Asked(hosts["mlserver"], f"{MODEL}/infer", in_base64(upload), as_it_is),
    }


@contextmanager
def caller(asked: Asked) -> Iterator[Callable[[], None]]:
    """Asks over one connection that stays open."""
    with closing(http.client.HTTPConnection(asked.host, timeout=PATIENCE_S)) as connection:

        def ask() -> None:
            connection.request("POST", asked.path, asked.body, asked.headers)
            response = connection.getresponse()
            content = response.read()
            assert response.status == 200, content
            assert b"red" in content, content

        yield ask


@contextmanager
def other(name: str) -> Iterator[str]:
    """LitServe or MLServer; where it listens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as place:
        port = place.getsockname()[1]
    with LineProcess(name, [PYTHON, PROGRAM, name, port], Path("/dev/null"), own_session=True):

        def is_up() -> bool:
            with closing(socket.socket()) as trial:
                return trial.connect_ex(("127.0.0.1", port)) == 0

        until(is_up, f"{name} listens")
        yield f"127.0.0.1:{port}"


def measure(what: str, hosts: dict[str, str]) -> dict[str, Any]:
    """One caller in turns, then many at each."""
    asked = requests(what, noise_picture(SIDE), hosts)
    with ExitStack() as stack:
        runs = {name: stack.enter_context(caller(each)) for name, each in asked.items()}
        times = in_turns(runs, ROUNDS, least=CALLS, warm_up=10)
    rates, cpu_ms = asked_by_many(asked)
    return {
        "what": what,
        "ms": {name: percentiles([*chain(*blocks)], (50, 99)) for name, blocks in times.items()},
        "ratio_95": {name: ratio_interval(times[OURS], times[name], 50) for name in OTHERS},
        "per_s": rates,
        "cpu_ms": cpu_ms,
        "rate_ratio": {name: rates[OURS] / rates[name] for name in OTHERS},
        "callers": CALLERS,
    }


def asked_by_many(asked: dict[str, Asked]) -> tuple[dict[str, float], dict[str, float]]:
    """Answers a second, and milliseconds of processor time for one, by server."""
    answers, used_s = dict.fromkeys(asked, 0), dict.fromkeys(asked, 0.0)
    for _ in range(RATE_ROUNDS):
        for name, each in asked.items():
            before_s = cpu_s(name)
            answers[name] += answers_of(each)
            used_s[name] += cpu_s(name) - before_s
    rates = {name: count / (RATE_ROUNDS * SECONDS) for name, count in answers.items()}
    return rates, {name: used_s[name] / count * 1e3 for name, count in answers.items()}


def cpu_s(name: str) -> float:
    """Processor time that a server's processes have used, its agents' included."""
    used_s = 0.0
    for child in psutil.Process().children():
        ours = not any(other in child.cmdline() for other in OTHERS)
        if name in child.cmdline() or (ours and name == OURS):
            for process in (child, *child.children(recursive=True)):
                times = process.cpu_times()
                used_s += times.user + times.system
    return used_s


def answers_of(asked: Asked) -> int:
    """Answers to several callers in `SECONDS`."""
    until_s = time.perf_counter() + SECONDS

    def call(_: int) -> int:
        answers = 0
        with caller(asked) as ask:
            while time.perf_counter() < until_s:
                ask()
                answers += 1
        return answers

    with ThreadPoolExecutor(CALLERS) as pool:
        return sum(pool.map(call, range(CALLERS)))


def run(*, quick: bool) -> Iterator[dict[str, Any]]:
    if not PYTHON.exists():
        sys.exit(f"{PYTHON}: expected an environment with LitServe and MLServer, found none")
    with ExitStack() as stack:
        fleet = stack.enter_context(stub_fleet(1, side=SIDE))
        stack.enter_context(client_of(fleet))
        hosts = {OURS: stack.enter_context(gateway(fleet.folder / "fleet.toml"))}
        hosts |= {name: stack.enter_context(other(name)) for name in OTHERS}
        ready = partial(_answers, requests("JPEG", noise_picture(SIDE), hosts))
        until(ready, "all servers answer")
        for what in ("JPEG",) if quick else ("pixels", "JPEG"):
            yield measure(what, hosts)


def _answers(asked: dict[str, Asked]) -> bool:
    for each in asked.values():
        with caller(each) as ask:
            try:
                ask()
            except (AssertionError, OSError):
                return False
    return True


def _of(name: str, title: str) -> tuple[tuple[str, str], ...]:
    return (
        (f"{title}, p50 ms", f"{{ms[{name}][p50]:.1f}}"),
        ("p99", f"{{ms[{name}][p99]:.1f}}"),
        ("a second", f"{{per_s[{name}]:.0f}}"),
        ("CPU ms", f"{{cpu_ms[{name}]:.1f}}"),
    )


COLUMNS = (
    ("picture", "{what}"),
    *_of(OURS, "gateway"),
    *_of("litserve", "LitServe"),
    *_of("mlserver", "MLServer"),
)
