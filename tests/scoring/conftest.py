"""A bundle that is made once, and a folder of images."""

from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")
pytest.importorskip("pyarrow")

from scoring_cases import contents, write_bundle, write_folder


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of two exits with random weights."""
    return write_bundle(tmp_path_factory.mktemp("bundle") / "bundle")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of 150 images, some damaged."""
    return write_folder(tmp_path_factory.mktemp("images") / "images", contents(150))
