"""Networks of timm, torchvision and transformers by name, with random weights, and inputs for them.

A name is `timm:MODEL`, `torchvision:MODEL` or `hf:TYPE`, a type of transformers' configurations. Nothing is downloaded.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision_operators import define_operators

CLASSES = 10

# One model of each of torchvision's families of classifiers, the smallest.
TORCHVISION = (
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet", "inception_v3"),
    *("maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18"),
    *("resnext50_32x4d", "shufflenet_v2_x0_5", "squeezenet1_1", "swin_t", "swin_v2_t", "vgg11_bn", "vit_b_32"),
    "wide_resnet50_2",
)
HF_IMAGES = (
    *("beit", "bit", "clip", "convnext", "convnextv2", "cvt", "data2vec-vision", "deit", "dinov2"),
    *("dinov2_with_registers", "donut-swin", "efficientnet", "focalnet", "hgnet_v2", "hiera", "ijepa", "imagegpt"),
    *("levit", "metaclip_2", "mobilenet_v1", "mobilenet_v2", "mobilevit", "mobilevitv2", "poolformer", "pp_lcnet"),
    *("pvt", "pvt_v2", "regnet", "resnet", "segformer", "siglip", "swiftformer", "swin", "swinv2", "textnet"),
    *("vit", "vit_msn"),
)
HF_TEXTS = (
    *("albert", "bert", "big_bird", "bloom", "camembert", "canine", "convbert", "deberta", "deberta-v2"),
    *("distilbert", "electra", "ernie", "esm", "fnet", "funnel", "gpt2", "gpt_neox", "ibert", "layoutlm", "llama"),
    *("megatron-bert", "mistral", "mobilebert", "modernbert", "mpnet", "nystromformer", "opt", "qwen2", "rembert"),
    *("roberta", "roberta-prelayernorm", "roformer", "squeezebert", "xlm-roberta", "xlnet"),
)
# Sizes of small networks of transformers, for the attributes that a configuration has.
_SMALL: Mapping[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "d_model": 32,
    "dim": 32,
    "n_embd": 32,
    "embedding_size": 32,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_head": 2,
    "n_heads": 2,
    "intermediate_size": 64,
    "hidden_dim": 64,
    "d_inner": 64,
    "ffn_dim": 64,
    "head_dim": 16,
    "d_head": 16,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 64,
    "num_labels": CLASSES,
    "pad_token_id": 0,
}
_HF_SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "albert": {"embedding_size": 16},
    "canine": {"num_hidden_layers": 3},
    "funnel": {"block_sizes": [2, 2, 2], "num_hidden_layers": None},
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "esm": {"emb_layer_norm_before": True, "mask_token_id": 4, "position_embedding_type": "rotary"},
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 16},
    "xlnet": {"max_position_embeddings": None},
    "imagegpt": {"num_labels": CLASSES, "n_positions": 64, "vocab_size": 50},
    "nystromformer": {"num_landmarks": 32, "segment_means_seq_len": 32},
    "big_bird": {"attention_type": "original_full"},
    "efficientnet": {"image_size": 64, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280},
}
_KEEP_SIZES = {
    *("bit", "convnext", "convnextv2", "cvt", "donut-swin", "efficientnet", "focalnet", "hgnet_v2", "hiera", "levit"),
    *("mobilenet_v1", "mobilenet_v2", "mobilevit", "mobilevitv2", "poolformer", "pp_lcnet", "pvt", "pvt_v2", "regnet"),
    *("resnet", "segformer", "swiftformer", "swin", "swinv2", "textnet", "efficientnet"),
}


def build(name: str, num_classes: int = CLASSES) -> tuple[nn.Module, Any, list[int]]:
    """Build a network with random weights, in evaluation mode.

    Returns the module, inputs of one sample, and the shape of one input.
    """
    library, _, model = name.partition(":")
    torch.manual_seed(0)
    define_operators()
    if library == "timm":
        return _build_timm(model, num_classes)
    if library == "torchvision":
        return _build_torchvision(model, num_classes)
    return _build_transformers(model, num_classes)


def _build_timm(model: str, num_classes: int) -> tuple[nn.Module, Any, list[int]]:
    import timm

    module = timm.create_model(model, num_classes=num_classes).eval()
    shape = list(module.pretrained_cfg["input_size"])
    return module, torch.zeros(1, *shape), shape


def _build_torchvision(model: str, num_classes: int) -> tuple[nn.Module, Any, list[int]]:
    import torchvision

    options: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    if model in ("googlenet", "inception_v3"):
        options["init_weights"] = True
    shape = [3, 299, 299] if model == "inception_v3" else [3, 224, 224]
    return torchvision.models.get_model(model, **options).eval(), torch.zeros(1, *shape), shape


def _build_transformers(kind: str, num_classes: int) -> tuple[nn.Module, Any, list[int]]:
    import transformers

    default = transformers.AutoConfig.for_model(kind)
    sizes: dict[str, Any] = {"num_labels": num_classes, "pad_token_id": 0}
    vision = getattr(default, "vision_config", None)
    if kind not in _KEEP_SIZES:
        sizes = {key: value for key, value in _SMALL.items() if hasattr(default, key)} | sizes
        if hasattr(default, "image_size") or vision is not None:
            sizes |= {"image_size": 32, "patch_size": 8}
    sizes |= _HF_SPECIAL.get(kind, {})
    sizes = {key: value for key, value in sizes.items() if value is not None}
    if vision is not None:
        small = {key: value for key, value in _SMALL.items() if hasattr(vision, key)}
        sizes = {"num_labels": num_classes, "vision_config": {**small, "image_size": 32, "patch_size": 8}}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    if kind in HF_IMAGES:
        module = _classifier_class(kind)(config).eval()
        if kind == "imagegpt":
            return module, {"input_ids": torch.randint(50, (1, 64))}, [64]
        size = 32 if kind not in _KEEP_SIZES else getattr(config, "image_size", None) or 224
        size = size if isinstance(size, int) else size[0]
        channels = getattr(config, "num_channels", 3)
        return module, {"pixel_values": torch.zeros(1, channels, size, size)}, [channels, size, size]
    module = _classifier_class(kind)(config).eval()
    ids = torch.randint(5, config.vocab_size if hasattr(config, "vocab_size") else 100, (1, 32))
    return module, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, [32]


def _classifier_class(kind: str) -> Any:
    """Return transformers' class for classification, without a teacher where there are two."""
    import transformers
    from transformers.models.auto import modeling_auto as names

    mapping = (
        names.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
        if kind in HF_IMAGES
        else names.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    )
    name = mapping[kind]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def draw_inputs(example: Any, samples: int) -> Any:
    """Draw inputs like an example: images of different colors and contrasts, texts of different lengths."""
    rng = torch.Generator().manual_seed(1)
    if isinstance(example, dict) and "attention_mask" in example:
        length = example["input_ids"].shape[1]
        lengths = torch.randint(length // 2, length + 1, (samples, 1), generator=rng)
        mask = (torch.arange(length)[None] < lengths).long()
        return {"input_ids": torch.randint(5, 100, (samples, length), generator=rng) * mask, "attention_mask": mask}
    if isinstance(example, dict):
        return {key: _draw(value, samples, rng) for key, value in example.items()}
    return _draw(example, samples, rng)


def _draw(example: Tensor, samples: int, rng: torch.Generator) -> Tensor:
    if not example.is_floating_point():
        return torch.randint(int(example.max()), (samples, *example.shape[1:]), generator=rng)
    channels, *size = example.shape[1:]
    coarse = torch.randn(samples, channels, *(4 for _ in size), generator=rng)
    smooth = nn.functional.interpolate(coarse, size=size, mode="bilinear")
    return smooth + 0.3 * torch.randn(samples, channels, *size, generator=rng)


def set_statistics(module: nn.Module, inputs: Any) -> None:
    """Make a random network answer like a trained one: other inputs, other logits.

    The statistics of all BatchNorms become those of some inputs, because activations grow or vanish with random ones,
    and scales and weights that begin at nearly zero become larger. A BatchNorm whose inputs vary less than its epsilon
    gets a smaller one.
    """
    with torch.no_grad():
        for parameter in module.parameters():
            if 0 < float(parameter.abs().max()) < 2e-3 and parameter.numel() > 1:
                is_scale = parameter.numel() == max(parameter.shape)
                parameter.fill_(0.3) if is_scale else parameter.normal_(std=0.02)
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.running_mean is not None]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.train()
        norm.momentum = None
    hooks = [norm.register_forward_pre_hook(_keep_variance) for norm in norms]
    if norms:
        with torch.no_grad():
            module(**inputs) if isinstance(inputs, dict) else module(inputs)
    for hook in hooks:
        hook.remove()
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum


def _keep_variance(norm: _BatchNorm, args: tuple[Tensor, ...]) -> None:
    variance = float(args[0].var())
    if 0 < variance < 10 * norm.eps:
        norm.eps = max(1e-3 * variance, torch.finfo(torch.float32).tiny)
