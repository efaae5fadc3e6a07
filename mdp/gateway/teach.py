"""The routes of the page that teaches: only for tokens that may, whatever others may."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mdp.errors import MDPError
from mdp.formats.mask import CameraMask
from mdp.gateway.bodies import MAX_SWITCH_BYTES, Bodies
from mdp.gateway.refusals import Refusal
from mdp.gateway.replies import json_response
from mdp.teach.recorder import BusyError, RecordRequest
from mdp.teach.review import GoneError
from mdp.teach.teacher import BuildRequest, FleetTeacher

#: Of a request about teaching: masks have at most 32 boxes.
MAX_TEACH_BYTES = 8 * MAX_SWITCH_BYTES
#: Between two events at least, and between two signs of life at most.
EVENT_S, QUIET_S = 0.25, 10.0
_KINDS = {".jpg": "image/jpeg", ".png": "image/png"}

T = TypeVar("T")
Streamed = Callable[[Request, AsyncIterator[bytes]], Response]


class PutRight(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The class of a kept item, as somebody says."""

    label: str


class WantedRollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rollout that somebody wants."""

    action: Literal["push", "rollback"]


class WantedMask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A camera's mask that somebody wants; None: none."""

    mask: CameraMask | None


class TeachRoutes:
    """Routes by which the page asks and changes."""

    def __init__(
        self, teacher: FleetTeacher, bodies: Bodies, streamed: Streamed, ending: Callable[[], bool]
    ) -> None:
        """`streamed` answers with events, within the gateway's limits of readers."""
        self._teacher, self._bodies, self._streamed = teacher, bodies, streamed
        self._ending = ending
        self._changed = asyncio.Event()
        teacher.changed = self._wake

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def routes(self) -> list[Route]:
        """All of them, below /teach/."""
        device, item = "{device:path}", "/teach/kept/{item}"
        return [
            Route("/teach/state", _refuse_errors(self.state)),
            Route("/teach/events", _refuse_errors(self.events)),
            Route("/teach/cameras", _refuse_errors(self.cameras)),
            Route(f"/teach/cameras/{device}", _refuse_errors(self.picture)),
            Route("/teach/masks", _refuse_errors(self.masks)),
            Route(f"/teach/masks/{device}", _refuse_errors(self.set_mask), methods=["PUT"]),
            Route("/teach/recording", _refuse_errors(self.record), methods=["PUT", "DELETE"]),
            Route("/teach/recording/scenes", _refuse_errors(self.remove), methods=["DELETE"]),
            Route("/teach/kept", _refuse_errors(self.list_kept)),
            Route("/teach/moved", _refuse_errors(self.undo), methods=["DELETE"]),
            Route(item, _refuse_errors(self.put_right), methods=["PUT", "DELETE"]),
            Route(f"{item}/{device}", _refuse_errors(self.picture_of_kept)),
            Route("/teach/good", _refuse_errors(self.learn_again), methods=["PUT"]),
            Route("/teach/good/{item}", _refuse_errors(self.make_good), methods=["PUT"]),
            Route("/teach/build", _refuse_errors(self.build), methods=["PUT", "DELETE"]),
            Route("/teach/rollout", _refuse_errors(self.roll_out), methods=["PUT"]),
        ]

    async def _read_body(self, request: Request, kind: type[T]) -> T:
        async with self._bodies.hold(request, MAX_TEACH_BYTES) as body:
            try:
                return msgspec.json.decode(body, type=kind)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise Refusal(400, f"{request.url.path}: {error}"[:400]) from error

    def _snapshot_response(self) -> Response:
        return json_response(self._teacher.snapshot())

    async def state(self, request: Request) -> Response:
        """Classes, recording, kept items, build and rollout: one event of `/teach/events`."""
        return self._snapshot_response()

    async def events(self, request: Request) -> Response:
        """Server-sent events: `/teach/state` again whenever something in it changes."""
        return self._streamed(request, self._changes())

    async def _changes(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        sent_s = float("-inf")
        while not self._ending():
            changed = self._changed
            yield b"event: teach\ndata: " + msgspec.json.encode(self._teacher.snapshot()) + b"\n\n"
            sent_s = loop.time()
            await asyncio.sleep(EVENT_S)
            while not (changed.is_set() or self._ending()):
                if loop.time() - sent_s > QUIET_S:
                    yield b":\n\n"
                    sent_s = loop.time()
                # Looks around now and then whether the server is ending.
                with suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await changed.wait()

    async def cameras(self, request: Request) -> Response:
        """Cameras that give pictures, and why others do not."""
        scene = await self._teacher.preview()
        return json_response({"pictures": sorted(scene.pictures), "missing": dict(scene.missing)})

    async def picture(self, request: Request) -> Response:
        """The picture before one camera now; 204 of a camera that gives none at the moment.

        A camera may stop between the list of those that give pictures and the request for its
        picture, as during a rollout: no error, which a browser would write to its console.
        `/teach/cameras` says why.
        """
        device = request.path_params["device"]
        if device not in self._teacher.devices:
            known = ", ".join(self._teacher.devices)
            raise Refusal(404, f"no device {device[:60]!r}: expected one of {known}")
        scene = await self._teacher.preview()
        content = scene.pictures.get(device)
        if content is None:
            return Response(status_code=204)
        return Response(content, media_type="image/jpeg")

    async def masks(self, request: Request) -> Response:
        """Each camera's mask, and the size of what it is drawn on."""
        return json_response(await self._teacher.masks())

    async def set_mask(self, request: Request) -> Response:
        """Have one agent use another mask."""
        wanted = await self._read_body(request, WantedMask)
        await self._teacher.set_mask(request.path_params["device"], wanted.mask)
        return json_response(await self._teacher.masks())

    async def record(self, request: Request) -> Response:
        """Begin to record, or end it."""
        if request.method == "DELETE":
            await self._teacher.stop_recording()
        else:
            self._teacher.record(await self._read_body(request, RecordRequest))
        return self._snapshot_response()

    async def remove(self, request: Request) -> Response:
        """Remove the scenes of the newest recording."""
        await self._teacher.remove_recorded()
        return self._snapshot_response()

    async def list_kept(self, request: Request) -> Response:
        """The kept items, unsure first."""
        return json_response(self._teacher.items())

    async def put_right(self, request: Request) -> Response:
        """Make a kept item a scene of a class, or remove it."""
        name = request.path_params["item"]
        if request.method == "DELETE":
            await self._teacher.discard(name)
        else:
            await self._teacher.put_right(name, (await self._read_body(request, PutRight)).label)
        return self._snapshot_response()

    async def make_good(self, request: Request) -> Response:
        """Make a kept item a good scene, which anomaly heads learn from."""
        await self._teacher.make_good(request.path_params["item"])
        return self._snapshot_response()

    async def learn_again(self, request: Request) -> Response:
        """Have anomaly heads learn from the good items that are there."""
        self._teacher.learn_again()
        return self._snapshot_response()

    async def undo(self, request: Request) -> Response:
        """Take the last move back."""
        await self._teacher.undo()
        return self._snapshot_response()

    async def picture_of_kept(self, request: Request) -> Response:
        """A picture of a kept item."""
        parameters = request.path_params
        content, suffix = await self._teacher.picture_of_kept(
            parameters["item"], parameters["device"]
        )
        return Response(content, media_type=_KINDS[suffix])

    async def build(self, request: Request) -> Response:
        """Begin to build, or cancel it."""
        if request.method == "DELETE":
            await self._teacher.cancel_build()
        else:
            self._teacher.build(await self._read_body(request, BuildRequest))
        return self._snapshot_response()

    async def roll_out(self, request: Request) -> Response:
        """Begin to push the newest build, or to roll back."""
        if (await self._read_body(request, WantedRollout)).action == "push":
            self._teacher.push()
        else:
            self._teacher.roll_back()
        return self._snapshot_response()


def _refuse_errors(
    answer: Callable[[Request], Awaitable[Response]],
) -> Callable[[Request], Awaitable[Response]]:
    """`answer`, with 409 for what is under way, and 404 for what is not there any more."""

    async def answer_or_refuse(request: Request) -> Response:
        try:
            return await answer(request)
        except BusyError as error:
            raise Refusal(409, str(error)) from error
        except GoneError as error:
            raise Refusal(404, str(error)) from error
        except MDPError as error:
            if isinstance(error, Refusal):
                raise
            # What an agent or a folder says is no fault of the gateway.
            raise Refusal(400, str(error)) from error

    return answer_or_refuse
