"""Detects devices whose logits do not depend on the picture. Pure.

Logits of a working sub-model differ in some bit for pictures that differ. One that has lost its
weights, or whose camera or accelerator hangs, gives the very same bytes again and again.
"""

import zlib

from mdp.protocol.messages import Buffer

#: So many different crops in a row with logits of the same bytes are no chance.
DIFFERENT_CROPS = 4
#: Crops that differ in so many bytes of their middle are different ones. Somebody waits meanwhile:
#: all of a crop of 224 pixels would take 50 us and more.
SAMPLE_BYTES = 4096
CONSTANT = f"the same logits for {DIFFERENT_CROPS} different crops in a row"


class StuckOutputDetector:
    """One device's last logits, and the different crops that had them."""

    __slots__ = ("_crops", "_last", "_logits")

    def __init__(self) -> None:
        self._logits = b""
        #: Of the crops in question, sums of their middles, and the last one's middle.
        self._crops: set[int] = set()
        self._last = b""

    def is_constant(self, logits: Buffer, crop: Buffer) -> bool:
        """Tell whether `logits` are those of many different crops in a row, `crop` being the last.

        Crops are only looked at where logits repeat, as they do for a picture that is shown twice.
        """
        if logits != self._logits:
            self._logits = bytes(logits)
            self._crops.clear()
            return False
        if len(self._crops) < DIFFERENT_CROPS:
            middle = len(crop) // 2
            sample = bytes(crop[middle : middle + SAMPLE_BYTES])
            # Mostly the same picture is shown again, which is seen at once.
            if sample != self._last or not self._crops:
                self._crops.add(zlib.crc32(sample))
                self._last = sample
        return len(self._crops) >= DIFFERENT_CROPS
