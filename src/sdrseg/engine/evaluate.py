"""Scoring a network: one confusion matrix on the device, every image exactly once over all processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torchmetrics.functional.classification import multiclass_confusion_matrix

from sdrseg.data.augment import normalise
from sdrseg.data.batches import Batches
from sdrseg.distributed import Everyone
from sdrseg.losses.pixels import VOID

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from sdrseg.network import Network


@torch.no_grad()
def confusion(fabric: Fabric, network: Network, batches: Batches, classes: int) -> NDArray[np.int64]:
    """(K, K) pixels: row = truth, column = prediction. Void and padding are not counted."""
    was_training = network.training
    network.eval()
    total = torch.zeros(classes, classes, dtype=torch.int64, device=fabric.device)
    for batch in batches:
        batch = batch.to(fabric.device)
        with fabric.autocast():
            logits = network(normalise(batch.images)).logits
        labels = batch.labels.long()
        total += multiclass_confusion_matrix(logits.argmax(1), labels, classes, ignore_index=VOID, validate_args=False)
    network.train(was_training)
    result: NDArray[np.int64] = Everyone().sum(total).cpu().numpy()
    return result
