"""Play a whole fleet on one machine: an agent process per device of a bundle, and one client.

python examples/three_agents.py bundle/ cat.jpg dog.jpg
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import mdp
from mdp.formats.fleet import new_fleet


@contextmanager
def agent(
    bundle: Path, device: str, *options: str, bind: str = "tcp://127.0.0.1:0"
) -> Iterator["Agent"]:
    """A running `mdp-agent` that has said READY; it is stopped at the end."""
    running = Agent(bundle, device, bind, *options)
    try:
        yield running
    finally:
        running.stop()


class Agent:
    """One agent process."""

    def __init__(self, bundle: Path, device: str, bind: str, *options: str) -> None:
        program = Path(sys.executable).parent / "mdp-agent"
        command = [str(program), "run", "--bundle", str(bundle), "--device", device]
        command += ["--bind", bind, "--threads", "1", "--json", *options]
        self.device = device
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.address = self._wait_ready()

    def _wait_ready(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == "READY":
                return str(event["address"])
        raise RuntimeError(f"the agent of {self.device} ended with {self.process.wait()}")

    def stop(self) -> None:
        """End the process, politely."""
        self.process.terminate()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def main(bundle_folder: str, *pictures: str) -> None:
    """Serve every device of the bundle, classify, and show where the time went."""
    bundle = mdp.Bundle.open(bundle_folder)
    with ExitStack() as stack:
        agents = [
            stack.enter_context(agent(bundle.path, assignment.device))
            for assignment in bundle.manifest.plan.assignments
        ]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = folder / "fleet.toml"
        new_fleet(bundle, [f"{a.device}={a.address}" for a in agents], fleet)
        client = stack.enter_context(mdp.Client.connect(fleet))
        for status in client.status():
            print(f"{status.device}: {status.state} at {status.address} on {status.provider}")
        for picture in pictures:
            answer = client.classify(picture, deadline_ms=1000)
            print(f"{picture}: {answer.label} ({answer.probability:.0%}), {answer.mode}")
            for member in answer.members:
                print(
                    f"  {member.device}: computing {member.compute_ms:.1f} ms, "
                    f"waiting {member.queue_ms:.1f} ms, network {member.network_ms:.1f} ms"
                )


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("usage: three_agents.py BUNDLE PICTURE...")
    main(*sys.argv[1:])
