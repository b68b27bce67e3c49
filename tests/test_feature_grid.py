"""What is brought to the feature grid, where crops are no multiples of what the network pads images to."""

from __future__ import annotations

import pytest
import torch

from sdrseg.config.net import Net
from sdrseg.datasets.batches import Batch
from sdrseg.methods import METHODS, StepInfo
from sdrseg.network import Output, build_network

import reference
from methods_bench import make_config

VOID = 255


def striped(size: int) -> Batch:
    """Two images with class 1 in the columns from 32 on; the second is padded from row 32 on."""
    labels = torch.zeros(2, size, size, dtype=torch.uint8)
    labels[:, :, 32:] = 1
    padding = torch.zeros(2, size, size, dtype=torch.bool)
    padding[1, 32:] = True
    return Batch(torch.zeros(2, 3, size, size, dtype=torch.uint8), labels, padding, ("a", "b"))


def begun(name: str, decoder: str, n_old: int = 2):
    config = make_config(name, "default", f"net.decoder={decoder}", "net.output_stride=16", "enc.weight=1")
    student = build_network(config.net, n_old)
    method = METHODS[name](config)
    method.begin_step(StepInfo(1, n_old, 1, "disjoint"), student, student)
    return method, student.eval()


@pytest.mark.parametrize(("decoder", "size", "cells"), [("deeplabv3", 40, 3), ("deeplabv3", 48, 3), ("pan", 40, 8)])
def test_labels_match_the_cells_of_the_features(decoder, size, cells):
    """Cells begin every 16 pixels: 0, 16, 32, and with pan, which pads to 128, five more outside the image."""
    method, student = begun("sdr", decoder)
    batch = striped(size)
    with torch.no_grad():
        features = student(torch.zeros(2, 3, size, size)).features
    assert features.shape[-2:] == (cells, cells)
    grid = method.latent._grid(batch, features)
    wanted = reference.to_grid(batch.labels.numpy(), cells, cells, 16, VOID)
    wanted[1, 2:] = VOID
    assert grid.tolist() == wanted.tolist()
    assert grid[0, 0].tolist() == [0, 0, 1, *[VOID] * (cells - 3)]

    seen = torch.zeros(2, 2, size, size)
    seen[:, 1, 16:32, :16] = 5  # the teacher finds class 1 in cell (1, 0)
    pseudo = method.latent._pseudo(grid, seen)
    assert pseudo.tolist() == reference.pseudo_labels(grid.numpy(), seen.numpy(), 16).tolist()
    assert pseudo[0, :3, 0].tolist() == [0, 1, 0]


@pytest.mark.parametrize(("decoder", "size", "cells"), [("deeplabv3", 40, 3), ("pan", 40, 8)])
def test_features_are_distilled_where_the_image_is(decoder, size, cells):
    """Those of padding, and of cells outside the image, take no part."""
    method, student = begun("ilt", decoder)
    batch = striped(size)
    features = torch.zeros(2, student.feature_channels, cells, cells)
    logits = torch.zeros(2, 3, size, size)
    for row, column, counts in ((2, 2, 1), (1, 2, 2), (2, 0, 1), (cells - 1, cells - 1, 1 if cells == 3 else 0)):
        moved = features.clone()
        moved[:, :, row, column] = 1
        student_says = Output(logits, logits, logits, (moved,))
        teacher_says = Output(logits[:, :2], logits, logits, (features,))
        assert method.terms(batch, student_says, teacher_says)["enc"].item() == pytest.approx(counts / (9 + 6))


def test_the_stride_of_a_network_is_that_of_its_features():
    for decoder, multiple in (("deeplabv3", 16), ("pan", 128)):
        network = build_network(Net(encoder="toy16", decoder=decoder, output_stride=16), 2)
        assert (network.stride, network.multiple) == (16, multiple)
