"""A fleet as the gateway serves it: calls, switched-off devices, and the watch over its devices."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import replace

from mdp.client.aio import AsyncClient
from mdp.client.base import Connecting
from mdp.errors import InferenceError, MDPError
from mdp.files import write_toml
from mdp.formats.fleet import Fleet
from mdp.gateway.devices import SWITCHED_OFF, Roll
from mdp.gateway.refusals import Refusal
from mdp.pictures.crop import Picture
from mdp.requests.prediction import Prediction

#: How often devices are asked how they are, and how long they may take to say so.
WATCH_S, STATUS_TIMEOUT_S = 1.0, 0.8
#: Longer deadlines are refused: a request that takes minutes is none of a camera's.
MAX_DEADLINE_MS = 30_000.0
#: Pictures of one request that are under way at once.
IN_FLIGHT = 4


class ServedFleet:
    """One fleet under the name of a model.

    A device is taken out by a client of its own for the others: of the fleet file, less an entry.
    """

    def __init__(self, name: str, path: Path, **options: Any) -> None:
        """Connect to the fleet file `path`, with a client's `options`; raises ConfigError."""
        self.name = name
        self._path = path
        self._options: Connecting = options  # type: ignore[assignment]
        #: Knows all devices, also those that are switched off.
        self._whole = AsyncClient(path, **self._options)
        self.bundle = self._whole.bundle
        self.roll = Roll(self._whole.fleet, self.bundle, options.get("fusion", "stacked"))
        self._calls = self._whole
        #: Clients of one device each, for what it says alone.
        self._alone: dict[str, AsyncClient] = {}
        self._retired: list[AsyncClient] = []
        self._switching = asyncio.Lock()
        #: Called when something has changed that the page shows.
        self.changed: Callable[[], None] = lambda: None

    @property
    def ready(self) -> bool:
        """Whether any device can answer."""
        return any(device.usable and device.in_use for device in self.roll.devices.values())

    @property
    def off(self) -> list[str]:
        """The devices that are switched off."""
        return [device.name for device in self.roll.devices.values() if not device.in_use]

    async def classify(self, pictures: Sequence[Picture], deadline_ms: float) -> list[Prediction]:
        """The fleet's answers; raises what a client raises for the first picture without one."""
        client = self._calls
        try:
            if len(pictures) == 1:
                answers = [await client.classify(pictures[0], deadline_ms=deadline_ms)]
            else:
                answers = await client.classify_many(
                    pictures, deadline_ms=deadline_ms, in_flight=IN_FLIGHT
                )
        except InferenceError as error:
            self.roll.missed(error.outcomes, time.time())
            self.changed()
            raise
        answers = [self._named(answer) for answer in answers]
        for answer in answers:
            self.roll.answered(answer, time.time())
        self.changed()
        return answers

    def _named(self, answer: Prediction) -> Prediction:
        """`answer` with the reason of devices that are switched off, which its client lacks."""
        off = dict.fromkeys(self.off, SWITCHED_OFF)
        return replace(answer, missing=answer.missing | off) if off else answer

    async def opinions(self, picture: Picture, deadline_ms: float) -> dict[str, Prediction]:
        """Device -> its answer on its own, each asked once more; without those that give none."""
        wanted = [d.name for d in self.roll.devices.values() if d.usable and d.in_use]

        async def ask(name: str) -> Prediction | None:
            try:
                client = await self._only([name])
                return await client.classify(picture, deadline_ms=deadline_ms)
            except InferenceError:
                return None

        answers = await asyncio.gather(*(ask(name) for name in wanted))
        return {name: each for name, each in zip(wanted, answers, strict=True) if each is not None}

    async def _only(self, names: list[str]) -> AsyncClient:
        """A client of these devices alone; one of a single device is kept."""
        async with self._switching:
            if len(names) == 1 and names[0] in self._alone:
                return self._alone[names[0]]
            client = await self._part(names)
            if len(names) == 1:
                self._alone[names[0]] = client
            return client

    async def _part(self, names: list[str]) -> AsyncClient:
        fleet, folder = self._whole.fleet, self._path.resolve().parent
        part = Fleet(
            bundle=str(folder / fleet.bundle),
            key=None if fleet.key is None else str(folder / fleet.key),
            devices=[entry for entry in fleet.devices if entry.device in names],
        )
        # Read once, as the client begins.
        with TemporaryDirectory(prefix="mdp-gateway-") as temporary:
            path = Path(temporary) / "fleet.toml"
            write_toml(path, part)
            client = AsyncClient(path, **self._options)
        return await client

    async def switch(self, name: str, in_use: bool) -> None:
        """Take a device out of this gateway's calls, or put it back; raises Refusal."""
        device = self.roll.devices.get(name)
        if device is None:
            known = ", ".join(self.roll.devices)
            raise Refusal(404, f"no device {name[:60]!r} in {self.name}: expected one of {known}")
        async with self._switching:
            if device.in_use == in_use:
                return
            wanted = [d.name for d in self.roll.devices.values() if d.in_use and d.name != name]
            if in_use:
                wanted.append(name)
            if not wanted:
                raise Refusal(409, f"{name} is the last device of {self.name} that is in use")
            everyone = len(wanted) == len(self.roll.devices)
            client = self._whole if everyone else await self._part(wanted)
            former, self._calls = self._calls, client
            self.roll.switched(name, in_use, time.time())
        self.changed()
        if former is not self._whole:
            self._retired.append(former)
            # Calls that are under way on it have ended by then.
            asyncio.get_running_loop().call_later(MAX_DEADLINE_MS / 1e3 + 1, former.close)

    async def watch(self) -> None:
        """Ask the devices how they are, over and over."""
        while True:
            with suppress(MDPError):
                statuses = await self._whole.status(timeout_s=STATUS_TIMEOUT_S)
                self.roll.told(statuses, time.time())
                self.changed()
            await asyncio.sleep(WATCH_S)

    def close(self) -> None:
        """Close all connections."""
        for client in {self._whole, self._calls, *self._alone.values(), *self._retired}:
            client.close()

    def shown(self) -> dict[str, Any]:
        """What the page shows of this fleet, for msgspec to encode."""
        evaluation = self.bundle.manifest.evaluation
        return {
            "name": self.name,
            "bundle": self.bundle.manifest.name,
            "digest": self.bundle.digest[:12],
            "classes": len(self.bundle.manifest.labels),
            "ready": self.ready,
            "expected_accuracy_pictures": None if evaluation is None else evaluation.pictures,
            **self.roll.shown(),
        }
