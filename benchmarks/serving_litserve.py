"""A server that a user would write with LitServe for a net in one ONNX graph, with its batching.

usage: serving_litserve.py GRAPH    listens on a free port of 127.0.0.1; needs `pip install litserve`

A request is JSON: `images`, the bytes of images (3, 32, 32) in base64. The answer is `{"predicted": [...]}`.
"""

import base64
import logging
import socket
import sys
from typing import Any

import litserve
import numpy as np

MAX_BATCH, BATCH_TIMEOUT = 4, 0.005  # requests, and seconds that the first of them waits for others
MEAN = np.array([0.5071, 0.4867, 0.4408], np.float32).reshape(3, 1, 1)
STD = np.array([0.2675, 0.2565, 0.2761], np.float32).reshape(3, 1, 1)


class Classify(litserve.LitAPI):
    def setup(self, device: str) -> None:
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = settings.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(sys.argv[1], settings, providers=["CPUExecutionProvider"])

    def decode_request(self, request: dict[str, str]) -> np.ndarray:
        pixels = np.frombuffer(base64.b64decode(request["images"]), np.uint8).reshape(-1, 3, 32, 32)
        return (pixels.astype(np.float32) / 255 - MEAN) / STD

    def batch(self, inputs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        return np.concatenate(inputs), np.cumsum([len(images) for images in inputs])

    def predict(self, batch: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        images, ends = batch
        return self.session.run(["probs"], {"image": images})[0].argmax(axis=1), ends

    def unbatch(self, output: tuple[np.ndarray, np.ndarray]) -> list[np.ndarray]:
        return np.split(output[0], output[1][:-1])

    def encode_response(self, output: np.ndarray) -> dict[str, Any]:
        return {"predicted": output.tolist()}


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name in ("uvicorn", "uvicorn.access", "litserve"):
        logging.getLogger(name).setLevel(logging.INFO if name == "uvicorn" else logging.WARNING)
    api = Classify(max_batch_size=MAX_BATCH, batch_timeout=BATCH_TIMEOUT)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="info", access_log=False)


if __name__ == "__main__":
    main()
