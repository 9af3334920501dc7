"""Cascades: a chain of whole networks as one multi-exit net, a small one first.

The state carries the cascade's input, at the largest size that a member takes. Every member resizes and normalizes it
for itself, as a part of its first stage, so that the runtime and an exported bundle need to know nothing about it.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from exitwise.core.checks import check_integer
from exitwise.core.errors import InputError, first_line, shorten
from exitwise.core.nested import describe
from exitwise.core.preprocessing import Preprocessing
from exitwise.models.attach.attach import candidate_inputs, split_classifier
from exitwise.models.attach.graph import ModuleInputs, call_with_inputs
from exitwise.models.attach.stages import SelectValue
from exitwise.models.cascade_stages import STATE, CascadeStage, make_conversion
from exitwise.models.macs import macs
from exitwise.models.net import Head, MultiExitNet

_log = logging.getLogger(__name__)

Member = nn.Module | tuple[nn.Module, Preprocessing | None]


class Cascade(MultiExitNet):
    """A chain of whole networks as one multi-exit net; made by `cascade`.

    Args:
        stages: Stages of all members, in order.
        heads: Heads of all members, in order.
        member_of_exit: Position (K,) of the member that each exit belongs to.
        preprocessing: Preprocessing of the cascade's input, if it is known.
        classes: Names (c,) of the classes, if they are known.
        spec: How to rebuild the net, if all members can be rebuilt.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        heads: Sequence[Head],
        member_of_exit: Sequence[int],
        preprocessing: Preprocessing | None,
        classes: Sequence[str] | None,
        spec: dict[str, Any] | None,
    ) -> None:
        super().__init__(stages, heads, spec)
        self.member_of_exit = tuple(member_of_exit)
        self.preprocessing = preprocessing
        self.classes = None if classes is None else tuple(classes)

    @property
    def num_members(self) -> int:
        """Number of networks in the chain."""
        return self.member_of_exit[-1] + 1


@dataclass(frozen=True, eq=False)
class _Parts:
    """A member: its network, its stages and heads, and the preprocessing of its input."""

    network: nn.Module
    stages: Sequence[nn.Module]
    heads: Sequence[Head]
    preprocessing: Preprocessing | None


def cascade(
    members: Sequence[Member],
    *,
    classes: Sequence[str] | Sequence[Sequence[str]] | None = None,
    class_order: Sequence[str] | None = None,
    preprocessing: Preprocessing | None = None,
    example_inputs: Any = None,
) -> Cascade:
    """Chain whole networks to one multi-exit net: a small one first, a larger one for samples that it is not sure of.

    Nothing is trained. Each exit returns the logits of its network, bit for bit if the network takes the cascade's
    input as it is. Layers are shared with the given networks, also if one network appears twice, at two resolutions.

    Args:
        members: Networks in the order in which they run. Each is a classifier that ends in an `nn.Linear`, in
            evaluation mode, or a `MultiExitNet`, whose exits are all joined to the chain. A pair (network,
            `Preprocessing`) gives the size, mean and deviation of the images that the network takes.
        classes: Names (c,) of the classes of all members; or a list of names for each member, in the member's own
            order.
        class_order: Order of the cascade's classes, if `classes` has a list for each member [default: the first one's].
        preprocessing: Preprocessing of the images that the cascade will get [default: that of the member with the
            largest images, the last such one]. Members without their own take these images as they are. The part of an
            image that is cropped is the same for all members.
        example_inputs: Inputs of the cascade for at least one sample: a tensor, or a tuple or dict of tensors. Guessed
            from sizes of images and first layers.

    Returns:
        A multi-exit net with the exits of all members in order; its `preprocessing` is that of its input.

    Raises:
        InputError: Members have different classes, or inputs that cannot be reconciled; a classifier cannot be traced
            or is in training mode; an argument is invalid.

    Example:
        >>> import exitwise as ew
        >>> small, large = ew.models.resnet("cifar100-resnet8"), ew.models.resnet("cifar100-resnet14")
        >>> net = ew.cascade([small, large])
        >>> ew.macs(net, (3, 32, 32))
        [12585316, 39383752]
    """
    given = _check_members(members)
    given_input = _choose_preprocessing(given, preprocessing)
    example = _make_example(given, given_input, example_inputs)
    parts = [
        _split_member(i, network, wanted, given_input, example, classes) for i, (network, wanted) in enumerate(given)
    ]
    orders, names = _map_classes(parts, classes, class_order)
    stages: list[nn.Module] = []
    heads: list[Head] = []
    member_of_exit: list[int] = []
    for i, (part, order) in enumerate(zip(parts, orders, strict=True)):
        is_last = i == len(parts) - 1
        for j, (stage, head) in enumerate(zip(part.stages, part.heads, strict=True)):
            convert = make_conversion(given_input, part.preprocessing) if j == 0 else None
            if convert is not None and (weight := next(part.network.parameters(), None)) is not None:
                convert.to(weight.device)
            stages.append(CascadeStage(stage, j == 0, i == 0, is_last, convert))
            last = head.last if order is None else _permute_classes(head.last, order)
            neck = head.neck if is_last else nn.Sequential(SelectValue(STATE, None), head.neck)
            heads.append(Head(neck, last))
            member_of_exit.append(i)
    net = Cascade(stages, heads, member_of_exit, given_input, names, _make_spec(parts, given_input, names))
    _check_placement(net)
    net.training = any(part.network.training for part in parts)
    net.input_shape = _sample_shape(given, given_input, example_inputs)
    if example is not None:
        _warn_of_costs(net, _to_network(example, net))
    return net


