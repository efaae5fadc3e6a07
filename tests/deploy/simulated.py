"""A process with a fleet of simulated agents: python -m tests.deploy.simulated NAME MEMBERS

It answers with its own name as the only label that it sees. Writes the fleet file as JSON; then,
for each line `stop K` or `start K` that it reads, `done`. Ends with its input.
"""

import json
import sys

from mdp.testing.fake_fleet import fake_fleet


def main(name: str, members: str) -> None:
    """Serve until the input ends."""
    with fake_fleet([name, "other"], int(members)) as fleet:
        addresses = [agent.address for agent in fleet.members]
        print(json.dumps({"fleet": str(fleet.path), "addresses": addresses}), flush=True)
        for line in sys.stdin:
            action, k = line.split()
            agent = fleet.members[int(k)]
            {"stop": agent.stop, "start": agent.start}[action]()
            print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
