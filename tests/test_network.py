"""The network: shapes, growth, batch norm, the official decoder, strides and dilations, and what cannot be built."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest
import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet50
from torchvision.models.feature_extraction import create_feature_extractor

from sdrseg.compat import batch_norms
from sdrseg.config import load_config
from sdrseg.config.net import Net
from sdrseg.errors import UsageError
from sdrseg.network import (
    DECODERS,
    Network,
    Output,
    build_network,
    load_network,
)
from sdrseg.network_parts import OfficialDecoder, sliding_mean
from sdrseg.network_statistics import statistics_moved, statistics_warning


def toy(classes: int = 4, seed: int = 0, **settings: object) -> Network:
    torch.manual_seed(seed)
    return build_network(Net(**{"encoder": "toy16", "weights": "none", **settings}), classes)


def images(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# decoder: (multiple of image sides, stride of F, kernel of the classifier, its input channels, pixels per coarse cell)
ARCHITECTURES = {
    "deeplabv3": (16, 16, 1, 64, 16),
    "deeplabv3plus": (16, 16, 1, 64, 4),
    "fpn": (32, 32, 1, 128, 4),
    "linknet": (32, 32, 1, 32, 1),
    "manet": (32, 32, 3, 16, 1),
    "official": (16, 16, 1, 256, 16),
    "pan": (128, 16, 3, 32, 4),
    "pspnet": (16, 16, 3, 512, 16),
    "segformer": (32, 32, 1, 256, 4),
    "unet": (32, 32, 3, 16, 1),
    "unetplusplus": (32, 32, 3, 16, 1),
    "upernet": (32, 32, 1, 256, 4),
}


def test_every_architecture_of_smp_is_in_the_table_or_refused():
    assert set(ARCHITECTURES) == set(DECODERS)
    assert set(smp.MODEL_ARCHITECTURES_MAPPING) - set(DECODERS) == {"dpt"}


@pytest.mark.parametrize("decoder", DECODERS)
def test_architectures(decoder):
    multiple, stride, kernel, channels, cell = ARCHITECTURES[decoder]
    network = toy(decoder=decoder)
    assert (network.multiple, network.stride, network.feature_channels) == (multiple, stride, 64)
    assert network.features_nonnegative
    assert network.classifier.kernel_size == (kernel, kernel) and network.classifier.in_channels == channels
    network.grow(1)
    for size in (33, 47), (64, 32):
        out = network(images(2, 3, *size))
        padded = tuple(-(-side // multiple) * multiple for side in size)
        assert out.logits.shape == (2, 5, *size)
        assert out.coarse.shape == (2, 5, *(side // cell for side in padded))
        assert out.embedding.shape == (2, channels, *out.coarse.shape[-2:])
        assert out.features.shape == (2, 64, *(side // stride for side in padded))
    out.logits.square().sum().backward()
    assert [name for name, p in network.named_parameters() if p.grad is None] == []  # none that DDP would wait for


def test_all_stages_of_the_encoder_are_given_where_asked_for():
    network = toy(output_stride=8).eval()
    x = images(1, 3, 64, 64)
    plain = network(x)
    network.keep_stages = True
    kept = network(x)
    assert len(plain.stages) == 1 and len(kept.stages) == len(network.encoder.out_channels) - 1
    assert [s.shape[1] for s in kept.stages] == list(network.encoder.out_channels[1:])
    assert all(torch.equal(a, b) for a, b in zip(kept.stages, network.encoder(x)[1:], strict=True))
    assert torch.equal(plain.features, kept.features) and torch.equal(plain.logits, kept.logits)


@pytest.mark.parametrize("size", [(33, 47), (64, 64), (75, 100), (32, 32), (20, 200)])
def test_any_size_is_padded_inside_and_cropped_back(size):
    network = toy(output_stride=8).eval()
    x = images(2, 3, *size)
    padded = F.pad(x, (0, -size[1] % 8, 0, -size[0] % 8))
    inside, outside = network(padded), network(x)
    assert torch.equal(outside.logits, inside.logits[..., : size[0], : size[1]])
    for name in ("coarse", "embedding", "features"):
        assert torch.equal(getattr(outside, name), getattr(inside, name))
    up = F.interpolate(inside.coarse, padded.shape[-2:], mode="bilinear", align_corners=False)
    assert torch.equal(inside.logits, up) and torch.equal(network.classifier(inside.embedding), inside.coarse)
    # the grid of F and the strided slice of a label map have the same number of cells
    assert outside.features.shape[-2:] == torch.zeros(size)[::8, ::8].shape


def test_multiples_are_not_padded():
    seen = []
    network = toy()
    network.encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    x = images(2, 3, 48, 64)
    network(x)
    assert seen[0] is x


def test_cell_of_f_looks_at_the_pixel_where_it_begins():
    """With equal weights everywhere the receptive fields are symmetric: an impulse shows in the middle of its trace."""
    network = toy(output_stride=16).eval()
    for module in network.encoder.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.constant_(module.weight, 1 / module.weight[0].numel())
    x = torch.zeros(1, 3, 256, 320)
    x[..., 16 * 7, 16 * 11] = 1
    trace = network(x).features[0].sum(0)
    assert divmod(int(trace.argmax()), trace.shape[1]) == (7, 11)
    rows, columns = trace.sum(1), trace.sum(0)
    assert torch.allclose(rows[7 - 3 : 7], rows[8 : 8 + 3].flip(0)) and torch.allclose(
        columns[8:11], columns[12:15].flip(0)
    )


# --- growth ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", ["deeplabv3plus", "unet"])
@pytest.mark.parametrize("init", ["default", "mib"])
def test_growth_keeps_old_rows_bit_for_bit(decoder, init):
    network = toy(decoder=decoder).double()
    old = copy.deepcopy(network.classifier)
    assert old.bias is not None
    old.bias.data.uniform_(-1, 1)
    network.classifier.load_state_dict(old.state_dict())
    network.grow(3, init)
    assert network.classes == 7 and network.classifier.weight.dtype == torch.float64
    assert network.classifier.kernel_size == old.kernel_size and network.classifier.padding == old.padding
    first = 1 if init == "mib" else 0  # the background's bias is the only old value that changes
    assert torch.equal(network.classifier.weight[:4], old.weight)
    assert torch.equal(network.classifier.bias[first:4], old.bias[first:])
    assert all(p.requires_grad for p in network.classifier.parameters())
    if init == "default":
        new = network.classifier.weight[4:]
        assert len({*new.flatten().tolist()}) == new.numel() and new.abs().max() <= new[0].numel() ** -0.5


@pytest.mark.parametrize("new", [1, 5])
def test_mib_start_keeps_old_probabilities_and_shares_the_background(new):
    network = toy().double().eval()
    network.classifier.bias.data.uniform_(-1, 1)
    x = images(2, 3, 40, 50).double()
    before = network(x).coarse.softmax(1)
    network.grow(new, "mib")
    after = network(x).coarse.softmax(1)
    assert torch.allclose(after[:, 1:4], before[:, 1:4], rtol=1e-12, atol=0)
    shares = torch.cat([after[:, :1], after[:, 4:]], 1)
    assert torch.allclose(shares, (before[:, :1] / (new + 1)).expand_as(shares), rtol=1e-12, atol=0)


def test_growth_is_deterministic_and_never_by_nothing():
    one, two = toy(), toy()
    for network in one, two:
        torch.manual_seed(5)
        network.grow(2)
    assert torch.equal(one.classifier.weight, two.classifier.weight)
    with pytest.raises(ValueError, match="grow by 0"):
        one.grow(0)


# --- batch norm -----------------------------------------------------------------------------------------------------


def statistics(network: nn.Module) -> list[torch.Tensor]:
    return [b.clone() for norm in batch_norms(network) for b in (norm.running_mean, norm.running_var)]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("decoder", ["deeplabv3plus", "unet"])
def test_frozen_statistics_stay_frozen_whoever_calls_train(decoder):
    network = toy(decoder=decoder)
    network(images(4, 3, 64, 64))
    free = copy.deepcopy(network)
    network.freeze_statistics()
    before = statistics(network)
    wrapped = nn.ModuleList([copy.deepcopy(network)])  # as DDP, Fabric and torch.compile do: train() comes from above
    wrapped.train()
    network = wrapped[0]
    assert network.training and network.decoder.training and not any(norm.training for norm in batch_norms(network))
    x = images(4, 3, 64, 64, seed=2)
    trained = network(x)
    assert same(before, statistics(network))
    trained.logits.square().sum().backward()
    assert all(norm.weight.grad.abs().sum() > 0 for norm in batch_norms(network.encoder))
    assert torch.equal(trained.logits, network.eval()(x).logits)  # the running statistics were used

    free.train()(x)
    assert not any(torch.equal(a, b) for a, b in zip(before, statistics(free), strict=True))


def test_frozen_statistics_survive_the_conversion_to_synchronised_batch_norm():
    network = toy()
    network(images(4, 3, 32, 32))
    network.freeze_statistics()
    before = statistics(network)
    network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    assert isinstance(network, Network) and any(isinstance(m, nn.SyncBatchNorm) for m in network.modules())
    network.train()(images(4, 3, 32, 32, seed=2))  # a synchronised batch norm in training mode would refuse the CPU
    assert same(before, statistics(network))
    assert {norm.momentum for norm in batch_norms(network.encoder)} == {0.01}


def test_momentum_of_encoder_and_decoder():
    network = toy(bn_momentum_encoder=3e-4, bn_momentum_decoder=0.2)
    assert {norm.momentum for norm in batch_norms(network.encoder)} == {3e-4}
    assert {norm.momentum for norm in batch_norms(network.decoder)} == {0.2}


def test_how_far_statistics_move():
    assert statistics_moved(3e-4, 1410) == pytest.approx(0.345, abs=1e-3)  # a step of VOC 15-1 in the official code
    assert statistics_moved(3e-4, 8040) == pytest.approx(0.910, abs=1e-3)
    network = toy(bn_momentum_encoder=0.05, bn_momentum_decoder=0.1)
    norm = next(batch_norms(network.encoder))
    norm.running_mean.fill_(1)
    for _ in range(6):
        norm(torch.zeros(2, 16, 3, 3))
    assert norm.running_mean[0].item() == pytest.approx(1 - statistics_moved(0.05, 6))


def test_warning_about_statistics_that_hardly_moved():
    assert statistics_warning(Net(), 1000) is None
    text = statistics_warning(Net(bn_momentum_encoder=3e-4), 120)
    assert (
        text is not None
        and "encoder" in text
        and "only 4 %" in text
        and "net.bn_momentum_encoder to at least 0.02 " in text
    )
    assert statistics_warning(Net(bn_momentum_encoder=0.02), 120) is None
    text = statistics_warning(Net(bn_momentum_encoder=0.5), 10)
    assert text is not None and "decoder" in text and "65 %" in text
    assert statistics_warning(Net(), 0) is not None


def test_parameter_groups_share_out_every_parameter():
    network = toy()
    encoder, decoder = set(network.encoder_parameters()), set(network.decoder_parameters())
    assert not encoder & decoder and encoder | decoder == set(network.parameters())
    assert set(network.classifier.parameters()) < decoder


# --- the official decoder --------------------------------------------------------------------------------------------


def official_decoder(f: torch.Tensor, w: dict[str, torch.Tensor], slope: float, train: bool) -> torch.Tensor:
    """docs/specification.md, section 2.1, from tensors, with its own batch norm and with pooling by windows."""

    def norm(x, name):
        mean, var = w[f"{name}.running_mean"], w[f"{name}.running_var"]
        if train:
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
        shape = (1, -1, 1, 1)
        y = (x - mean.view(shape)) / (var.view(shape) + 1e-5).sqrt()
        y = y * w[f"{name}.weight"].view(shape) + w[f"{name}.bias"].view(shape)
        return torch.where(y < 0, slope * y, y)

    branches = [F.conv2d(f, w["branches.0.weight"])]
    branches += [F.conv2d(f, w[f"branches.{i}.weight"], padding=6 * i, dilation=6 * i) for i in (1, 2, 3)]
    joined = F.conv2d(norm(torch.cat(branches, 1), "join.0"), w["join.2.weight"])
    if train:
        pool = f.mean((2, 3), keepdim=True)
    else:
        kernel = [min(32, side) for side in f.shape[-2:]]
        before, after = [(k - 1) // 2 for k in kernel], [k // 2 for k in kernel]
        pool = F.avg_pool2d(f, kernel, stride=1)
        pool = F.pad(pool, (before[1], after[1], before[0], after[0]), mode="replicate")
    pool = F.conv2d(norm(F.conv2d(pool, w["pooled.0.weight"]), "pooled.1"), w["pooled.3.weight"])
    return norm(joined + pool, "last.0")


@pytest.mark.parametrize(("activation", "slope"), [("none", 1), ("relu", 0), ("leaky_relu", 0.01)])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("size", [(5, 7), (33, 40)])
def test_official_decoder(activation, slope, train, size):
    torch.manual_seed(0)
    decoder = OfficialDecoder(6, activation, out=8).double().train(train)
    for norm in batch_norms(decoder):
        for tensor in (norm.running_mean, norm.weight.data, norm.bias.data):
            tensor.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
    assert not any(isinstance(m, nn.Conv2d) and m.bias is not None for m in decoder.modules())
    f = images(3, 6, *size).double().relu()
    weights = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    assert torch.allclose(decoder([f]), official_decoder(f, weights, slope, train), rtol=1e-10, atol=1e-12)


def test_sliding_mean():
    f = images(1, 2, 32, 20).double()
    assert torch.allclose(sliding_mean(f), f.mean((2, 3), keepdim=True).expand_as(f))  # up to 512×512: the mean of all
    f = images(1, 1, 3, 70).double()
    f_np, means = f[0, 0].numpy(), sliding_mean(f)[0, 0].numpy()
    for j in range(70):
        start = min(max(j - 15, 0), 70 - 32)
        assert np.allclose(means[:, j], f_np[:, start : start + 32].mean())


# --- strides and dilations of ResNets -------------------------------------------------------------------------------


def dilations(network: Network, layer: str) -> list[int]:
    return [
        module.dilation[0]
        for block in getattr(network.encoder, layer)
        for module in block.modules()
        if isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3)
    ]


def test_resnet101_is_the_encoder_of_the_paper():
    network = build_network(Net(weights="none"), 21)
    assert 42.4e6 < sum(p.numel() for p in network.encoder_parameters()) < 42.6e6
    assert (network.stride, network.feature_channels, network.features_nonnegative) == (16, 2048, True)
    assert dilations(network, "layer3") == [1] * 23 and dilations(network, "layer4") == [2, 2, 2]
    assert [
        layer[0].conv2.stride[0] for layer in (network.encoder.layer2, network.encoder.layer3, network.encoder.layer4)
    ] == [
        2,
        2,
        1,
    ]
    assert [
        layer[0].conv1.stride[0] for layer in (network.encoder.layer2, network.encoder.layer3, network.encoder.layer4)
    ] == [
        1,
        1,
        1,
    ]
    rates = {m.dilation[0] for m in network.decoder.aspp.modules() if isinstance(m, nn.Conv2d)}
    assert rates == {1, 6, 12, 18}
    assert not any(isinstance(m, nn.Dropout) and m.p > 0 for m in network.modules())


def as_torchvision(make, replace):
    """torchvision's own network up to layer4."""
    return create_feature_extractor(make(weights=None, replace_stride_with_dilation=replace), ["layer4"])


