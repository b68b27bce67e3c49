"""What the network is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sdrseg.config.sections import setting


@dataclass(frozen=True)
class Net:
    """Body (encoder), head (decoder) and growing classifier."""

    encoder: str = setting("resnet101", "body: any encoder of segmentation_models_pytorch, tu-NAME of timm, or toy16")
    decoder: str = setting(
        "deeplabv3plus", "head: any architecture of segmentation_models_pytorch, or official (the released head)"
    )
    output_stride: int = setting(
        16,
        "pixels per cell of the features: 8, 16 or 32, with deeplabv3, deeplabv3plus, pan, pspnet and official; the "
        "other decoders use every scale of the body, down to 32",
        8,
        32,
    )
    head_activation: Literal["relu", "leaky_relu", "none"] = setting(
        "relu", "after each batch norm of decoder = official; the released code has none"
    )
    dilate_first_block: bool = setting(
        True,
        "ResNets: a stage that dilates in place of its stride does so from its first block on (the released code), or "
        "from its second (torchvision)",
    )
    stride_on: Literal["conv2", "conv1"] = setting(
        "conv2", "ResNets with bottlenecks: stride on the 3×3 convolution (torchvision), or on the first 1×1 (v1)"
    )
    weights: str = setting(
        "imagenet", "pre-trained start: imagenet (by name, needs a network), none (random), or a file's path"
    )
    bn_momentum_body: float = setting(
        0.01, "of the running statistics of batch norm in the body; 0.1 with net.weights=none if not set", 1e-6, 1
    )
    bn_momentum_head: float = setting(0.1, "and in the head", 1e-6, 1)
    bn_later: Literal["freeze_stats", "train"] = setting(
        "freeze_stats", "running statistics in later steps: used and left alone, or trained as in step 0"
    )
