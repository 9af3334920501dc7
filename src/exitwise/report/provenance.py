"""Where a report comes from: what it takes to make it again."""

import shlex
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from exitwise.calibration.calibration import Calibration
from exitwise.calibration.trace import Trace
from exitwise.evaluation.bootstrap import LEVEL
from exitwise.runs.run import Run, versions

Pairs = list[tuple[str, str]]


def net_provenance(run: Run) -> Pairs:
    """Where the net and its data come from."""
    about, model = run.metadata["data"], run.metadata["model"]
    pairs = [("net", _words(model))]
    kept = {key: value for key, value in about.items() if key not in ("name", "root") and value is not None}
    pairs.append(("data set", f"{about['name']}{', ' * bool(kept)}{_words(kept)}"))
    training = run.metadata.get("training")
    if isinstance(training, dict):
        recipe = training.get("recipe") or {}
        pairs.append(("training", _words(recipe)))
        rest = {key: value for key, value in training.items() if key not in ("recipe", "images")}
        pairs.append(("training run", _words(rest)))
    used = run.metadata.get("versions")
    if isinstance(used, Mapping):
        pairs.append(("run made with", _words(used)))
    return pairs


def _words(pairs: Mapping[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in pairs.items() if value is not None)


def page_provenance(command: str) -> Pairs:
    """When and with what the report itself was made."""
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    pairs = [("report made with", _words(versions())), ("report made at", now)]
    return [*pairs, *([("command", command)] if command else [])]


def report_provenance(run: Run, trace: Trace, calibration: Calibration, command: str) -> Pairs:
    """Everything that is needed to make the report again."""
    sizes = f"{len(trace.val):,} validation, {len(trace.test or ()):,} test"
    temperatures = ", ".join(f"{t:.4g}" for t in calibration.temperatures)
    priors = ", ".join(f"{v:.4g}" for v in calibration.prior_vars)
    return [
        *net_provenance(run),
        ("samples", f"{trace.curvature[0].n:,} for the curvature, {sizes}"),
        ("calibration", _words({"mode": calibration.mode, **calibration.settings})),
        ("temperatures", temperatures),
        *([("prior variances", priors)] if calibration.method.laplace else []),
        ("thresholds", "by `auto` on the validation split, for every budget of the slider; measured on the test split"),
        ("intervals", f"{LEVEL:.0%} bootstrap intervals, 1,000 draws of the test samples, seed 0"),
        *page_provenance(command),
        ("to make it again", "\n".join(_commands(run, calibration))),
    ]


def _commands(run: Run, calibration: Calibration) -> Iterator[str]:
    """From nothing to the report, as far as the run knows."""
    place = shlex.quote(run.name)
    data, training = run.metadata["data"], run.metadata.get("training")
    if isinstance(training, dict):
        recipe, model = training.get("recipe") or {}, run.metadata["model"]
        cuts = (model.get("attach") or {}).get("at")
        options = {
            "data": data["name"],
            "root": "DIR" if data.get("root") else None,
            "image-size": data.get("image_size"),
            "skip-unreadable": data.get("skip_unreadable"),
            "model": model.get("preset"),
            "net": model.get("net"),
            "freeze-backbone": training.get("freeze_backbone"),
            "weights": training.get("weights"),
            "attach": cuts and ",".join(cuts),
            "last": training.get("last"),
            "distill": recipe.get("distill"),
            "epochs": recipe.get("epochs"),
            "batch-size": recipe.get("batch_size"),
            "lr": recipe.get("lr"),
            "seed": training.get("seed"),
            "split-seed": data.get("split_seed"),
        }
        yield f"exitwise train {_options(options)} --out {place}"
        yield f"exitwise collect {place} {_options({'net': model.get('net')})}".rstrip()
    settings = {key: calibration.settings.get(key) for key in ("samples", "seed", "search")}
    method = calibration.method.name
    yield f"exitwise calibrate {place} {_options({'method': method, 'mode': calibration.mode, **settings})}"
    yield f"exitwise report {place} {_options({'method': method})}"


def _options(values: Mapping[str, Any]) -> str:
    """As they are given on the command line; True is an option without a value."""
    given = ((name, value) for name, value in values.items() if value is not None and value is not False)
    return " ".join(f"--{name}" + ("" if value is True else f" {shlex.quote(str(value))}") for name, value in given)
