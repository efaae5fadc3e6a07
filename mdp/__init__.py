"""Collaborative vision inference on unequal edge devices: client and shared code."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mdp.client.aio import AsyncClient
    from mdp.client.status import DeviceStatus
    from mdp.client.sync import Client, classify
    from mdp.errors import (
        AgentError,
        ConfigError,
        DeadlineExceeded,
        InferenceError,
        InputError,
        InsecureWarning,
        MDPError,
        PictureError,
        PlanRefused,
        QuorumNotMet,
        WireError,
    )
    from mdp.formats.bundle import Bundle
    from mdp.formats.fleet import Fleet
    from mdp.formats.plan import Plan
    from mdp.formats.profile import DeviceProfile
    from mdp.pictures.crop import Picture
    from mdp.requests.prediction import MemberTiming, Prediction

__version__ = "0.1.0"

__all__ = [
    "AgentError",
    "AsyncClient",
    "Bundle",
    "Client",
    "ConfigError",
    "DeadlineExceeded",
    "DeviceProfile",
    "DeviceStatus",
    "Fleet",
    "InferenceError",
    "InputError",
    "InsecureWarning",
    "MDPError",
    "MemberTiming",
    "Picture",
    "PictureError",
    "Plan",
    "PlanRefused",
    "Prediction",
    "QuorumNotMet",
    "WireError",
    "__version__",
    "classify",
]

#: Public name -> its module, imported at the first use (PEP 562): `import mdp` stays quick.
_MODULES = {
    "AgentError": "mdp.errors",
    "AsyncClient": "mdp.client.aio",
    "Bundle": "mdp.formats.bundle",
    "Client": "mdp.client.sync",
    "ConfigError": "mdp.errors",
    "DeadlineExceeded": "mdp.errors",
    "DeviceProfile": "mdp.formats.profile",
    "DeviceStatus": "mdp.client.status",
    "Fleet": "mdp.formats.fleet",
    "InferenceError": "mdp.errors",
    "InputError": "mdp.errors",
    "InsecureWarning": "mdp.errors",
    "MDPError": "mdp.errors",
    "MemberTiming": "mdp.requests.prediction",
    "Picture": "mdp.pictures.crop",
    "PictureError": "mdp.errors",
    "Plan": "mdp.formats.plan",
    "PlanRefused": "mdp.errors",
    "Prediction": "mdp.requests.prediction",
    "QuorumNotMet": "mdp.errors",
    "WireError": "mdp.errors",
    "classify": "mdp.client.sync",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