@pytest.mark.parametrize(
    ("stride", "replace", "expected"),
    [(8, [False, True, True], [2, 4, 4]), (16, [False, False, True], [1, 2, 2]), (32, None, [1, 1, 1])],
)
def test_dilations_as_in_torchvision(stride, replace, expected):
    net = Net("resnet50", "official", output_stride=stride, dilate_first_block=False, weights="none")
    network = build_network(net, 3).eval()
    assert network.stride == stride and dilations(network, "layer4") == expected
    theirs = as_torchvision(resnet50, replace).eval()
    theirs.load_state_dict(network.encoder.state_dict())
    x = images(1, 3, 64, 96)
    with torch.no_grad():
        assert torch.equal(theirs(x)["layer4"], network.encoder(x)[-1])


def test_dilations_as_in_the_official_code():
    network = build_network(Net("resnet50", "deeplabv3", output_stride=8, weights="none"), 3)
    assert dilations(network, "layer3") == [2] * 6 and dilations(network, "layer4") == [4, 4, 4]
    network = build_network(Net("resnet18", weights="none"), 3)
    assert dilations(network, "layer4") == [2, 2, 2, 2]
    network = build_network(Net("resnet18", weights="none", dilate_first_block=False), 3)
    assert dilations(network, "layer4") == [1, 1, 2, 2]


