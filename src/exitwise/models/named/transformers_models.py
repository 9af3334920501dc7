"""Classifiers of Hugging Face Transformers by repository or folder, such as "hf:microsoft/resnet-18".

Only configurations and tensors are read: code of a repository is never run, and pickled weights are refused.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from exitwise.core.checks import check_integer
from exitwise.core.errors import InputError
from exitwise.core.preprocessing import Preprocessing
from exitwise.models.named.hub_access import offline_without_network
from exitwise.models.named.image_processor import preprocessing_of
from exitwise.models.named.module import (
    NamedModule,
    build_errors,
    check_num_classes,
    example_images,
    require,
    shorten_reason,
    weight_errors,
)

PREFIX = "hf"
_TOKENS = 16  # length of the example for a network on text
# Entries of a configuration that would name code or kernels to load.
_NOT_DATA = ("auto_map", "attn_implementation", "experts_implementation", "quantization_config", "custom_pipelines")
# Types whose configuration can make timm open any file or address.
_TIMM_TYPES = ("timm_wrapper", "timm_backbone")


def build(name: str, num_classes: int | None, image_size: int | None, pretrained: bool) -> NamedModule:
    """Build a classifier of Transformers, with its pretrained weights or random ones.

    Args:
        name: A repository of the Hub, perhaps with @REVISION at its end, or a folder that `save_pretrained` wrote.
        num_classes: Number of classes; another one than that of the weights makes a new last layer.
        image_size: Height and width of its images, if they differ from its configuration.
        pretrained: Whether to load its weights from the folder, the cache or the internet.
    """
    with build_errors(f"{PREFIX}:{name}"):  # configurations can hold anything
        return _build(name, num_classes, image_size, pretrained)


def _build(name: str, num_classes: int | None, image_size: int | None, pretrained: bool) -> NamedModule:
    transformers, full_name = require("transformers", f"{PREFIX}:", PREFIX), f"{PREFIX}:{name}"
    repository, _, revision = (name, "", "") if Path(name).is_dir() else name.partition("@")
    options: dict[str, Any] = {"trust_remote_code": False, "revision": revision or None}
    with offline_without_network():
        try:
            config = transformers.AutoConfig.from_pretrained(repository, **options)
        except Exception as error:  # errors of the network, of the cache and of files
            raise InputError(
                f"the configuration of {full_name} could not be loaded ({shorten_reason(error)}): name a folder, or a "
                f"repository of the Hub, which needs the internet or its cache"
            ) from None
        kind = _kind(full_name, config)
        auto = getattr(transformers, kind)
        is_classifier = any("Classification" in name for name in config.architectures or ())
        classes = check_num_classes(full_name, num_classes, config.num_labels if is_classifier else 0)
        own_classes = is_classifier and classes == config.num_labels
        if not own_classes:
            config.num_labels = classes
        preprocessing = None
        if kind == "AutoModelForImageClassification":
            preprocessing = _image_preprocessing(transformers, full_name, repository, options, image_size)
        if pretrained:
            with weight_errors(full_name), _quiet(transformers):
                module, info = auto.from_pretrained(
                    repository,
                    output_loading_info=True,
                    config=config,
                    use_safetensors=True,
                    ignore_mismatched_sizes=not own_classes,
                    attn_implementation="sdpa" if _supports_sdpa(transformers, config, kind) else "eager",
                    dtype=torch.float32,
                    **options,
                )
            _check_complete(full_name, info["missing_keys"], None if own_classes else module.base_model_prefix)
            _check_shapes(full_name, info["mismatched_keys"], module.base_model_prefix, classes)
        else:
            module = _from_config(transformers, full_name, config, kind)
    commit = getattr(config, "_commit_hash", None) or revision or None
    spec: dict[str, Any] = {"module": full_name, "revision": commit, "config": _data_of(config.to_dict())}
    if preprocessing is not None:
        spec["preprocessing"] = preprocessing.to_dict()
    example = example_images(preprocessing) if preprocessing is not None else _example_tokens(config)
    labels = [str(config.id2label.get(i)) for i in range(classes)] if own_classes else []
    named = tuple(labels) if labels and labels != [f"LABEL_{i}" for i in range(classes)] else None
    return NamedModule(full_name, module.eval(), classes, spec, preprocessing, example, named, commit)


def rebuild(spec: Mapping[str, Any]) -> NamedModule:
    """Build the untrained network of a spec that `build` made; its configuration is part of the spec."""
    name = str(spec["module"])
    transformers = require("transformers", f"{PREFIX}:", PREFIX)
    if not isinstance(spec.get("config"), Mapping):
        raise InputError(f"the spec of {name} must hold its `config`, but holds {spec.get('config')!r}")
    data = _data_of(spec["config"])
    if "num_labels" in data:
        check_integer("num_labels", data["num_labels"], 2, 10**6)
    given = spec.get("preprocessing")
    preprocessing = None if given is None else Preprocessing.from_dict(given)
    with build_errors(name):  # the configuration can hold anything
        config = transformers.AutoConfig.for_model(**data)
        module = _from_config(transformers, name, config, _kind(name, config))
        example = example_images(preprocessing) if preprocessing is not None else _example_tokens(config)
    revision = None if spec.get("revision") is None else str(spec["revision"])
    return NamedModule(name, module.eval(), config.num_labels, dict(spec), preprocessing, example, revision=revision)


def list_models(pattern: str) -> list[dict[str, Any]]:
    """Raise `InputError`: the Hub has millions of repositories."""
    raise InputError(
        f"the networks of `{PREFIX}:` are repositories of the Hugging Face Hub or folders, which exitwise does not list"
    )


def _kind(name: str, config: Any) -> str:
    """Return the Auto class of a classifier's configuration; raise `InputError` for any other network."""
    from transformers.models.auto import modeling_auto as auto

    if _uses_timm(config.to_dict()):
        raise InputError(f"{name} wraps a network of timm, which exitwise builds only by its own name: give timm:NAME")
    architecture = next(iter(config.architectures or ()), "")
    wrong = (auto.MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES, auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES)
    if any(architecture in names.values() for names in wrong):
        raise InputError(f"{name} is a {architecture}, which detects or segments, not a classifier of whole images")
    if config.problem_type in ("regression", "multi_label_classification"):
        raise InputError(f"{name} is made for {config.problem_type}, not for one class per sample")
    for kind, names in (
        ("AutoModelForImageClassification", auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES),
        ("AutoModelForSequenceClassification", auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES),
    ):
        if config.model_type in names:
            return kind
    raise InputError(f"{name} is of type {config.model_type!r}, which has no classifier of images or texts")


