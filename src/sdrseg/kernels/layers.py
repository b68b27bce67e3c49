"""Two layers with faster kernels on GPUs than those of the libraries; elsewhere they are unchanged.

Batch norm with frozen statistics: torch's backward writes a gradient that is not channels last, so the convolution
before it copies that gradient first. The kernels of synchronised batch norm do the same arithmetic without this copy.
Depthwise convolutions: for dilated ones, cuDNN takes thirty times as long as reading and writing the maps; our kernel
(triton_depthwise.py) replaces it, forward and for both gradients. For others cuDNN is faster, but it compiles a kernel
for every new size of the maps, so in inference mode, where sizes vary, they use our kernel too.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sdrseg.compat import norm_input_gradient, norm_parameter_gradients
from sdrseg.kernels import enabled, on_gpu, runs


def use_fast_layers(network: nn.Module) -> None:
    """Replace torch's layers by these two. Parameters, buffers and their names stay."""
    for module in network.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = BatchNorm2d
        elif type(module) is nn.Conv2d and _is_depthwise(module):
            module.__class__ = DepthwiseConv2d


def _is_depthwise(conv: nn.Conv2d) -> bool:
    """A depthwise 3×3 convolution with output of the same size."""
    same = conv.stride == (1, 1) and conv.padding == conv.dilation and conv.padding_mode == "zeros"
    square = conv.kernel_size == (3, 3) and conv.dilation[0] == conv.dilation[1]
    return same and square and conv.groups == conv.in_channels == conv.out_channels and conv.bias is None


class BatchNorm2d(nn.BatchNorm2d):
    """nn.BatchNorm2d with a faster backward on GPUs if statistics are frozen."""

    def forward(self, maps: Tensor) -> Tensor:
        needed = torch.is_grad_enabled() and not self.training and enabled("norm")
        if not needed or not maps.is_cuda or torch.compiler.is_compiling():
            return super().forward(maps)
        known = self.weight is not None and self.running_mean is not None and self.running_mean.dtype == torch.float32
        if not known or maps.numel() == 0 or not maps.is_contiguous(memory_format=torch.channels_last):
            return super().forward(maps)
        apply: Any = FrozenNorm.apply
        return cast(Tensor, apply(maps, self.weight, self.bias, self.running_mean, self.running_var, self.eps))


class FrozenNorm(torch.autograd.Function):
    """(maps − mean) · weight / √(variance + eps) + bias, for maps that are channels last."""

    @staticmethod
    def forward(
        ctx: Any, maps: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float
    ) -> Tensor:
        ctx.save_for_backward(maps, weight, mean, variance)
        ctx.eps = eps
        return nn.functional.batch_norm(maps, mean, variance, weight, bias, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        maps, weight, mean, variance = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        inverse = torch.rsqrt(variance + ctx.eps)
        grad_maps = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_maps = norm_input_gradient(gradient, weight, inverse, ctx.eps)
        if any(needed := ctx.needs_input_grad[1:3]):
            grad_weight, grad_bias = norm_parameter_gradients(gradient, maps, mean, inverse, weight, needed)
        return grad_maps, grad_weight, grad_bias, None, None, None


class DepthwiseConv2d(nn.Conv2d):
    """A depthwise convolution, with our kernel if possible."""

    def forward(self, maps: Tensor) -> Tensor:
        # compiled code cannot query inference mode
        inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
        ours = self.dilation[0] > 1 or inference
        if not ours or not on_gpu(maps) or maps.dtype == torch.float64 or not runs_on(maps.device):
            return super().forward(maps)
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else maps.dtype
        return cast(Tensor, depthwise(maps.to(dtype), self.weight.to(dtype), self.dilation[0]))


def runs_on(device: torch.device) -> bool:
    """Whether depthwise convolutions use our kernel on a device."""
    return runs("depthwise", device, _attempt)


def _attempt(device: torch.device) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        like: Any = {"device": device, "dtype": dtype}
        maps = torch.zeros(2, 16, 2, 2, **like)
        depthwise(maps, torch.zeros(16, 1, 3, 3, **like), 2)
        depthwise_weights(maps, maps, 2)


@torch.library.custom_op("sdrseg::depthwise", mutates_args=())
def depthwise(maps: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """Maps (B, C, h, w) convolved with weights (C, 1, 3, 3), zero-padded; sums in float32, result channels last."""
    from sdrseg.kernels.triton_depthwise import launch

    return launch(maps.contiguous(memory_format=torch.channels_last), weight, dilation)


@depthwise.register_fake
def _(maps: Tensor, weight: Tensor, dilation: int) -> Tensor:
    return torch.empty_like(maps, memory_format=torch.channels_last)


@torch.library.custom_op("sdrseg::depthwise_weights", mutates_args=())
def depthwise_weights(maps: Tensor, gradient: Tensor, dilation: int) -> Tensor:
    """The gradient of the weights, in float32, from the maps and the gradient of the result."""
    from sdrseg.kernels.triton_depthwise import launch_weights

    maps, gradient = (each.contiguous(memory_format=torch.channels_last) for each in (maps, gradient))
    return launch_weights(maps, gradient, dilation)


@depthwise_weights.register_fake
def _(maps: Tensor, gradient: Tensor, dilation: int) -> Tensor:
    return maps.new_empty(maps.shape[1], 1, 3, 3, dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.dilation = inputs[2]


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    maps, weight = ctx.saved_tensors
    grad_maps = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_maps = cast(Tensor, depthwise(gradient, weight.flip(-2, -1), ctx.dilation))
    if ctx.needs_input_grad[1]:
        grad_weight = torch.empty_like(weight).copy_(cast(Tensor, depthwise_weights(maps, gradient, ctx.dilation)))
    return grad_maps, grad_weight, None


depthwise.register_autograd(_backward, setup_context=_setup_context)
