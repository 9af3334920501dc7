"""ONNX bundles predict as torch does, and only graphs that match the manifest run."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
from classifier_cases import (
    BYTES,
    OURS,
    VANILLA,
    WRONG,
    assert_as_simulated,
    changed,
    classifier,
    fitted,
    of_shape,
    pictures,
    refused,
    simulated,
    some_images,
)
from command import contents
from paths import ROOT
from PIL import Image
from torch import Tensor, nn

import exitwise as ew
from exitwise.core.cropping import crop_center
from exitwise.policies.scores import exit_scores
from exitwise.runtime import export as exporting
from exitwise.runtime.bundle import OPSET, InputSpec, Manifest
from exitwise.runtime.onnx import Session

pytestmark = pytest.mark.numerical

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

SHAPE = (3, 6, 6)
COLOR_PREPROCESSING = ew.Preprocessing(6, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
CLOSE = 1e-4
CLASSES = tuple(f"class {i}" for i in range(5))


@cache
def color_net() -> tuple[ew.MultiExitNet, ew.Trace]:
    """Return a net with two exits, one without a bias, that is fast to export, and its trace."""
    torch.manual_seed(0)
    stages = [
        nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()),
        nn.Sequential(nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
    ]
    heads = [
        ew.Head(nn.Sequential(nn.AvgPool2d(2), nn.Flatten()), nn.Linear(width, 5, bias=width == 54))
        for width in (54, 32)
    ]
    net = ew.MultiExitNet(stages, heads).eval()
    return net, fitted(net, of_shape(SHAPE, 5))


def color_classifier(method: str, mode: Any = "paper", score: str = "confidence", **options: Any) -> ew.Classifier:
    net, trace = color_net()
    calibration = ew.calibrate(trace, method, samples=20, mode=mode)
    half = float(np.median(exit_scores(calibration.predict(trace.val), score)[0]))
    return ew.Classifier(net, calibration, ew.Policy((half, -inf), score), preprocessing=COLOR_PREPROCESSING, **options)


def learned_classifier() -> ew.Classifier:
    """The method and the score that are chosen for the shipped net: last layers weighted anew, and a learned score."""
    net, trace = color_net()
    calibration = ew.calibrate(trace, "Pool W_opt")
    assert calibration.pool is not None
    exits = zip(calibration.pool, calibration.exits, strict=True)
    pool = tuple(replace(own, update=0.2 * exit.head.weight.T.contiguous()) for own, exit in exits)
    calibration = replace(calibration, pool=pool)
    budget = sum(trace.costs.values) / 2
    policy = ew.fit_policy(
        calibration.predict(trace.val), trace.val.labels, trace.costs, budget=budget, score="learned"
    )
    assert policy.score_model is not None
    assert not policy.score_model.is_confidence
    return ew.Classifier(net, calibration, policy, preprocessing=COLOR_PREPROCESSING)


def color_images(n: int) -> Tensor:
    return pictures(n, SHAPE, 5, 3)[0]


KINDS: dict[str, Callable[[], ew.Classifier]] = {
    "vanilla, optimized": lambda: color_classifier(VANILLA).optimize(),
    "exact, by entropy": lambda: color_classifier(OURS, "exact", "entropy"),
    "by variance": lambda: color_classifier(OURS, score="variance", classes=CLASSES),
    "by a learned score": learned_classifier,
    "MSDNet": lambda: classifier(OURS, preprocessing=BYTES),
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[ew.Classifier, Path]]:
    """Return a function from a kind to its classifier and bundle, exported once. Tests must not write there."""
    folder = tmp_path_factory.mktemp("bundles")

    @cache
    def exported(kind: str) -> tuple[ew.Classifier, Path]:
        clf = KINDS[kind]()
        clf.net.train()  # must not change the export
        path = folder / kind.replace(", ", "-")
        clf.export(path)
        assert all(module.training for module in clf.net.modules())
        clf.net.eval()
        return clf, path

    return exported


Bundle = Callable[[str], tuple[ew.Classifier, Path]]


@pytest.fixture
def bundle_copy(bundle: Bundle, tmp_path: Path) -> Path:
    """Copy of a small bundle that a test may damage."""
    return Path(shutil.copytree(bundle("by variance")[1], tmp_path / "bundle"))


def images_of(clf: ew.Classifier, n: int) -> Tensor:
    return color_images(n) if clf.net.num_classes == 5 else some_images(n)


class TestAsTorch:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.slow_after_first
    def test_the_same_answers_at_every_size_of_batch(self, bundle: Bundle, kind: str) -> None:
        clf, path = bundle(kind)
        session = Session(path, threads=1)
        seen = set()
        for n in (1, 2, 65):
            images = images_of(clf, 65)[:n]
            pred = session(images.numpy())
            preds = simulated(clf.net, clf.calibration, images)
            assert_as_simulated(clf.policy, preds, pred.exits, pred.probs, CLOSE)
            expected = clf(images)
            same = pred.exits == expected.exits.numpy()
            assert (pred.costs[same] == expected.costs.numpy()[same]).all()
            assert (pred.predicted == pred.probs.argmax(axis=1)).all()
            assert pred.unit == expected.unit
            seen |= set(pred.exits.tolist())
        assert seen == set(range(len(clf.net.stages)))
        assert (session.policy, session.classes) == (clf.policy, clf.classes)

    @pytest.mark.parametrize("kind", ["by variance", "MSDNet"])
    @pytest.mark.slow_after_first
    def test_an_empty_batch(self, bundle: Bundle, kind: str) -> None:
        clf, path = bundle(kind)
        pred = Session(path, threads=1)(images_of(clf, 0).numpy())
        assert len(pred) == 0
        assert pred.probs.shape == (0, clf.net.num_classes)
        assert pred.mean_cost == 0

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("batch_size", [1, 10])
    @pytest.mark.slow_after_first
    def test_a_stream(self, bundle: Bundle, kind: str, batch_size: int) -> None:
        clf, path = bundle(kind)
        images = images_of(clf, 90)
        answers = list(Session(path, threads=1).stream(iter(images.numpy()), batch_size))
        assert [answer.index for answer in answers] == list(range(90))
        probs = np.stack([np.asarray(answer.probs) for answer in answers])
        preds = simulated(clf.net, clf.calibration, images)
        assert_as_simulated(clf.policy, preds, [answer.exit for answer in answers], probs, CLOSE)

    @pytest.mark.parametrize("kind", ["by variance", "MSDNet"])
    @pytest.mark.slow_after_first
    def test_bytes(self, bundle: Bundle, kind: str) -> None:
        clf, path = bundle(kind)
        pixels = np.random.default_rng(0).integers(0, 256, (20, *images_of(clf, 1).shape[1:]), dtype=np.uint8)
        pred, expected = Session(path, threads=1)(pixels), clf(pixels)
        assert np.abs(pred.probs - expected.probs.numpy()).max() < CLOSE
        assert (pred.exits == expected.exits.numpy()).all()

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["by variance", "MSDNet"])
    def test_a_stream_of_bytes(self, bundle: Bundle, kind: str) -> None:
        clf, path = bundle(kind)
        pixels = np.random.default_rng(0).integers(0, 256, (20, *images_of(clf, 1).shape[1:]), dtype=np.uint8)
        answers = list(Session(path, threads=1).stream(pixels))
        assert [answer.exit for answer in answers] == clf(pixels).exits.tolist()

    @pytest.mark.parametrize("kind", ["by variance", pytest.param("MSDNet", marks=pytest.mark.slow)])
    @pytest.mark.parametrize("size", [(6, 6), (8, 8), (13, 9)])
    def test_rgb_bytes_of_any_size(self, bundle: Bundle, kind: str, size: tuple[int, int]) -> None:
        """Images as people have them, against those that are scaled, cropped and turned by hand."""
        clf, path = bundle(kind)
        rgb = np.random.default_rng(0).integers(0, 256, (20, *size, 3), dtype=np.uint8)
        look = clf.preprocessing
        assert look is not None
        mode = "L" if len(look.mean) == 1 else "RGB"
        cropped = [crop_center(Image.fromarray(image).convert(mode), look.size, look.margin) for image in rgb]
        pixels = np.stack([np.atleast_3d(np.asarray(image)).transpose(2, 0, 1) for image in cropped])
        session = Session(path, threads=1)
        for runtime in (session, clf):
            expected = np.asarray(runtime(pixels).probs)
            assert np.array_equal(np.asarray(runtime(rgb).probs), expected)
            assert np.abs(np.asarray(runtime(rgb[4]).probs) - expected[4:5]).max() < CLOSE
            answers = list(runtime.stream(rgb, batch_size=20))
            assert np.abs(np.stack([answer.probs for answer in answers]) - expected).max() < CLOSE

    def test_a_stream_of_rgb_bytes_of_several_sizes(self, bundle: Bundle) -> None:
        rng = np.random.default_rng(0)
        rgb = [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((6, 6), (9, 20), (300, 7))]
        clf, path = bundle("by variance")
        for runtime in (Session(path, threads=1), clf):
            assert [answer.error for answer in runtime.stream(rgb)] == [None] * 3

    def test_doubles_and_strided_arrays(self, bundle: Bundle) -> None:
        session, images = Session(bundle("by variance")[1], threads=1), color_images(20).numpy()
        expected = session(images)
        for others in (images.astype(np.float64), np.ascontiguousarray(images[::-1])[::-1], images.tolist()):
            assert (session(others).probs == expected.probs).all()

    def test_what_a_prediction_says_of_itself(self, bundle: Bundle) -> None:
        pred = Session(bundle("by variance")[1], threads=1)(color_images(20).numpy())
        assert repr(pred).startswith("Prediction(20 images, mean cost ")
        assert json.loads(json.dumps(pred.to_dict()))["exits"] == pred.exits.tolist()
        assert len(pred.to_pandas()) == 20

    def test_eight_threads_share_a_session(self, bundle: Bundle) -> None:
        session, images = Session(bundle("by variance")[1], threads=1), color_images(80).numpy()
        parts = [images[k::8] for k in range(8)]
        expected = [session(part) for part in parts]
        start = Barrier(8)

        def run(k: int) -> list[ew.Prediction]:
            start.wait()
            return [session(parts[k]) for _ in range(20)]

        with ThreadPoolExecutor(8) as pool:
            for its, found in zip(expected, pool.map(run, range(8)), strict=True):
                assert all((pred.exits == its.exits).all() for pred in found)
                assert all(np.abs(pred.probs - its.probs).max() < 1e-6 for pred in found)


@pytest.mark.slow
def test_a_stage_that_hands_its_input_on_leaves_the_images_alone(tmp_path: Path) -> None:
    """Compacting overwrites arrays, which must not be those of the caller."""
    torch.manual_seed(0)
    heads = [ew.Head(nn.Identity(), nn.Linear(6, 4)) for _ in range(3)]
    net = ew.MultiExitNet([nn.Identity(), nn.Identity(), nn.Linear(6, 6)], heads).eval()
    images, labels = torch.randn(300, 6), torch.arange(300) % 4
    trace = ew.collect(net, [(images, labels)], [(images, labels)], costs=[1, 2, 3])
    calibration = ew.calibrate(trace, "MIE Laplace T_opt sigma_opt")
    policy = ew.fit_policy(calibration.predict(trace.val), costs=trace.costs, budget=2.0)
    clf = ew.Classifier(net, calibration, policy)
    clf.export(tmp_path / "bundle", example=images)
    given = images.numpy().copy()
    found = Session(tmp_path / "bundle", threads=1)(given)
    assert np.array_equal(given, images.numpy())
    assert np.bincount(found.exits).min() > 50
    assert np.abs(found.probs - clf(images).probs.numpy()).max() < CLOSE


class TestImagesRefused:
    @pytest.mark.parametrize(
        "images",
        [
            pytest.param(None, id="nothing"),
            pytest.param("cat.png", id="a name"),
            pytest.param(np.zeros((2, 3, 6, 7), dtype=np.float32), id="of another size"),
            pytest.param(np.zeros(SHAPE, dtype=np.float32), id="one without a batch"),
            pytest.param(np.zeros((2, *SHAPE), dtype=np.int64), id="whole numbers"),
            pytest.param(np.zeros((2, *SHAPE), dtype=object), id="objects"),
            pytest.param([np.zeros(SHAPE), np.zeros((3, 5, 5))], id="of two sizes"),
        ],
    )
    def test_what_are_no_images(self, bundle: Bundle, images: Any) -> None:
        session = Session(bundle("by variance")[1], threads=1)
        refused(lambda: session(images))

    def test_floats_in_the_layout_of_bytes(self, bundle: Bundle) -> None:
        session = Session(bundle("by variance")[1], threads=1)
        pixels = np.zeros((20, 30, 3), dtype=np.float64)
        refused(lambda: session(pixels), "(height, width, 3) is for RGB bytes (uint8), but these are float64")

    def test_pixels_that_are_not_normalized(self, bundle: Bundle) -> None:
        clf, path = bundle("by variance")
        pixels = np.random.default_rng(0).integers(0, 256, (4, *SHAPE)).astype(np.float64)
        words = ("floats from 0 to 255", "normalized ones lie within -30 to 30", "uint8", "check_range=False")
        for runtime in (Session(path, threads=1), clf):
            refused(lambda runtime=runtime: runtime(pixels), *words)
            error = next(runtime.stream(pixels)).error
            assert error is not None
            assert "check_range=False" in error
        unchecked = Session(path, threads=1, check_range=False)
        assert len(unchecked(pixels)) == 4
        assert next(unchecked.stream(pixels)).error is None
        own = ew.Classifier(clf.net, clf.calibration, clf.policy, preprocessing=clf.preprocessing, check_range=False)
        assert len(own(pixels)) == 4

    def test_one_that_is_not_finite_is_named(self, bundle: Bundle) -> None:
        session, images = Session(bundle("by variance")[1], threads=1), color_images(20).numpy()
        images[13] = np.nan
        refused(lambda: session(images), "image 13", "not finite")

    @pytest.mark.parametrize(
        ("bad", "words"),
        [
            pytest.param(ew.InputError("unreadable"), "unreadable", id="an error"),
            pytest.param(None, "()", id="nothing"),
            pytest.param("cat.png", "()", id="a name"),
            pytest.param(np.zeros((3, 6, 7), dtype=np.float32), "(3, 6, 7)", id="of another size"),
            pytest.param(np.zeros(SHAPE, dtype=np.int64), "int64", id="whole numbers"),
            pytest.param(np.zeros(SHAPE, dtype=object), "object", id="objects"),
            pytest.param([[1.0], [2.0, 3.0]], "", id="ragged"),
            pytest.param(np.full(SHAPE, np.nan, dtype=np.float32), "not finite", id="not numbers"),
            pytest.param(np.full(SHAPE, 3e38, dtype=np.float32), "3e+38", id="too large"),
        ],
    )
    @pytest.mark.parametrize("where", [0, 4])
    def test_in_a_stream_it_is_an_answer_and_harms_no_other(
        self, bundle: Bundle, bad: Any, words: str, where: int
    ) -> None:
        session, images = Session(bundle("by variance")[1], threads=1), color_images(9).numpy()
        expected = session(images)
        items: list[Any] = list(images)
        items.insert(where, bad)
        answers = list(session.stream(items, batch_size=3))
        assert [answer.index for answer in answers] == list(range(10))
        found = answers.pop(where)
        assert found.probs is None
        assert found.error
        assert words in found.error
        assert [answer.exit for answer in answers] == expected.exits.tolist()
        assert all(np.abs(a.probs - its).max() < 1e-5 for a, its in zip(answers, expected.probs, strict=True))


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found


def rewrite(folder: Path, data: Any) -> None:
    """Write another manifest, without a digest as former ones."""
    edited = {key: value for key, value in data.items() if key != "sha256"} if isinstance(data, dict) else data
    (folder / "manifest.json").write_text(json.dumps(edited))


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a graph was given to onnxruntime")

    monkeypatch.setattr(onnxruntime, "InferenceSession", fail)


@pytest.mark.usefixtures("nothing_runs")
class TestBundleRefused:
    @pytest.mark.parametrize("graph", [0, 1])
    def test_a_changed_byte_in_a_graph(self, bundle_copy: Path, graph: int) -> None:
        path = bundle_copy / f"stage{graph}.onnx"
        data = bytearray(path.read_bytes())
        for position in (0, len(data) // 2, len(data) - 1):
            wrong = bytearray(data)
            wrong[position] ^= 1
            path.write_bytes(wrong)
            refused(lambda: Session(bundle_copy), str(path), "SHA-256")
        path.write_bytes(data[:-1])
        refused(lambda: Session(bundle_copy), str(path), "SHA-256")

    @pytest.mark.parametrize("graph", [0, 1])
    def test_a_missing_graph(self, bundle_copy: Path, graph: int) -> None:
        (bundle_copy / f"stage{graph}.onnx").unlink()
        refused(lambda: Session(bundle_copy), f"stage{graph}.onnx", "does not exist")

    def test_no_bundle_at_all(self, bundle_copy: Path, tmp_path: Path) -> None:
        (bundle_copy / "manifest.json").unlink()
        for path in (bundle_copy, tmp_path / "nowhere", bundle_copy / "stage0.onnx"):
            refused(lambda path=path: Session(path), str(path), "is not a bundle")

    @pytest.mark.parametrize(
        ("name", "value", "words"),
        [
            ("version", 1, "has version 1"),
            ("version", "2", "has version '2'"),
            ("format", "exitwise.run", "exitwise.bundle"),
            ("opset", OPSET - 1, f"opset {OPSET - 1}"),
            ("opset", OPSET + 1, f"opset {OPSET + 1}"),
            ("opset", None, "opset None"),
        ],
    )
    def test_a_manifest_of_something_else(self, bundle_copy: Path, name: str, value: Any, words: str) -> None:
        rewrite(bundle_copy, manifest(bundle_copy) | {name: value})
        refused(lambda: Session(bundle_copy), str(bundle_copy / "manifest.json"), words)

    @pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"format": NaN', "[" * 100_000])
    def test_a_manifest_that_is_no_object(self, bundle_copy: Path, text: str) -> None:
        (bundle_copy / "manifest.json").write_text(text)
        refused(lambda: Session(bundle_copy), str(bundle_copy / "manifest.json"))

    def test_a_manifest_that_is_not_text(self, bundle_copy: Path) -> None:
        (bundle_copy / "manifest.json").write_bytes(b"\xff\xfe\x00")
        refused(lambda: Session(bundle_copy), str(bundle_copy / "manifest.json"))

    @pytest.mark.parametrize(
        "name",
        ["../x.onnx", "/tmp/x.onnx", "a/x.onnx", "..\\x.onnx", "x.onnx\n", ".onnx", "stage0", "", None, 3, ["x"]],
    )
    def test_a_file_name_that_could_leave_the_folder(self, bundle_copy: Path, name: Any) -> None:
        data = manifest(bundle_copy)
        shutil.copy(bundle_copy / "stage0.onnx", bundle_copy.parent / "x.onnx")
        data["graphs"][0]["file"] = name
        rewrite(bundle_copy, data)
        refused(lambda: Session(bundle_copy), str(bundle_copy / "manifest.json"))

    def test_missing_entries_are_named(self, bundle_copy: Path) -> None:
        data = manifest(bundle_copy)
        for name in data.keys() - {"sha256"}:
            rewrite(bundle_copy, {key: value for key, value in data.items() if key != name})
            refused(lambda name=name: Session(bundle_copy), str(bundle_copy / "manifest.json"), name)
        for name in data["graphs"][0]:
            graph = {key: value for key, value in data["graphs"][0].items() if key != name}
            rewrite(bundle_copy, data | {"graphs": [graph, data["graphs"][1]]})
            refused(lambda name=name: Session(bundle_copy), str(bundle_copy / "manifest.json"), name)

    @pytest.mark.parametrize(
        "change",
        [
            {"num_classes": 4},
            {"inputs": [{"name": "image", "shape": [3, 6, 7], "dtype": "float32"}]},
            {"inputs": []},
            {"inputs": [{"name": "image", "shape": list(SHAPE), "dtype": "float32"}] * 2},
            {"classes": ["a"]},
            {"graphs": []},
            {"costs": {"values": [1.0], "unit": "MACs"}},
            {"costs": {"values": [1.0, 2.0], "unit": "ms"}},
            {"memory": "state"},
        ],
    )
    def test_entries_that_contradict_each_other(self, bundle_copy: Path, change: dict[str, Any]) -> None:
        rewrite(bundle_copy, manifest(bundle_copy) | change)
        refused(lambda: Session(bundle_copy), str(bundle_copy / "manifest.json"))


def replace_graph(folder: Path, exit: int, graph: bytes) -> Path:
    """Replace a graph and its hash in the manifest, as an attacker would."""
    data = manifest(folder)
    path = folder / data["graphs"][exit]["file"]
    path.write_bytes(graph)
    data["graphs"][exit]["sha256"] = hashlib.sha256(graph).hexdigest()
    rewrite(folder, data)
    return path


class TestGraphRefusedByOnnxruntime:
    """Graphs that agree with the hash in the manifest, but that onnxruntime must not run."""

    @pytest.mark.parametrize("opset", [1000, 2**31 - 1])
    def test_an_opset_that_is_too_new(self, bundle_copy: Path, opset: int) -> None:
        model = onnx.load_model(bundle_copy / "stage1.onnx")
        assert [entry.version for entry in model.opset_import if not entry.domain] == [OPSET]
        for entry in model.opset_import:
            entry.version = opset
        path = replace_graph(bundle_copy, 1, model.SerializeToString())
        message = refused(lambda: Session(bundle_copy), f"{path} cannot be run by onnxruntime", f"Opset {opset}")
        assert "::" not in message  # no C++ signatures

    @pytest.mark.parametrize("imported", [False, True])
    def test_an_operator_of_a_custom_domain(self, bundle_copy: Path, imported: bool) -> None:
        model = onnx.load_model(bundle_copy / "stage0.onnx")
        model.graph.node[0].domain = "com.example"
        if imported:
            model.opset_import.append(onnx.helper.make_opsetid("com.example", 1))
        path = replace_graph(bundle_copy, 0, model.SerializeToString())
        refused(lambda: Session(bundle_copy), f"{path} cannot be run by onnxruntime", "com.example")

    @pytest.mark.parametrize("data", [b"", b"nonsense", b"\x80" * 50, bytes(range(256)), b"\x42\xff\xff\xff\xff\x0f"])
    def test_a_file_that_is_not_a_graph(self, bundle_copy: Path, data: bytes) -> None:
        path = replace_graph(bundle_copy, 0, data)
        refused(lambda: Session(bundle_copy), f"{path} ")


class TestManifest:
    def test_it_comes_back_as_it_was(self, bundle: Bundle, tmp_path: Path) -> None:
        clf, path = bundle("by variance")
        found = Manifest.load(path)
        assert found.policy == clf.policy
        assert found.preprocessing == COLOR_PREPROCESSING
        assert found.classes == CLASSES
        assert found.costs == clf.costs_of(color_images(1))
        assert (found.inputs, found.num_classes, found.memory, found.method) == (
            (InputSpec("image", SHAPE),),
            5,
            "drawn",
            OURS,
        )
        assert found.versions["torch"] == torch.__version__
        found.save(tmp_path)
        assert (tmp_path / "manifest.json").read_bytes() == (path / "manifest.json").read_bytes()

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.slow_after_first
    def test_graphs_are_of_the_opset_that_it_says(self, bundle: Bundle, kind: str) -> None:
        for path in bundle(kind)[1].glob("*.onnx"):
            model = onnx.load(path)
            onnx.checker.check_model(model)
            assert {entry.domain: entry.version for entry in model.opset_import}[""] == OPSET

    @pytest.mark.slow
    def test_any_value_of_a_wrong_kind_is_refused_or_harmless(self, bundle_copy: Path) -> None:
        """Loading and running raise no other error than `InputError`."""
        data, images = manifest(bundle_copy), color_images(6).numpy()
        wrong, count = [], 0
        for other in changed(data, WRONG, depth=4):
            rewrite(bundle_copy, other)
            try:
                Session(bundle_copy, threads=1)(images)
            except ew.InputError as error:
                count += 1
                if "\n" in str(error) or str(bundle_copy) not in str(error):
                    wrong.append(f"{difference(data, other)}: {error}")
            except Exception as error:  # the test collects these
                wrong.append(f"{difference(data, other)}: {type(error).__name__} {error}")
        assert count > 200
        assert not wrong, "\n".join(wrong)

    @pytest.mark.parametrize(
        ("graph", "part", "names"),
        [
            (0, "outputs", ["next.0", "probability", "variance", "drawn"]),
            (0, "outputs", ["state", "probs", "variance", "drawn"]),
            (0, "outputs", ["next.0", "probs", "spread", "drawn"]),
            (0, "outputs", ["next.0", "probs", "variance", "draws"]),
            (0, "outputs", ["next.0", "next.1", "probs", "variance", "drawn"]),
            (0, "outputs", ["probs", "probs", "probs", "probs"]),
            (0, "inputs", ["image", "image2"]),
            (1, "inputs", ["state.0", "memory", "more"]),
            (1, "inputs", ["memory", "state.0"]),
        ],
    )
    def test_names_that_the_graphs_do_not_have_are_refused_at_once(
        self, bundle_copy: Path, graph: int, part: str, names: list[str]
    ) -> None:
        data = manifest(bundle_copy)
        assert data["graphs"][0]["outputs"] == ["next.0", "probs", "variance", "drawn"]
        data["graphs"][graph][part] = names
        rewrite(bundle_copy, data)
        refused(lambda: Session(bundle_copy, threads=1), str(bundle_copy))

    @pytest.mark.parametrize(
        "change",
        [
            {"memory": None},
            {"memory": "probs"},
            {"num_classes": 4, "classes": None},
            *(
                {"inputs": [{"name": "image", "shape": shape, "dtype": dtype}], "preprocessing": None}
                for shape, dtype in (([3, 8, 8], "float32"), ([108], "float32"), (list(SHAPE), "int64"))
            ),
        ],
    )
    def test_a_manifest_that_does_not_fit_its_graphs_is_refused_at_once(
        self, bundle_copy: Path, change: dict[str, Any]
    ) -> None:
        """The error must come before the first batch."""
        rewrite(bundle_copy, manifest(bundle_copy) | change)
        refused(lambda: Session(bundle_copy, threads=1), str(bundle_copy))

    def test_graphs_in_another_order_are_refused(self, bundle_copy: Path) -> None:
        data = manifest(bundle_copy)
        rewrite(bundle_copy, data | {"graphs": data["graphs"][::-1]})
        refused(lambda: Session(bundle_copy, threads=1)(color_images(3).numpy()))


def difference(a: Any, b: Any) -> str:
    """Return the path of the first difference of two manifests, with the new value."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in a:
            if key not in b:
                return f".{key} missing"
            if a[key] != b[key]:
                return f".{key}{difference(a[key], b[key])}"
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for k, (left, right) in enumerate(zip(a, b, strict=True)):
            if left != right:
                return f"[{k}]{difference(left, right)}"
    return f" = {b!r}"


