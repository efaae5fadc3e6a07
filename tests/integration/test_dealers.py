"""The client's connections as they come and go."""

import pytest

from mdp.transport import Connected, Dealers, Disconnected, Router
from tests.support.fleet import ANY_PORT, until

pytestmark = pytest.mark.usefixtures("no_leaks")


def test_a_send_in_vain_knows_that_the_connection_has_gone() -> None:
    agent = Router(ANY_PORT)
    dealers = Dealers({"alpha": agent.address})
    try:
        until(lambda: dealers.poll(0.1) == [Connected("alpha")], "it is connected")
        agent.close()
        # Nobody polls meanwhile.
        until(lambda: not dealers.send("alpha", [b"hello"]), "it cannot be sent to")
        assert dealers.connected == set()
        assert dealers.poll(0.0) == [Disconnected("alpha")]
        assert Disconnected("alpha") not in dealers.poll(0.0)
    finally:
        dealers.close()
