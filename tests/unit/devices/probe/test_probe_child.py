"""The measuring process's loop, without its runtimes."""

import io
import signal
import sys

import msgspec
import pytest

from devices.probe.child import ChildFailed, _ending, _openvino_devices, serve

REPLY = msgspec.json.Decoder(ChildFailed)


def serve_lines(lines: bytes) -> list[str]:
    """The reasons of all replies."""
    replies = io.BytesIO()
    serve(io.BytesIO(lines), replies)
    return [REPLY.decode(line).reason for line in replies.getvalue().splitlines()]


def test_without_fork_one_request_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert len(serve_lines(b"nonsense\nnonsense\n")) == 1


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (signal.SIGSEGV, "was ended by SIGSEGV"),
        (signal.SIGKILL, "was ended by SIGKILL, perhaps for lack of memory"),
        (3 << 8, "ended with exit code 3"),
    ],
)
def test_how_a_fork_died_is_said(status: int, reason: str) -> None:
    assert _ending(status) == f"the measuring process {reason}"


class Core:
    """OpenVINO's, on a machine whose GPU has no driver."""

    available_devices = ("CPU", "GPU")

    def get_property(self, device: str, key: str) -> list[str]:
        if device == "GPU":
            raise RuntimeError("no driver")
        return ["FP32", key]


def test_a_device_that_does_not_say_what_it_can_do_is_tried_all_the_same() -> None:
    assert _openvino_devices(Core()) == {"CPU": ["FP32", "OPTIMIZATION_CAPABILITIES"], "GPU": []}
