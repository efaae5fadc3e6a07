"""A device that says the same whatever it is shown. Pure.

Logits of a working sub-model differ in some bit for pictures that differ. One that has lost its
weights, or whose camera or accelerator hangs, gives the very same bytes again and again.
"""

import zlib

from mdp.wire import Buffer

#: So many different crops in a row with logits of the same bytes are no chance.
DIFFERENT_CROPS = 4
CONSTANT = f"the same logits for {DIFFERENT_CROPS} different crops in a row"


class Monotony:
    """What one device has said last, and of how many different crops."""

    __slots__ = ("_crops", "_logits")

    def __init__(self) -> None:
        self._logits = b""
        self._crops: set[int] = set()

    def is_constant(self, logits: Buffer, crop: Buffer) -> bool:
        """Whether `logits` are those of many different crops in a row, of which `crop` is the last.

        Crops are only looked at where logits repeat, as they do for a picture that is shown twice.
        """
        if logits != self._logits:
            self._logits = bytes(logits)
            self._crops.clear()
            return False
        if len(self._crops) < DIFFERENT_CROPS:
            self._crops.add(zlib.crc32(crop))
        return len(self._crops) >= DIFFERENT_CROPS
