"""The same sub-model served by the agent here and by one elsewhere, and what both make of crops."""

import io
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
import onnx

from mdp.files import write_json
from mdp.formats.bundle import MANIFEST, Bundle, model_path
from mdp.formats.keys import load_pair
from mdp.formats.plan import Assignment
from mdp.formats.profile import Precision
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels, crop
from mdp.protocol.messages import Buffer, Infer, Result, contribution_of, encode
from mdp.testing.agents import AgentFleet, AgentProcess
from mdp.testing.bundles import colour_picture
from mdp.transport import public_key_of
from partitioner.export.quantize import quantize_model
from tests.support.fakes import StrangePeer
from tests.support.fleet import PLENTY_MS, ROOT
from tests.support.models.quantized import put_models

#: The manifest of a bundle of plain ViTs; its models are drawn anew.
REFERENCE = ROOT / "tests/support/plain_vits"
DEVICES = [a.device for a in Bundle.open(REFERENCE).manifest.plan.assignments]
PICTURES = 16


class Side(AgentFleet):
    """One agent, with the sub-model of one device, and the key that its clients need."""

    def __init__(self, folder: Path, bundle: Bundle, device: str, patience_s: float) -> None:
        folder.mkdir()
        super().__init__(folder, bundle.path, keys=True, patience_s=patience_s)
        self.digest, self.assignment = bundle.digest, bundle.assignment(device)
        self.start_s = 0.0

    def begin(self, *program: str, options: Sequence[object] = ()) -> Self:
        """Start it as `program run --json ...`."""
        began_s, command = time.monotonic(), [*program, "run", "--json"]
        self.start(self.assignment.device, "--threads", 1, *options, program=command)
        self.start_s = time.monotonic() - began_s
        return self

    @property
    def agent(self) -> AgentProcess:
        """The process."""
        return self.agents[self.assignment.device]

    def requests(self) -> list[list[Buffer]]:
        """A request for each picture, numbered from 0."""
        size = self.assignment.spec.image_size
        crops = [crop(picture, self.assignment.region, size) for picture in pictures()]
        asked = [
            Infer(
                request_id=number,
                digest=self.digest,
                k=self.assignment.k,
                budget_ms=PLENTY_MS,
                image_size=size,
                encoding="raw",
            )
            for number in range(len(crops))
        ]
        return [encode(infer, pixels.tobytes()) for infer, pixels in zip(asked, crops, strict=True)]

    def peer(self) -> StrangePeer:
        """A connection with the client's key."""
        own = load_pair(self.folder / "client.secret", public_key_of)
        server = self.public_keys[self.assignment.device]
        return StrangePeer(self.agent.address, (own.public, own.secret, server))

    def logits(self) -> list[Contribution]:
        """Both heads' logits of every picture's crop."""
        answers = []
        with self.peer() as peer:
            for number, frames in enumerate(self.requests()):
                peer.send(frames)
                reply = peer.receive(self.patience_s)
                assert isinstance(reply.message, Result), reply.message
                assert reply.message.request_id == number
                answers.append(contribution_of(reply.buffers[0], reply.message.num_classes))
        return answers


@dataclass(frozen=True)
class Likeness:
    """Likeness of two agents' logits."""

    largest_logit: float
    largest_difference: float
    same_label: int


def likeness(here: Sequence[Contribution], there: Sequence[Contribution]) -> Likeness:
    """The heads of every crop beside each other."""
    both = list(zip(here, there, strict=True))
    heads = [pair for a, b in both for pair in zip(a.heads, b.heads, strict=True)]
    return Likeness(
        largest_logit=max(float(np.abs(a).max()) for a, _ in heads),
        largest_difference=max(float(np.abs(a - b).max()) for a, b in heads),
        same_label=sum(int(a.bag.argmax() == b.bag.argmax()) for a, b in both),
    )


def pictures() -> list[Pixels]:
    """Noise of every colour and of none."""
    random = np.random.default_rng(7)
    plain = [colour_picture(label) for label in ("red", "green", "blue")]
    noise = [random.integers(0, 256, (40, 40, 3), dtype=np.uint8) for _ in range(PICTURES - 3)]
    return [*plain, *noise]


def reference_bundle(folder: Path, precision: Precision, **changes: object) -> Bundle:
    """The reference plan with random weights in a precision, with `changes` of every assignment."""
    from partitioner.export.write import export_untrained
    from partitioner.run.progress import Progress

    named = Bundle.open(REFERENCE).manifest
    export_untrained(named.plan, named.labels, folder, named.name, Progress(io.StringIO()))
    reference = Bundle.open(folder)

    def change(assignment: Assignment) -> Assignment:
        return msgspec.structs.replace(assignment.in_precision(precision), **changes)

    plan = reference.manifest.plan
    assignments = [change(assignment) for assignment in plan.assignments]
    manifest = msgspec.structs.replace(
        reference.manifest,
        plan=msgspec.structs.replace(plan, assignments=assignments),
        evaluation=None,
    )
    write_json(folder / MANIFEST, manifest)
    models = {
        a.k: onnx.load_from_string(
            quantize_model((folder / model_path(a.k)).read_bytes(), precision)
        )
        for a in assignments
    }
    return put_models(folder, models)
