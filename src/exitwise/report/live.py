"""The report of a run while it trains: written again whenever an epoch is done."""

import time
from pathlib import Path

from exitwise.report.build import training_report
from exitwise.report.page import LIVE_SECONDS, write
from exitwise.runs.run import Run


def rewrite_while_training(run: Run, place: Path, command: str, seconds: float = LIVE_SECONDS) -> None:
    """Write the page until the last epoch is done; an interrupt ends it, and leaves a page that no longer reloads."""
    shown: object = None
    try:
        while True:
            file = run.directory / "history.csv"
            state = file.stat().st_mtime_ns if file.is_file() else 0
            if state != shown:
                report = training_report(run, live=True, command=command)
                training = report.data["training"]
                if training["of"] is not None and len(training["epochs"]) >= training["of"]:
                    break
                write(report, place)
                shown = state
            time.sleep(seconds)
    except KeyboardInterrupt:
        write(training_report(run, live=False, command=command), place)
        raise
    write(training_report(run, live=False, command=command), place)
