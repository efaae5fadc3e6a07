"""Trace contexts that are passed on, and what a program without OpenTelemetry does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mdp import tracing
from mdp.errors import InputError
from mdp.testing.bundles import DEVICES, write_bundle
from mdp.tracing import (
    EXPORTER,
    begin_call,
    continuing,
    current_traceparent,
    read_traceparent,
    server_span,
    set_up,
    trace_id,
)
from tests.support.exchanges import Desk

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADER = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("header", "read"),
    [
        (HEADER, HEADER),
        (f"{HEADER[:-1]}0", f"{HEADER[:-1]}0"),
        # Of a later version: its first four fields are as today's.
        (f"cc{HEADER[2:]}", HEADER),
        (f"cc{HEADER[2:]}-what-the-future-brings", HEADER),
        (f"{HEADER}-more", ""),
        (f"ff{HEADER[2:]}", ""),
        (HEADER.upper(), ""),
        (f"00-{'0' * 32}-{SPAN}-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (HEADER[:-1], ""),
        ("\n", ""),
        ("", ""),
    ],
)
def test_headers_as_the_recommendation_has_them(header: str, read: str) -> None:
    assert read_traceparent(header) == read


def test_only_sampled_traces_are_logged() -> None:
    assert trace_id(HEADER) == TRACE
    assert trace_id(f"{HEADER[:-2]}00") == trace_id("") == ""


def test_a_context_goes_on_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)
    assert current_traceparent() == ""
    with server_span("POST classify", HEADER, {}):
        handed_over = current_traceparent()
    with continuing(handed_over):
        trace = begin_call(100.0)
        assert trace is not None
        assert trace.begin_request("alpha", 0) == HEADER
    assert current_traceparent() == ""


def test_context_without_opentelemetry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "opentelemetry.trace", raising=False)
    desk = Desk(write_bundle(tmp_path / "bundle"), [(name, k) for k, name in enumerate(DEVICES)])
    with server_span("POST classify", HEADER, {}):
        desk.submit()
    desk.submit()
    carried = [infer.traceparent for _, infer in desk.take_asked()]
    assert carried == [HEADER] * 3 + [""] * 3
    assert begin_call(1.0) is None


def test_nothing_is_imported_by_a_client_or_an_agent() -> None:
    code = "import sys, mdp, devices.build, mdp.tracing as t; t.set_up('x');"
    code += "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    environment = {"OTEL_TRACES_EXPORTER": "none"}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    )


def test_a_program_ends_though_its_exporter_hangs() -> None:
    pytest.importorskip("opentelemetry.sdk")
    program = """
import threading
from opentelemetry import trace
from opentelemetry.sdk.trace.export import ConsoleSpanExporter
from mdp import tracing
tracing.LEAVE_S = 0.1
ConsoleSpanExporter.export = lambda self, spans: threading.Event().wait()
tracing.set_up("x")
with tracing.server_span("y", "", {}): pass
"""
    command = [sys.executable, "-c", program]
    # OpenTelemetry itself would wait for 30 s.
    subprocess.run(command, env={**os.environ, EXPORTER: "console"}, check=True, timeout=25)


def test_an_exporter_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXPORTER, "carrier-pigeon")
    with pytest.raises(InputError, match=r"carrier-pigeon: expected none, .*console"):
        set_up("mdp-gateway")
    monkeypatch.setattr(tracing, "missing", lambda modules: "opentelemetry")
    with pytest.raises(
        InputError, match=r"opentelemetry is not installed: pip install '\.\[tracing"
    ):
        set_up("mdp-gateway")
