"""Imports of packages without some of their parts, or without telemetry."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def without(*modules: str) -> Iterator[None]:
    """Inside, importing any of `modules` raises ImportError, as if they were not installed."""
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    loaded: dict[str, ModuleType | None] = sys.modules  # type: ignore[assignment]
    loaded.update(dict.fromkeys(modules))
    try:
        yield
    finally:
        for name in modules:
            del loaded[name]
        sys.modules.update(before)


def silence_onnxruntime() -> None:
    """Disable the telemetry of onnxruntime 1.31 and later; to be called before its import.

    A value of `ORT_DISABLE_TELEMETRY` in the environment is kept.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
