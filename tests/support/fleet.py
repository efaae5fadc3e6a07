"""A fleet of real agent processes on loopback, of which some may be odd, and what a test asks."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from mdp.client.sync import Client
from mdp.requests.prediction import Prediction
from mdp.testing.agents import ANY_PORT, AgentFleet, AgentProcess
from mdp.testing.processes import PATIENCE_S

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
#: A deadline that is never meant to be reached.
PLENTY_MS = 20_000.0
_ODD = (sys.executable, str(Path(__file__).with_name("faults") / "odd_agent.py"))


def answers_until(
    client: Client, picture: Any, wanted: Callable[[Prediction], bool], deadline_ms: float
) -> list[Prediction]:
    """Answers to the same picture, the last of which is the first that is as wanted."""
    until_s = time.monotonic() + PATIENCE_S
    answers: list[Prediction] = []
    while not answers or not wanted(answers[-1]):
        assert time.monotonic() < until_s, f"waited in vain, got {answers[-1:]}"
        answers.append(client.classify(picture, deadline_ms=deadline_ms))
    return answers


class Fleet(AgentFleet):
    """Agents by their fleet entry's name; an odd one's model does as told."""

    def start(
        self,
        name: str,
        *options: object,
        bind: str = ANY_PORT,
        bundle: Path | None = None,
        program: Sequence[str] = (),
        odd: bool = False,
        wait_for: str | None = "READY",
    ) -> AgentProcess:
        """Start `mdp-agent run` or an odd agent, and wait until it is as far as `wait_for` says."""
        program = _ODD if odd else program
        return super().start(
            name, *options, bind=bind, bundle=bundle, program=program, wait_for=wait_for
        )

    def start_all(self, *names: str, odd: tuple[object, ...] = ()) -> Self:
        """Start agents side by side, and beside them an odd one: its name, then its options."""
        if odd:
            self.start(str(odd[0]), *odd[1:], odd=True, wait_for=None)
        super().start_all(*names)
        if odd:
            self.agents[str(odd[0])].wait_for("READY")
        return self

    def restart(
        self, name: str, *options: object, program: Sequence[str] = (), odd: bool = False
    ) -> AgentProcess:
        """Start again where it listened before."""
        return self.start(name, *options, bind=self.agents[name].address, program=program, odd=odd)
