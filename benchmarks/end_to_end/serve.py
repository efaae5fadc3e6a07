"""Starts every rival's programs on their devices, and has the client ask them."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.machines import CLIENT, DEVICES, Machine, Network, ProgramError
from benchmarks.end_to_end.prepare import Models
from mdp.files import write_json
from mdp.formats.bundle import Bundle, model_path
from mdp.formats.fleet import new_fleet
from mdp.formats.keys import new_keys
from mdp.testing.agents import agent_command
from mdp.transport import new_pair

#: Every program has a port of its own; fleets count upwards from theirs.
TEACHER, PIPELINE, HTTP, FLEETS = 7600, 7601, 8000, 7500
TEACHER_REPLY, PIPELINE_REPLY = f"tcp://{CLIENT.address}:7610", f"tcp://{CLIENT.address}:7611"
_HTTP_SERVER = Path(__file__).with_name("rivals") / "http_server.py"

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    models: Models
    #: Row's name -> bundle folder; HTTP servers have the first one's sub-models.
    bundles: dict[str, Path]
    pictures: Sequence[Path]
    #: Interpreter with LitServe, or None.
    http_python: Path | None
    #: How much to ask; see `__main__`.
    amount: dict[str, Any]


class Serving:
    """Programs that are being started on the devices; `stack` ends them."""

    def __init__(self, stack: ExitStack, network: Network, folder: Path) -> None:
        self._stack, self._network, self._folder = stack, network, folder

    def _start(self, device: Machine, name: str, *words: object, ready: str = "READY") -> None:
        self._stack.enter_context(self._network.running(device, name, words, ready=ready))

    def chain(
        self, name: str, stages: Sequence[tuple[Machine, Path]], port: int, reply: str
    ) -> str:
        """Stages in a row, the last of which answers at `reply`; where the first one listens."""
        addresses = [*(f"tcp://{device.address}:{port}" for device, _ in stages), reply]
        for number, (device, model) in enumerate(stages):
            own, after = addresses[number : number + 2]
            last = ["--last"] if number + 1 == len(stages) else []
            self._start(device, name, sys.executable, "-m", "benchmarks.end_to_end.rivals.stage",
                        "--model", model, "--listen", own, "--next", after, *last)  # fmt: skip
        return addresses[0]

    def fleet(self, folder: Path, port: int) -> str:
        """Agents of a bundle, with keys as by default between machines; the fleet file."""
        own = self._folder / f"fleet-{port}"
        bundle = Bundle.open(folder)
        new_keys(own, "client", new_pair)
        entries, public = [], {}
        for assignment in bundle.manifest.plan.assignments:
            device = device_of(assignment.device)
            public[device.name] = new_keys(own, device.name, new_pair).public
            address = f"tcp://{device.address}:{port}"
            entries.append(f"{device.name}={address}")
            keys = ("--key", own / f"{device.name}.secret", "--clients", own / "client.public")
            command = agent_command(folder, device.name, "--threads", 1, *keys, bind=address)
            self._start(device, f"agent-{port}", *command, ready='"READY"')
        new_fleet(bundle, entries, own / "fleet.toml", public_key=public.get,
                  key=own / "client.secret")  # fmt: skip
        return str(own / "fleet.toml")

    def http(self, python: Path, folder: Path) -> list[dict[str, Any]]:
        members = []
        for a in Bundle.open(folder).manifest.plan.assignments:
            device = device_of(a.device)
            self._start(device, "http", python, "-P", _HTTP_SERVER, "--port", HTTP, "--model",
                        folder / model_path(a.k), "--encoding", a.encoding, ready="")  # fmt: skip
            members.append(
                {"address": f"{device.address}:{HTTP}", "image_size": a.vit.image_size,
                 "encoding": a.encoding}
            )  # fmt: skip
        return members


def device_of(name: str) -> Machine:
    return next(device for device in DEVICES if device.name == name)


def ask_all(ready: Ready, network: Network, folder: Path, note: Note) -> dict[str, Any]:
    """Start everybody, have the client ask, and stop them; raises ProgramError if it fails."""
    folder.mkdir(parents=True)
    models = ready.models
    with ExitStack() as stack:
        serving = Serving(stack, network, folder)
        note("starting everybody")
        first = next(iter(ready.bundles.values()))
        whole = [(DEVICES[0], models.whole)]
        stages = list(zip(DEVICES, models.stages, strict=True))
        setup = {
            **ready.amount,
            "pictures": [str(path) for path in ready.pictures],
            "image_size": models.spec.shape.image_size,
            "http": serving.http(ready.http_python, first) if ready.http_python else [],
            #: Row's name -> fleet file.
            "fleets": {
                name: serving.fleet(bundle, FLEETS + number)
                for number, (name, bundle) in enumerate(ready.bundles.items())
            },
            #: Where the first stage listens and where the last one answers.
            "teacher": (serving.chain("teacher", whole, TEACHER, TEACHER_REPLY), TEACHER_REPLY),
            "pipeline": (serving.chain("stage", stages, PIPELINE, PIPELINE_REPLY), PIPELINE_REPLY),
            "counting": network.counting(),
        }
        asked, found = folder / "setup.json", folder / "found.json"
        write_json(asked, setup)
        words = (sys.executable, "-m", "benchmarks.end_to_end.rivals.caller", asked, found)
        with network.running(CLIENT, "caller", words) as process:
            for line in process.rest():
                note(line)
            if process.finish():
                said = " / ".join(process.stderr.splitlines()[-3:])
                raise ProgramError(f"the client failed: {said}")
    content: dict[str, Any] = json.loads(found.read_text())
    return content