def _check_members(members: Any) -> list[tuple[nn.Module, Preprocessing | None]]:
    """Return every member as a pair of a network and its preprocessing, which may be None."""
    if not isinstance(members, Sequence) or isinstance(members, str) or not len(members):
        got = "an empty list" if isinstance(members, Sequence) and not len(members) else f"a {type(members).__name__}"
        raise InputError(f"`members` must be a list of networks, but got {got}")
    pairs: list[tuple[nn.Module, Preprocessing | None]] = []
    for i, member in enumerate(members):
        network, wanted = member if isinstance(member, tuple | list) and len(member) == 2 else (member, None)
        if not isinstance(network, nn.Module) or not isinstance(wanted, Preprocessing | None):
            kinds = f"{type(network).__name__} and {type(wanted).__name__}" if wanted else type(network).__name__
            raise InputError(
                f"`members[{i}]` must be an nn.Module, or a pair of an nn.Module and a Preprocessing, but got {kinds}"
            )
        if not isinstance(network, MultiExitNet) and any(part.training for part in network.modules()):
            raise InputError(f"`members[{i}]` is in training mode: call .eval() first, or dropout would vary")
        if wanted is None and isinstance(network, MultiExitNet):
            wanted = network.preprocessing
        pairs.append((network, wanted))
    return pairs


def _choose_preprocessing(
    members: Sequence[tuple[nn.Module, Preprocessing | None]], given: Preprocessing | None
) -> Preprocessing | None:
    """Return the preprocessing of the cascade's input: the given one, or that of the member with the largest images."""
    if given is not None and not isinstance(given, Preprocessing):
        raise InputError(f"`preprocessing` must be a Preprocessing, but got {type(given).__name__}")
    wanted = [(i, own) for i, (_, own) in enumerate(members) if own is not None]
    if given is None and wanted:
        given = max((own for _, own in reversed(wanted)), key=lambda own: own.size)
    for i, own in wanted:
        if given is not None and len(own.mean) != len(given.mean):
            raise InputError(
                f"`members[{i}]` takes images of {len(own.mean)} channels, but the cascade's have {len(given.mean)}: "
                f"one of them must convert colors itself"
            )
    return given


def _make_example(
    members: Sequence[tuple[nn.Module, Preprocessing | None]], given: Preprocessing | None, example: Any
) -> Any:
    """Return inputs of the cascade for one sample or more; None if nothing needs them and they are not known."""
    if example is not None:
        return example
    if given is not None:
        return _random_images(given)
    known = {network.input_shape for network, _ in members if isinstance(network, MultiExitNet)} - {None}
    if len(known) > 1:
        shapes = " and ".join(str(shape) for shape in sorted(map(tuple, filter(None, known))))
        raise InputError(
            f"members take inputs of {shapes}: give each as a pair (network, Preprocessing), so that it resizes them"
        )
    candidates = [torch.rand(1, *shape) for shape in known if shape is not None]
    candidates = candidates or [x for network, _ in members for x in candidate_inputs(network)]
    plain = [network for network, _ in members if not isinstance(network, MultiExitNet)]
    for candidate in candidates:
        if all(_accepts(network, candidate) for network in plain):
            return candidate
    if not plain:
        return None
    reason = "no input was found that all members take" if candidates else "the members' inputs could not be guessed"
    raise InputError(f"{reason}: pass `example_inputs`, or pairs (network, Preprocessing) if their sizes differ")


