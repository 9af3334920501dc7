"""Cost of a prediction in multiply-adds (MACs); the paper calls this count "practical FLOPs".

Counting rule: a convolution counts its multiply-adds without the bias, a linear layer its multiply-adds plus the bias,
an activation one per element, average and max-pooling the kernel's area per output element, adaptive pooling its input
elements, a recurrent layer its weights once per step, and a normalization nothing, as it folds into a convolution.
"""

import copy
import inspect
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.flop_counter import FlopCounterMode

from exitwise.core.errors import InputError, net_input_errors
from exitwise.core.nested import describe, map_tensors
from exitwise.models.net import MultiExitNet


def macs(
    net: MultiExitNet, input_shape: tuple[int, ...] | None = None, *, example_inputs: Any | None = None
) -> list[int]:
    """Count the MACs of one sample up to each exit, earlier heads included.

    A copy of the net runs once on PyTorch's meta device: nothing is computed, and the net is not changed. Only modules
    are counted; an operation in a module's forward, such as an addition or `F.relu`, counts nothing. A user-defined
    module may have a method `macs(inputs, output)` that returns its cost, submodules included.

    Args:
        net: The net to count.
        input_shape: Shape of one input without the batch dimension, such as (3, 32, 32).
        example_inputs: A batch of one sample instead: a tensor, or a nested list, tuple or dict of tensors.

    Returns:
        K whole numbers, cumulative over the exits.

    Raises:
        InputError: Not exactly one of `input_shape` and `example_inputs` is given, the net cannot take such inputs,
            or there is no counting rule for one of its modules.

    Example:
        >>> import exitwise as ew
        >>> ew.macs(ew.models.msdnet("tiny-8"), (1, 8, 8))
        [84490, 196116, 304158]
    """
    if (input_shape is None) == (example_inputs is None):
        raise InputError("`macs` needs either `input_shape` or `example_inputs`, not both or neither")
    description = describe(example_inputs) if input_shape is None else f"shape {input_shape}"
    net_copy = copy.deepcopy(net).to("meta").eval()
    counts: list[int] = []

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)  # in the order of forward's parameters
        counts.append(_count_module(module, (*bound.args, *bound.kwargs.values()), output))

    for module in _iter_counted_modules(net_copy):
        module.register_forward_hook(count, with_kwargs=True)
    cumulative = []
    with net_input_errors(description), torch.no_grad():
        inputs = example_inputs if input_shape is None else torch.empty(1, *input_shape)
        for head, state in net_copy.states(map_tensors(lambda tensor: tensor.to("meta"), inputs)):
            head(state)
            cumulative.append(sum(counts))
    return cumulative


def cumulative_parameters(net: MultiExitNet) -> list[int]:
    """Count the parameters up to each exit, earlier heads included: K whole numbers."""
    totals, total = [], 0
    for stage, head in zip(net.stages, net.heads, strict=True):
        total += sum(p.numel() for module in (stage, head) for p in module.parameters())
        totals.append(total)
    return totals


def _iter_counted_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that have a counting rule or no submodules; a rule covers the submodules, too."""
    if not any(module.children()) or isinstance(module, nn.MultiheadAttention) or hasattr(module, "macs"):
        yield module
        return
    for part in module.children():
        yield from _iter_counted_modules(part)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    *(nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Softmax, nn.LogSoftmax),
)
_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_ADAPTIVE_POOLS = (
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
)
_FREE = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LocalResponseNorm),
    *(nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    *(nn.Embedding, nn.PixelShuffle, nn.ChannelShuffle, nn.ZeroPad1d, nn.ZeroPad2d, nn.ReflectionPad2d),
    nn.Sequential,  # an empty one: of others, the submodules are counted
)


def _count_module(module: nn.Module, args: tuple[Any, ...], output: Any) -> int:
    if callable(rule := getattr(module, "macs", None)):
        return int(rule(args, output))
    if isinstance(module, _FREE):
        return 0
    if isinstance(module, nn.MultiheadAttention):
        return _count_attention(module, *args[:2])
    if isinstance(module, fx.GraphModule):  # operations without modules
        return _count_operations(module, args)
    if isinstance(module, _CONVOLUTIONS):
        return int(output.numel() * module.weight[0].numel())
    if isinstance(module, _TRANSPOSED):
        return int(args[0].numel() * module.weight[0].numel())
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):  # every weight once per step
        steps = args[0].data if isinstance(args[0], PackedSequence) else args[0]
        return int(steps.numel() // module.input_size * sum(p.numel() for p in module.parameters()))
    if isinstance(module, nn.Linear):
        return int(output.numel() * (module.in_features + (module.bias is not None)))
    if isinstance(module, _ACTIVATIONS):
        return int(output.numel())
    if isinstance(module, _POOLS):
        dims = output.dim() - 2
        kernel = module.kernel_size
        return int(output.numel() * (prod(kernel) if isinstance(kernel, tuple) else kernel**dims))
    if isinstance(module, _ADAPTIVE_POOLS):
        return int(args[0].numel())
    raise InputError(f"cannot count the MACs of a {type(module).__name__}: no counting rule for it")


def _count_attention(module: nn.MultiheadAttention, query: Tensor, key: Tensor) -> int:
    """Count the projections with their biases, the attention weights of all pairs of tokens, and the weighted sums."""
    d, queries = module.embed_dim, (query.shape[1] if module.batch_first else query.shape[0])
    keys = key.shape[1] if module.batch_first else key.shape[0]
    bias = int(module.in_proj_bias is not None)
    projections = queries * d * (d + bias) + keys * d * (module.kdim + module.vdim + 2 * bias)
    return int(projections + 2 * queries * keys * d + queries * d * (d + int(module.out_proj.bias is not None)))


def _count_operations(module: fx.GraphModule, args: tuple[Any, ...]) -> int:
    """Count the multiplications of a graph: half of the FLOPs that PyTorch counts."""
    with FlopCounterMode(display=False) as counter:
        module.forward(*args)  # not `module(*args)`, whose hook would count it again
    return int(counter.get_total_flops()) // 2
