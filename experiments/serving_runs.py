"""A service under thousands of requests: are all rows right, does memory stay flat, does nothing break it?

usage: serving_runs.py rows CIFAR100_DIR | cancelled CIFAR100_DIR | memory | malformed    [--count N] [--out DIR]

rows        1,000 requests of 1 to 64 images at once, with all policies of the family. Every row is compared with what a
            `Session` answers for this image alone at the policy of the answer.
cancelled   The same, and 30 % of the clients disconnect at a random moment before their answer: after a random share of
            the time that this request took when nobody disconnected, which is measured first.
memory      100,000 requests of 1 to 16 images from four clients: resident memory of the server, last quarter of the
            run against the first.
malformed   10,000 malformed requests; after every hundred a good one, which must be answered.

Each starts `exitwise serve` and talks to it over loopback. The first two serve the shipped net, the others a small
bundle. Results go to experiments/serving/NAME.json.
"""

import argparse
import asyncio
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from results import machine, rounded

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from malformed_requests import malformed, malformed_bytes  # noqa: E402
from serving_cases import INFER, Server, family_bundle, started  # noqa: E402

import exitwise as ew  # noqa: E402
from exitwise.core.predictions import Array  # noqa: E402
from exitwise.core.text import escape_controls  # noqa: E402
from exitwise.runtime.onnx import Session  # noqa: E402

TOLERANCE = 1e-5  # batches of other sizes sum in another order
COUNTS = {"rows": 1000, "cancelled": 1000, "memory": 100_000, "malformed": 10_000}


