"""Image classifiers of transformers, timm and torchvision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .growing import grown
from .language import from_config
from .subject import CLASSES, Batch, Subject, Timed, class_losses, images

__all__ = ["SUBJECTS"]

GROUPNORM = {"replace": {"BatchNorm2d": "GroupNorm"}}
GROUPNORM_OF_TIMM = {"replace": {"BatchNormAct2d": "GroupNorm"}}
REPLACED = "BatchNorm replaced by GroupNorm"
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16,
       "patch_size": 4, "num_labels": CLASSES}  # fmt: skip
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
        "num_labels": CLASSES, "drop_path_rate": 0.0}  # fmt: skip
STAGES = {"num_labels": CLASSES, "hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1]}
STILL = {"drop_path_rate": 0.0}
# name: (what is particular, model, config, its options, side of the images, options of wrap)
Row = tuple[str, str, str, dict[str, Any], int, dict[str, Any]]
TRANSFORMERS: dict[str, Row] = {
    "ViT": ("class token, position embeddings", "ViTForImageClassification", "ViTConfig", VIT, 16, {}),
    "DeiT": ("class and distillation tokens", "DeiTForImageClassification", "DeiTConfig", VIT, 16, {}),
    "BEiT": ("relative position bias, layer scale", "BeitForImageClassification", "BeitConfig",
             VIT | {"use_relative_position_bias": True} | STILL, 16, {}),
    "DINOv2": ("layer scale", "Dinov2ForImageClassification", "Dinov2Config", VIT | STILL, 16, {}),
    "Swin": ("windows folded into the batch, relative position bias", "SwinForImageClassification", "SwinConfig",
             SWIN, 32, {}),
    "ConvNeXt": ("depthwise, layer scale", "ConvNextForImageClassification", "ConvNextConfig", STAGES | STILL, 32, {}),
    "ConvNeXt V2": ("global response normalisation", "ConvNextV2ForImageClassification", "ConvNextV2Config",
                    STAGES | STILL, 32, {}),
    "ResNet": (REPLACED, "ResNetForImageClassification", "ResNetConfig",
               STAGES | {"embedding_size": 8, "layer_type": "basic"}, 64, GROUPNORM),
    "MobileNetV2": (f"depthwise, {REPLACED}", "MobileNetV2ForImageClassification", "MobileNetV2Config",
                    {"num_labels": CLASSES, "depth_multiplier": 0.1, "min_depth": 4, "depth_divisible_by": 4},
                    64, GROUPNORM),
    "SegFormer": ("overlapping patches", "SegformerForImageClassification", "SegformerConfig",
                  {"num_labels": CLASSES, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1],
                   "num_attention_heads": [1, 2, 2, 2]} | STILL, 32, {}),
    "SwinV2": ("shifted windows, cosine attention", "Swinv2ForImageClassification", "Swinv2Config", SWIN, 32, {}),
    "PoolFormer": ("pooling instead of attention, layer scale", "PoolFormerForImageClassification", "PoolFormerConfig",
                   STAGES | STILL, 32, {}),
    "FocalNet": ("focal modulation", "FocalNetForImageClassification", "FocalNetConfig",
                 {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "focal_levels": [2, 2],
                  "focal_windows": [3, 3], "num_labels": CLASSES} | STILL, 32, {}),
    "BiT": ("weight standardisation, GroupNorm", "BitForImageClassification", "BitConfig",
            STAGES | STILL | {"embedding_size": 8, "num_groups": 4, "hidden_sizes": [8, 16, 24, 32]}, 32, {}),
    "RegNet": (f"squeeze and excite, {REPLACED}", "RegNetForImageClassification", "RegNetConfig",
               STAGES | {"embedding_size": 8, "groups_width": 4, "layer_type": "y"}, 64, GROUPNORM),
    "MobileViT": (f"convolutions and attention over patches, {REPLACED}", "MobileViTForImageClassification",
                  "MobileViTConfig", {"image_size": 64, "hidden_sizes": [8, 12, 16], "num_labels": CLASSES,
                                      "neck_hidden_sizes": [4, 4, 4, 8, 8, 8, 16], "num_attention_heads": 2}, 64,
                  GROUPNORM),
    "Hiera": ("pooled attention within units", "HieraForImageClassification", "HieraConfig",
              {"image_size": [32, 32], "patch_size": [3, 3], "patch_stride": [2, 2], "patch_padding": [1, 1],
               "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "masked_unit_size": [4, 4],
               "query_stride": [2, 2], "num_query_pool": 1, "num_labels": CLASSES, "drop_path_rate": 0.0}, 32, {}),
    "I-JEPA": ("a mean over patches", "IJepaForImageClassification", "IJepaConfig", VIT, 16, {}),
}  # fmt: skip


def of_timm(name: str, norm: str = "", **options: Any) -> nn.Module:
    """A model of timm with random weights, its BatchNorms built as ``norm``."""
    import timm

    if norm:
        options["norm_layer"] = getattr(timm.layers, norm)
    return timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)


def vgg(width: int = 8) -> nn.Module:
    """timm's VGG with narrow stages."""
    from timm.models.vgg import VGG

    return VGG(cfg=[width, "M", width, width, "M"], num_classes=CLASSES, mlp_ratio=0.01)


