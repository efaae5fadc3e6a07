"""Say in one line that a Python is too old, before pip says it in twenty.

python tools/old_python.py      (make demo and others, by $(PYTHON))

Written for any Python, so that an old one gets as far as the line.
"""

import sys

#: As `requires-python` in pyproject.toml.
LEAST = (3, 11)


def complaint(version, least=LEAST):  # type: ignore[no-untyped-def]
    """The line about a version, given as (major, minor); empty where it is new enough."""
    if tuple(version[:2]) >= least:
        return ""
    found = "%d.%d" % tuple(version[:2])  # noqa: UP031
    return "expected Python %d.%d or newer, got %s: give one as in make demo PYTHON=python3.12" % (  # noqa: UP031
        least + (found,)  # noqa: RUF005
    )


if __name__ == "__main__":
    told = complaint(sys.version_info)  # type: ignore[no-untyped-call]
    if told:
        sys.exit("make: " + told)
