"""The gateway beside LitServe and MLServer, one stub model behind each.

    python3 -m venv runs/servers
    runs/servers/bin/pip install litserve==0.2.19 mlserver==1.7.1 pillow
    python -m benchmarks.serving --only servers              # about 3 minutes
    python -m benchmarks.serving.servers --before COMMIT     # and the gateway of another commit
    python -m benchmarks.serving.servers --workers 3         # and a gateway with workers
    python -m benchmarks.serving.servers --beside 6          # also beside six busy processes

Each gets the same picture in the way that it takes one: the gateway pixels as a binary tensor and a
JPEG file as it is; LitServe either as a multipart upload; MLServer either in base64, as it reads no
binary tensors, and numbers in JSON cost it four times the processor time. Gateway, LitServe's
worker and MLServer each decode a JPEG file, and make it the model's 224 x 224 pixels. `photograph`
is one of 224 x 224 (scikit-learn's `china.jpg`), `noise` has no two pixels alike, `camera` is the
photograph at 1280 x 960. The others decode with Pillow, as their documentation has it; in `camera,
scaled` they have it decode at a smaller scale (`draft`), as the gateway does by itself.

The gateway's model is one stub agent, a process of its own, as LitServe's worker is; MLServer's is
in the server's process, with no worker to hand pictures to (`parallel_workers=0`). One caller asks
all in turns, over connections that stay open; then several at once ask each for some seconds, in
turns too. The callers are threads of one process on the same machine, whose time counts but in
`cpu_ms`: processor time of a server's processes per answer, which other load changes little. With
`--beside`, each picture is asked for again beside so many busy processes.
"""

import base64
import http.client
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import psutil
from PIL import Image, ImageOps
from sklearn.datasets import load_sample_image

from benchmarks.harness.busy import busy, loads, name_with
from benchmarks.harness.commits import unpack
from benchmarks.harness.options import arguments
from benchmarks.harness.resampling import ratio_interval
from benchmarks.harness.serving_fleet import client_of, stub_fleet
from benchmarks.harness.tables import table
from benchmarks.harness.turns import in_turns
from benchmarks.serving.gateway import MODEL, SIDE, Server, gateway, jpeg, tensor
from mdp.cli.bench import noise_picture, percentiles
from mdp.pictures.crop import Pixels
from mdp.testing.processes import PATIENCE_S, LineProcess, until

PYTHON = Path("runs/servers/bin/python")
PROGRAM = Path(__file__).with_name("other_server.py")
OURS, BEFORE, WORKERS, OTHERS = "gateway", "before", "workers", ("litserve", "mlserver")
#: Of a camera's pictures.
CAMERA = (1280, 960)
ROUNDS, CALLS = 6, 60
CALLERS, RATE_ROUNDS, SECONDS = 8, 4, 2.0
#: Seconds of silence after which a connection is opened anew: LitServe and MLServer end theirs
#: after uvicorn's 5, the gateway after 10, and others' turns may take longer.
IDLE_S = 2.0
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


def photograph(width: int, height: int) -> Pixels:
    """The middle of a photograph, at this size."""
    picture = Image.fromarray(load_sample_image("china.jpg"))
    return np.asarray(ImageOps.fit(picture, (width, height), Image.Resampling.BICUBIC))


PICTURES: dict[str, Callable[[], Pixels]] = {
    "pixels": partial(noise_picture, SIDE),
    "noise": partial(noise_picture, SIDE),
    "photograph": partial(photograph, SIDE, SIDE),
    "camera": partial(photograph, *CAMERA),
    "camera, scaled": partial(photograph, *CAMERA),
}


def requests(what: str, servers: dict[str, Server]) -> dict[str, Asked]:
    """The same picture for each server."""
    pixels, as_it_is = PICTURES[what](), {"Content-Type": "application/json"}
    if what == "pixels":
        ours: tuple[str, bytes, dict[str, str]] = (f"{MODEL}/infer", *tensor(pixels))
        upload = pixels.tobytes()
    else:
        upload = jpeg(pixels)
        ours = (f"{MODEL}/classify", upload, {})
    paths = {
        "litserve": ("/classify", form(upload), FORM),
        "mlserver": (f"{MODEL}/infer", in_base64(upload), as_it_is),
    }
    return {name: Asked(server.host, *paths.get(name, ours)) for name, server in servers.items()}


@contextmanager
def caller(asked: Asked) -> Iterator[Callable[[], None]]:
    """Asks over one connection that stays open from turn to turn, as long as servers keep it."""
    with closing(http.client.HTTPConnection(asked.host, timeout=PATIENCE_S)) as connection:
        asked_s = time.perf_counter()

        def ask() -> None:
            nonlocal asked_s
            if time.perf_counter() - asked_s > IDLE_S:
                # A request opens it again.
                connection.close()
            connection.request("POST", asked.path, asked.body, asked.headers)
            response = connection.getresponse()
            content = response.read()
            assert response.status == 200, content
            assert b"red" in content, content
            asked_s = time.perf_counter()

        yield ask


