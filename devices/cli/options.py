"""The command-line options of an agent that serves, made from the record that holds them."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from devices.agent.options import ServeOptions
from devices.cores import pin_to_cores
from mdp.formats.signing import load_bundle_key

Command = Callable[..., None]
#: Options that the record holds as what was read of them, or not at all.
_OTHERS: dict[str, tuple[Any, Any]] = {
    "bundle_key": (
        Annotated[
            Path | None,
            typer.Option(
                help="Serve only bundles signed with this public key (`mdp bundle sign`)."
            ),
        ],
        None,
    ),
    "cpus": (
        Annotated[
            str | None,
            typer.Option(help="Run on these cores only, as in 0,2-3, and on no more threads."),
        ],
        None,
    ),
    "json": (
        Annotated[bool, typer.Option("--json", help="One JSON object per event on stdout.")],
        False,
    ),
}


def add_serve_options(command: Command) -> Command:
    """Give a command the options of `mdp-agent run`, which it gets by name as `given`."""
    own = dict(inspect.signature(command, eval_str=True).parameters)
    del own["given"]
    options = _parameters()

    @functools.wraps(command)
    def wrapper(**values: Any) -> None:
        given = {name: values.pop(name) for name in options}
        command(given=given, **values)

    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*options.values(), *own.values())]
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {each.name: each.annotation for each in parameters}
    return wrapper


def _parameters() -> dict[str, inspect.Parameter]:
    hints = get_type_hints(ServeOptions, include_extras=True)
    options = {
        field.name: (hints[field.name], field.default)
        for field in fields(ServeOptions)
        if get_origin(hints[field.name]) is Annotated
    }
    return {
        name: inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hint,
            default=inspect.Parameter.empty if default is MISSING else default,
        )
        for name, (hint, default) in {**options, **_OTHERS}.items()
    }


def serve_options(given: Mapping[str, Any]) -> ServeOptions:
    """The record of what was `given`; raises InputError or ConfigError.

    With `cpus` this process runs on no other cores, nor do threads that it starts later.
    """
    values = {name: given[name] for name in ServeOptions.__slots__ if name in given}
    key, cpus = given["bundle_key"], given["cpus"]
    values["bundle_key"] = None if key is None else load_bundle_key(key)
    values["cores"] = None if cpus is None else pin_to_cores(cpus)
    return ServeOptions(**values)
