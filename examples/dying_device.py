"""A device dies in the middle of the work, and comes back: what a caller sees of it.

python examples/dying_device.py bundle/ cat.jpg
"""

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from three_agents import agent

import mdp
from mdp.formats.fleet import new_fleet

DEADLINE_MS = 1000.0
PATIENCE_S = 15.0


def show(what: str, answer: mdp.Prediction) -> None:
    """One line per answer: what it is made of, and what is missing."""
    missing = ", ".join(f"{device} ({reason})" for device, reason in answer.missing.items())
    print(
        f"{what}: {answer.label}, {answer.mode} from {' + '.join(answer.used)}, "
        f"missing {missing or 'nothing'}, expected accuracy {answer.expected_accuracy}"
    )


def main(bundle_folder: str, picture: str) -> None:
    """Kill the first device's agent with SIGKILL, ask on, start it again, ask until it is back."""
    bundle = mdp.Bundle.open(bundle_folder)
    with ExitStack() as stack:
        agents = [
            stack.enter_context(agent(bundle.path, assignment.device))
            for assignment in bundle.manifest.plan.assignments
        ]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        addresses = [f"{a.device}={a.address}" for a in agents]
        new_fleet(bundle, addresses, folder / "fleet.toml")
        client = stack.enter_context(mdp.Client.connect(folder / "fleet.toml"))
        show("all alive", client.classify(picture, deadline_ms=DEADLINE_MS))

        victim = agents[0]
        victim.process.kill()
        victim.process.wait()
        show("one killed", client.classify(picture, deadline_ms=DEADLINE_MS))

        stack.enter_context(agent(bundle.path, victim.device, bind=victim.address))
        until_s = time.monotonic() + PATIENCE_S
        answer = client.classify(picture, deadline_ms=DEADLINE_MS)
        while victim.device not in answer.used and time.monotonic() < until_s:
            time.sleep(0.05)  # ZeroMQ reconnects by itself, within a second
            answer = client.classify(picture, deadline_ms=DEADLINE_MS)
        show("started again", answer)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: dying_device.py BUNDLE PICTURE")
    main(*sys.argv[1:])
