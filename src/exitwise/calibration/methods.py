"""The twelve methods of the paper's ablation, and those beside them, by name.

No torch here: the command names them before it starts.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import product
from re import search, sub
from typing import Literal

from exitwise.core.errors import InputError

DEFAULT_DRAWS = 50  # Monte Carlo draws in the paper
DEFAULT_DROPOUT_RATE = 0.5  # the rate that a name stands for when it says none

# Model-internal ensembling is a weighted mean of the exits' probabilities; a product of experts is one of their
# logarithms, with the same weights.
Ensemble = Literal["mie", "poe"]
_ENSEMBLES: Mapping[Ensemble, str] = {"mie": "MIE", "poe": "PoE"}


@dataclass(frozen=True)
class Method:
    """A row of the ablation: which parts of the method are switched on.

    `dropout` is the rate of last-layer Monte Carlo dropout, which takes the place of Laplace.
    """

    laplace: bool = True
    ensemble: Ensemble | None = "mie"
    tune_temperature: bool = True
    tune_prior: bool = True
    dropout: float | None = None

    def __post_init__(self) -> None:
        for name in ("laplace", "tune_temperature", "tune_prior"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"`{name}` must be True or False, but got {getattr(self, name)!r}")
        if self.ensemble not in (None, *_ENSEMBLES):
            raise InputError(f"`ensemble` must be None, 'mie' or 'poe', but got {self.ensemble!r}")
        if self.tune_prior and not self.laplace:
            raise InputError("`tune_prior` needs `laplace`: without it there is no prior variance")
        if self.dropout is None:
            return
        if not isinstance(self.dropout, float) or not 0 < self.dropout < 1:
            raise InputError(f"`dropout` must be None or a rate between 0 and 1, but got {self.dropout!r}")
        if self.laplace or self.ensemble == "poe":
            other = "`laplace`" if self.laplace else "`ensemble` 'poe'"
            raise InputError(f"`dropout` does not go with {other}: choose one of them")

    @property
    def name(self) -> str:
        """The paper's name, or one made like it."""
        dropout = "MC dropout" if self.dropout == DEFAULT_DROPOUT_RATE else f"MC dropout {self.dropout}"
        parts = {
            "Laplace": self.laplace,
            dropout: self.dropout is not None,
            "T_opt": self.tune_temperature,
            "sigma_opt": self.tune_prior,
        }
        first = [_ENSEMBLES[self.ensemble]] if self.ensemble else []
        return " ".join([*first, *(name for name, on in parts.items() if on)]) or "MSDNet (vanilla)"

    @property
    def slug(self) -> str:
        """The name as a file name."""
        return _slug(self.name)

    @property
    def has_variance(self) -> bool:
        """Whether there is a variance over draws: a product of experts multiplies means, not draws."""
        return (self.laplace or self.dropout is not None) and self.ensemble != "poe"


def _slug(name: str) -> str:
    return sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")


def _all_methods(*ensembles: Ensemble | None) -> Iterator[Method]:
    for ensemble, laplace in product(ensembles, (False, True)):
        for tune_prior, tune_temperature in product((False, True) if laplace else (False,), (False, True)):
            yield Method(laplace, ensemble, tune_temperature, tune_prior)


METHODS: Mapping[str, Method] = {method.name: method for method in _all_methods(None, "mie")}
POE_METHODS: Mapping[str, Method] = {method.name: method for method in _all_methods("poe")}  # not in the paper
_DROPPED = (replace(method, dropout=DEFAULT_DROPOUT_RATE) for method in METHODS.values() if not method.laplace)
DROPOUT_METHODS: Mapping[str, Method] = {method.name: method for method in _DROPPED}  # the paper has their cost alone
VANILLA = "MSDNet (vanilla)"
OURS = "MIE Laplace T_opt sigma_opt"


def get_method(name: str) -> Method:
    """A method by its name or by its slug, whatever the case; a rate may follow MC dropout."""
    known = {**METHODS, **POE_METHODS, **DROPOUT_METHODS}
    by_slug = {method.slug: method for method in known.values()}
    rate = search(r"(?i)(?<=dropout) +(\d*\.?\d+(e-\d+)?)", name)
    slug = _slug(name.replace(rate[0], "") if rate else name)
    if slug not in by_slug:
        near = get_close_matches(slug, by_slug, n=1, cutoff=0.4)
        hint = f"did you mean {by_slug[near[0]].name!r}?" if near else f"known are {', '.join(map(repr, known))}"
        kinds = "one of the paper's twelve, of the six with PoE or of the four with MC dropout"
        raise InputError(f"`method` must be {kinds}, but got {name!r}; {hint}")
    return replace(by_slug[slug], dropout=float(rate[1])) if rate else by_slug[slug]
