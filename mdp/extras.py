"""The distribution's optional parts, and what to type to get one."""

from collections.abc import Iterable
from importlib.util import find_spec

#: What `partition` brings (pyproject.toml), by the names under which it is imported.
PARTITION = (
    "matplotlib", "onnx", "onnxruntime", "onnxscript", "safetensors", "scipy", "sklearn", "timm",
    "torch",
)  # fmt: skip

#: What `gateway` brings.
GATEWAY = ("prometheus_client", "python_multipart", "starlette", "uvicorn")


def install(extra: str) -> str:
    """The command that installs one extra, or several joined by commas."""
    # Not by the distribution's name: no registry has it.
    return f"pip install '.[{extra}]' in a checkout of MDP"


def missing(modules: Iterable[str]) -> str | None:
    """The first of these top-level modules that is not installed; imports none of them."""
    return next((module for module in modules if find_spec(module) is None), None)
