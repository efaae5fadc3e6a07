"""The choice of networks by measurement, and its plan."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from mdp.formats.plan import Plan
from partitioner.assembly.chosen import entries
from partitioner.assembly.members import assemble_plan, assign
from partitioner.build.inputs import BuildInputs
from partitioner.build.measured.fine_tuning import expected_epoch_s
from partitioner.data.scenes import single_pictures
from partitioner.pilot.candidates import FrozenNetwork
from partitioner.pilot.measure import Pilot, run_pilot
from partitioner.regions import WHOLE
from partitioner.run.progress import Progress
from partitioner.training.compute import own_threads

#: Share of the minutes that trains, beside measuring and serving.
_TRAINED = 0.6


def choose(inputs: BuildInputs, cache: Path, progress: Progress, kept: Path | None = None) -> Pilot:
    """Measure every network that keeps the target, and choose one for each device.

    Views are cut into the folder `cache`; measurements are kept in the folder `kept`. Raises
    InputError.
    """
    return run_pilot(
        inputs.data,
        inputs.weights,
        inputs.devices,
        inputs.cameras,
        inputs.target_ms,
        cache,
        progress,
        inputs.class_rows,
        kept,
        # One network that all cameras' pictures train is trained better in the same time.
        shared=bool(inputs.cameras) and inputs.minutes > 0,
        epochs=_epochs(inputs) if inputs.minutes else None,
    )


def _epochs(inputs: BuildInputs) -> Callable[[FrozenNetwork], float]:
    """The epochs that `inputs.minutes` are enough for, roughly, by the network.

    By its work and not by a measured pace, so that a build that goes on chooses alike.
    """
    # Of the devices with one camera, each has a network of its own.
    networks = max(Counter(inputs.cameras.values()).values(), default=len(inputs.profiles))
    seconds = _TRAINED * 60 * inputs.minutes / networks
    pictures = len(single_pictures(inputs.data).train)
    threads = inputs.threads or own_threads()

    def epochs(one: FrozenNetwork) -> float:
        return seconds * threads / expected_epoch_s(one, len(inputs.data.labels), pictures)

    return epochs


def predict_ms(pilot: Pilot, inputs: BuildInputs) -> dict[str, float]:
    """Predicted milliseconds of computing of each device's chosen network."""
    classes = len(inputs.data.labels)
    return {
        device.profile.name: device.latency.predict_ms(
            pilot.measured[pilot.choice.rows[device.profile.name]].candidate.spec, classes
        )
        for device in inputs.devices
    }


def plan_of(pilot: Pilot, inputs: BuildInputs) -> Plan:
    """Each device's chosen network with its predicted milliseconds; raises InputError."""
    classes = len(inputs.data.labels)
    files = {
        row: inputs.weights[pilot.measured[row].candidate.name]
        for row in pilot.choice.rows.values()
    }
    computing_ms = predict_ms(pilot, inputs)
    assignments = []
    for k, model in enumerate(entries(pilot, files, inputs.cameras)):
        one = pilot.measured[pilot.choice.rows[model.device]]
        share = pilot.choice.alone[model.device]
        assignments.append(
            assign(
                k,
                model,
                WHOLE,
                one.candidate.spec,
                inputs.profiles[model.device],
                computing_ms[model.device],
                f"{one.candidate.words}, right on {share:.1%} of pictures left out of its fit",
                classes,
            )
        )
    return assemble_plan(assignments, classes, inputs.target_ms)