def _random_images(preprocessing: Preprocessing) -> Tensor:
    return torch.rand(2, *preprocessing.shape, generator=torch.Generator().manual_seed(0), device="cpu")


def _accepts(network: nn.Module, inputs: Tensor) -> bool:
    try:
        with torch.no_grad():
            call_with_inputs(network, ModuleInputs.of(_to_network(inputs, network)))
    except InputError:
        return False
    return True


def _to_network(inputs: Any, network: nn.Module) -> Any:
    """Return example inputs on the device, and images in the type, of a network's weights."""
    weight = next(network.parameters(), None)
    if weight is None or not isinstance(inputs, Tensor):
        return inputs
    return inputs.to(weight.device, weight.dtype if inputs.is_floating_point() else inputs.dtype)


def _split_member(
    i: int,
    network: nn.Module,
    wanted: Preprocessing | None,
    given: Preprocessing | None,
    example: Any,
    classes: Any,
) -> _Parts:
    """Return the stages and heads of a member."""
    if isinstance(network, MultiExitNet):
        return _Parts(network, list(network.stages), network.exits, wanted)
    inputs = example
    conversion = make_conversion(given, wanted)
    if conversion is not None:
        if not isinstance(example, Tensor):
            raise InputError("`example_inputs` must be a tensor of images if a member has a Preprocessing")
        if tuple(example.shape[1:]) != conversion.given.shape:
            raise InputError(
                f"`example_inputs` must be images of the cascade's shape {conversion.given.shape}, "
                f"but is {describe(example)}"
            )
        inputs = conversion(example)
    try:
        stage, last = split_classifier(network, _to_network(inputs, network))
    except InputError as error:
        raise InputError(f"`members[{i}]`: {first_line(error)}") from None
    return _Parts(network, [stage], [Head(nn.Identity(), last)], wanted)


def _map_classes(
    parts: Sequence[_Parts], classes: Any, order: Any
) -> tuple[list[list[int] | None], tuple[str, ...] | None]:
    """Return for each member the positions of the cascade's classes among its own, None if equal; and their names."""
    sizes = [part.heads[0].last.out_features for part in parts]
    if len(set(sizes)) > 1:
        raise InputError(f"all members must have the same classes, but they have {', '.join(map(str, sizes))}")
    if classes is None:
        if order is not None:
            raise InputError("`class_order` needs `classes`: the names of each member's classes")
        return [None] * len(parts), _common_names(parts)
    if not isinstance(classes, Sequence) or isinstance(classes, str) or not len(classes):
        raise InputError(f"`classes` must be a list of names, or one for each member, but got {shorten(classes)}")
    if all(isinstance(name, str) for name in classes):
        classes = [classes] * len(parts)
    if len(classes) != len(parts) or any(isinstance(names, str) for names in classes):
        raise InputError(
            f"`classes` must have a list of names for each of {len(parts)} members, but has {len(classes)}"
        )
    lists = [tuple(names) if isinstance(names, Sequence) else (names,) for names in classes]
    if any(not isinstance(name, str) for names in lists for name in names):
        raise InputError(f"`classes` must be names of classes, but got {shorten(classes)}")
    names = lists[0] if order is None else tuple(order)
    for i, own in enumerate(lists):
        if len(own) != sizes[i]:
            raise InputError(f"`classes[{i}]` must name the member's {sizes[i]} classes, but names {len(own)}")
        if len(set(own)) < len(own):
            twice = next(name for name in own if own.count(name) > 1)
            raise InputError(f"`classes[{i}]` must name every class once, but names {twice!r} twice")
        if set(own) != set(names):
            other = next(iter(sorted(set(own) ^ set(names), key=str)))
            where = "has" if other in own else "lacks"
            raise InputError(f"all members must have the same classes, but `classes[{i}]` {where} {other!r}")
    return [None if own == names else [own.index(name) for name in names] for own in lists], names


