"""Settings as command-line options: each is declared once, with its range and its help.

Only settings that change between runs have an option; the others are keys of the --config file.
"""

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec
import typer

from mdp.files import Record
from partitioner.config import Given, field_of, option_of, parse_arguments, parse_cameras

Command = Callable[..., None]


def add_config_options(*keys: str) -> Callable[[Command], Command]:
    """Give a command `--config FILE` and an option for each of `keys`, such as `schedule.epochs`.

    The command gets them as `given`; its InputErrors name the option, or the file and its key.
    """
    names = {key: key.replace(".", "__") for key in keys}

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def wrapper(*, config: Path | None, **values: Any) -> None:
            options = {key: values.pop(name) for key, name in names.items()}
            options = {key: value for key, value in options.items() if value not in (None, [])}
            for key, parse in _PARSED.items():
                if key in options:
                    options[key] = parse(options[key])
            given = Given(config, options)
            with given.naming():
                command(given=given, **values)

        added = [_parameter(names[key], option_of(key), *field_of(key)) for key in keys]
        added.append(_parameter("config", "--config", _CONFIG, None))
        return _with_options(wrapper, command, before=added)

    return decorate


#: The keys whose options take `key=value`.
_PARSED: dict[str, Callable[[Sequence[str]], Any]] = {
    "plan.teacher_args": parse_arguments,
    "plan.cameras": parse_cameras,
}
#: Further names of options, which people try first.
_SECOND_NAMES = {"--anyway": ("--force",)}
_CONFIG = Annotated[
    Path,
    msgspec.Meta(
        description="TOML file of all settings; options override it (docs/reference/training.md)"
    ),
]


def _with_options(
    wrapper: Command,
    command: Command,
    before: Sequence[inspect.Parameter] = (),
    after: Sequence[inspect.Parameter] = (),
) -> Command:
    """`wrapper` with the options of `command`, `before` and `after` around them."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    kept = [
        p.replace(kind=p.KEYWORD_ONLY)
        for p in own
        if not (isinstance(p.annotation, type) and issubclass(p.annotation, Record | Given))
    ]
    wrapper.__signature__ = inspect.Signature([*before, *kept, *after])  # type: ignore[attr-defined]
    return wrapper


def _parameter(name: str, option: str, hint: Any, default: object) -> inspect.Parameter:
    """An option that is None where it is not given; its help names the default."""
    plain = _plain(hint)
    if get_origin(plain) is dict:
        plain = list[str]
    names = [option, *_SECOND_NAMES.get(option, ())]
    if bool in (plain, *get_args(plain)):
        names[0] = f"{option}/--no-{option[2:]}"
    number = isinstance(default, (int, float)) and not isinstance(default, bool)
    text = _help(hint) + (f"  [default: {default}]" if number else "")
    info = typer.Option(*names, help=text, show_default=False)
    kind, annotation = inspect.Parameter.KEYWORD_ONLY, Annotated[plain | None, info]
    return inspect.Parameter(name, kind, default=None, annotation=annotation)


def _plain(hint: Any) -> Any:
    """An annotation without its constraints."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return functools.reduce(operator.or_, (_plain(part) for part in get_args(hint)))
    return hint


def _help(hint: Any) -> str:
    """The last description in an annotation, or nothing."""
    if get_origin(hint) in (Union, UnionType):
        return next((text for part in get_args(hint) if (text := _help(part))), "")
    metas = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    texts = [meta.description for meta in metas if meta.description]
    return texts[-1] + "." if texts else ""
