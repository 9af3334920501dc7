"""The recorded results of INT8 stages: as the page shows them, and as its sentences state."""

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from other_libraries import experiment

import exitwise as ew
from exitwise.core.files import read_json


@pytest.fixture(scope="module")
def int8() -> ModuleType:
    return experiment("int8")


def test_the_page_has_the_recorded_tables(int8: ModuleType) -> None:
    page = int8.PAGE.read_text(encoding="utf-8")
    assert int8.filled(page) == page, "run `python experiments/int8.py --fill`"


def test_sentences_follow_from_the_results(int8: ModuleType) -> None:
    results = read_json(int8.RESULTS)
    times = {
        batch: {name: sum(stages) for name, stages in row.items()} for batch, row in results["milliseconds"].items()
    }
    assert times["batch 1"]["INT8"] > times["batch 1"]["float32"]
    assert 1 - times["batch 64"]["INT8"] / times["batch 64"]["float32"] == pytest.approx(0.13, abs=0.005)
    for found in results["methods"].values():
        assert 0.055 < found["other_exit"] < 0.085
        assert 0.025 < found["other_class_at_last_exit"] < 0.045
        top1 = [row["top1"] for row in found["rows"].values()]
        assert max(top1) - min(top1) < 0.005  # the standard error of 10,000 images


@pytest.mark.slow
def test_quantized_stages_are_close_to_the_float32_ones(int8: ModuleType, tmp_path: Path) -> None:
    net = ew.load_net(ew.zoo.path("net.safetensors")).eval()
    images = np.random.default_rng(0).standard_normal((16, 3, 32, 32), dtype=np.float32)
    files = int8.write_stages(net, tmp_path)[:1]
    for file in int8.quantize_stages(files, images, tmp_path):
        (before,), (after,) = (int8.open_sessions([path]) for path in (files[0], file))
        expected, result = (int8.run_stage(session, [images])[-1] for session in (before, after))
        error = np.abs(result - expected).mean() / np.abs(expected).mean()
        assert 0 < error < 0.2  # eight bits per convolution, over several of them
