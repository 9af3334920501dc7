"""Attach exits to a module: its layers become stages, each cut gets a small head, its classifier is the last exit."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from exitwise.core import nested
from exitwise.core.checks import is_integer
from exitwise.core.errors import InputError, first_line, shorten
from exitwise.models.attach.choose import cut_at_equal_cost, trace_layers
from exitwise.models.attach.conv_head import make_convolutions
from exitwise.models.attach.cut import HeadInput, cut_module
from exitwise.models.attach.graph import (
    PROBE_BATCH_SIZES,
    ModuleInputs,
    bitwise_equal,
    call_with_inputs,
    disable_attention_fast_path,
    is_close,
    iter_tensors,
)
from exitwise.models.attach.last_layer import LastLayer, find_last_layer
from exitwise.models.attach.stages import run_full_batch, run_shrinking_batch
from exitwise.models.attach.tracing import trace_module
from exitwise.models.named.build import PRETRAINED, build_named
from exitwise.models.named.module import NamedModule
from exitwise.models.named.timm_models import stage_ends
from exitwise.models.named.weight_hash import hash_weights
from exitwise.models.net import Head, MultiExitNet

MakeHead = Callable[[Tensor, int], Head]  # features of two samples, number of classes
BUILT_IN_HEADS = ("mlp", "grid", "linear", "conv")
MIN_HIDDEN_WIDTH = 128  # smallest hidden layer of a head "mlp", and its features if the map is large enough
MIN_GRID_WIDTH = 512  # features of a head "grid", if the map is large enough
POOL_SIZES = (1, 2, 3, 4)  # possible sizes of a pooled map along each dimension
REMAINING_SAMPLES = 3  # samples in the last stage of the self-check, which drops one before each stage


def attach(
    module: nn.Module | NamedModule | str,
    at: Sequence[str] | str = "auto",
    num_classes: int | None = None,
    head: str | MakeHead | Sequence[Head] = "mlp",
    *,
    example_inputs: Any = None,
    exits: int | None = None,
    weights: str | Path | None = PRETRAINED,
) -> MultiExitNet:
    """Build a multi-exit net from a trained module: cut it after the submodules `at`, with a new head at each cut.

    The stages share the module's layers, and the last exit returns the module's output, bit for bit. Live values at a
    cut (residuals, tokens, masks) are part of the stage state and can be compacted. The new heads are untrained: see
    `train_heads`. A forward that only torch.export can trace is fixed to evaluation mode and to the shapes of
    `example_inputs`, except for the batch size.

    Args:
        module: The original module in evaluation mode. It must end in the nn.Linear that gives its logits (n, c). Or
            the name of a classifier of another library: "timm:resnet50", "torchvision:resnet50" or
            "hf:microsoft/resnet-18"; or what `ew.models.build_named` made of one. The net then has its `preprocessing`.
        at: Names of submodules, or "auto" to choose cuts of about equal cost. For a name of timm also "stages", the
            ends of its stages.
        num_classes: Number of classes c, needed only if the module returns the outputs of several linear layers. For a
            name, another number than that of the pretrained weights makes a new last layer, which must be trained.
        head: "mlp" or "linear": a head that pools maps (n, c, h, w) and tokens (n, l, d) over their positions, with a
            hidden layer or without. "grid": as "mlp", but maps of fewer than 512 channels are pooled to finer grids, up
            to 4 x 4. "conv": as "mlp", but convolutions make maps of more than 4 x 4 small first. Or a function of the
            features (of two samples) and the number of classes that returns a head. Or a list of heads in the order of
            `at`; each reads the output of its submodule, samples first.
        example_inputs: Inputs of the module for at least one sample: a tensor, or a tuple or dict of tensors. It is
            guessed for modules that begin with a convolution, a linear layer or an embedding.
        exits: Number of exits for `at="auto"` and `at="stages"`.
        weights: For a name: the weights that its library loads, from its cache or the internet; a file with the
            library's keys; or None for random ones.

    Returns:
        A net with one exit per cut and the module's classifier as the last exit, in evaluation mode.

    Raises:
        InputError: The module cannot be traced or cut there, mixes the samples of a batch, or an argument is invalid.

    Example:
        >>> import exitwise as ew
        >>> module = ew.models.resnet("cifar100-resnet8").eval()
        >>> net = ew.attach(module, ["stages.0.layer1", "stages.0.layer2"])
        >>> len(net.exits), net.num_classes
        (3, 100)
        >>> len(ew.attach(module, "auto", exits=2, head="linear").exits)
        2
    """
    if isinstance(module, str):
        if example_inputs is not None:
            raise InputError(f"`example_inputs` is for modules: {shorten(module)} states its own inputs")
        return attach_named(build_named(module, num_classes, weights), at, head, exits=exits)
    if isinstance(module, NamedModule):
        if num_classes is not None or weights != PRETRAINED or example_inputs is not None:
            raise InputError("`num_classes`, `weights` and `example_inputs` of a NamedModule are set by build_named")
        return attach_named(module, at, head, exits=exits)
    if not isinstance(module, nn.Module):
        raise InputError(f"`module` must be an nn.Module, or the name of one, but got {type(module).__name__}")
    if weights != PRETRAINED:
        raise InputError("`weights` is for a network by its name: load them into the module before")
    if any(part.training for part in module.modules()):
        raise InputError("`module` is in training mode: call module.eval() first, or dropout and statistics would vary")
    names = _check_at(at, exits)
    with torch.inference_mode(False), torch.no_grad():
        inputs = ModuleInputs.of(_guess_input(module) if example_inputs is None else example_inputs)
        _check_inputs(inputs)
        if names is None:
            traced = trace_layers(module, inputs)
            last = find_last_layer(module, traced, inputs, num_classes)
            names, cut = cut_at_equal_cost(module, traced, inputs, last, exits or 0)
        else:
            traced = trace_module(module, inputs, names)
            last = find_last_layer(module, traced, inputs, num_classes)
            cut = cut_module(module, traced, names, inputs, last)
        heads = [*_make_heads(head, names, cut.head_inputs, last.layer.out_features), Head(nn.Identity(), last.layer)]
        net = MultiExitNet(cut.stages, heads, _make_spec(module, names, head, inputs)).eval()
        net.cuts = tuple(head_input.name for head_input in cut.head_inputs)
        _check_stages(net, module, inputs, last, traced.exported)
    return net


def attach_named(
    named: NamedModule,
    at: Sequence[str] | str = "auto",
    head: str | MakeHead | Sequence[Head] = "mlp",
    *,
    exits: int | None = None,
) -> MultiExitNet:
    """Attach exits to a network of another library, as `attach` does; the net has its preprocessing.

    Args:
        named: The network, from `build_named`.
        at: Names of submodules, "auto" to choose cuts of about equal cost, or "stages" for the ends of timm's stages.
        head: As in `attach`.
        exits: Number of exits for `at="auto"` and `at="stages"`.
    """
    if at == "stages":
        at, exits = stage_ends(named.name, named.module, exits), None
    net = attach(named.module, at, None, head, example_inputs=named.example, exits=exits)
    if isinstance(head, str):
        net.spec = {**named.spec, "attach": {"at": list(net.cuts), "head": head}}
    net.preprocessing, net.input_shape, net.revision = named.preprocessing, named.input_shape, named.revision
    if named.sha256 is not None and named.sha256 == hash_weights(named.module):  # not trained since
        net.base_sha256 = hash_weights(net.stages)
    return net


def split_classifier(module: nn.Module, example_inputs: Any) -> tuple[nn.Module, nn.Linear]:
    """Split a classifier into a stage that computes its features (n, p), and its last linear layer.

    Both share the module's layers, and together they reproduce its output, bit for bit.

    Args:
        module: The module in evaluation mode.
        example_inputs: Inputs of the module for at least one sample.

    Raises:
        InputError: The module cannot be traced, does not end in a linear layer, or mixes the samples of a batch.
    """
    with torch.inference_mode(False), torch.no_grad():
        inputs = ModuleInputs.of(example_inputs)
        _check_inputs(inputs)
        traced = trace_module(module, inputs, ())
        last = find_last_layer(module, traced, inputs, None)
        cut = cut_module(module, traced, (), inputs, last)
        net = MultiExitNet(cut.stages, [Head(nn.Identity(), last.layer)])
        _check_stages(net, module, inputs, last, traced.exported)
    return cut.stages[0], last.layer


def _make_spec(module: nn.Module, at: Sequence[str], head: Any, inputs: ModuleInputs) -> dict[str, Any] | None:
    """Return the spec that rebuilds the net, or None unless the module is a preset and its heads are built in."""
    spec = module.spec if isinstance(module, MultiExitNet) else None
    if spec is None or not isinstance(head, str) or "attach" in spec:
        return None
    # The size of the images decides how many convolutions a head has, and how its features are pooled.
    shape = tuple(inputs.tensors[0].shape[1:])
    given = {"input_shape": list(shape)} if head == "conv" or shape != module.input_shape else {}
    return {**spec, "attach": {"at": list(at), "head": head, **given}}


class TokenMean(nn.Module):
    """Mean over all positions of features (n, ..., d)."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.flatten(1, -2).mean(dim=1)

    def macs(self, inputs: tuple[Tensor, ...], output: Tensor) -> int:
        return inputs[0].numel()


