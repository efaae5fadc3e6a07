"""Commands that prepare a machine for tests, and the requirements that it may lack."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


class MissingError(Exception):
    """A requirement that this machine lacks, in one line."""


class CheckoutError(Exception):
    """A fault of this checkout, in one line: for a test a failure, and no reason to skip."""


def run(
    command: Sequence[str], *, folder: Path | None = None, environment: dict[str, str] | None = None
) -> str:
    """The output of a command; raises MissingError with the last line that it wrote."""
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing was said"]
        raise MissingError(f"{' '.join(command[:2])}: {said[-1]}")
    return done.stdout.strip()


def report(target: str, prepare: Callable[[], str]) -> int:
    """Prepare for a target of make, and print what was prepared, or in one line what is missing."""
    try:
        prepared = prepare()
    except (MissingError, CheckoutError) as error:
        print(f"{target}: {error}", file=sys.stderr)
        return 2
    print(f"prepared: {prepared}")
    return 0
