"""One target under atheris, in a process of its own: libFuzzer ends it whenever it likes.

python -m tests.fuzz.child TARGET SAMPLES [libFuzzer's options and corpus folders]
"""

import atexit
import json
import random
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import atheris

from tests.fuzz.mutation import mutate

#: What libFuzzer sees the branches of; the rest is others' or only serves the targets.
WATCHED = ("mdp", "devices", "tomllib", "PIL", "ipaddress", "zmq.utils.z85")
SAMPLE_EVERY_S = 1.0
_STATM_RSS, _PAGE_BYTES = 1, resource.getpagesize()


class GrowthError(Exception):
    """The process has taken more memory than any input, or all together, may cost."""


class Watch:
    """Reads inputs, and keeps an account of them in a file that a killed process leaves behind."""

    def __init__(self, target: Any, samples: Path) -> None:
        self._target = target
        self._samples = samples.open("w")
        self._inputs = self._accepted = 0
        self._slowest_s = 0.0
        self._started_s = self._sampled_s = time.monotonic()
        for data in target.seeds().values():
            target.read(data)
        self._allowed_bytes = _peak_bytes() + target.growth_bytes

    def read(self, data: bytes) -> None:
        """Read one input; raises whatever the target raises, and GrowthError."""
        self._inputs += 1
        began_s = time.thread_time()
        self._accepted += self._target.read(data)
        self._slowest_s = max(self._slowest_s, time.thread_time() - began_s)
        if _peak_bytes() > self._allowed_bytes:
            raise GrowthError(f"peak memory is {_peak_bytes():,} of {self._allowed_bytes:,} bytes")
        if time.monotonic() - self._sampled_s > SAMPLE_EVERY_S:
            self.sample()

    def sample(self) -> None:
        """Write down how far it is."""
        self._sampled_s = time.monotonic()
        sample = {
            "inputs": self._inputs,
            "accepted": self._accepted,
            "seconds": self._sampled_s - self._started_s,
            "processor_s": time.process_time(),
            "slowest_s": self._slowest_s,
            "rss_bytes": _rss_bytes(),
            "peak_bytes": _peak_bytes(),
        }
        print(json.dumps(sample), file=self._samples, flush=True)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[_STATM_RSS]) * _PAGE_BYTES


def main() -> None:
    """Hand over to libFuzzer, which does not return."""
    name, samples, *options = sys.argv[1:]
    # Pillow warns of what is odd in a file, and reads it nevertheless.
    warnings.simplefilter("ignore")
    with atheris.instrument_imports(include=list(WATCHED)):
        from tests.fuzz.targets import TARGETS
    target = TARGETS[name]
    watch = Watch(target, Path(samples))
    atexit.register(watch.sample)

    seeds = list(target.seeds().values())

    def mutator(data: bytes, max_bytes: int, seed: int) -> bytes:
        chance = random.Random(seed)
        where = chance.random()
        if where < 0.4:
            return bytes(atheris.Mutate(data, max_bytes))
        # Most of what libFuzzer collects is refused early; the last checks need better.
        return mutate(target, data if where < 0.7 else chance.choice(seeds), chance)[:max_bytes]

    atheris.Setup([sys.argv[0], *options], watch.read, custom_mutator=mutator)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
