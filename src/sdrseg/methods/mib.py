"""MiB, Modeling the Background (Cermelli et al. 2020)."""

from __future__ import annotations

from sdrseg.methods.base import From, Method

INIT = From("mib", "MiB: new classes start from the old background and share its probability equally")


class MiB(Method):
    name = "mib"
    summary = "Modeling the Background: in every loss and in new rows, background may contain old or new classes"
    switches = {
        "ce.kind": From("unbiased", "MiB, in every protocol"),
        "ce.init": INIT,
        "kd.kind": From("unbiased", "MiB"),
        "kd.weight": From(10.0, "official code and MiB's author"),
    }
    by_task = {"15-1": {"kd.weight": From(100.0, "MiB's author: 100 for 15-1 (MiB issues 22 and 43)")}}
