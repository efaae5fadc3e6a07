"""The deadline that a client should ask with, from predicted latencies. Pure."""

from mdp.requests.deadline import deadline_ms_for
from partitioner.planner.placement import Placements
from partitioner.planner.problem import Problem

#: Client time of a call for each member: 99 of 100 calls to 3 and to 8 agents kept within it on two
#: server cores (benchmarks/results/overhead.json).
CLIENT_MS_PER_MEMBER = 0.4
#: Client time to decode a picture and cut its crops: a JPEG of DECODED, for crops of 224 px, took
#: 7.3 ms on a server core. An estimate for any other client.
DECODING_MS = 8.0
DECODED = "640 x 480"


def deadline_ms(problem: Problem, placements: Placements, target_ms: float) -> float:
    """Milliseconds in which every member answers at the predicted latencies.

    A target is about the typical answer. A deadline has room for the upper end of each prediction,
    for the client's work, decoding included, and for the client's reserve to fuse. A target of a
    percentage of the answers has room for all but decoding and the reserve.
    """
    if problem.percentile is not None:
        return deadline_ms_for(target_ms + DECODING_MS)
    slowest = 0.0
    for placement in placements:
        c, device = placement.candidate, problem.devices[placement.device]
        estimate = device.model_of(c).estimate(c.spec, device.choices.num_classes)
        slowest = max(slowest, estimate.high_ms + c.predicted_ms.network)
    return deadline_ms_for(slowest + DECODING_MS + CLIENT_MS_PER_MEMBER * len(placements))
