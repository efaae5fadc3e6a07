"""Reasons why a device is not in an answer: a code for programs, a text for people. Pure."""

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from mdp.protocol import messages
from mdp.protocol.messages import FailureCode

#: What an agent refuses with, and what the client itself finds (docs/reference/reasons.md).
Code = (
    FailureCode
    | Literal[
        "late", "slow", "silent", "failing", "unsteady", "on probation", "bad_output",
        "disconnected", "unreachable", "refused", "backlogged", "not asked", "not needed",
        "not in the fleet", "left out", "apart",
    ]
)  # fmt: skip

#: Why a camera is suspected: what agents are told too, and what a client alone says, that it finds
#: every item different from the good ones.
Suspicion = messages.Suspicion | Literal["moved"]
#: Why a camera is suspected, for people.
SUSPECT: Mapping[Suspicion, str] = {
    "disagrees": "disagrees with the others: camera covered, turned or moved?",
    "frozen": "the same picture again and again: camera frozen?",
    "moved": "finds every item different, the others do not: camera moved since the good scenes?",
}


class Reason(Struct, frozen=True):
    """A code and, for people, what there is to say beside it."""

    code: Code
    text: str = ""

    def __str__(self) -> str:
        return f"{self.code}: {self.text}" if self.text else self.code


#: No reply was in hand at the moment of decision.
LATE = Reason("late")
#: The moment of decision had come before the device's turn.
NO_TIME = Reason("not asked", "no time left")
#: It had come before the request's turn among those of this client.
NO_TURN = Reason("not asked", "this client's other requests were before it")
#: The device is half-open: asked, and not waited for.
PROBATION = Reason("on probation", "asked, not waited for")
#: A cascade's first stage was sure.
NOT_NEEDED = Reason("not needed", "the first stage is sure")
NOT_IN_FLEET = Reason("not in the fleet")
#: `leave_out` of a client.
LEFT_OUT = Reason("left out", "by this client")
#: There is no connection; it was lost while an answer was owed; it takes no more bytes.
UNREACHABLE = Reason("unreachable")
DISCONNECTED = Reason("disconnected")
BACKLOGGED = Reason("backlogged", "takes no more requests")
UNSTEADY = Reason("unsteady", "failures and lost connections in a row")
