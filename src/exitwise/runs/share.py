"""Share the classifier of a run, in a folder or on the Hugging Face Hub, with a model card filled from the run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitwise.calibration.trace import Trace
from exitwise.core.errors import InputError
from exitwise.evaluation.evaluate import budget_curve, evaluate
from exitwise.runs.deploy import build_classifier, costs_of_policy, fit_policies
from exitwise.runs.options import ClassifierOptions
from exitwise.runs.run import Run
from exitwise.runtime.classifier import Classifier
from exitwise.runtime.hub import ADAPTER_FILE, read_config, require_hub


@dataclass(frozen=True)
class ShareOptions:
    """Contents and target of what is shared.

    Args:
        to_hub: Upload to a repository of the Hub, instead of a folder.
        whole: Write all weights (True) or an adapter (False). None: an adapter if the base network has the pretrained
            weights of its library, which others can load, too.
        bundle: Add an ONNX bundle.
        about: Description of the data, for the model card, beside the numbers of samples.
        private: Make a new repository private.
    """

    to_hub: bool
    whole: bool | None
    bundle: bool
    about: str | None
    private: bool


def share_run(run: Run, target: str, options: ShareOptions, chosen: ClassifierOptions, function: str | None) -> str:
    """Write or upload the classifier of a run; return what was done, as text for messages.

    Args:
        run: The run.
        target: A folder, or the name of a repository.
        options: What is shared, and where.
        chosen: Choice of the classifier, as for a bundle.
        function: The user's own net.
    """
    require_hub()
    if not options.to_hub:
        _check_folder(Path(target))
    classifier, _ = build_classifier(run, chosen, function)
    whole = options.whole
    if whole is None and run.metadata.get("training", {}).get("weights") != "pretrained":
        whole = True  # others do not have the file of weights
    arguments: dict[str, Any] = {"whole": whole, "bundle": options.bundle, **_measure(run, classifier, options.about)}
    if options.to_hub:
        address = classifier.push_to_hub(target, private=options.private or None, **arguments)
        return f"Uploaded to {address}. Others load it with exitwise.Classifier.from_pretrained({target!r})"
    classifier.save_pretrained(target, **arguments)
    holds = "an adapter, without its base network" if (Path(target) / ADAPTER_FILE).is_file() else "all weights"
    return f"{target} holds {holds}. Load it with exitwise.Classifier.from_pretrained({target!r})"


def _check_folder(folder: Path) -> None:
    """Raise InputError for a folder with other files than those of a shared classifier."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    try:
        read_config(folder)
    except InputError:
        raise InputError(f"{folder} holds other files than a shared classifier: name a new folder") from None


def _measure(run: Run, classifier: Classifier, about: str | None) -> dict[str, Any]:
    """Return description of the data, evaluation and budget curve on test samples, for the model card."""
    if not run.has_trace:
        return {"data": about}
    trace = run.trace()
    measured: dict[str, Any] = {"data": _describe_data(run, trace, about)}
    if trace.test is None:
        return measured
    preds, costs = classifier.calibration.predict(trace.test), costs_of_policy(run, classifier.policy)
    labels = trace.test.labels
    measured["evaluation"] = evaluate(preds, labels=labels, policy=classifier.policy, costs=costs)
    policies, _ = fit_policies(run, classifier, "the card")
    if policies:
        measured["curve"] = budget_curve(preds, labels=labels, policies=policies, costs=costs)
    return measured


def _describe_data(run: Run, trace: Trace, about: str | None) -> str:
    """Describe the samples of a run, without the path of its folder."""
    kind, colon, path = str(run.metadata["data"]["name"]).partition(":")
    source = f"Images of the folder {Path(path).name}" if colon else f"The dataset {kind}"
    counts = [f"{trace.num_train:,} for training"] if trace.num_train else []
    counts.append(f"{len(trace.val):,} for calibration and thresholds")
    counts.append("none for testing" if trace.test is None else f"{len(trace.test):,} for testing")
    return f"{'' if about is None else f'{about} '}{source}: {', '.join(counts)}."
