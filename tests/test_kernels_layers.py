"""Layers with kernels of their own, against loops and against the same arithmetic in float64."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from interpreted import GPU, NEEDS_TRITON, close, interpret
from sdrseg import kernels
from sdrseg.config import load_config, parse_settings
from sdrseg.kernels import layers as layers_module
from sdrseg.kernels.layers import BatchNorm2d, DepthwiseConv2d, depthwise, use_fast_layers
from sdrseg.network import build_network


def looped_depthwise(maps: np.ndarray, weight: np.ndarray, dilation: int) -> np.ndarray:
    """Maps (B, h, w, C), weights (C, 3, 3), cell by cell."""
    images, height, width, channels = maps.shape
    result = np.zeros(maps.shape)
    for n, i, j, c in np.ndindex(images, height, width, channels):
        for a in range(3):
            for b in range(3):
                y, x = i + (a - 1) * dilation, j + (b - 1) * dilation
                if 0 <= y < height and 0 <= x < width:
                    result[n, i, j, c] += maps[n, y, x, c] * weight[c, a, b]
    return result


def looped_weights(maps: np.ndarray, gradient: np.ndarray, dilation: int) -> np.ndarray:
    """The gradient of the weights (C, 3, 3), cell by cell."""
    images, height, width, channels = maps.shape
    result = np.zeros((channels, 3, 3))
    for n, i, j, a, b in np.ndindex(images, height, width, 3, 3):
        y, x = i + (a - 1) * dilation, j + (b - 1) * dilation
        if 0 <= y < height and 0 <= x < width:
            result[:, a, b] += maps[n, y, x].astype(float) * gradient[n, i, j]
    return result


INTERPRETED = """
import sys
import numpy as np, torch
from sdrseg.kernels.layers import depthwise, depthwise_weights
from sdrseg.kernels.triton_depthwise import launch

for case in sys.argv[1:]:
    given = np.load(case)
    maps, dilation = torch.from_numpy(given["maps"]).permute(0, 3, 1, 2), int(given["dilation"])
    weight = torch.from_numpy(given["weight"])[:, None]
    said = launch(maps, weight, dilation)
    assert said.is_contiguous(memory_format=torch.channels_last)
    np.save(case + ".said.npy", said.permute(0, 2, 3, 1).numpy())
    weights = depthwise_weights(maps, torch.from_numpy(given["gradient"]).permute(0, 3, 1, 2), dilation)
    np.save(case + ".weights.npy", weights[:, 0].numpy())
# What a compiler is told about the operation is true, and so is its gradient.
torch.library.opcheck(depthwise, (maps.clone().requires_grad_(), weight.requires_grad_(), dilation))
torch.library.opcheck(depthwise_weights, (maps, maps, dilation))
"""
SHAPES = (((2, 7, 9, 5), 2), ((1, 5, 37, 3), 6), ((3, 1, 1, 4), 12), ((2, 3, 3, 130), 1))


@NEEDS_TRITON
def test_the_depthwise_kernel_equals_loops(tmp_path):
    """Triton's interpreter runs it without a GPU: rows, channels and blocks that do not come out even."""
    draw = np.random.default_rng(0)
    wanted = {}
    for number, (shape, dilation) in enumerate(SHAPES):
        maps, weight = draw.normal(size=shape).astype(np.float32), draw.normal(size=(shape[3], 3, 3)).astype(np.float32)
        gradient = draw.normal(size=shape).astype(np.float32)
        np.savez(tmp_path / f"{number}.npz", maps=maps, weight=weight, gradient=gradient, dilation=dilation)
        truth = looped_depthwise(maps, weight, dilation), looped_weights(maps, gradient, dilation)
        wanted[str(tmp_path / f"{number}.npz")] = truth
    interpret(INTERPRETED, *wanted)
    for case, (result, weights) in wanted.items():
        np.testing.assert_allclose(np.load(f"{case}.said.npy"), result, atol=1e-5)
        np.testing.assert_allclose(np.load(f"{case}.weights.npy"), weights, atol=1e-4)


def layers(kind: type[nn.Module], network: nn.Module) -> list[str]:
    return [name for name, module in network.named_modules() if type(module) is kind]


def test_only_the_layers_meant_are_replaced():
    class Other(nn.BatchNorm2d):
        """Of somebody else, who may compute something else."""

    network = nn.Sequential(
        nn.BatchNorm2d(4),
        Other(4),
        nn.Conv2d(4, 4, 3, padding=6, dilation=6, groups=4, bias=False),
        nn.Conv2d(4, 4, 3, padding=1, groups=4, bias=False),
        nn.Conv2d(4, 4, 3, padding=1, stride=2, groups=4, bias=False),
        nn.Conv2d(4, 4, 3, padding=6, dilation=6, groups=4),  # with a bias
        nn.Conv2d(4, 4, 3, padding=5, dilation=6, groups=4, bias=False),  # smaller than what went in
        nn.Conv2d(4, 4, 3, padding=6, dilation=6, groups=2, bias=False),
        nn.Conv2d(4, 8, 3, padding=6, dilation=6, groups=4, bias=False),
        nn.Conv2d(4, 4, 3, padding=6, dilation=6, groups=4, bias=False, padding_mode="reflect"),
        nn.Conv2d(4, 4, 5, padding=6, dilation=6, groups=4, bias=False),
    )
    keys = list(network.state_dict())
    use_fast_layers(network)
    assert layers(BatchNorm2d, network) == ["0"]
    assert layers(DepthwiseConv2d, network) == ["2", "3"]
    assert list(network.state_dict()) == keys


