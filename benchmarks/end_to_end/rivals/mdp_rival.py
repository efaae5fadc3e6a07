"""MDP itself, as its users have it: the client, keys, agents."""

import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.end_to_end.rivals.rivals import PATIENCE_MS
from mdp import Client
from mdp.errors import MDPError
from mdp.requests.prediction import Prediction


class MdpRival:
    """A fleet that answers with all its members."""

    def __init__(self, name: str, fleet: Path) -> None:
        self.name = name
        self._client = Client.connect(fleet, timeout_s=30.0)

    def ask(self, picture: Path) -> None:
        whole(self._client.classify(picture, deadline_ms=PATIENCE_MS))

    def stream(self, pictures: Sequence[Path], in_flight: int) -> list[float]:
        moments = []
        for answer in self._client.stream(pictures, deadline_ms=PATIENCE_MS, in_flight=in_flight):
            moments.append(time.perf_counter())
            assert isinstance(answer, Prediction)  # errors are raised
            whole(answer)
        return moments

    def close(self) -> None:
        self._client.close()


def whole(answer: Prediction) -> None:
    """Raise MDPError unless every member was heard: a part of an answer would be no comparison."""
    if answer.partial:
        raise MDPError(f"expected all members' answers, missing: {answer.missing}")
