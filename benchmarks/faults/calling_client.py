"""A client that classifies as told, here or in a process of its own.

    python -m benchmarks.faults.calling_client FLEET FUSION

One line in, a picture's number and a deadline; one line out, what became of it.
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

Outcome = tuple[Prediction | InferenceError, float]
#: An answer, or an error's class, text and outcomes; and the milliseconds that it took.
_Told = tuple[Prediction | None, tuple[str, str, dict[str, str]], float]


def timed(client: Client, number: int, deadline_ms: float) -> Outcome:
    """The answer about a picture or the error in its place, and how long it took in ms."""
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
        """What became of one call."""
        return understood(self.ask(f"{number} {deadline_ms}"))


def understood(line: str) -> Outcome:
    """What `said` told."""
    answer, (kind, text, outcomes), elapsed_ms = msgspec.json.decode(line, type=_Told)
    return answer or getattr(errors, kind)(text, outcomes), elapsed_ms


def said(outcome: Prediction | InferenceError, elapsed_ms: float) -> str:
    """One line that tells what became of a call."""
    told: _Told = (outcome, ("", "", {}), elapsed_ms) if isinstance(outcome, Prediction) else (
        None, (type(outcome).__name__, str(outcome), outcome.outcomes), elapsed_ms
    )  # fmt: skip
    return msgspec.json.encode(told).decode()


def main() -> None:
    fleet, fusion = sys.argv[1:]
    with Client.connect(
        fleet, fusion=msgspec.convert(fusion, Fusion), timeout_s=PATIENCE_S
    ) as client:
        for line in sys.stdin:
            number, deadline_ms = line.split()
            print(said(*timed(client, int(number), float(deadline_ms))), flush=True)


if __name__ == "__main__":
    main()
