"""What an early-exit net costs when the traffic changes: corrupted pictures, and pictures made to slow it down.

usage: drift.py CIFAR100_DIR [--out runs/drift]

Thresholds are fitted on clean validation pictures for half of the full cost. Then real test pictures come, worse and
worse (corruptions.py), or attacked by projected gradient so that no exit is sure of them; with thresholds as they are,
and with `ew.BudgetController` moving them. The net runs once over each kind of picture: its features are kept in OUT,
and a second call goes on from there. Results and the figure go to experiments/drift; pictures are kept nowhere.
"""

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from corruptions import CORRUPTIONS, STRENGTHS
from numpy.typing import NDArray
from results import machine, rounded
from slowdown import (
    CHUNK,
    EPSILON,
    HOT,
    STEP,
    STEPS,
    LogConfidences,
    attacked_features,
    check_white_box,
    hot_log_confidences,
    log_confidences,
    white_box,
)
from torch import Tensor

import exitwise as ew
from exitwise.core import tensorfiles
from exitwise.core.files import write_json
from exitwise.core.seeds import derive_generator
from exitwise.data import cifar
from exitwise.data.batches import Normalize
from exitwise.data.images import ImageSet
from exitwise.policies.scores import exit_scores

HERE = Path(__file__).parent
FORMAT, VERSION = "exitwise.drift", 1

METHODS = {"vanilla": "MSDNet (vanilla)", "ours": "MIE Laplace T_opt sigma_opt"}
BUDGET = 0.5  # of the last exit's cost
SEED = 0

# Part A. Severity 0 is the picture as it is.
SEVERITIES = (0, 1, 2, 3, 4, 5, 0)
BATCHES, BATCH_SIZE = 40, 64  # of each severity
STREAMS = 20  # with other samples each: one stream alone is noisy
WINDOW, BAND = 20, 0.02  # settled: the mean over so many batches stays so close to the budget

# Part B
ATTACKED, ATTACK_BATCH, ROUNDS = 500, 50, 20

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Model:
    """The net's exits calibrated one way, with thresholds for the budget."""

    calibration: ew.Calibration
    policy: ew.Policy

    @classmethod
    def of(cls, trace: ew.Trace, method: str) -> "Model":
        calibration = ew.calibrate(trace, method, seed=SEED)
        budget = BUDGET * trace.costs.values[-1]
        said = calibration.predict(trace.val)
        policy = ew.fit_policy(said, labels=trace.val.labels, costs=trace.costs, budget=budget)
        return cls(calibration, policy)

    @property
    def costs(self) -> Array:
        return np.asarray(self.policy.costs)

    @property
    def budget(self) -> float:
        return BUDGET * float(self.costs[-1])

    def said(self, features: Sequence[Tensor], labels: Tensor) -> "Said":
        preds = self.calibration.predict(features)
        return Said(exit_scores(preds, self.policy.score), preds.predicted == labels.numpy())

    def refitted(self, features: Sequence[Tensor]) -> ew.Policy:
        """Thresholds that meet the budget on these pictures; fitted by labels they would spend less on bad ones."""
        preds = self.calibration.predict(features)
        return ew.fit_policy(preds, costs=self.costs.tolist(), budget=self.budget, strategy="geometric")


@dataclass(frozen=True, eq=False)
class Said:
    """All that a stream needs of predictions, both (K, n): the score, which is the confidence, and what is right."""

    confidence: Array
    right: Array

    def __getitem__(self, rows: Any) -> "Said":
        return Said(self.confidence[:, rows], self.right[:, rows])

    @classmethod
    def joined(cls, parts: Iterable["Said"]) -> "Said":
        pairs = [(part.confidence, part.right) for part in parts]
        return cls(*(np.concatenate(arrays, axis=1) for arrays in zip(*pairs, strict=True)))


class Steering(Protocol):
    """What sets the thresholds of the next batch; `ew.BudgetController` is one."""

    @property
    def policy(self) -> ew.Policy: ...
    def update(self, exits: Array, scores: Array | None = None) -> Any: ...


@dataclass
class Fixed:
    policy: ew.Policy

    def update(self, exits: Array, scores: Array | None = None) -> None:
        """Nothing is learnt."""


