"""Collaborative vision inference on unequal edge devices: client and shared code."""

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