class TestSession:
    def test_another_policy(self, bundle: Bundle) -> None:
        clf, path = bundle("exact, by entropy")
        images = color_images(65)
        preds = simulated(clf.net, clf.calibration, images)
        for score in ("entropy", "confidence"):  # the same graphs work for both
            policy = ew.Policy((float(np.quantile(exit_scores(preds, score)[0], 0.8)), -inf), score)
            pred = Session(path, threads=1, policy=policy)(images.numpy())
            assert_as_simulated(policy, preds, pred.exits, pred.probs, CLOSE)
            assert 5 < (pred.exits == 0).sum() < 30
        slow = ew.Policy((inf, -inf), unit="ms", costs=(1.0, 5.0))
        pred = Session(path, threads=1, policy=slow)(images.numpy())
        assert pred.unit == "ms"
        assert pred.costs.tolist() == [5.0] * 65

    @pytest.mark.parametrize(
        ("policy", "words"),
        [
            (ew.Policy((0.5, 0.5, -inf)), "2 thresholds"),
            (ew.Policy((-0.1, -inf), "variance"), "export again"),
            (ew.Policy((0.5, -inf), unit="ms"), "in ms"),
            ("confidence", "must be a Policy"),
        ],
    )
    def test_a_policy_that_does_not_fit(self, bundle: Bundle, policy: Any, words: str) -> None:
        refused(lambda: Session(bundle("exact, by entropy")[1], policy=policy), "`policy`", words)

    def test_graphs_for_the_variance_serve_nothing_else(self, bundle: Bundle) -> None:
        policy = ew.Policy((0.5, -inf))
        refused(lambda: Session(bundle("by variance")[1], policy=policy), "`policy` is on confidence", "export again")

    @pytest.mark.parametrize("threads", [0, -1, 1.5, "2", True])
    def test_threads_that_make_no_sense(self, bundle: Bundle, threads: Any) -> None:
        refused(lambda: Session(bundle("by variance")[1], threads=threads), "`threads` must be a whole number")

    def test_it_says_what_it_is(self, bundle: Bundle) -> None:
        assert repr(Session(bundle("by variance")[1], threads=1)) == f"Session(2 exits, 5 classes, {OURS!r})"


