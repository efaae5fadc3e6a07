"""The gateway's routes: HTTP in, calls to fleets, HTTP out."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib.resources import files
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mdp import __version__
from mdp.errors import MDPError
from mdp.gateway import infer
from mdp.gateway.access import Tokens, caller_of, check_request
from mdp.gateway.bodies import (
    MAX_BODY_BYTES,
    MAX_JSON_BYTES,
    MAX_SWITCH_BYTES,
    Bodies,
    parse_upload,
    too_large,
)
from mdp.gateway.fleets import IN_FLIGHT, MAX_REQUEST_MS, ServedFleet
from mdp.gateway.metrics import Metrics
from mdp.gateway.readers import QUIET_S, Readers
from mdp.gateway.refusals import Refusal, busy, refusal_of
from mdp.gateway.replies import json_response as _json
from mdp.gateway.teach import TeachRoutes
from mdp.gateway.workers import Workers
from mdp.pictures.crop import Picture
from mdp.requests.capture import DEFAULT_EVERY_MS, check_every_ms
from mdp.requests.deadline import check_deadline_ms
from mdp.requests.prediction import Prediction
from mdp.requests.reason import Suspicion
from mdp.teach.teacher import FleetTeacher
from mdp.tracing import server_span

#: Files of the package that are sent, and their types.
PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/common.js": ("common.js", "text/javascript; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
    "/openapi.json": ("openapi.json", "application/json"),
}
#: The same, where the gateway teaches.
TEACH_PAGE = {
    "/teach": ("teach.html", "text/html; charset=utf-8"),
    "/teach.css": ("teach.css", "text/css; charset=utf-8"),
    "/teach.js": ("teach.js", "text/javascript; charset=utf-8"),
}
#: The page loads nothing from, and sends nothing to, any other host.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
        "connect-src 'self'; media-src 'self' blob:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
#: Between two events at least.
EVENT_S = 0.25
#: Between two looks for a first bundle.
FIRST_S = 1.0
#: Between two looks of one reader at least.
LEAST_EVERY_MS = 50.0
_JSON = "JSON, which binary tensors may follow,"


class Guard:
    """Lets in what may be answered, and adds the headers that every answer has."""

    def __init__(self, app: ASGIApp, tokens: Tokens, teachers: Tokens | None = None) -> None:
        self.inside = app
        self._tokens, self._teachers = tokens, teachers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self.inside(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                known = {name for name, _ in message["headers"]}
                more = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
                message["headers"] += [(k, v) for k, v in more if k not in known]
            await send(message)

        headers, path = Headers(scope=scope), scope["path"]
        host, _ = scope.get("client") or ("127.0.0.1", 0)
        state = scope.setdefault("state", {})
        try:
            scheme = scope.get("scheme", "http")
            check_request(scope["method"], path, headers, self._tokens, scheme, self._teachers)
            state["caller"] = caller = caller_of(path, headers, self._tokens, host, self._teachers)
            # The connection's own, where a server has set it.
            admit = state.get("admit", lambda caller: True)
            if caller and not admit(caller):
                raise Refusal(
                    503, "too many connections", busy("").headers | {"connection": "close"}
                )
        except Refusal as refusal:
            await error_response(refusal)(scope, receive, with_headers)
        else:
            await self.inside(scope, receive, with_headers)


def error_response(refusal: Refusal) -> Response:
    """The protocol's shape of an error."""
    return _json({"error": str(refusal)}, refusal.status, refusal.headers)


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MDPError)
    return error_response(refusal_of(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"error": error.detail}, error.status_code, error.headers)


async def _on_unforeseen(request: Request, error: Exception) -> Response:
    # What it was goes to the log.
    return _json({"error": "unforeseen error: the gateway's log says more"}, 500)


