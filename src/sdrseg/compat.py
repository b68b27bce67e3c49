"""All that reaches into parts of other libraries that they do not promise to keep.

Tested with torch 2.11 and 2.15, torchvision 0.26 and 0.29, segmentation_models_pytorch (smp) 0.6.0 and timm
1.0.30. When another version breaks the network, look here first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import segmentation_models_pytorch as smp
from segmentation_models_pytorch.base import SegmentationHead
from segmentation_models_pytorch.encoders._base import EncoderMixin
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

ENCODERS: Mapping[str, Mapping[str, Any]] = smp.encoders.encoders
"""smp's encoders by name, with "pretrained_settings"."""


class Encoder(nn.Module, EncoderMixin):  # type: ignore[misc]
    """What smp asks of an encoder, for one of our own. `channels`: of the images, then of each feature map."""

    def __init__(self, channels: list[int], depth: int, output_stride: int):
        super().__init__()
        self._out_channels, self._in_channels = channels, channels[0]
        self._depth, self._output_stride = depth, output_stride


def register_encoder(name: str, kind: type[Encoder], **params: Any) -> None:
    """Make an encoder known to smp by name."""
    smp.encoders.encoders[name] = {"encoder": kind, "pretrained_settings": {}, "params": params}


def classifier_of(model: Any) -> nn.Conv2d | None:
    """The last convolution of a model of smp; None where the head is more than that."""
    head = model.segmentation_head
    return cast(nn.Conv2d, head[0]) if type(head) is SegmentationHead else None


def replace_in_deeplab(decoder: Any, pooled: type[nn.Sequential], upsample: Callable[[int], nn.Module]) -> None:
    """Give smp's DeepLabV3 or DeepLabV3+ another kind of pooling branch and of upsampling."""
    aspp: Any = decoder.aspp[0] if isinstance(decoder.aspp, nn.Sequential) else decoder.aspp
    aspp.convs[-1] = pooled(*aspp.convs[-1])
    if hasattr(decoder, "up"):
        decoder.up = upsample(int(decoder.up.scale_factor))


def batch_norms(module: nn.Module) -> Iterator[_BatchNorm]:
    """All batch norms of any kind (plain, synchronised, with an activation inside)."""
    return (m for m in module.modules() if isinstance(m, _BatchNorm))


def nonnegative(made_by: Any) -> bool:
    """Whether a tensor is ≥ 0 for any input, according to the autograd node that made it.

    Only what ends in ReLU, ReLU6 or sigmoid and then is at most pooled, joined, reshaped, added or multiplied counts;
    anything unknown does not.
    """
    name = "" if made_by is None else made_by.name()
    if name.startswith("Hardtanh"):
        return bool(made_by._saved_min_val >= 0)
    if name.startswith(("Relu", "Sigmoid")):
        return True
    passes = ("MaxPool2D", "AvgPool2D", "Cat", "Permute", "View", "Clone", "Slice", "Add", "Mul")
    return name.startswith(passes) and all(nonnegative(node) for node, _ in made_by.next_functions)
