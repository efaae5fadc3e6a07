"""A fleet as the gateway serves it: calls, switched-off devices, and the watch over its devices."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mdp.client.aio import AsyncClient
from mdp.client.following import FollowedFiles
from mdp.errors import InferenceError, MDPError
from mdp.gateway.devices import Roll
from mdp.gateway.refusals import Refusal
from mdp.gateway.workers import Workers
from mdp.pictures.crop import Picture
from mdp.requests.prediction import Prediction

#: How often devices are asked how they are, and how long they may take to say so.
WATCH_S, STATUS_TIMEOUT_S = 1.0, 0.8
#: Requests that might take longer are refused.
MAX_REQUEST_MS = 60_000.0
#: Pictures of one request that are under way at once.
IN_FLIGHT = 4


class ServedFleet:
    """One fleet under the name of a model."""

    def __init__(
        self,
        name: str,
        path: Path,
        *,
        report: Callable[[str], None] = lambda text: None,
        **options: Any,
    ) -> None:
        """Connect to the fleet file `path`, with a client's `options`; raises ConfigError.

        `report` gets one line where the file stays wrong.
        """
        self.name = name
        self._fusion = options.get("fusion", "stacked")
        self._cascade = bool(options.get("cascade"))
        self._client = AsyncClient(path, opinions=True, **options)
        self.bundle = self._client.bundle
        self.roll = self._new_roll()
        self._files = FollowedFiles(path, self._client, report)
        #: Who answers pictures in the place of this process.
        self.workers: Workers | None = None
        #: Called when something has changed that the page shows.
        self.changed: Callable[[], None] = lambda: None

    def _new_roll(self) -> Roll:
        return Roll(self._client.fleet, self.bundle, self._fusion, cascade=self._cascade)

    @property
    def ready(self) -> bool:
        """Tell whether any device can answer."""
        return any(device.usable and device.in_use for device in self.roll.devices.values())

    async def classify(self, pictures: Sequence[Picture], deadline_ms: float) -> list[Prediction]:
        """The fleet's answers; raises what a client raises for the first picture without one."""
        client = self._client
        if self.workers is not None:
            turns = math.ceil(len(pictures) / IN_FLIGHT)
            return await self._note_outcome(
                self.workers.classify(self.name, pictures, deadline_ms, turns)
            )
        if len(pictures) == 1:
            return await self._note_outcome(
                _as_list(client.classify(pictures[0], deadline_ms=deadline_ms))
            )
        answering = client.classify_many(pictures, deadline_ms=deadline_ms, in_flight=IN_FLIGHT)
        return await self._note_outcome(answering)

    async def look(self, deadline_ms: float, *, maps: bool = False) -> Prediction:
        """Classify what the devices' own cameras see; raises what a client raises."""
        looking = self._client.look(deadline_ms=deadline_ms, maps=maps)
        (answer,) = await self._note_outcome(_as_list(looking))
        return answer

    async def _note_outcome(self, answering: Awaitable[list[Prediction]]) -> list[Prediction]:
        try:
            answers = await answering
        except InferenceError as error:
            self.roll.on_missing(error.outcomes, time.time())
            self.changed()
            raise
        for answer in answers:
            self.roll.on_answer(answer, time.time())
        self.changed()
        return answers

    def switch(self, name: str, in_use: bool) -> None:
        """Take a device out of this gateway's calls, or put it back; raises Refusal."""
        devices = self.roll.devices
        if name not in devices:
            known = ", ".join(devices)
            raise Refusal(404, f"no device {name[:60]!r} in {self.name}: expected one of {known}")
        if devices[name].in_use == in_use:
            return
        if not in_use and self.roll.is_last(name):
            last = "can answer" if devices[name].usable else "is in use"
            raise Refusal(409, f"{name} is the last device of {self.name} that {last}")
        off = {d.name for d in devices.values() if not d.in_use} ^ {name}
        self._leave_out(off)
        self.roll.on_switch(name, in_use, time.time())
        self.changed()

    async def _renew(self) -> None:
        """Read a changed fleet file or bundle again; devices stay switched off if one is left."""
        with self._files.following() as changed:
            if not changed:
                return
            # Raises ConfigError while they do not fit each other.
            await self._client.reload()
            self.bundle = self._client.bundle
            former, self.roll = self.roll, self._new_roll()
            self.roll.take_over(former)
            self._leave_out({d.name for d in self.roll.devices.values() if not d.in_use})

    def _leave_out(self, off: set[str]) -> None:
        self._client.leave_out(*off)
        if self.workers is not None:
            self.workers.leave_out(self.name, off)

    async def watch(self) -> None:
        """Ask the devices how they are, over and over."""
        while True:
            await self._renew()
            with suppress(MDPError):
                statuses = await self._client.status(timeout_s=STATUS_TIMEOUT_S)
                self.roll.on_statuses(statuses, time.time())
                self.changed()
            await asyncio.sleep(WATCH_S)

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def snapshot(self) -> dict[str, Any]:
        """The state of this fleet for the page, for msgspec to encode."""
        evaluation = self.bundle.manifest.evaluation
        return {
            "name": self.name,
            "bundle": self.bundle.manifest.name,
            "digest": self.bundle.digest[:12],
            "classes": len(self.bundle.manifest.labels),
            "ready": self.ready,
            "expected_accuracy_pictures": None if evaluation is None else evaluation.pictures,
            "scenes": bool(self.bundle.manifest.plan.cameras),
            "inspects": bool(self.bundle.manifest.inspection),
            **self.roll.snapshot(),
        }


async def _as_list(answering: Awaitable[Prediction]) -> list[Prediction]:
    return [await answering]
