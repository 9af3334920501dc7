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
from exitwise.policies.policy import Policy

FORMAT, VERSION = "exitwise.chosen", 1


@dataclass(frozen=True, eq=False)
class ChosenClassifier:
    """A calibration and a policy fitted on its predictions; with the run's net they make a `Classifier`."""

    calibration: Calibration
    policy: Policy
    classes: tuple[str, ...] | None = None

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
            {"calibration": metadata, "policy": self.policy.to_dict(), "classes": classes},
        )

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
        return cls(calibration, policy, None if classes is None else tuple(classes))