@contextmanager
def other(name: str, *, scaled: bool) -> Iterator[Server]:
    """LitServe or MLServer, which decodes at a smaller scale if `scaled`."""
    with closing(socket.create_server(("127.0.0.1", 0))) as place:
        port = place.getsockname()[1]
    command = [PYTHON, PROGRAM, name, port, *(["scaled"] if scaled else [])]
    with LineProcess(name, command, Path("/dev/null"), own_session=True) as process:

        def is_up() -> bool:
            with closing(socket.socket()) as trial:
                return trial.connect_ex(("127.0.0.1", port)) == 0

        until(is_up, f"{name} listens")
        yield Server(f"127.0.0.1:{port}", process.process.pid)


def measure(what: str, servers: dict[str, Server], agents: Sequence[int]) -> dict[str, Any]:
    """One caller in turns, then many at each; `agents` are processes behind the gateways."""
    asked = requests(what, servers)
    with ExitStack() as stack:
        runs = {name: stack.enter_context(caller(each)) for name, each in asked.items()}
        times = in_turns(runs, ROUNDS, least=CALLS, warm_up=10)
    rates, cpu_ms = load_by_many(asked, servers, agents)
    others = [name for name in servers if name != OURS]
    return {
        "what": what,
        "ms": {name: percentiles([*chain(*blocks)], (50, 99)) for name, blocks in times.items()},
        "ratio_95": {name: ratio_interval(times[OURS], times[name], 50) for name in others},
        "per_s": rates,
        "cpu_ms": cpu_ms,
        "rate_ratio": {name: rates[OURS] / rates[name] for name in others},
        "callers": CALLERS,
    }


def load_by_many(
    asked: dict[str, Asked], servers: dict[str, Server], agents: Sequence[int]
) -> tuple[dict[str, float], dict[str, float]]:
    """Answers a second, and milliseconds of processor time for one, by server."""
    pids = {
        name: [server.pid, *(() if name in OTHERS else agents)] for name, server in servers.items()
    }
    answers, used_s = dict.fromkeys(asked, 0), dict.fromkeys(asked, 0.0)
    for _ in range(RATE_ROUNDS):
        for name, each in asked.items():
            before_s = cpu_s(pids[name])
            answers[name] += answers_of(each)
            used_s[name] += cpu_s(pids[name]) - before_s
    rates = {name: count / (RATE_ROUNDS * SECONDS) for name, count in answers.items()}
    return rates, {name: used_s[name] / count * 1e3 for name, count in answers.items()}


def cpu_s(pids: Sequence[int]) -> float:
    """Processor time that processes and their children have used."""
    used_s = 0.0
    for parent in map(psutil.Process, pids):
        for process in (parent, *parent.children(recursive=True)):
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


def run(
    *, quick: bool, before: str = "", workers: int = 1, beside: int = 0
) -> Iterator[dict[str, Any]]:
    """A row of each picture, and one beside so many busy processes.

    With `before`, a commit, its gateway is asked in the same turns, and with several `workers` one
    that has them.
    """
    both_loads = loads(beside)
    if not PYTHON.exists():
        sys.exit(f"{PYTHON}: expected an environment with LitServe and MLServer, found none")
    with TemporaryDirectory() as folder, ExitStack() as stack:
        fleet = stack.enter_context(stub_fleet(1, side=SIDE))
        agents = [child.pid for child in psutil.Process().children()]
        stack.enter_context(client_of(fleet))
        ours = {OURS: stack.enter_context(gateway(fleet.folder / "fleet.toml"))}
        if before:
            root = unpack(before, Path(folder) / "before")
            ours[BEFORE] = stack.enter_context(gateway(fleet.folder / "fleet.toml", root))
        if workers > 1:
            several = gateway(fleet.folder / "fleet.toml", workers=workers)
            ours[WORKERS] = stack.enter_context(several)
        for scaled in (False, True):
            with ExitStack() as few:
                others = {name: few.enter_context(other(name, scaled=scaled)) for name in OTHERS}
                servers = ours | others
                until(partial(_answers, requests("photograph", servers)), "all servers answer")
                for what in PICTURES:
                    if (what == "camera, scaled") == scaled:
                        for load in both_loads:
                            with busy(load):
                                row = measure(what, servers, agents)
                            yield row | {"what": name_with(what, load)}
                        if quick:
                            return


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


def main() -> None:
    asked = arguments(__doc__, "quick", before="", workers=1, beside=0)
    columns = [*COLUMNS, *(_of(BEFORE, f"gateway of {asked.before}") if asked.before else ())]
    if asked.workers > 1:
        columns += _of(WORKERS, f"{asked.workers} workers")
    rows = run(quick=asked.quick, before=asked.before, workers=asked.workers, beside=asked.beside)
    for number, row in enumerate(rows):
        text = table([row], *columns).splitlines()
        print(*(text[2:] if number else text), sep="\n", flush=True)
        print(row["rate_ratio"], file=sys.stderr)


if __name__ == "__main__":
    main()
