"""A network that another library built by its name, and checks that all libraries share."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from exitwise.core.checks import check_integer
from exitwise.core.errors import InputError, first_line
from exitwise.core.preprocessing import Preprocessing

MAX_IMAGE_SIZE = 4096  # of images in a spec, which may come from a file


@dataclass(frozen=True, eq=False)
class NamedModule:
    """A classifier of another library, in evaluation mode.

    Args:
        name: Name with the prefix of its library, such as "timm:resnet50".
        module: The network, from inputs to logits (n, c).
        num_classes: Number of classes c.
        spec: JSON-serializable description that rebuilds the module without its weights.
        preprocessing: How its images are scaled, cropped and normalized; None for a network on text.
        example: Inputs for two samples: a tensor, or a dict of tensors.
        classes: Names of the classes, if the library knows them.
        revision: Revision of the pretrained weights, if the library knows it.
        sha256: Hash of all weights as they were loaded; None for random ones.

    Example:
        >>> import exitwise as ew
        >>> import torch
        >>> module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2)).eval()
        >>> named = ew.models.NamedModule("timm:mine", module, 2, {}, None, torch.zeros(2, 3, 2, 2))
        >>> named.input_shape
        (3, 2, 2)
    """

    name: str
    module: nn.Module
    num_classes: int
    spec: Mapping[str, Any]
    preprocessing: Preprocessing | None
    example: Any
    classes: tuple[str, ...] | None = None
    revision: str | None = None
    sha256: str | None = None

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """Shape of one image, None for other inputs."""
        return tuple(self.example.shape[1:]) if isinstance(self.example, Tensor) else None


def require(library: str, prefix: str, extra: str) -> ModuleType:
    """Import a library; raise an `InputError` that names the extra to install if it cannot be imported."""
    try:
        return import_module(library)
    except ImportError as error:
        root = library.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name in (library, root):
            raise InputError(f"`{prefix}` names need {root}: pip install 'exitwise[{extra}]'") from None
        raise InputError(f"{library} is installed but cannot be imported: {first_line(error)}") from None
    except (OSError, RuntimeError) as error:  # such as a torchvision for another torch
        raise InputError(f"{library} is installed but cannot be imported: {first_line(error)}") from None


@contextmanager
def build_errors(name: str, doing: str = "be built") -> Iterator[None]:
    """Turn any error of a library into one `InputError`: "timm:resnet50 could not be built: reason"."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # libraries raise anything for arguments and files that they do not expect
        raise InputError(f"{name} could not {doing}: {shorten_reason(error)}") from None


def shorten_reason(error: Exception) -> str:
    """Return the first line of an error of another library, with at most 200 characters."""
    line = first_line(error)
    return line if len(line) <= 200 else f"{line[:197]}..."


@contextmanager
def weight_errors(name: str) -> Iterator[None]:
    """Turn any error of loading pretrained weights into one `InputError` that says what to do offline."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # errors of the network, of the cache and of files
        raise InputError(
            f"the pretrained weights of {name} could not be loaded ({shorten_reason(error)}): "
            f"connect to the internet, or give a local file as `weights`"
        ) from None


def check_num_classes(name: str, num_classes: int | None, own: int) -> int:
    """Return the number of classes: the given one, or the network's own; raise `InputError` below two."""
    if num_classes is None and own < 2:
        kind = "no classifier (num_classes=0)" if own <= 0 else "one output, as a regression has"
        raise InputError(f"{name} has {kind}: give `num_classes`, and train the new last layer")
    return own if num_classes is None else num_classes


def example_images(preprocessing: Preprocessing) -> Tensor:
    """Return two random images (2, channels, size, size), normalized; without values while a net is only described."""
    check_integer("image_size", preprocessing.size, 1, MAX_IMAGE_SIZE)
    if torch.get_default_device().type == "meta":
        return torch.empty(2, *preprocessing.shape)
    images = torch.rand(2, *preprocessing.shape, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return preprocessing.normalize(255 * images)


def move_to_default_device(example: Any) -> Any:
    """Return example inputs on torch's default device, such as meta while a net is only described."""
    if isinstance(example, Mapping):
        return {key: value.to(torch.get_default_device()) for key, value in example.items()}
    return example.to(torch.get_default_device())


def check_forward(name: str, module: nn.Module, example: Any) -> None:
    """Raise `InputError` unless the module takes the example, whose size the user may have chosen."""
    size = f"images of {example.shape[-1]} x {example.shape[-1]}" if isinstance(example, Tensor) else "its own inputs"
    try:
        with torch.inference_mode():
            _ = module(**example) if isinstance(example, Mapping) else module(example)
    except Exception as error:  # a foreign forward may raise anything
        raise InputError(f"{name} refuses {size}: {shorten_reason(error)}") from None
