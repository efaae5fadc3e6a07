"""Shared by the command lines: exit codes, one-line errors, JSON on stdout, list options.

Exit codes: 0 fine, 2 usage or bad input, 3 the fleet could not answer, 4 the plan was refused,
5 the address to listen on is taken, 130 interrupted by the user, 1 anything unforeseen.
"""

import errno
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandFunctionType

from mdp import __version__
from mdp.errors import InputError, MDPError
from mdp_start import imports_interruptible

#: Errors of a full disk.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
INTERRUPTED = 128 + signal.SIGINT
#: Delay before a Ctrl-C that Python has swallowed is raised again.
_AGAIN_S = 0.01


class Interrupted(MDPError):
    """The user pressed Ctrl-C; the message names what was kept and how to resume."""

    exit_code = INTERRUPTED


def new_app(
    summary: str, command: str | None = None, parts: Mapping[str, tuple[str, str]] | None = None
) -> typer.Typer:
    """A command group with plain help and tracebacks.

    The group of a whole `command` also has --version and shell completion. `parts` are commands
    that are imported when they run: name -> ("module:function or application", summary).
    """
    app = _App(
        cls=_Group if parts is None else _group_of(command or "", parts),
        help=summary,
        no_args_is_help=True,
        add_completion=command is not None,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    if command is not None:
        _add_version(app, summary, command)
    return app


def _add_version(app: typer.Typer, summary: str, command: str) -> None:
    def tell(asked: bool) -> None:
        if asked:
            print(f"{command} {__version__}")
            raise typer.Exit

    @app.callback(help=summary)
    def _options(
        version: Annotated[
            bool, typer.Option("--version", callback=tell, is_eager=True, help="Show the version.")
        ] = False,
    ) -> None:
        """Options that end the command."""


def run(app: Callable[[], object], name: str) -> NoReturn:
    """Run a command line; an MDPError becomes one line on stderr and its class's exit code.

    A full disk becomes one too, also for stdout.
    """
    try:
        with interrupts_reraised():
            _run_and_flush(app)
    except MDPError as error:
        print(f"{name}: {one_line(error)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in (*_NO_ROOM, errno.EPIPE):
            raise
        _discard_stdout()
        if error.errno == errno.EPIPE:
            sys.exit(MDPError.exit_code)
        where = f"{error.filename}: " if error.filename else ""
        print(f"{name}: {where}cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(InputError.exit_code)
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    sys.exit(0)


def _discard_stdout() -> None:
    """Keep buffered output from failing again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def until_reader_leaves() -> Iterator[None]:
    """End the block when stdout's reader has closed it (`mdp ... | head -1`).

    For blocks that only print; elsewhere a closed stdout is a failure.
    """
    try:
        yield
    except BrokenPipeError:
        _discard_stdout()


@contextmanager
def interrupts_reraised() -> Iterator[None]:
    """Raise a Ctrl-C again that Python swallows.

    Exceptions in a destructor or a weak reference's callback, as each import has one, are printed
    and dropped.
    """
    shown = sys.unraisablehook

    def once_more(unraisable: "sys.UnraisableHookArgs") -> None:
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            shown(unraisable)
            return
        while True:
            try:
                timer = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), signal.SIGINT))
                timer.daemon = True
                timer.start()
                return
            except KeyboardInterrupt:
                # On a busy machine the timer may fire here, where it would be swallowed too.
                continue

    sys.unraisablehook = once_more
    try:
        yield
    finally:
        sys.unraisablehook = shown


def _run_and_flush(app: Callable[[], object]) -> None:
    """Run `app`, and flush its output while a failure can still be reported."""
    try:
        app()
    except SystemExit:
        sys.stdout.flush()
        raise
    sys.stdout.flush()


def one_line(error: BaseException) -> str:
    """An error's message without line breaks and control characters."""
    return printable(" ".join(str(error).split()))


def say_count(number: int, noun: str) -> str:
    """A number of things in words: `1 device`, `2 devices`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """`text` with a question mark for each unprintable character."""
    return "".join(character if character.isprintable() else "?" for character in text)


def print_json(value: object) -> None:
    """Print one machine-readable line on stdout, without control characters.

    Those in texts are escaped, as JSON allows for every character.
    """
    text = msgspec.json.encode(value).decode()
    if not text.isprintable():
        text = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


#: typer has a click of its own, whose types it does not export.
_UsageError: Any = typer.BadParameter.__mro__[1]


@contextmanager
def _usage_errors_in_a_line(context: Any) -> Iterator[None]:
    """Raise InputError for a usage error, which typer prints in three lines."""
    try:
        yield
    except _UsageError as error:
        text = one_line(Exception(error.format_message())).rstrip(".")
        raise InputError(f"{text} ({context.command_path} -h)") from error


class _Command(TyperCommand):
    """Refuses a second --config, which would replace the first without a word."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        options = args[: args.index("--")] if "--" in args else args
        given = sum(arg.partition("=")[0] == "--config" for arg in options)
        if given > 1:
            raise InputError(f"--config: expected one file, got {given}")
        with _usage_errors_in_a_line(ctx):
            return super().parse_args(ctx, args)


class _Group(TyperGroup):
    """Shows the whole summary of each command, which typer would cut to a line."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        # Without words, it prints its help by such an error.
        if not args:
            return super().parse_args(ctx, args)
        with _usage_errors_in_a_line(ctx):
            return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        with _usage_errors_in_a_line(ctx):
            return super().resolve_command(ctx, args)

    def summaries(self, ctx: Any) -> list[tuple[str, str]]:
        """Names of the commands with the first paragraphs of their help."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        return [
            (name, " ".join((command.help or "").partition("\n\n")[0].split()))
            for name, command in commands
            if command is not None
        ]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(self.summaries(ctx))


class _App(typer.Typer):
    """Typer with `_Command` as the default class of commands."""

    def command(
        self, name: str | None = None, *, cls: type[TyperCommand] | None = None, **settings: Any
    ) -> Callable[[CommandFunctionType], CommandFunctionType]:
        return super().command(name, cls=cls or _Command, **settings)


class _Parts(Mapping[str, Any]):
    """Commands, each imported when it is looked up."""

    def __init__(self, program: str, parts: Mapping[str, tuple[str, str]]) -> None:
        self._program, self._parts = program, parts

    def __getitem__(self, name: str) -> Any:
        module, _, attribute = self._parts[name][0].partition(":")
        with imports_interruptible(self._program):
            found = getattr(import_module(module), attribute)
        if not isinstance(found, typer.Typer):
            function, found = found, new_app("")
            found.command(name)(function)
        command = typer.main.get_command(found)
        command.name = name
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _group_of(program: str, parts: Mapping[str, tuple[str, str]]) -> type[TyperGroup]:
    class Group(_Group):
        """Lists its commands without importing them."""

        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.commands: Any = _Parts(program, parts)

        def list_commands(self, ctx: Any) -> list[str]:
            return list(parts)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            # Not by `get`, which would hide a KeyError of the import.
            return self.commands[cmd_name] if cmd_name in parts else None

        def summaries(self, ctx: Any) -> list[tuple[str, str]]:
            return [(name, summary) for name, (_, summary) in parts.items()]

    return Group


def list_options(*names: str) -> type[TyperCommand]:
    """A command class whose options `names` also take several values: `--profiles a b`."""

    class ListOptions(_Command):
        def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
            return super().parse_args(ctx, spread(args, names))

    return ListOptions


def spread(args: list[str], names: tuple[str, ...]) -> list[str]:
    """Repeat an option of `names` before each of the values that follow it."""
    out: list[str] = []
    current: str | None = None
    for position, arg in enumerate(args):
        if arg == "--":
            return out + args[position:]
        if arg.startswith("-"):
            current = arg if arg in names else None
            if current is None:
                out.append(arg)
        elif current is not None:
            out += [current, arg]
        else:
            out.append(arg)
    return out
