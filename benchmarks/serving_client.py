"""Open-loop HTTP load: Poisson arrivals that do not wait for answers, in a process of their own. No torch here.

usage: serving_client.py < PLAN    the plan is a line of JSON, see `Plan`; prints a line of JSON with a list per column

Requests are complete bytes before the first one is sent, and answers are parsed after the last, so that the client
needs little time between. A latency counts from the time at which the request should have been sent.
"""

import asyncio
import base64
import gc
import json
import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

NO_ANSWER = 0  # status of a request that the client gave up, or whose connection broke


@dataclass(frozen=True)
class Plan:
    """A load: where, how fast for how long, and what.

    Args:
        port: Port of the server on 127.0.0.1.
        phases: Pairs (requests per second, seconds), one after the other.
        images: File (.npz) with `images` (n, 3, 32, 32) of bytes, `labels` (n,), and `plain` (n,): whether the plain
            net classifies an image correctly.
        sizes: Numbers of images per request, drawn with equal probability.
        protocol: How requests are written: v2, or base64 for JSON with the bytes of all images.
        path: Path of the requests.
        core: Core that the client is bound to; None leaves it to the system.
        closed: If positive, so many connections send one request after the other, and the rates do not count.
        give_up: Seconds after which the client closes the connection.
        seed: Seed of arrivals, images and sizes.
    """

    port: int
    phases: list[tuple[float, float]]
    images: str
    sizes: list[int]
    protocol: str = "v2"
    path: str = "/v2/models/model/infer"
    core: int | None = None
    closed: int = 0
    give_up: float = 1.0
    seed: int = 0


