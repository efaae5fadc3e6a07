"""Paces are pictures a second of real steps, by the clock that is handed in."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from partitioner.crew.worker import probe  # noqa: E402
from partitioner.crew.worker.probe import TIMED, WARM_UP, answering_pace, training_pace  # noqa: E402
from partitioner.networks.members import build_member  # noqa: E402
from partitioner.training.cached_outputs import batch  # noqa: E402
from tests.support.models.runs import spec  # noqa: E402

pytestmark = pytest.mark.torch


def test_paces_are_pictures_over_median_seconds() -> None:
    def clock() -> Iterator[float]:
        now_s = 0.0
        for step in range(WARM_UP + TIMED):
            yield now_s
            now_s += 100.0 if step < WARM_UP else 0.5
            yield now_s

    member = build_member(spec(8, 16), 3)
    before = {name: value.clone() for name, value in member.state_dict().items()}
    ticks = clock()
    assert answering_pace(member, 8, 4, "fp32", lambda: next(ticks)) == 8.0
    assert all(torch.equal(before[name], value) for name, value in member.state_dict().items())
    ticks = clock()
    assert training_pace(member, 8, 4, "fp32", lambda: next(ticks)) == 8.0
    assert any(not torch.equal(before[name], value) for name, value in member.state_dict().items())


def test_pictures_come_as_in_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Any]()
    of_normalised = probe._logits

    def logits(network: Any, pixels: Any) -> Any:
        seen.append(pixels)
        return of_normalised(network, pixels)

    monkeypatch.setattr(probe, "_logits", logits)
    training_pace(build_member(spec(8, 16), 3), 8, 4, "fp32")
    views = np.zeros((6, 8, 8, 3), np.uint8)
    trained = batch(views, np.arange(4), torch.device("cpu"))
    assert len(seen) == WARM_UP + TIMED
    for pixels in seen:
        assert (pixels.shape, pixels.dtype) == (trained.shape, trained.dtype)
        assert pixels.stride() == trained.stride()
        assert 0 <= pixels.min() < pixels.max() <= 255
