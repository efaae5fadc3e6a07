"""An operator's options for serving a device's part of a bundle."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from devices.agent.bundles import GRACE_S, LoadableBundle
from devices.agent.store import current_folder
from devices.camera.capture import DEFAULT_FPS, open_frame_buffer
from devices.camera.certificate import check_phone
from devices.camera.frames import FrameBuffer
from mdp.cameras import parse_source
from mdp.errors import AgentError, InputError
from mdp.formats.bundle import Bundle
from mdp.formats.mask import CameraMask, read_mask
from mdp.formats.packaged import bundle_by_name
from mdp.formats.profile import MAX_THREADS
from mdp.formats.signing import BundleKey
from mdp.protocol.messages import request_frame_bytes
from mdp.runtimes.base import Execution, NotHereError, Runtime
from mdp.runtimes.select import open_runtime

MAX_PUSH_MB = 500.0


MaskFile = Annotated[
    Path | None,
    typer.Option(
        help="Of --source, use only what this file leaves, before anything leaves the device: "
        "mask.toml, as the gateway's page draws it."
    ),
]
AllowMask = Annotated[
    bool,
    typer.Option(
        "--allow-mask",
        help="Let clients change --mask, which need not exist yet, whose keys may: "
        "`mask = true` in NAME.limits.",
    ),
]
#: Where an agent listens unless it is told.
DEFAULT_BIND = "tcp://127.0.0.1:7500"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Options of `mdp-agent run`; where None is possible for a setting, the plan decides.

    Each field with a `typer.Option` is an option of the command line (devices/cli/options.py).
    """

    device: Annotated[str, typer.Option(help="This device's name in the bundle's plan.")]
    #: The folder, or a link to one, which a reload follows again.
    bundle: Annotated[
        Path | None,
        typer.Option(
            callback=bundle_by_name,
            help="Bundle folder made by mdp-partition, or the name of one of MDP's; without it, "
            "with --allow-push, the agent waits for a first one, and can be recorded meanwhile.",
        ),
    ] = None
    #: Bundles have to be signed with it; None accepts any.
    bundle_key: BundleKey | None = None
    bind: Annotated[str, typer.Option(help="Address to listen on; port 0 takes any free one.")] = (
        DEFAULT_BIND
    )
    #: Both or neither of `key` and `clients`.
    key: Annotated[
        Path | None, typer.Option(help="This agent's secret key file, made by `mdp keys new`.")
    ] = None
    clients: Annotated[
        Path | None,
        typer.Option(help="Public key file of the client to let in, or a folder of them."),
    ] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Serve other machines in plain text.")
    ] = False
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_THREADS, help="Instead of the plan's number of threads."),
    ] = None
    spin: Annotated[
        bool | None,
        typer.Option(
            help="Whether threads spin while they wait for each other, instead of as planned: "
            "for cores that nothing else uses."
        ),
    ] = None
    #: How many cores this process may use; None for all.
    cores: int | None = None
    batch: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Most pictures to compute at once, instead of the plan's number."
        ),
    ] = None
    grace_s: Annotated[
        float,
        typer.Option(
            min=0,
            max=86_400,
            help="How long a replaced bundle is served after its last request; after it was "
            "replaced, if a further one is to take its place.",
        ),
    ] = GRACE_S
    allow_fallback: Annotated[
        bool, typer.Option(help="Accept another provider, runtime or precision than planned.")
    ] = False
    source: Annotated[
        str | None,
        typer.Option(
            envvar="MDP_SOURCE",
            help="The agent's own camera: folder:PATH, video:FILE, camera:NUMBER or "
            "rtsp://HOST/PATH; a phone's, which opens a page on this port: phone:PORT; or that of "
            "the agent at mdp://HOST:PORT.",
        ),
    ] = None
    source_fps: Annotated[
        float, typer.Option(min=0.01, max=240, help="Frames a second to take of --source.")
    ] = DEFAULT_FPS
    source_key: Annotated[
        Path | None, typer.Option(help="With mdp://HOST:PORT: the public key file of that agent.")
    ] = None
    allow_record: Annotated[
        bool,
        typer.Option(
            "--allow-record",
            help="Let clients fetch pictures of --source (`mdp record`), whose keys may: "
            "`record = true` in NAME.limits.",
        ),
    ] = False
    mask: MaskFile = None
    allow_mask: AllowMask = False
    audit: Annotated[
        Path | None,
        typer.Option(
            help="Append connections, refusals, pushes, recordings, masks, lost keys: JSON lines."
        ),
    ] = None
    announce: Annotated[
        bool,
        typer.Option("--announce", help="Announce it on the local network (`mdp fleet discover`)."),
    ] = False
    allow_push: Annotated[
        Path | None,
        typer.Option(
            help="Folder for bundles that clients push (`mdp bundle push`), whose keys may: "
            "`push = true` in NAME.limits. The last one is served instead of --bundle."
        ),
    ] = None
    max_push_mb: Annotated[
        float, typer.Option(min=0.001, max=1e6, help="Largest pushed bundle, in MB.")
    ] = MAX_PUSH_MB

    def awaits_bundle(self) -> bool:
        """Tell whether there is no bundle to serve before one is pushed.

        Raises ConfigError, and InputError where none can be pushed.
        """
        if self.bundle is None and self.allow_push is None:
            raise InputError("--bundle: expected a bundle folder, or --allow-push for a first one")
        return current_folder(self.allow_push, self.bundle) is None

    def check_camera(self) -> None:
        """Raise what `frame_buffer` would, but for files of a phone that it would write."""
        self._check_source_key()
        if self.source is not None and parse_source(self.source).kind == "phone":
            self._mask()
            check_phone()
        else:
            self.frame_buffer()

    def frame_buffer(self) -> FrameBuffer | None:
        """A buffer for the camera, which is opened later; None without one.

        Raises InputError or ConfigError, or AgentError if OpenCV is needed and not installed.
        """
        self._check_source_key()
        if self.source is None:
            return None
        # Read first: no picture is taken without it.
        mask = self._mask()
        buffer = open_frame_buffer(
            self.source, self.source_fps, key=self.key, source_key=self.source_key
        )
        buffer.set_mask(mask)
        return buffer

    def _check_source_key(self) -> None:
        if self.source_key is not None and not (self.source or "").startswith("mdp:"):
            raise InputError("--source-key: expected --source mdp://HOST:PORT beside it")

    def _mask(self) -> CameraMask | None:
        """The mask to begin with; raises ConfigError.

        One that clients may change need not be there yet; one that cannot be reached may be.
        """
        if self.mask is None:
            return None
        if self.allow_mask:
            try:
                os.lstat(self.mask)
            except FileNotFoundError:
                return None
            except OSError:
                pass  # reading it says why
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
