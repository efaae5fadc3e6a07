"""The description of the gateway is of the gateway that there is."""

import json
import re
from importlib.resources import files
from types import SimpleNamespace
from typing import Any, cast

from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from mdp.gateway.access import Tokens
from mdp.gateway.app import PAGE, Gateway
from mdp.gateway.bodies import Bodies
from mdp.gateway.infer import OUTPUTS
from mdp.gateway.teach import TeachRoutes
from mdp.requests.prediction import Prediction
from mdp.teach.teacher import FleetTeacher

DESCRIBED: dict[str, Any] = json.loads(
    files("mdp.gateway").joinpath("page", "openapi.json").read_bytes()
)


def test_every_route_is_described_and_no_other() -> None:
    app = Gateway({}, 1000.0).app(Tokens([])).inside
    assert isinstance(app, Starlette)
    teacher = cast(FleetTeacher, SimpleNamespace())
    teaching = TeachRoutes(teacher, Bodies(), lambda request, events: Response(), lambda: False)
    routes = {
        (re.sub(r":path}", "}", route.path), method.lower())
        for route in (*app.routes, *teaching.routes())
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    page = {(path, "get") for path in PAGE if not path.endswith(".json")}
    described = {
        (path, method)
        for path, item in DESCRIBED["paths"].items()
        for method in item
        if method != "parameters"
    }
    assert routes - page == described


def test_every_reference_leads_somewhere() -> None:
    names = re.findall(r'"\$ref": "#/components/(\w+)/(\w+)"', json.dumps(DESCRIBED))
    assert len(names) > 10
    for kind, name in names:
        assert name in DESCRIBED["components"][kind]


def test_answers_have_the_keys_that_are_described() -> None:
    answer = DESCRIBED["components"]["schemas"]["Answer"]
    own = {"model", "degraded"}
    assert set(answer["properties"]) - own <= set(Prediction.__struct_fields__)
    request = DESCRIBED["components"]["schemas"]["InferRequest"]
    wanted = request["properties"]["outputs"]["items"]["properties"]["name"]["enum"]
    assert wanted == list(OUTPUTS)