class Connection:
    """An HTTP/1.1 connection to a server, with little work for the client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    @classmethod
    async def open(cls, server: Server) -> "Connection":
        return cls(*await asyncio.open_connection(*server.address))

    def send(self, images: Array, **parameters: Any) -> None:
        """Send a request of binary tensors."""
        data = np.ascontiguousarray(images, dtype="<f4").tobytes()
        tensor = {"name": "image", "shape": images.shape, "datatype": "FP32"}
        tensor["parameters"] = {"binary_data_size": len(data)}
        outputs = [{"name": name} for name in ("probs", "exits")]
        request = {"inputs": [tensor], "outputs": outputs, "parameters": {"binary_data_output": True, **parameters}}
        header = json.dumps(request).encode()
        lines = [f"POST {INFER} HTTP/1.1", "Host: localhost", f"Content-Length: {len(header) + len(data)}"]
        lines += [f"Inference-Header-Content-Length: {len(header)}", "", ""]
        self.writer.write("\r\n".join(lines).encode() + header + data)

    async def receive(self) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of an answer."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        return int(head[0].split()[1]), headers, await self._reader.readexactly(int(headers["content-length"]))


@dataclass(frozen=True)
class Asked:
    """A request for some images of a pool at most at some policy, and its answer; no status if it was cancelled."""

    which: Array
    status: int | None
    policy: int = -1
    probs: Array | None = None
    exits: Array | None = None
    seconds: float = 0.0


async def ask(server: Server, pool: Array, which: Array, budget: float, patience: float | None) -> Asked:
    """Ask for the rows of a pool, on a connection of its own; a client without patience disconnects."""
    connection = await Connection.open(server)
    try:
        start = time.monotonic()
        connection.send(pool[which], budget=budget)
        try:
            async with asyncio.timeout(patience):
                status, headers, body = await connection.receive()
        except TimeoutError:
            return Asked(which, None)
        seconds = time.monotonic() - start
    finally:
        connection.writer.close()
    if status != 200:
        return Asked(which, status)
    length = int(headers["inference-header-content-length"])
    answer = json.loads(body[:length])
    probs, exits = answer["outputs"]
    size = probs["parameters"]["binary_data_size"]
    values = np.frombuffer(body[length : length + size], "<f4").reshape(probs["shape"])
    taken = np.frombuffer(body[length + size :], "<i8").reshape(exits["shape"])
    return Asked(which, status, answer["parameters"]["policy"], values, taken, seconds)


async def ask_at_once(
    server: Server, bundle: Path, pool: Array, count: int, patience: list[float | None] | None = None
) -> list[Asked]:
    """Ask `count` requests of mixed sizes and budgets at once; clients disconnect after their patience in seconds."""
    generator = np.random.default_rng(0)
    family = Session(bundle, threads=1).manifest.family
    assert family is not None
    budgets = [member.budget for member in family]
    plans = []
    for _ in range(count):
        size = min(64, int(generator.geometric(0.2)))
        plans.append((generator.integers(0, len(pool), size), float(generator.choice(budgets))))
    waits = [None] * count if patience is None else patience
    # The system connects some hundred clients at a time.
    return await asyncio.gather(*(ask(server, pool, *plan, wait) for plan, wait in zip(plans, waits, strict=True)))


def choose_patience(asked: list[Asked], share: float) -> list[float | None]:
    """Return for a share of the requests a random part of the time that they took, and None for the others."""
    generator = np.random.default_rng(1)
    chosen = generator.random(len(asked)) < share
    parts = generator.uniform(0.0, 0.9, len(asked))  # less than the whole: the next run is not exactly as fast
    return [
        float(part) * each.seconds if leaves else None for each, part, leaves in zip(asked, parts, chosen, strict=True)
    ]


def compare(bundle: Path, pool: Array, asked: list[Asked]) -> dict[str, Any]:
    """Compare every row with that of a session for the image alone at the policy of the answer."""
    family = Session(bundle, threads=1).manifest.family
    assert family is not None
    sessions = [Session(bundle, threads=1, policy=member.policy) for member in family]
    alone: dict[tuple[int, int], Any] = {}
    wrong = other_exit = rows = 0
    largest, policies = 0.0, Counter[int]()
    for each in asked:
        if each.probs is None or each.exits is None:
            continue
        policies[each.policy] += 1
        for row, image in enumerate(each.which.tolist()):
            key = (image, each.policy)
            if key not in alone:
                alone[key] = sessions[each.policy](pool[image : image + 1])
            expected = alone[key]
            rows += 1
            if int(expected.exits[0]) != int(each.exits[row]):
                # Wrong, unless the score of the image lies on a threshold within rounding.
                near = _distance_to_threshold(sessions[each.policy], pool[image], expected, int(each.exits[row]))
                other_exit += near < TOLERANCE
                wrong += near >= TOLERANCE
                continue
            distance = float(np.abs(each.probs[row] - expected.probs[0]).max())
            largest, wrong = max(largest, distance), wrong + (distance >= TOLERANCE)
    return {
        "rows": rows,
        "wrong rows": wrong,
        "rows on a threshold within rounding": other_exit,
        "largest difference of a probability": largest,
        "requests by policy": dict(sorted(policies.items())),
    }


def _distance_to_threshold(session: Session, image: Array, expected: Any, exit: int) -> float:
    """Return how far the score of an image is from the threshold at which the two answers part."""
    if session.policy.score != "confidence":
        return float("inf")
    first = min(int(expected.exits[0]), exit)
    policy = session.policy
    stop = [-np.inf if k == first else np.inf for k in range(len(policy.thresholds))]
    stop[-1] = -np.inf
    probs = Session(session_path[0], threads=1, policy=ew.Policy(tuple(stop), costs=policy.costs))(image[None]).probs
    return abs(float(probs.max()) - policy.thresholds[first])


session_path: list[Path] = []  # the bundle of this run, for `_distance_to_threshold`


def run_rows(server: Server, bundle: Path, pool: Array, count: int, cancel: float) -> dict[str, Any]:
    """Ask all at once and compare; afterwards nothing may be queued."""
    session_path[:] = [bundle]
    asked = asyncio.run(ask_at_once(server, bundle, pool, count))
    if cancel:
        asked = asyncio.run(ask_at_once(server, bundle, pool, count, choose_patience(asked, cancel)))
    statuses = Counter(each.status for each in asked)
    result = {"requests": count, "answered": statuses.pop(200, 0), "cancelled by the client": statuses.pop(None, 0)}
    result["other statuses"] = {str(status): number for status, number in statuses.items()}
    result |= compare(bundle, pool, asked)
    result["images queued afterwards"] = queued(server)
    return result


def queued(server: Server) -> int:
    """Return the number of images that wait, after one more request was answered."""
    url = server.urls[0]
    lines = httpx.get(url + "/metrics").text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("exitwise_queue_length{")))


def run_memory(server: Server, count: int, shape: tuple[int, ...], clients: int = 4) -> dict[str, Any]:
    """Ask `count` requests of random sizes; return the resident memory of the server over the run, in megabytes."""
    resident: list[float] = []
    statuses = Counter[int]()
    generator = np.random.default_rng(0)
    pool = generator.standard_normal((64, *shape)).astype(np.float32)
    left, reconnected = count, 0

    async def client() -> None:
        nonlocal left, reconnected
        connection = await Connection.open(server)
        while left > 0:
            left -= 1
            images = pool[generator.integers(0, len(pool), generator.integers(1, 17))]
            connection.send(images)
            try:
                status, _, _ = await connection.receive()
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise
                # This client paused for longer than the server keeps idle connections.
                connection = await Connection.open(server)
                connection.send(images)
                status, _, _ = await connection.receive()
                reconnected += 1
            statuses[status] += 1
            if left % max(1, count // 200) == 0:
                resident.append(read_resident(server.process.pid))
        connection.writer.close()

    async def run_all() -> None:
        await asyncio.gather(*(client() for _ in range(clients)))

    start = time.perf_counter()
    asyncio.run(run_all())
    quarter = len(resident) // 4
    first, last = (float(np.mean(part)) for part in (resident[:quarter], resident[-quarter:]))
    return {
        "requests": count,
        "statuses": dict(statuses),
        "reconnected": reconnected,
        "seconds": time.perf_counter() - start,
        "first quarter, megabytes": first,
        "last quarter, megabytes": last,
        "last quarter / first quarter": last / first,
    }


def read_resident(process: int) -> float:
    """Return the resident memory of a process in megabytes."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def run_malformed(server: Server, count: int, good: Array) -> dict[str, Any]:
    """Send malformed requests, most with the syntax of HTTP and every fifth without; return their statuses.

    A slow body is one of each hundred: the client sends a part and waits for the answer.
    """
    url, statuses, strange = server.urls[0], Counter[str](), []
    requests, raw = malformed(count - count // 5), malformed_bytes(count // 5)
    random.Random(0).shuffle(requests)
    good_answers, first_line_of_bytes = 0, Counter[str]()
    with httpx.Client(timeout=60) as client:
        for number in range(count):
            if number % 5 == 4:
                status = send_bytes(server, raw[number // 5])
                first_line_of_bytes[status] += 1
            elif number % 100 == 0:
                head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n" + "{"
                status = send_bytes(server, head.encode())
            else:
                path, request = requests[number - number // 5 - 1]
                status = str(client.post(url + path, **request).status_code)
            statuses[status] += 1
            if not status.startswith("4"):
                strange.append(number)
            if number % 100 == 99:
                good_answers += asyncio.run(_ask_good(server, good)) == 200
    return {
        "requests": count,
        "statuses": dict(sorted(statuses.items())),
        "of bytes that are not HTTP": dict(sorted(first_line_of_bytes.items())),
        "not 4xx": len(strange),
        "good requests between": count // 100,
        "of them answered": good_answers,
        "lines on stderr that are neither JSON nor a message": sum(
            not line.startswith(("{", "exitwise: ")) or line != escape_controls(line) for line in server.lines
        ),
    }


async def _ask_good(server: Server, images: Array) -> int:
    connection = await Connection.open(server)
    connection.send(images)
    status, _, _ = await connection.receive()
    connection.writer.close()
    return status


def send_bytes(server: Server, data: bytes) -> str:
    """Send bytes on a connection of their own; return the status of the answer."""
    import socket

    with socket.create_connection(server.address, timeout=60) as connection:
        received = b""
        try:
            connection.sendall(data)
            while not received.endswith(b"}") and (part := connection.recv(65536)):
                received += part
        except ConnectionError:  # the server has answered and closed before it had read all
            while not received and (part := connection.recv(65536)):
                received += part
    return received[9:12].decode("latin-1") or "none"


def describe(folder: Path) -> list[str]:
    """Return the rows of the table in docs/guides/serving.md, from the results in a folder."""
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in (*COUNTS, "ray")}
    rows, cancelled, memory, bad, ray = (found[name] for name in (*COUNTS, "ray"))
    killed, updated = ray["a replica is killed"], ray["the bundle is updated"]
    policies = len(rows["requests by policy"])
    lost = killed["requests"] - killed["outcomes"]["200"]
    return [
        f"| {rows['requests']:,} requests at once, {rows['rows']:,} images of CIFAR-100, {policies} policies "
        f"| {rows['wrong rows']} wrong rows; the probabilities differ by at most "
        f"{rows['largest difference of a probability']:.1g} from those of `Session` for this image alone |",
        f"| the same, and 30 % of the clients disconnect at a random moment "
        f"| {cancelled['cancelled by the client']} disconnected, {cancelled['answered']} answered; "
        f"{cancelled['wrong rows']} wrong rows, {cancelled['images queued afterwards']} images left in the queues |",
        f"| {memory['requests']:,} requests of 1 to 16 images "
        f"| resident memory of the last quarter / first quarter: {memory['last quarter / first quarter']:.3f} |",
        f"| {bad['requests']:,} malformed requests "
        f"| {bad['requests'] - bad['not 4xx']:,} with status 4xx; {bad['of them answered']} of "
        f"{bad['good requests between']} good ones between them answered |",
        f"| SIGKILL of one of two replicas on Ray, with {ray['clients']} clients "
        f"| {lost} of {killed['requests']:,} requests failed, with status 500; another replica after "
        f"{ray['seconds']['until another replica has started']:.1f} s |",
        f"| update of the bundle of two replicas on Ray, with {ray['clients']} clients "
        f"| {updated['requests'] - updated['outcomes']['200']} of {updated['requests']:,} requests failed |",
    ]


def shipped_bundle(folder: Path) -> Path:
    """Export the shipped net with a family of policies."""
    trace = ew.Trace.load(ew.zoo.path("trace.safetensors"))
    calibration, net = ew.calibrate(trace, "MIE T_opt"), ew.load_net(ew.zoo.path("net.safetensors"))
    costs = trace.costs.values
    budgets = np.linspace(costs[0], costs[-1], 4).tolist()
    fitted = ew.fit_policies(calibration.predict(trace.val), trace.val.labels, trace.costs, budgets=budgets)
    policies = list({policy.cost: policy for policy in fitted}.values())  # two budgets may have the same policy
    ew.Classifier(net, calibration, policies[-1], classes=trace.classes).export(folder, family=policies)
    return folder


def largest_accuracy(bundle: Path) -> float:
    family = Session(bundle, threads=1).manifest.family
    assert family is not None
    return max(member.accuracy or 0.0 for member in family)


def cifar100_images(root: Path) -> Array:
    """Return the test images (n, 3, 32, 32), normalized as the shipped net takes them."""
    from exitwise.data import cifar

    test = cifar.load(cifar.CIFAR100, root)[1]
    pixels = test.pixels[:2000].numpy().astype(np.float32) / 255
    mean, std = (np.asarray(value, dtype=np.float32)[:, None, None] for value in (test.mean, test.std))
    return np.asarray((pixels - mean) / std)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COUNTS)
    parser.add_argument("cifar100", type=Path, nargs="?")
    parser.add_argument("--count", type=int)
    parser.add_argument("--out", type=Path, default=HERE / "serving")
    arguments = parser.parse_args()
    what, count = arguments.what, arguments.count or COUNTS[arguments.what]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "bundle"
        if what in ("rows", "cancelled"):
            bundle, pool = shipped_bundle(folder), cifar100_images(arguments.cifar100)
            options = ["--slo", "600s", "--timeout", "600s", "--max-queue", "100000", "--max-connections", "2000"]
            # The load does not choose cheaper policies: requests ask for them.
            with started(bundle, *options, "--floor", str(largest_accuracy(bundle))) as server:
                result = run_rows(server, bundle, pool, count, 0.3 if what == "cancelled" else 0.0)
        else:
            bundle = family_bundle(folder)
            shape = Session(bundle).manifest.inputs[0].shape
            with started(bundle, "--slo", "60s", "--body-timeout", "200ms", "--max-images", "100") as server:
                if what == "memory":
                    result = run_memory(server, count, shape)
                else:
                    result = run_malformed(server, count, np.zeros((2, *shape), np.float32))
    arguments.out.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine(), **rounded(result)}, indent=2)
    (arguments.out / f"{what}.json").write_text(f"{text}\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
