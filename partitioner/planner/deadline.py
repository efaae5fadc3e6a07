"""From predicted latencies to the deadline that a client should ask with. Pure."""

from mdp.formats.plan import Plan
from mdp.requests.deadline import deadline_ms_for
from partitioner.planner.explain import seats_of
from partitioner.planner.problem import Problem

#: What a call takes beside computing and the link, for each member: 99 of 100 calls to 3 and to 8
#: agents kept within it on two server cores (benchmarks/results/overhead.json).
CLIENT_MS_PER_MEMBER = 0.4
#: What the client takes to decode a picture and cut its crops, which a deadline includes: a JPEG of
#: DECODED, for crops of 224 px, took 7.3 ms on a server core. An estimate for any other client.
DECODING_MS = 8.0
DECODED = "640 x 480"


def deadline_ms(problem: Problem, plan: Plan) -> float:
    """The deadline by which every member of `plan` answers, where latencies are as predicted.

    A target is about the typical answer. A deadline has to leave room for the slower end of each
    prediction, for the client's own work, decoding included, and for what the client keeps back to
    fuse. A target that
    a percentage of the answers has to keep holds all but the last already.
    """
    if plan.percentile is not None:
        return deadline_ms_for(plan.target_ms + DECODING_MS)
    slowest = 0.0
    for seat, assignment in zip(seats_of(problem, plan), plan.assignments, strict=True):
        device = problem.devices[seat.device]
        model = next(model for model in device.models if model.way == seat.candidate.way)
        estimate = model.estimate(assignment.spec, device.choices.num_classes)
        slowest = max(slowest, estimate.high_ms + assignment.predicted_ms.network)
    return deadline_ms_for(slowest + DECODING_MS + CLIENT_MS_PER_MEMBER * len(plan.assignments))
