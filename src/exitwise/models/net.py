"""A network with several exits: stages that carry a state on, and a head that reads it at every exit."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from exitwise.core.errors import InputError


@contextmanager
def preserve_training_mode(net: nn.Module) -> Iterator[None]:
    """Put every module back into the mode, training or evaluation, that it was in."""
    modes = {module: module.training for module in net.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _modules(name: str, modules: Iterable[nn.Module]) -> nn.ModuleList:
    if not isinstance(modules, Iterable):
        raise InputError(f"`{name}` must be a sequence of modules, one per exit, but got {type(modules).__name__}")
    modules = list(modules)
    for k, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise InputError(f"`{name}[{k}]` must be an nn.Module, but got {type(module).__name__}")
    return nn.ModuleList(modules)


class Head(nn.Module):
    """One exit: a neck that turns a stage's state into features (n, p), and the last linear layer on top.

    Only the last layer is made Bayesian, so the features before it are all that calibration ever sees of the net.
    """

    def __init__(self, neck: nn.Module, last: nn.Linear) -> None:
        super().__init__()
        if not isinstance(neck, nn.Module):
            raise InputError(f"`neck` must be an nn.Module, but got {type(neck).__name__}")
        if not isinstance(last, nn.Linear):
            raise InputError(f"`last` must be the exit's nn.Linear, but got {type(last).__name__}")
        self.neck = neck
        self.last = last

    def features(self, state: Any) -> Tensor:
        """Features (n, p) before the last layer."""
        features: Tensor = self.neck(state)
        return features

    def forward(self, state: Any) -> Tensor:
        """Logits (n, c)."""
        logits: Tensor = self.last(self.features(state))
        return logits


class MultiExitNet(nn.Module):
    """K stages and K heads: stage k turns the state of stage k - 1 into its own, head k reads it.

    A state is a tensor (n, ...) or any nested list, tuple or dict of such tensors that the next stage understands;
    so is the input x of the first stage.
    """

    def __init__(self, stages: Iterable[nn.Module], heads: Iterable[Head], spec: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.stages = _modules("stages", stages)
        self.heads = _modules("heads", heads)
        # How to build this net again, e.g. {"preset": "cifar100-small"}; None for a net of the user's own.
        self.spec = spec
        # Shape of one input, such as (3, 32, 32), where it is known.
        self.input_shape: tuple[int, ...] | None = None
        if not self.stages or len(self.stages) != len(self.heads):
            raise InputError(
                f"`stages` and `heads` must pair up, one of each per exit, "
                f"but got {len(self.stages)} stages and {len(self.heads)} heads"
            )
        for k, head in enumerate(self.heads):
            if not isinstance(head, Head):
                raise InputError(f"`heads[{k}]` must be an exitwise Head, but got {type(head).__name__}")
        classes = {head.last.out_features for head in self.exits}
        if len(classes) != 1:
            raise InputError(f"`heads` must all have the same number of classes, but got {sorted(classes)}")

    @property
    def exits(self) -> list[Head]:
        """The heads, in order, with their type."""
        return [head for head in self.heads if isinstance(head, Head)]

    @property
    def num_classes(self) -> int:
        """c, the number of classes, the same at every exit."""
        return int(self.exits[0].last.out_features)

    def states(self, x: Any) -> Iterator[tuple[Head, Any]]:
        """Run stage by stage, lazily: each head with the state that it reads. Stop iterating to stop computing."""
        state = x
        for stage, head in zip(self.stages, self.exits, strict=True):
            state = stage(state)
            yield head, state

    def features(self, x: Any) -> list[Tensor]:
        """Features (n, p_k) of every exit: K tensors."""
        return [head.features(state) for head, state in self.states(x)]

    def forward(self, x: Any) -> list[Tensor]:
        """Logits (n, c) of every exit: K tensors."""
        return [head(state) for head, state in self.states(x)]
