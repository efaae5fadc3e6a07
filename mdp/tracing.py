"""W3C trace context from a caller to the agents, and OpenTelemetry spans where a program has them.

A trace context is a `traceparent` of version 00 (https://www.w3.org/TR/trace-context/). It is
passed on without OpenTelemetry too. Nothing here imports OpenTelemetry but `set_up`: spans are made
in a program that has imported `opentelemetry.trace`, by its tracer provider.
"""

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from mdp.errors import InputError
from mdp.extras import TRACING, install, missing

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

_HEADER = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2})(-.*)?"
)
#: What `set_up` reads, as OpenTelemetry names it. Nothing is exported unless it is set.
EXPORTER = "OTEL_TRACES_EXPORTER"
#: How long a program that ends waits for its last spans; OpenTelemetry's own limit is 30 s.
LEAVE_S = 2.0
#: The trace context that calls of this task or thread belong to; empty without one.
_caller: ContextVar[str] = ContextVar("traceparent", default="")


def read_traceparent(header: str) -> str:
    """A `traceparent` of version 00 from a header of any version; empty if it is not valid."""
    found = _HEADER.fullmatch(header)
    if found is None or (found[1] == "00" and found[3]):
        return ""
    return f"00-{found[2]}"


def trace_id(traceparent: str) -> str:
    """The trace's id, if the trace is sampled; else empty."""
    return traceparent[3:35] if traceparent and int(traceparent[-2:], 16) & 1 else ""


def set_up(service: str, **resource: str) -> None:
    """Export this program's spans as `OTEL_TRACES_EXPORTER` names it; nothing where it is unset.

    `service` is the default of OTEL_SERVICE_NAME. Raises InputError for an exporter that is not
    installed.
    """
    wanted = os.environ.get(EXPORTER, "none")
    if wanted in ("", "none"):
        return
    if module := missing(TRACING):
        raise InputError(f"{EXPORTER}={wanted}: {module} is not installed: {install('tracing')}")
    # It takes a fiftieth of a second, which no other command needs.
    from importlib.metadata import entry_points

    found = entry_points(group="opentelemetry_traces_exporter")
    if wanted not in found.names:
        known = ", ".join(sorted(found.names))
        raise InputError(
            f"{EXPORTER}={wanted}: expected none, {known} or that of another installed package, "
            "such as otlp of opentelemetry-exporter-otlp"
        )
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", service)
    resources = Resource.create({"service.name": name, **resource})
    provider = TracerProvider(resource=resources, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(found[wanted].load()()))
    trace.set_tracer_provider(provider)
    _at_exit(provider.shutdown)


def _at_exit(shut_down: Callable[[], None]) -> None:
    over = threading.Event()

    def last() -> None:
        over.wait()
        shut_down()

    # Begun now, as an interpreter that ends may begin none; left behind if the exporter hangs.
    thread = threading.Thread(target=last, name="last spans", daemon=True)
    thread.start()

    def leave() -> None:
        over.set()
        thread.join(LEAVE_S)

    atexit.register(leave)


def _tracer() -> "Tracer | None":
    module = sys.modules.get("opentelemetry.trace")
    return None if module is None else module.get_tracer("mdp")


def _context_of(traceparent: str) -> "Context":
    from opentelemetry import context, trace

    if not traceparent:
        return context.get_current()
    _, trace_hex, span_hex, flags = traceparent.split("-")
    parent = trace.SpanContext(
        int(trace_hex, 16), int(span_hex, 16), is_remote=True,
        trace_flags=trace.TraceFlags(int(flags, 16)),
    )  # fmt: skip
    return trace.set_span_in_context(trace.NonRecordingSpan(parent))


def _traceparent_of(span: "Span") -> str:
    found = span.get_span_context()
    if not found.is_valid:
        return ""
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"


@contextmanager
def server_span(name: str, header: str, attributes: Mapping[str, str]) -> Iterator[None]:
    """A server's span of a request with the header `traceparent`; calls in the block are of it."""
    traceparent, tracer = read_traceparent(header), _tracer()
    if tracer is None:
        with continuing(traceparent):
            yield
        return
    from opentelemetry.trace import SpanKind

    with tracer.start_as_current_span(
        name, _context_of(traceparent), kind=SpanKind.SERVER, attributes=attributes
    ):
        yield


def current_traceparent() -> str:
    """The trace context that a call would belong to now; empty without one."""
    if _tracer() is None:
        return _caller.get()
    from opentelemetry import trace

    return _traceparent_of(trace.get_current_span())


@contextmanager
def continuing(traceparent: str) -> Iterator[None]:
    """Let calls in the block belong to a trace context of another process."""
    token = _caller.set(traceparent)
    try:
        yield
    finally:
        _caller.reset(token)


def record(traceparent: str, parts: Sequence[tuple[str, float, float]], now_s: float) -> None:
    """Spans that have ended: name, beginning and end of each, seconds of the clock of `now_s`."""
    tracer = _tracer()
    if tracer is None:
        return
    context, now_ns = _context_of(traceparent), time.time_ns()
    for name, begun_s, ended_s in parts:
        begun_ns, ended_ns = (now_ns - int((now_s - at_s) * 1e9) for at_s in (begun_s, ended_s))
        tracer.start_span(name, context, start_time=begun_ns).end(ended_ns)


class CallTrace:
    """The trace of one call: its span, and one of each request to a device."""

    def __init__(self, caller: str, tracer: "Tracer | None", deadline_ms: float) -> None:
        self._caller, self._tracer = caller, tracer
        self._requests: dict[str, Span] = {}
        if tracer is not None:
            self._context = _context_of(caller)
            told = {"mdp.deadline_ms": deadline_ms}
            self._span = tracer.start_span("mdp call", self._context, attributes=told)

    def begin_request(self, device: str, k: int) -> str:
        """The trace context that a request to `device` carries; empty without one."""
        if self._tracer is None:
            return self._caller
        from opentelemetry.trace import SpanKind, set_span_in_context

        span = self._requests[device] = self._tracer.start_span(
            f"mdp member {k}",
            set_span_in_context(self._span, self._context),
            kind=SpanKind.CLIENT,
            attributes={"mdp.device": device},
        )
        return _traceparent_of(span)

    def end_request(self, device: str, reason: str = "") -> None:
        """`device` has answered, or will not for `reason`."""
        span = self._requests.pop(device, None)
        if span is not None:
            self._end(span, reason)

    def end(self, told: Mapping[str, Any], reason: str = "") -> None:
        """The call has ended, for `reason` without an answer."""
        for span in self._requests.values():
            self._end(span, "not waited for")
        self._requests.clear()
        if self._tracer is not None:
            self._span.set_attributes(told)
            self._end(self._span, reason)

    def _end(self, span: "Span", reason: str) -> None:
        if reason:
            from opentelemetry.trace import Status, StatusCode

            span.set_status(Status(StatusCode.ERROR, reason))
        span.end()


def begin_call(deadline_ms: float) -> CallTrace | None:
    """The trace of a call that begins now; None without a trace context and OpenTelemetry."""
    caller, tracer = _caller.get(), _tracer()
    return CallTrace(caller, tracer, deadline_ms) if caller or tracer is not None else None
