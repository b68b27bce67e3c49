"""Distillation terms: the student keeps the outputs of its teacher, the frozen model of the previous step.

Student logits z (B, K, H, W), teacher logits t (B, n_old, H, W), `keep` (B, H, W) bool: the pixels that count
(everything but padding). All return (2,) sums for `losses.pixels.mean`.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from sdrseg.kernels.plain import at_least_float32, unbiased_distillation
from sdrseg.labels import VOID
from sdrseg.losses.pixels import masked_sums


def distillation_sums(z: Tensor, t: Tensor, keep: Tensor, *, alpha: float = 1.0) -> Tensor:
    """KD (LwF, ILT; L'_kd): −Σ_{c<n_old} softmax(α t)_c · log softmax(z_{<n_old})_c."""
    z, t = at_least_float32(z), at_least_float32(t)
    old = z[:, : t.shape[1]]
    agreement = ((alpha * t).softmax(1) * old).sum(1)
    return masked_sums(old.logsumexp(1) - agreement, keep)


def unbiased_distillation_sums(z: Tensor, t: Tensor, keep: Tensor, *, alpha: float = 1.0) -> Tensor:
    """UNKD (MiB; L_kd): the teacher's background may be a new class, so p_0 is the target of q_0 + Σ_{c≥n_old} q_c."""
    return masked_sums(unbiased_distillation(at_least_float32(z), at_least_float32(t), alpha), keep)


def cil_sums(z: Tensor, t: Tensor, labels: Tensor, keep: Tensor, *, entropy_weight: float = 1.0) -> Tensor:
    """CIL (Klingner et al. 2020): distils pixels without a new class, with more weight where the teacher is uncertain.

    −(1 + λ_GS · H_2(p)) Σ_{c<n_old} p_c log q_c, with H_2 the teacher's entropy in bits and q over all channels; over
    the pixels labelled background or void.
    """
    z, t = at_least_float32(z), at_least_float32(t)
    log_p = t.log_softmax(1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(1) / math.log(2)
    loss = (1 + entropy_weight * entropy) * (z.logsumexp(1) - (p * z[:, : t.shape[1]]).sum(1))
    return masked_sums(loss, keep & ((labels == 0) | (labels == VOID)))


def binary_distillation_sums(z: Tensor, t: Tensor, keep: Tensor) -> Tensor:
    """LwF-MC: Σ_{c<n_old} of the cross-entropy between the sigmoids of student and teacher."""
    z, t = at_least_float32(z), at_least_float32(t)
    old = z[:, : t.shape[1]]
    return masked_sums((F.softplus(old) - t.sigmoid() * old).sum(1), keep)


def encoder_distillation_sums(features: Tensor, teacher_features: Tensor, keep: Tensor) -> Tensor:
    """ENC (ILT): the mean of (F − F_teacher)² over channels. Features (B, C, h, w), keep (B, h, w)."""
    difference = at_least_float32(features) - at_least_float32(teacher_features)
    return masked_sums(difference.square().mean(1), keep)
