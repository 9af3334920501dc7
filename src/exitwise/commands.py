"""What commands do besides calling one function of the library."""

import sys
from dataclasses import dataclass, replace
from importlib import import_module
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from exitwise import checkpoint, data, models
from exitwise.collector import Progress, collect
from exitwise.cost import macs
from exitwise.costs import Costs
from exitwise.errors import InputError, SharedError
from exitwise.files import write_json
from exitwise.history import History
from exitwise.machine import Machine
from exitwise.net import MultiExitNet
from exitwise.processes import rank
from exitwise.recipes import Recipe, recipe_named
from exitwise.run import Run, creating, describe
from exitwise.sources import source_of
from exitwise.trace import Trace
from exitwise.training import Trainer, Watcher, worth_compiling

if TYPE_CHECKING:
    from lightning_fabric import Fabric

_FILE_SIZE = 224  # of pictures from files, for nets that do not say


def parse_budget(text: str, costs: Costs) -> float:
    """A budget in the unit of the costs, from 2e7, 50% (of the last exit's cost) or 12ms."""
    number = text.strip().lower()
    unit = "ms" if number.endswith("ms") else "%" if number.endswith("%") else "MACs"
    number = number.removesuffix("macs").removesuffix("ms").removesuffix("%").strip()
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or value <= 0:
        raise InputError(f"`--budget` must be like 2e7, 50% or 12ms, but got {text!r}")
    if unit == "%":
        return value / 100 * costs.values[-1]
    if unit != costs.unit:
        raise InputError(f"`--budget` {text} is in {unit}, but the costs of this run are in {costs.unit}")
    return value


@dataclass(frozen=True)
class Source:
    """Where a run's pictures come from; what is None is the data set's own."""

    name: str
    root: Path | None = None
    split_seed: int = 0
    val_size: int | None = None
    test_size: int | None = None
    image_size: int | None = None
    skip_unreadable: bool = False
    download: bool = False

    def load(self, net_size: int) -> tuple[data.HoldOut, data.Splits[data.Pictures], dict[str, Any]]:
        """The split, the pictures, and what run.json says of them."""
        known = data.data_set(self.name)
        size = self.image_size or net_size
        train, test = data.load(self.name, self.root, size, self.skip_unreadable, self.download)
        if test is not None and self.test_size is not None:
            raise InputError(f"`--test-size` is for data without a test set, but {self.name} has one")
        val_size = _number(self.val_size, known.val_size, len(train))
        test_size = _number(self.test_size, known.test_size, len(train)) if test is None else 0
        held = data.HoldOut.random(train, val_size, self.split_seed, test_size)
        root = None if self.root is None else str(self.root.resolve())
        about = {"name": _absolute(self.name), "root": root, "split_seed": self.split_seed, "image_size": size}
        if self.skip_unreadable:
            about["skip_unreadable"] = True
        return held, held.apply(train, test), about


def _number(asked: int | None, known: int | float, samples: int) -> int:
    """What was asked for, or the data set's own number or share."""
    if asked is not None:
        return asked
    return known if isinstance(known, int) else max(1, round(known * samples))


def _absolute(name: str) -> str:
    """folder:PATH with the whole path, so that the run finds it from anywhere."""
    kind, colon, path = name.partition(":")
    return f"{kind}:{Path(path).resolve()}" if colon else name


def _pictures(run: Run, root: Path | None) -> data.Splits[data.Pictures]:
    """The pictures of an existing run, in its own split."""
    about = run.about["data"]
    size = about.get("image_size") or _FILE_SIZE
    if not isinstance(size, int):
        raise InputError(f"{run.directory / 'run.json'} must give a whole number as image_size, but gives {size!r}")
    train, test = data.load(about["name"], root or about.get("root"), size, bool(about.get("skip_unreadable")))
    return data.HoldOut.load(run.split_file).apply(train, test)


# -- nets


def built(preset: str | None, function: str | None, shape: tuple[int, int, int], classes: int) -> MultiExitNet:
    """An untrained net for pictures of a shape, by its preset's name or by the user's own function."""
    if function is None:
        net = models.build(str(preset), num_classes=classes, in_channels=shape[0])
    else:
        net = own_net(function)
    if net.num_classes != classes:
        raise InputError(f"the net must have the data set's {classes} classes, but has {net.num_classes}")
    if function is None:
        macs(net, shape)  # refuses pictures that are too small for the net
    return net


