"""A served fleet's clients: which are open when devices are switched, without sockets."""

import asyncio
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from mdp.files import write_toml
from mdp.formats.fleet import Fleet, FleetEntry, read_fleet
from mdp.gateway import fleets
from mdp.gateway.fleets import ServedFleet
from mdp.requests.prediction import Prediction
from mdp.testing.bundles import DEVICES, write_bundle
from tests.unit.mdp.gateway.test_app import ANSWER


class Opened:
    """A client that answers once it is let."""

    clients: "list[Opened]"
    may_answer: asyncio.Event

    def __init__(self, path: Path, **options: Any) -> None:
        self.fleet, self.bundle = read_fleet(path)
        self.closed = False
        self.clients.append(self)

    def __await__(self) -> Generator[Any, None, "Opened"]:
        return self._connected().__await__()

    async def _connected(self) -> "Opened":
        return self

    async def classify(self, picture: bytes, *, deadline_ms: float) -> Prediction:
        await self.may_answer.wait()
        assert not self.closed
        return ANSWER

    def close(self) -> None:
        self.closed = True


def test_a_replaced_client_is_closed_once_its_calls_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Opened.clients = []
    monkeypatch.setattr(fleets, "AsyncClient", Opened)
    entries = [
        FleetEntry(device=name, address=f"tcp://127.0.0.1:{9000 + k}", k=k)
        for k, name in enumerate(DEVICES)
    ]
    bundle = write_bundle(tmp_path / "bundle")
    write_toml(tmp_path / "fleet.toml", Fleet(bundle=str(bundle), devices=entries))

    def open_ones() -> list[int]:
        return [len(each.fleet.devices) for each in Opened.clients if not each.closed]

    async def switching() -> None:
        Opened.may_answer = asyncio.Event()
        served = ServedFleet("colours", tmp_path / "fleet.toml")
        await served.switch("beta", False)
        call = asyncio.create_task(served.classify([b"picture"], 100.0))
        await asyncio.sleep(0)
        for in_use in (True, False) * 3:
            await served.switch("beta", in_use)
        assert open_ones() == [3, 2, 2]
        Opened.may_answer.set()
        assert await call
        assert open_ones() == [3, 2]

    asyncio.run(switching())
