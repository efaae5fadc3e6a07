"""Bytes and latency of looks through four cameras, beside sending their pictures to one device.

    python -m benchmarks.scenes.sent --scenes SCRATCH/seed-0/scenes --weights FOLDER --scratch NEW

Four agents with Lite0 at 128 px look at the scenes that `benchmarks.scenes` has left, each in a
network namespace with a link of its own. Beside them, on the same links, a program per device sends
its camera's newest picture as JPEG, whole or already cut to 128 px, and the client runs the four
networks itself. All take turns. Bytes are those that the kernel counts on each device's link.
Needs Linux and root. Writes benchmarks/results/scenes-sent.json.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from benchmarks.harness.turns import in_turns
from benchmarks.scenes.__main__ import CAMERAS, NAMES, SIZE_PX, subsets
from benchmarks.scenes.render import SIDE_PX
from devices.agent.record import to_jpeg
from devices.camera.capture import FolderCamera
from mdp.client.sync import Client
from mdp.errors import InferenceError
from mdp.files import write_json
from mdp.formats.bundle import Bundle
from mdp.formats.plan import Region
from mdp.fusion.fuse import Contribution, fuse, weights_for
from mdp.pictures.crop import crop, encode_jpeg, load_picture
from mdp.runtimes.base import Execution
from mdp.runtimes.select import open_runtime
from mdp.testing.agents import AgentFleet, agent_command
from mdp.testing.processes import LineProcess, until
from mdp.testing.wires import Namespace

RESULT = RESULTS / "scenes-sent.json"
RATES_MBIT, ROUNDS, BLOCK = (20, 100), 10, 50
#: Scenes that the cameras repeat, and pictures a second.
SHOWN, FPS = 100, 10
LINK, PLENTY_MS, PORT, SENDER_PORT = "mdp-look", 5000.0, 7500, 7600
SYSTEMS = {"look": "`look`: logits", "cut": f"pictures of {SIZE_PX} px", "whole": "whole pictures"}


def run(inside: list[str], *command: object) -> None:
    """Run a command in a namespace; raises CalledProcessError."""
    subprocess.run([*inside, *map(str, command)], check=True, capture_output=True)


class Network:
    """Devices in namespaces, and this one, each behind a link of its own to one switch."""

    def __init__(self, stack: ExitStack) -> None:
        switch, *self.devices = [
            stack.enter_context(closing(Namespace())) for _ in range(CAMERAS + 1)
        ]
        self._switch = switch.inside()
        run(self._switch, "ip", "link", "add", "bridge", "type", "bridge")
        run(self._switch, "ip", "link", "set", "bridge", "up")
        self._ends: list[list[str]] = [[], *(device.inside() for device in self.devices)]
        for number, inside in enumerate(self._ends):
            pid = self.devices[number - 1].pid if number else os.getpid()
            port = f"port{number}"
            run(self._switch, "ip", "link", "add", port, "type", "veth",
                "peer", "name", LINK, "netns", pid)  # fmt: skip
            if not number:
                stack.callback(run, [], "ip", "link", "delete", LINK)
            run(self._switch, "ip", "link", "set", port, "master", "bridge", "up")
            run(inside, "ip", "address", "add", f"{host(number)}/24", "dev", LINK)
            run(inside, "ip", "link", "set", LINK, "up")

    def limit(self, mbit: int) -> None:
        """Let no more through each link, each way."""
        ends = [(inside, LINK) for inside in self._ends]
        for inside, name in ends + [(self._switch, f"port{n}") for n in range(CAMERAS + 1)]:
            run(inside, "tc", "qdisc", "replace", "dev", name, "root", "tbf", "rate",
                f"{mbit}mbit", "burst", max(1600, mbit * 500), "latency", "1s")  # fmt: skip

    def sent_bytes(self) -> np.ndarray:
        """Bytes that each device has sent so far, with the headers of every layer."""
        said = [
            subprocess.check_output([*end.inside(), "ip", "-s", "-j", "link", "show", LINK])
            for end in self.devices
        ]
        return np.array([json.loads(text)[0]["stats64"]["tx"]["bytes"] for text in said])


def host(number: int) -> str:
    """An address from the block for tests of network devices (RFC 2544)."""
    return f"198.18.0.{number + 1}"


def send_pictures(folder: Path, address: str) -> None:
    """Answer every request with the newest picture of a folder that plays as a camera, as JPEG."""
    camera = FolderCamera(folder)
    newest: list[Any] = []

    def play() -> None:
        while True:
            camera.grab()
            newest[:] = [load_picture(camera.picture(smallest_side=0))]
            time.sleep(1 / FPS)

    threading.Thread(target=play, daemon=True).start()
    with zmq.Context() as context, context.socket(zmq.REP) as socket:
        socket.bind(address)
        print("there", flush=True)
        while asked := socket.recv():
            cut = asked == b"cut"
            picture = crop(newest[0], Region(), SIZE_PX) if cut else newest[0]
            socket.send(encode_jpeg(picture) if cut else to_jpeg(picture, SIDE_PX))


class OneDevice:
    """Asks every camera for its picture at once, and runs all networks itself, as one batch."""

    def __init__(self, bundle: Bundle, stack: ExitStack) -> None:
        part, fusion = bundle.manifest.plan.assignments[0], bundle.fusion_weights()
        self._weights = weights_for(range(CAMERAS), "stacked", fusion)
        execution = msgspec.structs.replace(Execution.of(part), threads=os.cpu_count() or 1)
        labels = bundle.manifest.labels
        self._runtime = open_runtime(bundle.model(0), execution, num_classes=len(labels))
        context = stack.enter_context(zmq.Context())
        self._sockets = [stack.enter_context(context.socket(zmq.REQ)) for _ in NAMES]
        for number, socket in enumerate(self._sockets):
            socket.connect(f"tcp://{host(number + 1)}:{SENDER_PORT}")

    def answer(self, what: bytes) -> int:
        """The class of what the cameras see."""
        for socket in self._sockets:
            socket.send(what)
        pictures = [socket.recv() for socket in self._sockets]
        views = [crop(load_picture(p, smallest_side=SIZE_PX), Region(), SIZE_PX) for p in pictures]
        heads = self._runtime.run(np.stack(views)).heads
        answers = {k: Contribution.of([head[k] for head in heads]) for k in range(CAMERAS)}
        return int(np.argmax(fuse(answers, self._weights)))


def measure_calls(options: argparse.Namespace, stack: ExitStack) -> dict[str, Any]:
    """Milliseconds of every call and bytes that each device sent a call, by rate and system."""
    scratch: Path = options.scratch
    scratch.mkdir(parents=True)
    subsets(scratch, options.weights, options.scenes, [("lite0", name) for name in NAMES])
    bundle = Bundle.open(scratch / "bundle")
    network = Network(stack)
    network.limit(1000)
    fleet = stack.enter_context(AgentFleet(scratch, bundle.path, keys=True))
    program = agent_command(bundle.path, "")[:3]
    for number, part in enumerate(bundle.manifest.plan.assignments, 1):
        folder = camera_folder(options.scenes, scratch / NAMES[number - 1], NAMES[number - 1])
        inside = network.devices[number - 1].inside()
        fleet.start(
            part.device, "--source", f"folder:{folder}", "--source-fps", FPS, "--threads", 1,
            "--allow-fallback",
            bind=f"tcp://{host(number)}:{PORT}", program=[*inside, *program],
        )  # fmt: skip
        serve = ["-m", "benchmarks.scenes.sent", "--send", folder, host(number)]
        sender = LineProcess(f"sender {number}", [*inside, sys.executable, *serve])
        stack.enter_context(sender).line_with("there")
    client = stack.enter_context(fleet.client())
    one = OneDevice(bundle, stack)
    return {f"{mbit}": at_rate(mbit, network, client, one) for mbit in RATES_MBIT}


def at_rate(mbit: int, network: Network, client: Client, one: OneDevice) -> dict[str, Any]:
    """The systems in turns on links of one rate."""
    network.limit(mbit)
    calls: dict[str, Callable[[], object]] = {"look": lambda: whole_look(client)}
    calls |= {name: partial(one.answer, name.encode()) for name in ("cut", "whole")}
    until(lambda: whole_look(client, needed=False), "four frames")
    sent: dict[str, list[Any]] = {name: [] for name in calls}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            call()
            before = network.sent_bytes()
            times[name] += in_turns({name: call}, 1, least=BLOCK, warm_up=0)[name][0]
            sent[name].append(((network.sent_bytes() - before) / BLOCK).tolist())
    return {
        name: {
            "ms": {f"p{p}": float(np.percentile(times[name], p)) for p in (50, 99)},
            "calls": len(times[name]),
            "device_bytes": np.mean(sent[name], axis=0).tolist(),
        }
        for name in calls
    }


def whole_look(client: Client, *, needed: bool = True) -> bool:
    """Tell whether all cameras answer a look; raises AssertionError where it is `needed`."""
    with suppress(InferenceError):
        if len(client.look(within_ms=PLENTY_MS, deadline_ms=PLENTY_MS).used) == CAMERAS:
            return True
    assert not needed, "a look lacks a camera"
    return False


def camera_folder(scenes: Path, folder: Path, camera: str) -> Path:
    """A folder with one camera's pictures of some scenes."""
    folder.mkdir()
    files = sorted(scenes.glob(f"*/*/{camera}.jpg"))
    chosen = np.random.default_rng(0).permutation(len(files))[:SHOWN]
    for number, index in enumerate(chosen):
        (folder / f"{number:03}.jpg").symlink_to(files[index].resolve())
    return folder


