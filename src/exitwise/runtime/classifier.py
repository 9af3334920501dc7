"""Early-exit inference in torch."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from exitwise import models
from exitwise.calibration.calibration import Calibration
from exitwise.core import nested, tensorfiles
from exitwise.core.checks import check_bool
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError, shorten
from exitwise.core.predictions import NEEDS_DRAWS
from exitwise.core.preprocessing import Preprocessing
from exitwise.evaluation.evaluate import BudgetCurve, Evaluation
from exitwise.models.cascade import Cascade
from exitwise.models.macs import macs
from exitwise.models.net import MultiExitNet
from exitwise.models.weights import check_rebuilt, check_state_dict, load_state, restore_on_error
from exitwise.policies.abstention import Abstention
from exitwise.policies.controller import BudgetController
from exitwise.policies.family import PolicyFamily
from exitwise.policies.policy import Policy
from exitwise.policies.prediction_sets import PredictionSets, check_fitted_for
from exitwise.runtime import engine, folding, hub
from exitwise.runtime.engine import Answer, AnswerRules, Prediction
from exitwise.runtime.exit_modules import runtime_exits
from exitwise.runtime.export import export
from exitwise.runtime.model_card import CardContents
from exitwise.runtime.torch_backend import SharedEvalMode, TorchBackend

FORMAT, VERSION = "exitwise.classifier", 1


class Classifier(nn.Module):
    """An early-exit net: calibrated probabilities at each exit, and only active samples run the next stage.

    For inference only. The net is not copied; it is in evaluation mode during a call, and its training mode is restored
    afterwards. Images are a normalized float tensor (n, ...) as the net takes it or, with a `preprocessing`, bytes:
    RGB images (n, height, width, 3) of any size, one such image (height, width, 3), or (n, channels, height, width) of
    the net's own size. Several threads may share a classifier.

    Args:
        net: The multi-exit net.
        calibration: Its calibration, from `ew.calibrate`.
        policy: Thresholds (K,) that decide where samples exit, from `ew.fit_policy`.
        costs: Cumulative cost (K,) of each exit, in the policy's unit. By default those of the policy, or MACs counted
            on the first call if it has none.
        classes: Names of the c classes.
        preprocessing: Normalization of bytes; without it, images must be floats [default: the net's].
        check_range: Refuse floats that are plainly not normalized, if there is a `preprocessing`.
        sets: Prediction sets from `ew.fit_sets` with this policy: predictions then have `sets`.
        abstention: Abstention from `ew.fit_abstention` with this policy: predictions then have `abstained`.

    Raises:
        InputError: If the calibration was made for other last layers, or arguments do not fit the net.

    Example:
        >>> import exitwise as ew
        >>> import torch
        >>> trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
        >>> cal = ew.calibrate(trace, "MSDNet (vanilla)")
        >>> policy = ew.Policy((0.5, 0.5, 0.5, float("-inf")), costs=trace.costs.values)
        >>> clf = ew.Classifier(ew.load_net(ew.zoo.path("net.safetensors")), cal, policy)
        >>> pred = clf(torch.zeros(8, 3, 32, 32))
        >>> len(pred), tuple(pred.probs.shape), pred.unit
        (8, (8, 100), 'MACs')
    """

    def __init__(
        self,
        net: MultiExitNet,
        calibration: Calibration,
        policy: Policy,
        *,
        costs: Costs | Sequence[float] | None = None,
        classes: Sequence[str] | None = None,
        preprocessing: Preprocessing | None = None,
        check_range: bool = True,
        sets: PredictionSets | None = None,
        abstention: Abstention | None = None,
    ) -> None:
        super().__init__()
        arguments: tuple[tuple[str, Any, type], ...] = (
            ("net", net, MultiExitNet),
            ("calibration", calibration, Calibration),
            ("policy", policy, Policy),
        )
        for name, value, expected in arguments:
            if not isinstance(value, expected):
                raise InputError(f"`{name}` must be a {expected.__name__}, but got {type(value).__name__}")
        _check_heads(net, calibration)
        if len(policy.thresholds) != len(net.stages):
            raise InputError(
                f"`policy` must have {len(net.stages)} thresholds, one per exit, but has {len(policy.thresholds)}"
            )
        extras: tuple[tuple[str, Any, type], ...] = (
            ("sets", sets, PredictionSets),
            ("abstention", abstention, Abstention),
        )
        for name, value, expected in extras:
            if value is not None and not isinstance(value, expected):
                raise InputError(f"`{name}` must be {expected.__name__} or None, but got {type(value).__name__}")
            if value is not None:
                check_fitted_for(value, policy, net.num_classes)
        if policy.score == "variance" and not calibration.method.has_variance:
            raise InputError(f"a policy on the variance {NEEDS_DRAWS}")
        if classes is None and isinstance(net, Cascade):
            classes = net.classes
        if classes is not None and len(classes) != net.num_classes:
            raise InputError(f"`classes` must name the net's {net.num_classes} classes, but names {len(classes)}")
        preprocessing = net.preprocessing if preprocessing is None else preprocessing
        if preprocessing is not None and not isinstance(preprocessing, Preprocessing):
            raise InputError(f"`preprocessing` must be a Preprocessing, but got {type(preprocessing).__name__}")
        self.net = net
        self.exits = nn.ModuleList(runtime_exits(calibration, policy.score == "variance"))
        self.exits.to(next(net.parameters()).device)
        self.calibration = calibration
        self.policy = policy
        self.sets = sets
        self.abstention = abstention
        self.classes = None if classes is None else tuple(classes)
        self.preprocessing = preprocessing
        self.check_range = check_bool("check_range", check_range)
        self.optimized = False
        self.costs = _resolve_costs(costs, policy)
        # The net whose MACs are counted, before any folding. A tuple keeps it from becoming a submodule.
        self._original_net: Sequence[MultiExitNet] = (net,)
        self._eval_mode = SharedEvalMode(net)

    def forward(self, images: Any) -> Prediction:
        """Run images (n, ...) stage by stage until all samples have exited; the result is on the CPU."""
        arrays = engine.classify(self.backend(), self.policy, images)
        extras = self._answer_rules().apply(arrays[0], arrays[2])
        sets, abstained = (None if array is None else torch.from_numpy(array) for array in extras)
        probs, predicted, exits, costs = map(torch.from_numpy, arrays)
        return Prediction(probs, predicted, exits, costs, self.policy.unit, sets, abstained)

    def _answer_rules(self) -> AnswerRules:
        return AnswerRules(self.sets, self.abstention)

    def stream(
        self,
        images: Iterable[Any],
        batch_size: int = 64,
        window: int | None = None,
        pooled: bool = True,
        controller: BudgetController | None = None,
    ) -> Iterator[Answer]:
        """Yield an `Answer` with probs (c,) for each image, in order; later stages run on full batches.

        An image that cannot be classified becomes an `Answer` with an `error`: no exception, and no missing answer.

        Args:
            images: Any iterable of single images, each of the shape of one sample: (channels, height, width) for most
                nets. It is read lazily and may be endless. An `InputError` in place of an image becomes its error.
            batch_size: Images per batch of the first stage. Later stages wait for `max(batch_size, 64)` active samples.
            window: Maximum number of images that are read but not answered, which bounds the memory; 64 full batches
                by default.
            pooled: Whether later stages wait for full batches; otherwise every batch runs to its end.
            controller: Keeps the stream at its budget, batch by batch and without pooling. It moves thresholds, so
                that coverage and risk of fitted sets and abstentions are no longer guaranteed.
        """
        return engine.stream(
            self.backend(), self.policy, images, batch_size, window, pooled, controller, self._answer_rules()
        )

    def backend(self) -> TorchBackend:
        """Return a new backend for the engine, for one call."""
        return TorchBackend(
            self.net,
            self.exits,
            self._eval_mode,
            self.preprocessing,
            self.costs_of,
            channels_last=self.optimized,
            check_range=self.check_range,
        )

    def optimize(self) -> Self:
        """Replace the net with a copy that is faster on a CPU: BatchNorms folded, channels-last memory format.

        The classifier changes in place and is returned; the original net stays unchanged. Probabilities differ in the
        last bits, so a sample whose score lies on a threshold may take another exit.
        """
        if not self.optimized:
            if self.costs is None:
                self._original_net = (copy.deepcopy(self.net).to("meta"),)
            self.net, self.optimized = folding.optimize_for_cpu(self.net), True
            self._eval_mode = SharedEvalMode(self.net)
        return self

    def costs_of(self, images: Any) -> Costs:
        """Return the cumulative cost (K,) of each exit; if none are given, count the MACs for images (n, ...)."""
        if self.costs is None:
            try:
                self.costs = Costs.of(macs(self._original_net[0], example_inputs=nested.first_sample(images)))
            except InputError as error:
                raise InputError(f"{error}; give `costs` to skip counting") from None
        return self.costs

    def save(self, path: str | Path) -> None:
        """Write weights, calibration, policy, classes and preprocessing to one safetensors file."""
        tensors, metadata = self.to_tensors()
        tensorfiles.write(Path(path), tensors, FORMAT, VERSION, metadata)

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return all tensors by key, and JSON-serializable metadata: the contents of a file."""
        tensors, calibration_metadata = self.calibration.to_tensors()
        tensors = {f"calibration.{key}": value for key, value in tensors.items()}
        tensors |= {f"net.{key}": value for key, value in self.net.state_dict().items()}
        metadata: dict[str, Any] = {
            "model": self.net.spec,
            "calibration": calibration_metadata,
            "policy": self.policy.to_dict(),
            "costs": None if self.costs is None else list(self.costs.values),
            "classes": None if self.classes is None else list(self.classes),
            "preprocessing": None if self.preprocessing is None else self.preprocessing.to_dict(),
            "optimized": self.optimized,
            "sets": None if self.sets is None else self.sets.to_dict(),
            "abstention": None if self.abstention is None else self.abstention.to_dict(),
        }
        if self.net.base_sha256 is not None:
            metadata["base"] = self.net.base_sha256
        return tensors, metadata

    @classmethod
    def load(cls, path: str | Path, net: MultiExitNet | None = None) -> "Classifier":
        """Load and check a file that `save` wrote.

        Args:
            path: The safetensors file.
            net: A net of the same architecture, needed unless the saved net was built from a preset. The weights are
                loaded into it, or into a copy of it if the classifier was saved optimized. If anything in the file
                does not fit, the net keeps its weights.
        """
        return tensorfiles.load(
            Path(path), FORMAT, VERSION, lambda tensors, metadata: cls._from_tensors(tensors, metadata, net)
        )

    @classmethod
    def _from_tensors(
        cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], user_net: MultiExitNet | None
    ) -> "Classifier":
        calibration = Calibration.from_tensors(_strip_prefix("calibration.", tensors), metadata["calibration"])
        policy = Policy.from_dict(metadata["policy"])
        optimized = check_bool("optimized", metadata["optimized"])
        spec, weights = metadata["model"], _strip_prefix("net.", tensors)
        if user_net is None and not isinstance(spec, dict):
            raise InputError("its net was not built from a preset: give it as `net`")
        if user_net is None:
            check_rebuilt(spec, weights, "its net", folding.optimize_for_cpu if optimized else None)
        net = models.rebuild(spec).eval() if user_net is None else user_net
        net = folding.optimize_for_cpu(net) if optimized else net
        weights = check_state_dict(net, weights, "its net")
        preprocessing = metadata["preprocessing"]
        sets, abstention = metadata.get("sets"), metadata.get("abstention")  # former files have neither
        with restore_on_error(net):  # the net is the user's: it keeps its weights if anything does not fit
            load_state(net, weights, "its net")
            classifier = cls(
                net,
                calibration,
                policy,
                costs=None if metadata["costs"] is None else Costs(metadata["costs"], policy.unit),
                classes=_check_classes(metadata["classes"]),
                preprocessing=None if preprocessing is None else Preprocessing.from_dict(preprocessing),
                sets=None if sets is None else PredictionSets.from_dict(sets),
                abstention=None if abstention is None else Abstention.from_dict(abstention),
            )
        classifier.optimized = optimized
        if user_net is None:
            net.base_sha256 = metadata.get("base")
        return classifier

    def export(
        self,
        path: str | Path,
        example: Any = None,
        force: bool = False,
        family: PolicyFamily | Sequence[Policy] | None = None,
    ) -> None:
        """Write an ONNX bundle: a graph per stage with its calibrated exit, and a manifest. Needs `exitwise[onnx]`.

        `exitwise.runtime.onnx.Session` runs it without torch.

        Args:
            path: The folder to create; the bundle is written completely or not at all.
            example: A batch of the net's input, a tensor (n, ...) or a dict or tuple of several. Needed only if neither
                the preprocessing nor the net's preset gives the shape of an image.
            force: Whether to replace an existing bundle.
            family: Policies for several budgets from `ew.fit_policies`, with growing mean costs: a service moves
                between them under load.
        """
        export(self, path, example, force, family)

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        whole: bool | None = None,
        bundle: bool = False,
        name: str | None = None,
        data: str | None = None,
        evaluation: Evaluation | None = None,
        curve: BudgetCurve | None = None,
    ) -> None:
        """Write a folder to share: weights, config.json and a model card. Needs `exitwise[hub]`.

        If `ew.attach` made the net of a name, such as "timm:resnet50", and its stages have the weights that were loaded
        then, the folder holds an adapter: heads, calibration and policy, with name, revision and hash of the base
        network. Otherwise it holds all weights. An existing model card (README.md) is kept; if anything fails, the
        folder stays as it was.

        Args:
            folder: The folder.
            whole: Write all weights, also of a base network that has a name.
            bundle: Add an ONNX bundle, in the folder `bundle`.
            name: Title of the model card [default: that of the folder].
            data: Description of the data, for the card.
            evaluation: Results on test data, for the card.
            curve: Results at several budgets, from `ew.budget_curve`, for the card.
        """
        hub.save_pretrained(
            self, folder, self._hub_options(whole, bundle, name or Path(folder).name, data, evaluation, curve)
        )

    def push_to_hub(
        self,
        repository: str,
        *,
        whole: bool | None = None,
        bundle: bool = False,
        data: str | None = None,
        evaluation: Evaluation | None = None,
        curve: BudgetCurve | None = None,
        private: bool | None = None,
        token: str | None = None,
        branch: str | None = None,
        commit_message: str = "Upload an exitwise classifier",
    ) -> str:
        """Upload what `save_pretrained` writes to the Hugging Face Hub, and return the address of the commit.

        Args:
            repository: Name of the repository, such as "me/flowers"; it is created if needed.
            whole: As in `save_pretrained`, like the next four.
            bundle: Add an ONNX bundle.
            data: Description of the data.
            evaluation: Results on test data.
            curve: Results at several budgets.
            private: Whether a new repository is private.
            token: Access token [default: that of `hf auth login`].
            branch: Branch to commit to [default: main].
            commit_message: Message of the commit.
        """
        options = self._hub_options(whole, bundle, repository.rpartition("/")[2], data, evaluation, curve)
        arguments = {"private": private, "token": token, "branch": branch, "commit_message": commit_message}
        return hub.push_to_hub(self, repository, options, arguments)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        base: str | Path | None = None,
        net: MultiExitNet | None = None,
        revision: str | None = None,
        token: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> "Classifier":
        """Load a classifier from a folder that `save_pretrained` wrote, or from a repository of the Hugging Face Hub.

        Nothing in a file is ever executed. The base network of an adapter is built by its name, with pretrained weights
        from the cache or the internet; weights that differ from the adapter's are refused.

        Args:
            source: The folder, or the name of a repository. Only a repository needs `exitwise[hub]`.
            base: For an adapter: a file with the weights of the base network, or another name of it.
            net: For a whole classifier whose net was not built by name: a net of the same architecture.
            revision: Branch, tag or commit of the repository.
            token: Access token [default: that of `hf auth login`].
            cache_dir: Folder of the cache [default: that of huggingface_hub].
            local_files_only: Use only the cache.

        Raises:
            InputError: If files are missing, damaged or of another format, or the base network differs.
        """
        options = {"revision": revision, "token": token, "cache_dir": cache_dir, "local_files_only": local_files_only}
        load = partial(hub.load, from_tensors=cls._from_tensors, from_file=cls.load, base=base, net=net)
        classifier: Classifier = hub.from_pretrained(source, load, options)
        return classifier

    def _hub_options(
        self,
        whole: bool | None,
        bundle: bool,
        name: str,
        data: str | None,
        evaluation: Evaluation | None,
        curve: BudgetCurve | None,
    ) -> dict[str, Any]:
        spec = self.net.spec or {}
        contents = CardContents(
            name=name,
            policy=self.policy,
            method=self.calibration.method.name,
            costs=self.costs,
            classes=self.classes,
            network=spec.get("module") or spec.get("preset"),
            cuts=self.net.cuts,
            takes_images=self.preprocessing is not None or self.net.input_shape is not None,
            preprocessing=self.preprocessing,
            data=data,
            evaluation=evaluation,
            curve=curve,
        )
        return {"whole": whole, "bundle": bundle, "contents": contents}


