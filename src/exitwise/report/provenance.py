"""Provenance of a report: everything that is needed to reproduce it."""

import shlex
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from exitwise.calibration.calibration import Calibration
from exitwise.calibration.trace import Trace
from exitwise.evaluation.bootstrap import LEVEL
from exitwise.policies.policy import Policy
from exitwise.runs.policies import PolicyOptions
from exitwise.runs.run import Run, versions

Pairs = list[tuple[str, str]]


def net_provenance(run: Run) -> Pairs:
    """Describe the net, the dataset and the training."""
    data, model = run.metadata["data"], run.metadata["model"]
    settings = {key: value for key, value in data.items() if key not in ("name", "root") and value is not None}
    pairs = [
        ("net", _join_settings(model)),
        ("dataset", f"{data['name']}{', ' * bool(settings)}{_join_settings(settings)}"),
    ]
    training = run.metadata.get("training")
    if isinstance(training, dict):
        pairs.append(("training", _join_settings(training.get("recipe") or {})))
        rest = {key: value for key, value in training.items() if key not in ("recipe", "images")}
        pairs.append(("training run", _join_settings(rest)))
    run_versions = run.metadata.get("versions")
    if isinstance(run_versions, Mapping):
        pairs.append(("run created with", _join_settings(run_versions)))
    return pairs


def _join_settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in settings.items() if value is not None)


def page_provenance(command: str) -> Pairs:
    """Describe versions, time and command that created the report itself."""
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    pairs = [("report created with", _join_settings(versions())), ("report created at", now)]
    return [*pairs, *([("command", command)] if command else [])]


def report_provenance(
    run: Run,
    trace: Trace,
    calibration: Calibration,
    command: str,
    policy: Policy | None,
    compared: int,
) -> Pairs:
    """Describe everything that is needed to reproduce the report; `compared` samples tuned the other methods."""
    sizes = f"{len(trace.val):,} validation, {len(trace.test or ()):,} test"
    temperatures = ", ".join(f"{t:.4g}" for t in calibration.temperatures)
    settings = {"draws" if key == "samples" else key: value for key, value in calibration.settings.items()}
    fit = "`auto`" if policy is None else f"`{policy.strategy}` on the score {policy.score}"
    priors = ", ".join(f"{v:.4g}" for v in calibration.prior_vars)
    few = f"tuned on {compared:,} of the validation samples, drawn with seed 0, unless the run had their calibration"
    return [
        *net_provenance(run),
        ("samples", f"{trace.num_train:,} for the curvature, {sizes}" if trace.curvature else sizes),
        ("calibration", _join_settings({"mode": calibration.mode, **settings})),
        ("temperatures", temperatures),
        *([("prior variances", priors)] if calibration.method.laplace else []),
        *([("other methods", few)] if compared < len(trace.val) else []),
        ("thresholds", f"fitted with {fit} on the validation split for every budget; evaluated on the test split"),
        ("intervals", f"{LEVEL:.0%} bootstrap intervals, 1,000 resamples of the test samples, seed 0"),
        *page_provenance(command),
        ("reproduce with", "\n".join(_list_commands(run, calibration, policy))),
    ]


def _list_commands(run: Run, calibration: Calibration, policy: Policy | None) -> Iterator[str]:
    """Yield the commands from training to the report, as far as the run's metadata records them."""
    directory = shlex.quote(run.name)
    data, training = run.metadata["data"], run.metadata.get("training")
    if isinstance(training, dict):
        recipe, model = training.get("recipe") or {}, run.metadata["model"]
        attached = model.get("attach") or {}
        cuts, max_drop = attached.get("at"), recipe.get("max_drop")
        options = {
            "data": data["name"],
            "root": "DIR" if data.get("root") else None,
            "image-size": data.get("image_size"),
            "skip-unreadable": data.get("skip_unreadable"),
            "model": model.get("preset") or model.get("module"),
            "net": model.get("net"),
            "weights": training.get("weights"),
            "attach": cuts and ",".join(cuts),
            "head": None if attached.get("head") == "mlp" else attached.get("head"),
            "last": training.get("last"),
            "distill": recipe.get("distill") or None,
            "max-drop": None if max_drop is None else f"{100 * max_drop:.10g}",
            "epochs": recipe.get("epochs"),
            "batch-size": recipe.get("batch_size"),
            "lr": recipe.get("lr"),
            "seed": training.get("seed"),
            "split-seed": data.get("split_seed"),
        }
        command = "train-heads" if training.get("freeze_backbone") else "train"
        yield f"exitwise {command} {_format_options(options)} --out {directory}"
        yield f"exitwise collect {directory} {_format_options({'net': model.get('net')})}".rstrip()
    settings = {key: calibration.settings.get(key) for key in ("samples", "seed", "search")}
    method = calibration.method.name
    yield f"exitwise calibrate {directory} {_format_options({'method': method, 'mode': calibration.mode, **settings})}"
    if policy is not None and policy.budget is not None:
        yield f"exitwise evaluate {directory} {_format_options(_evaluate_options(method, policy))}"
    yield f"exitwise report {directory} {_format_options({'method': method})}"


def _evaluate_options(method: str, policy: Policy) -> dict[str, Any]:
    """Return the options of `exitwise evaluate` that choose this policy."""
    guarantee, options = policy.guarantee, PolicyOptions.of(policy)
    loss: dict[str, Any]
    if options.max_loss is not None:
        loss = {"max-loss": f"{100 * options.max_loss:.10g}", "risk": options.risk}
        certify = None if guarantee is None else guarantee.risk_delta
    else:
        budget = {"budget": f"{policy.budget!r}{'ms' if policy.unit == 'ms' else ''}"}
        loss = {} if guarantee is None else {"max-loss": guarantee.epsilon, "risk": guarantee.risk}
        loss = {**budget, **loss}
        certify = None if guarantee is None else (guarantee.budget_delta or 0.0) + (guarantee.risk_delta or 0.0)
    return {
        **loss,
        "method": method,
        "score": policy.score,
        "strategy": policy.strategy,
        "objective": None if policy.fit is None else policy.fit.objective,
        "certify": certify,
    }


def _format_options(values: Mapping[str, Any]) -> str:
    """Format options for the command line; True becomes an option without a value, None and False are left out."""
    given = ((name, value) for name, value in values.items() if value is not None and value is not False)
    return " ".join(f"--{name}" + ("" if value is True else f" {shlex.quote(str(value))}") for name, value in given)
