"""A gateway process that signals make fail, as they do a device."""

import json
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.soak.over_http import MODEL
from mdp.closing import Closing
from mdp.testing.processes import LineProcess

_START_ATTEMPTS = 20


class FaultyGateway(Closing):
    """`mdp gateway` for one fleet; started again where it listened before."""

    def __init__(self, fleet: Path, log: Path, *, patience_s: float) -> None:
        """Start it; its standard error goes to `log`."""
        self._fleet, self._log, self._patience_s = fleet, log, patience_s
        #: HOST:PORT.
        self.host = "127.0.0.1:0"
        self.process = self._start()

    def _start(self) -> LineProcess:
        program = [Path(sys.executable).parent / "mdp", "gateway", "--json"]
        where = ["--bind", self.host, "--fleet", f"{MODEL}={self._fleet}"]
        process = LineProcess(
            "the gateway", [*program, *where], self._log, patience_s=self._patience_s
        )
        try:
            self.host = urlsplit(json.loads(process.line("an event"))["url"]).netloc
        except BaseException:
            process.close()
            raise
        return process

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()

    def hang(self) -> None:
        """SIGSTOP."""
        self.process.stop()

    def resume(self) -> None:
        """SIGCONT."""
        self.process.signal(signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM; raises AssertionError for another exit code than 0."""
        code = self.process.terminate()
        assert code == 0, f"the gateway ended with {code} on SIGTERM: {self.process.stderr}"
        self.process.close()

    def restart(self) -> None:
        """Start it again, once it has ended, and wait until it listens."""
        for _ in range(_START_ATTEMPTS):
            # An outgoing connection may hold the port for a moment.
            with suppress(AssertionError):
                self.process = self._start()
                return
            time.sleep(0.5)
        raise AssertionError(f"the gateway does not start again: {self.process.stderr}")

    def complaints(self) -> list[str]:
        """Errors that it had not foreseen, by its log."""
        count = self.process.stderr.count("Traceback")
        return [f"the gateway: {count} unforeseen errors: {self.process.stderr}"] if count else []

    def close(self) -> None:
        """End it."""
        self.process.close()
