"""A fleet as the gateway serves it: calls, switched-off devices, and the watch over its devices."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mdp.client.aio import AsyncClient
from mdp.client.base import Connecting
from mdp.errors import InferenceError, MDPError
from mdp.files import write_toml
from mdp.formats.fleet import Fleet, files_stamp
from mdp.gateway.devices import Roll
from mdp.gateway.refusals import Refusal
from mdp.pictures.crop import Picture
from mdp.requests.prediction import Prediction

#: How often devices are asked how they are, and how long they may take to say so.
WATCH_S, STATUS_TIMEOUT_S = 1.0, 0.8
#: Requests that might take longer are refused.
MAX_REQUEST_MS = 60_000.0
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
        self.roll = self._new_roll()
        self._read = self._stamp()
        self._calls = self._whole
        #: Clients of one device each, for what it says alone.
        self._alone: dict[str, AsyncClient] = {}
        #: Those that get no new calls, and how many calls each client has under way.
        self._retired: set[AsyncClient] = set()
        self._under_way: Counter[AsyncClient] = Counter()
        self._switching = asyncio.Lock()
        #: Called when something has changed that the page shows.
        self.changed: Callable[[], None] = lambda: None

    def _new_roll(self) -> Roll:
        return Roll(self._whole.fleet, self.bundle, self._options.get("fusion", "stacked"))

    @property
    def ready(self) -> bool:
        """Whether any device can answer."""
        return any(device.usable and device.in_use for device in self.roll.devices.values())

    async def classify(self, pictures: Sequence[Picture], deadline_ms: float) -> list[Prediction]:
        """The fleet's answers; raises what a client raises for the first picture without one."""
        with self._using(self._calls) as client:
            if len(pictures) == 1:
                answering = _listed(client.classify(pictures[0], deadline_ms=deadline_ms))
            else:
                answering = client.classify_many(
                    pictures, deadline_ms=deadline_ms, in_flight=IN_FLIGHT
                )
            return await self._noted(answering)

    async def look(self, deadline_ms: float) -> Prediction:
        """What the devices' own cameras see; raises what a client raises."""
        with self._using(self._calls) as client:
            (answer,) = await self._noted(_listed(client.look(deadline_ms=deadline_ms)))
        return answer

    async def _noted(self, answering: Awaitable[list[Prediction]]) -> list[Prediction]:
        try:
            answers = [self.roll.named(answer) for answer in await answering]
        except InferenceError as error:
            self.roll.missed(error.outcomes, time.time())
            self.changed()
            raise
        for answer in answers:
            self.roll.answered(answer, time.time())
        self.changed()
        return answers

    async def opinions(self, picture: Picture, deadline_ms: float) -> dict[str, Prediction]:
        """Device -> its answer on its own, each asked once more; without those that give none."""
        wanted = [d.name for d in self.roll.devices.values() if d.usable and d.in_use]

        async def ask(name: str) -> Prediction | None:
            try:
                with self._using(await self._only(name)) as client:
                    return await client.classify(picture, deadline_ms=deadline_ms)
            except InferenceError:
                return None

        answers = await asyncio.gather(*(ask(name) for name in wanted))
        return {name: each for name, each in zip(wanted, answers, strict=True) if each is not None}

    async def _only(self, name: str) -> AsyncClient:
        """A client of this device alone, which is kept."""
        async with self._switching:
            if name not in self._alone:
                self._alone[name] = await self._part([name])
            return self._alone[name]

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
            self._retire(former)

    @contextmanager
    def _using(self, client: AsyncClient) -> Iterator[AsyncClient]:
        """Keep `client` open until the block ends."""
        self._under_way[client] += 1
        try:
            yield client
        finally:
            self._under_way[client] -= 1
            self._close_unused()

    def _retire(self, client: AsyncClient) -> None:
        """Close a client once the requests that are under way on it have ended."""
        self._retired.add(client)
        self._close_unused()

    def _close_unused(self) -> None:
        for client in [each for each in self._retired if not self._under_way[each]]:
            client.close()
            self._retired.remove(client)
            del self._under_way[client]

    def _stamp(self) -> list[tuple[int, int]]:
        return files_stamp(self._path, self._whole.fleet)

    async def _renew(self) -> None:
        """Read a changed fleet file or bundle again; all its devices are then in use."""
        stamp = self._stamp()
        if stamp == self._read:
            return
        # Raises ConfigError while they do not fit each other.
        await self._whole.reload()
        async with self._switching:
            for client in {self._calls, *self._alone.values()} - {self._whole}:
                self._retire(client)
            self._alone.clear()
            self._calls, self.bundle, self._read = self._whole, self._whole.bundle, stamp
            former, self.roll = self.roll, self._new_roll()
            self.roll.faults.extend(former.faults)

    async def watch(self) -> None:
        """Ask the devices how they are, over and over."""
        while True:
            with suppress(MDPError, OSError):
                await self._renew()
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


async def _listed(answering: Awaitable[Prediction]) -> list[Prediction]:
    return [await answering]