@pytest.mark.parametrize(("output_stride", "last"), [(16, 1), (32, 2)])
def test_stride_on_the_first_convolution(output_stride, last):
    net = Net("resnet50", "official", output_stride=output_stride, stride_on="conv1", weights="none")
    encoder = build_network(net, 3).eval().encoder
    first = [layer[0] for layer in (encoder.layer1, encoder.layer2, encoder.layer3, encoder.layer4)]
    assert [block.conv1.stride[0] for block in first] == [1, 2, 2, last]
    assert {block.conv2.stride[0] for block in first} == {1}
    assert [block.downsample[0].stride[0] for block in first] == [1, 2, 2, last]
    x = images(1, 64, 8, 8)
    x[..., 1::2, :] += 1  # a stride on the first 1×1 convolution never looks at odd rows and columns
    y = images(1, 64, 8, 8)
    block = encoder.layer2[0]
    block.conv1, block.downsample = nn.Conv2d(64, 128, 1, 2, bias=False), nn.Conv2d(64, 512, 1, 2, bias=False)
    with torch.no_grad():
        assert torch.equal(block(x), block(y))


# --- non-negative features ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encoder", "nonnegative"),
    [
        ("resnet18", True),
        ("mobilenet_v2", True),  # ReLU6
        ("dpn68", True),
        ("timm-skresnet18", True),
        ("tu-test_resnet", True),
        ("tu-regnety_002", True),
        ("mobileone_s0", True),
        ("efficientnet-b0", False),
        ("mit_b0", False),
        ("tu-mobilenetv3_small_100", False),
        ("tu-convnext_atto", False),
    ],
)
def test_whether_features_can_be_negative(encoder, nonnegative):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # smp's, about the names timm-…
        network = build_network(Net(encoder, weights="none"), 3)
    assert network.features_nonnegative == nonnegative
    for norm in batch_norms(network.encoder):
        norm.bias.data.normal_(std=3)
    assert (network.eval()(5 * images(1, 3, 64, 64)).features.min().item() >= 0) == nonnegative


