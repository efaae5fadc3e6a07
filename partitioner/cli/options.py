"""Records as command-line options: every knob is declared once, with its range and its help.

Of a build, only what changes between runs has an option; all else stands in the file of --config.
"""

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

from mdp.errors import InputError
from mdp.files import Record
from partitioner.config import Given, field_of, option_of, parse_arguments

R = TypeVar("R", bound=Record)
Command = Callable[..., None]


def takes(**records: type[Record]) -> Callable[[Command], Command]:
    """Give a command one option per field of `records`: parameter -> record type.

    The command gets the finished records; a value out of range raises InputError.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            for parameter, kind in records.items():
                values[parameter] = _build(kind, values)
            command(**values)

        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name not in records]
        added = [p for kind in records.values() for p in _parameters(kind)]
        wrapper.__signature__ = inspect.Signature(kept + added)  # type: ignore[attr-defined]
        return wrapper

    return decorate


def configured(*keys: str) -> Callable[[Command], Command]:
    """Give a command `--config FILE` and an option for each of `keys`, such as `schedule.epochs`.

    The command gets what was `given`. Its InputErrors name the option, or the file and its key.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapper(*, config: Path | None, **values: Any) -> None:
            options = {key: values.pop(_parameter(key)) for key in keys}
            options = {key: value for key, value in options.items() if value not in (None, [])}
            if ARGUMENTS in options:
                options[ARGUMENTS] = parse_arguments(options[ARGUMENTS])
            given = Given(config, options)
            with given.naming():
                command(given=given, **values)

        own = inspect.signature(command, eval_str=True).parameters.values()
        kept = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.name != "given"]
        added = [*map(_key_parameter, keys), _CONFIG]
        wrapper.__signature__ = inspect.Signature(added + kept)  # type: ignore[attr-defined]
        return wrapper

    return decorate


#: The key whose option takes `key=value`.
ARGUMENTS = "plan.teacher_args"
_CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            help="TOML file of these and all other settings (docs/reference/training.md); options "
            "count before it."
        ),
    ],
)


def _parameter(key: str) -> str:
    return key.replace(".", "__")


def _key_parameter(key: str) -> inspect.Parameter:
    """An option for a key of run.toml; None where it is not given."""
    hint, default = field_of(key)
    plain = list[str] if key == ARGUMENTS else _plain(hint)
    option = option_of(key)
    if plain is bool:
        option = f"{option}/--no-{option[2:]}"
    plainly = isinstance(default, (int, float)) and not isinstance(default, bool)
    text = _help(hint) + (f"  [default: {default}]" if plainly else "")
    told = typer.Option(option, help=text, show_default=False)
    return inspect.Parameter(
        _parameter(key),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[plain | None, told],
    )


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def _parameters(kind: type[Record]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    parameters = []
    for field in msgspec.structs.fields(kind):
        plain = _plain(hints[field.name])
        name = _option(field.name)
        if bool in (plain, *get_args(plain)):
            name = f"{name}/--no-{name[2:]}"
        parameters.append(
            inspect.Parameter(
                field.name,
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


def _build(kind: type[R], values: dict[str, Any]) -> R:
    """Take the fields of `kind` out of `values` and make the record of them."""
    given = {f.name: values.pop(f.name) for f in msgspec.structs.fields(kind)}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        match = re.fullmatch(r"(.*) - at `\$\.(\w+)`", str(error))
        if match is None:
            raise InputError(str(error)) from error
        field = match[2]
        raise InputError(
            f"{_option(field)}: {match[1][0].lower()}{match[1][1:]}, got {given[field]}"
        ) from error
