"""How long a teacher takes on this machine, while the others compute as well.

    python -m benchmarks.end_to_end.rivals.speed --model teacher.onnx --seconds 8

Says READY, begins at a line from stdin, and prints the mean of its runs in milliseconds.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from mdp.runtimes.onnxruntime import open_session

MIN_RUNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description="Mean milliseconds of a model.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    session = open_session(options.model)
    (entry,) = session.get_inputs()
    shape = [1, *entry.shape[1:]]
    feed = {entry.name: np.full(shape, 127, dtype=np.uint8)}
    session.run(None, feed)
    print("READY", flush=True)
    sys.stdin.readline()
    started_s, runs = time.perf_counter(), 0
    while runs < MIN_RUNS or time.perf_counter() - started_s < options.seconds:
        session.run(None, feed)
        runs += 1
    # The mean: a share of a core is kept over many periods, and not within a run.
    print(f"MEAN {(time.perf_counter() - started_s) * 1e3 / runs:.3f}", flush=True)


if __name__ == "__main__":
    main()
