"""Devices, processes, nodes and precision for training and inference, on top of Lightning Fabric."""

import logging
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from exitwise.core.checks import check_choice, check_integer
from exitwise.core.errors import InputError

if TYPE_CHECKING:
    from lightning_fabric import Fabric

ACCELERATORS = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed")  # weights stay in float32
STRATEGIES = ("auto", "ddp")  # every process holds all weights, as checkpoints need them

_LONG_TRAINING = 5000  # batches; compiling takes one or two minutes, and saves about a quarter of the remaining time


# Matrix products and convolutions in these types use other CPU instructions than those in float32.
_PROBE = """
import torch
x = torch.ones(64, 64, 8, 8, dtype=torch.{dtype}, requires_grad=True)
y = torch.nn.functional.conv2d(x, torch.ones(64, 64, 3, 3, dtype=torch.{dtype}))
(y.flatten(1) @ y.flatten(1).T).sum().backward()
"""
_PROBES = {"16-mixed": _PROBE.format(dtype="float16"), "bf16-mixed": _PROBE.format(dtype="bfloat16")}


@dataclass(frozen=True)
class Machine:
    """Devices and precision of a training: one process per device, on every node.

    Args:
        accelerator: "cpu", "cuda", "mps", or "auto": CUDA if it is available, else the CPU.
        devices: Processes on this node, one per device; by default torchrun's number, or 1.
        num_nodes: Number of nodes; by default torchrun's number, or 1.
        precision: "32-true", "16-mixed" or "bf16-mixed"; weights are always float32.
        strategy: "ddp", or "auto": DDP if there are several processes.

    Raises:
        InputError: An argument is invalid.

    Example:
        >>> import exitwise as ew
        >>> ew.Machine(accelerator="cpu", devices=1).fabric().world_size
        1
    """

    accelerator: str = "auto"
    devices: int | None = None
    num_nodes: int | None = None
    precision: str = "32-true"
    strategy: str = "auto"

    def __post_init__(self) -> None:
        check_choice("accelerator", self.accelerator, ACCELERATORS)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("strategy", self.strategy, STRATEGIES)
        if self.devices is not None:
            check_integer("devices", self.devices, 1)
        if self.num_nodes is not None:
            check_integer("num_nodes", self.num_nodes, 1)

    def fabric(self) -> "Fabric":
        """Return a Lightning Fabric with these settings, not yet launched.

        Raises:
            InputError: lightning-fabric is not installed, or this machine lacks the devices or the precision.
        """
        try:
            from lightning_fabric import Fabric
        except ImportError:
            raise InputError("training needs lightning-fabric: pip install 'exitwise[train]'") from None
        accelerator = _resolve_accelerator(self.accelerator)
        devices = self.devices or _from_torchrun("LOCAL_WORLD_SIZE") or 1
        available = _count_devices(accelerator)
        if devices > available:
            kind = "CPU cores" if accelerator == "cpu" else f"{accelerator} devices"
            raise InputError(f"`devices` must be at most the {available} {kind} of this machine, but is {devices}")
        nodes = self.num_nodes or max(1, (_from_torchrun("WORLD_SIZE") or 1) // devices)
        if nodes > 1 and not {"TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_ADDR"} & set(os.environ):
            raise InputError(
                f"`num_nodes` is {nodes}, but the other nodes are unknown: "
                f"set MASTER_ADDR, MASTER_PORT and NODE_RANK on each, or start with torchrun or Slurm"
            )
        logging.getLogger("lightning_fabric").setLevel(logging.ERROR)  # hides its banners
        if accelerator == "cpu" and self.precision in _PROBES and not survives(_PROBES[self.precision]):
            raise InputError(
                f"`precision` {self.precision} does not run here: this CPU announces instructions that it lacks, as "
                f"some virtual machines do; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 in the environment, or use 32-true"
            )
        arguments: dict[str, Any] = {
            "accelerator": accelerator,
            "devices": devices,
            "num_nodes": nodes,
            "precision": self.precision,
            "strategy": "ddp" if self.strategy == "auto" and devices * nodes > 1 else self.strategy,
        }
        try:
            with warnings.catch_warnings(action="ignore"):
                return Fabric(**arguments)
        except (RuntimeError, ValueError) as error:
            raise InputError(f"Lightning Fabric rejects these settings: {' '.join(str(error).split())}") from None


def has_bf16_instructions() -> bool:
    """Return whether this CPU multiplies bfloat16 by itself, and survives it: emulation is slower than float32."""
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # since PyTorch 2.9
    announced = bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return announced and survives(_PROBES["bf16-mixed"])


@cache
def survives(code: str) -> bool:
    """Run Python code in a separate process; return whether it ended without a signal such as SIGILL."""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return process.returncode >= 0


def _resolve_accelerator(accelerator: str) -> str:
    """Replace "auto" with the accelerator to use."""
    if accelerator != "auto":
        return accelerator
    return "cuda" if torch.cuda.is_available() else "cpu"


def _count_devices(accelerator: str) -> int:
    """Return the number of devices of this machine; of the CPU, the cores that this process may use."""
    if accelerator == "cuda":
        return torch.cuda.device_count()
    if accelerator == "mps":
        return int(torch.backends.mps.is_available())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _from_torchrun(name: str) -> int | None:
    """Return a number from torchrun's environment, None if torchrun did not start this process."""
    value = os.environ.get(name) if "TORCHELASTIC_RUN_ID" in os.environ else None
    return int(value) if value else None


def can_compile() -> bool:
    """Return whether the C++ compiler that torch.compile needs is installed."""
    return shutil.which(os.environ.get("CXX") or "g++") is not None


def worth_compiling(batches: int) -> bool:
    """Return whether a training of `batches` batches gains from torch.compile and this machine can compile."""
    return batches >= _LONG_TRAINING and can_compile()


def worth_bf16(batches: int, device: torch.device) -> bool:
    """Return whether a training of `batches` batches gains from bfloat16: a long one on a CPU that has it."""
    return batches >= _LONG_TRAINING and device.type == "cpu" and has_bf16_instructions()
