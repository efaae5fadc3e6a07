"""Step sizes of a training: a linear warm-up, then a cosine to zero. Pure."""

import math

WARMUP_SHARE = 0.1


def warmup_steps(steps: int, share: float = WARMUP_SHARE) -> int:
    """Steps of the warm-up; at least one."""
    return max(1, round(share * steps))


def learning_rate(step: int, steps: int, peak: float, warmup_share: float = WARMUP_SHARE) -> float:
    """Linear warm-up over the first share of `steps`, then a cosine to zero."""
    warmup = warmup_steps(steps, warmup_share)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
