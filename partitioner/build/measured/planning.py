"""The choice of networks by measurement, and its plan."""

from pathlib import Path

from mdp.formats.plan import Plan
from partitioner.assembly.chosen import entries
from partitioner.assembly.members import assembled_plan, assigned
from partitioner.build.inputs import BuildInputs
from partitioner.pilot.measure import Pilot, run_pilot
from partitioner.regions import WHOLE
from partitioner.run.progress import Progress


def choose(inputs: BuildInputs, cache: Path, progress: Progress, kept: Path | None = None) -> Pilot:
    """Measure every network that keeps the target, and choose one for each device.

    Views are cut into the folder `cache`; measurements are kept in the folder `kept`. Raises
    InputError.
    """
    return run_pilot(
        inputs.data,
        inputs.weights,
        inputs.devices(),
        inputs.cameras,
        inputs.target_ms,
        cache,
        progress,
        inputs.class_rows,
        kept,
        # One network that all cameras' pictures train is trained better in the same time.
        shared=bool(inputs.cameras) and inputs.minutes > 0,
    )


def predicted_ms(pilot: Pilot, inputs: BuildInputs) -> dict[str, float]:
    """Predicted milliseconds of computing of each device's chosen network."""
    classes = len(inputs.data.labels)
    return {
        device.profile.name: device.latency.predict_ms(
            pilot.measured[pilot.choice.rows[device.profile.name]].candidate.spec, classes
        )
        for device in inputs.devices()
    }


def plan_of(pilot: Pilot, inputs: BuildInputs) -> Plan:
    """Each device's chosen network with its predicted milliseconds; raises InputError."""
    classes = len(inputs.data.labels)
    files = {
        row: inputs.weights[pilot.measured[row].candidate.name]
        for row in pilot.choice.rows.values()
    }
    computing_ms = predicted_ms(pilot, inputs)
    assignments = []
    for k, model in enumerate(entries(pilot, files, inputs.cameras)):
        one = pilot.measured[pilot.choice.rows[model.device]]
        share = pilot.choice.alone[model.device]
        assignments.append(
            assigned(
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
    return assembled_plan(assignments, classes, inputs.target_ms)