def own_net(function: str) -> MultiExitNet:
    """What `package.module:function` returns; only ever from the command line, never from a file."""
    module, colon, name = function.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        make = getattr(import_module(module), name) if colon and module and name else None
    except (ImportError, AttributeError) as error:
        raise InputError(f"`--net` {function} could not be imported: {error}") from None
    finally:
        sys.path.pop(0)
    if not callable(make):
        raise InputError(f"`--net` must be like package.module:function, but got {function!r}")
    net = make()
    if not isinstance(net, MultiExitNet):
        raise InputError(f"`--net` {function} must return a MultiExitNet, but returned a {type(net).__name__}")
    return net


def _net_of(run: Run, function: str | None) -> MultiExitNet:
    """The untrained net of a run."""
    spec = run.about.get("model")
    if isinstance(spec, dict) and "preset" in spec:
        if function is not None:
            raise InputError(f"{run.directory} has the net {spec['preset']!r}: --net is for other nets")
        return models.rebuild(spec)
    if function is None:
        made = spec.get("net") if isinstance(spec, dict) else None
        raise InputError(f"{run.directory} has a net of its own: give --net {made or 'package.module:function'} again")
    return own_net(function)


# -- collect


def collect_new(
    directory: Path, source: Source, preset: str, weights: Path, batch_size: int, half: bool, progress: Progress
) -> Trace:
    """Make a run from a checkpoint and a data set, and collect its trace."""
    size = models.config(preset).input_shape[1]  # a mistyped name is said before the data are read
    held, splits, about = source.load(size)
    net = models.build(preset, num_classes=len(splits.train.classes), in_channels=splits.train.shape[0])
    checkpoint.load_checkpoint(net, weights)
    with creating(directory) as new:
        write_json(new / "run.json", describe(net.spec or {}, about))
        checkpoint.save_checkpoint(net, new / "net.safetensors")
        held.save(new / "split.safetensors")
        trace = _collect(net, splits, batch_size, 0, progress)
        trace.save(new / "trace.safetensors", dtype=torch.float16 if half else torch.float32)
    return trace


def collect_again(
    directory: Path,
    root: Path | None,
    function: str | None,
    batch_size: int,
    workers: int,
    half: bool,
    force: bool,
    machine: Machine,
    progress: Progress,
) -> Trace:
    """Collect the trace of an existing run from its own net, data set and split."""
    run = Run(directory)
    if run.trace_file.exists() and not force:
        raise InputError(f"{run.trace_file} exists: --force to collect it again")
    if not run.net_file.exists():
        raise InputError(f"{directory} has no net yet: `exitwise train {directory} --resume` goes on with its training")
    net = checkpoint.load_checkpoint(_net_of(run, function), run.net_file)
    splits = _pictures(run, root)
    fabric = _launched(machine)
    if fabric:
        net.to(fabric.device)
    trace = _collect(net, splits, batch_size, workers, progress)
    if rank() == 0:
        trace.save(run.trace_file, dtype=torch.float16 if half else torch.float32)
        run.forget()
    return trace


def _launched(machine: Machine) -> "Fabric | None":
    """Fabric with its processes started; a plain CPU does without."""
    plain = machine == Machine(accelerator=machine.accelerator)
    if plain and (machine.accelerator == "cpu" or (machine.accelerator == "auto" and not torch.cuda.is_available())):
        return None
    fabric = machine.fabric()
    fabric.launch()
    return fabric


def _collect(
    net: MultiExitNet, splits: data.Splits[data.Pictures], batch_size: int, workers: int, progress: Progress
) -> Trace:
    loaders = [data.Batches(part, batch_size, workers) for part in (splits.train, splits.val, splits.test)]
    return collect(net, *loaders, classes=splits.train.classes, progress=progress)


# -- train


