"""Collaborative vision inference on unequal edge devices: the client and what everyone shares."""

from mdp.client.aio import AsyncClient
from mdp.client.status import DeviceStatus
from mdp.client.sync import Client
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
from mdp.requests.prediction import MemberTiming, Prediction

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
    "PictureError",
    "PlanRefused",
    "Prediction",
    "QuorumNotMet",
    "WireError",
    "__version__",
]
