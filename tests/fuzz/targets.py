"""Every fuzz target by its name; the shares of the inputs add up to one."""

from tests.fuzz import files, messages, pictures
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target for target in (*messages.TARGETS, *files.TARGETS, *pictures.TARGETS)
}
