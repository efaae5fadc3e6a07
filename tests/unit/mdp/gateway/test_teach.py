"""The picture of one camera, as the page that teaches asks for it, without sockets."""

import asyncio
from typing import cast

import pytest
from starlette.requests import Request

from mdp.client.scenes import Scene
from mdp.gateway.bodies import Bodies
from mdp.gateway.refusals import Refusal
from mdp.gateway.teach import TeachRoutes
from mdp.teach.teacher import FleetTeacher


class Room:
    """A teacher's two cameras, of which one gives a picture."""

    devices = ("n100", "laptop-cpu")
    changed = None

    async def preview(self) -> Scene:
        return Scene(pictures={"n100": b"jpeg"}, missing={"laptop-cpu": "restarting"})


def ask_for_picture(device: str) -> tuple[int, bytes]:
    routes = TeachRoutes(
        cast(FleetTeacher, Room()), Bodies(), lambda request, events: NotImplemented, lambda: False
    )
    scope = {"type": "http", "method": "GET", "path_params": {"device": device}}
    response = asyncio.run(routes.picture(Request(scope)))
    return response.status_code, bytes(response.body)


def test_a_camera_with_a_picture() -> None:
    assert ask_for_picture("n100") == (200, b"jpeg")


def test_a_camera_without_one_at_the_moment_is_no_error() -> None:
    assert ask_for_picture("laptop-cpu") == (204, b"")


def test_a_camera_that_does_not_exist() -> None:
    with pytest.raises(Refusal, match="no device 'attic': expected one of n100, laptop-cpu") as got:
        ask_for_picture("attic")
    assert got.value.status == 404
