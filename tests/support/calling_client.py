"""A client that classifies as told, here or in a process of its own."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, get_args

from mdp import errors
from mdp.client.sync import Client
from mdp.errors import InferenceError
from mdp.fusion.fuse import Fusion
from mdp.requests.prediction import MemberTiming, Prediction
from tests.support.faults.fault_scene import picture
from tests.support.fleet import PATIENCE_S, ROOT

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


class ProcessCaller:
    """A client in a process of its own, with an environment of its own."""

    def __init__(
        self,
        fleet: Path,
        fusion: Fusion,
        environment: Mapping[str, str],
    ) -> None:
        known = [f"{key}={value}" for key, value in environment.items()]
        command = ["env", *known, sys.executable, "-m", "tests.support.calling_client"]
        command += ["--fleet", str(fleet), "--fusion", fusion]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def call(self, number: int, deadline_ms: float) -> Outcome:
        """What became of one call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([number, deadline_ms]) + "\n")
        self._process.stdin.flush()
        return understood(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.communicate(timeout=PATIENCE_S)


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
        told = {"answer": outcome.to_json()}
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
