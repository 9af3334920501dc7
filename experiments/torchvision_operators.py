"""Import torchvision beside a torch that it was not built for: for tests and experiments only.

torchvision registers Python functions for its operators when it is imported, which fails if they are not defined. The
networks of timm, torchvision and Transformers need none of them.
"""

import torch

_NAMES = ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
_OPERATORS = ("nms", "qnms", *_NAMES, *(f"_{name}_backward" for name in _NAMES))
_libraries: list[torch.library.Library] = []  # a library that is deleted takes its operators with it


def define_operators() -> None:
    """Define the operators of torchvision unless it brought its own."""
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        return  # tests of what needs it skip
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in _OPERATORS:
            library.define(f"{name}(Tensor x) -> Tensor")
        _libraries.append(library)
        _forget_half_imported()


def _forget_half_imported() -> None:
    import sys

    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]