@dataclass(frozen=True)
class Order:
    """What a training is asked to be; what is None is the data set's own, or the run's when it goes on."""

    model: str | None = None
    net: str | None = None
    recipe: str | None = None
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    seed: int | None = None
    compile: bool | None = None

    def made(self, known: data.DataSet) -> Recipe:
        recipe = recipe_named(self.recipe or known.recipe)
        if self.epochs is not None:
            recipe = recipe.scaled(self.epochs)
        changes = {"batch_size": self.batch_size, "lr": self.lr}
        return replace(recipe, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Means:
    """What a training is done with; none of it changes the result but for floating-point order."""

    machine: Machine
    accumulate: int = 1
    workers: int = 0
    checkpoint_minutes: float = 10.0


def train_new(directory: Path, source: Source, order: Order, means: Means, force: bool, watcher: Watcher) -> History:
    """Make a run and train its net."""
    known = data.data_set(source.name)
    recipe = order.made(known)
    seed = order.seed or 0
    preset = None if order.net else order.model or known.model
    size = models.config(preset).input_shape[1] if preset else _FILE_SIZE
    fabric = means.machine.fabric()  # says what the machine cannot do before any picture is read
    held, splits, about = source.load(size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = built(preset, order.net, splits.train.shape, len(splits.train.classes))
    batches = len(splits.train) // recipe.batch_size
    compiled = worth_compiling(batches * recipe.epochs) if order.compile is None else order.compile
    training = {
        "recipe": recipe.to_dict(),
        "seed": seed,
        "compile": compiled,
        "precision": means.machine.precision,
        "threads": torch.get_num_threads(),
    }
    trainer_source = source_of(splits.train, recipe, seed, means.workers)
    fabric.launch()
    _first_alone(
        fabric, lambda: _make_run(directory, force, describe(net.spec or {"net": order.net}, about, training), held)
    )
    trainer = Trainer(
        net,
        trainer_source,
        data.Batches(splits.val, recipe.batch_size, means.workers),
        recipe,
        fabric,
        directory,
        seed,
        means.accumulate,
        compiled,
    )
    return _run(trainer, means, watcher)


def train_on(directory: Path, root: Path | None, order: Order, means: Means, watcher: Watcher) -> History:
    """Go on with the training of an existing run."""
    run = Run(directory)
    training = run.training()
    recipe = Recipe.from_dict(training.get("recipe"))
    _check_same(run, order, recipe, training)
    fabric = means.machine.fabric()
    net = _net_of(run, order.net)
    splits = _pictures(run, root)
    seed, compiled = int(training.get("seed", 0)), bool(training.get("compile"))
    trainer_source = source_of(splits.train, recipe, seed, means.workers)
    fabric.launch()
    trainer = Trainer(
        net,
        trainer_source,
        data.Batches(splits.val, recipe.batch_size, means.workers),
        recipe,
        fabric,
        directory,
        seed,
        means.accumulate,
        compiled,
    )
    trainer.restore(*trainer.snapshots.load())
    return _run(trainer, means, watcher)


def _run(trainer: Trainer, means: Means, watcher: Watcher) -> History:
    trainer.checkpoint_minutes = means.checkpoint_minutes
    trainer.watcher = watcher if rank() == 0 else Watcher()
    history = trainer.run()
    if rank() == 0:
        history.plot(trainer.folder / "history.png")
    return history


def _make_run(directory: Path, force: bool, about: dict[str, Any], held: data.HoldOut) -> None:
    with creating(directory, force) as new:
        write_json(new / "run.json", about)
        held.save(new / "split.safetensors")


def _first_alone(fabric: "Fabric", act: Any) -> None:
    """Let the first process act; all of them fail if it does."""
    problem = None
    if fabric.is_global_zero:
        try:
            act()
        except (InputError, OSError) as error:
            problem = str(error)
    problem = fabric.broadcast(problem)
    if problem:
        raise SharedError(problem)


def same_data(run: Run, name: str) -> None:
    """Refuse to go on with another data set than the run's."""
    data.data_set(name)
    if _absolute(name) != run.about["data"]["name"]:
        raise InputError(f"{run.directory} is trained on {run.about['data']['name']}, and cannot go on with {name}")


def _check_same(run: Run, order: Order, recipe: Recipe, training: dict[str, Any]) -> None:
    """Refuse to go on as something else than the run is."""
    spec = run.about.get("model") or {}
    has = {
        "model": spec.get("preset"),
        "epochs": recipe.epochs,
        "batch_size": recipe.batch_size,
        "lr": recipe.lr,
        "seed": training.get("seed"),
        "compile": training.get("compile"),
    }
    for name, value in has.items():
        asked = getattr(order, name)
        if asked is not None and asked != value:
            option = name.replace("_", "-")
            raise InputError(f"{run.directory} is trained with --{option} {value}, and cannot go on with {asked}")
    if order.recipe is not None and recipe_named(order.recipe).scaled(recipe.epochs) != recipe:
        raise InputError(f"{run.directory} is trained by another recipe than {order.recipe!r}, and cannot change it")
