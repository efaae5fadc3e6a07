"""The end of the demo by SIGTERM."""

import signal
import sys
from typing import Any


def exit_by_sigterm(code: int) -> Any:
    """From now on have SIGTERM end this program in order, with exit code `code`.

    Returns the handler before. To be called in the main thread.
    """

    def end(*_: object) -> None:
        # A second one, as `timeout` sends to its group, would break off the clean-up.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(code)

    return signal.signal(signal.SIGTERM, end)
