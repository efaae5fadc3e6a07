"""Files that answers are appended to, one line each: CSV, or JSON lines."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from mdp.errors import InputError
from mdp.line.file import LineFile

#: Columns of an answer, or of an error in its place, after those that say what was answered.
ANSWER_COLUMNS = (
    "label",
    "probability",
    "mode",
    "used",
    "missing",
    "expected_accuracy",
    "latency_ms",
    "frame_spread_ms",
    "suspects",
    "error",
    "known",
    "novelty",
)


def cells(told: Mapping[str, object], columns: Sequence[str]) -> list[object]:
    """An answer's values of `columns`; several devices in a cell are separated by spaces."""
    # Where nobody answered, everyone is missing.
    told = {**told, "missing": told.get("missing", told.get("outcomes", {}))}
    found = []
    for column in columns:
        value = told.get(column)
        # Of devices with their reasons, the names.
        found.append(" ".join(value) if isinstance(value, (list, tuple, dict)) else value)
    return found


@contextmanager
def answer_writer(
    path: Path | None, columns: Sequence[str]
) -> Iterator[Callable[[Mapping[str, object]], None]]:
    """A function that appends an answer, under its JSON names, to `path`; without one, does not.

    A line is written whole, at once. Raises InputError for a file of another kind or with other
    columns, and where it cannot be written.
    """
    if path is None:
        yield lambda told: None
        return
    if path.suffix not in (".csv", ".jsonl"):
        raise InputError(f"--out {path}: expected a file that ends in .csv or .jsonl")
    header = _row(columns)
    with LineFile(path) as file:
        first = file.read_first(len(header) + 1)
        if path.suffix == ".csv" and first not in (b"", header + b"\n"):
            raise InputError(f"{path}: expected an empty file, or columns {','.join(columns)}")

        def write(told: Mapping[str, object]) -> None:
            if path.suffix == ".csv":
                file.append(_row(cells(told, columns)))
            else:
                file.append(msgspec.json.encode(told))

        if path.suffix == ".csv" and not first:
            file.append(header)
        yield write


def _row(values: Iterable[object]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(values)
    return text.getvalue().encode()
