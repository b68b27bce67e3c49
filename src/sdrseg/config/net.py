"""Settings of the network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sdrseg.config.setting import setting


@dataclass(frozen=True)
class Net:
    """Encoder, decoder and a growing classifier."""

    encoder: str = setting("resnet101", "any encoder of segmentation_models_pytorch, tu-NAME of timm, or toy16")
    decoder: str = setting(
        "deeplabv3plus",
        "any architecture of segmentation_models_pytorch, or official (the official code's)",
    )
    output_stride: int = setting(
        16,
        "stride of the encoder's last features: 8, 16 or 32, with deeplabv3, deeplabv3plus, pan, pspnet and official; "
        "the other decoders use every scale of the encoder, down to 32",
        8,
        32,
    )
    atrous: Literal["6,12,18", "12,24,36"] = setting(
        "6,12,18", "dilations in the decoders deeplabv3 and deeplabv3plus; 12,24,36 is the default of other libraries"
    )
    decoder_activation: Literal["relu", "leaky_relu", "none"] = setting(
        "relu", "activation after each batch norm, for decoder = official; the official code has none"
    )
    dilate_first_block: bool = setting(
        True,
        "ResNets: a stage with dilation instead of stride is dilated from its first block on (the official code), or "
        "from its second (torchvision)",
    )
    stride_on: Literal["conv2", "conv1"] = setting(
        "conv2", "ResNets with bottlenecks: stride on the 3×3 convolution (torchvision), or on the first 1×1 (v1)"
    )
    align_corners: bool = setting(
        False, "upsampling of the logits: with true, corner cells lie on corner pixels, as in smp's own models"
    )
    weights: str = setting(
        "imagenet", "pre-trained weights: imagenet (downloaded once), none (random), or the path of a file"
    )
    bn_momentum_encoder: float = setting(
        0.01, "batch-norm momentum of the encoder; with net.weights=none the default is 0.1", 1e-6, 1
    )
    bn_momentum_decoder: float = setting(0.1, "batch-norm momentum of the decoder", 1e-6, 1)
    bn: Literal["train", "freeze_stats"] = setting(
        "train", "running statistics of batch norm in step 0: updated, or frozen"
    )
    bn_later: Literal["train", "freeze_stats"] = setting("freeze_stats", "the same in later steps", affects="later")
