"""The same sub-model served by the agent here and by one elsewhere, and what both make of crops."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import onnx

from mdp.files import write_json
from mdp.formats.bundle import MANIFEST, Bundle, model_path
from mdp.formats.fleet import new_fleet
from mdp.formats.keys import load_pair, new_keys
from mdp.formats.plan import Assignment
from mdp.formats.profile import Precision
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels, crop
from mdp.protocol.messages import Infer, Result, contribution_of, encode
from mdp.testing.agents import ANY_PORT, AgentProcess
from mdp.testing.bundles import colour_picture
from mdp.transport import new_pair, public_key_of
from partitioner.export.quantize import quantized
from tests.support.fakes import StrangePeer
from tests.support.fleet import PLENTY_MS, ROOT
from tests.support.models.quantized import put_models

#: The manifest of a bundle of plain ViTs; its models are drawn anew.
REFERENCE = ROOT / "tests/support/plain_vits"
DEVICES = [a.device for a in Bundle.open(REFERENCE).manifest.plan.assignments]
PICTURES = 16


@dataclass
class Pair:
    """Agents by where they run, with the sub-model of one device."""

    bundle: Bundle
    device: str
    folder: Path
    #: How long an agent may take for anything.
    patience_s: float
    agents: dict[str, AgentProcess] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)

    def options(self, where: str) -> list[str]:
        """What `mdp-agent` is told about the agent that runs there; makes its keys."""
        if not (self.folder / "client.secret").exists():
            new_keys(self.folder, "client", new_pair)
        new_keys(self.folder, where, new_pair)
        return ["run", "--json", "--bundle", str(self.bundle.path), "--device", self.device,
                "--bind", ANY_PORT, "--threads", "1", "--key", str(self.folder / f"{where}.secret"),
                "--clients", str(self.folder / "client.public")]  # fmt: skip

    def crops(self) -> list[Pixels]:
        """The device's crops of some pictures."""
        assignment = self.bundle.assignment(self.device)
        return [
            crop(picture, assignment.region, assignment.spec.image_size) for picture in pictures()
        ]

    def peer(self, where: str) -> StrangePeer:
        """A connection to one of the agents, with the client's key."""
        own = load_pair(self.folder / "client.secret", public_key_of)
        server = load_pair(self.folder / f"{where}.secret", public_key_of).public
        return StrangePeer(self.agents[where].address, (own.public, own.secret, server))

    def infer(self, number: int) -> Infer:
        """A request for this sub-model."""
        assignment = self.bundle.assignment(self.device)
        return Infer(
            request_id=number,
            digest=self.bundle.digest,
            k=assignment.k,
            budget_ms=PLENTY_MS,
            image_size=assignment.spec.image_size,
            encoding="raw",
        )

    def logits(self, where: str) -> list[Contribution]:
        """Both heads' logits of every crop."""
        answers = []
        with self.peer(where) as peer:
            for number, pixels in enumerate(self.crops()):
                peer.send(encode(self.infer(number), pixels.tobytes()))
                reply = peer.receive(self.patience_s)
                assert isinstance(reply.message, Result), reply.message
                assert reply.message.request_id == number
                answers.append(contribution_of(reply.buffers[0], reply.message.num_classes))
        return answers

    def fleet(self, where: str) -> Path:
        """A fleet file of one of the agents alone."""
        path = self.folder / f"{where}.toml"
        key = load_pair(self.folder / f"{where}.secret", public_key_of).public
        new_fleet(
            self.bundle,
            [f"{self.device}={self.agents[where].address}"],
            path,
            public_key=lambda name: key,
            key=self.folder / "client.secret",
        )
        return path


@dataclass(frozen=True)
class Likeness:
    """How alike two agents' logits are."""

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

    def changed(assignment: Assignment) -> Assignment:
        return msgspec.structs.replace(assignment.in_precision(precision), **changes)

    plan = reference.manifest.plan
    assignments = [changed(assignment) for assignment in plan.assignments]
    manifest = msgspec.structs.replace(
        reference.manifest,
        plan=msgspec.structs.replace(plan, assignments=assignments),
        evaluation=None,
    )
    write_json(folder / MANIFEST, manifest)
    models = {
        a.k: onnx.load_from_string(quantized((folder / model_path(a.k)).read_bytes(), precision))
        for a in assignments
    }
    return put_models(folder, models)
