"""The probe's side of the measuring process, which may end at any request."""

import contextlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
from typing import Any

import msgspec

from devices.probe.child import ChildFailed, Reply, Request, StillRunning
from mdp.closing import Closing

_REPLY: msgspec.json.Decoder[Reply | StillRunning] = msgspec.json.Decoder(Reply | StillRunning)
#: Without numpy's idle threads beside the measured ones.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}


class ProbeWorker(Closing):
    """Starts `devices.probe.child` at the first request, and again after it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115, closed by `close`
        #: Compiled models of other runs are not reused, and those of this one are removed.
        self._cache = tempfile.TemporaryDirectory(prefix="mdp-probe-")

    def request(self, request: Request, limit_s: float) -> Reply:
        """The reply; Failed if the process ends, or sends nothing for `limit_s`.

        A process that has answered before and has ended since is replaced.
        """
        used = self._process is not None
        reply = self._reply_to(request, limit_s)
        if reply is None and used:
            reply = self._reply_to(request, limit_s)
        return reply or ChildFailed(reason=f"the measuring process ended: {self._last_words()}")

    def _reply_to(self, request: Request, limit_s: float) -> Reply | None:
        """The reply, or None if the process ended without one."""
        process = self._ensure_started()
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
                return ChildFailed(reason=f"nothing was heard for {limit_s:g} s")
            if not line:
                self.stop()
                return None
            reply = _REPLY.decode(line)
            if not isinstance(reply, StillRunning):
                return reply

    def _ensure_started(self) -> "subprocess.Popen[bytes]":
        if self._process is None or self._process.poll() is not None:
            self.stop()
            self._lines = queue.SimpleQueue()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "devices.probe.child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=os.environ | _ENVIRONMENT | {"XDG_CACHE_HOME": self._cache.name},
                # Ctrl-C is for the probe alone; `stop` ends the whole session.
                start_new_session=True,
            )
            read = threading.Thread(target=_read, args=(self._process, self._lines), daemon=True)
            read.start()
        return self._process

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no reason"

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
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()

    def close(self) -> None:
        """End the process and remove its files."""
        self.stop()
        self._stderr.close()
        self._cache.cleanup()


def _read(process: Any, lines: "queue.SimpleQueue[bytes]") -> None:
    with process.stdout as replies:
        for line in replies:
            lines.put(line)
    lines.put(b"")