def figures() -> str:
    result, rows = read_result(RESULT.stem), []
    for name, words in SYSTEMS.items():
        row: dict[str, Any] = {"what": words}
        for rate, found in result["rates"].items():
            own = found[name]
            row[f"ms{rate}"] = f"{own['ms']['p50']:.1f} / {own['ms']['p99']:.1f}"
            row["bytes"] = f"{np.mean(own['device_bytes']):,.0f}"
        rows.append(row)
    rates = ((f"ms at {rate} Mbit/s, p50 / p99", f"{{ms{rate}}}") for rate in result["rates"])
    columns = (("sent", "{what}"), ("bytes a device", "{bytes}"), *rates)
    return table(rows, *columns)


PAGE = Page("benchmarks.scenes.sent", figures)


def main() -> None:
    if sys.argv[1:2] == ["--send"]:
        send_pictures(Path(sys.argv[2]), f"tcp://{sys.argv[3]}:{SENDER_PORT}")
        return
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scenes.sent", description=__doc__)
    for name in ("scenes", "weights", "scratch"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    machine = describe_machine()
    with ExitStack() as stack:
        rates = measure_calls(parser.parse_args(), stack)
    write_json(RESULT, {"machine": machine, "rates": rates})
    PAGE.write()


if __name__ == "__main__":
    main()
