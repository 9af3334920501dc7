"""Options of the commands, each declared once: its type, its default and its help.

Functions of this package take these dataclasses, and `exitwise.cli.options` makes command-line options of their fields.
None means that the option was not given. No torch here: `exitwise --help` reads this module.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

Accelerator = Literal["auto", "cpu", "cuda", "mps"]
Precision = Literal["32-true", "16-mixed", "bf16-mixed"]


NET_HELP = "Your own net: package.module:function, which returns a MultiExitNet; repeated for the nets of a cascade."

MODEL_HELP = "Model preset, see `exitwise models`; or timm:NAME, torchvision:NAME or hf:REPOSITORY, which gets exits."

RAY_HELP = "Run on a Ray cluster: HOST:PORT of its head, or `local` for one on this machine that ends with the command."


def join_nets(nets: list[str] | None) -> str | None:
    """Return the values of a repeated option `--net` as one text, joined by commas; None without any."""
    return ",".join(nets) if nets else None


@dataclass(frozen=True)
class DataOptions:
    """The dataset of a new run, and how to split it."""

    data: Annotated[
        str | None,
        Option(help="Dataset: cifar100, cifar10, fashion-mnist, imagenet, caltech256, digits, or folder:PATH."),
    ] = None
    root: Annotated[Path | None, Option(help="Folder that holds the dataset.")] = None
    val_data: Annotated[
        str | None,
        Option(
            help="Folder of validation images, a folder per class. Without test images, half of them are for testing.",
            show_default="PATH/val, or held out from --data",
        ),
    ] = None
    test_data: Annotated[
        str | None,
        Option(help="Folder of test images, a folder per class.", show_default="PATH/test, or held out from --data"),
    ] = None
    split_seed: Annotated[int | None, Option(help="Seed that selects the held-out images.", show_default="0")] = None
    val_size: Annotated[
        int | None, Option(help="Number of validation images.", show_default="the dataset's", min=1)
    ] = None
    test_size: Annotated[
        int | None, Option(help="Number of test images, for data without a test set.", show_default=False, min=1)
    ] = None
    image_size: Annotated[
        int | None, Option(help="Size of images from files.", show_default="the net's or the images' own", min=1)
    ] = None
    download: Annotated[bool, Option("--download", help="Download the dataset into --root first.")] = False
    skip_unreadable: Annotated[
        bool, Option("--skip-unreadable", help="Skip image files that cannot be decoded, with a warning for each.")
    ] = False


@dataclass(frozen=True)
class NetOptions:
    """The network of a new run."""

    model: Annotated[str | None, Option(help=MODEL_HELP, show_default="the dataset's")] = None
    net: Annotated[list[str] | None, Option(help=NET_HELP)] = None

    @property
    def function(self) -> str | None:
        """The user's own net, package.module:function; those of a cascade joined by commas."""
        return join_nets(self.net)


@dataclass(frozen=True)
class AttachOptions:
    """Exits that are attached to a trained network before it is trained."""

    weights: Annotated[
        Path | None,
        Option(help="Checkpoint to load into the net first.", show_default="pretrained for timm:NAME and the like"),
    ] = None
    attach: Annotated[
        str | None,
        Option(
            help="Add exits after these submodules (a,b,c), or `auto` or `best` together with --exits, or `stages` for "
            "the ends of the stages of timm:NAME.",
            show_default="auto for timm:NAME and the like",
        ),
    ] = None
    exits: Annotated[
        int | None,
        Option(
            help="Number of exits for --attach: of about equal cost (auto), at the last stages (stages), or where they "
            "are worth most (best).",
            show_default="4 for timm:NAME and the like",
        ),
    ] = None
    head: Annotated[
        Literal["mlp", "grid", "linear", "conv"] | None,
        Option(
            help="Kind of the new heads: grid pools large maps less, conv has convolutions of its own for them.",
            show_default="mlp",
        ),
    ] = None
    last: Annotated[
        bool, Option("--last", help="Train the last layer together with the new heads, such as for new classes.")
    ] = False


@dataclass(frozen=True)
class MachineOptions:
    """Devices and processes."""

    accelerator: Annotated[Accelerator, Option(help="Device to compute on.")] = "auto"
    devices: Annotated[
        int | None,
        Option(help="Processes on this machine, one per device.", show_default="torchrun's, or 1", min=1),
    ] = None
    num_nodes: Annotated[
        int | None,
        Option(help="Machines that run this command.", show_default="torchrun's, or 1", min=1),
    ] = None
    workers: Annotated[int, Option(help="Processes that decode image files; with --ray, the actors.", min=0)] = 0


