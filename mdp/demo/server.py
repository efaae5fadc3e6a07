"""The live demo's page, served to this machine alone."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib.resources import files
from socket import socket
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from mdp.demo.ending import exit_by_sigterm
from mdp.demo.live import LiveDemo
from mdp.errors import InputError
from mdp.gateway.access import Tokens
from mdp.gateway.app import Guard
from mdp.gateway.server import listen_on

#: File of the page -> its type.
PAGE = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}
#: Bytes of a request's body, at most.
_MAX_BODY_BYTES = 1000
#: Where the page is, unless another program is there.
FIRST_PORT = 8090


class Change(msgspec.Struct, forbid_unknown_fields=True):
    """A press of one of the page's buttons."""

    do: str
    device: str = ""
    on: bool = True


def demo_app(live: LiveDemo, devices: frozenset[str]) -> ASGIApp:
    """The page, what it shows, and what its buttons do."""

    async def state(request: Request) -> Response:
        return _json(live.snapshot())

    async def picture(request: Request) -> Response:
        try:
            content = live.picture(request.path_params["device"])
        except KeyError:
            return _json({"error": "no such device"}, 404)
        return Response(content, media_type="image/jpeg")

    async def change(request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_BODY_BYTES:
                return _json({"error": f"expected at most {_MAX_BODY_BYTES} bytes"}, 413)
        try:
            wanted = msgspec.json.decode(body, type=Change)
        except msgspec.DecodeError as error:
            return _json({"error": str(error)}, 400)
        if wanted.do != "something else" and wanted.device not in devices:
            return _json({"error": f"expected a device, one of {', '.join(sorted(devices))}"}, 400)
        match wanted.do:
            case "cover":
                live.cover(wanted.device, wanted.on)
            case "plug":
                # An agent takes a second to start.
                await asyncio.to_thread(live.plug, wanted.device, wanted.on)
            case "something else":
                live.show_something_else()
            case _:
                return _json({"error": "expected `do`: cover, plug or something else"}, 400)
        return _json(live.snapshot())

    routes = [Route(f"/{name}", _file(name, kind)) for name, kind in PAGE.items()]
    routes += [
        Route("/", _file("index.html", PAGE["index.html"])),
        Route("/state", state),
        Route("/picture/{device}", picture),
        Route("/change", change, methods=["POST"]),
    ]
    return Guard(Starlette(routes=routes), Tokens([]))


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _file(name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
    content = files("mdp.demo").joinpath("page", name).read_bytes()

    async def send(request: Request) -> Response:
        return Response(content, headers={"content-type": kind})

    return send


def place_of_page(port: int | None) -> socket:
    """A socket that listens for the page, on this machine alone.

    Without a `port` it is `FIRST_PORT`, or where that is taken any free one. Raises InputError for
    a port that is taken.
    """
    if port is None:
        with suppress(InputError):
            return listen_on(f"127.0.0.1:{FIRST_PORT}")
    return listen_on(f"127.0.0.1:{port or 0}", option="--port")


def serve_live(
    live: LiveDemo, devices: frozenset[str], place: socket, started: Callable[[str], None]
) -> None:
    """Serve the page at `place` until SIGINT or SIGTERM; `started` is told its address."""
    config: Any = uvicorn.Config(
        demo_app(live, devices),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    server, ending = uvicorn.Server(config), threading.Event()
    running = threading.Thread(target=live.run, args=(ending,), name="demo")
    # uvicorn ends in order, and then has the signal do what it did before.
    exit_by_sigterm(0)
    with place:
        started(f"http://127.0.0.1:{place.getsockname()[1]}")
        running.start()
        try:
            server.run(sockets=[place])
        finally:
            ending.set()
            running.join()
