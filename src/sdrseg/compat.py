"""Everything that uses private or undocumented parts of other libraries.

Tested with torch 2.11 and 2.15, torchvision 0.26 and 0.29, segmentation_models_pytorch (smp) 0.6.0 and timm
1.0.31. If another version breaks the network, start here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any, cast

import segmentation_models_pytorch as smp
import torch
from segmentation_models_pytorch.base import SegmentationHead
from segmentation_models_pytorch.encoders._base import EncoderMixin
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

ENCODERS: Mapping[str, Mapping[str, Any]] = smp.encoders.encoders
"""smp's encoders by name, with "pretrained_settings"."""


class Encoder(nn.Module, EncoderMixin):  # type: ignore[misc]
    """The interface of smp's encoders, for our own. `channels`: of the images, then of each feature map."""

    def __init__(self, channels: list[int], depth: int, output_stride: int):
        super().__init__()
        self._out_channels, self._in_channels = channels, channels[0]
        self._depth, self._output_stride = depth, output_stride


def register_encoder(name: str, kind: type[Encoder], **params: Any) -> None:
    """Register an encoder with smp by name."""
    smp.encoders.encoders[name] = {"encoder": kind, "pretrained_settings": {}, "params": params}


def classifier_of(model: Any) -> nn.Conv2d | None:
    """The last convolution of a model of smp; None if its head has more layers."""
    head = model.segmentation_head
    return cast(nn.Conv2d, head[0]) if type(head) is SegmentationHead else None


def replace_in_deeplab(decoder: Any, pooled: type[nn.Sequential], upsample: Callable[[int], nn.Module]) -> None:
    """Replace the pooling branch and the upsampling of smp's DeepLabV3 or DeepLabV3+."""
    aspp: Any = decoder.aspp[0] if isinstance(decoder.aspp, nn.Sequential) else decoder.aspp
    aspp.convs[-1] = pooled(*aspp.convs[-1])
    if hasattr(decoder, "up"):
        decoder.up = upsample(int(decoder.up.scale_factor))


def batch_norms(module: nn.Module) -> Iterator[_BatchNorm]:
    """All batch norms of any kind (plain, synchronised, with an activation inside)."""
    return (m for m in module.modules() if isinstance(m, _BatchNorm))


def nonnegative(node: Any) -> bool:
    """Whether a tensor is ≥ 0 for any input, according to its autograd node.

    True only for outputs of ReLU, ReLU6 or sigmoid that are afterwards at most pooled, joined, reshaped, added or
    multiplied; false for anything unknown.
    """
    name = "" if node is None else node.name()
    if name.startswith("Hardtanh"):
        return bool(node._saved_min_val >= 0)
    if name.startswith(("Relu", "Sigmoid")):
        return True
    passes = ("MaxPool2D", "AvgPool2D", "Cat", "Permute", "View", "Clone", "Slice", "Add", "Mul")
    return name.startswith(passes) and all(nonnegative(previous) for previous, _ in node.next_functions)


def norm_input_gradient(gradient: Tensor, weight: Tensor, inverse: Tensor, eps: float) -> Tensor:
    """The gradient of the input of a batch norm with fixed statistics: gradient · weight · inverse, channels last.

    `inverse`: 1/√(variance + eps). With a kernel of synchronised batch norm, which is not documented.
    """
    return torch.batch_norm_elemt(gradient, weight, None, torch.zeros_like(inverse), inverse, eps)


def norm_parameter_gradients(
    gradient: Tensor, maps: Tensor, mean: Tensor, inverse: Tensor, weight: Tensor, needed: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of its weight and bias, where `needed`; with another undocumented kernel of the same kind."""
    sums = torch.batch_norm_backward_reduce(gradient, maps, mean, inverse, weight, False, *needed)
    return sums[2], sums[3]


def upsampling_gradient(gradient: Tensor, height: int, width: int, align_corners: bool) -> Tensor:
    """The gradient of maps (B, C, height, width) from that of their bilinear upsampling; torch documents only autograd
    for it, which computes the upsampling again."""
    sizes = list(gradient.shape[-2:]), [*gradient.shape[:2], height, width]
    return cast(Tensor, torch.ops.aten.upsample_bilinear2d_backward(gradient, *sizes, align_corners))


def copy_to_compile(function: Any) -> FunctionType:
    """A copy of a function with its own cache of compiled versions: torch keeps only eight per code object, and every
    number of classes needs another one."""
    return FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
