"""Worker processes on this machine."""

import json
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from exitwise.core.checks import check_integer
from exitwise.core.child_environment import child_environment
from exitwise.core.errors import InputError
from exitwise.scoring.attempts import DeathCounter
from exitwise.scoring.executors import Event, ShardProgress
from exitwise.scoring.job import Job
from exitwise.scoring.parts import ShardCounts
from exitwise.scoring.shard_scorer import ShardReport

_STARTS = 3  # of a worker that dies before it is ready
_GRACE = 10.0  # seconds for a worker to exit after its stdin was closed


class LocalExecutor:
    """Runs shards in processes of this machine, each with a session of its own.

    Args:
        bundle: Folder of the bundle.
        workers: Number of processes.
        threads: Threads of onnxruntime in each.
    """

    def __init__(self, bundle: str | Path, workers: int = 1, threads: int = 1) -> None:
        self._bundle, self._threads = str(bundle), check_integer("threads", threads, 1)
        self._number = check_integer("workers", workers, 1)
        self._messages: queue.SimpleQueue[tuple[_Worker, dict[str, Any] | None]] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._ended: list[_Worker] = []
        self._failed_starts = 0

    def __enter__(self) -> Self:
        try:
            for _ in range(self._number):
                self._start_worker()
        except BaseException:
            self._end_workers()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_workers()

    def _start_worker(self) -> None:
        self._workers.append(_Worker(self._bundle, self._threads, self._messages))

    def _end_workers(self) -> None:
        while self._workers:
            self._end_worker(self._workers[-1])
        for worker in self._ended:
            worker.wait()
        self._ended.clear()

    def _end_worker(self, worker: "_Worker") -> None:
        self._workers.remove(worker)
        self._ended.append(worker)
        worker.close()

    def run(self, job: Job, shards: Sequence[int], on_event: Callable[[Event], None]) -> None:
        """Score the shards; see `Executor.run`."""
        waiting, left = deque(shards), set(shards)
        deaths = DeathCounter(job.storage, job.attempts_folder)
        while len(self._workers) > len(left):
            self._end_worker(self._workers[-1])
        while left:
            worker, message = self._messages.get()
            if worker not in self._workers:
                continue
            if message is None:
                self._replace(worker, deaths, waiting, on_event)
            elif "failure" in message:
                raise InputError(message["failure"])
            elif "ready" in message:
                self._failed_starts = 0
                worker.send(job.location)
                worker.is_ready = True
                worker.take(waiting)
            elif "counts" in message:
                report = ShardReport(
                    message["shard"],
                    ShardCounts.from_dict(message["counts"]),
                    message["seconds"],
                    message["read_seconds"],
                )
                left.discard(report.shard)
                worker.shard = None
                worker.take(waiting)
                on_event(report)
            else:
                on_event(ShardProgress(message["shard"], message["images"]))

    def _replace(
        self, worker: "_Worker", deaths: DeathCounter, waiting: deque[int], on_event: Callable[[Event], None]
    ) -> None:
        """Start a worker in place of one that died, and let another take its shard."""
        reason = worker.describe_death()
        self._end_worker(worker)
        if worker.shard is None:
            self._failed_starts += 1
            if self._failed_starts >= _STARTS:
                raise InputError(f"a worker died before it was ready {_STARTS} times ({reason})")
        else:
            on_event(ShardProgress(worker.shard, 0))
            if not deaths.add(worker.shard):
                raise InputError(
                    f"workers died again and again on shard {worker.shard} ({reason}), and not for one image: if it is "
                    f"for lack of memory, use fewer --workers. What is scored stays; the same command resumes"
                )
            waiting.appendleft(worker.shard)
        self._start_worker()
        for other in self._workers:
            if other.is_ready and other.shard is None:
                other.take(waiting)


class _Worker:
    """A process that scores shards, and the threads that read what it writes."""

    def __init__(
        self, bundle: str, threads: int, messages: "queue.SimpleQueue[tuple[_Worker, dict[str, Any] | None]]"
    ) -> None:
        self.shard: int | None = None
        self.is_ready = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "exitwise.scoring.worker", bundle, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=child_environment(),
            encoding="utf-8",
            errors="replace",  # a library may print names of files in any encoding
        )
        self._last_lines: deque[str] = deque(maxlen=5)
        self._readers = [
            threading.Thread(target=self._read_errors, daemon=True),
            threading.Thread(target=self._read_messages, args=(messages,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.strip():
                self._last_lines.append(line.strip())

    def _read_messages(self, messages: "queue.SimpleQueue[tuple[_Worker, dict[str, Any] | None]]") -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):
                messages.put((self, json.loads(line)))
        messages.put((self, None))

    def take(self, waiting: deque[int]) -> None:
        """Send the next shard, if there is one."""
        if waiting:
            self.shard = waiting.popleft()
            self.send(self.shard)

    def send(self, value: Any) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # of a process that died, which its reader reports
            self.process.stdin.write(json.dumps(value) + "\n")
            self.process.stdin.flush()

    def describe_death(self) -> str:
        """Return how the process ended, with the last line that it printed."""
        status = self.process.wait()
        self._readers[0].join()
        how = f"exit status {status}"
        if status < 0:
            how = f"killed by {signal.Signals(-status).name}" if -status in set(signal.Signals) else f"signal {-status}"
        return ": ".join([how, *list(self._last_lines)[-1:]])

    def close(self) -> None:
        """Let the process exit: at once if it is not ready, because then it holds nothing."""
        assert self.process.stdin is not None
        if not self.is_ready:
            self.process.kill()
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def wait(self) -> None:
        """Wait until the process has exited, and kill it if it does not."""
        try:
            self.process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for reader in self._readers:
            reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
