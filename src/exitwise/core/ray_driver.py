"""The process that uses a Ray cluster for a command: when the cluster ends, Ray ends this process, not the command.

Ray's library ends the process that uses it without an exception if its cluster is stopped, and some of its calls block
for a minute. So the command starts a driver, which has an `ActorPool`, and they exchange
messages over a socket. The work, tasks and results pass through the driver as bytes, which only actors unpickle.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import Any, Self

from exitwise.core.child_environment import child_environment
from exitwise.core.errors import InputError
from exitwise.core.ray_actors import ActorOptions, ActorPool, ClusterWatch, Work
from exitwise.core.ray_cluster import ClusterGoneError, check_ray, ray_cluster

_PROGRAM = "from exitwise.core.ray_driver import main; main()"  # not -m, which would make its classes those of __main__
_POLL_SECONDS = 1.0  # between two looks at the cluster
_GRACE = 20.0  # seconds for the driver to end its actors, and a cluster of its own


class RayDriver:
    """A process that is connected to a Ray cluster. As a context manager it starts and ends it.

    Args:
        address: HOST:PORT of the head of a cluster that has this machine as a node, or "local" for a new one.
        num_cpus: CPUs of a local cluster [default: all that this process may use].

    Attributes:
        resources: What the cluster has, such as "CPU" and "GPU".

    Raises:
        InputError: Ray is not installed, the address is none, or no cluster of the same versions answers there.
    """

    resources: dict[str, float]

    def __init__(self, address: str, num_cpus: int | None = None) -> None:
        self._address, self._num_cpus = address, num_cpus
        self._watch: ClusterWatch | None = None
        self._watched_at = float("-inf")

    def __enter__(self) -> Self:
        check_ray(self._address)
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
            stdin=subprocess.PIPE,  # never written: its end tells the driver that the command is gone
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C is for the command, which then ends the driver
        )
        theirs.close()
        try:
            self.send(self._address, self._num_cpus)
            head, node, self.resources = self.receive()
            self._watch = ClusterWatch(head, node)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """End the driver, and with it its actors."""
        self._connection.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def send(self, *message: Any) -> None:
        """Send a message to the driver."""
        with suppress(BrokenPipeError, ConnectionResetError):  # `receive` finds out why
            _send(self._connection, message)

    def receive(self) -> Any:
        """Return the next message of the driver.

        Raises:
            ClusterGoneError: The cluster does not answer any more, or Ray has ended the driver.
        """
        try:
            message = self._receive()
            if isinstance(message, _Failure) and message.error is not None:
                raise message.error
        except ClusterGoneError:
            self._process.kill()  # it has nothing to end, and may wait for the cluster
            raise
        if isinstance(message, _Failure):
            raise RuntimeError(f"a task on Ray failed:\n{message.text}")
        return message

    def _receive(self) -> Any:
        while True:
            is_ready = self._connection.poll(_POLL_SECONDS)
            if self._watch is not None and time.monotonic() - self._watched_at >= _POLL_SECONDS:
                self._watch.check()  # here, too: the driver may be blocked in a call of Ray
                self._watched_at = time.monotonic()
            if is_ready:
                try:
                    return _receive(self._connection)
                except (EOFError, OSError):
                    raise self._describe_end() from None

    def _describe_end(self) -> InputError:
        if self._watch is None:
            return InputError(f"cannot use Ray at {self._address}: Ray has ended the process that connects")
        if silent := self._watch.find_silent():
            return ClusterGoneError(f"{silent} is gone")
        return ClusterGoneError(f"the Ray cluster at {self._watch.head} has ended the process that used it")


class DriverPool:
    """An `ActorPool` of a driver. As a context manager it starts the actors; they end with the driver.

    Args:
        driver: The process that is connected to the cluster.
        make_work: Called once in every actor when it starts.
        options: Number of actors, and what each needs.
    """

    def __init__(self, driver: RayDriver, make_work: Callable[[], Work], options: ActorOptions) -> None:
        self._driver, self._make_work, self._options = driver, make_work, options

    def __enter__(self) -> Self:
        from ray import cloudpickle  # also for functions of the program that calls us

        work = cloudpickle.dumps(self._make_work)  # type: ignore[no-untyped-call]
        self._driver.send(_PickledWork(work), self._options)
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def run(
        self,
        tasks: Iterable[Any],
        on_death: Callable[[Any, str], None],
        on_progress: Callable[[Any, int], None],
        window: int | None = None,
    ) -> Iterator[tuple[Any, Any]]:
        """Yield (task, result) of every task; see `ActorPool.run`. Every pool runs once."""
        self._driver.send(window)
        numbered, running = enumerate(tasks), dict[int, Any]()
        while message := self._driver.receive():
            kind, number, value = message
            if kind == "next":
                following = next(numbered, None)
                if following is not None:
                    running[following[0]] = following[1]
                self._driver.send(following and (following[0], pickle.dumps(following[1], pickle.HIGHEST_PROTOCOL)))
            elif kind == "death":
                on_death(running[number], value)
            elif kind == "progress":
                on_progress(running[number], value)
            else:
                yield running.pop(number), pickle.loads(value)


@dataclass(frozen=True)
class _PickledWork:
    """Makes the work in an actor, which takes its tasks and returns its results as bytes."""

    data: bytes

    def __call__(self) -> Work:
        work = pickle.loads(self.data)()

        def run(task: tuple[int, bytes], report: Callable[[int], None]) -> bytes:
            return pickle.dumps(work(pickle.loads(task[1]), report), pickle.HIGHEST_PROTOCOL)

        return run


@dataclass(frozen=True)
class _Failure:
    """Why the driver ends: an error for the command, or the text of an unexpected one."""

    error: Exception | None
    text: str = ""


# Connection.send would share the memory of tensors with the other process, in ways that need both to live.
def _send(connection: Connection, message: Any) -> None:
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def _receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def main() -> None:
    """Run an `ActorPool` for the command that started this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=_end_with_command, daemon=True).start()
    connection = Connection(int(sys.argv[1]))
    try:
        _drive(connection)
    except (EOFError, ConnectionError):  # the command does not want more
        pass
    except (InputError, OSError) as error:
        _send(connection, _Failure(error))
    except Exception:  # a bug, or what the caller's own code raised in an actor: the command shows it
        _send(connection, _Failure(None, traceback.format_exc()))


def _end_with_command() -> None:
    """End this process when the command closes its stdin or is killed."""
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_GRACE)
    os._exit(1)


def _drive(connection: Connection) -> None:
    address, num_cpus = _receive(connection)
    with ray_cluster(address, num_cpus) as ray:
        watch = ClusterWatch.of(ray)
        _send(connection, (watch.head, watch.node, dict(ray.cluster_resources())))
        make_work, options = _receive(connection)
        with ActorPool(ray, make_work, options) as pool:
            [window] = _receive(connection)

            def tasks() -> Iterator[Any]:
                _send(connection, ("next", None, None))
                while (task := _receive(connection)[0]) is not None:
                    yield task
                    _send(connection, ("next", None, None))

            def on_death(task: tuple[int, bytes], reason: str) -> None:
                _send(connection, ("death", task[0], reason))

            def on_progress(task: tuple[int, bytes], done: int) -> None:
                _send(connection, ("progress", task[0], done))

            for task, result in pool.run(tasks(), on_death, on_progress, window):
                _send(connection, ("result", task[0], result))
            _send(connection, None)
            connection.poll(None)  # the command ends this process when it has read all