def _file(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = files("mdp.gateway").joinpath("page", name).read_bytes()

    async def send(request: Request) -> Response:
        return Response(content, headers={"content-type": kind})

    return send


@contextmanager
def _count_request(metrics: Metrics, model: str, request: Request) -> Iterator[None]:
    """Count and trace a request for `model`; a failed one by its reason."""
    what, header = request.url.path.rpartition("/")[2], request.headers.get("traceparent", "")
    metrics.begin_request(model)
    try:
        with server_span(f"{request.method} {what}", header, {"mdp.model": model}):
            yield
    except MDPError as error:
        metrics.count_failure(model, error)
        raise
    finally:
        metrics.end_request(model)


class Gateway:
    """Everything that the routes share."""

    def __init__(
        self,
        fleets: Mapping[str, ServedFleet],
        deadline_ms: float,
        teacher: FleetTeacher | None = None,
        first: Callable[[], ServedFleet] | None = None,
        workers: Workers | None = None,
    ) -> None:
        """Serve `fleets`, by their models' names, with `deadline_ms` for a picture.

        With a `teacher`, the page teaches the only fleet. Where that has no bundle yet it is opened
        by `first`, which raises MDPError as long as that is so. `workers` answer the pictures.
        """
        self._fleets = dict(fleets)
        self._teacher, self._first = teacher, first
        if teacher is not None:
            teacher.suspected = self._suspicions
        self._deadline_ms = deadline_ms
        self._workers = workers
        for fleet in self._fleets.values() if workers is not None else ():
            fleet.workers = workers
        # What workers are handed is there twice.
        self._bodies = Bodies(copies=1 if workers is None else 2)
        self._reading = asyncio.Lock()
        self._metrics = Metrics(self._fleets, workers)
        #: Set, and replaced, whenever something changes that the page shows.
        self._changed = asyncio.Event()
        self._readers = Readers()
        #: Whether the server is ending, which streams of events would hold up.
        self.ending: Callable[[], bool] = lambda: False
        #: Why it cannot serve, found as it began.
        self.failure: MDPError | None = None
        #: Ends the server.
        self.end: Callable[[], None] = lambda: None

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Watch the fleets as long as the server runs."""
        if self._workers is not None:
            try:
                await self._workers.open()
            except MDPError as error:
                self.failure = error
                self.end()
        for fleet in self._fleets.values():
            fleet.changed = self._wake
        watches = [asyncio.create_task(fleet.watch()) for fleet in self._fleets.values()]
        if self._teacher is not None:
            watches.append(asyncio.create_task(self._teacher.watch()))
        if self._first is not None:
            watches.append(asyncio.create_task(self._watch_first(self._first)))
        try:
            yield
        finally:
            if self._teacher is not None:
                await self._teacher.close()
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            for fleet in self._fleets.values():
                fleet.close()
            if self._workers is not None:
                await self._workers.aclose()

    async def _watch_first(self, first: Callable[[], ServedFleet]) -> None:
        """Serve a fleet as soon as it has a bundle."""
        while True:
            # Its files may be half there: they are being written.
            with suppress(MDPError, OSError):
                fleet = first()
                break
            await asyncio.sleep(FIRST_S)
        fleet.changed = self._wake
        self._fleets[fleet.name] = fleet
        self._metrics.add(fleet.name, fleet)
        self._wake()
        await fleet.watch()

    def _suspicions(self) -> dict[str, Suspicion]:
        """Devices whose cameras are suspected now."""
        devices = (one for fleet in self._fleets.values() for one in fleet.roll.devices.values())
        return {one.name: one.suspect for one in devices if one.suspect is not None}

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def app(self, tokens: Tokens, teachers: Tokens | None = None) -> Guard:
        """The ASGI application; `teachers` may also teach."""
        model = "/v2/models/{model}"
        routes = [
            Route("/v2", self.server),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            Route(model, self.model),
            Route(f"{model}/ready", self.model_ready),
            Route(f"{model}/infer", self.infer, methods=["POST"]),
            Route(f"{model}/classify", self.classify, methods=["POST"]),
            Route(f"{model}/devices/{{device:path}}", self.switch, methods=["PUT"]),
            Route(f"{model}/look", self.look),
            Route(f"{model}/watch", self.watch),
            Route("/fleets", self.snapshot),
            Route("/events", self.events),
            Route("/metrics", self.metrics),
            *(Route(path, _file(name, kind)) for path, (name, kind) in PAGE.items()),
        ]
        if self._teacher is not None:
            teaching = TeachRoutes(
                self._teacher, self._bodies, self._readers.stream, lambda: self.ending()
            )
            routes += teaching.routes()
            routes += [Route(path, _file(name, kind)) for path, (name, kind) in TEACH_PAGE.items()]
        handlers: Any = {
            MDPError: _on_error,
            HTTPException: _on_http_error,
            Exception: _on_unforeseen,
        }
        app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self.lifespan)
        app.router.redirect_slashes = False
        return Guard(app, tokens, teachers)

    def _fleet(self, request: Request) -> ServedFleet:
        name = request.path_params["model"]
        fleet = self._fleets.get(name)
        if fleet is None:
            known = ", ".join(self._fleets)
            raise Refusal(404, f"unknown model {name[:60]!r}: expected one of {known}")
        return fleet

    # The Open Inference Protocol.

    async def server(self, request: Request) -> Response:
        """Name, version and extensions."""
        return _json({"name": "mdp", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def live(self, request: Request) -> Response:
        """Tell whether the gateway runs."""
        return _json({"live": True})

    async def ready(self, request: Request) -> Response:
        """Tell whether a device of every fleet can answer."""
        ready = bool(self._fleets) and all(fleet.ready for fleet in self._fleets.values())
        return _json({"ready": ready}, 200 if ready else 503)

    async def model(self, request: Request) -> Response:
        """A model's inputs and outputs."""
        fleet = self._fleet(request)
        return _json(infer.metadata(fleet.name, len(fleet.bundle.manifest.labels)))

    async def model_ready(self, request: Request) -> Response:
        """Tell whether a device of this fleet can answer."""
        fleet = self._fleet(request)
        return _json({"name": fleet.name, "ready": fleet.ready}, 200 if fleet.ready else 503)

    async def infer(self, request: Request) -> Response:
        """Pictures as a tensor in, probabilities and labels out."""
        fleet = self._fleet(request)
        with _count_request(self._metrics, fleet.name, request):
            length = request.headers.get(infer.JSON_LENGTH)
            most = (MAX_JSON_BYTES, _JSON) if length is None else (MAX_BODY_BYTES, "a body")
            async with self._bodies.hold(request, *most) as body:
                if infer.json_bytes(body, length) > MAX_JSON_BYTES:
                    raise too_large(_JSON, MAX_JSON_BYTES)
                if infer.is_quick(body, length):
                    asked = infer.read_request(body, length)
                else:
                    # Numbers take many times their text: one such request at a time.
                    async with self._reading:
                        asked = await asyncio.to_thread(infer.read_request, body, length)
                deadline_ms = self._check_deadline(asked.deadline_ms, len(asked.pictures))
                answers = await self._answers(fleet, list(asked.pictures), deadline_ms)
        content, json_length = infer.respond(fleet.name, asked, answers)
        if json_length is None:
            return Response(content, media_type="application/json")
        headers = {infer.JSON_LENGTH: str(json_length)}
        return Response(content, headers=headers, media_type="application/octet-stream")

    # What the protocol does not have.

    async def classify(self, request: Request) -> Response:
        """One picture as a file in; the answer, its parts and its worth out."""
        fleet = self._fleet(request)
        with _count_request(self._metrics, fleet.name, request):
            deadline_ms = self._check_deadline(request.query_params.get("deadline_ms"))
            async with self._bodies.hold(request, MAX_BODY_BYTES) as body:
                picture = parse_upload(request.headers.get("content-type", ""), body)
                (answer,) = await self._answers(fleet, [picture], deadline_ms)
        return _json(infer.to_json(fleet.name, answer))

    async def _answers(
        self, fleet: ServedFleet, pictures: Sequence[Picture], deadline_ms: float
    ) -> list[Prediction]:
        answers = await fleet.classify(pictures, deadline_ms)
        self._metrics.count_answers(fleet.name, answers)
        return answers

    def _check_deadline(self, deadline_ms: Any, pictures: int = 1) -> float:
        """A request's deadline, or this gateway's, for each of `pictures`; raises Refusal."""
        try:
            if isinstance(deadline_ms, bool):
                raise ValueError
            wanted = float(self._deadline_ms if deadline_ms is None else deadline_ms)
        except (TypeError, ValueError, OverflowError) as error:
            raise Refusal(
                400, f"deadline_ms: expected a number, got {str(deadline_ms)[:20]!r}"
            ) from error
        check_deadline_ms(wanted)
        most = MAX_REQUEST_MS / math.ceil(pictures / IN_FLIGHT)
        if wanted > most:
            raise Refusal(400, f"deadline_ms: expected at most {most:g}, got {wanted:g}")
        return wanted

    async def look(self, request: Request) -> Response:
        """Classify what the devices' own cameras see."""
        fleet = self._fleet(request)
        deadline_ms = self._check_deadline(request.query_params.get("deadline_ms"))
        return _json(await self._look(request, fleet, deadline_ms, maps=_wants_maps(request)))

    async def _look(
        self, request: Request, fleet: ServedFleet, deadline_ms: float, *, maps: bool = False
    ) -> dict[str, Any]:
        with _count_request(self._metrics, fleet.name, request):
            answer = await fleet.look(deadline_ms, maps=maps)
            self._metrics.count_answers(fleet.name, [answer])
        return infer.to_json(fleet.name, answer)

    async def watch(self, request: Request) -> Response:
        """The same as server-sent events, one every `every_ms`, until the client leaves."""
        fleet = self._fleet(request)
        deadline_ms = self._check_deadline(request.query_params.get("deadline_ms"))
        maps = _wants_maps(request)
        every = request.query_params.get("every_ms", str(DEFAULT_EVERY_MS))
        try:
            every_s = max(check_every_ms(float(every)), LEAST_EVERY_MS) / 1e3
        except ValueError as error:
            raise Refusal(400, f"every_ms: expected a number, got {every[:20]!r}") from error

        async def answers() -> AsyncIterator[bytes]:
            loop = asyncio.get_running_loop()
            while not self.ending():
                started_s = loop.time()
                try:
                    told = await self._look(request, fleet, deadline_ms, maps=maps)
                    kind = b"answer"
                except MDPError as error:
                    kind, told = b"error", {"error": str(error)}
                yield b"event: " + kind + b"\ndata: " + msgspec.json.encode(told) + b"\n\n"
                # Looks around now and then whether the server is ending.
                while not self.ending() and (left_s := started_s + every_s - loop.time()) > 0:
                    await asyncio.sleep(min(left_s, 1.0))

        return self._readers.stream(request, answers())

    async def switch(self, request: Request) -> Response:
        """Take a device out of this gateway's calls, or put it back: `{"in_use": false}`."""
        fleet = self._fleet(request)
        async with self._bodies.hold(request, MAX_SWITCH_BYTES) as body:
            try:
                wanted = msgspec.json.decode(body, type=dict[str, bool])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise Refusal(400, f'expected {{"in_use": true}} or false: {error}') from error
        if wanted.keys() != {"in_use"}:
            raise Refusal(400, 'expected {"in_use": true} or false')
        fleet.switch(request.path_params["device"], wanted["in_use"])
        return _json(self._snapshot_of(fleet))

    async def snapshot(self, request: Request) -> Response:
        """Every fleet's devices and faults: one event of `/events`."""
        return _json(self._snapshots())

    def _snapshots(self) -> list[dict[str, Any]]:
        return [self._snapshot_of(fleet) for fleet in self._fleets.values()]

    def _snapshot_of(self, fleet: ServedFleet) -> dict[str, Any]:
        return {**fleet.snapshot(), "teaches": self._teacher is not None}

    async def events(self, request: Request) -> Response:
        """Server-sent events: `/fleets` again whenever something in it changes."""
        return self._readers.stream(request, self._changes())

    async def _changes(self) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        last, sent_s = b"", loop.time()
        while not self.ending():
            changed = self._changed
            content = msgspec.json.encode(self._snapshots())
            if content != last:
                yield b"event: fleets\ndata: " + content + b"\n\n"
                last, sent_s = content, loop.time()
            elif loop.time() - sent_s > QUIET_S:
                yield b":\n\n"
                sent_s = loop.time()
            await asyncio.sleep(EVENT_S)
            # Looks around now and then whether the server is ending.
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await changed.wait()

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        content, content_type = self._metrics.exposition(request.headers.get("accept", ""))
        return Response(content, headers={"content-type": content_type})


def _wants_maps(request: Request) -> bool:
    """Tell whether a look is asked for maps of anomaly heads; raises Refusal."""
    wanted = request.query_params.get("maps", "0")
    if wanted not in ("0", "1"):
        raise Refusal(400, f"maps: expected 0 or 1, got {wanted[:20]!r}")
    return wanted == "1"
