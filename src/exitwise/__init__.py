"""exitwise: early-exit networks that can be trusted under a compute budget."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from exitwise import data as data
    from exitwise import metrics as metrics
    from exitwise import models as models
    from exitwise import runtime as runtime
    from exitwise import zoo as zoo
    from exitwise.calibration import Calibration as Calibration
    from exitwise.certificates import Certificate as Certificate
    from exitwise.certificates import Guarantee as Guarantee
    from exitwise.certificates import NotCertifiedError as NotCertifiedError
    from exitwise.checkpoint import load_checkpoint as load_checkpoint
    from exitwise.checkpoint import load_net as load_net
    from exitwise.checkpoint import save_checkpoint as save_checkpoint
    from exitwise.collector import collect as collect
    from exitwise.controller import BudgetController as BudgetController
    from exitwise.cost import macs as macs
    from exitwise.costs import Costs as Costs
    from exitwise.errors import InputError as InputError
    from exitwise.evaluation import BudgetCurve as BudgetCurve
    from exitwise.evaluation import Evaluation as Evaluation
    from exitwise.evaluation import budget_curve as budget_curve
    from exitwise.evaluation import evaluate as evaluate
    from exitwise.fitting import fit_policies as fit_policies
    from exitwise.fitting import fit_policy as fit_policy
    from exitwise.heads import train_heads as train_heads
    from exitwise.machine import Machine as Machine
    from exitwise.methods import METHODS as METHODS
    from exitwise.methods import Method as Method
    from exitwise.models.attach import attach as attach
    from exitwise.net import Head as Head
    from exitwise.net import MultiExitNet as MultiExitNet
    from exitwise.policy import Policy as Policy
    from exitwise.policy import sweep as sweep
    from exitwise.predictions import Predictions as Predictions
    from exitwise.preprocessing import Preprocessing as Preprocessing
    from exitwise.recipes import RECIPES as RECIPES
    from exitwise.recipes import Recipe as Recipe
    from exitwise.runtime.classifier import Classifier as Classifier
    from exitwise.runtime.engine import Answer as Answer
    from exitwise.runtime.engine import Prediction as Prediction
    from exitwise.tables import Table as Table
    from exitwise.tables import ablation as ablation
    from exitwise.tables import decision_experiment as decision_experiment
    from exitwise.trace import Split as Split
    from exitwise.trace import Trace as Trace
    from exitwise.training import train as train
    from exitwise.tune import calibrate as calibrate

# Public names and where they live, imported when first used: policies and predictions work where torch is absent.
# No module has the name of a function in it, or importing that module would hide the function.
_HOMES = {
    "METHODS": "methods",
    "RECIPES": "recipes",
    "Answer": "runtime.engine",
    "BudgetController": "controller",
    "BudgetCurve": "evaluation",
    "Calibration": "calibration",
    "Certificate": "certificates",
    "Classifier": "runtime.classifier",
    "Costs": "costs",
    "Evaluation": "evaluation",
    "Guarantee": "certificates",
    "Head": "net",
    "InputError": "errors",
    "Machine": "machine",
    "Method": "methods",
    "MultiExitNet": "net",
    "NotCertifiedError": "certificates",
    "Policy": "policy",
    "Prediction": "runtime.engine",
    "Predictions": "predictions",
    "Preprocessing": "preprocessing",
    "Recipe": "recipes",
    "Split": "trace",
    "Table": "tables",
    "Trace": "trace",
    "ablation": "tables",
    "attach": "models.attach",
    "budget_curve": "evaluation",
    "calibrate": "tune",
    "collect": "collector",
    "decision_experiment": "tables",
    "evaluate": "evaluation",
    "fit_policies": "fitting",
    "fit_policy": "fitting",
    "load_checkpoint": "checkpoint",
    "load_net": "checkpoint",
    "macs": "cost",
    "save_checkpoint": "checkpoint",
    "sweep": "policy",
    "train": "training",
    "train_heads": "heads",
}
_MODULES = ("data", "metrics", "models", "runtime", "zoo")

__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"exitwise.{name}")
    if name in _HOMES:
        return getattr(import_module(f"exitwise.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'exitwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