def _uses_timm(config: Any) -> bool:
    """Return whether a configuration, or one inside it, is of a network that timm builds."""
    if isinstance(config, Mapping):
        return config.get("model_type") in _TIMM_TYPES or any(map(_uses_timm, config.values()))
    return isinstance(config, list | tuple) and any(map(_uses_timm, config))


def _check_complete(name: str, missing: Iterable[str], prefix: str | None) -> None:
    """Raise `InputError` if weights are missing; with a `prefix`, only if they are of the base model of that name."""
    lacks = sorted(key for key in missing if prefix is None or key.startswith(f"{prefix}."))
    if lacks:
        raise InputError(f"the weights of {name} lack {lacks[0]!r}, which would be random")


def _check_shapes(name: str, mismatched: Iterable[tuple[str, Any, Any]], prefix: str, classes: int) -> None:
    """Raise `InputError` if weights other than those of the last layer were left out for their shape."""
    for key, given, expected in sorted(mismatched):
        if key.startswith(f"{prefix}.") or list(expected) != [classes, *given[1:]]:
            shapes = f"{tuple(given)} instead of {tuple(expected)}"
            raise InputError(f"the weights of {name} do not fit its configuration: {key!r} has shape {shapes}")


def _from_config(transformers: Any, name: str, config: Any, kind: str) -> Any:
    with build_errors(name):
        attention = "sdpa" if _supports_sdpa(transformers, config, kind) else "eager"
        return getattr(transformers, kind).from_config(config, attn_implementation=attention, dtype=torch.float32)


def _supports_sdpa(transformers: Any, config: Any, kind: str) -> bool:
    mapping = getattr(transformers, kind)._model_mapping
    model = mapping[type(config)]
    return bool(getattr(model[0] if isinstance(model, tuple) else model, "_supports_sdpa", False))


def _image_preprocessing(
    transformers: Any, name: str, repository: str, options: Mapping[str, Any], image_size: int | None
) -> Preprocessing:
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(repository, backend="pil", **options)
    except Exception as error:  # errors of the network, of the cache and of files
        raise InputError(f"the image processor of {name} could not be loaded ({shorten_reason(error)})") from None
    preprocessing = preprocessing_of(name, processor)
    return preprocessing if image_size is None else replace(preprocessing, size=image_size)


def _data_of(config: Any) -> Any:
    """Return a configuration without private entries and without those that could load code, at every depth."""
    if isinstance(config, Mapping):
        return {
            key: _data_of(value)
            for key, value in config.items()
            if not str(key).startswith("_") and key not in _NOT_DATA
        }
    return [_data_of(value) for value in config] if isinstance(config, list | tuple) else config


def _example_tokens(config: Any) -> dict[str, Tensor]:
    """Return token ids and a mask (2, 16); the second text is shorter."""
    rng = torch.Generator("cpu").manual_seed(0)
    low, high = min(3, config.vocab_size - 1), config.vocab_size
    tokens = torch.randint(low, high, (2, _TOKENS), generator=rng, device="cpu")
    mask = torch.ones(2, _TOKENS, dtype=torch.int64, device="cpu")
    mask[1, _TOKENS // 2 :] = 0
    return {"input_ids": tokens, "attention_mask": mask}


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Hide the progress bars and reports of Transformers in the block."""
    logging = transformers.utils.logging
    verbosity, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
