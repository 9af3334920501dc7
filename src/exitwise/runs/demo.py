"""The demo run: the shipped net and its trace, calibrated with the paper's twelve methods."""

import shutil
from pathlib import Path

from exitwise import zoo
from exitwise.calibration.trace import Trace
from exitwise.calibration.tuning import Tuner
from exitwise.core.files import atomic_directory
from exitwise.evaluation.paper_tables import PaperTables, make_paper_tables
from exitwise.runs.run import Run

_FILES = ("run.json", "net.safetensors", "trace.safetensors", "split.safetensors", "CARD.md")


def create_demo_run(directory: Path, force: bool) -> tuple[Run, PaperTables]:
    """Copy the shipped net to a new run, calibrate it, and store the calibrations and the tables."""
    with atomic_directory(directory, force) as new:
        for name in _FILES:
            shutil.copyfile(zoo.path(name), new / name)
        trace = Trace.load(new / "trace.safetensors")
        paper_tables = make_paper_tables(trace, Tuner(trace))
        run = Run(new)
        for calibration in paper_tables.calibrations.values():
            calibration.save(run.calibration_file(calibration.method))
        run.add_results(ablation=paper_tables.ablation.to_dict(), decisions=paper_tables.decisions.to_dict())
    return Run(directory), paper_tables
