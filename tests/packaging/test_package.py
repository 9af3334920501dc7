"""The front door: public names, the zoo, and what ships."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import exitwise as ew

PUBLIC = [
    "MultiExitNet",
    "Head",
    "load_checkpoint",
    "macs",
    "collect",
    "Trace",
    "Method",
    "METHODS",
    "calibrate",
    "fit_policy",
    "sweep",
    "evaluate",
    "ablation",
    "decision_experiment",
    "Costs",
    "Predictions",
    "Policy",
    "InputError",
    "models",
    "zoo",
]


def test_public_names_are_those_of_the_design_and_nothing_hides_them() -> None:
    """Importing a submodule sets it on the package: none may be named like a public function."""
    for module in pkgutil.walk_packages(ew.__path__, "exitwise."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in PUBLIC:
        assert name in dir(ew)
    for name in ("collect", "calibrate", "fit_policy", "sweep", "evaluate", "ablation", "macs", "load_checkpoint"):
        assert callable(getattr(ew, name))
    with pytest.raises(AttributeError, match="no attribute 'clibrate'"):
        ew.clibrate  # noqa: B018


def test_importing_the_package_does_not_import_torch() -> None:
    script = "import sys, exitwise; exitwise.fit_policy; exitwise.evaluate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_published_tables_are_whole() -> None:
    sizes = {name: len(ew.zoo.published(name)) for name in ew.zoo.TABLES}
    assert sizes == {
        "ablation": 108,
        "baselines": 38,
        "budget_curves": 2430,
        "decision_experiment": 9,
        "laplace_cost": 144,
        "msdnet_architectures": 48,
    }
    with pytest.raises(ew.InputError, match="must be one of ablation"):
        ew.zoo.published("tabel")


def test_published_changes_are_against_vanilla() -> None:
    changes = ew.zoo.published_changes("ablation", "cifar100-small")
    assert changes is not None
    assert changes["MSDNet (vanilla)"] == {"top1": 0, "top5": 0, "nlpd": 0, "ece": 0}
    ours = changes["MIE Laplace T_opt sigma_opt"]  # 69.84 - 69.25, 91.09 - 90.48, 1.133 - 1.498, .017 - .182
    assert ours == pytest.approx({"top1": 0.0059, "top5": 0.0061, "nlpd": -0.365, "ece": -0.165})
    assert ew.zoo.published_changes("ablation", "tiny-8") is None


def test_a_table_is_readable_and_plain_data() -> None:
    from cases import random_trace

    table = ew.ablation(random_trace(), samples=4, methods=["MSDNet (vanilla)", "MIE"])
    assert [row.method for row in table] == ["MSDNet (vanilla)", "MIE"]
    assert "MIE" in repr(table)
    assert list(table.to_pandas()["method"]) == ["MSDNet (vanilla)", "MIE"]
    # Without a range in the trace: from the first exit's cost to the last's.
    assert table.budget_range == pytest.approx((1e6, 3**1.5 * 1e6))


def test_an_ablation_needs_a_test_split() -> None:
    from dataclasses import replace

    from cases import random_trace

    with pytest.raises(ew.InputError, match="no test split"):
        ew.ablation(replace(random_trace(), test=None))


def test_no_data_set_pictures_are_shipped() -> None:
    """Nothing but text, tables, safetensors and what a page is made of lies in the package."""
    package = Path(str(ew.__file__)).parent
    kinds = {path.suffix for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert kinds <= {".py", ".pyi", ".md", ".csv", ".json", ".safetensors", ".typed", ".html", ".css", ".js"}
