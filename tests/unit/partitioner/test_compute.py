"""Threads sleep while they wait, and bf16 is chosen only where it is quick."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from partitioner.compute import quicker_autocast  # noqa: E402

pytestmark = pytest.mark.torch


def test_threads_are_as_asked_and_wait_asleep():
    code = (
        "import os\n"
        "from partitioner.compute import use_threads\n"
        "use_threads(1)\n"
        "import torch\n"
        "print(torch.get_num_threads(), os.environ['OMP_WAIT_POLICY'])"
    )
    plain = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=plain, check=True
    )
    assert done.stdout == "1 PASSIVE\n"


@pytest.mark.parametrize(
    ("avx512", "amx", "chosen"),
    [(False, False, "fp32"), (True, False, "bf16"), (False, True, "bf16")],
)
def test_bf16_only_in_hardware(
    monkeypatch: pytest.MonkeyPatch, avx512: bool, amx: bool, chosen: str
):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert quicker_autocast() == chosen