def _check_at(at: Any, exits: int | None) -> list[str] | None:
    """Return the names of the submodules to cut after, or None for "auto"."""
    if at == "auto":
        if exits is None or not is_integer(exits) or exits < 2:
            raise InputError(f'`at="auto"` needs `exits`, a whole number of at least 2, but got {exits!r}')
        return None
    if isinstance(at, str) or not isinstance(at, Sequence) or not at or not all(isinstance(name, str) for name in at):
        raise InputError(f'`at` must be a list of submodules\' names, or "auto", but got {at!r}')
    if exits is not None and exits != len(at) + 1:
        raise InputError(f'`exits` is for `at="auto"`: {len(at)} cuts make {len(at) + 1} exits, not {exits}')
    if len(set(at)) < len(at):
        raise InputError(f"`at` must name each submodule once, but got {list(at)}")
    return list(at)


def _check_inputs(inputs: ModuleInputs) -> None:
    values = [*inputs.args, *inputs.kwargs.values()]
    tensors = inputs.tensors
    constants = [value for value in values if not isinstance(value, Tensor)]
    if not tensors or any(not isinstance(value, bool | int | float | str | None) for value in constants):
        kinds = ", ".join(type(value).__name__ for value in values) or "nothing"
        raise InputError(f"`example_inputs` must be a tensor, a tuple or a dict of tensors, but holds {kinds}")
    if any(not tensor.dim() or not len(tensor) for tensor in tensors) or len({len(tensor) for tensor in tensors}) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise InputError(
            f"`example_inputs` must have the same number of samples first, at least one, but have {shapes}"
        )


