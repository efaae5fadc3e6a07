"""A client's one network port: all its crops leave through it, pictures one after another.

Crops of one picture go over connections of their own, which take turns with each other in an order
that nobody can foretell; when all have left can be (measured: docs/lab-log.md). So each is taken to
be the last of its picture, as plans take it. On one connection messages keep their order, so a
picture waits for those before it.
"""

from typing import Any

from partitioner.simulation.device import Push, SimulatedDevice

#: A crop: to whom, of which call, and the budget that goes with it in seconds.
Crop = tuple[SimulatedDevice, Any, float]


class ClientPort:
    """What leaves one client, at `bandwidth_bps`."""

    __slots__ = ("_bandwidth_bps", "_crops", "_free_s", "_push")

    def __init__(self, bandwidth_bps: float, push: Push) -> None:
        self._bandwidth_bps, self._push = bandwidth_bps, push
        self._free_s = 0.0
        #: What was handed over at this very moment: a picture, or what a hedge adds to one.
        self._crops: list[Crop] = []

    def send(self, now_s: float, crop: Crop) -> None:
        """Hand a crop over; all that are handed over at one moment share the port."""
        if not self._crops:
            # After everything that has led to this moment: by then they are all here.
            self._push(now_s, self._leave, None)
        self._crops.append(crop)

    def _leave(self, now_s: float, _: None) -> None:
        crops, self._crops = self._crops, []
        bits = 8 * sum(device.model.request_bytes for device, _, _ in crops)
        self._free_s = max(self._free_s, now_s) + bits / self._bandwidth_bps
        for crop in crops:
            model = crop[0].model
            # Its own link takes it up in time to be through with it just when the port is. A slower
            # one takes longer, and begins when the port has carried everything else.
            quicker_bps = max(self._bandwidth_bps, model.bandwidth_bps)
            sets_out_s = self._free_s - 8 * model.request_bytes / quicker_bps
            self._push(max(now_s, sets_out_s), _set_out, crop)


def _set_out(now_s: float, crop: Crop) -> None:
    device, call, budget_s = crop
    device.send(now_s, call, budget_s)
