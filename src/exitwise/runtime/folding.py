"""Fold batch normalization into the preceding convolution: the same function in evaluation mode, in fewer steps."""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from exitwise.models.net import MultiExitNet

_Norm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
_NORM_OF_CONV: Mapping[type[nn.Module], type[_Norm]] = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
}


def fold_batch_norms(net: MultiExitNet) -> int:
    """Fold, in place, every BatchNorm that is the only reader of a convolution; return the number folded.

    The net must be in evaluation mode. Tracing finds the BatchNorm that reads a convolution: it traces the stages, the
    necks and, where these cannot be traced, the children of an `nn.Sequential`. Modules that cannot be traced stay
    unchanged, because they may use their children in any way.
    """
    _separate_stages(net)
    uses = Counter(module for _, module in net.named_modules(remove_duplicate=False))
    num_folded = 0
    for root in (*net.stages, *(head.neck for head in net.exits)):
        for module, graph in list(_trace_parts(root)):
            for conv_name, norm_name in _find_foldable_pairs(module, graph):
                conv, norm = module.get_submodule(conv_name), module.get_submodule(norm_name)
                assert isinstance(norm, _Norm)
                if uses[conv] > 1 or uses[norm] > 1 or norm.running_mean is None:
                    continue
                module.set_submodule(conv_name, fuse_conv_bn_eval(conv, norm))  # type: ignore[type-var]
                _remove_submodule(module, norm_name)
                num_folded += 1
    return num_folded


def _separate_stages(net: MultiExitNet) -> None:
    """Copy, in place, each stage that shares modules with an earlier one, as one network at two resolutions does.

    A shared convolution could not be folded: another stage may use it without the BatchNorm.
    """
    seen: set[nn.Module] = set()
    for k, stage in enumerate(net.stages):
        modules = set(stage.modules())
        if seen & modules:
            net.stages[k] = copy.deepcopy(stage)
        seen |= modules


def _remove_submodule(module: nn.Module, name: str) -> None:
    """Delete a child of an `nn.Sequential`; replace any other submodule with an identity."""
    parent_name, _, child_name = name.rpartition(".")
    if type(parent := module.get_submodule(parent_name)) is nn.Sequential:
        delattr(parent, child_name)
    else:
        module.set_submodule(name, nn.Identity())


def _trace_parts(module: nn.Module) -> Iterator[tuple[nn.Module, fx.Graph]]:
    """Yield the module with its graph or, if an `nn.Sequential` cannot be traced, its traceable children."""
    try:
        yield module, fx.Tracer().trace(module)
    except Exception:  # tracing runs the module's own code on symbols, which may raise anything
        if type(module) is nn.Sequential:
            for child in module.children():
                yield from _trace_parts(child)


def _find_foldable_pairs(module: nn.Module, graph: fx.Graph) -> list[tuple[str, str]]:
    """Return names of convolutions and of the BatchNorms that are their only readers, where both are called once."""
    calls = [node for node in graph.nodes if node.op == "call_module"]
    num_calls = Counter(node.target for node in calls)
    pairs = []
    for norm in calls:
        conv = norm.args[0] if norm.args else None
        if not isinstance(conv, fx.Node) or conv.op != "call_module" or len(conv.users) > 1:
            continue
        conv_type = type(module.get_submodule(str(conv.target)))
        if type(module.get_submodule(str(norm.target))) is not _NORM_OF_CONV.get(conv_type):
            continue
        if num_calls[conv.target] == num_calls[norm.target] == 1:
            pairs.append((str(conv.target), str(norm.target)))
    return pairs


def optimize_for_cpu(net: MultiExitNet) -> MultiExitNet:
    """Return a copy of the net in evaluation mode, with BatchNorms folded and in channels-last memory format."""
    net_copy = copy.deepcopy(net).eval()
    fold_batch_norms(net_copy)
    return net_copy.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]
