"""Two devices look with cameras of their own, which two folders of pictures play.

python examples/two_cameras.py bundle/ door/ yard/
"""

import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from three_agents import agent

import mdp
from mdp.errors import InferenceError
from mdp.formats.fleet import new_fleet

LOOKS = 3


def main(bundle_folder: str, *cameras: str) -> None:
    """Give each of the first devices a folder to look at, and watch what they see together."""
    bundle = mdp.Bundle.open(bundle_folder)
    devices = [assignment.device for assignment in bundle.manifest.plan.assignments]
    with ExitStack() as stack:
        agents = [
            stack.enter_context(agent(bundle.path, device, "--source", f"folder:{folder}"))
            for device, folder in zip(devices, cameras, strict=False)
        ]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = folder / "fleet.toml"
        new_fleet(bundle, [f"{a.device}={a.address}" for a in agents], fleet)
        client = stack.enter_context(mdp.Client.connect(fleet))
        looks = 0
        for answer in client.watch(every_ms=200, deadline_ms=1000, errors="yield"):
            if isinstance(answer, InferenceError):
                # The first frames may not have been taken yet.
                print(f"nothing seen: {answer}")
                continue
            print(f"{answer.label} ({answer.probability:.0%}), {answer.mode}")
            for member in answer.members:
                print(f"  {member.device}: frame {member.frame}, {member.frame_age_ms:.0f} ms old")
            looks += len(answer.members) == len(agents)
            if looks == LOOKS:
                break


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("usage: two_cameras.py BUNDLE FOLDER FOLDER")
    main(*sys.argv[1:])
