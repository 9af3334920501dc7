"""What a prediction costs, in multiply-adds (MACs); the paper calls the same count "practical FLOPs".

Counting rule: a convolution is its multiply-adds without the bias, a linear layer its multiply-adds plus the bias,
an activation one per element, average and max-pooling the kernel's area per output element, adaptive pooling its input
elements, a recurrent layer its weights once per step, and a normalisation nothing, as it folds into a convolution.
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

from exitwise.core.errors import NET_ERRORS, InputError, first_line
from exitwise.core.nested import describe, map_tensors
from exitwise.models.net import MultiExitNet


def macs(
    net: MultiExitNet, input_shape: tuple[int, ...] | None = None, *, example_inputs: Any | None = None
) -> list[int]:
    """Cumulative MACs up to each exit, earlier heads included: K whole numbers for one sample.

    The net runs once on PyTorch's meta device, so nothing is computed and the net is left as it was. Give the shape of
    one input, such as (3, 32, 32), or a batch of one as `example_inputs`. Only modules are seen: an operation that a
    module's forward does by itself, such as an addition or `F.relu`, counts nothing. A module of your own may have a
    method `macs(inputs, output)`, which says what it costs, all that is in it included.
    """
    if (input_shape is None) == (example_inputs is None):
        raise InputError("`macs` needs either `input_shape` or `example_inputs`, not both or neither")
    shown = describe(example_inputs) if input_shape is None else f"shape {input_shape}"
    twin = copy.deepcopy(net).to("meta").eval()
    counts: list[int] = []

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = inspect.signature(module.forward).bind(*args, **kwargs)  # in the order that forward has
        counts.append(_count(module, (*given.args, *given.kwargs.values()), output))

    hooks = [module.register_forward_hook(count, with_kwargs=True) for module in _counted(twin)]
    cumulative = []
    with torch.no_grad():
        try:
            inputs = example_inputs if input_shape is None else torch.empty(1, *input_shape)
            for head, state in twin.states(map_tensors(lambda tensor: tensor.to("meta"), inputs)):
                head(state)
                cumulative.append(sum(counts))
        except InputError:
            raise
        except NET_ERRORS as error:
            reason = first_line(error)
            raise InputError(f"the net cannot take inputs of {shown}: {reason}") from None
    for hook in hooks:
        hook.remove()
    return cumulative


def cumulative_parameters(net: MultiExitNet) -> list[int]:
    """Number of parameters up to each exit, earlier heads included."""
    totals, total = [], 0
    for stage, head in zip(net.stages, net.heads, strict=True):
        total += sum(p.numel() for module in (stage, head) for p in module.parameters())
        totals.append(total)
    return totals


def _counted(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that have a rule or nothing in them: whole ones count for their parts."""
    if not any(module.children()) or isinstance(module, nn.MultiheadAttention) or hasattr(module, "macs"):
        yield module
        return
    for part in module.children():
        yield from _counted(part)


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
    nn.Sequential,  # an empty one: those with modules in them are not counted themselves
)


def _count(module: nn.Module, args: tuple[Any, ...], output: Any) -> int:
    if callable(own := getattr(module, "macs", None)):
        return int(own(args, output))
    if isinstance(module, _FREE):
        return 0
    if isinstance(module, nn.MultiheadAttention):
        return _attention(module, *args[:2])
    if isinstance(module, fx.GraphModule):  # operations without modules
        return _operations(module, args)
    if isinstance(module, _CONVOLUTIONS):
        return int(output.numel() * module.weight[0].numel())
    if isinstance(module, _TRANSPOSED):
        return int(args[0].numel() * module.weight[0].numel())
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):  # every weight once for each step
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


def _attention(module: nn.MultiheadAttention, query: Tensor, key: Tensor) -> int:
    """Projections with their bias, then the weights of every token for every other, and the sums by them."""
    d, rows = module.embed_dim, (query.shape[1] if module.batch_first else query.shape[0])
    others = key.shape[1] if module.batch_first else key.shape[0]
    biased = int(module.in_proj_bias is not None)
    inside = rows * d * (d + biased) + others * d * (module.kdim + module.vdim + 2 * biased)
    return int(inside + 2 * rows * others * d + rows * d * (d + int(module.out_proj.bias is not None)))


def _operations(module: fx.GraphModule, args: tuple[Any, ...]) -> int:
    """Products in a graph, half of what PyTorch's own counter says."""
    with FlopCounterMode(display=False) as counter:
        module.forward(*args)  # not itself: it would be counted again
    return int(counter.get_total_flops()) // 2
