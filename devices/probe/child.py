"""`python -m devices.probe.child`: answer requests on stdin, each in a fresh process.

Requests and replies are lines of JSON. On Linux the runtimes are imported once and each request
runs in a fork, so that memory and allocators are those of one model; elsewhere the process answers
one request and ends.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from devices.machine import Machine, NvidiaMachine
from devices.probe.measure import (
    EncoderRun,
    Instruments,
    MeasuredPoint,
    SustainedLoad,
    execution_of,
    measure,
    sustain,
)
from mdp.errors import AgentError
from mdp.files import Record
from mdp.formats.model_file import ModelFile
from mdp.runtimes.cuda import ON_CUDA, load_libraries
from mdp.runtimes.onnxruntime import import_onnxruntime
from mdp.runtimes.openvino import core_of, import_openvino
from mdp.runtimes.select import open_runtime

_PACKAGES = ("mdp-edge", "onnxruntime", "onnxruntime-gpu", "openvino", "numpy")


class ListCapabilities(Record, frozen=True, tag=True):
    """Request: list runtimes and providers."""


class MeasureRun(Record, frozen=True, tag=True):
    """Request: measure this point."""

    run: EncoderRun
    model: str
    seconds: float


class SustainRun(Record, frozen=True, tag=True):
    """Request: run this point under sustained load."""

    run: EncoderRun
    model: str
    seconds: float


class Capabilities(Record, frozen=True, tag=True):
    """Reply: onnxruntime's providers, OpenVINO's devices with their precisions, versions."""

    providers: list[str]
    #: Device -> its reported precisions; None where OpenVINO is not installed.
    openvino: dict[str, list[str]] | None
    versions: dict[str, str]


class StillRunning(Record, frozen=True, tag=True):
    """A sustained load is running; the reply follows."""

    seconds: float


class ChildFailed(Record, frozen=True, tag=True):
    """Reply: why there is no result."""

    reason: str


Request = ListCapabilities | MeasureRun | SustainRun
Reply = Capabilities | MeasuredPoint | SustainedLoad | ChildFailed
_REQUEST = msgspec.json.Decoder(Request)
Send = Callable[[Reply | StillRunning], None]


def answer(line: bytes, send: Send) -> None:
    """Answer a request; an error is its reply."""
    try:
        match _REQUEST.decode(line):
            case ListCapabilities():
                send(capabilities())
            case MeasureRun(run=run, model=model, seconds=seconds):
                send(measure(*_arguments(run, model, seconds)))
            case SustainRun(run=run, model=model, seconds=seconds):

                def on_progress(passed_s: float) -> None:
                    send(StillRunning(seconds=passed_s))

                send(sustain(*_arguments(run, model, seconds), on_progress))
    except Exception as error:  # runtimes raise types of their own, without a common base
        send(ChildFailed(reason=" ".join(f"{error}".split())[:500] or type(error).__name__))


def capabilities() -> Capabilities:
    """Runtimes and providers that this interpreter has."""
    providers: list[str] = []
    with contextlib.suppress(AgentError):
        providers = list(import_onnxruntime().get_available_providers())
    able: dict[str, list[str]] | None = None
    with contextlib.suppress(ImportError, RuntimeError):
        able = _openvino_devices(core_of(import_openvino()))
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return Capabilities(providers=providers, openvino=able, versions=versions)


def _openvino_devices(core: Any) -> dict[str, list[str]]:
    able: dict[str, list[str]] = {}
    for device in core.available_devices:
        able[device] = []
        # A device without the property is tried; the profile then holds the reason if it fails.
        with contextlib.suppress(RuntimeError):
            able[device] = [str(n) for n in core.get_property(device, "OPTIMIZATION_CAPABILITIES")]
    return able


def _arguments(
    run: EncoderRun, model: str, seconds: float
) -> tuple[EncoderRun, Callable[[], Any], float, Instruments]:
    """Arguments of `measure` and `sustain`."""
    execution = execution_of(run)

    def load() -> Any:
        return open_runtime(ModelFile.read(Path(model)), execution, num_classes=run.num_classes)

    system = NvidiaMachine() if run.provider in ON_CUDA else Machine()
    return run, load, seconds, Instruments(system=system)


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer every line until the end of the stream."""

    def send(reply: Reply | StillRunning) -> None:
        replies.write(msgspec.json.encode(reply) + b"\n")
        replies.flush()

    for line in requests:
        if sys.platform != "linux":
            answer(line, send)
            return
        child = os.fork()
        if child == 0:
            answer(line, send)
            # Skips the parent's clean-up, and a library's that may hang.
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            send(ChildFailed(reason=_ending(status)))


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"the measuring process ended with exit code {code}"
    name = signal.Signals(-code).name
    more = ", perhaps for lack of memory" if name == "SIGKILL" else ""
    return f"the measuring process was ended by {name}{more}"


def _import_runtimes() -> None:
    """Before the first fork, so that no point is charged for it."""
    with contextlib.suppress(AgentError):
        load_libraries(import_onnxruntime())
    with contextlib.suppress(ImportError):
        import_openvino()


def main() -> None:
    """Serve on stdin and stdout; libraries' output goes to stderr."""
    # Ctrl-C is for the probe, which keeps its points and then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)
        _import_runtimes()
        serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