@dataclass(frozen=True)
class TrainOptions:
    """Training options; None means the recipe's default or, when resuming, the run's value."""

    recipe: Annotated[str | None, Option(help="Name of the training recipe.", show_default="the dataset's")] = None
    epochs: Annotated[int | None, Option(help="Epochs; milestones scale with them.", show_default="the recipe's")] = (
        None
    )
    batch_size: Annotated[
        int | None, Option(help="Batch size, summed over processes.", show_default="the recipe's")
    ] = None
    lr: Annotated[float | None, Option(help="Initial learning rate.", show_default="the recipe's")] = None
    seed: Annotated[int | None, Option(help="Seed for weights, data order and augmentation.", show_default="0")] = None
    compile: Annotated[
        bool | None,
        Option(
            help="Use torch.compile.",
            show_default="on for at least 5,000 batches if a C++ compiler is found",
        ),
    ] = None
    precision: Annotated[
        Precision | None,
        Option(
            help="Arithmetic of the training.",
            show_default="32-true; bf16-mixed for at least 5,000 batches on a CPU with instructions for it",
        ),
    ] = None
    distill: Annotated[
        float | None,
        Option(
            help="Weight of distillation from the last exit before the training, from 0 to 1.",
            show_default="the recipe's",
        ),
    ] = None
    max_drop: Annotated[
        float | None,
        Option(
            help="Percentage points of validation accuracy that the last exit may lose; worse epochs are not kept.",
            show_default="the recipe's",
        ),
    ] = None


@dataclass(frozen=True)
class ExecutionOptions:
    """Options that change how a training is executed, but not its result."""

    strategy: Annotated[Literal["auto", "ddp"], Option(help="Distribution over processes.")] = "auto"
    accumulate: Annotated[int | None, Option(help="Micro-batches per batch and process, for less memory.", min=1)] = (
        None
    )
    checkpoint_minutes: Annotated[
        float, Option(help="Minutes between checkpoints, besides one after every epoch.", min=0)
    ] = 10.0


@dataclass(frozen=True)
class HeadTrainOptions:
    """Options of a training of the heads on a frozen backbone; None means the recipe's default."""

    epochs: Annotated[int | None, Option(help="Epochs.", show_default="the recipe's")] = None
    batch_size: Annotated[int | None, Option(help="Batch size.", show_default="the recipe's")] = None
    lr: Annotated[float | None, Option(help="Initial learning rate.", show_default="the recipe's")] = None
    distill: Annotated[
        float | None,
        Option(help="Weight of distillation from the last exit, from 0 to 1.", show_default="0"),
    ] = None
    seed: Annotated[int | None, Option(help="Seed for new heads and data order.", show_default="0")] = None


@dataclass(frozen=True)
class CascadeOptions:
    """The networks of a cascade, in the order in which they run."""

    net: Annotated[
        list[str] | None,
        Option(
            help="A network: package.module:function, a model preset, a run, or a file of `save_checkpoint`; @SIZE at "
            "its end gives it smaller images. Repeated, small networks first."
        ),
    ] = None
    candidates: Annotated[
        list[str] | None,
        Option(help="As --net, but in any order: the best chain of up to three of them becomes the run."),
    ] = None
    weights: Annotated[
        list[Path] | None,
        Option(help="Weights of the networks, a file for each in their order; - for one that has its weights."),
    ] = None
    classes: Annotated[
        list[Path] | None,
        Option(
            help="Names of the classes in each network's own order, a file for each with a name per line; "
            "- for the order of the data."
        ),
    ] = None
    train: Annotated[
        bool,
        Option("--train", help="Keep training images for methods with Laplace; validation images are then others."),
    ] = False


@dataclass(frozen=True)
class ClassifierOptions:
    """Choice of a run's classifier; None means as in the last `exitwise evaluate`."""

    budget: Annotated[
        str | None,
        Option(
            help="Mean cost per image: 2e7 (MACs), 50% of the last exit's, or 12ms.",
            show_default="the evaluated one, or 50%",
        ),
    ] = None
    method: Annotated[
        str | None,
        Option(help="Calibration method by name.", show_default="the evaluated one, or auto"),
    ] = None
    score: Annotated[
        str | None,
        Option(
            help="Exit score: confidence, margin, entropy, variance, patience, learned, or auto.",
            show_default="the evaluated one, or auto",
        ),
    ] = None
    strategy: Annotated[
        str | None,
        Option(
            help="Threshold strategy: auto, geometric, optimized or label_free.",
            show_default="the evaluated one, or auto",
        ),
    ] = None
    certify: Annotated[
        float | None,
        Option(
            help="Certify the budget with this failure probability, such as 0.05.",
            show_default="as evaluated",
        ),
    ] = None
