"""Names in another order, without copying them all."""

from collections.abc import Sequence
from typing import overload


class Ranked(Sequence[str]):
    """`devices` with `first` before the others, which keep their order."""

    __slots__ = ("_devices", "_first", "_rest")

    def __init__(self, first: Sequence[str], devices: Sequence[str]) -> None:
        self._first, self._devices = first, devices
        self._rest: list[str] | None = None

    def __len__(self) -> int:
        return len(self._devices)

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[str]: ...
    def __getitem__(self, at: int | slice) -> str | Sequence[str]:
        if isinstance(at, int) and 0 <= at < len(self._first):
            return self._first[at]
        if self._rest is None:
            # Only made where the first ones have failed: there may be thousands of others.
            rest = list(self._devices[:])
            for device in self._first:
                rest.remove(device)
            self._rest = [*self._first, *rest]
        return self._rest[at]