def mixer(
    img_size: int = 32, num_blocks: int = 2, embed_dim: int = 16, ratio: Any = (0.5, 4.0), **parts: str
) -> nn.Module:
    """timm's MLP-Mixer of two blocks, with parts of it by their names; ``ratio`` is of widths inside of a block."""
    from timm.models import mlp_mixer

    options = {part: getattr(mlp_mixer, name) for part, name in parts.items()}
    options |= {"img_size": img_size, "patch_size": 8, "num_blocks": num_blocks, "embed_dim": embed_dim}
    return mlp_mixer.MlpMixer(CLASSES, mlp_ratio=ratio, **options)


def of_torchvision(name: str, **options: Any) -> nn.Module:
    """A model of torchvision with random weights."""
    from torchvision import models

    return getattr(models, name)(num_classes=CLASSES, **options)


def resnet() -> nn.Module:
    """torchvision's ResNet of one block a stage."""
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)


def convnext(width: int = 8) -> nn.Module:
    """torchvision's ConvNeXt of two stages."""
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt(
        [CNBlockConfig(width, 3 * width // 2, 1), CNBlockConfig(3 * width // 2, None, 1)], num_classes=CLASSES
    )


def swin(width: int = 8) -> nn.Module:
    """torchvision's Swin of two stages."""
    from torchvision.models import SwinTransformer

    options: dict[str, Any] = {"embed_dim": width, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    return SwinTransformer([2, 2], **options, num_classes=CLASSES, stochastic_depth_prob=0.0)


def densenet() -> nn.Module:
    """torchvision's DenseNet of two blocks."""
    from torchvision.models import DenseNet

    return DenseNet(growth_rate=8, block_config=(2, 2), num_init_features=16, num_classes=CLASSES)


def filmed() -> nn.Module:
    """torchvision's ResNet of one block a stage over films, with convolutions in three dimensions."""
    from torchvision.models.video.resnet import BasicBlock, BasicStem, Conv3DSimple, VideoResNet

    return VideoResNet(BasicBlock, [Conv3DSimple] * 4, [1, 1, 1, 1], BasicStem, CLASSES)


def films(examples: int, side: int = 16) -> Batch:
    """Random films [B, 3, 4, H, W]."""
    found = images(examples, side, 12)
    return found | {"pixel_values": found["pixel_values"].unflatten(1, (3, 4))}


VIT_OF_TIMM = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
SWIN_OF_TIMM = {"img_size": 32, "patch_size": 2, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 4),
                "window_size": 4} | STILL  # fmt: skip
VIT_OF_TORCHVISION = {"image_size": 16, "patch_size": 4, "num_layers": 2, "num_heads": 2, "hidden_dim": 16,
                      "mlp_dim": 24}  # fmt: skip
RES_MLP = {"ratio": 4, "block_layer": "ResBlock", "norm_layer": "Affine"}
GATED_MLP = {"ratio": 4, "block_layer": "SpatialGatingBlock", "mlp_layer": "GatedMlp"}
SMALL_RESNET = {"layers": (1, 1, 1, 1), "channels": (32, 32, 64, 64)}
TINY_RESNET = {"layers": (1, 1), "channels": (32, 64), "stem_chs": 32}
# name: (library, what is particular, what builds it, side of the images, options of wrap)
PIXELS: dict[str, tuple[str, str, Callable[[], nn.Module], int, dict[str, Any]]] = {
    "ViT (timm)": ("timm", "class token", partial(of_timm, "vit_tiny_patch16_224", **VIT_OF_TIMM), 16, {}),
    "EVA-02 (timm)": ("timm", "rotary, SwiGLU",
                      partial(of_timm, "eva02_tiny_patch14_224", **VIT_OF_TIMM), 16, {}),
    "CaiT (timm)": ("timm", "class attention, talking heads, layer scale",
                    partial(of_timm, "cait_xxs24_224", **VIT_OF_TIMM), 16, {}),
    "Swin (timm)": ("timm", "shifted windows",
                    partial(of_timm, "swin_tiny_patch4_window7_224", **SWIN_OF_TIMM), 32, {}),
    "ConvNeXt (timm)": ("timm", "depthwise, layer scale",
                        partial(of_timm, "convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)), 32, {}),
    "MLP-Mixer (timm)": ("timm", "layers across positions", mixer, 32, {}),
    "VGG (timm)": ("timm", "", vgg, 32, {}),
    "ResNet (timm)": ("timm", "built with GroupNorm",
                      partial(of_timm, "resnet18", "GroupNorm", **SMALL_RESNET), 64, {}),
    "ResNetV2 (timm)": ("timm", "weight standardisation, GroupNorm",
                        partial(of_timm, "resnetv2_50", "GroupNorm1", **TINY_RESNET), 32, {}),
    "MobileNetV2 (timm)": ("timm", "depthwise, built with GroupNorm",
                           partial(of_timm, "mobilenetv2_035", "GroupNorm1"), 32, {}),
    "EfficientNet-B0 (timm)": ("timm", "squeeze and excite, built with GroupNorm",
                               partial(of_timm, "efficientnet_b0", "GroupNorm1"), 32, {}),
    "DeiT III (timm)": ("timm", "layer scale, no class token in positions",
                        partial(of_timm, "deit3_small_patch16_224", **VIT_OF_TIMM), 16, {}),
    "XCiT (timm)": ("timm", "attention across channels", partial(of_timm, "xcit_nano_12_p8_224", **VIT_OF_TIMM
                    | {"patch_size": 8, "img_size": 32, "use_pos_embed": True}), 32,
                    GROUPNORM),
    "ResMLP (timm)": ("timm", "learned shifts and scales", partial(mixer, **RES_MLP), 32, {}),
    "gMLP (timm)": ("timm", "gates across positions", partial(mixer, **GATED_MLP), 32, {}),
    "NF-ResNet (timm)": ("timm", "scaled weight standardisation, no norm",
                         partial(of_timm, "nf_resnet26"), 64, {}),
    "MobileNetV3 (timm)": ("timm", f"squeeze and excite, {REPLACED}",
                           partial(of_timm, "mobilenetv3_small_050"), 64, GROUPNORM_OF_TIMM),
    "RegNetY (timm)": ("timm", f"grouped convolutions, {REPLACED}", partial(of_timm, "regnety_002"), 64,
                       GROUPNORM_OF_TIMM),
    "DenseNet (torchvision)": ("torchvision", f"concatenated features, {REPLACED}", densenet, 64, GROUPNORM),
    "SqueezeNet (torchvision)": ("torchvision", "no norms",
                                 partial(of_torchvision, "squeezenet1_1", dropout=0.0), 64, {}),
    "ShuffleNetV2 (torchvision)": ("torchvision", f"channels shuffled, {REPLACED}",
                                   partial(of_torchvision, "shufflenet_v2_x0_5"), 64, GROUPNORM),
    "MNASNet (torchvision)": ("torchvision", f"depthwise, {REPLACED}",
                              partial(of_torchvision, "mnasnet0_5", dropout=0.0), 64, GROUPNORM),
    "R3D (torchvision)": ("torchvision", "films; BatchNorm replaced by GroupNorm", filmed, 16,
                          {"replace": {"BatchNorm3d": "GroupNorm"}}),
    "ResNet (torchvision)": ("torchvision", REPLACED, resnet, 32, GROUPNORM),
    "MobileNetV2 (torchvision)": ("torchvision", f"depthwise, {REPLACED}",
                                  partial(of_torchvision, "mobilenet_v2", width_mult=0.25), 64, GROUPNORM),
    "ConvNeXt (torchvision)": ("torchvision", "depthwise, layer scale", convnext, 32, {}),
    "Swin (torchvision)": ("torchvision", "shifted windows", swin, 32, {}),
    "ViT (torchvision)": ("torchvision", "class token, torch's MultiheadAttention",
                          partial(of_torchvision, "VisionTransformer", **VIT_OF_TORCHVISION), 16, {}),
    "ResNet-18 (timm), BatchNorm kept": ("timm", "BatchNorm in train mode",
                                  partial(of_timm, "resnet18"), 64, {}),
}  # fmt: skip


# Part of a name: words of its refusal.
REFUSED = {"kept": "GroupNorm"}


def pixel_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross entropy of a model that takes pixels and returns logits."""
    return F.cross_entropy(model(batch["pixel_values"]), batch["target"], reduction="none")


# Larger ones of those whose small ones are too small to be timed: what builds them.
WIDE_VIT = VIT_OF_TIMM | {"img_size": 32, "embed_dim": 96, "num_heads": 4}
WIDE_MLP = {"img_size": 64, "embed_dim": 96}
WIDE_SWIN = SWIN_OF_TIMM | {"img_size": 64, "embed_dim": 48}
WIDE: dict[str, Callable[[], nn.Module]] = {
    "ViT (timm)": partial(of_timm, "vit_tiny_patch16_224", **WIDE_VIT),
    "EVA-02 (timm)": partial(of_timm, "eva02_tiny_patch14_224", **WIDE_VIT),
    "CaiT (timm)": partial(of_timm, "cait_xxs24_224", **WIDE_VIT),
    "DeiT III (timm)": partial(of_timm, "deit3_small_patch16_224", **WIDE_VIT),
    "XCiT (timm)": partial(of_timm, "xcit_nano_12_p8_224", **WIDE_VIT | {"patch_size": 8, "img_size": 64}),
    "Swin (timm)": partial(of_timm, "swin_tiny_patch4_window7_224", **WIDE_SWIN),
    "ConvNeXt (timm)": partial(of_timm, "convnext_atto", depths=(1, 1, 1, 1), dims=(32, 64, 96, 128)),
    "MLP-Mixer (timm)": partial(mixer, **WIDE_MLP),
    "ResMLP (timm)": partial(mixer, **WIDE_MLP, **RES_MLP),
    "gMLP (timm)": partial(mixer, **WIDE_MLP, **GATED_MLP),
    "VGG (timm)": partial(vgg, 32),
    "ConvNeXt (torchvision)": partial(convnext, 48),
    "Swin (torchvision)": partial(swin, 48),
    "ViT (torchvision)": partial(of_torchvision, "VisionTransformer", **VIT_OF_TORCHVISION | {
        "image_size": 32, "hidden_dim": 96, "mlp_dim": 192}),
}  # fmt: skip


def _subjects() -> Iterator[Subject]:
    for name, (about, model, config, options, side, wrap) in TRANSFORMERS.items():
        wide = grown(options)
        if "window_size" in options:
            wide |= {"patch_size": 4, "window_size": 8}
        wide_side = wide["image_size"] if isinstance(wide.get("image_size"), int) else side
        if isinstance(wide.get("image_size"), list):
            wide_side = wide["image_size"][0]
        timed = Timed(from_config(model, config, **wide), partial(images, side=max(wide_side, side)))
        build = from_config(model, config, **options)
        yield Subject(
            name, "transformers", about, build, partial(images, side=side), class_losses, wrap, kind="vision",
            timed=timed,
        )  # fmt: skip
    for name, (library, about, build, side, wrap) in PIXELS.items():
        refused = next((words for part, words in REFUSED.items() if part in name), "")
        batch = films if name.startswith("R3D") else images
        large = 64 if name in WIDE and side == 32 else 32 if name in WIDE else side
        yield Subject(
            name, library, about, build, partial(batch, side=side), pixel_losses, wrap, "kept" in name, refused,
            kind="vision", timed=Timed(WIDE.get(name, build), partial(batch, side=large)),
        )  # fmt: skip


SUBJECTS = tuple(_subjects())
