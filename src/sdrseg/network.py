"""The network: encoder E, decoder D and a classifier that grows in every step.

Encoder and decoder come from segmentation_models_pytorch (smp), by name; only the decoder of the official code
(`official`) and a small encoder for tests and generated data (`toy16`) are our own. smp's decoders upsample with
align_corners=True; the logits are upsampled here, as `net.align_corners` says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sdrseg.compat import ENCODERS, batch_norms, classifier_of, nonnegative, replace_in_deeplab
from sdrseg.config.net import Net
from sdrseg.errors import UsageError, first_line, nearest
from sdrseg.kernels.layers import use_fast_layers
from sdrseg.kernels.upsampling import upsample
from sdrseg.network_parts import OfficialDecoder, PooledBranch, Upsample, place_strides

REFUSED = {"dpt": "its decoder is more than one convolution and needs tokens in addition to features"}
DECODERS = (*sorted(set(smp.MODEL_ARCHITECTURES_MAPPING) - set(REFUSED)), "official")
"""Possible values of `net.decoder`."""
SILENT = -1e4
"""The logit of a silenced channel."""


class Output(NamedTuple):
    """The output of the network for images (B, 3, H, W).

    All but the logits stay on the padded grid. Image sides are padded to a multiple of the stride s, so that the
    features have ⌈H/s⌉ × ⌈W/s⌉ cells and cell (i, j) begins at pixel (s·i, s·j), inside the image; only pan pads to
    8·s.
    """

    logits: Tensor  # (B, K, H, W): `coarse`, upsampled and cropped to the images
    coarse: Tensor  # (B, K, h', w'): output of the classifier
    embedding: Tensor  # (B, D, h', w'): input of the classifier: output of the decoder, and of the shortcut if any
    stages: tuple[Tensor, ...]  # the encoder's feature maps, fine to coarse; the last alone unless `keep_stages`

    @property
    def features(self) -> Tensor:
        """(B, C, h, w): F, the last feature map of the encoder."""
        return self.stages[-1]


class Network(nn.Module):
    """Encoder, decoder and classifier. `build_network` makes one."""

    def __init__(
        self,
        encoder: nn.Module,
        decoder: nn.Module,
        classifier: nn.Conv2d,
        multiple: int,
        align_corners: bool = False,
    ):
        super().__init__()
        self.encoder, self.decoder, self.classifier = encoder, decoder, classifier
        self.shortcut: nn.Conv2d | None = None  # from the encoder's features to further inputs of the classifier
        self.multiple = multiple  # image sides are padded to a multiple of this
        self.align_corners = align_corners
        self.statistics_frozen = False
        self.keep_stages = False  # whether an Output contains all stages, which keeps them in memory
        self.stride, self.feature_channels, self.features_nonnegative, self.pools = self._probe()

    def forward(self, images: Tensor) -> Output:
        """Images (B, 3, H, W), normalised, of any size: bottom and right are padded with zeros where needed."""
        return self.classify(self.trunk(images), images.shape[-2], images.shape[-1])

    def trunk(self, images: Tensor) -> tuple[Tensor, ...]:
        """Run encoder and decoder, which do not depend on the number of classes: stages, then the embedding."""
        scales = self.encoder(resize_canvas(images, *self.padded_size(images.shape[-2], images.shape[-1])))
        kept = scales[1:] if self.keep_stages else scales[-1:]  # the first is the image itself
        embedding = self.decoder(scales)
        if self.shortcut is not None:
            size = (embedding.shape[-2], embedding.shape[-1])
            embedding = torch.cat([embedding, upsample(self.shortcut(scales[-1]), size, dtype=embedding.dtype)], 1)
        return (*kept, embedding)

    def classify(self, trunk: tuple[Tensor, ...], height: int, width: int) -> Output:
        """Apply the classifier to the result of `trunk`, for images of this size."""
        *stages, embedding = trunk
        coarse = self.classifier(embedding)
        logits = upsample(coarse, self.padded_size(height, width), align_corners=self.align_corners)
        return Output(resize_canvas(logits, height, width), coarse, embedding, tuple(stages))

    def padded_size(self, height: int, width: int) -> tuple[int, int]:
        """The size to which an image is padded: multiples of what the network needs."""
        return next_multiple(height, self.multiple), next_multiple(width, self.multiple)

    @property
    def classes(self) -> int:
        return self.classifier.out_channels

    @torch.no_grad()
    def grow(self, new: int, init: Literal["default", "mib"] = "default") -> None:
        """Add classes. Old rows stay bit-identical; new ones start at PyTorch's default.

        mib: the new rows start as the background's, and all of these biases are lowered by log(new + 1). Background and
        new classes share the old background's probability equally; that of every other class stays as it was.
        """
        if new < 1:
            raise ValueError(f"cannot grow by {new} classes")
        old, n_old = self.classifier, self.classes
        assert old.bias is not None
        grown = nn.Conv2d(old.in_channels, n_old + new, cast(Any, old.kernel_size), padding=cast(Any, old.padding))
        grown = grown.to(old.weight.device, old.weight.dtype)
        assert grown.bias is not None
        grown.weight[:n_old], grown.bias[:n_old] = old.weight, old.bias
        if init == "mib":
            grown.weight[n_old:] = old.weight[0]
            grown.bias[0] -= math.log(new + 1)
            grown.bias[n_old:] = grown.bias[0]
        self.classifier = grown

    @torch.no_grad()
    def widen(self, directions: Tensor) -> None:
        """Add inputs of the classifier: the encoder's features times `directions` (k, C), upsampled. They are not
        trained, and rows that exist have weight 0 for them."""
        old = self.classifier
        if self.shortcut is not None or directions.dim() != 2 or directions.shape[1] != self.feature_channels:
            raise ValueError(f"cannot widen by directions of shape {tuple(directions.shape)}")
        added = len(directions)
        self.shortcut = nn.Conv2d(self.feature_channels, added, 1, bias=False).requires_grad_(False)
        self.shortcut.weight.copy_(directions[:, :, None, None])
        wide = nn.Conv2d(
            old.in_channels + added, old.out_channels, cast(Any, old.kernel_size), padding=cast(Any, old.padding)
        )
        assert wide.bias is not None and old.bias is not None
        wide.weight.zero_()
        wide.weight[:, : old.in_channels], wide.bias[:] = old.weight, old.bias
        self.classifier = wide.to(old.weight.device, old.weight.dtype)
        self.shortcut.to(old.weight.device, old.weight.dtype)

    @torch.no_grad()
    def silence(self, channels: Sequence[int]) -> None:
        """Set the logits of some channels to a constant so low that they are never predicted."""
        for rows, value in ((self.classifier.weight, 0.0), (self.classifier.bias, SILENT)):
            assert rows is not None
            rows[list(channels)] = value

    def place_on(self, device: torch.device) -> Network:
        """Move the network to a device, in channels-last layout."""
        move: Any = self.to  # memory_format is missing in the type hints of some versions of torch
        move(device, memory_format=torch.channels_last)
        return self

    def encoder_parameters(self) -> Iterator[nn.Parameter]:
        return self.encoder.parameters()

    def decoder_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the decoder and of the classifier."""
        yield from self.decoder.parameters()
        yield from self.classifier.parameters()

    # --- batch norm -----------------------------------------------------------------------------------------------

    def freeze_statistics(self) -> None:
        """Use running statistics without updating them, also in training mode and after train()."""
        self.statistics_frozen = True
        self.train(self.training)

    def train(self, mode: bool = True) -> Network:
        super().train(mode)
        if self.statistics_frozen:
            for norm in batch_norms(self):
                norm.eval()
        return self

    def _probe(self) -> tuple[int, int, bool, bool]:
        """Stride and channels of the features, whether they are ≥ 0 by construction, and whether a batch norm follows a
        pooling over the whole image, found with one small forward pass."""
        side = max(64, self.multiple)
        mode = self.training
        single: list[bool] = []

        def record(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            single.append(inputs[0][0, 0].numel() == 1)

        hooks = [norm.register_forward_pre_hook(record) for norm in batch_norms(self)]
        with torch.enable_grad():
            features = self.eval()(torch.zeros(1, 3, side, side)).features
        for hook in hooks:
            hook.remove()
        self.train(mode)
        return side // features.shape[-1], features.shape[1], nonnegative(features.grad_fn), any(single)


def resize_canvas(maps: Tensor, height: int, width: int) -> Tensor:
    """Maps (B, C, H, W) padded with zeros, or cropped, at the bottom and on the right."""
    compiling = torch.compiler.is_dynamo_compiling()  # some versions of torch then also report that they are exporting
    if compiling or not torch.compiler.is_exporting():
        missing = (0, width - maps.shape[-1], 0, height - maps.shape[-2])
        return F.pad(maps, missing) if any(missing) else maps
    # an exported network takes all sizes, so no branch may depend on them
    for dim, length in ((-2, height), (-1, width)):
        cells, last = torch.arange(length, device=maps.device), maps.shape[dim] - 1
        inside = (cells <= last).to(maps.dtype)
        maps = maps.index_select(dim, cells.clamp(max=last)) * (inside[:, None] if dim == -2 else inside)
    return maps


def next_multiple(length: int, multiple: int) -> int:
    """The smallest multiple that is at least `length`."""
    return (length + multiple - 1) // multiple * multiple


def build_network(net: Net, classes: int) -> Network:
    """A network with random weights (`weights.load_weights` fills them) and `classes` outputs, background included."""
    if net.decoder in REFUSED:
        raise UsageError(f"net.decoder={net.decoder}: {REFUSED[net.decoder]}. Use one of {', '.join(DECODERS)}.")
    if net.decoder not in DECODERS:
        raise UsageError(f"net.decoder={net.decoder}: no such decoder{nearest(net.decoder, DECODERS)}")
    known = list(ENCODERS)
    if not net.encoder.startswith("tu-") and net.encoder not in known:
        raise UsageError(f"net.encoder={net.encoder}: no such encoder{nearest(net.encoder, known)}")
    try:
        encoder, decoder, classifier = _parts(net, classes)
        place_strides(encoder, net)
        multiple = encoder.output_stride * (8 if net.decoder == "pan" else 1)
        network = Network(encoder, decoder, classifier, multiple, net.align_corners)
    except UsageError:
        raise
    except Exception as error:  # encoders and decoders raise errors of many types
        raise UsageError(
            f"net.encoder={net.encoder} cannot be combined with net.decoder={net.decoder} and "
            f"net.output_stride={net.output_stride}: {first_line(error)}."
        ) from error
    for part, momentum in ((network.encoder, net.bn_momentum_encoder), (network.decoder, net.bn_momentum_decoder)):
        for norm in batch_norms(part):
            norm.momentum = momentum
    use_fast_layers(network)
    return network


def load_network(net: Net, classes: int, state: Mapping[str, Tensor]) -> Network:
    """A network with saved weights; a shortcut is there if they contain one."""
    network = build_network(net, classes)
    if (directions := state.get("shortcut.weight")) is not None:
        if directions.shape[1:] != (network.feature_channels, 1, 1) or len(directions) > network.feature_channels:
            raise RuntimeError(f"shortcut.weight has the shape {tuple(directions.shape)}")
        network.widen(directions.flatten(1))
    network.load_state_dict(state)
    return network


def _parts(net: Net, classes: int) -> tuple[Any, nn.Module, nn.Conv2d]:
    """Encoder, decoder and classifier."""
    stride = net.output_stride
    if net.decoder == "official":
        encoder = smp.encoders.get_encoder(net.encoder, depth=5, weights=None, output_stride=stride)
        decoder = OfficialDecoder(encoder.out_channels[-1], net.decoder_activation)
        return encoder, decoder, nn.Conv2d(256, classes, 1)
    options: dict[str, Any] = {}
    rates = tuple(map(int, net.atrous.split(",")))
    if net.decoder in ("deeplabv3", "deeplabv3plus"):
        options = {"encoder_output_stride": stride, "decoder_atrous_rates": rates, "decoder_aspp_dropout": 0.0}
        options["decoder_channels"] = 64 if net.encoder == "toy16" else 256
    elif net.decoder == "pan":
        options = {"encoder_output_stride": stride}
    elif net.decoder == "pspnet":  # the whole encoder, dilated, as in its paper; smp's default stops after three stages
        options = {"encoder_depth": 5, "output_stride": stride}
    model = smp.create_model(net.decoder, net.encoder, encoder_weights=None, classes=classes, **options)
    classifier = classifier_of(model)
    if classifier is None:
        raise UsageError(f"net.decoder={net.decoder}: its decoder cannot grow. Use one of {', '.join(DECODERS)}.")
    if net.decoder in ("deeplabv3", "deeplabv3plus"):
        replace_in_deeplab(model.decoder, PooledBranch, Upsample)
    return model.encoder, model.decoder, classifier
