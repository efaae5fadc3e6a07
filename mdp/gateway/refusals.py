"""Requests that are not answered, as HTTP says it. Pure."""

from collections.abc import Mapping
from types import MappingProxyType

from mdp.errors import InferenceError, InputError, MDPError

#: Seconds after which a client may ask again where no device can answer.
RETRY_AFTER_S = 1


class Refusal(MDPError):
    """A request that ends with an HTTP status of 400 or more."""

    def __init__(
        self, status: int, text: str, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__(text)
        self.status = status
        self.headers = dict(headers)


def busy(text: str) -> Refusal:
    """503 with the time after which to ask again."""
    return Refusal(503, text, {"retry-after": str(RETRY_AFTER_S)})


def refusal_of(error: MDPError) -> Refusal:
    """503 where the fleet cannot answer, 400 where the input is to blame, else 500."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, InferenceError):
        return busy(str(error))
    return Refusal(400 if isinstance(error, InputError) else 500, str(error))
