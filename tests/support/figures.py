"""Figures that targets of make measure; `python -m benchmarks.keep deployed` keeps them."""

import datetime
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Self

from mdp.closing import Closing
from mdp.files import write_json
from tools.engine import ROOT

FOLDER = ROOT / "runs" / "deployed"


class Figures(Closing):
    """Seconds, megabytes and counts of one part of what is deployed, with the day and the load.

    Closed, they are in runs/deployed/PART.json, which is gone until then; without any, nothing is.
    """

    def __init__(self, part: str, engines: Mapping[str, str] = MappingProxyType({})) -> None:
        """Begin; `engines` are versions of what starts the processes."""
        self.part, self.engines = part, dict(engines)
        self.values: dict[str, float] = {}
        self._load_before = os.getloadavg()[0]
        self._path = FOLDER / f"{part}.json"
        self._path.unlink(missing_ok=True)

    def put(self, **values: float) -> Self:
        """Add figures, whose units stand in their names; the last of a name counts."""
        self.values |= values
        return self

    def close(self) -> None:
        if not self.values:
            return
        FOLDER.mkdir(parents=True, exist_ok=True)
        write_json(self._path, {
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            "load": sorted(round(each, 1) for each in (self._load_before, os.getloadavg()[0])),
            "engines": self.engines,
            "values": {name: round(value, 3) for name, value in self.values.items()},
        })  # fmt: skip
        said = ", ".join(f"{name} {value:.4g}" for name, value in self.values.items())
        print(f"\nmeasured, {self.part}: {said}")
