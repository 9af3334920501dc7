"""Worker process of `exitwise score`: takes numbers of shards from stdin and answers with lines of JSON on stdout.

The command starts it with `python -m exitwise.scoring.worker BUNDLE THREADS`. Its first line is the location of the
job, every other line the number of a shard. When stdin ends, because the command ended or was killed, the process
exits at once: a shard is committed completely or not at all.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from exitwise.core.errors import InputError
from exitwise.scoring.shard_scorer import LoadedBundle, ShardScorer
from exitwise.scoring.storage import describe_error, describe_job_error

_PROGRESS_SECONDS = 0.5  # between two messages


def main() -> None:
    """Score shards until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the command ends its workers
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints goes to stderr
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(lines,), daemon=True).start()

    def send(**message: Any) -> None:
        try:
            answers.write(json.dumps(message).encode() + b"\n")
        except BrokenPipeError:
            os._exit(1)

    try:
        loaded = LoadedBundle(sys.argv[1], int(sys.argv[2]))
        send(ready=loaded.fingerprint)
        location = json.loads(lines.get())
        try:
            _score_shards(ShardScorer(location, loaded), lines, send)
        except OSError as error:
            send(failure=describe_job_error(error, location))
    except InputError as error:
        send(failure=str(error))
    except OSError as error:
        send(failure=f"{error.filename or sys.argv[1]}: {describe_error(error)}")


def _read_lines(lines: "queue.SimpleQueue[str]") -> None:
    for line in sys.stdin:
        lines.put(line.strip())
    os._exit(0)


def _score_shards(scorer: ShardScorer, lines: "queue.SimpleQueue[str]", send: Callable[..., None]) -> None:
    while True:
        shard, last = int(lines.get()), [time.monotonic()]

        def on_progress(images: int, shard: int = shard, last: list[float] = last) -> None:
            now = time.monotonic()
            if now - last[0] > _PROGRESS_SECONDS:
                last[0] = now
                send(shard=shard, images=images)

        report = scorer.score(shard, on_progress)
        send(
            shard=shard,
            counts=report.counts.to_dict(),
            seconds=report.seconds,
            read_seconds=report.read_seconds,
        )


if __name__ == "__main__":
    main()
