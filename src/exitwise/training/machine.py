"""Where a net is trained or run: devices, processes, nodes, precision. Lightning Fabric does the work."""

import logging
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from exitwise.core.errors import InputError

if TYPE_CHECKING:
    from lightning_fabric import Fabric

ACCELERATORS = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed")  # weights stay in float32
STRATEGIES = ("auto", "ddp")  # those under which every process holds the whole net, as our files do


# Products and convolutions of these types take other instructions than those of float32.
_PROBE = """
import torch
x = torch.ones(64, 64, 8, 8, dtype=torch.{dtype}, requires_grad=True)
y = torch.nn.functional.conv2d(x, torch.ones(64, 64, 3, 3, dtype=torch.{dtype}))
(y.flatten(1) @ y.flatten(1).T).sum().backward()
"""
_PROBES = {"16-mixed": _PROBE.format(dtype="float16"), "bf16-mixed": _PROBE.format(dtype="bfloat16")}


@dataclass(frozen=True)
class Machine:
    """One process per device, on every node. Under torchrun, numbers that are not given are torchrun's."""

    accelerator: str = "auto"
    devices: int | None = None
    num_nodes: int | None = None
    precision: str = "32-true"
    strategy: str = "auto"

    def __post_init__(self) -> None:
        for name, known in (("accelerator", ACCELERATORS), ("precision", PRECISIONS), ("strategy", STRATEGIES)):
            if getattr(self, name) not in known:
                raise InputError(f"`{name}` must be one of {', '.join(known)}, but got {getattr(self, name)!r}")
        for name in ("devices", "num_nodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"`{name}` must be at least 1, but got {value}")

    def fabric(self) -> "Fabric":
        """Fabric for it, not yet launched."""
        try:
            from lightning_fabric import Fabric
        except ImportError:
            raise InputError("training needs lightning-fabric: pip install 'exitwise[train]'") from None
        accelerator = _resolved(self.accelerator)
        devices = self.devices or _from_torchrun("LOCAL_WORLD_SIZE") or 1
        there = _count(accelerator)
        if devices > there:
            kind = "CPU cores" if accelerator == "cpu" else f"{accelerator} devices"
            raise InputError(f"`devices` must be at most the {there} {kind} of this machine, but is {devices}")
        nodes = self.num_nodes or max(1, (_from_torchrun("WORLD_SIZE") or 1) // devices)
        if nodes > 1 and not {"TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_ADDR"} & set(os.environ):
            raise InputError(
                f"`num_nodes` {nodes} needs to know the other nodes: "
                f"set MASTER_ADDR, MASTER_PORT and NODE_RANK on each, or start it by torchrun or Slurm"
            )
        logging.getLogger("lightning_fabric").setLevel(logging.ERROR)  # its banners are not ours
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
            raise InputError(f"this machine cannot do that: {' '.join(str(error).split())}") from None


@cache
def survives(code: str) -> bool:
    """Run Python code in a process of its own, and return whether no signal ended it."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done.returncode >= 0


def _resolved(accelerator: str) -> str:
    if accelerator != "auto":
        return accelerator
    return "cuda" if torch.cuda.is_available() else "cpu"


def _count(accelerator: str) -> int:
    if accelerator == "cuda":
        return torch.cuda.device_count()
    if accelerator == "mps":
        return int(torch.backends.mps.is_available())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _from_torchrun(name: str) -> int | None:
    value = os.environ.get(name) if "TORCHELASTIC_RUN_ID" in os.environ else None
    return int(value) if value else None
