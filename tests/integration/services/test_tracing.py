"""One trace through a gateway's process and an agent's, with OpenTelemetry's in-memory exporter."""

import io
import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from mdp.testing.bundles import DEVICES, colour_picture, write_bundle
from mdp.testing.processes import until
from tests.support.fleet import PLENTY_MS, ROOT, Fleet
from tests.support.web.gateway import gateway

TRACED = (sys.executable, ROOT / "tests/support/web/traced.py")
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_spans_of_gateway_client_and_agent_are_of_the_callers_trace(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(colour_picture("red")).save(file, "PNG")
    with Fleet(tmp_path, write_bundle(tmp_path / "bundle")) as fleet:
        program = [*map(str, TRACED), str(tmp_path / "agent.json"), "mdp-agent", "run", "--json"]
        fleet.start("alpha", program=program)
        fleet.start_all("beta")
        gamma = fleet.start("gamma")
        path = fleet.write()
        told = (*TRACED, tmp_path / "gateway.json", "mdp")
        with gateway("--fleet", path, program=told) as served:
            until(lambda: len(_ask(served, file)["used"]) == len(DEVICES), "all answer")
            gamma.kill()
            header = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
            answer = _ask(served, file, header)
            served.end()
        assert answer["used"] == ["alpha", "beta"]
        fleet.agents["alpha"].terminate()

    spans = {
        (each["name"], each["attributes"].get("mdp.device")): each
        for each in json.loads((tmp_path / "gateway.json").read_text())
        if each["context"]["trace_id"] == f"0x{TRACE}"
    }

    def parent(name: str, device: str | None = None) -> str:
        return str(spans[name, device]["parent_id"])

    def own(name: str, device: str | None = None) -> str:
        return str(spans[name, device]["context"]["span_id"])

    assert spans.keys() == {
        ("POST classify", None),
        ("mdp call", None),
        ("mdp member 0", "alpha"),
        ("mdp member 1", "beta"),
    }
    assert parent("POST classify") == f"0x{CALLER}"
    assert parent("mdp call") == own("POST classify")
    assert parent("mdp member 0", "alpha") == own("mdp call")
    assert spans["mdp call", None]["attributes"]["mdp.missing"] == ["gamma"]
    remote = [
        each
        for each in json.loads((tmp_path / "agent.json").read_text())
        if each["context"]["trace_id"] == f"0x{TRACE}"
    ]
    assert [each["name"] for each in remote] == ["mdp queue", "mdp compute"]
    assert {each["parent_id"] for each in remote} == {own("mdp member 0", "alpha")}
    assert remote[0]["end_time"] == remote[1]["start_time"] <= remote[1]["end_time"]


def test_a_trace_goes_on_through_a_worker_of_a_gateway(tmp_path: Path) -> None:
    file = io.BytesIO()
    Image.fromarray(colour_picture("red")).save(file, "PNG")
    with Fleet(tmp_path, write_bundle(tmp_path / "bundle")) as fleet:
        program = [*map(str, TRACED), str(tmp_path / "agent.json"), "mdp-agent", "run", "--json"]
        fleet.start("alpha", program=program)
        fleet.start_all("beta", "gamma")
        with gateway("--fleet", fleet.write(), "--workers", 2) as served:
            until(lambda: len(_ask(served, file)["used"]) == len(DEVICES), "all answer")
            _ask(served, file, {"traceparent": f"00-{TRACE}-{CALLER}-01"})
        fleet.agents["alpha"].terminate()
    found = [
        (each["name"], each["parent_id"])
        for each in json.loads((tmp_path / "agent.json").read_text())
        if each["context"]["trace_id"] == f"0x{TRACE}"
    ]
    # Without spans of its own, the gateway hands the caller's on.
    assert found == [("mdp queue", f"0x{CALLER}"), ("mdp compute", f"0x{CALLER}")]


def _ask(served: Any, file: io.BytesIO, headers: dict[str, str] | None = None) -> Any:
    path = f"/v2/models/colours/classify?deadline_ms={PLENTY_MS:g}"
    return served.ask(path, file.getvalue(), headers=headers or {}).json
