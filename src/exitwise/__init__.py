"""exitwise: early-exit networks that can be trusted under a compute budget.

`__init__.pyi` lists the public names and the modules that define them.
"""

from exitwise.core.lazy import lazy_exports
from exitwise.core.version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_exports(__name__, __file__)