def stub(graph: nn.Module, inputs: list[Tensor], file: Path, *_: Any) -> None:
    """Replace a real export, which takes seconds."""
    file.write_bytes(b"a graph")


class TestExport:
    def test_an_existing_bundle_is_replaced_only_with_force(
        self, bundle_copy: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(exporting, "_write_graph", stub)
        (bundle_copy / "notes.txt").write_text("of the old one")
        before, clf = contents(bundle_copy), color_classifier(VANILLA)
        refused(lambda: clf.export(bundle_copy), str(bundle_copy), "already holds a bundle")
        assert contents(bundle_copy) == before
        clf.export(bundle_copy, force=True)
        assert {path.name for path in bundle_copy.iterdir()} == {"manifest.json", "stage0.onnx", "stage1.onnx"}
        assert (bundle_copy / "stage1.onnx").read_bytes() == b"a graph"
        assert [path.name for path in bundle_copy.parent.iterdir()] == [bundle_copy.name]
        assert Manifest.load(bundle_copy).method == VANILLA

    @pytest.mark.parametrize("force", [False, True])
    def test_a_folder_of_something_else_is_never_replaced(self, tmp_path: Path, force: bool) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        before = contents(tmp_path)
        clf = color_classifier(VANILLA)
        refused(lambda: clf.export(tmp_path, force=force), str(tmp_path), "is not a bundle")
        assert contents(tmp_path) == before

    @pytest.mark.parametrize("force", [False, True])
    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_one_that_fails_half_way_leaves_nothing_behind(
        self, bundle_copy: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], force: bool
    ) -> None:
        def fail_at_the_second(graph: nn.Module, inputs: list[Tensor], file: Path, *rest: Any) -> None:
            if file.name == "stage1.onnx":
                assert (file.parent / "stage0.onnx").is_file()
                raise error
            stub(graph, inputs, file, *rest)

        monkeypatch.setattr(exporting, "_write_graph", fail_at_the_second)
        before = contents(bundle_copy.parent)
        target = bundle_copy if force else bundle_copy.parent / "new" / "bundle"
        with pytest.raises(error):
            color_classifier(VANILLA).export(target, force=force)
        assert contents(bundle_copy.parent) == before

    def test_the_shape_of_an_image_must_be_known(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exporting, "_write_graph", stub)
        clf = color_classifier(VANILLA)
        clf.preprocessing = None
        refused(lambda: clf.export(tmp_path / "a"), "give some images as `example`")
        for wrong in (
            color_images(1).numpy(),
            color_images(0),
            torch.zeros(3),
            torch.zeros(2, *SHAPE).byte(),
            "cat.png",
        ):
            refused(lambda wrong=wrong: clf.export(tmp_path / "a", example=wrong), "`example`")
        assert not list(tmp_path.iterdir())
        clf.export(tmp_path / "a", example=color_images(1))
        assert Manifest.load(tmp_path / "a").inputs == (InputSpec("image", SHAPE),)
        assert Manifest.load(tmp_path / "a").preprocessing is None

    def test_a_preset_knows_the_shape(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(exporting, "_write_graph", stub)
        classifier().export(tmp_path / "a")
        assert Manifest.load(tmp_path / "a").inputs == (InputSpec("image", (1, 8, 8)),)

    @pytest.mark.slow
    def test_the_classifier_is_left_as_it_was(self, bundle: Bundle) -> None:
        clf, _ = bundle("MSDNet")
        fresh = classifier(OURS, preprocessing=BYTES)
        assert torch.equal(clf(some_images(20)).probs, fresh(some_images(20)).probs)
        theirs = fresh.net.state_dict()
        assert all(torch.equal(value, theirs[key]) for key, value in clf.net.state_dict().items())


SCRIPT = """
import importlib.util, json, sys
import numpy as np
assert importlib.util.find_spec("torch") is None, "torch is here"
from exitwise.runtime.onnx import Session
session = Session(sys.argv[1], threads=1)
images = np.load(sys.argv[2])
pred = session(images)
streamed = [answer.exit for answer in session.stream(images, batch_size=5)]
assert "torch" not in sys.modules
print(json.dumps({**pred.to_dict(), "streamed": streamed, "repr": repr(pred)}))
"""


@pytest.mark.slow
def test_a_bundle_runs_where_torch_is_not_installed(bundle: Bundle, tmp_path: Path) -> None:
    """A new environment has only the package, NumPy and onnxruntime."""
    clf, path = bundle("MSDNet")
    python = tmp_path / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True, capture_output=True)
        for what in (["--no-deps", str(ROOT)], ["numpy", "onnxruntime"]):
            subprocess.run([*pip, *what], check=True, capture_output=True, text=True, timeout=300)
    except (subprocess.SubprocessError, OSError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        pytest.skip(f"pip cannot install here: {reason[-1] if reason else type(error).__name__}")
    images = some_images(30)
    np.save(tmp_path / "images.npy", images.numpy())
    command = [str(python), "-c", SCRIPT, str(path), str(tmp_path / "images.npy")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    pred = json.loads(done.stdout)
    preds = simulated(clf.net, clf.calibration, images)
    assert_as_simulated(clf.policy, preds, pred["exits"], pred["probs"], CLOSE)
    assert_as_simulated(clf.policy, preds, pred["streamed"], pred["probs"], CLOSE)
    assert pred["repr"].startswith("Prediction(30 images")
