"""Batch normalisation folded into the convolution before it: the same function in evaluation mode, in fewer steps."""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from exitwise.models.net import MultiExitNet

_Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
_CONVS: Mapping[type[nn.Module], type[_Norm]] = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
}


def fold_batch_norms(net: MultiExitNet) -> int:
    """Fold every BatchNorm of a net in evaluation mode that alone reads a convolution, in place; how many.

    Which BatchNorm reads which convolution is found by tracing what the net calls as a whole: its stages and necks, and
    the steps of plain sequences. What cannot be traced stays as it is: its modules may be used in any way.
    """
    uses = Counter(module for _, module in net.named_modules(remove_duplicate=False))
    folded = 0
    for whole in (*net.stages, *(head.neck for head in net.exits)):
        for part, graph in list(_traceable(whole)):
            for conv_name, norm_name in _pairs(part, graph):
                conv, norm = part.get_submodule(conv_name), part.get_submodule(norm_name)
                assert isinstance(norm, _Norm)
                if uses[conv] > 1 or uses[norm] > 1 or norm.running_mean is None:
                    continue
                part.set_submodule(conv_name, fuse_conv_bn_eval(conv, norm))  # type: ignore[type-var]
                _remove(part, norm_name)
                folded += 1
    return folded


def _remove(module: nn.Module, name: str) -> None:
    """A step out of a plain sequence, or in its place one that does nothing."""
    parent, _, own = name.rpartition(".")
    if type(sequence := module.get_submodule(parent)) is nn.Sequential:
        delattr(sequence, own)
    else:
        module.set_submodule(name, nn.Identity())


def _traceable(module: nn.Module) -> Iterator[tuple[nn.Module, fx.Graph]]:
    """The module with its graph, or where a plain sequence cannot be traced those of its steps that can."""
    try:
        yield module, fx.Tracer().trace(module)
    except Exception:  # tracing runs the module's own code on symbols, which may raise anything
        if type(module) is nn.Sequential:
            for step in module.children():
                yield from _traceable(step)


def _pairs(module: nn.Module, graph: fx.Graph) -> list[tuple[str, str]]:
    """Names of convolutions and of the BatchNorms that alone read them, where each is called once."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    times = Counter(node.target for node in calls)
    pairs = []
    for norm in calls:
        conv = norm.args[0] if norm.args else None
        if not isinstance(conv, fx.Node) or conv.op != "call_module" or len(conv.users) > 1:
            continue
        kind = type(module.get_submodule(str(conv.target)))
        if type(module.get_submodule(str(norm.target))) is not _CONVS.get(kind):
            continue
        if times[conv.target] == times[norm.target] == 1:
            pairs.append((str(conv.target), str(norm.target)))
    return pairs


def optimize_for_cpu(net: MultiExitNet) -> MultiExitNet:
    """A copy of the net in evaluation mode, with its convolutions folded and in channels-last memory."""
    twin = copy.deepcopy(net).eval()
    fold_batch_norms(twin)
    return twin.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]
