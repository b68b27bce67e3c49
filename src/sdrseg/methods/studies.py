"""The rows of the paper's ablation and sparsity studies, each a named variant of a method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from sdrseg.methods.base import From, Method
from sdrseg.methods.finetune import FineTune, Offline
from sdrseg.methods.laps import LAPS
from sdrseg.methods.sdr import SDR
from sdrseg.methods.terms import TERMS
from sdrseg.variants import SparsityVariant

ROW = "paper: ablation table, VOC 15-1 disjoint"
OFF = {term.weight: 0.0 for term in TERMS.values() if term.weight in SDR.switches}


PM = {"pm__weight": SDR.switches["pm.weight"].value}
SP = {"sp__weight": SDR.switches["sp.weight"].value}
CL = {"cl__attract": SDR.switches["cl.attract"].value, "cl__repel": SDR.switches["cl.repel"].value}


def variant(of: type[Method], name: str, summary: str, source: str, **values: Any) -> type[Method]:
    """A method that differs from another in some switches only ("kd__weight" stands for kd.weight).

    What it changes holds in every preset and task; what it shares with the other one follows preset and task.
    """
    changes = {key.replace("__", "."): From(value, source) for key, value in values.items()}
    changed = {key for key, new in changes.items() if key not in of.switches or of.switches[key].value != new.value}

    def kept(values: Mapping[str, Mapping[str, From]]) -> dict[str, dict[str, From]]:
        return {name: {k: v for k, v in some.items() if k not in changed} for name, some in values.items()}

    members: dict[str, Any] = {"trains_step0_like": of.trains_step0_like or of} if of.own_step0 else {}
    members |= {"name": name, "summary": summary, "switches": {**of.switches, **changes}}
    members |= {"by_preset": kept(of.by_preset), "by_task": kept(of.by_task)}
    return type(f"Variant_{name}", (of,), {**members, "__doc__": summary})


def _ablation() -> list[type[Method]]:
    without = {key.replace(".", "__"): value for key, value in OFF.items()}
    rows: list[tuple[str, str, dict[str, Any]]] = [
        ("3", "UNCE, matching", PM),
        ("4", "UNCE, matching, sparsity", PM | SP),
        ("5", "UNCE, matching, sparsity, contrast", PM | SP | CL),
        ("cl", "UNCE, contrast alone", CL),
    ]
    variants = [
        variant(FineTune, "ablation-1", "Ablation row 1: CE (the same as ft)", ROW),
        variant(FineTune, "ablation-2", "Ablation row 2: CE, standard KD", ROW, kd__kind="standard", kd__weight=100.0),
        variant(FineTune, "ablation-1u", "Ablation row 1 with UNCE", ROW, ce__kind="unbiased_if_masked"),
        variant(
            FineTune,
            "ablation-2u",
            "Ablation row 2 with UNCE",
            ROW,
            ce__kind="unbiased_if_masked",
            kd__kind="standard",
            kd__weight=100.0,
        ),
    ]
    for number, what, values in rows:
        label = f"Ablation row {number}" if number.isdigit() else "Ablation, text"
        variants.append(variant(SDR, f"ablation-{number}", f"{label}: {what}", ROW, **without | values))
    variants.append(variant(SDR, "ablation-6", "Ablation row 6: SDR with standard KD", ROW, kd__kind="standard"))
    variants.append(variant(SDR, "ablation-7", "Ablation row 7: SDR", ROW))
    return variants


def _sparsity() -> list[type[Method]]:
    source = "paper: supplementary, sparsity study (SDR with L_sp exchanged)"
    return [
        variant(SDR, f"sparsity-{kind}", f"SDR with the sparsity measure {kind}", source, sp__variant=kind)
        for kind in get_args(SparsityVariant)
    ]


def _standard() -> list[type[Method]]:
    """Standard segmentation: the latent terms in one step with all classes."""
    source = "paper: table of standard semantic segmentation"
    variants = []
    for name, values in (("sp", SP), ("cl", CL), ("sp-cl", SP | CL)):
        summary = f"Offline with {name.replace('-', ' and ')} switched on in step 0"
        extra = variant(Offline, f"offline-{name}", summary, source, latent__step0=True, **values)
        extra.own_step0 = True
        sections = {key.partition("__")[0] for key in values}
        extra.by_preset = {
            preset: {key: value for key, value in changes.items() if key.partition(".")[0] in sections}
            for preset, changes in SDR.by_preset.items()
        }
        variants.append(extra)
    return variants


def _laps() -> list[type[Method]]:
    """LAPS with one part replaced, and LAPS trained by gradient descent with one part removed or replaced."""
    decoder = {"laps__encoder": 0, "laps__ridge": 1e-3}
    fitted: list[tuple[str, str, dict[str, Any]]] = [
        ("decoder", "LAPS whose new rows see the decoder's output only", decoder),
        ("gaussian", "the same with Gaussians as memory", decoder | {"laps__memory": "gaussian"}),
        ("prototype", "the same with means and variances as memory", decoder | {"laps__memory": "prototype"}),
        ("level-zero", "LAPS whose rows are fitted at score 0", {"laps__level": "zero"}),
        (
            "average",
            "LAPS whose new classes count as average old ones",
            {"laps__prior": "average", "laps__positive": 1.0},
        ),
    ]
    trained: list[tuple[str, str, dict[str, Any]]] = [
        ("trained", "LAPS that trains the whole network", {}),
        ("trained-logistic", "the same from fitted rows", {"laps__init": "logistic", "laps__memory": "features"}),
        ("trained-small", "the same with new rows that start near zero", {"laps__init": "small"}),
        ("trained-no-replay", "the same without replay", {"laps__replay": 0.0, "laps__versus": 0.0}),
        ("trained-no-versus", "the same without the softmax of old and new rows", {"laps__versus": 0.0}),
        ("trained-features", "the same with feature vectors as memory", {"laps__memory": "features"}),
        ("trained-prototype", "the same with means and variances as memory", {"laps__memory": "prototype"}),
        ("trained-anchor", "the same with an embedding anchored to the teacher's", {"laps__anchor": 2.0}),
        ("trained-drift", "the same with a memory that follows the features", {"laps__drift": True}),
        ("trained-skip-new", "the same without distillation where the label is a new class", {"kd__on_new": "skip"}),
        ("trained-correct-new", 'the same with target "no" of old rows on new classes', {"laps__on_new": "no"}),
        (
            "trained-slow",
            "the same with a third of the learning rates, but for new rows",
            {"optim__lr_later": 3e-5, "laps__row_rate": 33.0},
        ),
        ("trained-frozen-encoder", "the same without training the encoder", {"optim__encoder_lr_factor_later": 0.0}),
        ("trained-light", "the same with a quarter of the distillation", {"kd__weight": 1.25}),
    ]
    descent = {
        **decoder,
        "laps__fit_only": False,
        "laps__init": "closed_form",
        "laps__memory": "gaussian",
        "laps__positive": 3.0,
    }
    rows = [*fitted, *((name, summary, descent | values) for name, summary, values in trained)]
    return [
        variant(LAPS, f"laps-{name}", summary, "docs/laps.md: ablation", **values) for name, summary, values in rows
    ]


STUDIES = (*_ablation(), *_sparsity(), *_standard(), *_laps())
