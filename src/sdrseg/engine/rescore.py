"""Score the saved models of a run again, with the same transform or another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

from sdrseg.config import saved_config
from sdrseg.config.sections import Eval
from sdrseg.datasets.extended import Extended, require_own_data
from sdrseg.engine.evaluate import score_saved
from sdrseg.engine.folder import RunFolder
from sdrseg.engine.job import TEST_IMAGES, Job, data_difference, prepare_job, reopen_job
from sdrseg.engine.saved import scoring_config
from sdrseg.errors import SdrsegError, UsageError, nearest
from sdrseg.scenario import Step, parse_spec


def images_exist(job: Job, step: Step) -> bool:
    """Whether all test images of a step exist; old ones of an extended run may be gone, or changed and left out."""
    return job.indexes[step.test_split].size_by_id.keys() >= set(step.test_ids)


def score_again(
    run: str | Path, data: str | Path | None = None, *, transform: str | None = None
) -> list[dict[str, Any]]:
    """Score the saved models of all finished steps of a run; each result says whether it equals the earlier score.

    `transform`: replaces the run's eval.transform; "same" is None if it differs. In Python this is `sdrseg.evaluate`.
    """
    out, data = Path(run), None if data is None else Path(data)
    transforms = get_args(get_type_hints(Eval)["transform"])
    if transform is not None and transform not in transforms:
        raise UsageError(f"--transform {transform} is not valid{nearest(transform, transforms)}")
    folder = RunFolder(out)
    saved = folder.read_json("config.json")
    if not folder.has_metrics(0):
        raise SdrsegError(
            f"{out}: no step of this run is trained and scored yet. Wait, or resume training. An imported model is "
            f"scored when it is extended."
        )
    config = saved_config(saved["config"], str(out / "config.json"))
    spec = parse_spec(saved["spec"])
    if spec.source == Extended.name:
        require_own_data(out, data)
        job = reopen_job(out, config)
    else:
        job = prepare_job(spec, "ft", config, data, out, None, None)  # scoring needs no method
    known = (out / "scenario.json").exists()
    difference = data_difference(job, folder.read_json("scenario.json")) if known else None
    results = []
    for step in job.scenario:
        if not folder.has_metrics(step.number):
            continue
        earlier = {"scored_on": TEST_IMAGES, **folder.read_json(f"steps/{step.number}/metrics.json")}
        if not images_exist(job, step):
            reason = f"step {step.number}: images that it was scored on are gone or have changed; its scores are kept."
            results.append({**earlier, "same": None, "difference": " ".join((reason, *job.source.notes))})
            continue
        # each step of an extended run was scored in a different run
        images = earlier["scored_on"] if isinstance(job.source, Extended) else job.scored_on
        now = {**score_saved(job, step, transform).to_dict(), "scored_on": images}
        if transform not in (None, scoring_config(folder, step.number, config).eval.transform):
            results.append({**now, "transform": transform, "same": None})
            continue
        results.append({**now, "same": now == earlier})
        if now != earlier:
            results[-1] |= {"miou_then": earlier["miou"], "difference": difference}
    job.display.close()
    return results
