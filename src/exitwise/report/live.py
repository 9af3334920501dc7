"""The report on a run during training, rewritten after every epoch."""

import time
from pathlib import Path

from exitwise.report.build import training_report
from exitwise.report.page import LIVE_SECONDS, write_page
from exitwise.runs.run import Run


def rewrite_while_training(run: Run, path: Path, command: str, seconds: float = LIVE_SECONDS) -> None:
    """Rewrite the page until the last epoch is done; at the end or on an interrupt, write one that does not reload."""
    written: object = None
    try:
        while True:
            file = run.directory / "history.csv"
            modified = file.stat().st_mtime_ns if file.is_file() else 0
            if modified != written:
                report = training_report(run, live=True, command=command)
                training = report.data["training"]
                if training["of"] is not None and len(training["epochs"]) >= training["of"]:
                    break
                write_page(report, path)
                written = modified
            time.sleep(seconds)
    except KeyboardInterrupt:
        write_page(training_report(run, live=False, command=command), path)
        raise
    write_page(training_report(run, live=False, command=command), path)
