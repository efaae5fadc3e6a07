"""A fleet without agents: for tests of code that calls `mdp.Client`, `AsyncClient` or `mdp`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet
from mdp.pictures.crop import Pixels
from mdp.testing.bundles import LABELS, write_bundle
from mdp.testing.fake_agent import Answer, FakeAgent

#: Pixels of each side of a member's crop.
IMAGE_SIZE = 32


class FakeFleet:
    """Agents of this process that answer as told, and the fleet file that leads to them."""

    def __init__(self, folder: Path, bundle: Bundle, agents: Sequence[FakeAgent]) -> None:
        """`agents` serve `bundle`, each another of its sub-models, in their order."""
        self.bundle = bundle
        #: By the index `k` of their sub-models.
        self.members = list(agents)
        #: fleet.toml, to connect to.
        self.path = folder / "fleet.toml"
        self.write()

    def answer(self, answer: Answer | Callable[[Pixels], Answer]) -> None:
        """Have every member answer so; see `FakeAgent.answer`."""
        for agent in self.members:
            agent.answer(answer)

    def write(self, addresses: Mapping[str, str] = MappingProxyType({})) -> Path:
        """Write the fleet file again, with other addresses for some devices, such as a relay's.

        A client that is connected takes it in with `reload`.
        """
        known = {agent.device: agent.address for agent in self.members} | dict(addresses)
        new_fleet(self.bundle, [f"{name}={where}" for name, where in known.items()], self.path)
        return self.path


@contextmanager
def fake_fleet(labels: Sequence[str] = LABELS, members: int = 3) -> Iterator[FakeFleet]:
    """A fleet of `members` fake agents, all of which answer with the first of `labels`.

    Its devices are called `device-0`, `device-1` and so on, and listen on loopback without keys.
    Everything of it is gone at the end of the `with` block. Raises ValueError without a label or a
    member.
    """
    if not labels or members < 1:
        raise ValueError(f"expected labels and members, got {list(labels)} and {members}")
    devices = tuple(f"device-{k}" for k in range(members))
    with TemporaryDirectory(prefix="mdp-fake-") as name, ExitStack() as stack:
        folder = Path(name)
        sizes = (IMAGE_SIZE,) * members
        write_bundle(folder / "bundle", devices=devices, sizes=sizes, labels=labels)
        bundle = Bundle.open(folder / "bundle")
        agents = []
        for k in range(members):
            agents.append(FakeAgent(bundle, k, labels[0]))
            stack.callback(agents[-1].stop)
        yield FakeFleet(folder, bundle, agents)
