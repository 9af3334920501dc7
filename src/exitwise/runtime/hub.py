"""Share classifiers through the Hugging Face Hub: an adapter that names its base network, or everything.

An adapter holds heads, calibration, policy and preprocessing, and points to its base network by name, revision and hash
of its weights. Files are JSON and safetensors: nothing is unpickled, and huggingface_hub is imported on use.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from exitwise.core import tensorfiles
from exitwise.core.errors import InputError, first_line
from exitwise.core.files import read_json, write_json
from exitwise.core.version import __version__
from exitwise.models.attach.attach import attach_named
from exitwise.models.named.build import PRETRAINED, build_named, is_named
from exitwise.models.named.hub_access import offline_without_network
from exitwise.models.named.weight_hash import hash_weights
from exitwise.models.net import MultiExitNet
from exitwise.models.weights import load_module_weights
from exitwise.runtime.model_card import CardContents, write_card

CONFIG, CARD, BUNDLE = "config.json", "README.md", "bundle"
ADAPTER_FILE, CLASSIFIER_FILE = "adapter.safetensors", "classifier.safetensors"
_FILES = [CONFIG, CARD, ADAPTER_FILE, CLASSIFIER_FILE]  # all that loading reads
FORMAT, ADAPTER, VERSION = "exitwise.pretrained", "exitwise.adapter", 1


class Shareable(Protocol):
    """The parts of a `Classifier` that sharing needs."""

    net: MultiExitNet
    optimized: bool

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]: ...
    def save(self, path: str | Path) -> None: ...
    def export(self, path: str | Path, example: Any = None, force: bool = False) -> None: ...


def require_hub() -> Any:
    """Return huggingface_hub; raise `InputError` with the extra to install if it is missing."""
    try:
        import huggingface_hub
    except ImportError:
        raise InputError("sharing classifiers needs huggingface_hub: pip install 'exitwise[hub]'") from None
    return huggingface_hub


def save(classifier: Shareable, folder: Path, whole: bool | None, bundle: bool, contents: CardContents) -> None:
    """Write config.json, the adapter or the whole classifier, perhaps an ONNX bundle, and README.md.

    Args:
        classifier: The classifier.
        folder: An empty folder, which `huggingface_hub` has made.
        whole: Whether to write all weights; None for an adapter if the base network has the weights that were loaded.
        bundle: Whether to add an ONNX bundle.
        contents: What the model card shows.
    """
    spec = classifier.net.spec or {}
    named = is_named(spec.get("module")) and "attach" in spec and not classifier.optimized
    if whole is False and not named:
        raise InputError(
            "an adapter needs a net that `exitwise.attach` made of a name, such as timm:resnet50, before optimize(); "
            "`whole=True` writes all weights"
        )
    sha256 = hash_weights(classifier.net.stages) if named and not whole else None
    if whole is False and sha256 != classifier.net.base_sha256:
        raise InputError(
            "an adapter needs a base network with the weights that were loaded, but its stages are random or were "
            "trained since; `whole=True` writes all weights"
        )
    config: dict[str, Any] = {"format": FORMAT, "version": VERSION, "library_name": "exitwise", "exitwise": __version__}
    if sha256 is not None and sha256 == classifier.net.base_sha256:
        base = {"name": spec["module"], "revision": classifier.net.revision, "sha256": sha256}
        config |= {"file": ADAPTER_FILE, "base": base}
        tensors, metadata = classifier.to_tensors()
        small = {key: value for key, value in tensors.items() if not key.startswith("net.stages.")}
        tensorfiles.write(folder / ADAPTER_FILE, small, ADAPTER, VERSION, metadata)
    else:
        config |= {"file": CLASSIFIER_FILE, "base": None}
        classifier.save(folder / CLASSIFIER_FILE)
    if bundle:
        classifier.export(folder / BUNDLE)
    write_json(folder / CONFIG, config)
    write_card(folder / CARD, config, contents)


def load(
    folder: Path,
    from_tensors: Callable[[Mapping[str, Tensor], Mapping[str, Any], MultiExitNet | None], Any],
    from_file: Callable[[Path, MultiExitNet | None], Any],
    base: str | Path | None,
    net: MultiExitNet | None,
) -> Any:
    """Load the classifier of a folder that `save` wrote.

    Args:
        folder: The folder.
        from_tensors: Makes a classifier of all tensors, metadata and a net to load into.
        from_file: Loads a classifier file, into a net if one is given.
        base: For an adapter: another name of its base network, or a file of its weights.
        net: For a whole classifier whose net was not built by name: a net of the same architecture.
    """
    config = read_config(folder)
    if config["file"] == CLASSIFIER_FILE:
        if base is not None:
            raise InputError(f"{folder} holds a whole classifier: `base` is for adapters")
        return from_file(folder / CLASSIFIER_FILE, net)
    if net is not None:
        raise InputError(f"{folder} holds an adapter, whose net is built by name: `net` is for whole classifiers")

    def build(tensors: dict[str, Tensor], metadata: dict[str, Any]) -> Any:
        base_net = _build_base(metadata["model"], config["base"], base)
        stages = {f"net.stages.{key}": value for key, value in base_net.stages.state_dict().items()}
        return from_tensors({**tensors, **stages}, metadata, base_net)

    return tensorfiles.load(folder / ADAPTER_FILE, ADAPTER, VERSION, build)


def read_config(folder: Path) -> dict[str, Any]:
    """Read and check config.json of a folder."""
    path = folder / CONFIG
    if not path.is_file():
        raise InputError(f"{folder} is not a shared classifier: it has no {CONFIG}")
    config = read_json(path)
    if config.get("format") != FORMAT or config.get("version") != VERSION:
        actual = f"{config.get('format')!r} version {config.get('version')!r}"
        raise InputError(f"{path} must be {FORMAT} version {VERSION}, but is {actual}")
    base, file = config.get("base"), config.get("file")
    if file == ADAPTER_FILE and isinstance(base, dict) and isinstance(base.get("sha256"), str):
        return config
    if file == CLASSIFIER_FILE and base is None:
        return config
    raise InputError(
        f"{path} must name its file and, for an adapter, its base network, but holds {file!r} and {base!r}"
    )


def _build_base(spec: Any, described: Mapping[str, Any], base: str | Path | None) -> MultiExitNet:
    """Build the base network of an adapter with its exits; raise `InputError` unless its weights are the same."""
    if not isinstance(spec, Mapping) or spec.get("module") != described.get("name") or "attach" not in spec:
        raise InputError("its spec must name the base network of config.json and its exits")
    config = spec.get("config")
    classes = spec.get("num_classes") if config is None else config.get("num_labels") or len(config.get("id2label", ()))
    name, revision = str(spec["module"]), described.get("revision")
    weights: str | Path = PRETRAINED
    if base is not None:
        name, weights = (str(base), PRETRAINED) if is_named(base) else (name, base)
    elif name.startswith("hf:") and revision and "@" not in name:
        name = f"{name}@{revision}"
    if weights == PRETRAINED:
        named = build_named(name, classes, PRETRAINED, spec.get("image_size"))
    else:  # the hash covers all but the last layer, which is part of the adapter
        named = build_named(name, classes, None, spec.get("image_size"))
        load_module_weights(named.module, weights, named.num_classes)
        named = replace(named, sha256=hash_weights(named.module))
    exits = spec["attach"]
    net = attach_named(named, exits["at"], exits["head"])
    net.spec = dict(spec)
    if (actual := hash_weights(net.stages)) != described["sha256"]:
        raise InputError(
            f"its base network {name} has other weights than those that the adapter was made for (sha256 {actual[:12]} "
            f"instead of {described['sha256'][:12]}): give their file, or another name, as `base`"
        )
    return net


def save_pretrained(classifier: Shareable, folder: str | Path, options: Mapping[str, Any]) -> None:
    """Write a classifier to a folder through `ModelHubMixin`; if anything fails, the folder stays as it was.

    Args:
        classifier: The classifier.
        folder: The folder. Its files of a former classifier are replaced, but not its model card.
        options: The arguments of `save`.
    """
    folder = Path(folder)
    model = _hub_model()(classifier, options)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is not a folder: choose another path")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.resolve().parent) as temporary:
        new = Path(temporary) / "new"
        model.save_pretrained(new)
        folder.mkdir(exist_ok=True)
        if not (folder / CARD).exists():  # perhaps edited by hand
            (new / CARD).replace(folder / CARD)
        if (folder / BUNDLE).exists():
            (folder / BUNDLE).rename(Path(temporary) / "old")
        for name in (BUNDLE, ADAPTER_FILE, CLASSIFIER_FILE, CONFIG):
            if (new / name).exists():
                (new / name).rename(folder / name)
            else:
                (folder / name).unlink(missing_ok=True)


def push_to_hub(classifier: Shareable, repository: str, options: Mapping[str, Any], hub: Mapping[str, Any]) -> str:
    """Upload a classifier through `ModelHubMixin`, and return the address of the commit.

    Args:
        classifier: The classifier.
        repository: Name of the repository, such as "me/flowers-early-exit".
        options: The arguments of `save`.
        hub: Arguments of `ModelHubMixin.push_to_hub`, such as `private` and `token`.
    """
    model = _hub_model()(classifier, options)
    with _hub_errors(f"{repository} could not be uploaded"):
        return str(model.push_to_hub(repository, **hub))


def from_pretrained(
    source: str | Path,
    load_folder: Callable[[Path], Any],
    hub: Mapping[str, Any],
) -> Any:
    """Load a classifier from a folder, or from a repository of the Hub or its cache.

    Args:
        source: A folder, or the name of a repository.
        load_folder: Loads the classifier of a folder.
        hub: Arguments of `ModelHubMixin.from_pretrained`, such as `revision` and `token`.
    """
    if Path(source).is_dir():
        return load_folder(Path(source))
    if str(source).count("/") > 1 or Path(source).is_absolute():
        raise InputError(f"{source} is not a folder, and not the name of a repository such as me/flowers")
    require_hub()
    with _hub_errors(f"{source} could not be loaded from the Hub"), offline_without_network():
        return _hub_model().from_pretrained(str(source), load_folder=load_folder, **hub).classifier


@contextmanager
def _hub_errors(problem: str) -> Iterator[None]:
    """Turn errors of the Hub's library in the block into one `InputError`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # errors of the network, of the cache and of the server
        raise InputError(f"{problem}: {first_line(error)}") from None


def _hub_model() -> Any:
    """Return the class that huggingface_hub saves, loads and uploads; it is made on use, to keep imports cheap."""
    hub = require_hub()

    class HubModel(hub.ModelHubMixin):  # type: ignore[misc, name-defined]
        """A classifier with the methods of the Hub."""

        def __init__(self, classifier: Any, options: Any) -> None:
            self.classifier, self._options = classifier, options

        def _save_pretrained(self, save_directory: Path) -> None:
            save(self.classifier, Path(save_directory), **self._options)

        @classmethod
        def _from_pretrained(
            cls, *, model_id: str, load_folder: Any, force_download: bool = False, **options: Any
        ) -> "HubModel":
            options = {name: value for name, value in options.items() if name in _DOWNLOAD_OPTIONS}
            folder = hub.snapshot_download(model_id, allow_patterns=_FILES, force_download=force_download, **options)
            return cls(load_folder(Path(folder)), None)

    return HubModel


_DOWNLOAD_OPTIONS = ("revision", "cache_dir", "local_files_only", "token")
