"""The folder of a crew at the coordinator: facts.toml, crew.toml, and the token that signs."""

import secrets
from pathlib import Path

from mdp.errors import InputError
from mdp.files import read_secret, write_new
from partitioner.crew.planning.facts import Facts, read_facts
from partitioner.crew.planning.syncplan import SyncPlan, read_plan
from partitioner.crew.planning.work import Work

_TOKEN_BYTES = 4096


class CrewFolder:
    """Files that `crew probe` and `crew plan` write, and that a training together reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts_file, self.plan_file = path / "facts.toml", path / "crew.toml"
        #: What `crew tune` tried.
        self.tuned_file = path / "tuned.toml"
        #: To be copied to every trainer.
        self.key = path / "crew.key"
        #: What trainers reported and were told in the last training.
        self.log, self.picture = path / "log.jsonl", path / "schedule.svg"
        #: What trainers hand in while they train.
        self.files = path / "files"

    def facts(self) -> Facts:
        """Measurements of the trainers; raises ConfigError, and InputError where nothing was."""
        _check(self.facts_file, "mdp-partition crew probe")
        return read_facts(self.facts_file)

    def plan(self, work: Work) -> SyncPlan:
        """The plan of who trains what, checked against the facts.

        Raises ConfigError and InputError.
        """
        facts = self.facts()
        _check(self.plan_file, "mdp-partition crew plan")
        return read_plan(self.plan_file, facts, work)

    def token(self) -> str:
        """The content of the key file, which is made where it is missing."""
        if not self.key.exists():
            write_new(self.key, secrets.token_hex(16).encode() + b"\n", 0o600)
        return token_of(self.key)


def _check(path: Path, command: str) -> None:
    if not path.exists():
        raise InputError(f"{path}: no such file: `{command}` writes it")


def token_of(path: Path) -> str:
    """The token in a key file; raises ConfigError and InputError."""
    token = read_secret(path, _TOKEN_BYTES).decode(errors="replace").strip()
    if not token:
        raise InputError(f"{path}: expected a token, found nothing")
    return token
