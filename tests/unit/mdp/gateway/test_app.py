"""The gateway's routes without sockets: requests as ASGI gives them, answers as told."""

import asyncio
import json
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mdp.client.status import DeviceStatus
from mdp.errors import DeadlineExceeded
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import Fleet, FleetEntry
from mdp.gateway import app as routes
from mdp.gateway import bodies, readers
from mdp.gateway.access import Tokens
from mdp.gateway.app import Gateway
from mdp.gateway.devices import Roll
from mdp.gateway.fleets import ServedFleet
from mdp.pictures.crop import Picture
from mdp.requests.prediction import MemberTiming, Prediction
from mdp.testing.bundles import DEVICES, write_bundle

ANSWER = Prediction(
    label="red",
    probability=1.0,
    top=(("red", 1.0), ("blue", 0.0)),
    mode="stacked",
    used=DEVICES[:2],
    missing={"gamma": "late"},
    expected_accuracy=0.5,
    latency_ms=30.0,
    deadline_ms=100.0,
    members=(MemberTiming(device="alpha", k=0, queue_ms=1.0, compute_ms=20.0, network_ms=4.0),),
)


class Told:
    """A fleet that answers, or raises, what it was told."""

    name = "colours"
    ready = True

    def __init__(self, folder: Path) -> None:
        self.bundle = Bundle.open(write_bundle(folder / "bundle"))
        entries = [
            FleetEntry(device=name, address=f"tcp://127.0.0.1:{9000 + k}", k=k)
            for k, name in enumerate(DEVICES)
        ]
        self.roll = Roll(Fleet(bundle="bundle", devices=entries), self.bundle, "stacked")
        alpha = DeviceStatus(
            device="alpha", address="", state="READY", queued=3, temperature_c=61.5
        )
        self.roll.on_statuses([alpha], 1.0)
        self.error: Exception | None = None
        self.deadlines_ms: list[float] = []
        self.maps: list[bool] = []

    async def classify(self, pictures: Sequence[Picture], deadline_ms: float) -> list[Prediction]:
        self.deadlines_ms.append(deadline_ms)
        if self.error is not None:
            raise self.error
        return [ANSWER] * len(pictures)

    async def look(self, deadline_ms: float, *, maps: bool = False) -> Prediction:
        self.maps.append(maps)
        (answer,) = await self.classify([b""], deadline_ms)
        return answer

    def snapshot(self) -> dict[str, Any]:
        return {"name": self.name, **self.roll.snapshot()}


class Stop:
    """Holds up the last part of bodies, and counts those that stand still."""

    def __init__(self) -> None:
        self.standing, self.over = 0, asyncio.Event()


