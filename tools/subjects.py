"""Check that subjects of commits have at most 72 characters, as most programs show them.

python tools/subjects.py          (make check: the commits since the branch left main)
python tools/subjects.py FILE     (the commit-msg hook: the message that is about to be kept)
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 72
#: The first one that this checkout has is what a branch is held against.
BASES = ("origin/main", "main")
#: Where there is no branch: on main itself.
LATEST = 5


def git(*words: str) -> str | None:
    """Output of git, or None where it cannot run."""
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def too_long(subjects: list[str]) -> list[str]:
    """Subjects that do not fit, each after its number of characters."""
    return [f"{len(s)}: {s}" for s in subjects if len(s) > LONGEST]


def subject_of(message: str) -> str:
    """The first line that git keeps of a message."""
    lines = (line.strip() for line in message.splitlines())
    return next((line for line in lines if line and not line.startswith("#")), "")


def commits() -> list[str] | None:
    """Subjects of the commits that a branch adds, merges apart, or None where that is unknown."""
    if git("rev-parse", "--is-shallow-repository") != "false":
        return None
    for base in BASES:
        since = git("merge-base", base, "HEAD")
        if since and since != git("rev-parse", "HEAD"):
            return (git("log", "--no-merges", "--format=%s", f"{since}..HEAD") or "").splitlines()
    return (git("log", "--no-merges", "--format=%s", f"-{LATEST}") or "").splitlines()


def main(words: list[str]) -> int:
    """0 if every subject fits, or if there is no history to look at."""
    subjects = [subject_of(Path(words[0]).read_text())] if words else commits()
    if subjects is None:
        print("subjects of commits: not checked, for there is no whole history here")
        return 0
    found = too_long(subjects)
    for line in found:
        print(f"subject of a commit: expected at most {LONGEST} characters, got {line}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
