"""The twelve methods of the paper's ablation, by name. No torch here: the command names them before it starts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from re import sub
from typing import Literal

from exitwise.errors import InputError

SAMPLES = 50  # Monte Carlo draws in the paper


@dataclass(frozen=True)
class Method:
    """A row of the ablation: which parts of the method are switched on."""

    laplace: bool = True
    ensemble: Literal["mie"] | None = "mie"
    tune_temperature: bool = True
    tune_prior: bool = True

    def __post_init__(self) -> None:
        for name in ("laplace", "tune_temperature", "tune_prior"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"`{name}` must be True or False, but got {getattr(self, name)!r}")
        if self.ensemble not in (None, "mie"):
            raise InputError(f"`ensemble` must be None or 'mie', but got {self.ensemble!r}")
        if self.tune_prior and not self.laplace:
            raise InputError("`tune_prior` needs `laplace`: without it there is no prior variance")

    @property
    def name(self) -> str:
        """The paper's name."""
        parts = {"MIE": self.ensemble, "Laplace": self.laplace}
        parts |= {"T_opt": self.tune_temperature, "sigma_opt": self.tune_prior}
        return " ".join(name for name, on in parts.items() if on) or "MSDNet (vanilla)"

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return sub(r"[^a-z0-9_]+", "-", self.name.lower()).strip("-")


def _all_methods() -> Iterator[Method]:
    for ensemble, laplace in product((None, "mie"), (False, True)):
        for tune_prior, tune_temperature in product((False, True) if laplace else (False,), (False, True)):
            yield Method(laplace, ensemble, tune_temperature, tune_prior)  # type: ignore[arg-type]


METHODS: Mapping[str, Method] = {method.name: method for method in _all_methods()}
VANILLA = "MSDNet (vanilla)"
OURS = "MIE Laplace T_opt sigma_opt"


def method_named(name: str) -> Method:
    """A method by the paper's name or by its slug, whatever the case."""
    by_slug = {method.slug: method for method in METHODS.values()}
    slug = sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")
    if slug not in by_slug:
        near = get_close_matches(slug, by_slug, n=1, cutoff=0.4)
        hint = f"did you mean {by_slug[near[0]].name!r}?" if near else f"known are {', '.join(map(repr, METHODS))}"
        raise InputError(f"`method` must be one of the twelve, but got {name!r}; {hint}")
    return by_slug[slug]
