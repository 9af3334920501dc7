"""The experiments with a service, at a small size, and the results that are committed."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from paths import ROOT
from serving_cases import family_bundle, started

from exitwise.runtime.onnx import Session

RESULTS = ROOT / "experiments" / "serving"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_bundle(tmp_path_factory.mktemp("serving") / "bundle")


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    import serving_runs

    return serving_runs


def images(bundle: Path, n: int) -> Any:
    shape = Session(bundle, threads=1).manifest.inputs[0].shape
    generator = np.random.default_rng(0)
    return (generator.standard_normal((n, *shape)) * generator.uniform(0.2, 3, (n, 1, 1, 1))).astype(np.float32)


@pytest.mark.slow
def test_rows_of_many_requests_at_once_are_right_whoever_disconnects(serving: ModuleType, bundle: Path) -> None:
    pool = images(bundle, 100)
    with started(bundle, "--slo", "600s", "--max-queue", "100000") as server:
        result = serving.run_rows(server, bundle, pool, 150, 0.0)
        assert result["answered"] == 150
        assert result["rows"] > 400
        assert len(result["requests by policy"]) == 4
        assert (result["wrong rows"], result["other statuses"], result["images queued afterwards"]) == (0, {}, 0)
        cancelled = serving.run_rows(server, bundle, pool, 150, 0.3)
        assert cancelled["answered"] + cancelled["cancelled by the client"] == 150
        assert (cancelled["wrong rows"], cancelled["images queued afterwards"]) == (0, 0)


@pytest.mark.slow
def test_a_wrong_row_is_found(serving: ModuleType, bundle: Path) -> None:
    pool = images(bundle, 4)
    family = Session(bundle, threads=1).manifest.family
    assert family is not None
    answer = Session(bundle, threads=1, policy=family[2].policy)(pool)
    serving.session_path[:] = [bundle]
    right = serving.Asked(np.arange(4), 200, 2, answer.probs, answer.exits)
    assert serving.compare(bundle, pool, [right])["wrong rows"] == 0
    swapped = serving.Asked(np.array([0, 1, 3, 2]), 200, 2, answer.probs, answer.exits)
    assert serving.compare(bundle, pool, [swapped])["wrong rows"] == 2


@pytest.mark.slow
def test_small_runs_of_memory_and_of_malformed_requests(serving: ModuleType, bundle: Path) -> None:
    with started(bundle, "--slo", "60s", "--body-timeout", "200ms", "--max-images", "100") as server:
        memory = serving.run_memory(server, 400, Session(bundle).manifest.inputs[0].shape)
        assert memory["statuses"] == {200: 400}
        assert memory["last quarter, megabytes"] > 10
        malformed = serving.run_malformed(server, 300, images(bundle, 2))
    assert malformed["not 4xx"] == 0
    assert set(malformed["statuses"]) >= {"400", "404", "408", "413", "415"}
    assert malformed["of them answered"] == malformed["good requests between"] == 3
    assert malformed["lines on stderr that are neither JSON nor a message"] == 0


def test_the_committed_results() -> None:
    found = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in ("rows", "cancelled", "memory")}
    assert found["rows"]["answered"] == found["rows"]["requests"] == 1000
    assert found["cancelled"]["cancelled by the client"] > 100
    for name in ("rows", "cancelled"):
        assert (found[name]["wrong rows"], found[name]["images queued afterwards"]) == (0, 0)
        assert len(found[name]["requests by policy"]) > 2
    assert found["memory"]["statuses"] == {"200": 100_000}
    assert abs(found["memory"]["last quarter / first quarter"] - 1) < 0.05
    malformed = json.loads((RESULTS / "malformed.json").read_text())
    assert (malformed["requests"], malformed["not 4xx"]) == (10_000, 0)
    assert malformed["of them answered"] == malformed["good requests between"] == 100
    ray = json.loads((RESULTS / "ray.json").read_text())
    assert set(ray["a replica is killed"]["outcomes"]) <= {"200", "500"}
    assert set(ray["the bundle is updated"]["outcomes"]) == {"200"}
