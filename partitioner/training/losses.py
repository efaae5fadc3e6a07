"""The training losses of the method, re-implemented from the abstract. Plain functions."""

import torch
from torch import Tensor
from torch.nn import functional as F


def centre(logits: Tensor) -> Tensor:
    """Logits `[..., C]` with each row's mean taken off, which changes no softmax."""
    return logits - logits.mean(dim=-1, keepdim=True)


def stack_loss(projected: Tensor, feature: Tensor) -> Tensor:
    """1 - cosine of the projected feature `[B, D]` and the imitated one `[B, D]`, mean over batch.

    Method 2, "extra information about the others". A cosine leaves the scale of the feature free;
    which feature and which distance were published is not known.
    """
    return 1 - F.cosine_similarity(projected, feature, dim=-1).mean()


def divergence(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL of softened `logits[B, C]` from the softened teacher's `[B, C]`, mean over the batch.

    Hinton et al., arXiv 1503.02531; the factor temperature**2 keeps its gradient independent of
    the temperature.
    """
    softened = F.log_softmax(logits / temperature, dim=-1)
    wanted = F.log_softmax(teacher / temperature, dim=-1)
    return F.kl_div(softened, wanted, reduction="batchmean", log_target=True) * temperature**2


def distillation_loss(
    logits: Tensor,
    labels: Tensor,
    teacher: Tensor,
    *,
    distillation: float,
    temperature: float,
    label_smoothing: float,
) -> Tensor:
    """Cross-entropy of logits `[B, C]` to labels `[B, C]`, mixed with the teacher's divergence.

    Method 3, "plain supervised learning"; learning from the teacher too is our addition. `labels`
    are probabilities; `distillation` is the teacher's share, 0 to 1.
    """
    supervised = F.cross_entropy(logits, labels, label_smoothing=label_smoothing)
    return torch.lerp(supervised, divergence(logits, teacher, temperature), distillation)
