"""`mdp gateway` before real agents, asked over HTTP by clients that are not ours."""

import http.client
import io
import json
import os
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.request import urlopen

import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from mdp.formats.fleet_edit import FleetFile
from mdp.gateway.bodies import MAX_BODY_BYTES
from mdp.testing.agents import ANY_PORT
from mdp.testing.bundles import DEVICES, colour_picture, subset_accuracy, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from tests.support.fleet import PLENTY_MS, Fleet
from tests.support.pages import ROOT, blocks
from tests.support.web.gateway import IMPATIENT, Gateway, gateway, self_signed

FORM = "multipart/form-data; boundary=cut"
CLASSIFY = f"/v2/models/colours/classify?deadline_ms={PLENTY_MS:g}"
INFER = "/v2/models/colours/infer"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "seen").mkdir()
    (folder / "seen" / "red.png").write_bytes(png("red"))
    with Fleet(folder, write_bundle(folder / "bundle")) as fleet:
        for device in DEVICES:
            start(fleet, device)
        for device in DEVICES:
            fleet.agents[device].wait_for("READY")
        fleet.write()
        yield fleet


def start(fleet: Fleet, device: str, bind: str = ANY_PORT) -> None:
    """An agent that looks at red pictures."""
    fleet.start(device, "--source", f"folder:{fleet.folder / 'seen'}", bind=bind, wait_for=None)


@pytest.fixture(scope="module")
def served(fleet: Fleet) -> Iterator[Gateway]:
    with gateway("--fleet", fleet.folder / "fleet.toml") as found:
        everyone_is_there(found)
        yield found


def everyone_is_there(served: Gateway) -> None:
    def usable() -> bool:
        return all(device["usable"] for device in served.ask("/fleets").json[0]["devices"])

    until(usable, "every device can answer")


def png(label: str = "red") -> bytes:
    file = io.BytesIO()
    Image.fromarray(colour_picture(label)).save(file, "PNG")
    return file.getvalue()


def form(content: bytes) -> bytes:
    head = b'--cut\r\nContent-Disposition: form-data; name="picture"; filename="a.png"\r\n\r\n'
    return head + content + b"\r\n--cut--\r\n"