# --- running it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", ["deeplabv3plus", "official"])
def test_traces_without_a_graph_break(decoder):
    network = toy(decoder=decoder, output_stride=8).eval()
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager", dynamic=False)
    x = images(2, 3, 33, 40)
    out = compiled(x)
    assert isinstance(out, Output)
    expected = network(x)
    for name in ("logits", "coarse", "embedding", "features"):
        assert torch.allclose(getattr(out, name), getattr(expected, name), atol=1e-5)


def test_exports_for_all_sizes():
    network = toy(decoder="official").eval()
    with torch.no_grad():
        dynamic = dict.fromkeys((0, 2, 3), torch.export.Dim.DYNAMIC)
        program = torch.export.export(network, (images(2, 3, 70, 90),), dynamic_shapes=(dynamic,)).module()
        for size in (64, 64), (32, 33), (600, 75):
            x = images(1, 3, *size)
            assert torch.allclose(program(x).logits, network(x).logits, atol=1e-5)


@pytest.mark.parametrize("decoder", ["deeplabv3plus", "official"])
def test_precision_and_memory_format(decoder):
    network = toy(decoder=decoder).eval()
    x = images(2, 3, 50, 64)
    plain = network(x)
    with torch.autocast("cpu", torch.bfloat16):
        low = network(x)
    assert all(t.isfinite().all() for t in (low.logits, low.coarse, low.embedding, low.features))
    assert (low.coarse.dtype, low.logits.dtype) == (torch.bfloat16, torch.float32)
    assert torch.allclose(low.logits.float(), plain.logits, atol=0.05)
    last = network.place_on(torch.device("cpu"))(x.to(memory_format=torch.channels_last))
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in network.parameters() if p.dim() == 4)
    assert last.features.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(last.logits, plain.logits, atol=1e-5)


