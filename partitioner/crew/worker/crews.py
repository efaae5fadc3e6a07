"""Training of a network with others, as a crew's plan says."""

from dataclasses import dataclass

from partitioner.crew.averaging.codecs import CODECS, Largest
from partitioner.crew.averaging.gradients import Gradients
from partitioner.crew.averaging.groups import TrainerGroups
from partitioner.crew.averaging.kfac import KfacSettings
from partitioner.crew.averaging.mean import Means
from partitioner.crew.averaging.muon import MuonSettings
from partitioner.crew.averaging.next_forward import NextForwardGradients
from partitioner.crew.averaging.owners import OuterStep
from partitioner.crew.averaging.parameters import Rounds
from partitioner.crew.bus.store import SignedStore
from partitioner.crew.messages import TrainerControl
from partitioner.crew.planning.facts import Facts
from partitioner.crew.planning.flows import Links
from partitioner.crew.planning.syncplan import (
    BUCKET_BYTES,
    KfacOwner,
    MuonOwner,
    OuterOwner,
    SyncPlan,
)
from partitioner.crew.worker.progress import Patient, WorkAccount
from partitioner.training.distributed import Crew
from partitioner.training.synchroniser import Synchroniser


@dataclass(frozen=True, slots=True, kw_only=True)
class Crews:
    """The trainings of this trainer with others."""

    plan: SyncPlan
    facts: Facts
    control: TrainerControl
    groups: TrainerGroups
    #: Where trainers say their names.
    store: SignedStore
    #: What this trainer does and costs.
    account: WorkAccount
    #: Name under which a network's trainers meet, if not its own.
    job: str = ""

    def rounds(self, network: str) -> Synchroniser:
        """Means of parameters."""
        sync = self.plan.of(network)
        trainers, outer = len(sync.by or self.facts.names), None
        if isinstance(sync.owner, OuterOwner):
            outer = OuterStep(sync.owner.step, sync.owner.momentum)
        rounds = Rounds(
            self.job or network,
            Patient(self.control, self.account),
            self.groups,
            trainers,
            first=True,  # each keeps its own files
            means=self.means(network),
            codec_of=sync.codec_of,
            scales=sync.step_size == "auto",
            moments=sync.moments or 0,
            outer=outer,
            stride=sync.stride,
            codecs={**CODECS, "top4": Largest(sync.keep_share)},
        )
        self.account.follow(lambda: rounds.bytes_sent + rounds.settling_bytes)
        return rounds

    def gradients(self, network: str, crew: Crew, members: tuple[int, ...]) -> Synchroniser:
        """Means of gradients, in one generation."""
        sync = self.plan.of(network)
        paces = [self._pace(network, rank) for rank in members] if sync.shares == "pace" else ()
        owner: KfacSettings | MuonSettings | None = None
        if isinstance(sync.owner, KfacOwner):
            owner = KfacSettings(step=sync.owner.step, damping=sync.owner.damping)
        elif isinstance(sync.owner, MuonOwner):
            owner = MuonSettings(step=sync.owner.step)
        kind = NextForwardGradients if sync.when == "next_forward" else Gradients
        gradients = kind(
            crew,
            self.means(network),
            sync.codec_of,
            paces=paces,
            bucket_bytes=sync.bucket_bytes or BUCKET_BYTES,
            members=members,
            is_factored=sync.is_factored if "factors" in sync.codecs else None,
            owner=owner,
        )
        self.account.follow(lambda: gradients.bytes_sent)
        return gradients

    def means(self, network: str) -> Means:
        """The way in which a network's means are taken."""
        sync = self.plan.of(network)
        return Means(route=sync.way, shards=sync.shards, uplink=self._uplink, site=self._site)

    def has_coordinator(self, network: str) -> bool:
        """Tell whether the coordinator is one of the trainers of a network, and has it whole."""
        sync = self.plan.of(network)
        return not sync.stage and (not sync.by or self.facts.names[0] in sync.by)

    def name_of(self, rank: int) -> str:
        """The name of a trainer."""
        return self.store.get(f"name/{rank}").decode()

    def _pace(self, network: str, rank: int) -> float:
        return self.facts.of(self.name_of(rank)).pictures_per_s.get(network, 1.0)

    def _uplink(self, rank: int) -> float:
        return Links(self.facts).capacities.get(f"{self.name_of(rank)} up", 1.0)

    def _site(self, rank: int) -> str:
        name = self.name_of(rank)
        return next((site[0] for site in self.facts.sites if name in site), name)
