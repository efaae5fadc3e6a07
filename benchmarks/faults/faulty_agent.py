"""`mdp-agent` with a model that follows a command, for faults inside a device.

The file that the environment variable FAULT_FILE names holds a command, read at each inference:

- `nan`         logits that are not numbers
- `constant`    the same logits whatever the picture
- `slow 0.6`    seconds of delay
- `raise`       an exception
- `hoard 64`    MiB of memory, kept
- `clock`       the process's wall clock, in seconds, is written beside the file (.clock)
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np

import mdp.runtimes.select
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from mdp.runtimes.base import Runtime

VARIABLE = "FAULT_FILE"
MIB = 2**20


class FaultyRuntime:
    """A runtime whose answers follow the command in a file."""

    def __init__(self, runtime: Runtime, file: Path) -> None:
        self._runtime, self._file = runtime, file
        self.provider, self.fallback = runtime.provider, runtime.fallback
        self._hoard: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def run(self, pixels: Pixels) -> Contribution:
        """Both heads' logits `[N, classes]`, as the command says."""
        word, _, number = self._file.read_text().strip().partition(" ")
        if word == "slow":
            time.sleep(float(number))
        elif word == "raise":
            raise RuntimeError("the accelerator does not answer")
        elif word == "hoard":
            # Written, so that the kernel allocates the pages.
            self._hoard.append(np.ones(int(float(number) * MIB), dtype=np.uint8))
        elif word == "clock":
            self._file.with_suffix(".clock").write_text(f"{time.time()}")
        contribution = self._runtime.run(np.zeros_like(pixels) if word == "constant" else pixels)
        if word == "nan":
            contribution.bag[:, 0] = np.nan
        return contribution


def main() -> None:
    """Run `mdp-agent` with the arguments given."""
    opened = mdp.runtimes.select.open_runtime

    def open_faulty(*arguments: Any, **options: Any) -> Runtime:
        return FaultyRuntime(opened(*arguments, **options), Path(os.environ[VARIABLE]))

    mdp.runtimes.select.open_runtime = open_faulty
    # Imported here, as it imports `open_runtime` by name.
    from devices.cli.main import main as run_agent

    run_agent()


if __name__ == "__main__":
    main()
