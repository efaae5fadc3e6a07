"""A client that classifies in this process or in one of its own.

    python -m benchmarks.faults.calling_client FLEET FUSION

Reads lines with a picture's number and a deadline, writes a line with each outcome.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from benchmarks.faults.scene import picture
from mdp import errors
from mdp.client.sync import Client
from mdp.errors import InferenceError
from mdp.fusion.fuse import Fusion
from mdp.requests.prediction import Prediction
from mdp.testing.processes import PATIENCE_S, LineProcess

#: The answer or error, and milliseconds.
Outcome = tuple[Prediction | InferenceError, float]


def time_call(client: Client, number: int, deadline_ms: float) -> Outcome:
    """The outcome of one call, with a picture's number."""
    pixels, _ = picture(number)
    started_s = time.monotonic()
    try:
        outcome: Prediction | InferenceError = client.classify(pixels, deadline_ms=deadline_ms)
    except InferenceError as error:
        outcome = error
    return outcome, (time.monotonic() - started_s) * 1e3


class ProcessCaller(LineProcess):
    """A client in a process of its own, with an environment of its own."""

    def __init__(self, fleet: Path, fusion: Fusion, environment: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "benchmarks.faults.calling_client", fleet, fusion]
        super().__init__("the client", command, environment=environment)

    def call(self, number: int, deadline_ms: float) -> Outcome:
        """The outcome of one call."""
        return decode(self.ask(f"{number} {deadline_ms}"))


def encode(outcome: Prediction | InferenceError, elapsed_ms: float) -> str:
    """One line for `decode`."""
    fields = None
    if isinstance(outcome, InferenceError):
        fields = (type(outcome).__name__, str(outcome), outcome.outcomes)
    return msgspec.json.encode((None if fields else outcome, fields, elapsed_ms)).decode()


def decode(line: str) -> Outcome:
    answer, fields, elapsed_ms = msgspec.json.decode(
        line, type=tuple[Prediction | None, tuple[str, str, dict[str, str]] | None, float]
    )
    if fields is not None:
        return getattr(errors, fields[0])(*fields[1:]), elapsed_ms
    assert answer is not None
    return answer, elapsed_ms


def main() -> None:
    fleet, fusion = sys.argv[1], msgspec.convert(sys.argv[2], Fusion)
    with Client.connect(fleet, fusion=fusion, timeout_s=PATIENCE_S) as client:
        for line in sys.stdin:
            number, deadline_ms = line.split()
            print(encode(*time_call(client, int(number), float(deadline_ms))), flush=True)


if __name__ == "__main__":
    main()