def _guess_input(module: nn.Module) -> Tensor:
    """Return an input of one sample that the module takes, guessed from its first layer."""
    for candidate in candidate_inputs(module):
        try:
            call_with_inputs(module, ModuleInputs.of(candidate))
        except InputError:
            continue
        return candidate
    raise InputError("the module's inputs could not be guessed: pass `example_inputs`")


def candidate_inputs(module: nn.Module) -> list[Tensor]:
    """Return inputs of one sample that fit the first layer of a module; the module may refuse some or all of them."""
    first = next(
        (part for part in module.modules() if isinstance(part, nn.Conv2d | nn.Conv1d | nn.Linear | nn.Embedding)), None
    )
    if first is None:
        return []
    device, dtype = first.weight.device, first.weight.dtype
    if isinstance(first, nn.Embedding):
        return [torch.randint(first.num_embeddings, (1, length), device=device) for length in (16, 8)]
    if isinstance(first, nn.Linear):
        shapes: list[tuple[int, ...]] = [(first.in_features,), (16, first.in_features)]
    elif isinstance(module, MultiExitNet) and module.input_shape is not None:
        shapes = [module.input_shape]
    else:
        sizes = [(side, side) for side in (224, 64, 32, 28, 8)] if isinstance(first, nn.Conv2d) else [(256,), (64,)]
        shapes = [(first.in_channels, *size) for size in sizes]
    return [torch.rand(1, *shape, device=device, dtype=dtype) for shape in shapes]


def _make_heads(head: Any, at: Sequence[str], head_inputs: Sequence[HeadInput], classes: int) -> list[Head]:
    """Return a checked head for each cut; a list of heads is in the order of `at`."""
    if isinstance(head, Sequence) and not isinstance(head, str):
        if len(head) != len(head_inputs):
            raise InputError(f"`head` must have one head for each of {len(head_inputs)} cuts, but has {len(head)}")
        by_name = dict(zip(at, head, strict=True))
        heads = [by_name[head_input.name] for head_input in head_inputs]
    elif callable(head):
        heads = [head(head_input.features, classes) for head_input in head_inputs]
    elif head in BUILT_IN_HEADS:
        heads = [_build_head(head_input, classes, head) for head_input in head_inputs]
    else:
        raise InputError(
            f'`head` must be "mlp", "grid", "linear", "conv", a function or a list of heads, but got {head!r}'
        )
    for made_head, head_input in zip(heads, head_inputs, strict=True):
        if not isinstance(made_head, Head):
            raise InputError(f"`head` must give an exitwise Head, but gave a {type(made_head).__name__}")
        if made_head.last.out_features != classes:
            raise InputError(f"`head` must have the module's {classes} classes, but has {made_head.last.out_features}")
        _check_head(made_head.eval(), head_input)
    if len(set(heads)) < len(heads):
        raise InputError("`head` must give a different head for each cut, but gave the same head twice")
    selects = [head_input.select for head_input in head_inputs]
    return [
        made_head if select is None else Head(nn.Sequential(select, made_head.neck), made_head.last)
        for made_head, select in zip(heads, selects, strict=True)
    ]


