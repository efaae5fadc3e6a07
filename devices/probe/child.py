"""`python -m devices.probe.child`: measure what is asked on stdin, each point in a fresh process.

One line of JSON per request and per reply. On Linux the runtimes are imported once and every
request is answered by a fork, so that the growth of memory and the state of allocators are those of
one model alone; elsewhere the process answers one request and ends.
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
from devices.probe.measure import Load, Measured, Run, Surroundings, execution_of, measure, sustain
from mdp.errors import AgentError
from mdp.files import Record
from mdp.formats.model_file import ModelFile
from mdp.runtimes.cuda import ON_CUDA, load_libraries
from mdp.runtimes.onnxruntime import import_onnxruntime
from mdp.runtimes.openvino import core_of, import_openvino
from mdp.runtimes.select import open_runtime

_PACKAGES = ("mdp-edge", "onnxruntime", "onnxruntime-gpu", "openvino", "numpy")


class Look(Record, frozen=True, tag=True):
    """Ask: which runtimes and providers are there."""


class MeasureRun(Record, frozen=True, tag=True):
    """Ask: measure this point."""

    run: Run
    model: str
    seconds: float


class SustainRun(Record, frozen=True, tag=True):
    """Ask: run this point without a pause."""

    run: Run
    model: str
    seconds: float


class Here(Record, frozen=True, tag=True):
    """Reply: onnxruntime's providers, what OpenVINO's devices can compute in, and versions."""

    providers: list[str]
    #: Device -> what it says it can compute in; None where OpenVINO is not installed.
    openvino: dict[str, list[str]] | None
    versions: dict[str, str]


class Passed(Record, frozen=True, tag=True):
    """Says that a sustained load still runs; the reply is yet to come."""

    seconds: float


class Failed(Record, frozen=True, tag=True):
    """Reply: why there is nothing to report."""

    reason: str


Request = Look | MeasureRun | SustainRun
Reply = Here | Measured | Load | Failed
_REQUEST = msgspec.json.Decoder(Request)
Say = Callable[[Reply | Passed], None]


def answer(line: bytes, say: Say) -> None:
    """Do what a request asks; whatever goes wrong is the reply."""
    try:
        match _REQUEST.decode(line):
            case Look():
                say(look())
            case MeasureRun(run=run, model=model, seconds=seconds):
                say(measure(run, _opening(run, model), seconds, _around(run)))
            case SustainRun(run=run, model=model, seconds=seconds):

                def passed(passed_s: float) -> None:
                    say(Passed(seconds=passed_s))

                say(sustain(run, _opening(run, model), seconds, _around(run), passed))
    except Exception as error:  # runtimes raise types of their own, without a common base
        say(Failed(reason=" ".join(f"{error}".split())[:500] or type(error).__name__))


def look() -> Here:
    """What this interpreter can run models with."""
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
    return Here(providers=providers, openvino=able, versions=versions)


def _openvino_devices(core: Any) -> dict[str, list[str]]:
    able: dict[str, list[str]] = {}
    for device in core.available_devices:
        able[device] = []
        # One that does not say is tried, and why it cannot be used is then in the profile.
        with contextlib.suppress(RuntimeError):
            able[device] = [str(n) for n in core.get_property(device, "OPTIMIZATION_CAPABILITIES")]
    return able


def _opening(run: Run, model: str) -> Callable[[], Any]:
    execution = execution_of(run)
    return lambda: open_runtime(ModelFile.read(Path(model)), execution, num_classes=run.num_classes)


def _around(run: Run) -> Surroundings:
    return Surroundings(system=NvidiaMachine() if run.provider in ON_CUDA else Machine())


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer every line until there are no more."""

    def say(reply: Reply | Passed) -> None:
        replies.write(msgspec.json.encode(reply) + b"\n")
        replies.flush()

    for line in requests:
        if sys.platform != "linux":
            answer(line, say)
            return
        child = os.fork()
        if child == 0:
            answer(line, say)
            # Not by way of the parent's clean-up, nor of a library's that may hang.
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            say(Failed(reason=_ending(status)))


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"the measuring process ended with exit code {code}"
    name = signal.Signals(-code).name
    more = ", perhaps for lack of memory" if name == "SIGKILL" else ""
    return f"the measuring process was ended by {name}{more}"


def _import_runtimes() -> None:
    """Before the first fork, so that no point pays for it."""
    with contextlib.suppress(AgentError):
        load_libraries(import_onnxruntime())
    with contextlib.suppress(ImportError):
        import_openvino()


def main() -> None:
    """Serve on stdin and stdout; what libraries print goes to stderr."""
    # Whoever presses Ctrl-C means the probe, which ends this process when it has kept its points.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)
        _import_runtimes()
        serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
