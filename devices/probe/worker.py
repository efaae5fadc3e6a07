"""The process that measures, as the probe sees it: requests in, replies out, and it may die."""

import os
import queue
import subprocess
import sys
import tempfile
import threading
from types import TracebackType
from typing import Any, Self

import msgspec

from devices.probe.child import Failed, Passed, Reply, Request
from mdp.errors import AgentError

_REPLY: msgspec.json.Decoder[Reply | Passed] = msgspec.json.Decoder(Reply | Passed)
#: Idle threads of numpy's are not wanted in a process that measures.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}


class Worker:
    """Starts `devices.probe.child` when it is needed, and again when it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115, closed by `close`
        #: Of what is compiled for a probe nothing is left behind, nor found.
        self._cache = tempfile.TemporaryDirectory(prefix="mdp-probe-")

    def ask(self, request: Request, limit_s: float) -> Reply:
        """The reply; a process that dies or says nothing for `limit_s` is a Failed one.

        A process that has answered before may have ended since, and is replaced by another.
        """
        used = self._process is not None
        reply = self._asked(request, limit_s)
        if reply is None and used:
            reply = self._asked(request, limit_s)
        return reply or Failed(reason=f"the measuring process ended: {self._last_words()}")

    def _asked(self, request: Request, limit_s: float) -> Reply | None:
        """The reply, or None if the process ended without one."""
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            process.stdin.flush()
        except OSError:
            self.stop()
            return None
        while True:
            try:
                line = self._lines.get(timeout=limit_s)
            except queue.Empty:
                self.stop()
                return Failed(reason=f"nothing was heard for {limit_s:g} s")
            if not line:
                self.stop()
                return None
            reply = _REPLY.decode(line)
            if not isinstance(reply, Passed):
                return reply

    def _started(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._lines = queue.SimpleQueue()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "devices.probe.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=os.environ | _ENVIRONMENT | {"XDG_CACHE_HOME": self._cache.name},
                # Ctrl-C is for the probe alone, and stopping means the forks too.
                start_new_session=True,
            )
            read = threading.Thread(target=_read, args=(self._process, self._lines), daemon=True)
            read.start()
        return self._process

    def _last_words(self) -> str:
        self._stderr.seek(0)
        said = self._stderr.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else "no reason"

    def stop(self) -> None:
        """End the process and its forks."""
        if self._process is None:
            return
        process, self._process = self._process, None
        if process.poll() is None:
            if hasattr(os, "killpg"):
                os.killpg(process.pid, 9)
            else:
                process.kill()
        process.wait()
        assert process.stdin is not None
        try:
            process.stdin.close()
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                raise AgentError(f"the measuring process: {error}") from error

    def close(self) -> None:
        """End everything."""
        self.stop()
        self._stderr.close()
        self._cache.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _read(process: Any, lines: "queue.SimpleQueue[bytes]") -> None:
    with process.stdout as replies:
        for line in replies:
            lines.put(line)
    lines.put(b"")