def _check_head(head: Head, head_input: HeadInput) -> None:
    """Raise `InputError` unless the head gives one row of features per sample for its input."""
    try:
        features = head.features(head_input.features)
        logits = head.last(features)
    except Exception as error:  # a user's head may raise anything
        reason = first_line(error)
    else:
        if features.dim() == 2 and len(logits) == len(head_input.features):
            return
        reason = f"its features {tuple(features.shape)} are not one row per sample"
    raise InputError(
        f"`head` cannot read the output of {head_input.name!r}, {nested.describe(head_input.features)} "
        f"for {PROBE_BATCH_SIZES[0]} samples: {reason}"
    )


def _build_head(head_input: HeadInput, classes: int, kind: str) -> Head:
    """Build a head of a kind in `BUILT_IN_HEADS` for its input."""
    features = head_input.features
    if not features.is_floating_point() or not 2 <= features.dim() <= 5:
        raise InputError(
            f"no built-in head can read the output of {head_input.name!r}, {nested.describe(features)} "
            f"for {PROBE_BATCH_SIZES[0]} samples: pass your own as `head`"
        )
    pools = {3: nn.AdaptiveAvgPool1d, 4: nn.AdaptiveAvgPool2d, 5: nn.AdaptiveAvgPool3d}
    layers: list[nn.Module] = []
    width = features.shape[head_input.channels]
    options: dict[str, Any] = {"device": features.device, "dtype": features.dtype}
    if features.dim() > 2 and head_input.channels == -1:
        layers = [TokenMean()]
    elif features.dim() > 2:
        map_shape = tuple(features.shape[2:])
        if kind == "conv":
            layers, width, map_shape = make_convolutions(width, map_shape, features.device, features.dtype)
        size = _choose_pool_size(width, map_shape, MIN_GRID_WIDTH if kind == "grid" else MIN_HIDDEN_WIDTH)
        layers += [pools[features.dim()](size), nn.Flatten()]
        width *= size ** (features.dim() - 2)
    if kind != "linear":
        hidden = max(width, MIN_HIDDEN_WIDTH)
        layers += [nn.Linear(width, hidden, **options), nn.ReLU()]
        width = hidden
    return Head(nn.Sequential(*layers), nn.Linear(width, classes, **options))


def _choose_pool_size(channels: int, map_shape: Sequence[int], min_features: int) -> int:
    """Return the size of the pooled map along each dimension: the smallest that gives enough features, at most 4."""
    sizes = [size for size in POOL_SIZES if all(length % size == 0 for length in map_shape)]
    return next((size for size in sizes if channels * size ** len(map_shape) >= min_features), sizes[-1])


# -- checks of the stages


def _check_stages(net: MultiExitNet, module: nn.Module, inputs: ModuleInputs, last: LastLayer, exported: bool) -> None:
    """Raise `InputError` unless the last exit reproduces the module's output, also after some samples exited."""
    many = inputs.with_batch_size(len(net.stages) + REMAINING_SAMPLES)
    if any(tensor.is_meta for tensor in many.tensors):
        return
    features = run_full_batch(net.stages, many)
    if not _reproduces_module(net.exits[-1], features, module, many, last, exported):
        raise InputError(
            "the stages do not reproduce the module's output: its forward does something that tracing cannot record, "
            "such as drawing random numbers"
        )
    remaining_features, remaining = run_shrinking_batch(net.stages, many)
    if not is_close(remaining_features, features[remaining]):
        raise InputError(
            "the module mixes the samples of a batch, or changes in place a value that crosses a cut: "
            "its output for a sample depends on the other samples"
        )


def _reproduces_module(
    head: Head, features: Tensor, module: nn.Module, inputs: ModuleInputs, last: LastLayer, exported: bool
) -> bool:
    """Return whether `features` and their logits are those of the module, up to rounding if its layers are folded.

    PyTorch's attention has a fast path that differs in the last bits. An exported graph does not have it.
    """
    if last.folded:
        return any(is_close(head(features), output) for output in iter_tensors(call_with_inputs(module, inputs)))
    module_features: list[Tensor] = []
    hook = head.last.register_forward_pre_hook(
        lambda _, *arguments: module_features.extend(iter_tensors(arguments)), with_kwargs=True
    )
    try:
        outputs = list(iter_tensors(call_with_inputs(module, inputs)))
        if exported and any(is_close(x, features) for x in module_features if x.shape == features.shape):
            with disable_attention_fast_path():
                outputs += iter_tensors(call_with_inputs(module, inputs))
    finally:
        hook.remove()
    logits = head(features)
    return any(bitwise_equal(output, logits) for output in outputs) and (
        not module_features or any(bitwise_equal(x, features) for x in module_features)
    )
