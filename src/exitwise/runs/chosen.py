"""The chosen classifier of a run: the calibration and the policy of its last `exitwise evaluate`, in one file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from exitwise.calibration.calibration import Calibration
from exitwise.core import tensorfiles
from exitwise.core.costs import format_cost
from exitwise.core.errors import InputError
from exitwise.policies.abstention import Abstention
from exitwise.policies.policy import Policy
from exitwise.policies.prediction_sets import PredictionSets, check_fitted_for

FORMAT, VERSION = "exitwise.chosen", 1


@dataclass(frozen=True, eq=False)
class ChosenClassifier:
    """A calibration and a policy fitted on its predictions; with the run's net they make a `Classifier`.

    Prediction sets and an abstention are there if `exitwise evaluate` fitted them.
    """

    calibration: Calibration
    policy: Policy
    classes: tuple[str, ...] | None = None
    sets: PredictionSets | None = None
    abstention: Abstention | None = None

    def describe(self) -> str:
        """Return method, budget, score and guarantee as a phrase."""
        policy = self.policy
        parts = [self.calibration.method.name]
        if policy.budget is not None:
            parts.append(f"budget {format_cost(policy.budget, policy.unit)}")
        parts.append(f"{policy.score} thresholds by {policy.strategy}")
        if policy.fit is not None and policy.fit.max_loss is not None:
            parts.append(f"at most {100 * policy.fit.max_loss:.4g} points of loss")
        if policy.guarantee is not None:
            parts.append("certified")
        if self.sets is not None:
            parts.append(f"sets of {100 * self.sets.coverage:g} % coverage")
        if self.abstention is not None:
            kind = f"share {self.abstention.share:.4g}" if self.abstention.risk is None else "certified risk"
            parts.append(f"abstention ({kind})")
        return ", ".join(parts)

    def save(self, path: Path) -> None:
        """Write calibration and policy to one safetensors file."""
        tensors, metadata = self.calibration.to_tensors()
        classes = None if self.classes is None else list(self.classes)
        tensorfiles.write(
            path,
            tensors,
            FORMAT,
            VERSION,
            {"calibration": metadata, "policy": self.policy.to_dict(), "classes": classes, **self._answers()},
        )

    def _answers(self) -> dict[str, Any]:
        """Return sets and abstention for the file, omitting None, as in files of earlier versions."""
        fitted = {"sets": self.sets, "abstention": self.abstention}
        return {name: value.to_dict() for name, value in fitted.items() if value is not None}

    @classmethod
    def load(cls, path: Path) -> "ChosenClassifier":
        """Read and check the file that `save` wrote."""
        return tensorfiles.load(path, FORMAT, VERSION, cls._from_tensors)

    @classmethod
    def _from_tensors(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> "ChosenClassifier":
        calibration = Calibration.from_tensors(tensors, metadata["calibration"])
        policy = Policy.from_dict(metadata["policy"])
        exits, thresholds = len(calibration.exits), len(policy.thresholds)
        if thresholds != exits:
            raise InputError(f"its policy must have {exits} thresholds, one per exit, but has {thresholds}")
        classes = metadata["classes"]
        if classes is not None and (not isinstance(classes, list) or not all(isinstance(n, str) for n in classes)):
            raise InputError(f"classes must be a list of names or null, but is {classes!r}")
        sets, abstention = metadata.get("sets"), metadata.get("abstention")
        sets = None if sets is None else PredictionSets.from_dict(sets)
        abstention = None if abstention is None else Abstention.from_dict(abstention)
        for fitted in (sets, abstention):
            if fitted is not None:
                check_fitted_for(fitted, policy)
        return cls(calibration, policy, None if classes is None else tuple(classes), sets, abstention)