class _Connection(asyncio.Protocol):
    """A connection that is kept open; has at most one request at a time."""

    def __init__(self, load: "_Load") -> None:
        self._load = load
        self._buffer = b""
        self._timer: asyncio.TimerHandle | None = None
        self.transport: Any = None
        self.number = -1

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def send(self, number: int, give_up: float) -> None:
        self.number = number
        self.transport.write(self._load.requests[number])
        self._timer = asyncio.get_running_loop().call_later(give_up, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._buffer[:end].lower()
        start = head.index(b"content-length:") + 15
        length = int(head[start:].split(b"\r\n", 1)[0])
        if len(self._buffer) >= end + 4 + length:
            answer, self._buffer = self._buffer, b""
            self._finish(answer, reusable=b"connection: close" not in head)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._load.forget(self)
        self._finish(b"", reusable=False)

    def _finish(self, answer: bytes, reusable: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
        number, self.number = self.number, -1
        if number >= 0:
            self._load.finish(number, answer, self if reusable else None)


class _Load:
    """Requests of a plan, their times, and their answers."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        generator = np.random.default_rng(plan.seed)
        times, start = [], 0.0
        for rate, seconds in plan.phases:
            gaps = generator.exponential(1 / rate, int(rate * seconds * 1.3) + 100)
            arrivals = np.cumsum(gaps)
            times.append(start + arrivals[arrivals < seconds])
            start += seconds
        self.seconds = start
        self.due = np.concatenate(times)
        with np.load(plan.images) as file:
            images, labels, plain = file["images"], file["labels"], file["plain"]
        ends = np.cumsum(generator.choice(plan.sizes, len(self.due)))
        # All images are sent before one is sent again, so that accuracies of two loads hardly differ by chance.
        rounds = -(-int(ends[-1]) // len(images)) if len(ends) else 0
        order = np.concatenate([generator.permutation(len(images)) for _ in range(rounds)] or [np.arange(0)])
        self.chosen = [rows.tolist() for rows in np.split(order[: int(ends[-1])], ends[:-1])] if rounds else []
        self.labels = [labels[rows].tolist() for rows in self.chosen]
        self.plain_correct = [int(plain[rows].sum()) for rows in self.chosen]
        self.requests = [_write_request(plan, images[rows]) for rows in self.chosen]
        self.sent = np.full(len(self.due), np.nan)
        self.done = np.full(len(self.due), np.nan)
        self.answers = [b""] * len(self.due)
        self._idle: deque[_Connection] = deque()
        self._open = 0
        self._next = 0
        self._finished = asyncio.Event()
        self._start = 0.0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        first = [await self._connect() for _ in range(self._plan.closed or 16)]
        self._start = loop.time() + 0.05
        if self._plan.closed:
            for connection in first:
                self._send(connection)
            await asyncio.sleep(self.seconds + 0.05)
            self._next = len(self.due)
        else:
            self._idle.extend(first)
            waiting: set[asyncio.Task[None]] = set()
            while self._next < len(self.due):
                delay = self._start + self.due[self._next] - loop.time()
                if delay > 0:
                    await asyncio.sleep(delay)
                    continue
                if self._idle:
                    self._send(self._idle.pop())
                else:  # the request is sent as soon as its connection is open
                    task = asyncio.create_task(self._send_on_new(self._take_number()))
                    waiting.add(task)
                    task.add_done_callback(waiting.discard)
                    await asyncio.sleep(0)
        if self._open:
            await asyncio.wait_for(self._finished.wait(), self._plan.give_up + 5)

    async def _connect(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(self), "127.0.0.1", self._plan.port
        )
        return connection

    def _take_number(self) -> int:
        number, self._next = self._next, self._next + 1
        self._open += 1
        return number

    async def _send_on_new(self, number: int) -> None:
        try:
            connection = await self._connect()
        except OSError:
            self.finish(number, b"", None)
            return
        self._send(connection, number)

    def _send(self, connection: _Connection, number: int | None = None) -> None:
        number = self._take_number() if number is None else number
        self.sent[number] = time.monotonic() - self._start
        connection.send(number, self._plan.give_up)

    def finish(self, number: int, answer: bytes, connection: _Connection | None) -> None:
        """Note an answer, which is empty if there was none, and use its connection again."""
        self.done[number] = time.monotonic() - self._start
        self.answers[number] = answer
        self._open -= 1
        if connection is not None and not connection.transport.is_closing():
            if self._plan.closed and self._next < len(self.due):
                self._send(connection)
            elif not self._plan.closed:
                self._idle.append(connection)
        if not self._open and self._next >= len(self.due):
            self._finished.set()

    def forget(self, connection: _Connection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def columns(self) -> dict[str, list[Any]]:
        """Return a list per column: due and sent times, latency, status, numbers of images and of correct ones.

        `plain_correct` is the number of images that the plain net classifies correctly.
        """
        rows = [_read_answer(answer, labels) for answer, labels in zip(self.answers, self.labels, strict=True)]
        known = ~np.isnan(self.done)
        begin = self.sent if self._plan.closed else self.due
        columns = {"due": self.due, "late": self.sent - self.due, "done": self.done, "latency": self.done - begin}
        found = {name: np.round(values[known], 6).tolist() for name, values in columns.items()}
        for name in ("status", "correct", "budget"):
            found[name] = [row[name] for row, keep in zip(rows, known, strict=True) if keep]
        found["images"] = [len(labels) for labels, keep in zip(self.labels, known, strict=True) if keep]
        found["plain_correct"] = [number for number, keep in zip(self.plain_correct, known, strict=True) if keep]
        return found


def _write_request(plan: Plan, images: Any) -> bytes:
    data, header = images.tobytes(), b""
    kind = "application/octet-stream"
    if plan.protocol == "v2":
        tensor = {
            "name": "image",
            "shape": list(images.shape),
            "datatype": "UINT8",
            "parameters": {"binary_data_size": len(data)},
        }
        text = json.dumps({"inputs": [tensor], "outputs": [{"name": "predicted"}]}).encode()
        header, data = b"Inference-Header-Content-Length: %d\r\n" % len(text), text + data
    elif plan.protocol == "base64":
        kind, data = "application/json", json.dumps({"images": base64.b64encode(data).decode()}).encode()
    return (
        b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: %b\r\n%bContent-Length: %d\r\n\r\n"
        % (plan.path.encode(), kind.encode(), header, len(data))
        + data
    )


def _read_answer(answer: bytes, labels: list[int]) -> dict[str, Any]:
    """Return status, correct predictions and budget of an answer in the V2 form, or of `{"predicted": [...]}`."""
    status = int(answer[9:12]) if answer else NO_ANSWER
    if status != 200:
        return {"status": status, "correct": 0, "budget": None}
    data = json.loads(answer[answer.index(b"\r\n\r\n") + 4 :])
    predicted = data["predicted"] if "predicted" in data else data["outputs"][0]["data"]
    correct = sum(int(one == other) for one, other in zip(predicted, labels, strict=True))
    return {"status": status, "correct": correct, "budget": data.get("parameters", {}).get("budget")}


def main() -> None:
    plan = Plan(**json.loads(sys.stdin.readline()))
    if plan.core is not None:
        os.sched_setaffinity(0, {plan.core})
    load = _Load(plan)
    gc.disable()
    start, used = time.monotonic(), time.process_time()
    asyncio.run(load.run())
    busy = (time.process_time() - used) / (time.monotonic() - start)
    print(json.dumps({**load.columns(), "client_busy": busy}))


if __name__ == "__main__":
    main()
