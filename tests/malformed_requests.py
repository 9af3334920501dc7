"""Requests that are wrong in every way: for an application without a network, and as bytes for a connection."""

import json
import random
from collections.abc import Callable
from typing import Any

from serving_cases import INFER, infer_body, png, some_images

FILES = ("/classify", "/explain")  # paths that take image files


def malformed(count: int, seed: int = 0) -> list[tuple[str, dict[str, Any]]]:
    """Return requests that are wrong in one way each: the path, and arguments of httpx."""
    generator = random.Random(seed)
    good = infer_body(some_images(2))
    spec = good["inputs"][0]
    text = json.dumps(good).encode()
    values: list[Any] = [None, True, -1, 0, 3.5, 1e308, 2**70, "x", [], {}, [[]], "NaN", [1, "2"], {"a": []}, "\ud800"]
    not_objects, wishes = [True, -1, 3.5, "x", [], [[]], {"a": []}, {"a": None}], ["budget", "deadline_ms"]
    no_wish: list[Any] = [-1, 0, "x", "", "-5%", "%", "nan", "inf", True, "1e999", 2**70 * -1]
    boundary = {"Content-Type": "multipart/form-data; boundary=XX"}
    part = b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a.png"\r\n\r\n' + png() + b"\r\n--XX--\r\n"

    def changed(**fields: Any) -> bytes:
        return json.dumps({"inputs": [{**spec, **fields}]}).encode()

    makers: list[Callable[[], tuple[str, dict[str, Any]]]] = [
        lambda: (INFER, {"content": text[: generator.randrange(len(text))]}),
        lambda: (INFER, {"content": generator.randbytes(generator.randrange(1, 200))}),
        lambda: (INFER, {"content": b"[" * generator.randrange(1, 100_000)}),
        lambda: (INFER, {"content": changed(shape=generator.choice([*values, [2, 1, 8], [2, -1, 8, 8], [2**40, 1]]))}),
        lambda: (INFER, {"content": changed(shape=[generator.choice([0, 1, 3, 200, 2**31, -2]), 1, 8, 8])}),
        lambda: (INFER, {"content": changed(datatype=generator.choice([*values, "FP8", "BYTES", "INT64", "BOOL"]))}),
        lambda: (INFER, {"content": changed(data=generator.choice([*values, [1.0] * 127, [[1.0], [1.0, 2.0]]]))}),
        lambda: (INFER, {"content": changed(name=generator.choice([*values, "images", "", "a" * 1000]))}),
        lambda: (INFER, {"content": changed(parameters={"binary_data_size": generator.choice([*values, 512])})}),
        lambda: (INFER, {"content": json.dumps(good).replace("0.", "NaN, 0.", 1).encode()}),
        lambda: (
            INFER,
            {"content": json.dumps({**good, "inputs": generator.choice([*values, [spec, spec]])}).encode()},
        ),
        lambda: (INFER, {"content": json.dumps({**good, "parameters": generator.choice(not_objects)}).encode()}),
        lambda: (
            INFER,
            {
                "content": json.dumps(
                    {**good, "parameters": {generator.choice(wishes): generator.choice(no_wish)}}
                ).encode()
            },
        ),
        lambda: (INFER, {"content": json.dumps({**good, "outputs": [generator.choice(values[1:])]}).encode()}),
        lambda: (INFER, {"content": json.dumps({**good, "id": generator.choice([*values[1:7], ["a"]])}).encode()}),
        lambda: (
            INFER,
            {
                "content": text,
                "headers": {
                    "Inference-Header-Content-Length": generator.choice(
                        ["-1", "0", "x", "9" * 30, "1e3", "10", "99999"]
                    )
                },
            },
        ),
        lambda: (generator.choice(FILES), {"content": generator.randbytes(generator.randrange(300))}),
        lambda: (generator.choice(FILES), {"content": png()[: generator.randrange(60)]}),
        lambda: (generator.choice(FILES), {"content": part[: generator.randrange(len(part) - 4)], "headers": boundary}),
        lambda: (generator.choice(FILES), {"content": part, "headers": {"Content-Type": "multipart/form-data"}}),
        lambda: (generator.choice(FILES), {"content": part.replace(b"\r\n", b"\n"), "headers": boundary}),
        lambda: (
            generator.choice(FILES),
            {"content": png(), "headers": {"Content-Type": generator.choice(["text/html", "a/b"])}},
        ),
        lambda: (
            generator.choice(FILES),
            {"content": png(), "params": {"top": generator.choice(["0", "-1", "x", "\u0663", "9" * 50])}},
        ),
        lambda: (
            "/classify",
            {"content": png(), "params": {"deadline_ms": generator.choice(["0", "nan", "inf", "-3"])}},
        ),
        lambda: (
            "/v2/models/" + generator.choice(["other", "..%2f..", "\u00e9", "x" * 5000]) + "/infer",
            {"content": text},
        ),
    ]
    return [makers[k % len(makers)]() for k in range(count)]


def malformed_bytes(count: int, seed: int = 0) -> list[bytes]:
    """Return bytes that are no valid HTTP request, or one whose body is not what its headers say."""
    generator = random.Random(seed)
    head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\n"

    def with_length(*lengths: object) -> bytes:
        return (head + "".join(f"Content-Length: {length}\r\n" for length in lengths) + "\r\n{}").encode()

    def chunked(data: bytes) -> bytes:
        return head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + data

    makers: list[Callable[[], bytes]] = [
        lambda: with_length(generator.choice(["-1", "x", "1e3", "0x10", "9" * 40, "+5", "2 2", str(2**63)])),
        lambda: with_length(2, 3),
        lambda: head.encode() + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        lambda: chunked(generator.choice([b"zz\r\n{}\r\n0\r\n\r\n", b"-2\r\n{}\r\n", b"f" * 40 + b"\r\n{}\r\n"])),
        lambda: chunked(b"1\r\n{\r\n0\r\n\r\n"),
        lambda: generator.randbytes(generator.randrange(8, 300)) + b"\r\n\r\n",
        lambda: f"POST {INFER}\r\n\r\n".encode(),
        lambda: f"POST {INFER} HTTP/9.9\r\nHost: localhost\r\n\r\n".encode(),
        lambda: f"POST {INFER} HTTP/1.1\r\n\r\n".encode(),  # no host
        lambda: (head + "X: " + "y" * 70_000 + "\r\n\r\n").encode(),
        lambda: (head + "X: y\r\n" * 20_000 + "\r\n").encode(),
        lambda: f"POST /{'../' * generator.randrange(1, 9)}etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(),
        lambda: (head + "Bad Name: x\r\n\r\n").encode(),
        lambda: (head + "X: \x00\r\n\r\n").encode("latin-1"),
    ]
    return [makers[k % len(makers)]() for k in range(count)]