class Web:
    """Requests to a gateway of one fleet."""

    def __init__(self, folder: Path) -> None:
        self.fleet = Told(folder)
        fleets = {"colours": cast(ServedFleet, self.fleet)}
        self.gateway = Gateway(fleets, 250.0)
        self.app = self.gateway.app(Tokens([]))

    def ask(
        self,
        path: str,
        *parts: bytes,
        method: str = "",
        until: Callable[[bytes], bool] = lambda body: False,
        **headers: str,
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body; `parts` of a body arrive one by one.

        The client leaves once `until` is true of the body.
        """
        return asyncio.run(self._ask(path, list(parts), method, until, headers))

    async def _ask(
        self,
        path: str,
        parts: list[bytes],
        method: str,
        until: Callable[[bytes], bool],
        headers: dict[str, str],
        client: str = "127.0.0.1",
        stop: "Stop | None" = None,
    ) -> tuple[int, dict[str, str], bytes]:
        path, _, query = path.partition("?")
        known = {"host": "localhost"} | {k.replace("_", "-"): v for k, v in headers.items()}
        scope = {
            "type": "http",
            "method": method or ("POST" if parts else "GET"),
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(k.encode(), v.encode()) for k, v in known.items()],
            "client": (client, 40000),
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }
        waiting, left, sent = list(parts), asyncio.Event(), [b""]
        head: dict[str, Any] = {}

        async def receive() -> dict[str, Any]:
            if waiting:
                if len(waiting) == 1 and stop is not None:
                    stop.standing += 1
                    await stop.over.wait()
                part = waiting.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(waiting)}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            head.update(message if message["type"] == "http.response.start" else {})
            sent[0] += message.get("body", b"")
            if until(sent[0]):
                left.set()

        await self.app(scope, receive, send)
        return head["status"], {k.decode(): v.decode() for k, v in head["headers"]}, sent[0]


@pytest.fixture
def web(tmp_path: Path) -> Web:
    return Web(tmp_path)


CLASSIFY = "/v2/models/colours/classify"
FORM = "multipart/form-data; boundary=cut"


def test_an_answer_that_lacks_a_device_is_degraded_and_counted(web: Web) -> None:
    status, headers, body = web.ask(CLASSIFY, b"some", b"thing")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert body.endswith(b"}\n"), "a line, for a terminal"
    told = json.loads(body)
    assert (told["degraded"], told["missing"]) == (True, {"gamma": "late"})
    assert web.fleet.deadlines_ms == [250.0]
    web.fleet.error = DeadlineExceeded("no answer within 250 ms", {"alpha": "slow: 3 of its 4"})
    status, headers, body = web.ask(CLASSIFY, b"picture")
    assert (status, headers["retry-after"], body[-2:]) == (503, "1", b"}\n")
    assert json.loads(body) == {"error": "no answer within 250 ms"}
    late, warm = dict.fromkeys(DEVICES, 0.0), []
    for family in text_string_to_metric_families(web.ask("/metrics")[2].decode()):
        for sample in family.samples:
            if sample.name == "mdp_member_late_total":
                late[sample.labels["device"]] = sample.value
            if sample.name == "mdp_device_temperature_celsius":
                assert (sample.labels["device"], sample.value) == ("alpha", 61.5)
                warm.append(sample.value)
            if sample.name == "mdp_requests_total":
                counted = sample.labels["outcome"] in ("degraded", "deadline")
                assert sample.value == counted, sample
            if sample.name == "mdp_answer_seconds_bucket":
                assert sample.value == (float(sample.labels["le"]) >= 0.03)
    assert warm == [61.5]
    assert late == {"alpha": 1.0, "beta": 0.0, "gamma": 1.0}


def test_what_nobody_foresaw_is_not_told(web: Web) -> None:
    web.fleet.error = ZeroDivisionError("secret")
    said: list[bytes] = []

    def hear(body: bytes) -> bool:
        said.append(body)
        return False

    with pytest.raises(ZeroDivisionError):  # for the server's log
        web.ask(CLASSIFY, b"picture", until=hear)
    assert json.loads(said[-1]) == {"error": "unforeseen error: the gateway's log says more"}


def test_large_bodies_are_held_together(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "MAX_BODY_BYTES", 8)
    assert web.ask(CLASSIFY, b"12345", b"6789")[0] == 413
    assert web.ask(CLASSIFY, b"1", content_length="9")[0] == 413
    assert web.ask(CLASSIFY, b"12345678")[0] == 200
    assert web.ask(CLASSIFY, b"x", content_encoding="gzip")[0] == 415
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", 14)
    web = Web(tmp_path / "other")
    assert web.ask(CLASSIFY, b"12345678")[0] == 503, "half is the most for one"
    # What was refused is let go.
    assert web.ask(CLASSIFY, b"1234567")[0] == 200


def test_an_upload_that_stops_leaves_for_one_that_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", 20)
    web = Web(tmp_path)

    async def asked() -> tuple[list[tuple[int, bytes]], int]:
        # The first holds as much as one may.
        stop = Stop()
        stuck = [
            asyncio.create_task(web._ask(CLASSIFY, [b"12345", b""], "", never, {}, who, stop))
            for who in ("10.0.0.1", "10.0.0.1", "10.0.0.2")
        ]
        while stop.standing < len(stuck):
            await asyncio.sleep(0)
        status, _, _ = await web._ask(CLASSIFY, [b"123", b"4567"], "", never, {}, "10.0.0.3")
        first = await stuck[0]
        assert [task.done() for task in stuck[1:]] == [False, False]
        stop.over.set()
        others = await asyncio.gather(*stuck[1:])
        return [(reply[0], reply[2]) for reply in (first, *others)], status

    def never(body: bytes) -> bool:
        return False

    replies, status = asyncio.run(asked())
    assert status == 200
    assert [reply[0] for reply in replies] == [408, 200, 200]
    assert b"does not stop while others wait" in replies[0][1]


def test_json_and_switches_are_small(web: Web) -> None:
    infer = "/v2/models/colours/infer"
    text = b" " * (bodies.MAX_JSON_BYTES + 1)
    assert web.ask(infer, content_length=str(len(text)), method="POST")[0] == 413
    status, _, body = web.ask(infer, text[:-1], b" ")
    assert (status, json.loads(body)["error"]) == (
        413, "expected JSON, which binary tensors may follow, of at most 2097152 bytes",
    )  # fmt: skip
    length = str(len(text))
    assert web.ask(infer, text, b" ", inference_header_content_length=length)[0] == 413
    # Binary tensors may be larger.
    images = {
        "name": "images", "shape": [1, 1000, 1000, 3], "datatype": "UINT8",
        "parameters": {"binary_data_size": 3_000_000},
    }  # fmt: skip
    head = json.dumps({"inputs": [images]}).encode()
    length, pixels = str(len(head)), bytes(3_000_000)
    assert web.ask(infer, head, pixels, inference_header_content_length=length)[0] == 200
    device = "/v2/models/colours/devices/alpha"
    switch = b'{"in_use": true}' + b" " * bodies.MAX_SWITCH_BYTES
    assert web.ask(device, switch, method="PUT")[0] == 413


def test_a_deadline_is_a_number(web: Web) -> None:
    images = {"name": "images", "shape": [1, 1, 1, 3], "datatype": "UINT8", "data": [1, 2, 3]}
    for given, status in ((True, 400), ("soon", 400), ([1], 400), (50, 200)):
        body = json.dumps({"inputs": [images], "parameters": {"deadline_ms": given}}).encode()
        assert web.ask("/v2/models/colours/infer", body)[0] == status, given
    assert web.fleet.deadlines_ms == [50.0]


def test_a_body_is_in_memory_once(web: Web) -> None:
    content = b"x" * 5_000_000
    head = b'--cut\r\nContent-Disposition: form-data; name="a"; filename="a"\r\n\r\n'
    kinds = {"image/png": content, FORM: head + content + b"\r\n--cut--\r\n"}
    for kind, body in kinds.items():
        tracemalloc.start()
        assert web.ask(CLASSIFY, body, content_type=kind)[0] == 200
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        # A growing buffer is an eighth larger than its content.
        assert most < 1.5 * len(content), kind


def test_a_body_that_does_not_come(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.0)
    assert web.ask(CLASSIFY, method="POST")[0] == 408


def test_streams_end_with_their_reader(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = web.ask("/events", until=lambda body: body.endswith(b"\n\n"))
    assert shown[2].startswith(b'event: fleets\ndata: [{"name":"colours"')
    watch = "/v2/models/colours/watch?every_ms=0"
    seen = web.ask(watch, until=lambda body: body.count(b"event: answer") > 1)
    assert seen[1]["content-type"].startswith("text/event-stream")
    web.fleet.error = DeadlineExceeded("no frame", {})
    seen = web.ask(watch, until=lambda body: body.endswith(b"\n\n"))
    assert seen[2] == b'event: error\ndata: {"error":"no frame"}\n\n'
    assert web.ask("/v2/models/colours/look")[0] == 503
    assert web.ask("/events", method="HEAD")[2] == b""


def test_a_look_may_ask_for_maps(web: Web) -> None:
    for query, maps in (("", False), ("?maps=0", False), ("?maps=1", True)):
        assert web.ask(f"/v2/models/colours/look{query}")[0] == 200
        assert web.fleet.maps[-1] is maps
        web.ask(f"/v2/models/colours/watch{query}", until=lambda body: body.endswith(b"\n\n"))
        assert web.fleet.maps[-1] is maps
    for path in ("look", "watch"):
        status, _, body = web.ask(f"/v2/models/colours/{path}?maps=yes")
        assert (status, body) == (400, b'{"error":"maps: expected 0 or 1, got \'yes\'"}\n')


def test_readers_of_events_are_few_of_one_caller(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_WATCHERS", 20)

    async def together(*clients: str) -> list[int]:
        asked = (web._ask("/events", [], "", bool, {}, client) for client in clients)
        return [reply[0] for reply in await asyncio.gather(*asked)]

    one = ["127.0.0.1"] * (readers.MAX_WATCHERS_OF_ONE + 1)
    assert asyncio.run(together(*one)) == [200] * readers.MAX_WATCHERS_OF_ONE + [503]
    many = [f"127.0.0.{n}" for n in range(11)]
    assert asyncio.run(together(*many, *many)) == [200] * 20 + [503] * 2


def test_nothing_streams_once_the_server_ends(web: Web) -> None:
    web.gateway.ending = lambda: True
    assert web.ask("/events")[2] == b""
    seen = iter((False, True))
    web.gateway.ending = lambda: next(seen, True)
    watch = web.ask("/v2/models/colours/watch?every_ms=1e9")
    assert watch[2].count(b"event: answer") == 1


def test_other_pages_and_hosts_are_kept_out(web: Web) -> None:
    for host in ("evil.example", "[", ""):
        assert web.ask("/fleets", host=host)[0] == 403
    assert web.ask(CLASSIFY, b"x", origin="http://evil.example")[0] == 403
    status, headers, body = web.ask("/page.js")
    assert (status, headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    assert headers["x-content-type-options"] == "nosniff"
    assert body
