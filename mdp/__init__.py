"""Collaborative vision inference on unequal edge devices: the client and what everyone shares."""

from mdp.async_client import AsyncClient
from mdp.client import Client
from mdp.errors import (
    AgentError,
    ConfigError,
    DeadlineExceeded,
    InferenceError,
    InputError,
    InsecureWarning,
    MDPError,
    NeverEarlyWarning,
    PictureError,
    PlanRefused,
    QuorumNotMet,
    WireError,
)
from mdp.prediction import MemberTiming, Prediction
from mdp.status import DeviceStatus

__version__ = "0.1.0"

__all__ = [
    "AgentError",
    "AsyncClient",
    "Client",
    "ConfigError",
    "DeadlineExceeded",
    "DeviceStatus",
    "InferenceError",
    "InputError",
    "InsecureWarning",
    "MDPError",
    "MemberTiming",
    "NeverEarlyWarning",
    "PictureError",
    "PlanRefused",
    "Prediction",
    "QuorumNotMet",
    "WireError",
    "__version__",
]
