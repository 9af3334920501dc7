"""The net of a new run: a preset, the user's own, or a network of another library, with exits as the options say."""

from dataclasses import dataclass
from typing import Any

from exitwise import data
from exitwise.core.preprocessing import Preprocessing
from exitwise.models.named.build import is_named
from exitwise.models.named.module import NamedModule
from exitwise.models.net import MultiExitNet
from exitwise.runs.attached import build_attached_net, check_attach_options
from exitwise.runs.named import attach_to_named, build_named_for
from exitwise.runs.nets import net_input_size
from exitwise.runs.options import AttachOptions, DataOptions, NetOptions


@dataclass(frozen=True)
class NewNet:
    """A net whose options have been checked, before the images of its run are read.

    Args:
        name: A preset, a name with the prefix of its library, or None for the user's own function.
        options: The network.
        attached: Its weights and exits.
        seed: Seed of new weights.
        named: The network that another library built.
    """

    name: str | None
    options: NetOptions
    attached: AttachOptions
    seed: int
    named: NamedModule | None

    @property
    def preprocessing(self) -> Preprocessing | None:
        """The network's own preprocessing, which only networks of other libraries have."""
        return None if self.named is None else self.named.preprocessing

    @property
    def image_size(self) -> int | None:
        """Size of its images, None if it takes any."""
        return net_input_size(self.name) if self.preprocessing is None else self.preprocessing.size

    @property
    def has_exits_attached(self) -> bool:
        """True if exits are attached to a network that has one."""
        return self.named is not None or self.attached.attach is not None

    @property
    def weights(self) -> str | None:
        """Source of its weights, for run.json; None for random ones."""
        if self.attached.weights is not None:
            return str(self.attached.weights.resolve())
        return None if self.named is None else "pretrained"

    def build(self, splits: data.Splits[Any]) -> MultiExitNet:
        """Build the net for images, load its weights and attach its exits; the heads of these are untrained."""
        if self.named is None:
            return build_attached_net(self.name, self.options, self.attached, splits, self.seed)
        return attach_to_named(self.named, self.attached, splits, self.seed)


def net_name(source: DataOptions, options: NetOptions) -> str | None:
    """Return the name of the network: the given one, or the dataset's; None for the user's own function."""
    dataset = data.get_dataset(str(source.data))
    return None if options.function else options.model or dataset.model


def prepare_net(source: DataOptions, options: NetOptions, attached: AttachOptions, seed: int) -> NewNet:
    """Check the options of a net; a network of another library is built here, which may download its weights.

    Args:
        source: The dataset.
        options: The network.
        attached: Its weights and exits.
        seed: Seed of new weights.
    """
    name = net_name(source, options)
    check_attach_options(options, attached, is_named(name))
    named = build_named_for(str(name), source, attached, seed) if is_named(name) else None
    return NewNet(name, options, attached, seed, named)
