"""Our own parts of the network: the official decoder, a small encoder, and where ResNets stride and dilate."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torchvision.models.resnet import Bottleneck, ResNet

from sdrseg.compat import Encoder, register_encoder
from sdrseg.config.net import Net
from sdrseg.errors import UsageError
from sdrseg.kernels.upsampling import upsample


class OfficialDecoder(nn.Module):
    """The decoder of the official code: atrous convolutions side by side and a pooling branch that is added.

    F (B, C, h, w) → (B, 256, h, w). No bias anywhere; the activation follows each batch norm (officially none).
    """

    def __init__(self, channels: int, activation: Literal["relu", "leaky_relu", "none"], out: int = 256):
        super().__init__()
        kind = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "none": nn.Identity}[activation]
        atrous = (nn.Conv2d(channels, out, 3, padding=d, dilation=d, bias=False) for d in (6, 12, 18))
        self.branches = nn.ModuleList([nn.Conv2d(channels, out, 1, bias=False), *atrous])
        self.join = nn.Sequential(nn.BatchNorm2d(4 * out), kind(), nn.Conv2d(4 * out, out, 1, bias=False))
        self.pooled = nn.Sequential(
            nn.Conv2d(channels, out, 1, bias=False), nn.BatchNorm2d(out), kind(), nn.Conv2d(out, out, 1, bias=False)
        )
        self.last = nn.Sequential(nn.BatchNorm2d(out), kind())

    def forward(self, scales: list[Tensor]) -> Tensor:
        features = scales[-1]
        joined = self.join(torch.cat([branch(features) for branch in self.branches], 1))
        pool = features.mean((-2, -1), keepdim=True) if self.training else sliding_mean(features)
        return cast(Tensor, self.last(joined + self.pooled(pool)))


def sliding_mean(features: Tensor, window: int = 32) -> Tensor:
    """Means over windows of at most 32×32 cells, moved by one cell and, at the border, repeated: (…, h, w) → the same.

    Up to 32×32 cells (512×512 pixels) this is the mean of all. Written as two products with matrices of weights, which
    exist for any size, also in an exported network.
    """

    def weights(length: int) -> Tensor:
        cells = torch.arange(length, device=features.device)
        start = (cells - (window - 1) // 2).clamp(max=length - window).clamp(min=0)[:, None]
        inside = ((cells >= start) & (cells < start + window)).to(features.dtype)
        return inside / inside.sum(1, keepdim=True)

    height, width = features.shape[-2:]
    return weights(height) @ features @ weights(width).T


class PooledBranch(nn.Sequential):
    """smp's pooling branch, with its one value per channel repeated instead of interpolated."""

    def forward(self, features: Tensor) -> Tensor:
        pooled = features
        for part in self:
            pooled = part(pooled)
        return pooled.expand(-1, -1, features.shape[-2], features.shape[-1])


class Upsample(nn.Module):
    """nn.Upsample(mode="bilinear", align_corners=True), computed in float32 and returned in the input's precision."""

    def __init__(self, factor: int):
        super().__init__()
        self.factor = factor

    def forward(self, maps: Tensor) -> Tensor:
        size = (maps.shape[-2] * self.factor, maps.shape[-1] * self.factor)
        return upsample(maps, size, align_corners=True, dtype=maps.dtype)


class ToyEncoder(Encoder):
    """A small encoder of our own for tests and generated data: 3×3 convolutions, batch norm, ReLU; ten layers."""

    def __init__(self, width: int, depth: int = 5, output_stride: int = 32):
        channels = [3, width, 2 * width, 4 * width, 4 * width, 4 * width]
        super().__init__(channels, depth, output_stride)
        self.stages = nn.ModuleList()
        for layers, before, after in zip((1, 2, 3, 2, 2), channels, channels[1:], strict=False):
            stage = nn.Sequential()
            for inputs, stride in [(before, 2), *[(after, 1)] * (layers - 1)]:
                stage.append(nn.Conv2d(inputs, after, 3, stride, padding=1, bias=False))
                stage.extend([nn.BatchNorm2d(after), nn.ReLU(inplace=True)])
            self.stages.append(stage)

    def get_stages(self) -> dict[int, list[nn.Module]]:
        return {16: [self.stages[3]], 32: [self.stages[4]]}

    def forward(self, images: Tensor) -> list[Tensor]:
        scales = [images]
        for stage in self.stages:
            scales.append(stage(scales[-1]))
        return scales


register_encoder("toy16", ToyEncoder, width=16)


def place_strides(encoder: Any, net: Net) -> None:
    """Stride on conv1 for ResNet-v1 weights, and the dilation of the first block of a dilated stage.

    smp gives all convolutions of a dilated stage the same dilation, as the official code does with ResNet-101. For a
    1×1 convolution dilation has no effect; without it, libraries use their fast matrix product.
    """
    for conv in encoder.modules():
        if isinstance(conv, nn.Conv2d) and conv.kernel_size == (1, 1):
            conv.dilation = (1, 1)
    if net.stride_on == "conv1":
        if not has_bottlenecks(encoder):
            raise UsageError(f"net.stride_on=conv1 is for ResNets with bottleneck blocks, not for {net.encoder}.")
        for stage in (encoder.layer2, encoder.layer3, encoder.layer4):
            stage[0].conv1.stride, stage[0].conv2.stride = stage[0].conv2.stride, (1, 1)
    if not net.dilate_first_block:
        if not isinstance(encoder, ResNet):
            raise UsageError(f"net.dilate_first_block=false is for torchvision's ResNets, not for {net.encoder}.")
        for stage, stride in ((encoder.layer3, 16), (encoder.layer4, 32)):
            if stride > encoder.output_stride:
                before = max(1, stride // 2 // encoder.output_stride)
                for conv in stage[0].modules():
                    if isinstance(conv, nn.Conv2d) and conv.kernel_size == (3, 3):
                        conv.dilation = conv.padding = (before, before)


def has_bottlenecks(encoder: nn.Module) -> bool:
    """Whether an encoder is one of torchvision's ResNets from ResNet-50 up, whose stride can be on conv1 or conv2."""
    return isinstance(encoder, ResNet) and isinstance(encoder.layer1[0], Bottleneck)
