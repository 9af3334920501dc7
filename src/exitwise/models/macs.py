"""Cost of a prediction in multiply-adds (MACs); the paper calls this count "practical FLOPs".

Counting rule: a convolution counts its multiply-adds without the bias, a linear layer its multiply-adds plus the bias,
an activation one per element, average and max-pooling the kernel's area per output element, adaptive pooling its input
elements, a recurrent layer its weights once per step, and a normalization nothing, as it folds into a convolution. A
module without submodules that has no rule, such as a lambda or a custom layer, is counted by the operators it calls.
"""

import copy
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from exitwise.core.errors import InputError, net_input_errors
from exitwise.core.nested import describe, iter_tensors, map_tensors
from exitwise.models.net import MultiExitNet

_log = logging.getLogger(__name__)


def macs(
    net: MultiExitNet, input_shape: tuple[int, ...] | None = None, *, example_inputs: Any | None = None
) -> list[int]:
    """Count the MACs of one sample up to each exit, earlier heads included.

    A copy of the net runs once on PyTorch's meta device: nothing is computed, and the net is not changed. If it cannot
    run there, it runs on zeros. Only modules are counted; an operation in the forward of a module with submodules, such
    as an addition or `F.relu`, counts nothing. A module without submodules and without a counting rule is counted by
    the operators it calls, and one line of the log says so. A user-defined module may have a method
    `macs(inputs, output)` that returns its cost, submodules included.

    Args:
        net: The net to count.
        input_shape: Shape of one input without the batch dimension, such as (3, 32, 32).
        example_inputs: A batch of one sample instead: a tensor, or a nested list, tuple or dict of tensors.

    Returns:
        K whole numbers, cumulative over the exits.

    Raises:
        InputError: Not exactly one of `input_shape` and `example_inputs` is given, or the net cannot take such inputs.

    Example:
        >>> import exitwise as ew
        >>> ew.macs(ew.models.msdnet("tiny-8"), (1, 8, 8))
        [84490, 196116, 304158]
    """
    if (input_shape is None) == (example_inputs is None):
        raise InputError("`macs` needs either `input_shape` or `example_inputs`, not both or neither")
    description = describe(example_inputs) if input_shape is None else f"shape {input_shape}"
    with net_input_errors(description):
        inputs = torch.empty(1, *input_shape, device="meta") if input_shape is not None else example_inputs
    try:
        cumulative, traced = _count_exits(copy.deepcopy(net).to("meta").eval(), inputs, "meta")
    except InputError:
        raise
    except Exception:  # a forward may hold tensors of its own that stay on the CPU, or look at values
        with net_input_errors(description):
            if any(tensor.is_meta for tensor in (*net.parameters(), *net.buffers())):
                raise  # a net without values, as an optimized classifier keeps it
            net_copy = copy.deepcopy(net).cpu().eval()
            zeros = map_tensors(lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), inputs)
            cumulative, traced = _count_exits(net_copy, zeros, "cpu")
    if traced:
        _report_traced(tuple(dict.fromkeys(traced)))
    return cumulative


def _count_exits(net: MultiExitNet, inputs: Any, device: str) -> tuple[list[int], list[str]]:
    """Run a copy of the net on a device; return its cumulative MACs, and the types of modules that have no rule."""
    counts: list[int] = []
    traced: list[str] = []

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)  # in the order of forward's parameters
        counted = _count_module(module, (*bound.args, *bound.kwargs.values()), output)
        if counted is None:
            traced.append(type(module).__name__)
            counted = _count_operators(module, args, kwargs)
        counts.append(counted)

    for module in dict.fromkeys(_iter_counted_modules(net)):  # stages may share a module, which is counted per call
        module.register_forward_hook(count, with_kwargs=True)
    cumulative = []
    with torch.no_grad():
        for head, state in net.states(map_tensors(lambda tensor: tensor.to(device), inputs)):
            head(state)
            cumulative.append(sum(counts))
    return cumulative, traced


@cache
def _report_traced(kinds: tuple[str, ...]) -> None:
    """Log in one line, once for the same types, which modules were counted by their operators."""
    _log.warning(
        "the MACs of %s have no counting rule: counted by tracing the operators that they call", ", ".join(kinds)
    )


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


def _count_module(module: nn.Module, args: tuple[Any, ...], output: Any) -> int | None:
    """Count a module by its rule; None if it has none."""
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
        return int(output.numel()) * _pool_area(module.kernel_size, args[0].shape[2:])
    if isinstance(module, _ADAPTIVE_POOLS):
        return int(args[0].numel())
    return None


def _pool_area(kernel: int | Sequence[int], map_shape: Sequence[int]) -> int:
    """Return the number of positions that a pool reads: its kernel may be larger than the map, to pool all of it."""
    sides = [kernel] if isinstance(kernel, int) else list(kernel)
    sides *= len(map_shape) if len(sides) == 1 else 1
    return prod(min(side, length) for side, length in zip(sides, map_shape, strict=True))


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


_ATEN = torch.ops.aten
_COUNTED_ACTIVATIONS = {
    getattr(_ATEN, name + suffix)
    for suffix in ("", "_")  # in place
    for name in (
        *("relu", "leaky_relu", "elu", "gelu", "silu", "mish", "softplus", "sigmoid", "log_sigmoid_forward"),
        *("tanh", "hardtanh", "hardsigmoid", "hardswish", "_softmax", "_log_softmax", "exp", "erf", "pow", "sqrt"),
    )
    if hasattr(_ATEN, name + suffix)
}
_COUNTED_POOLS = {getattr(_ATEN, name) for name in ("avg_pool2d", "avg_pool3d", "max_pool2d_with_indices")}
_COUNTED_MEANS = {getattr(_ATEN, name) for name in ("mean", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")}


class _ElementCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count activations and pooling as their modules are counted; products are those of PyTorch's own counter."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet in _COUNTED_ACTIVATIONS:
            self.count += next(iter_tensors(output)).numel()
        elif packet in _COUNTED_POOLS:
            result = next(iter_tensors(output))
            self.count += result.numel() * _pool_area(args[1], args[0].shape[2 - result.dim() :])
        elif packet in _COUNTED_MEANS:
            self.count += args[0].numel()
        return output


def _count_operators(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Count a module's multiplications by running it again: half of PyTorch's FLOPs, activations and pooling."""
    with _ElementCounter() as elements, FlopCounterMode(display=False) as counter:
        module.forward(*args, **kwargs)  # not `module(...)`, whose hook would count it again
    return int(counter.get_total_flops()) // 2 + int(elements.count)
