"""The work that a plan and its settings give a crew: sizes, epochs and arithmetic."""

from collections.abc import Collection

from msgspec.structs import replace

from mdp.formats.plan import Assignment, Plan, Spec, SubModelSpec
from partitioner.crew.planning import costs
from partitioner.crew.planning.facts import Facts
from partitioner.crew.planning.methods import Methods
from partitioner.crew.planning.syncplan import RequestedGroups, SyncPlan, WholeGroup
from partitioner.crew.planning.work import FrozenPasses, NetworkWork, Start, Work, pace
from partitioner.data.datasets import Dataset
from partitioner.data.scenes import places, single_pictures
from partitioner.estimates.macs import macs, parameters, tokens
from partitioner.run.settings import Settings, TrainingConfig
from partitioner.run.weights import weights_in
from partitioner.training.members import twins

#: Floating-point operations of a MAC; a training step does a forward pass and twice that.
_FLOP, _STEP = 2, 3


def workload(plan: Plan, asked: TrainingConfig | Settings, data: Dataset) -> Work:
    """The networks of `plan` that are trained on `data`."""
    teacher, networks = plan.require_teacher().shape, list[NetworkWork]()
    pictures, classes = len(single_pictures(data).train), len(data.labels)
    where, same = places(data.train, data.cameras), twins(plan, asked.schedule)
    arithmetic = _arithmetic(asked)
    if asked.teacher_schedule.epochs:
        schedule = asked.teacher_schedule
        start: Start = "given" if _has_teacher_weights(asked) else "drawn"
        epochs, batch = schedule.epochs, schedule.batch_size
        network = _network("teacher", teacher, classes, pictures, epochs, batch, start, arithmetic)
        networks.append(network)
    given = _given_weights(asked)
    for a in plan.assignments:
        if a.k in same:
            continue
        camera = None if asked.schedule.shared else a.camera
        seen = len(range(pictures)[where.of(camera)])
        epochs = asked.schedule.of(a.k, pretrained=False).epochs
        name, batch = f"member-{a.k}", asked.schedule.batch_size
        start = _member_start(a, given, from_others=asked.schedule.start != "scratch")
        networks.append(_network(name, a.spec, classes, seen, epochs, batch, start, arithmetic))
    longest = max(asked.schedule.epochs, asked.teacher_schedule.epochs)
    variants = min(asked.augmentation.variants, longest)
    answers = FrozenPasses(
        pictures=variants * pictures,
        numbers=classes,
        gflop_per_picture=_FLOP * macs(teacher, classes) / 1e9,
    )
    members = asked.schedule
    outputs = [
        FrozenPasses(
            pictures=min(variants, members.of(a.k + 1, pretrained=False).epochs) * pictures,
            numbers=classes * members.boosting + _width(a.spec) * members.stacking,
            network=f"member-{a.k}",
            gflop_per_picture=_FLOP * macs(a.spec, classes) / 1e9,
        )
        for a in plan.assignments[:-1]
        if members.boosting or members.stacking
    ]
    return Work(networks=tuple(networks), answers=answers, outputs=tuple(outputs))


def _width(spec: Spec) -> int:
    """Width of the feature; that of other networks is taken for a usual one."""
    return spec.embed_dim if isinstance(spec, SubModelSpec) else 1280


#: Means in fp32 that a group waits for where somebody enters. There are three; a group's timeout is
#: four times what is predicted, and so twice these.
_ENTERING = 1.5


def longest_s(plan: SyncPlan, facts: Facts, work: Work, validated: int = 0) -> float:
    """Predicted seconds, at most, that one trainer waits for another within a group.

    That is a step of the slowest with its mean, or the validation of so many pictures; of rounds
    the mean with somebody who enters. What was not measured counts as nothing.
    """
    methods, found = Methods(facts, "any"), [0.0]
    for network in work.networks:
        sync = plan.of(network.name)
        # Where some meet, all do now and then.
        mean_s = methods.mean_s(network, replace(sync, meet=WholeGroup()))
        found.append(mean_s)
        if isinstance(sync.meet, RequestedGroups):
            # All groups may use one line at once.
            groups = len(sync.crew or facts.names) // sync.meet.size
            found.append(groups * methods.mean_s(network, sync))
        if sync.what == "parameters":
            # Who enters gets parameters and both moments, in fp32.
            plain = replace(sync, codec="fp32", mask=None, keep=None, tensor=(), meet=WholeGroup())
            found.append(_ENTERING * methods.mean_s(network, plain))
        if sync.what == "gradients":
            method = methods.predict(network, sync)
            paces = [pace(facts.of(name), network) for name in sync.crew or facts.names]
            most = max(network.batch, validated)
            found += [mean_s + most / one for one in paces if one]
            found += [network.batch / method.pictures_per_s] if method else []
    return max(found)


def _has_teacher_weights(asked: TrainingConfig | Settings) -> bool:
    if isinstance(asked, Settings):
        return asked.teacher.pretrained or asked.teacher.checkpoint is not None
    return asked.has_teacher_weights


def _arithmetic(asked: TrainingConfig | Settings) -> costs.Arithmetic:
    """Arithmetic of training; the one that needs more memory where each trainer may choose."""
    autocast = asked.autocast if isinstance(asked, Settings) else asked.options.autocast
    return "fp32" if autocast == "auto" else autocast


def _given_weights(asked: TrainingConfig | Settings) -> Collection[str]:
    """timm's names of networks that have weights at hand."""
    if isinstance(asked, Settings):
        return asked.weights
    folder = asked.options.weights_folder
    return () if folder is None else weights_in(folder)


def _member_start(a: Assignment, given: Collection[str], *, from_others: bool) -> Start:
    """Weights that a sub-model begins with; plain ViTs are cut from others where they fit."""
    if isinstance(a.spec, SubModelSpec):
        return "cut" if from_others else "drawn"
    return "given" if a.spec.name in given else "drawn"


def _network(
    name: str,
    spec: Spec,
    classes: int,
    pictures: int,
    epochs: int,
    batch: int,
    start: Start,
    arithmetic: costs.Arithmetic,
) -> NetworkWork:
    kept, boundary, blocks = 0.0, 0.0, 0
    if isinstance(spec, SubModelSpec):
        length, blocks = tokens(spec), spec.depth
        kept = costs.activation_bytes(1, length, spec.embed_dim, spec.depth, arithmetic)
        boundary = 4.0 * length * spec.embed_dim
    return NetworkWork(
        name=name,
        size_bytes=4.0 * parameters(spec, classes),
        pictures=pictures,
        epochs=epochs,
        start=start,
        batch=batch,
        gflop_per_picture=_FLOP * _STEP * macs(spec, classes) / 1e9,
        activation_bytes=kept,
        boundary_bytes=boundary,
        blocks=blocks,
        picture_bytes=4.0 * 3 * spec.image_size**2,
        arithmetic=arithmetic,
    )
