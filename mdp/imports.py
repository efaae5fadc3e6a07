"""Import a package without some of its parts, or without its reports of use."""

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
    """Call before onnxruntime is imported, which from 1.31 on keeps an id and sends reports of use.

    `ORT_DISABLE_TELEMETRY` is left as it is where the environment has it.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