def _common_names(parts: Sequence[_Parts]) -> tuple[str, ...] | None:
    """Return the names of the classes that members are cascades of; raise InputError if these have different ones."""
    named = [(i, part.network.classes) for i, part in enumerate(parts) if isinstance(part.network, Cascade)]
    known = [(i, names) for i, names in named if names is not None]
    for i, names in known:
        if names != known[0][1]:
            raise InputError(
                f"`members[{i}]` and `members[{known[0][0]}]` name their classes in different orders, or other ones: "
                "pass `classes` with a list of names for each member"
            )
    return known[0][1] if known else None


def _permute_classes(last: nn.Linear, order: Sequence[int]) -> nn.Linear:
    """Return a copy of a last layer with its classes in another order."""
    rows = torch.tensor(order, device=last.weight.device)
    weight = last.weight
    permuted = nn.Linear(
        last.in_features, last.out_features, last.bias is not None, device=weight.device, dtype=weight.dtype
    )
    with torch.no_grad():
        permuted.weight.copy_(weight[rows])
        if last.bias is not None:
            permuted.bias.copy_(last.bias[rows])
    return permuted.train(last.training)


def _make_spec(
    parts: Sequence[_Parts], given: Preprocessing | None, names: tuple[str, ...] | None
) -> dict[str, Any] | None:
    """Return the spec that rebuilds the cascade; None unless all members can be rebuilt."""
    networks = list(dict.fromkeys(part.network for part in parts))  # a network that appears twice is stored once
    specs = [network.spec if isinstance(network, MultiExitNet) else None for network in networks]
    if any(spec is None for spec in specs):
        return None
    chain = [
        {
            "member": networks.index(part.network),
            "preprocessing": None if part.preprocessing is None else part.preprocessing.to_dict(),
        }
        for part in parts
    ]
    spec = {"members": specs, "chain": chain, "input": None if given is None else given.to_dict()}
    return {"cascade": spec if names is None else {**spec, "classes": list(names)}}


def rebuild_cascade(spec: Any, rebuild: Any) -> Cascade:
    """Build the untrained cascade of the entry `cascade` of a spec; `rebuild` builds each member from its own spec."""
    try:
        networks = [rebuild(member) for member in spec["members"]]
        last = len(networks) - 1
        chain = [
            (networks[check_integer("member", link["member"], 0, last)], _read_preprocessing(link["preprocessing"]))
            for link in spec["chain"]
        ]
        given, classes = _read_preprocessing(spec["input"]), spec.get("classes")
    except (AttributeError, KeyError, RecursionError, TypeError):
        raise InputError(
            f"a model spec's `cascade` must hold members, their chain and input, but is {shorten(spec)}"
        ) from None
    return cascade(chain, preprocessing=given, classes=classes)


def _read_preprocessing(data: Mapping[str, Any] | None) -> Preprocessing | None:
    return None if data is None else Preprocessing.from_dict(data)


def _check_placement(net: MultiExitNet) -> None:
    """Raise `InputError` unless all weights have one device and one type."""
    for kind in ("device", "dtype"):
        values = {str(getattr(p, kind)).removeprefix("torch.") for p in net.parameters() if p.is_floating_point()}
        if len(values) > 1:
            raise InputError(f"all members must have one {kind}, but their weights have {' and '.join(sorted(values))}")


def _sample_shape(
    members: Sequence[tuple[nn.Module, Preprocessing | None]], given: Preprocessing | None, example: Any
) -> tuple[int, ...] | None:
    """Return the shape of one input; None if it was only guessed, as for networks that take images of any size."""
    if given is not None:
        return given.shape
    if isinstance(example, Tensor):
        return tuple(example.shape[1:])
    return next((network.input_shape for network, _ in members if isinstance(network, MultiExitNet)), None)


def _warn_of_costs(net: Cascade, example: Any) -> None:
    """Log in one line that a member costs more than the next one; raise `InputError` if the net cannot run."""
    try:
        cumulative = macs(net, example_inputs=example)
    except InputError as error:
        raise InputError(f"the members cannot all take the cascade's input, {describe(example)}: {error}") from None
    ends = [k for k, i in enumerate(net.member_of_exit) if k + 1 == len(net.stages) or net.member_of_exit[k + 1] != i]
    costs = np.diff([cumulative[k] for k in ends], prepend=0)
    for i in range(len(costs) - 1):
        if costs[i] > costs[i + 1]:
            _log.warning(
                "member %d of the cascade costs %.2f times as many MACs as the next one: "
                "compute is saved if small networks come first",
                i + 1,
                costs[i] / costs[i + 1],
            )
