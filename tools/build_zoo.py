"""Make the zoo's net from a public-format checkpoint, its trace and real CIFAR-100.

usage: build_zoo.py CHECKPOINT TRACE CIFAR100_ROOT

The results are committed; this is how they were made.
"""

import sys
from pathlib import Path

import torch

import exitwise as ew
from exitwise import data
from exitwise.core.files import write_json
from exitwise.data.holdout import HeldOutPart
from exitwise.runs.run import run_metadata
from exitwise.zoo import NET


def main(checkpoint: str, trace_file: str, root: str) -> None:
    here = Path(ew.zoo.__file__).parent / NET
    net = ew.load_checkpoint(ew.models.msdnet("cifar100-small"), checkpoint)
    ew.save_checkpoint(net, here / "net.safetensors")
    trace = ew.Trace.load(trace_file)
    trace.save(here / "trace.safetensors", dtype=torch.float16)
    train, _ = data.load("cifar100", root)
    index = trace.val.index
    assert index is not None
    assert torch.equal(train.labels[index], trace.val.labels)
    data.HoldOut(HeldOutPart(index, train.fingerprints()[index])).save(here / "split.safetensors")
    write_json(here / "run.json", run_metadata(net.spec or {}, {"name": "cifar100", "root": None}))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
