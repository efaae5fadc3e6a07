"""Everything MDP raises on purpose.

    MDPError
    ├── InputError            an argument, a picture or a data folder cannot be used
    │   └── PictureError      a file or array is not a picture within the limits
    ├── ConfigError           a profile, plan, bundle or fleet file is wrong
    ├── WireError             frames that are not a message of this protocol version
    ├── AgentError            a device cannot serve (provider missing, port taken)
    ├── InferenceError        an answer cannot be given; carries every device's outcome
    │   ├── DeadlineExceeded  nothing had arrived when the deadline came
    │   └── QuorumNotMet      no member answered, and none can any more
    └── PlanRefused           a plan that would not beat the best single device

A device that fails is data (`Prediction.missing`); only an answer that cannot be given raises.
Each class names the exit code with which a command ends on it.
"""

from collections.abc import Mapping


class MDPError(Exception):
    """Base of every error MDP raises on purpose."""

    exit_code = 1


class InputError(MDPError):
    """An argument, a picture or a data folder cannot be used as given."""

    exit_code = 2


class PictureError(InputError):
    """A file or array is not a picture within the documented limits."""


class ConfigError(MDPError):
    """A profile, plan, bundle or fleet file is wrong; the message names file and key."""

    exit_code = 2


class WireError(MDPError):
    """Frames that are not a well-formed message of this protocol version."""


class AgentError(MDPError):
    """This device cannot serve as asked: a provider is missing, an address is taken."""

    exit_code = 2


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


class DeadlineExceeded(InferenceError):
    """The deadline came and nothing usable had arrived."""


class QuorumNotMet(InferenceError):
    """No member answered, and none can any more: nothing is left to wait for."""


class InsecureWarning(UserWarning):
    """A device is spoken to in plain text over a network, as the caller asked for."""


class PlanRefused(MDPError):
    """The planned ensemble would not beat the best single device."""

    exit_code = 4
