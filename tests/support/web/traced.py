"""`mdp-agent` or `mdp` with OpenTelemetry's in-memory exporter: traced.py FILE PROGRAM ARGUMENTS.

Writes the spans as a JSON list into FILE as it ends.
"""

import atexit
import json
import sys
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import mdp_start


def main() -> None:
    """Run the program."""
    file, program = Path(sys.argv[1]), sys.argv[2]
    sys.argv[:3] = [program]
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)

    def keep() -> None:
        spans: list[dict[str, Any]] = [
            json.loads(s.to_json()) for s in exporter.get_finished_spans()
        ]
        file.write_text(json.dumps(spans))

    atexit.register(keep)
    {"mdp": mdp_start.mdp, "mdp-agent": mdp_start.mdp_agent}[program]()


if __name__ == "__main__":
    main()
