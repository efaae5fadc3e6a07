"""Starts every rival's programs on their devices, and has the client ask them."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.end_to_end.devices import CLIENT, DEVICES, Machine
from benchmarks.end_to_end.namespaces import Network
from benchmarks.end_to_end.outcomes import Found
from benchmarks.end_to_end.prepare import NUM_CLASSES, Models
from benchmarks.end_to_end.processes import Machines, ProgramError
from benchmarks.end_to_end.setup import Amount, HttpMember, Setup, TensorSplit
from mdp.files import read_json, write_json
from mdp.formats.bundle import Bundle, model_path
from mdp.formats.fleet import new_fleet
from mdp.formats.keys import new_keys
from mdp.testing.agents import agent_command
from mdp.transport import new_pair

#: Every program has a port of its own; fleets count upwards from theirs.
TEACHER, PIPELINE, PARTS, HTTP, FLEETS = 7600, 7601, 7602, 8000, 7500
TEACHER_REPLY, PIPELINE_REPLY = 7610, 7611
_HTTP_SERVER = Path(__file__).with_name("rivals") / "http_server.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    models: Models
    #: Row's name -> bundle folder; HTTP servers have the first one's sub-models.
    bundles: dict[str, Path]
    pictures: Sequence[Path]
    #: Interpreter with LitServe, or None.
    http_python: Path | None
    amount: Amount


class Serving:
    """Programs that are being started on the devices; `stack` ends them."""

    def __init__(self, stack: ExitStack, programs: Machines, folder: Path) -> None:
        self._stack, self._programs, self._folder = stack, programs, folder

    def _start(self, device: Machine, name: str, *words: object, ready: str = "READY") -> None:
        self._stack.enter_context(self._programs.running(device, name, words, ready=ready))

    def _module(self, device: Machine, module: str, name: str, *words: object) -> None:
        program = f"benchmarks.end_to_end.rivals.{module}"
        self._start(device, name, sys.executable, "-m", program, *words)

    def chain(
        self, name: str, stages: Sequence[tuple[Machine, Path]], port: int, reply: tuple[str, int]
    ) -> tuple[str, int]:
        """Stages in a row, the last of which answers at `reply`; where the first one listens."""
        addresses = [(device.address, port) for device, _ in stages]
        following = [*addresses[1:], reply]
        for (device, model), own, after in zip(stages, addresses, following, strict=True):
            last = ["--last"] if after == reply else []
            self._module(device, "stage", name, "--model", model, "--listen", joined(own),
                         "--next", joined(after), *last)  # fmt: skip
        return addresses[0]

    def parts(self, folders: Sequence[Path]) -> list[tuple[str, int]]:
        for device, folder in zip(DEVICES, folders, strict=True):
            self._module(device, "part", "part", "--folder", folder,
                         "--listen", joined((device.address, PARTS)))  # fmt: skip
        return [(device.address, PARTS) for device in DEVICES]

    def fleet(self, name: str, folder: Path, port: int) -> Path:
        """Agents of a bundle, with keys as by default between machines; the fleet file."""
        own = self._folder / f"fleet-{port}"
        own.mkdir()
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
        return own / "fleet.toml"

    def http(self, python: Path, folder: Path) -> list[HttpMember]:
        members = []
        for assignment in Bundle.open(folder).manifest.plan.assignments:
            device, encoding = device_of(assignment.device), assignment.encoding
            self._start(device, "http", python, "-P", _HTTP_SERVER,
                        "--model", folder / model_path(assignment.k),
                        "--port", HTTP,
                        "--encoding", encoding, ready="")  # fmt: skip
            members.append(
                HttpMember(
                    address=device.address,
                    port=HTTP,
                    image_size=assignment.vit.image_size,
                    encoding=encoding,
                )
            )
        return members


def device_of(name: str) -> Machine:
    return next(device for device in DEVICES if device.name == name)


def joined(address: tuple[str, int]) -> str:
    """`10.77.0.2:7600`."""
    return f"{address[0]}:{address[1]}"


def ask_all(
    ready: Ready, network: Network, programs: Machines, folder: Path, note: Callable[[str], None]
) -> Found:
    """Start everybody, have the client ask, and stop them; raises ProgramError if it fails."""
    folder.mkdir(parents=True)
    models = ready.models
    teacher_reply, pipeline_reply = [
        (CLIENT.address, port) for port in (TEACHER_REPLY, PIPELINE_REPLY)
    ]
    with ExitStack() as stack:
        serving = Serving(stack, programs, folder)
        note("starting everybody")
        first = next(iter(ready.bundles.values()))
        http = serving.http(ready.http_python, first) if ready.http_python else []
        fleets = {
            name: str(serving.fleet(name, bundle, FLEETS + number))
            for number, (name, bundle) in enumerate(ready.bundles.items())
        }
        setup = Setup(
            pictures=[str(path) for path in ready.pictures],
            image_size=models.spec.shape.image_size,
            num_classes=NUM_CLASSES,
            fleets=fleets,
            teacher=serving.chain("teacher", [(DEVICES[0], models.whole)], TEACHER, teacher_reply),
            teacher_reply=teacher_reply,
            pipeline=serving.chain(
                "stage", list(zip(DEVICES, models.stages, strict=True)), PIPELINE, pipeline_reply
            ),
            pipeline_reply=pipeline_reply,
            split=TensorSplit(
                addresses=serving.parts(models.parts),
                values=models.tokens * models.spec.shape.embed_dim,
                layers=models.spec.shape.depth,
            ),
            http=http,
            counting=network.counting(),
            amount=ready.amount,
        )
        return _called(setup, programs, folder, note)


def _called(setup: Setup, programs: Machines, folder: Path, note: Callable[[str], None]) -> Found:
    asked, found = folder / "setup.json", folder / "found.json"
    write_json(asked, setup)
    words = [sys.executable, "-m", "benchmarks.end_to_end.rivals.caller", "--setup", asked,
             "--out", found]  # fmt: skip
    with programs.running(CLIENT, "caller", words, ready="READY") as process:
        for line in process.rest():
            note(line)
        if process.finish():
            raise ProgramError(f"the client failed: {' / '.join(process.stderr.splitlines()[-3:])}")
    return read_json(found, Found)
