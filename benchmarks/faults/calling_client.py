"""A client that classifies as told, here or in a process of its own."""

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from benchmarks.faults.scene import picture
from mdp import errors
from mdp.client.sync import Client
from mdp.errors import InferenceError
from mdp.fusion.fuse import Fusion
from mdp.requests.prediction import MemberTiming, Prediction
from mdp.testing.processes import PATIENCE_S, LineProcess

Outcome = tuple[Prediction | InferenceError, float]


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
        command = [sys.executable, "-m", "benchmarks.faults.calling_client"]
        command += ["--fleet", str(fleet), "--fusion", fusion]
        super().__init__("the client", command, environment=environment)

    def call(self, number: int, deadline_ms: float) -> Outcome:
        """What became of one call."""
        return understood(self.ask(json.dumps([number, deadline_ms])))


def understood(line: str) -> Outcome:
    """What `said` told."""
    said = json.loads(line)
    if "error" in said:
        kind = getattr(errors, said["error"])
        return kind(said["text"], said["outcomes"]), said["elapsed_ms"]
    answer = said["answer"]
    answer["members"] = tuple(MemberTiming(**member) for member in answer["members"])
    answer["top"] = tuple((label, chance) for label, chance in answer["top"])
    answer["used"] = tuple(answer["used"])
    return Prediction(**answer), said["elapsed_ms"]


def said(outcome: Prediction | InferenceError, elapsed_ms: float) -> str:
    """One line that tells what became of a call."""
    if isinstance(outcome, InferenceError):
        told = {"error": type(outcome).__name__, "text": str(outcome), "outcomes": outcome.outcomes}
    else:
        told = {"answer": outcome.to_dict()}
    return json.dumps({**told, "elapsed_ms": elapsed_ms})


def main() -> None:
    """One line in, a picture's number and a deadline; one line out, what became of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fleet", type=Path, required=True)
    parser.add_argument("--fusion", choices=get_args(Fusion), required=True)
    asked = parser.parse_args()
    with Client.connect(
        asked.fleet,
        fusion=asked.fusion,
        timeout_s=PATIENCE_S,
    ) as client:
        for line in sys.stdin:
            print(said(*timed(client, *json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