def test_same_seed_same_network():
    one, two, other = toy(seed=3), toy(seed=3), toy(seed=4)
    pairs = zip(one.state_dict().values(), two.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(one.classifier.weight, other.classifier.weight)
    assert one.training and all(norm.num_batches_tracked == 0 for norm in batch_norms(one))


def test_the_network_of_the_generated_data_learns_quickly():
    net = load_config("shapes").net
    torch.manual_seed(0)
    network = build_network(net, 2)
    assert (network.stride, network.features_nonnegative) == (8, True)
    x = images(8, 3, 64, 64)
    y = (F.avg_pool2d(x, 9, 1, 4).sum(1) > 0).long()
    optimiser = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9, nesterov=True)
    losses = []
    for _ in range(12):
        loss = F.cross_entropy(network(x).logits, y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


# --- what is said when it cannot be ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"decoder": "dpt"},
            "net.decoder=dpt: its decoder is more than one convolution.*deeplabv3plus.*upernet.*official",
        ),
        ({"decoder": "unett"}, "net.decoder=unett: no such decoder; did you mean 'unet'?"),
        ({"encoder": "resnet51"}, "net.encoder=resnet51: no such encoder; did you mean 'resnet5"),
        ({"encoder": "tu-nothing"}, "net.encoder=tu-nothing cannot be combined with"),
        (
            {"encoder": "vgg11"},
            "vgg11 cannot be combined with net.decoder=deeplabv3plus and net.output_stride=16.*dilated",
        ),
        ({"output_stride": 32}, "toy16 cannot be combined with net.decoder=deeplabv3plus and net.output_stride=32"),
        ({"output_stride": 12, "decoder": "official"}, "net.output_stride=12"),
        ({"encoder": "resnet18", "stride_on": "conv1"}, "net.stride_on=conv1 is for ResNets with bottleneck.*resnet18"),
        ({"stride_on": "conv1"}, "net.stride_on=conv1 .*not for toy16"),
        ({"dilate_first_block": False}, "net.dilate_first_block=false is for torchvision's ResNets, not for toy16"),
    ],
)
def test_messages(settings, said):
    with pytest.raises(UsageError, match=said):
        toy(**settings)


