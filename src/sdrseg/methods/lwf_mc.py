"""LwF-MC, the multi-class variant of iCaRL (Rebuffi et al. 2017): sigmoids instead of the softmax."""

from __future__ import annotations

from sdrseg.methods.base import From, Method


class LwFMC(Method):
    name = "lwf-mc"
    summary = "LwF with sigmoids: binary cross-entropy, and the teacher's sigmoids as targets for the old classes"
    own_step0 = True  # a softmax model gives meaningless sigmoids
    switches = {
        "ce.kind": From("binary", "official code: BCE with void left out"),
        "kd.kind": From("binary", "official code: n_old times the mean over channels, the same as the sum over them"),
        "kd.weight": From(10.0, "official code: method preset"),
    }
