"""The result of `method="auto"`: what was chosen, and what the other methods got."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from exitwise.calibration.methods import get_method
from exitwise.core.errors import InputError


@dataclass(frozen=True)
class MethodSelection:
    """Choice of `method="auto"`, with the scores of all candidates.

    Args:
        chosen: Name of the chosen method.
        nlpd: Cross-validated NLPD of every candidate, averaged over exits.
        standard_errors: Standard error of the difference of each candidate's NLPD to the lowest one.
        samples: Number of validation samples.
        folds: Number of folds; 0 if there were too few samples for a cross-validation.
    """

    chosen: str
    nlpd: Mapping[str, float]
    standard_errors: Mapping[str, float]
    samples: int
    folds: int

    def __str__(self) -> str:
        if not self.folds:
            return f"auto takes {self.chosen}: {self.samples} validation samples are too few to compare methods"
        others = [name for name in sorted(self.nlpd, key=lambda name: self.nlpd[name]) if name != self.chosen]
        best = min(self.nlpd, key=lambda name: self.nlpd[name])
        rule = "" if best == self.chosen else f" (within one standard error of {best}, and simpler)"
        listed = ", ".join(f"{name} {self.nlpd[name]:.4f}" for name in others)
        score = f"cross-validated NLPD {self.nlpd[self.chosen]:.4f}"
        return f"auto chose {self.chosen}{rule}: {score}; {listed}" if listed else f"auto chose {self.chosen}: {score}"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON-serializable dict."""
        return {**asdict(self), "nlpd": dict(self.nlpd), "standard_errors": dict(self.standard_errors)}

    @classmethod
    def from_dict(cls, data: Any) -> "MethodSelection":
        """Read and check the result of `to_dict`."""
        try:
            selection = cls(**data)
            numbers = [*selection.nlpd.values(), *selection.standard_errors.values()]
            is_valid = all(isinstance(number, int | float) for number in (*numbers, selection.samples, selection.folds))
        except (AttributeError, TypeError):
            is_valid = False
        if not is_valid:
            raise InputError(f"`selection` must be a choice among methods with their NLPD, but is {data!r}")
        get_method(selection.chosen)
        return selection
