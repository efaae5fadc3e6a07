"""A client that has used up what an agent allows it is told so, and does not ask again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import mdp
from mdp.testing.bundles import DEVICES, colour_picture, write_bundle
from tests.support.fleet import PLENTY_MS, Fleet

pytestmark = pytest.mark.usefixtures("no_leaks")

RED = colour_picture("red")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Agents with keys, which take one byte a second of the client's."""
    with Fleet(tmp_path, write_bundle(tmp_path / "bundle"), keys=True) as fleet:
        (tmp_path / "client.limits").write_text("bytes_per_s = 1.0\n")
        fleet.start_all(*DEVICES)
        yield fleet


def test_a_quota_that_is_reached_ends_calls_at_once(fleet: Fleet) -> None:
    with fleet.client() as client:
        assert client.classify(RED, deadline_ms=PLENTY_MS).used == DEVICES
        for _ in range(3):
            with pytest.raises(mdp.InferenceError) as refused:
                client.classify(RED, deadline_ms=PLENTY_MS)
            # Not `DeadlineExceeded`: no call waits for a quota, as for a full queue.
            assert type(refused.value) is mdp.QuorumNotMet
            assert refused.value.codes == dict.fromkeys(DEVICES, "quota")
            said = "quota: this client's 1 bytes a second are used up"
            assert refused.value.outcomes == dict.fromkeys(DEVICES, said)
