"""Every fuzz target by its name; the shares of the inputs add up to one."""

from tests.fuzz import agents, announcements, files, gateway, messages, pictures
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for room in (messages, agents, announcements, files, gateway, pictures)
    for target in room.TARGETS
}
