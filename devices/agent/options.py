"""An operator's options for serving a device's part of a bundle."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from devices.agent.bundles import GRACE_S, LoadableBundle
from devices.agent.store import current_folder
from devices.camera.capture import DEFAULT_FPS, open_frame_buffer
from devices.camera.frames import FrameBuffer
from mdp.errors import AgentError, InputError
from mdp.formats.bundle import Bundle
from mdp.formats.mask import CameraMask, read_mask
from mdp.formats.signing import BundleKey
from mdp.protocol.messages import request_frame_bytes
from mdp.runtimes.base import Execution, NotHereError, Runtime
from mdp.runtimes.select import open_runtime

MAX_PUSH_MB = 500.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `mdp-agent run`; where None is possible for a setting, the plan decides."""

    #: This device's name in the plan.
    device: str
    #: The bundle's folder, or a link to one, which a reload follows again; None: the first one is
    #: pushed.
    bundle: Path | None = None
    #: Bundles have to be signed with it; None accepts any.
    bundle_key: BundleKey | None = None
    bind: str = "tcp://127.0.0.1:7500"
    #: The agent's secret key file, and its clients' public ones; both or neither.
    key: Path | None = None
    clients: Path | None = None
    #: Plain text is accepted on an address that other machines reach.
    insecure: bool = False
    threads: int | None = None
    #: Whether threads spin while they wait for each other.
    spin: bool | None = None
    #: How many cores this process may use; None for all.
    cores: int | None = None
    #: Most pictures to compute at once.
    batch: int | None = None
    #: How long a replaced bundle is served after its last request; after it was replaced, if a
    #: further one is to take its place.
    grace_s: float = GRACE_S
    allow_fallback: bool = False
    #: The agent's own camera, as `--source` names it.
    source: str | None = None
    source_fps: float = DEFAULT_FPS
    #: The public key file of the agent whose camera that is.
    source_key: Path | None = None
    #: Whether clients may fetch its pictures.
    allow_record: bool = False
    #: The file of the camera's mask, and whether clients may change it.
    mask: Path | None = None
    allow_mask: bool = False
    audit: Path | None = None
    #: Whether the agent is announced on the local network.
    announce: bool = False
    #: Where bundles that clients push are kept; None: they may not.
    allow_push: Path | None = None
    #: Of one pushed bundle.
    max_push_mb: float = MAX_PUSH_MB

    def awaits_bundle(self) -> bool:
        """Tell whether there is no bundle to serve before one is pushed.

        Raises ConfigError, and InputError where none can be pushed.
        """
        if self.bundle is None and self.allow_push is None:
            raise InputError("--bundle: expected a bundle folder, or --allow-push for a first one")
        return current_folder(self.allow_push, self.bundle) is None

    def frame_buffer(self) -> FrameBuffer | None:
        """A buffer for the camera, which is opened later; None without one.

        Raises InputError or ConfigError, or AgentError if OpenCV is needed and not installed.
        """
        if self.source_key is not None and not (self.source or "").startswith("mdp:"):
            raise InputError("--source-key: expected --source mdp://HOST:PORT beside it")
        if self.source is None:
            return None
        # Read first: no picture is taken without it.
        mask = self._mask()
        buffer = open_frame_buffer(
            self.source, self.source_fps, key=self.key, source_key=self.source_key
        )
        buffer.set_mask(mask)
        return buffer

    def _mask(self) -> CameraMask | None:
        """The mask to begin with; raises ConfigError."""
        if self.mask is None or (self.allow_mask and not os.path.lexists(self.mask)):
            return None
        return read_mask(self.mask)

    def loadable(
        self, max_frame_bytes: int | None = None, folder: Path | None = None
    ) -> LoadableBundle:
        """Read the bundle in `folder`, by default the one to serve: pushed last, or `bundle`.

        Raises ConfigError, InputError where there is none, or AgentError if its crops are larger
        than `max_frame_bytes`.
        """
        folder = folder or current_folder(self.allow_push, self.bundle)
        if folder is None:
            raise InputError("--bundle: expected a bundle folder, got none")
        # Resolved once: what is loaded later is the folder that was read.
        bundle = Bundle.open(folder.resolve(), signed_by=self.bundle_key)
        assignment = bundle.assignment(self.device)
        needed = request_frame_bytes(assignment.spec.image_size)
        if max_frame_bytes is not None and needed > max_frame_bytes:
            raise AgentError(
                f"its crops of {needed:,} bytes are larger than the {max_frame_bytes:,} that this "
                "agent accepts since its start: restart it"
            )
        threads = self.threads
        if threads is None:
            threads = min(assignment.threads, self.cores or assignment.threads)
        spin = assignment.spin if self.spin is None else self.spin

        def load(rung: int) -> Runtime:
            execution = Execution.of(assignment.at(rung))
            try:
                return open_runtime(
                    bundle.model(assignment.k, rung),
                    replace(execution, threads=threads, spin=spin),
                    num_classes=len(bundle.manifest.labels),
                    allow_fallback=self.allow_fallback,
                )
            except NotHereError as error:
                raise AgentError(
                    f"{error}; --allow-fallback accepts another one, which every status names"
                ) from error

        batch = assignment.batch if self.batch is None else self.batch
        top, *lower = [partial(load, rung) for rung in range(1 + len(assignment.lower))]
        return LoadableBundle(
            bundle=bundle, assignment=assignment, load=top, load_lower=lower, batch=batch
        )