def test_what_the_server_and_its_model_say_of_themselves(served: Gateway) -> None:
    assert served.ask("/v2").json["extensions"] == ["binary_tensor_data"]
    assert served.ask("/v2/health/live").json == {"live": True}
    assert served.ask("/v2/health/ready").json == {"ready": True}
    model = served.ask("/v2/models/colours").json
    assert model["inputs"] == [{"name": "images", "datatype": "UINT8", "shape": [-1, -1, -1, 3]}]
    assert [output["shape"] for output in model["outputs"]] == [[-1, 3], [-1, 3], [-1]]
    assert served.ask("/v2/models/colours/ready").json == {"name": "colours", "ready": True}


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_program_for_node_that_is_shown(served: Gateway, tmp_path: Path) -> None:
    (program,) = blocks(ROOT / "docs/how-to/call.md", "js")
    (tmp_path / "classify.mjs").write_text(program)
    (tmp_path / "green.png").write_bytes(png("green"))
    done = subprocess.run(
        ["node", "classify.mjs", "green.png"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "MODEL": f"{served.url}/v2/models/colours"}, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == f"green {' + '.join(DEVICES)} complete\n", done.stderr


def test_a_batch_through_the_inference_protocol(served: Gateway) -> None:
    labels = ["red", "green", "blue"]
    pixels = b"".join(colour_picture(label).tobytes() for label in labels)
    images = {
        "name": "images",
        "datatype": "UINT8",
        "shape": [3, 40, 60, 3],
        "parameters": {"binary_data_size": len(pixels)},
    }
    head = json.dumps({"inputs": [images], "parameters": {"deadline_ms": PLENTY_MS}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}
    reply = served.ask(INFER, head + pixels, headers=headers)
    assert reply.status == 200, reply.body
    likeliest = reply.json["outputs"][1]["data"][::3]
    assert likeliest == labels
    assert reply.json["outputs"][2]["data"] == [", ".join(DEVICES)] * 3
    assert reply.json["parameters"]["degraded"] is False
    assert reply.json["parameters"]["expected_accuracy"] == subset_accuracy((0, 1, 2)).stacked


@pytest.mark.parametrize("kind", ["image/png", FORM])
def test_an_upload(served: Gateway, kind: str) -> None:
    content = form(png("green")) if kind == FORM else png("green")
    told = served.ask(CLASSIFY, content, headers={"Content-Type": kind}).json
    assert (told["label"], told["mode"], told["degraded"]) == ("green", "stacked", False)
    assert told["used"] == list(DEVICES)
    assert told["expected_accuracy"] == subset_accuracy((0, 1, 2)).stacked
    assert [each["label"] for each in told["members"]] == ["green"] * 3
    assert all(0.5 < each["probability"] <= 1 for each in told["members"])


def test_curl_uploads_a_picture(served: Gateway, tmp_path: Path) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    (tmp_path / "red.png").write_bytes(png())
    words = ["--silent", "--fail", "--form", f"picture=@{tmp_path / 'red.png'}"]
    done = subprocess.run(
        [curl, *words, served.url + CLASSIFY], capture_output=True, check=True, timeout=PATIENCE_S
    )
    assert json.loads(done.stdout)["label"] == "red"


@pytest.mark.parametrize(
    ("path", "content", "kind", "status", "said"),
    [
        ("/v2/models/dogs/infer", b"{}", "", 404, "unknown model 'dogs': expected one of colours"),
        ("/v2/nothing", None, "", 404, "Not Found"),
        (INFER, None, "", 405, "Method Not Allowed"),
        (INFER, b"{", "", 400, "inference request"),
        (CLASSIFY, b"", "", 400, "expected a picture, got an empty body"),
        (CLASSIFY, b"no picture", "", 400, "expected a picture"),
        (CLASSIFY, png()[:200], "", 400, "cannot be decoded"),
        (CLASSIFY, b"x", "multipart/form-data", 400, "multipart form"),
        (CLASSIFY, b"x" * 99, FORM, 400, "multipart form"),
        (CLASSIFY, form(png())[:100], FORM, 400, "multipart form"),
        (CLASSIFY, form(b""), FORM, 400, "expected one file with a picture"),
        (CLASSIFY, form(png())[:-4], FORM, 400, "multipart form: it breaks off"),
        (CLASSIFY, form(png())[:-9] + form(png()), FORM, 400, "got several"),
        (CLASSIFY.replace("=", "=-"), png(), "", 400, "deadline_ms: expected more than 0"),
        (CLASSIFY.replace("=", "=x"), png(), "", 400, "deadline_ms: expected a number"),
        (CLASSIFY.replace("=", "=9"), png(), "", 400, "deadline_ms: expected at most 60000"),
    ],
)
def test_bad_requests(
    served: Gateway, path: str, content: bytes | None, kind: str, status: int, said: str
) -> None:
    reply = served.ask(path, content, headers={"Content-Type": kind} if kind else {})
    assert reply.status == status
    assert reply.json.keys() == {"error"}
    assert said in reply.json["error"]


def test_a_body_that_is_too_large_is_not_waited_for(served: Gateway) -> None:
    for headers, content in (
        (f"Content-Length: {2 * 2**30}", b""),
        ("Transfer-Encoding: chunked", b"%x\r\n" % (2 * MAX_BODY_BYTES) + b"0" * MAX_BODY_BYTES),
    ):
        with served.connect() as client:
            client.sendall(f"POST {CLASSIFY} HTTP/1.1\r\nHost: {served.host}\r\n".encode())
            client.sendall(f"{headers}\r\n\r\n".encode() + content)
            client.sendall(b"0" * 9)
            assert client.recv(64).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("chunked", [False, True])
def test_who_sends_too_large_a_body_is_told_so(served: Gateway, chunked: bool) -> None:
    body = b"0" * (MAX_BODY_BYTES + 2**20)
    parts = (body[at : at + 2**20] for at in range(0, len(body), 2**20))
    with closing(http.client.HTTPConnection(served.host, timeout=PATIENCE_S)) as connection:
        # It sends all before it reads anything.
        connection.request("POST", CLASSIFY, parts if chunked else body, encode_chunked=chunked)
        response = connection.getresponse()
        assert response.status == 413
        assert b"expected a body of at most" in response.read()


def test_slow_clients_are_not_waited_for(fleet: Fleet) -> None:
    with gateway("--fleet", fleet.folder / "fleet.toml", program=IMPATIENT) as served:
        head = f"POST {CLASSIFY} HTTP/1.1\r\nHost: {served.host}\r\nContent-Length: 9\r\n\r\n"
        with served.connect() as silent, served.connect() as slow, served.connect() as stuck:
            stuck.sendall(head.encode() + b"1234")
            slow.sendall(head.encode()[:20])
            assert stuck.recv(64).startswith(b"HTTP/1.1 408 ")
            assert silent.recv(64) == b""
            assert slow.recv(64) == b""


def test_metrics_that_prometheus_reads(served: Gateway) -> None:
    served.ask(CLASSIFY, png())
    reply = served.ask("/metrics")
    families = {each.name: each for each in text_string_to_metric_families(reply.body.decode())}

    def value(name: str, sample: str = "", **labels: str) -> float:
        wanted = {"model": "colours"} | labels
        found = [each.value for each in families[name].samples if each.name == name + sample
                 and wanted.items() <= each.labels.items()]  # fmt: skip
        assert len(found) == 1, families[name]
        return found[0]

    assert value("mdp_requests", "_total", outcome="answered") >= 1
    assert value("mdp_answer_seconds", "_count") >= 1
    assert value("mdp_member_seconds", "_sum", device="alpha", part="compute") > 0
    assert value("mdp_device_up", device="alpha") == 1
    assert value("mdp_device", device="gamma", provider="CPUExecutionProvider", state="READY") == 1
    assert value("mdp_device_queue_depth", device="beta") >= 0
    assert value("mdp_device_requests", "_total", device="beta", outcome="answered") >= 1
    assert value("mdp_requests_under_way") == 0
    promtool = shutil.which("promtool")
    if promtool is not None:
        done = subprocess.run(
            [promtool, "check", "metrics"], input=reply.body, capture_output=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, b"")


def test_a_device_is_switched_off_and_on(served: Gateway) -> None:
    beta = "/v2/models/colours/devices/beta"
    everyone_is_there(served)
    told = served.ask(beta, b'{"in_use": false}', method="PUT").json
    assert told["expected_accuracy"] == subset_accuracy((0, 2)).stacked
    answer = served.ask(CLASSIFY, png()).json
    assert answer["missing"] == {"beta": "left out: by this client"}
    assert answer["expected_accuracy"] == subset_accuracy((0, 2)).stacked
    assert answer["degraded"]
    assert (
        served.ask("/v2/models/colours/devices/omega", b'{"in_use": true}', method="PUT").status
        == 404
    )
    for body in (b"", b"[]", b'{"in_use": 1}', b'{"on": true}'):
        assert served.ask(beta, body, method="PUT").status == 400
    served.ask("/v2/models/colours/devices/alpha", b'{"in_use": false}', method="PUT")
    last = served.ask("/v2/models/colours/devices/gamma", b'{"in_use": false}', method="PUT")
    assert (last.status, "last device" in last.json["error"]) == (409, True)
    for device in ("alpha", "beta"):
        served.ask(f"/v2/models/colours/devices/{device}", b'{"in_use": true}', method="PUT")
    assert served.ask(CLASSIFY, png()).json["used"] == list(DEVICES)


def test_without_agents_it_says_so_and_when_to_ask_again(fleet: Fleet, served: Gateway) -> None:
    fleet.agents["alpha"].kill()
    until(lambda: not served.ask("/fleets").json[0]["devices"][0]["usable"], "alpha is gone")
    for device, in_use, status in (
        ("beta", False, 200),
        ("gamma", False, 409),
        ("beta", True, 200),
    ):
        body = json.dumps({"in_use": in_use}).encode()
        reply = served.ask(f"/v2/models/colours/devices/{device}", body, method="PUT")
        assert reply.status == status, (device, reply.body)
        # A dead device is nobody's place.
        assert (status == 409) == ("the last device of colours that can answer" in str(reply.body))
    for device in DEVICES[1:]:
        fleet.agents[device].kill()
    reply = served.ask(CLASSIFY, png())
    assert (reply.status, reply.headers["retry-after"]) == (503, "1")
    assert "no device can answer" in reply.json["error"]
    until(lambda: served.ask("/v2/health/ready").status == 503, "the gateway is not ready")
    assert served.ask("/v2/health/live").status == 200
    for device in DEVICES:
        start(fleet, device, fleet.agents[device].address)
    everyone_is_there(served)
    assert served.ask(CLASSIFY, png()).json["used"] == list(DEVICES)
    faults = served.ask("/fleets").json[0]["faults"]
    assert {fault["device"] for fault in faults if fault["over"]} >= set(DEVICES)


def test_what_the_fleets_own_cameras_see(served: Gateway) -> None:
    told = served.ask(f"/v2/models/colours/look?deadline_ms={PLENTY_MS:g}").json
    assert (told["label"], told["used"]) == ("red", list(DEVICES))
    assert told["members"][0]["frame"] >= 1
    for wrong in ("every_ms=x", "every_ms=-1", "deadline_ms=0"):
        assert served.ask(f"/v2/models/colours/watch?{wrong}").status == 400
    with served.connect() as client:
        path = f"/v2/models/colours/watch?every_ms=50&deadline_ms={PLENTY_MS:g}"
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: {served.host}\r\n\r\n".encode())
        lines = client.makefile("rb")
        events = [line for line in (lines.readline() for _ in range(30)) if b"event: " in line]
        assert events[:2] == [b"event: answer\n"] * 2


def test_a_changed_fleet_file_is_read_again(fleet: Fleet, served: Gateway) -> None:
    file = fleet.folder / "fleet.toml"
    whole = file.read_text()

    def devices() -> list[str]:
        return [device["name"] for device in served.ask("/fleets").json[0]["devices"]]

    without = FleetFile.read(file).without("gamma")
    file.write_text("devices = [")
    file.write_text(without.text)
    until(lambda: devices() == list(DEVICES[:2]), "the file is read again")
    assert served.ask(CLASSIFY, png()).json["missing"] == {"gamma": "not in the fleet"}
    file.write_text(whole)
    until(lambda: devices() == list(DEVICES), "the file is read again")
    everyone_is_there(served)


def test_events_tell_what_changes(served: Gateway) -> None:
    with served.connect() as client:
        client.sendall(f"GET /events HTTP/1.1\r\nHost: {served.host}\r\n\r\n".encode())
        lines = client.makefile("rb")
        head = iter(lines.readline, b"\r\n")
        assert b"content-type: text/event-stream; charset=utf-8\r\n" in list(head)
        events = (json.loads(line[6:]) for line in lines if line.startswith(b"data: "))
        assert next(events)[0]["name"] == "colours"
        served.ask("/v2/models/colours/devices/beta", b'{"in_use": false}', method="PUT")
        while next(events)[0]["devices"][1]["in_use"]:
            pass
    served.ask("/v2/models/colours/devices/beta", b'{"in_use": true}', method="PUT")


def test_tokens_and_two_models_of_one_bundle(fleet: Fleet, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.touch(0o600)
    tokens.write_text("0123456789abcdef\n")
    file = fleet.folder / "fleet.toml"
    with gateway("--fleet", f"cats={file}", "--fleet", f"dogs={file}", "--tokens", tokens) as found:
        for wrong in ({}, {"Authorization": "Bearer fedcba9876543210"}):
            refused = found.ask("/v2/models/dogs", headers=wrong)
            assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
        right = {"Authorization": "Bearer 0123456789abcdef"}
        for model in ("cats", "dogs"):
            assert found.ask(f"/v2/models/{model}", headers=right).json["name"] == model
        page = found.ask("/")
        assert page.status == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]


def test_tls(fleet: Fleet, tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    trusted = ssl.create_default_context(cafile=str(certificate))
    options = ("--certificate", certificate, "--private-key", key)
    file = fleet.folder / "fleet.toml"
    with gateway("--fleet", file, *options, program=IMPATIENT) as found:
        # A handshake may take a second.
        with found.connect() as silent:
            with urlopen(f"{found.url}/v2", timeout=PATIENCE_S, context=trusted) as response:
                assert json.load(response)["name"] == "mdp"
            assert silent.recv(1) == b""
        with found.connect() as plain:
            plain.sendall(b"GET /v2 HTTP/1.1\r\n\r\n")
            assert b"HTTP" not in plain.recv(64)
        with urlopen(f"{found.url}/v2", timeout=PATIENCE_S, context=trusted) as response:
            assert json.load(response)["name"] == "mdp"
        assert found.url.startswith("https://")
        # Renewed files are served from the next connection on, once both are there.
        newer = self_signed(tmp_path / "renewed")
        trusts_newer = ssl.create_default_context(cafile=str(newer[0]))
        for from_, to, context in ((newer[0], certificate, trusted), (newer[1], key, trusts_newer)):
            from_.replace(to)
            with urlopen(f"{found.url}/v2", timeout=PATIENCE_S, context=context) as response:
                assert json.load(response)["name"] == "mdp"
