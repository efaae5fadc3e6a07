"""Markdown tables of records."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+")


@dataclass(frozen=True, slots=True)
class Column:
    """A head with its unit, and each row's cell: a template of `str.format`, or a function.

    A template names keys of a mapping (`{ms[p50]:.2f}`) or attributes of another row (`{0.name}`).
    """

    head: str
    cell: str | Callable[[Any], object]
    #: `min` or `max`: the cells with the best first number are bold.
    best: Callable[[list[float]], float] | None = None

    def cells(self, rows: Sequence[Any]) -> list[str]:
        texts = [self._text(row).replace("|", r"\|") for row in rows]
        if self.best is None:
            return texts
        found = [_NUMBER.match(text) for text in texts]
        numbers = [float(one[0].replace(",", "")) if one else None for one in found]
        best = self.best([number for number in numbers if number is not None])
        return [f"**{t}**" if n == best else t for t, n in zip(texts, numbers, strict=True)]

    def _text(self, row: Any) -> str:
        if not isinstance(self.cell, str):
            return str(self.cell(row))
        return self.cell.format(row, **row) if isinstance(row, Mapping) else self.cell.format(row)


def table(rows: Iterable[Any], *columns: tuple[Any, ...], title: str = "") -> str:
    """`rows` as a Markdown table, under a heading if it has a title; ends without a newline.

    Each of `columns` has the fields of a `Column`.
    """
    rows, made = list(rows), [Column(*fields) for fields in columns]
    cells = zip(*(column.cells(rows) for column in made), strict=True)
    lines = [f"| {' | '.join(line)} |" for line in ([column.head for column in made], *cells)]
    lines.insert(1, "|" + "---|" * len(made))
    return "\n".join([f"### {title}\n", *lines] if title else lines)
