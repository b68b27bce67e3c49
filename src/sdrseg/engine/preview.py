"""A few test images with predictions, for the trackers."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from sdrseg.colours import NOT_SCORED, class_colours
from sdrseg.datasets.augment import normalise
from sdrseg.datasets.batches import eval_batches
from sdrseg.decision import Decision, decide
from sdrseg.engine.job import Job
from sdrseg.network import Network
from sdrseg.scenario import Step

PICTURES = 4
LARGEST = 2**21  # pixels; larger images are not shown


@torch.inference_mode()
def predicted_pictures(
    job: Job, step: Step, network: Network, decision: Decision, count: int
) -> list[NDArray[np.uint8]]:
    """Some test images, evenly spaced, each next to its ground truth and the prediction."""
    sizes = job.indexes[step.test_split].size_by_id
    small = [id for id in step.test_ids if sizes[id][0] * sizes[id][1] <= LARGEST]
    ids = small[:: max(1, len(small) // count)][:count]
    config = job.config.changed({"eval.batch_size": 1, "data.workers": 0})
    batches = eval_batches(job.source, ids, sizes, step.test_table, config, multiple=network.multiple)
    colours = np.full((256, 3), NOT_SCORED, np.uint8)
    colours[: len(step.channels)] = class_colours(step.channels)
    colours[list(job.removed_channels(step))] = colours[0]
    network.eval()
    shown = []
    for batch in batches:
        batch = batch.to(job.fabric.device)
        with job.fabric.autocast():
            predicted = decide(network(normalise(batch.images)).logits, decision)
        parts = zip(batch.images.permute(0, 2, 3, 1), batch.labels, predicted, strict=True)
        for image, truth, prediction in parts:
            masks = (colours[channels.cpu().numpy().astype(np.uint8)] for channels in (truth, prediction))
            shown.append(np.hstack([image.cpu().numpy(), *masks]))
    return shown
