"""Emulators that containers of 64-bit ARM can be started by."""

import pytest

from tools.containers import LEAST_EMULATOR, reason_against_emulator

REGISTERED = """enabled
interpreter /usr/libexec/qemu-binfmt/aarch64-binfmt-P
flags: POF
offset 0
magic 7f454c46
"""
NEW, OLD = (f"qemu-aarch64 version {v}.0.2 (Debian)" for v in (LEAST_EMULATOR, LEAST_EMULATOR - 3))


def test_one_that_does_is_asked_by_its_path() -> None:
    asked: list[str] = []

    def version_of(program: str) -> str:
        asked.append(program)
        return NEW

    assert reason_against_emulator(REGISTERED, version_of) == ""
    assert asked == ["/usr/libexec/qemu-binfmt/aarch64-binfmt-P"]


@pytest.mark.parametrize(
    ("registered", "said", "reason"),
    [
        (REGISTERED.replace("enabled", "disabled"), NEW, "expected it to be enabled"),
        (REGISTERED.replace("POF", "PO"), NEW, "expected flag F"),
        (REGISTERED, OLD, f"expected qemu {LEAST_EMULATOR} or later, got '{OLD}'"),
        (REGISTERED, "", "got 'one that says nothing'"),
    ],
)
def test_one_that_does_not_has_a_reason(registered: str, said: str, reason: str) -> None:
    assert reason in reason_against_emulator(registered, lambda program: said)
