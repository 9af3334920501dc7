"""Model card of a shared classifier: its base, data, results, certificate and costs, and how to use it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exitwise.core.costs import Costs, format_cost
from exitwise.core.files import atomic_write
from exitwise.core.preprocessing import Preprocessing
from exitwise.evaluation.evaluate import BudgetCurve, Evaluation
from exitwise.policies.certificate import describe_guarantee
from exitwise.policies.policy import Policy

_MAX_ROWS = 12  # of the budget curve


@dataclass(frozen=True, eq=False)
class CardContents:
    """Contents of a model card, besides those of config.json.

    Args:
        name: Title of the card.
        policy: The classifier's policy.
        method: Name of the calibration method.
        costs: Cumulative costs (K,) of the exits, if they are known.
        classes: Names of the classes, if they are known.
        network: Name of the network, if it has one.
        cuts: Submodules after which the exits are attached.
        takes_images: Whether the inputs are images.
        preprocessing: How images are scaled, cropped and normalized, if the classifier does it.
        data: Description of the data of validation and test.
        evaluation: Results on test data at the policy's budget.
        curve: Results on test data at several budgets.
    """

    name: str
    policy: Policy
    method: str
    costs: Costs | None
    classes: Sequence[str] | None
    network: str | None
    cuts: Sequence[str]
    takes_images: bool
    preprocessing: Preprocessing | None = None
    data: str | None = None
    evaluation: Evaluation | None = None
    curve: BudgetCurve | None = None


def write_card(path: Path, config: Mapping[str, Any], contents: CardContents) -> None:
    """Write the card, in Markdown with the Hub's header.

    Args:
        path: The file.
        config: Contents of config.json.
        contents: What the card shows.
    """
    base = config["base"]
    sections = [
        _header(base, contents),
        f"# {contents.name}",
        _introduction(base, contents),
        "## Use it",
        _usage(base, contents),
        "## Results",
        *_results(contents),
        "## Costs",
        _costs(contents),
        "## Certificate",
        _certificate(contents.policy),
        "## Data",
        contents.data or "Not stated.",
    ]
    with atomic_write(path) as temporary:
        temporary.write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def _header(base: Mapping[str, Any] | None, contents: CardContents) -> str:
    lines = ["---", "library_name: exitwise", "tags:", "- early-exit", "- calibration"]
    if contents.takes_images:
        lines.append("pipeline_tag: image-classification")
    if base is not None and (repository := _repository(base)) is not None:
        lines.append(f"base_model: {repository}")
    return "\n".join([*lines, "---"])


def _repository(base: Mapping[str, Any]) -> str | None:
    """Return the repository of a base network on the Hub, if it has one there."""
    prefix, _, name = str(base["name"]).partition(":")
    if prefix == "timm":
        return base.get("revision")
    repository = name.partition("@")[0]
    return (
        repository if prefix == "hf" and repository.count("/") <= 1 and not repository.startswith((".", "/")) else None
    )


def _introduction(base: Mapping[str, Any] | None, contents: CardContents) -> str:
    exits = len(contents.policy.thresholds)
    text = (
        f"A classifier with {exits} exits that stops early on easy inputs, made with exitwise. Its calibration is "
        f"{contents.method}, its exit score {contents.policy.score}."
    )
    if contents.classes is not None:
        shown = ", ".join(contents.classes[:10])
        text += f" It has {len(contents.classes)} classes: {shown}{', ...' if len(contents.classes) > 10 else ''}."
    exits_text = f"Exits are after {', '.join(f'`{cut}`' for cut in contents.cuts)}, and at the end."
    if base is None:
        network = "" if contents.network is None else f" Its network is `{contents.network}`."
        return f"{text}{network}{f' {exits_text}' if contents.cuts else ''} The files hold all weights."
    revision = base.get("revision")
    if revision:
        revision = f" (`{revision}` on the Hub)" if "/" in revision else f", revision {revision}"
    text += (
        f"\n\nThis is an adapter: it holds heads, calibration and thresholds. Its base network is `{base['name']}`"
        f"{revision or ''}, with weights of SHA-256 `{base['sha256']}`. Another base is refused."
    )
    return f"{text} {exits_text}"


def _usage(base: Mapping[str, Any] | None, contents: CardContents) -> str:
    library, colon, _ = (contents.network or "").partition(":")
    library, preprocessing = f",{library}" if colon else "", contents.preprocessing
    images = [] if preprocessing is None else ["import numpy as np", "from PIL import Image"]
    photo = 'np.asarray(Image.open("photo.jpg").convert("RGB"))'
    lines = [
        f"    pip install 'exitwise[hub{library}]'",
        "",
        "```python",
        "import exitwise as ew",
        *images,
        "",
        'clf = ew.Classifier.from_pretrained("REPOSITORY")  # or a folder',
        "pred = clf(inputs)  # as the network takes them" if preprocessing is None else f"pred = clf({photo})",
        "print(pred.predicted, pred.exits, pred.costs)",
        "```",
    ]
    if base is not None:
        lines += [
            "",
            "The weights of the base network are those that its library loads by that name. If they are others, "
            'pass their file: `from_pretrained(..., base="weights.safetensors")`.',
        ]
    return "\n".join(lines if preprocessing is None else [*lines, "", _describe_images(preprocessing)])


def _describe_images(preprocessing: Preprocessing) -> str:
    size, side = preprocessing.size, "both sides" if preprocessing.squash else "a short side"
    mean, std = (", ".join(f"{value:g}" for value in values) for values in (preprocessing.mean, preprocessing.std))
    scaled = round(size * preprocessing.margin)
    return (
        f"The classifier prepares images (n, height, width, 3) itself: it scales them to {side} of {scaled} pixels "
        f"({preprocessing.interpolation}), crops the center of {size} x {size}, and normalizes with mean {mean} and "
        f"standard deviation {std}. Images of {size} x {size} pixels are taken as they are."
    )


def _results(contents: CardContents) -> list[str]:
    if contents.evaluation is None and contents.curve is None:
        return ["Not measured."]
    sections = []
    if (result := contents.evaluation) is not None:
        rows = [
            ("mean cost", format_cost(result.cost, result.unit)),
            ("top-1 accuracy", f"{result.top1:.2%}"),
            ("NLPD", f"{result.nlpd:.4f}"),
            ("ECE", f"{result.ece:.4f}"),
            ("samples", f"{result.samples:,}"),
            ("share of each exit", " ".join(f"{share:.1%}" for share in result.exit_shares)),
        ]
        if result.eefp is not None:
            rows.insert(4, ("EEFP", f"{result.eefp:.4f}"))
        sections.append("On the test data:\n\n" + _table(("", "value"), rows))
    if contents.curve is not None:
        points = _distinct(contents.curve.points)
        lines = [(format_cost(p.cost, p.unit), f"{p.top1:.2%}", f"{p.nlpd:.4f}", f"{p.ece:.4f}") for p in points]
        sections.append("Budget curve, on the test data:\n\n" + _table(("mean cost", "top-1", "NLPD", "ECE"), lines))
    return sections


def _distinct(points: Sequence[Evaluation]) -> list[Evaluation]:
    """Return about `_MAX_ROWS` points of a curve by cost, the last one among them, without those that repeat."""
    by_cost = {(point.cost, point.top1): point for point in sorted(points, key=lambda point: point.cost)}
    distinct = list(by_cost.values())
    chosen = distinct[:: max(1, -(-len(distinct) // _MAX_ROWS))]
    return chosen if chosen[-1] is distinct[-1] else [*chosen, distinct[-1]]


def _costs(contents: CardContents) -> str:
    thresholds = contents.policy.thresholds
    if contents.costs is None:
        return "Not counted."
    rows = [
        (str(k + 1), format_cost(cost, contents.costs.unit), "none" if t == float("inf") else f"{t:.4g}")
        for k, (cost, t) in enumerate(zip(contents.costs.values, thresholds, strict=True))
    ]
    rows[-1] = (*rows[-1][:2], "all others")
    return _table(("exit", "cost", f"threshold on {contents.policy.score}"), rows)


def _certificate(policy: Policy) -> str:
    budget = "" if policy.budget is None else f" The budget was {format_cost(policy.budget, policy.unit)} per sample."
    if policy.guarantee is None:
        return f"The thresholds are not certified.{budget}"
    return f"{describe_guarantee(policy.guarantee, policy.unit)}{budget}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])
