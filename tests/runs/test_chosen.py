"""A run remembers the classifier of its last evaluation, and later commands use exactly that one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from command import Command, contents, with_paper_method
from paths import TESTS
from PIL import Image

import exitwise as ew
from exitwise.calibration.methods import OURS
from exitwise.report.build import ReportOptions, build_report
from exitwise.runs.chosen import ChosenClassifier
from exitwise.runs.run import Run


@pytest.fixture
def exitwise(exitwise: Command) -> Command:
    return with_paper_method(exitwise)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    place = Path(shutil.copytree(TESTS / "former" / "run", tmp_path / "run"))
    (place / "policy.json").unlink()
    shutil.rmtree(place / "calibrations")
    return place


def bundle_of(exitwise: Command, run: Path, out: Path, *options: str) -> tuple[dict[str, object], str, str]:
    """Export, and return the policy, the method and stderr."""
    done = exitwise("export", run, out, "--json", *options)
    assert done.status == 0, done.err
    method = json.loads((out / "manifest.json").read_text())["method"]
    return done.json["policy"], method, done.err


@pytest.mark.slow
def test_export_uses_the_evaluated_method_and_policy(run: Path, tmp_path: Path, exitwise: Command) -> None:
    assert exitwise("evaluate", run, "--budget", "60%", "--method", "T_opt", "--score", "margin").status == 0
    evaluated = json.loads((run / "policy.json").read_text())
    policy, method, err = bundle_of(exitwise, run, tmp_path / "bundle")
    assert method == "T_opt"
    assert policy == {key: value for key, value in evaluated.items() if key not in ("format", "version", "sha256")}
    assert "T_opt, budget" in err
    assert "margin thresholds by auto (as evaluated)" in err


@pytest.mark.slow
def test_the_trace_is_not_read(run: Path, tmp_path: Path, exitwise: Command) -> None:
    assert exitwise("evaluate", run, "--budget", "60%").status == 0
    (run / "trace.safetensors").unlink()
    _, method, _ = bundle_of(exitwise, run, tmp_path / "bundle")
    assert method == OURS


@pytest.mark.slow
def test_a_certified_classifier_is_kept_with_its_calibration(run: Path, tmp_path: Path, exitwise: Command) -> None:
    assert exitwise("evaluate", run, "--budget", "60%", "--certify", "0.2").status == 0
    chosen = Run(run).chosen()
    assert chosen is not None
    assert chosen.policy.guarantee is not None
    policy, _, err = bundle_of(exitwise, run, tmp_path / "bundle")
    assert policy["guarantee"] == chosen.policy.guarantee.to_dict()
    assert "certified (as evaluated)" in err
    on_all_samples = Run(run).calibration(ew.METHODS[OURS], Run(run).trace())
    assert on_all_samples is None or on_all_samples.temperatures != chosen.calibration.temperatures


@pytest.mark.slow
def test_options_replace_parts_of_the_choice(run: Path, tmp_path: Path, exitwise: Command) -> None:
    assert exitwise("evaluate", run, "--budget", "60%", "--method", "T_opt", "--score", "margin").status == 0
    before = contents(run)
    policy, method, err = bundle_of(exitwise, run, tmp_path / "cheaper", "--budget", "50%")
    assert (method, policy["score"]) == ("T_opt", "margin")
    assert float(str(policy["budget"])) == pytest.approx(0.5 * Run(run).trace().costs.values[-1])
    assert "(fitted now)" in err
    policy, method, _ = bundle_of(exitwise, run, tmp_path / "other", "--method", "MIE", "--score", "entropy")
    assert (method, policy["score"]) == ("MIE", "entropy")
    after = contents(run)
    assert {name: after[name] for name in before} == before  # the choice stays that of the evaluation


@pytest.mark.slow
def test_predict_and_bench_and_report_use_it(run: Path, tmp_path: Path, exitwise: Command) -> None:
    assert exitwise("evaluate", run, "--budget", "60%", "--method", "T_opt").status == 0
    image = tmp_path / "image.png"
    Image.effect_noise((8, 8), 60).save(image)
    done = exitwise("predict", run, image)
    assert done.status == 0, done.err
    assert "T_opt, budget" in done.err
    bench = exitwise(
        "bench", run, "--backend", "torch", "--batch-size", 1, "--costs-of", "torch:1", "--repeats", 1, "--json"
    )
    assert bench.json["method"] == "T_opt"
    assert exitwise("report", run).status == 0
    assert '"method":"T_opt"' in (run / "report.html").read_text()


@pytest.mark.slow
def test_collecting_again_forgets_it(run: Path, exitwise: Command) -> None:
    assert exitwise("evaluate", run, "--budget", "60%").status == 0
    assert exitwise("collect", run, "--force").status == 0
    assert Run(run).chosen() is None


class TestFile:
    def test_it_comes_back_as_it_was(self, run: Path, exitwise: Command, tmp_path: Path) -> None:
        assert exitwise("evaluate", run, "--budget", "60%").status == 0
        chosen = Run(run).chosen()
        assert chosen is not None
        chosen.save(tmp_path / "copy.safetensors")
        copy = ChosenClassifier.load(tmp_path / "copy.safetensors")
        assert copy.policy == chosen.policy
        assert copy.classes == chosen.classes
        val = Run(run).trace().val
        assert torch.equal(copy.calibration.predict(val).probs, chosen.calibration.predict(val).probs)

    def test_a_damaged_file_is_one_line(self, run: Path, exitwise: Command, tmp_path: Path) -> None:
        assert exitwise("evaluate", run, "--budget", "60%").status == 0
        (run / "chosen.safetensors").write_bytes(b"not safetensors")
        done = exitwise("export", run, tmp_path / "bundle")
        assert (done.status, done.err.count("\n")) == (2, 1)
        assert "chosen.safetensors" in done.err
        assert not (tmp_path / "bundle").exists()

    def test_a_choice_of_another_net_is_refused(self, run: Path, exitwise: Command, tmp_path: Path) -> None:
        assert exitwise("evaluate", run, "--budget", "60%").status == 0
        net = ew.models.msdnet("tiny-8")
        ew.save_checkpoint(net, run / "net.safetensors")
        done = exitwise("export", run, tmp_path / "bundle")
        assert done.status == 2
        assert "is of another net" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--method", "T_opt", "--score", "margin"), ("--certify", "0.2")])
def test_the_report_shows_the_chosen_policy_at_its_budget(
    run: Path, exitwise: Command, options: tuple[str, ...]
) -> None:
    assert exitwise("evaluate", run, "--budget", "60%", *options).status == 0
    chosen = Run(run).chosen()
    assert chosen is not None
    report = build_report(Run(run), ReportOptions())
    explorer = report.data["explorers"][0]
    step = explorer["steps"][explorer["chosen"]]
    assert step["budget"] == pytest.approx(chosen.policy.budget)
    assert step["ours"]["thresholds"] == chosen.policy.to_dict()["thresholds"]


@pytest.mark.slow
def test_a_product_of_experts_is_used_and_named_by_every_later_command(
    run: Path, tmp_path: Path, exitwise: Command
) -> None:
    name = "PoE Laplace T_opt sigma_opt"
    assert exitwise("evaluate", run, "--budget", "70%", "--method", name).status == 0
    chosen = Run(run).chosen()
    assert chosen is not None
    assert chosen.calibration.method.name == name
    policy, method, err = bundle_of(exitwise, run, tmp_path / "bundle")
    assert (method, policy) == (name, chosen.policy.to_dict())
    assert f"{name}, budget" in err
    image = tmp_path / "image.png"
    Image.effect_noise((8, 8), 60).save(image)
    done = exitwise("predict", run, image)
    assert done.status == 0, done.err
    assert f"{name}, budget" in done.err
    bench = exitwise(
        "bench", run, "--backend", "torch", "--batch-size", 1, "--costs-of", "torch:1", "--repeats", 1, "--json"
    )
    assert bench.json["method"] == name
    assert f"Calibrated as evaluated: {name}." in bench.json["notes"]
    done = exitwise("report", run)
    assert done.status == 0, done.err
    assert f"{name}, budget" in done.err
    report = build_report(Run(run), ReportOptions())
    assert report.data["method"] == name
    explorer = report.data["explorers"][0]
    assert explorer["steps"][explorer["chosen"]]["ours"]["thresholds"] == chosen.policy.to_dict()["thresholds"]
