"""MDP's exceptions.

    MDPError
    ├── InputError            an argument, a picture or a data folder cannot be used
    │   └── PictureError      a file or array is not a picture within the limits
    ├── ConfigError           a profile, plan, bundle or fleet file is wrong
    │   └── LoginRefused      a broker lets this client not in
    ├── WireError             frames that are not a message of this protocol version
    ├── AgentError            a device cannot serve (a provider is missing)
    │   └── AddressUnavailable  its address is taken, or not there yet
    ├── InferenceError        an answer cannot be given; carries every device's outcome
    │   ├── DeadlineExceeded  the deadline passed without an answer
    │   └── QuorumNotMet      no member answered, and none can any more
    ├── TransferError         a device or registry does not take a bundle, or does not give its own
    └── PlanRefused           a plan that would not beat the best single device, or a lesser fleet

A failed device is data (`Prediction.missing`); only a missing answer raises. Each class has the
exit code of a command that ends with it.
"""

from collections.abc import Mapping
from typing import Any


class MDPError(Exception):
    """Base of MDP's exceptions."""

    exit_code = 1


class InputError(MDPError):
    """An argument, a picture or a data folder cannot be used as given."""

    exit_code = 2


class PictureError(InputError):
    """A file or array is not a picture within the documented limits."""


class ConfigError(MDPError):
    """A profile, plan, bundle or fleet file is wrong; the message names file and key."""

    exit_code = 2


class LoginRefused(ConfigError):
    """A broker refuses user, password or certificate, for now at least: it may be starting."""

    exit_code = 5


class WireError(MDPError):
    """Frames that are not a well-formed message of this protocol version."""


class AgentError(MDPError):
    """This device cannot serve as requested: a provider is missing, a service does not start."""

    exit_code = 2


class AddressUnavailable(AgentError):
    """The address to listen on is taken, or not this machine's (yet): it may be later."""

    exit_code = 5


class InferenceError(MDPError):
    """No answer can be given.

    `outcomes` maps every device of the fleet to why it did not answer, `codes` to the code of that.
    """

    exit_code = 3

    def __init__(
        self, message: str, outcomes: Mapping[str, str], codes: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.outcomes, self.codes = dict(outcomes), dict(codes or {})

    def __reduce__(self) -> tuple[Any, ...]:
        """Tell pickle and copy of all arguments: it crosses processes whole."""
        return type(self), (str(self), self.outcomes, self.codes)


class DeadlineExceeded(InferenceError):
    """The deadline passed without a usable answer."""


class QuorumNotMet(InferenceError):
    """No member answered, and none can any more."""


class TransferError(MDPError):
    """A device or registry takes or gives no bundle: it refuses, cannot load it, is not there."""

    exit_code = 3


class InsecureWarning(UserWarning):
    """A device is reached in plain text over a network, as the caller chose."""


class PlanRefused(MDPError):
    """Answers would be worse: than the best device's alone, or than before a device was removed."""

    exit_code = 4
