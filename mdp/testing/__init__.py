"""Tools to test code that uses MDP: fake fleets, tiny bundles, agent processes, bad links.

`fake_fleet` needs neither onnxruntime nor any other process; `AgentFleet` starts real agents of a
bundle such as `write_bundle` writes; `Relay` stands between a client and an agent.
docs/how-to/testing.md shows how. `import mdp` does not load this package.
"""

from mdp.testing.agents import ANY_PORT, AgentFleet, AgentProcess, agent_command
from mdp.testing.bundles import colour_picture, write_bundle
from mdp.testing.fake_agent import FakeAgent
from mdp.testing.fake_fleet import FakeFleet, fake_fleet
from mdp.testing.processes import LineProcess, until
from mdp.testing.relay import Relay
from mdp.testing.relay_process import Link

__all__ = [
    "ANY_PORT",
    "AgentFleet",
    "AgentProcess",
    "FakeAgent",
    "FakeFleet",
    "LineProcess",
    "Link",
    "Relay",
    "agent_command",
    "colour_picture",
    "fake_fleet",
    "until",
    "write_bundle",
]