@dataclass
class Refitted:
    """What nobody has at run time: thresholds fitted to the very pictures of each severity, from its first batch on."""

    policies: Sequence[ew.Policy]
    batches: int = 0

    @property
    def policy(self) -> ew.Policy:
        return self.policies[self.batches // BATCHES]

    def update(self, exits: Array, scores: Array | None = None) -> None:
        self.batches += 1


def play(said: Said, batch_size: int, steering: Steering, model: Model) -> Array:
    """(2, batches) mean cost, in budgets, and accuracy of every batch of a stream, its samples in their order."""
    cost, top1 = [], []
    for start in range(0, said.confidence.shape[1], batch_size):
        batch = said[start : start + batch_size]
        exits = steering.policy.exits_from_scores(batch.confidence)
        at = (exits, np.arange(len(exits)))
        steering.update(exits, batch.confidence[at])
        cost.append(model.costs[exits].mean() / model.budget)
        top1.append(batch.right[at].mean())
    return np.array([cost, top1])


# Features, each kind of picture once


def kept(path: Path, made_from: Mapping[str, Any], make: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Features (n, p) of every exit: made once and kept as float16, and made again if made from something else."""
    if path.is_file():
        tensors, header = tensorfiles.read(path)
        if tensorfiles.check_format(path, header, FORMAT, VERSION)["made_from"] == made_from:
            return [tensors[f"features.{k}"].float() for k in range(len(tensors))]
    features = [x.half() for x in make()]
    tensors = {f"features.{k}": x for k, x in enumerate(features)}
    tensorfiles.write(path, tensors, FORMAT, VERSION, {"made_from": made_from})
    print(path, flush=True)
    return [x.float() for x in features]


def corrupted_features(net: ew.MultiExitNet, test: ImageSet, name: str, severity: int) -> list[Tensor]:
    normalize, parts = Normalize(test), []
    generator = derive_generator(SEED, list(CORRUPTIONS).index(name), severity)
    with torch.no_grad():
        for pixels in test.pixels.split(250):
            worse = CORRUPTIONS[name](pixels, severity, generator) if severity else pixels
            parts.append(net.features(normalize(worse).contiguous(memory_format=torch.channels_last)))
    return [torch.cat(rows) for rows in zip(*parts, strict=True)]


# Part A: corruptions


def order_of(stream: int, corruption: int, samples: int) -> list[Array]:
    """Which samples each severity of a stream shows, none twice in one severity."""
    generators = [derive_generator(SEED, stream, corruption, place) for place in range(len(SEVERITIES))]
    return [torch.randperm(samples, generator=each)[: BATCHES * BATCH_SIZE].numpy() for each in generators]


def streams(model: Model, heard: Sequence[Said], refitted: Sequence[ew.Policy], corruption: int) -> dict[str, Array]:
    """(STREAMS, 2, batches) of each steering: cost in budgets, and accuracy. `heard`, `refitted`: by severity."""
    found: dict[str, list[Array]] = {}
    for stream in range(STREAMS):
        order = order_of(stream, corruption, heard[0].right.shape[1])
        whole = Said.joined(heard[severity][rows] for severity, rows in zip(SEVERITIES, order, strict=True))
        steerings: dict[str, Steering] = {
            "fixed": Fixed(model.policy),
            "controlled": ew.BudgetController(model.policy, model.budget),
            "refitted": Refitted([refitted[severity] for severity in SEVERITIES]),
        }
        for name, steering in steerings.items():
            found.setdefault(name, []).append(play(whole, BATCH_SIZE, steering, model))
    return {name: np.stack(runs) for name, runs in found.items()}


def running_mean(cost: Array) -> Array:
    """Over the last WINDOW batches, or as many as there were."""
    sums = np.concatenate([[0.0], cost.cumsum()])
    after = np.arange(1, len(sums))
    before = np.maximum(after - WINDOW, 0)
    return np.asarray((sums[after] - sums[before]) / (after - before))


def batches_to_settle(cost: Array, place: int) -> float:
    """After how many batches of a severity the running mean is in the band for good: 1 if always, inf if never."""
    running = running_mean(cost)[place * BATCHES : (place + 1) * BATCHES]
    outside = np.flatnonzero(np.abs(running - 1) > BAND)
    if not len(outside):
        return 1
    return inf if outside[-1] == BATCHES - 1 else float(outside[-1]) + 2


def settling(costs: Array, place: int) -> dict[str, Any]:
    """Over streams (STREAMS, batches); a median of null means that more than half do not settle."""
    times = [batches_to_settle(cost, place) for cost in costs]
    median, longest = float(np.median(times)), max(times)
    return {
        "median": median if median < inf else None,
        "longest": longest if longest < inf else None,
        "share_settled": float(np.mean(np.isfinite(times))),
    }


def summary(runs: Mapping[str, Array]) -> dict[str, Any]:
    """Of the streams of one model and corruption; costs are in budgets, means over all streams."""
    rows: list[dict[str, Any]] = []
    highest: dict[str, list[float]] = {name: [] for name in runs}
    for place, severity in enumerate(SEVERITIES):
        row: dict[str, Any] = {"severity": severity}
        for name, run in runs.items():
            of_streams = run[:, :, place * BATCHES : (place + 1) * BATCHES].mean(axis=2)  # (STREAMS, 2)
            cost, top1 = of_streams.mean(axis=0)
            row[name] = {"cost": cost, "top1": top1}
            if place:  # at the start nothing has changed
                row[name]["batches_to_settle"] = settling(run[:, 0], place)
            highest[name].append(float(of_streams[:, 0].max()))
        row["top1_given_up"] = row["fixed"]["top1"] - row["controlled"]["top1"]
        rows.append(row)
    overruns = {
        name: {"mean": max(row[name]["cost"] for row in rows) - 1, "of_any_stream": max(highest[name]) - 1}
        for name in runs
    }
    return {"worst_overrun": overruns, "severities": rows}


def figure(runs: Mapping[str, Mapping[str, Mapping[str, Array]]], path: Path) -> None:
    """Cost over batches, a panel per corruption: means over the streams, batch by batch."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {"svg.fonttype": "path", "svg.hashsalt": "exitwise", "font.size": 10, "font.family": "sans-serif"}
    )
    # Blue and vermilion of Okabe and Ito: told apart by every kind of eye, and by lightness.
    colours = {"vanilla": "#D55E00", "ours": "#0072B2"}
    lines = {"fixed": ("--", 1.2, "thresholds as fitted"), "controlled": ("-", 1.6, "with controller")}
    panels, axes = plt.subplots(len(runs), 1, figsize=(9, 8.5), sharex=True, sharey=True, layout="constrained")
    for ax, (corruption, models) in zip(axes, runs.items(), strict=True):
        for place, severity in enumerate(SEVERITIES):
            start = place * BATCHES
            if place % 2:
                ax.axvspan(start, start + BATCHES, color="0.94", zorder=0)
            label = f"severity {severity}" if severity else "clean"
            ax.text(start + BATCHES / 2, 0.98, label, transform=ax.get_xaxis_transform(), ha="center", va="top", size=9)
        ax.axhline(1, color="0.3", linewidth=0.8, zorder=1)
        for model, steerings in models.items():
            for name, (style, width, said) in lines.items():
                cost = steerings[name][:, 0].mean(axis=0)
                label = f"{model}, {said}"
                ax.plot(np.arange(len(cost)) + 0.5, cost, style, color=colours[model], linewidth=width, label=label)
        ax.set_ylabel("cost / budget")
        ax.set_title(corruption, loc="left", fontweight="bold")
        ax.margins(x=0)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    low, high = axes[0].get_ylim()
    axes[0].set_ylim(low, high + 0.12 * (high - low))  # room for the severities above the lines
    axes[-1].set_xlabel(f"batch of {BATCH_SIZE} pictures")
    axes[-1].set_xticks(range(0, len(SEVERITIES) * BATCHES + 1, BATCHES))
    panels.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    panels.savefig(path, metadata={"Date": None})
    plt.close(panels)


# Part B: slowing down


def attacks_on(
    net: ew.MultiExitNet, pictures: ImageSet, models: Mapping[str, Model], sources: Mapping[str, Any], out: Path
) -> dict[str, list[Tensor]]:
    """Features of the pictures, attacked through each model's own predictive and through hot logits."""
    normalize = Normalize(pictures)
    victims: dict[str, tuple[LogConfidences, dict[str, Any]]] = {}
    for name, model in models.items():
        used = model.calibration
        tuned = {"temperatures": list(used.temperatures), "prior_vars": list(used.prior_vars)}
        victims[name] = (log_confidences(net, white_box(used), normalize), tuned)
    victims["hot logits"] = (hot_log_confidences(net, normalize), {"temperature": HOT})
    made_from = {**sources, "epsilon": EPSILON, "step": STEP, "steps": STEPS, "pictures": len(pictures), "chunk": CHUNK}
    found = {}
    for number, (name, (victim, tuned)) in enumerate(victims.items()):
        make = partial(attacked_features, net, pictures, victim, derive_generator(SEED, number))
        path = out / f"attack-{name.replace(' ', '-')}.safetensors"
        found[f"attack on {name}"] = kept(path, {**made_from, **tuned}, make)
    return found


def under_attack(model: Model, said: Said) -> dict[str, Any]:
    """Mean cost in budgets and accuracy: with thresholds as fitted, and with a controller once it has settled."""
    samples = said.right.shape[1]
    orders = [torch.randperm(samples, generator=derive_generator(SEED, number)).numpy() for number in range(ROUNDS)]
    stream = Said.joined(said[order] for order in orders)
    fixed = play(said, ATTACK_BATCH, Fixed(model.policy), model).mean(axis=1)
    controlled = play(stream, ATTACK_BATCH, ew.BudgetController(model.policy, model.budget), model)
    by_round = controlled.reshape(2, ROUNDS, -1).mean(axis=2)
    settled = by_round[:, ROUNDS // 2 :].mean(axis=1)
    shares = np.bincount(model.policy.exits_from_scores(said.confidence), minlength=len(model.costs)) / samples
    return {
        "mean_confidence": said.confidence.mean(axis=1).tolist(),
        "minimised": float(np.log(said.confidence).sum(axis=0).mean()),
        "fixed": {"cost": fixed[0], "top1": fixed[1], "exit_shares": shares.tolist()},
        "controlled": {"cost": settled[0], "top1": settled[1], "cost_of_first_round": by_round[0, 0]},
    }


def with_inflation(rows: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Each row's cost over that of the clean pictures, steered likewise."""
    for row in rows.values():
        for name in ("fixed", "controlled"):
            row[name]["inflation"] = row[name]["cost"] / rows["clean"][name]["cost"]
    return dict(rows)


# All of it


def settings(models: Mapping[str, Model]) -> dict[str, Any]:
    return {
        "net": "the one that ships with the package, cifar100-msdnet-small",
        "budget": f"{BUDGET:.0%} of the last exit's cost",
        "budget_macs": models["ours"].budget,
        "seed": SEED,
        "methods": METHODS,
        "thresholds": {name: model.policy.to_dict()["thresholds"] for name, model in models.items()},
        "stream": {
            "strengths": {name: list(values) for name, values in STRENGTHS.items()},
            "severities": list(SEVERITIES),
            "batches_of_each": BATCHES,
            "batch_size": BATCH_SIZE,
            "streams": STREAMS,
            "settled": f"mean over the last {WINDOW} batches within {BAND:.0%} of the budget until the next change",
        },
        "attack": {
            "norm": "L-infinity",
            "epsilon": "8/255",
            "step": "2/255",
            "steps": STEPS,
            "start": "random",
            "minimised": "sum over exits of log max probability",
            "hot_logits": f"the same through the net's plain logits at temperature {HOT:g}, for both models",
            "pictures": ATTACKED,
            "batch_size": ATTACK_BATCH,
            "rounds": f"{ROUNDS}, each in another order; figures with the controller are of the second half",
        },
    }


def main(root: Path, out: Path, place: Path = HERE / "drift") -> None:
    torch.set_num_threads(1)  # the same sums in the same order everywhere, and neighbours are left in peace
    file = ew.zoo.path("net.safetensors")
    net = ew.load_net(file).eval().requires_grad_(False).to(memory_format=torch.channels_last)
    trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    _, test = cifar.load(cifar.CIFAR100, root)
    sources = {
        "net": sha256(file.read_bytes()).hexdigest(),
        "pictures": sha256(test.fingerprints().numpy().tobytes()).hexdigest(),
        "seed": SEED,
    }

    def corrupted(name: str, severity: int) -> list[Tensor]:
        path = out / (f"{name}-{severity}.safetensors" if severity else "clean.safetensors")
        strength = {"corruption": name, "strength": STRENGTHS[name][severity - 1]} if severity else {}
        return kept(path, {**sources, **strength}, lambda: corrupted_features(net, test, name, severity))

    features = {name: [corrupted(name, severity) for severity in range(max(SEVERITIES) + 1)] for name in CORRUPTIONS}
    models = {name: Model.of(trace, method) for name, method in METHODS.items()}
    clean = next(iter(features.values()))[0]
    top1 = {name: model.said(clean, test.labels).right.mean(axis=1).tolist() for name, model in models.items()}
    known = models["vanilla"].said(trace.test.features, trace.test.labels).right.mean(axis=1)
    if np.abs(known - top1["vanilla"]).max() > 0.001:
        raise RuntimeError(f"the clean test pictures should be right in {known} of cases by exit, but are in {top1}")

    chosen = torch.randperm(len(test), generator=derive_generator(SEED))[:ATTACKED]
    pictures = test[chosen]
    clean_500 = [x[chosen] for x in clean]
    distances = {name: check_white_box(model.calibration, clean_500) for name, model in models.items()}
    kinds = {"clean": clean_500, **attacks_on(net, pictures, models, sources, out)}

    runs: dict[str, dict[str, dict[str, Array]]] = {name: {} for name in CORRUPTIONS}
    for number, name in enumerate(CORRUPTIONS):
        for kind, model in models.items():
            heard = [model.said(each, test.labels) for each in features[name]]
            refitted = [model.refitted(each) for each in features[name]]
            runs[name][kind] = streams(model, heard, refitted, number)
    attacks = {
        kind: with_inflation(
            {name: under_attack(model, model.said(each, pictures.labels)) for name, each in kinds.items()}
        )
        for kind, model in models.items()
    }
    results = {
        "command": "python experiments/drift.py CIFAR100_DIR",
        "machine": machine(),
        "settings": settings(models),
        "clean_top1_by_exit": top1,
        "stream": {name: {kind: summary(run) for kind, run in kinds_.items()} for name, kinds_ in runs.items()},
        "attack": {"white_box_distance": distances, **attacks},
    }
    write_json(place / "results.json", rounded(results))
    figure(runs, place / "stream.svg")


def tables(results: Mapping[str, Any]) -> dict[str, str]:
    """Markdown, by name; for docs/policies.md."""
    stream = [
        "| | severity | cost, fixed | with controller | batches until settled | top-1, fixed | with controller |",
        "|---|---|---|---|---|---|---|",
    ]
    for corruption, models in results["stream"].items():
        for model, found in models.items():
            for place, row in enumerate(found["severities"]):
                fixed, held = row["fixed"], row["controlled"]
                settled = held.get("batches_to_settle")
                when = f"{settled['median']:g}, at most {settled['longest']:g}" if settled else ""
                name = row["severity"] or ("clean again" if place else "clean")
                cells = (
                    f"{name}",
                    f"{100 * fixed['cost']:.1f} %",
                    f"{100 * held['cost']:.1f} %",
                    when,
                    f"{100 * fixed['top1']:.1f}",
                    f"{100 * held['top1']:.1f}",
                )
                stream.append(f"| {'' if place else f'{corruption}, {model}'} | {' | '.join(cells)} |")
    attack = [
        "| | pictures | cost, fixed | inflation | with controller | top-1, fixed | with controller |",
        "|---|---|---|---|---|---|---|",
    ]
    for model in METHODS:
        for number, (kind, row) in enumerate(results["attack"][model].items()):
            fixed, held = row["fixed"], row["controlled"]
            cells = (
                kind,
                f"{100 * fixed['cost']:.1f} %",
                f"{fixed['inflation']:.2f}x",
                f"{100 * held['cost']:.1f} %",
                f"{100 * fixed['top1']:.1f}",
                f"{100 * held['top1']:.1f}",
            )
            attack.append(f"| {'' if number else model} | {' | '.join(cells)} |")
    return {"stream": "\n".join(stream), "attack": "\n".join(attack)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, metavar="CIFAR100_DIR", help="holds cifar-100-binary/ or its archive")
    parser.add_argument("--out", type=Path, default=Path("runs/drift"), help="where features are kept")
    arguments = parser.parse_args()
    main(arguments.root, arguments.out)
    for table in tables(json.loads((HERE / "drift" / "results.json").read_text())).values():
        print(table, end="\n\n")
