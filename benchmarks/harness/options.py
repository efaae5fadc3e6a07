"""Command-line options, one way for all benchmarks."""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from typing import Any


def arguments(doc: str | None, *flags: str, **options: Any) -> Namespace:
    """Parse the command line of a benchmark whose help is `doc`.

    `flags` are switches. The value of each of `options` is its default and has its type. A tuple
    holds the choices, of which some may be named and all are the default; a type is required.
    """
    parser = ArgumentParser(description=doc, formatter_class=RawDescriptionHelpFormatter)
    for flag in flags:
        parser.add_argument(f"--{flag}", action="store_true")
    for name, value in options.items():
        key = f"--{name.replace('_', '-')}"
        if isinstance(value, type):
            parser.add_argument(key, type=value, required=True)
        elif isinstance(value, tuple):
            parser.add_argument(key, nargs="+", choices=value, default=value, metavar="NAME")
        else:
            parser.add_argument(key, type=type(value), default=value)
    return parser.parse_args()
