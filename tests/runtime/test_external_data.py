"""Graphs with external data are refused: onnxruntime would read any file that they name."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from paths import TESTS

import exitwise as ew

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from exitwise.runtime.external_data import has_external_data  # noqa: E402
from exitwise.runtime.onnx import Session  # noqa: E402


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TESTS / "former" / "bundle", tmp_path / "bundle"))


def replace_graph(bundle: Path, exit: int, graph: bytes) -> None:
    """Put another graph into a bundle, with its hash in the manifest, as an attacker would."""
    (bundle / f"stage{exit}.onnx").write_bytes(graph)
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["graphs"][exit]["sha256"] = hashlib.sha256(graph).hexdigest()
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def with_external_data(graph: bytes, location: str) -> bytes:
    model = onnx.load_from_string(graph)
    tensor = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    size = len(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", "0"), ("length", str(size))):
        tensor.external_data.add(key=key, value=value)
    return bytes(model.SerializeToString())


def test_external_data_of_the_current_folder_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bundle.parent)
    Path("weights.bin").write_bytes(b"\0" * (1 << 20))
    replace_graph(bundle, 1, with_external_data((bundle / "stage1.onnx").read_bytes(), "weights.bin"))
    with pytest.raises(ew.InputError, match=r"stage1\.onnx stores data in other files") as caught:
        Session(bundle)
    assert "\n" not in str(caught.value)


def attribute_graph(external: bool) -> bytes:
    """Return a graph whose only tensor is in a constant inside of a branch."""
    tensor = onnx.helper.make_tensor("t", onnx.TensorProto.FLOAT, [1], [1.0])
    if external:
        tensor.ClearField("float_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="x")
    out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    constant = onnx.helper.make_node("Constant", [], ["y"], value=tensor)
    branch = onnx.helper.make_graph([constant], "branch", [], [out])
    node = onnx.helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    condition = onnx.helper.make_tensor_value_info("c", onnx.TensorProto.BOOL, [])
    return bytes(onnx.helper.make_model(onnx.helper.make_graph([node], "g", [condition], [out])).SerializeToString())


@pytest.mark.parametrize("external", [False, True])
def test_constants_inside_of_branches_are_seen(external: bool) -> None:
    assert has_external_data(attribute_graph(external)) is external


def test_exported_graphs_have_none() -> None:
    for path in sorted((TESTS / "former" / "bundle").glob("*.onnx")):
        assert not has_external_data(path.read_bytes())


@pytest.mark.parametrize("data", [b"\x3a", b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x3b", b"\x3a\x05ab"])
def test_damaged_graphs_are_refused_before_onnxruntime(data: bytes, bundle: Path) -> None:
    replace_graph(bundle, 0, data)
    with pytest.raises(ew.InputError, match="is not an ONNX graph"):
        Session(bundle)


def test_deep_nesting_is_refused() -> None:
    data = b""
    for number in [6, 5, 1] * 50:  # from the inside: a graph in an attribute of a node of a graph ...
        data = bytes([number << 3 | 2]) + varint(len(data)) + data
    with pytest.raises(ew.InputError, match="nested more than 100 deep"):
        has_external_data(b"\x3a" + varint(len(data)) + data)


def varint(value: int) -> bytes:
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])
