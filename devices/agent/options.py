"""How an operator wants a device's part of a bundle served."""

from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from devices.agent.bundles import Candidate
from mdp.errors import AgentError
from mdp.formats.bundle import Bundle
from mdp.formats.signing import BundleKey
from mdp.protocol.messages import request_frame_bytes
from mdp.runtimes.base import Execution, NotHereError, Runtime
from mdp.runtimes.select import open_runtime


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What `mdp-agent run` was told; None leaves it to the plan."""

    device: str
    threads: int | None = None
    #: Whether threads wait for each other awake.
    spin: bool | None = None
    #: How many cores this process may use; None for all.
    cores: int | None = None
    batch: int | None = None
    allow_fallback: bool = False
    #: Bundles have to be signed with it; None accepts any.
    bundle_key: BundleKey | None = None

    def candidate(self, folder: Path, max_frame_bytes: int | None = None) -> Candidate:
        """The bundle at `folder`, a folder or a link to one, ready to be loaded.

        Raises ConfigError, or AgentError if its crops are larger than `max_frame_bytes`.
        """
        # What a link leads to now is what is loaded, wherever it leads by then.
        bundle = Bundle.open(folder.resolve(), signed_by=self.bundle_key)
        assignment = bundle.assignment(self.device)
        needed = request_frame_bytes(assignment.spec.image_size)
        if max_frame_bytes is not None and needed > max_frame_bytes:
            raise AgentError(
                f"its crops of {needed:,} bytes are larger than the {max_frame_bytes:,} that this "
                "agent has been taking since its start: start it anew"
            )
        threads = self.threads
        if threads is None:
            threads = min(assignment.threads, self.cores or assignment.threads)
        execution = replace(
            Execution.of(assignment),
            threads=threads,
            spin=assignment.spin if self.spin is None else self.spin,
        )

        def load() -> Runtime:
            try:
                return open_runtime(
                    bundle.model(assignment.k),
                    execution,
                    num_classes=len(bundle.manifest.labels),
                    allow_fallback=self.allow_fallback,
                )
            except NotHereError as error:
                raise AgentError(
                    f"{error}; --allow-fallback accepts another one and says so in every status"
                ) from error

        batch = assignment.batch if self.batch is None else self.batch
        return Candidate(bundle=bundle, assignment=assignment, load=load, batch=batch)
