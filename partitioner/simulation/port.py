"""The network port that all crops of a client leave through, one picture after another.

Crops of one picture leave interleaved over separate connections; only when all have left is
predictable (measured: docs/lab-log.md). So each crop counts as the last of its picture, as in
plans. A connection keeps the order of its messages, so a picture waits for those before it.
"""

from typing import Any

from partitioner.simulation.device import Push, SimulatedDevice

#: Device, call, and the request's budget in seconds.
Crop = tuple[SimulatedDevice, Any, float]


class ClientPort:
    """One client's network port, of `bandwidth_bps`."""

    __slots__ = ("_bandwidth_bps", "_crops", "_free_s", "_push")

    def __init__(self, bandwidth_bps: float, push: Push) -> None:
        self._bandwidth_bps, self._push = bandwidth_bps, push
        self._free_s = 0.0
        #: Crops sent at this moment: those of a picture, or of hedges.
        self._crops: list[Crop] = []

    def send(self, now_s: float, crop: Crop) -> None:
        """Send a crop; all crops of one moment share the port."""
        if not self._crops:
            # The event follows all sends of this moment.
            self._push(now_s, self._leave, None)
        self._crops.append(crop)

    def _leave(self, now_s: float, _: None) -> None:
        crops, self._crops = self._crops, []
        bits = 8 * sum(device.model.request_bytes for device, _, _ in crops)
        self._free_s = max(self._free_s, now_s) + bits / self._bandwidth_bps
        for crop in crops:
            model = crop[0].model
            # The device's link ends with the port, or later where it is the slower one.
            quicker_bps = max(self._bandwidth_bps, model.bandwidth_bps)
            sets_out_s = self._free_s - 8 * model.request_bytes / quicker_bps
            self._push(max(now_s, sets_out_s), _set_out, crop)


def _set_out(now_s: float, crop: Crop) -> None:
    device, call, budget_s = crop
    device.send(now_s, call, budget_s)
