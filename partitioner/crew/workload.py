"""What a plan and its settings give a crew to train: sizes, epochs and arithmetic."""

from mdp.formats.plan import Plan, Spec, SubModelSpec
from partitioner.crew.planning import costs
from partitioner.crew.planning.work import FrozenPasses, Network, Work
from partitioner.estimates.macs import macs, parameters, tokens
from partitioner.run.settings import Asked

#: Floating-point operations of a MAC; a training step does a forward pass and twice that.
_FLOP, _STEP = 2, 3


def workload(plan: Plan, asked: Asked, pictures: int, classes: int) -> Work:
    """The networks of `plan`, for `pictures` to train on with so many `classes`."""
    teacher, networks = plan.require_teacher().shape, list[Network]()
    if asked.teacher_schedule.epochs:
        schedule = asked.teacher_schedule
        networks.append(
            _network("teacher", teacher, classes, pictures, schedule.epochs, schedule.batch_size)
        )
    for a in plan.assignments:
        epochs = asked.schedule.of(a.k, pretrained=False).epochs
        name, batch = f"member-{a.k}", asked.schedule.batch_size
        networks.append(_network(name, a.spec, classes, pictures, epochs, batch))
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
    """Of the feature; other networks' are taken for a usual one."""
    return spec.embed_dim if isinstance(spec, SubModelSpec) else 1280


def _network(
    name: str, spec: Spec, classes: int, pictures: int, epochs: int, batch: int
) -> Network:
    kept, boundary, blocks = 0.0, 0.0, 0
    if isinstance(spec, SubModelSpec):
        length, blocks = tokens(spec), spec.depth
        kept = costs.activation_bytes(1, length, spec.embed_dim, spec.depth, spec.num_heads)
        boundary = 4.0 * length * spec.embed_dim
    return Network(
        name=name,
        size_bytes=4.0 * parameters(spec, classes),
        pictures=pictures,
        epochs=epochs,
        batch=batch,
        gflop_per_picture=_FLOP * _STEP * macs(spec, classes) / 1e9,
        activation_bytes=kept,
        boundary_bytes=boundary,
        blocks=blocks,
    )