def test_a_decoder_of_another_kind_is_refused(monkeypatch):
    class Other(smp.Unet):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.segmentation_head = nn.Sequential(*self.segmentation_head)

    monkeypatch.setitem(smp.MODEL_ARCHITECTURES_MAPPING, "unet", Other)
    with pytest.raises(UsageError, match=r"net\.decoder=unet: its decoder cannot grow\. Use one of "):
        toy(decoder="unet")


def test_a_shortcut_widens_the_classifier_and_changes_no_logit():
    network = build_network(Net(encoder="toy16", decoder="deeplabv3"), 5).eval()
    images = torch.rand(2, 3, 40, 56)
    torch.manual_seed(0)
    directions = torch.rand(3, network.feature_channels)
    with torch.no_grad():
        before = network(images)
        network.widen(directions)
        after = network(images)
    torch.testing.assert_close(after.logits, before.logits)
    inputs = before.embedding.shape[1]
    assert torch.equal(after.embedding[:, :inputs], before.embedding)
    shown = torch.einsum("kc,bchw->bkhw", directions, before.features)
    shown = torch.nn.functional.interpolate(shown, size=before.embedding.shape[-2:], mode="bilinear")
    torch.testing.assert_close(after.embedding[:, inputs:], shown)
    assert not network.shortcut.weight.requires_grad
    network.grow(2)
    loaded = load_network(Net(encoder="toy16", decoder="deeplabv3"), 7, network.state_dict()).eval()
    with torch.no_grad():
        assert torch.equal(loaded(images).logits, network(images).logits)


@pytest.mark.parametrize("shape", [(3, 5, 1, 1), (9999, 64, 1, 1), (3,)])
def test_a_shortcut_of_another_shape_is_refused(shape):
    network = build_network(Net(encoder="toy16", decoder="deeplabv3"), 5)
    state = network.state_dict() | {"shortcut.weight": torch.zeros(shape)}
    with pytest.raises(RuntimeError, match=r"shortcut.weight has the shape"):
        load_network(Net(encoder="toy16", decoder="deeplabv3"), 5, state)
