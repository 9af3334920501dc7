"""Multi-exit networks: stages that pass a state on, and a head that reads the state at every exit."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from exitwise.core.errors import InputError
from exitwise.core.preprocessing import Preprocessing


@contextmanager
def preserve_training_mode(net: nn.Module) -> Iterator[None]:
    """Restore the mode of every module, training or evaluation, at the end of the block."""
    modes = {module: module.training for module in net.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _as_module_list(name: str, modules: Iterable[nn.Module]) -> nn.ModuleList:
    if not isinstance(modules, Iterable):
        raise InputError(f"`{name}` must be a sequence of modules, one per exit, but got {type(modules).__name__}")
    modules = list(modules)
    for k, module in enumerate(modules):
        if not isinstance(module, nn.Module):
            raise InputError(f"`{name}[{k}]` must be an nn.Module, but got {type(module).__name__}")
    return nn.ModuleList(modules)


class Head(nn.Module):
    """One exit: a neck that turns a stage's state into features (n, p), and the last linear layer on top.

    Only the last layer is made Bayesian, so calibration needs nothing of the net but the features before it.

    Args:
        neck: Module that maps the state of a stage to features (n, p).
        last: Linear layer from p features to c logits.
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
        """Return the features (n, p) before the last layer."""
        features: Tensor = self.neck(state)
        return features

    def forward(self, state: Any) -> Tensor:
        """Return the logits (n, c)."""
        logits: Tensor = self.last(self.features(state))
        return logits


class MultiExitNet(nn.Module):
    """K stages and K heads: stage k turns the state of stage k - 1 into its own, head k reads it.

    A state is a tensor (n, ...) or any nested list, tuple or dict of such tensors that the next stage understands;
    so is the input x of the first stage.

    Args:
        stages: K modules, from the input or the previous state to the next state.
        heads: K heads with the same number of classes.
        spec: How to rebuild the net, such as {"preset": "cifar100-small"}; None for a user-defined net.
    """

    def __init__(self, stages: Iterable[nn.Module], heads: Iterable[Head], spec: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.stages = _as_module_list("stages", stages)
        self.heads = _as_module_list("heads", heads)
        self.spec = spec
        # Shape of one input, such as (3, 32, 32); None if it is unknown.
        self.input_shape: tuple[int, ...] | None = None
        # How images become inputs, if the net was made from a network that states it.
        self.preprocessing: Preprocessing | None = None
        # Submodules after which `attach` has cut, and the revision of the weights of a network by name.
        self.cuts: tuple[str, ...] = ()
        self.revision: str | None = None
        # Hash of the stages' weights as a library or a file of the user's gave them; None for others.
        self.base_sha256: str | None = None
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
        """The heads in order, typed as `Head`."""
        return [head for head in self.heads if isinstance(head, Head)]

    @property
    def num_classes(self) -> int:
        """The number of classes c, the same at every exit."""
        return int(self.exits[0].last.out_features)

    def states(self, x: Any) -> Iterator[tuple[Head, Any]]:
        """Run stage by stage, lazily: each head with the state that it reads. Stop iterating to stop computing."""
        state = x
        for stage, head in zip(self.stages, self.exits, strict=True):
            state = stage(state)
            yield head, state

    def features(self, x: Any) -> list[Tensor]:
        """Return the features (n, p_k) of every exit: K tensors."""
        return [head.features(state) for head, state in self.states(x)]

    def forward(self, x: Any) -> list[Tensor]:
        """Return the logits (n, c) of every exit: K tensors."""
        return [head(state) for head, state in self.states(x)]
