"""Every command and option of ours that a page names exists."""

import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main

from tests.support.pages import ROOT
from tools.site import COMMANDS

PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md")
    for path in sorted(ROOT.glob(pattern))
    # The last draws packages, one of which is called mdp.
    if path.name not in ("CHANGELOG.md", "lab-log.md", "0012-rooms.md")
]
FENCED = re.compile(r"^ *```\w*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(mdp(?:-agent|-partition)? [^`]+)`")
#: Where a shell's next command begins.
ENDS = {";", "&&", "||", "|", "&", "(", ")", ">", "do", "until", "while", "then", "--"}


def list_commands(page: str) -> Iterator[list[str]]:
    """The words of each command of ours, from its program's name on."""
    fenced = "\n".join(FENCED.findall(page)).replace("\\\n", " ").splitlines()
    for line in [*fenced, *(" ".join(found.split()) for found in INLINE.findall(page))]:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.commenters = "#"
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # an apostrophe of an output
            continue
        first = True
        for at, word in enumerate(words):
            if first and word in COMMANDS:
                rest = words[at:]
                end = next((n for n, other in enumerate(rest) if other in ENDS), len(rest))
                yield rest[:end]
            first = word in {*ENDS, "$", "sudo"} or (first and "=" in word)


def unknown(words: list[str]) -> str:
    """The command or option of a command line that does not exist; empty if all do."""
    # typer has a click of its own, whose types it does not export.
    here: Any = typer.main.get_command(import_module(COMMANDS[words[0]]).app)
    rest = words[1:]
    while hasattr(here, "commands") and rest and not rest[0].startswith("-"):
        name = rest.pop(0)
        if not re.fullmatch(r"[a-z]+", name):  # COMMAND, ...
            return ""
        if name not in here.commands:
            return name
        here = here.commands[name]
    known = {name for each in here.params for name in (*each.opts, *each.secondary_opts)}
    known |= {"--help", "-h"}
    given = (word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word))
    return next((option for option in given if option not in known), "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_and_option_exists(page: Path) -> None:
    faults = [
        f"{' '.join(words)}: no {what}"
        for words in list_commands(page.read_text())
        if (what := unknown(words))
    ]
    assert faults == []


def test_commands_are_found_in_blocks_and_in_text() -> None:
    page = "`mdp status --x`\n```\n$ A=b sudo mdp-agent run --y; mdp keys new &\nmdp\n```\n"
    found = list(list_commands(page))
    assert found == [
        ["mdp-agent", "run", "--y"],
        ["mdp", "keys", "new"],
        ["mdp"],
        ["mdp", "status", "--x"],
    ]
    assert [unknown(words) for words in found] == ["--y", "", "", "--x"]
    assert unknown(["mdp", "dance"]) == "dance"
    assert sum(len(list(list_commands(page.read_text()))) for page in PAGES) > 80