def test_without_a_gpu_nothing_changes():
    network = nn.Sequential(nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=4, bias=False), nn.BatchNorm2d(4)).eval()
    maps = torch.randn(2, 4, 8, 8, requires_grad=True)

    def said():
        output = network(maps)
        return output, *torch.autograd.grad(output.square().sum(), [maps, *network.parameters()])

    before = said()
    use_fast_layers(network)
    assert all(torch.equal(a, b) for a, b in zip(before, said(), strict=True))


def test_deeplab_has_both():
    network = build_network(load_config("voc").net, 3)
    assert len(layers(BatchNorm2d, network)) > 100
    assert not layers(nn.BatchNorm2d, network)
    assert len(layers(DepthwiseConv2d, network)) == 5


@GPU
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 24, 9, 7), (2, 512, 16, 16), (8, 256, 1, 1), (1, 3, 5, 5)])
@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_frozen_batch_norm_equals_float64(kind, shape, layout):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(shape[1]).eval()
    for tensor in (*norm.parameters(), norm.running_mean):
        tensor.data.normal_()
    norm.running_var.uniform_(0.1, 3)
    maps, gradient = torch.randn(shape).to(kind), torch.randn(shape).to(kind)
    exact = norm.double()
    wanted = maps.double().requires_grad_()
    truth = torch.autograd.grad(exact(wanted), [wanted, *exact.parameters()], gradient.double())

    use_fast_layers(network := nn.Sequential(norm.float().cuda()))
    given = maps.cuda().contiguous(memory_format=layout).requires_grad_()
    said = network(given)
    assert torch.equal(said, F.batch_norm(given, norm.running_mean, norm.running_var, norm.weight, norm.bias))
    back = gradient.cuda().contiguous(memory_format=layout)
    found = torch.autograd.grad(said, [given, *norm.parameters()], back)
    assert found[0].is_contiguous(memory_format=layout)
    for one, other in zip(found, truth, strict=True):
        close(one, other, kind)


@GPU
def test_frozen_batch_norm_without_trained_parameters():
    norm = nn.BatchNorm2d(8).eval().requires_grad_(False).cuda()
    norm.running_var.uniform_(0.1, 3)
    use_fast_layers(network := nn.Sequential(norm))
    maps = torch.randn(2, 8, 4, 4, device="cuda", requires_grad=True)
    network(maps).sum().backward()
    scale = (norm.running_var.double() + norm.eps).rsqrt().cpu()
    close(maps.grad, scale[:, None, None].expand(2, 8, 4, 4), torch.float32)


@GPU
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "dilation"), [((2, 5, 7, 9), 2), ((2, 512, 32, 32), 12), ((2, 304, 40, 33), 18)])
def test_depthwise_convolutions_equal_float64(kind, shape, dilation):
    torch.manual_seed(0)
    channels = shape[1]
    conv = nn.Conv2d(channels, channels, 3, padding=dilation, dilation=dilation, groups=channels, bias=False)
    conv.weight.data = conv.weight.data.to(kind).float()
    maps, gradient = torch.randn(shape).to(kind), torch.randn(shape).to(kind)
    wanted, weight = maps.double().requires_grad_(), conv.weight.detach().double().requires_grad_()
    made = F.conv2d(wanted, weight, padding=dilation, dilation=dilation, groups=channels)
    truth = (made, *torch.autograd.grad(made, [wanted, weight], gradient.double()))

    use_fast_layers(network := nn.Sequential(conv).cuda())
    assert layers_module.runs_on(torch.device("cuda", 0))
    given = maps.cuda().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=kind == torch.bfloat16):
        said = network(given)
    assert said.dtype == kind
    found = (said, *torch.autograd.grad(said, [given, conv.weight], gradient.cuda()))
    for one, other in zip(found, truth, strict=True):
        close(one, other.detach(), kind)


@GPU
def test_in_inference_mode_every_depthwise_convolution_is_ours(monkeypatch):
    calls = []
    monkeypatch.setattr(layers_module, "depthwise", lambda *given: calls.append(0) or depthwise(*given))
    conv = nn.Conv2d(48, 48, 3, padding=1, groups=48, bias=False)
    maps = torch.randn(2, 48, 9, 11)
    wanted = conv.double()(maps.double()).detach()
    use_fast_layers(network := nn.Sequential(conv.float()).cuda())
    with torch.no_grad():
        close(network(maps.cuda()), wanted, torch.float32)
    assert not calls
    with torch.inference_mode():
        close(network(maps.cuda()), wanted, torch.float32)
    assert calls


@GPU
def test_a_whole_network_learns_the_same_with_and_without(monkeypatch):
    """Features, logits and every gradient of ResNet-50 DeepLabV3+ with frozen statistics, in float32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    net = load_config("voc", None, parse_settings(["net.encoder=resnet50"])).net
    found = []
    for plain in (False, True):
        torch.manual_seed(0)
        network = build_network(net, 5).place_on(torch.device("cuda", 0))
        images = torch.randn(2, 3, 128, 128, device="cuda")
        network.train()(images)
        network.freeze_statistics()
        with kernels.disabled() if plain else nullcontext():
            said = network(images)
            torch.nn.functional.cross_entropy(said.logits, images.argmax(1)).backward()
        found.append((said.features, said.logits, torch.cat([p.grad.flatten() for p in network.parameters()])))
    for fast, without in zip(*found, strict=True):
        close(fast, without.detach().double().cpu(), torch.float32)