def _strip_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, named without it."""
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _check_classes(classes: Any) -> list[str] | None:
    """Return the names of the classes in a file; raise InputError unless they are a list of strings, or None."""
    if classes is not None and (not isinstance(classes, list) or not all(isinstance(name, str) for name in classes)):
        raise InputError(f"`classes` must be a list of names, but is {shorten(classes)}")
    return classes


def _check_heads(net: MultiExitNet, calibration: Calibration) -> None:
    """Raise `InputError` if the calibration was made for other last layers."""
    if len(calibration.exits) != len(net.exits):
        raise InputError(
            f"`calibration` must have {len(net.exits)} exits as the net has, but has {len(calibration.exits)}"
        )
    for k, (head, calibrated) in enumerate(zip(net.exits, calibration.exits, strict=True)):
        weights_equal = _equal_tensors(head.last.weight, calibrated.head.weight)
        if not weights_equal or not _equal_tensors(head.last.bias, calibrated.head.bias):
            raise InputError(f"`calibration` is of another net: the last layer of exit {k} has other weights")


def _equal_tensors(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b is None or (a is not None and b is not None and torch.equal(a.float().cpu(), b))


def _resolve_costs(costs: Costs | Sequence[float] | None, policy: Policy) -> Costs | None:
    """Return the given costs or the policy's, checked; None if MACs have to be counted."""
    given = policy.costs if costs is None else costs
    if given is None:
        if policy.unit != "MACs":
            raise InputError(f"`policy` is in {policy.unit} but has no costs of exits: give `costs`")
        return None
    resolved = given if isinstance(given, Costs) else Costs(tuple(given), policy.unit)
    if resolved.unit != policy.unit or len(resolved) != len(policy.thresholds):
        raise InputError(
            f"`costs` must be {len(policy.thresholds)} values in {policy.unit} as the policy's, "
            f"but are {len(resolved)} in {resolved.unit}"
        )
    return resolved
