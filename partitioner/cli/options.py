"""Records as command-line options: every knob is declared once, with its range and its help.

A recipe, a TOML file of options by their names, may give the defaults of a command.
"""

import difflib
import functools
import inspect
import operator
import re
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import typer

from mdp.errors import ConfigError, InputError
from mdp.files import MAX_TOML_BYTES, Record, read_regular

R = TypeVar("R", bound=Record)
Command = Callable[..., None]


def takes(**records: tuple[type[Record], str]) -> Callable[[Command], Command]:
    """Give a command one option per field of `records`: parameter -> (record type, name prefix).

    The command gets the finished records; a value out of range raises InputError.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            for parameter, (kind, prefix) in records.items():
                values[parameter] = _build(kind, prefix, values)
            command(**values)

        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name not in records]
        added = [p for kind, prefix in records.values() for p in _parameters(kind, prefix)]
        wrapper.__signature__ = inspect.Signature(kept + added)  # type: ignore[attr-defined]
        return wrapper

    return decorate


def _follow(context: typer.Context, path: Path | None) -> Path | None:
    """Take the options of a recipe for defaults of a command; raises ConfigError."""
    if path is None:
        return None
    places = {
        option.removeprefix("--"): parameter
        for parameter in context.command.params
        if not parameter.is_eager
        for option in parameter.opts
    }
    content = _read_recipe(path)
    context.default_map = {}
    for name, value in content.items():
        parameter = places.get(name)
        if parameter is None or parameter.name is None:
            close = ", ".join(difflib.get_close_matches(name, places, n=1))
            hint = f"; close to it: {close}" if close else ""
            raise ConfigError(f"{path}: key {name!r}: expected an option of this command{hint}")
        several = getattr(parameter, "multiple", False)
        if isinstance(value, list) != several:
            wanted = "a list of values" if several else "one value"
            raise ConfigError(f"{path}: key {name!r}: expected {wanted}, got {value!r}")
        context.default_map[parameter.name] = value
    return path


def _read_recipe(path: Path) -> dict[str, Any]:
    content, _ = read_regular(path, MAX_TOML_BYTES)
    try:
        return msgspec.toml.decode(content, type=dict[str, bool | int | float | str | list[str]])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: expected options by their names: {error}") from error


RecipeOption = Annotated[
    Path | None,
    typer.Option(
        callback=_follow,
        is_eager=True,
        help="TOML file of this command's options by their names; those given here count before.",
    ),
]


def option_name(prefix: str, field: str) -> str:
    """`--teacher-epochs` for `teacher_` and `epochs`."""
    return "--" + (prefix + field).replace("_", "-")


def _parameters(kind: type[Record], prefix: str) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    parameters = []
    for field in msgspec.structs.fields(kind):
        plain = _plain(hints[field.name])
        name = option_name(prefix, field.name)
        if bool in (plain, *get_args(plain)):
            name = f"{name}/--no-{name[2:]}"
        parameters.append(
            inspect.Parameter(
                prefix + field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.required else field.default,
                annotation=Annotated[plain, typer.Option(name, help=_help(hints[field.name]))],
            )
        )
    return parameters


def _plain(hint: Any) -> Any:
    """An annotation without its constraints."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return functools.reduce(operator.or_, (_plain(part) for part in get_args(hint)))
    return hint


def _help(hint: Any) -> str:
    """The last description that an annotation carries, or nothing."""
    if get_origin(hint) in (Union, UnionType):
        return next((text for part in get_args(hint) if (text := _help(part))), "")
    metas = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    texts = [meta.description for meta in metas if meta.description]
    return texts[-1] + "." if texts else ""


def _build(kind: type[R], prefix: str, values: dict[str, Any]) -> R:
    """Take the fields of `kind` out of `values` and make the record of them."""
    given = {f.name: values.pop(prefix + f.name) for f in msgspec.structs.fields(kind)}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        match = re.fullmatch(r"(.*) - at `\$\.(\w+)`", str(error))
        if match is None:
            raise InputError(str(error)) from error
        field = match[2]
        raise InputError(
            f"{option_name(prefix, field)}: {match[1][0].lower()}{match[1][1:]}, got {given[field]}"
        ) from error
