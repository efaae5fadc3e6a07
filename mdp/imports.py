"""Import a package without some of its parts."""

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
