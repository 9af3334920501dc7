"""The calibration methods by name: twelve of the paper's ablation, six with PoE, eight with Pool, four with dropout.

This module imports neither torch nor NumPy, because the command line needs the names to start, and starts fast.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import product
from re import search, sub
from typing import Literal

from exitwise.calibration.ensembles import ENSEMBLES
from exitwise.core.errors import InputError

DEFAULT_DRAWS = 50  # Monte Carlo draws in the paper
DEFAULT_DROPOUT_RATE = 0.5  # the rate of a method whose name contains none

VANILLA = "MSDNet (vanilla)"
OURS = "MIE Laplace T_opt sigma_opt"
AUTO: Literal["auto"] = "auto"  # not a method, but the choice of one by cross-validation


@dataclass(frozen=True)
class Method:
    """A calibration method: a row of the ablation, given by its parts.

    Args:
        laplace: Whether the last layer of every exit gets a Laplace posterior.
        ensemble: "mie" for model-internal ensembling of the exits so far, "poe" for a product of experts, "pool" for a
            product with fitted weights, None for exits that predict independently.
        tune_temperature: Whether temperatures are tuned; they are 1 otherwise.
        tune_prior: Whether prior variances are tuned; they are 2 otherwise. Needs `laplace`.
        dropout: Rate of last-layer Monte Carlo dropout, strictly between 0 and 1, or None. It replaces Laplace, and
            cannot be combined with "poe" or "pool".
        tune_weights: Whether a pool also weights the last layer of every exit anew, along directions in which features
            vary much or little. Needs `ensemble` "pool", without Laplace.

    Raises:
        InputError: An argument is invalid, or the parts cannot be combined.

    Example:
        >>> import exitwise as ew
        >>> ew.Method().name
        'MIE Laplace T_opt sigma_opt'
        >>> ew.Method(laplace=False, tune_prior=False, dropout=0.2).name
        'MIE MC dropout 0.2 T_opt'
    """

    laplace: bool = True
    ensemble: str | None = "mie"
    tune_temperature: bool = True
    tune_prior: bool = True
    dropout: float | None = None
    tune_weights: bool = False

    def __post_init__(self) -> None:
        for name in ("laplace", "tune_temperature", "tune_prior", "tune_weights"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"`{name}` must be True or False, but got {getattr(self, name)!r}")
        if self.ensemble not in (None, *ENSEMBLES):
            known = " or ".join(map(repr, ENSEMBLES))
            raise InputError(f"`ensemble` must be None, {known}, but got {self.ensemble!r}")
        if self.tune_prior and not self.laplace:
            raise InputError("`tune_prior` needs `laplace`: without it there is no prior variance")
        if self.tune_weights and (self.laplace or self.ensemble != "pool"):
            conflict = "`laplace`" if self.laplace else f"`ensemble` {self.ensemble!r}"
            raise InputError(f"`tune_weights` needs `ensemble` 'pool' without Laplace, but got {conflict}")
        if self.dropout is None:
            return
        if not isinstance(self.dropout, float) or not 0 < self.dropout < 1:
            raise InputError(f"`dropout` must be None or a rate between 0 and 1, but got {self.dropout!r}")
        if self.laplace or not self._is_elementwise:
            conflict = "`laplace`" if self.laplace else f"`ensemble` {self.ensemble!r}"
            raise InputError(f"`dropout` cannot be combined with {conflict}: choose one of them")

    @property
    def name(self) -> str:
        """The paper's name of the method, or a name built by the same rule."""
        dropout = "MC dropout" if self.dropout == DEFAULT_DROPOUT_RATE else f"MC dropout {self.dropout}"
        parts = {
            "Laplace": self.laplace,
            dropout: self.dropout is not None,
            "T_opt": self.tune_temperature,
            "sigma_opt": self.tune_prior,
            "W_opt": self.tune_weights,
        }
        ensemble = [ENSEMBLES[self.ensemble].label] if self.ensemble else []
        return " ".join([*ensemble, *(part for part, enabled in parts.items() if enabled)]) or VANILLA

    @property
    def slug(self) -> str:
        """The name in the form of a file name."""
        return _make_slug(self.name)

    @property
    def has_variance(self) -> bool:
        """True if predictions have a variance over draws; products of experts and pools have none, they join means."""
        return (self.laplace or self.dropout is not None) and self._is_elementwise

    @property
    def keeps_classes(self) -> bool:
        """True if every exit predicts the same class as without calibration: temperature alone changes none."""
        return not self.laplace and self.ensemble is None and self.dropout is None

    @property
    def _is_elementwise(self) -> bool:
        """True if the ensemble combines each class separately, or if there is no ensemble."""
        return self.ensemble is None or ENSEMBLES[self.ensemble].is_elementwise


def _make_slug(name: str) -> str:
    return sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")


def _iter_methods(*ensembles: str | None) -> Iterator[Method]:
    """Iterate over all combinations of Laplace and tuning, without dropout, in the order of the paper's table."""
    for ensemble, laplace in product(ensembles, (False, True)):
        for tune_prior, tune_temperature in product((False, True) if laplace else (False,), (False, True)):
            yield Method(laplace, ensemble, tune_temperature, tune_prior)


def _by_name(methods: Iterator[Method]) -> dict[str, Method]:
    return {method.name: method for method in methods}


METHODS: Mapping[str, Method] = _by_name(_iter_methods(None, "mie"))
POE_METHODS: Mapping[str, Method] = _by_name(_iter_methods("poe"))  # not in the paper
_OTHER_METHODS = _by_name(_iter_methods(*(name for name in ENSEMBLES if name != "mie"))) | _by_name(
    replace(method, tune_weights=True) for method in _iter_methods("pool") if not method.laplace
)
DROPOUT_METHODS: Mapping[str, Method] = _by_name(  # the paper reports only their cost
    replace(method, dropout=DEFAULT_DROPOUT_RATE) for method in METHODS.values() if not method.laplace
)


MethodChoice = Method | Literal["auto"]


def is_auto(name: str) -> bool:
    """Return whether a name asks for the choice of a method."""
    return name.strip().lower() == AUTO


def parse_method(name: str) -> MethodChoice:
    """Return a method by its name, or `AUTO`."""
    return AUTO if is_auto(name) else get_method(name)


def get_method(name: str) -> Method:
    """Return a method by its name or slug, in upper or lower case; "MC dropout" may be followed by a rate."""
    methods = {**METHODS, **_OTHER_METHODS, **DROPOUT_METHODS}
    by_slug = {method.slug: method for method in methods.values()}
    rate = search(r"(?i)(?<=dropout) +(\d*\.?\d+(e-\d+)?)", name)
    slug = _make_slug(name.replace(rate[0], "") if rate else name)
    if slug not in by_slug:
        nearest = get_close_matches(slug, by_slug, n=1, cutoff=0.4)
        known = f"for example 'auto', 'Pool W_opt', {OURS!r}, 'T_opt', 'PoE T_opt' or 'MC dropout T_opt'"
        hint = f"did you mean {by_slug[nearest[0]].name!r}?" if nearest else known
        kinds = "one of the paper's twelve, of the six with PoE, of the eight with Pool or of the four with MC dropout"
        raise InputError(f"`method` must be {kinds}, but got {name!r}; {hint}")
    return replace(by_slug[slug], dropout=float(rate[1])) if rate else by_slug[slug]
