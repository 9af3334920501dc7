"""Messages are in the words of the command line, short, and with commands that can be pasted."""

import csv
import io
import json
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
from cases import random_trace
from command import Command, new_run, with_paper_method, zoo_run
from PIL import Image

import exitwise as ew
from exitwise.cli import app, tables
from exitwise.cli.option_names import MAX_LENGTH, name_options, shorten_message
from exitwise.core.costs import Costs
from exitwise.core.errors import InputError
from exitwise.core.files import write_json
from exitwise.runs.budgets import parse_budget
from exitwise.runs.labels import model_labels
from exitwise.runs.machine_load import describe_load, measure_load
from exitwise.runs.run import Run, run_metadata
from exitwise.training.history import EpochRecord, History


@pytest.fixture
def exitwise(exitwise: Command) -> Command:
    return with_paper_method(exitwise)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of a net of the user's own, in a folder whose name must be quoted."""
    return new_run(tmp_path / "my run", random_trace())


class TestOptions:
    def test_arguments_become_the_options_of_the_command(self) -> None:
        message = "`batch_size` must be at most the 5 samples, but is 128, and `labels` are needed"
        assert name_options(message, app.train) == message.replace("`batch_size`", "`--batch-size`")
        assert name_options("`budget_delta` must be", app.evaluate) == "`--certify` must be"
        assert name_options("`epsilon` must be", app.evaluate) == "`--max-loss` must be"
        assert name_options("`epsilon` must be", app.calibrate) == "`epsilon` must be"  # it has no such option
        assert name_options("`run` must be", app.calibrate) == "`run` must be"  # an argument, not an option
        assert name_options("`method` must be", None) == "`method` must be"

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            (["evaluate", "RUN", "--budget", "60%", "--certify", "7"], "`--certify` must be a number between 0 and 1"),
            (["evaluate", "RUN", "--budget", "60%", "--score", "luck"], "`--score` must be"),
            (["evaluate", "RUN", "--budget", "60%", "--strategy", "luck"], "`--strategy` must be one of"),
            (["evaluate", "RUN", "--budget", "60%", "--method", "luck"], "`--method` must be"),
            (["policies", "RUN", "--repeats", "0"], "`--repeats` must be"),
        ],
    )
    def test_commands(self, run: Path, exitwise: Command, words: list[str], expected: str) -> None:
        done = exitwise(*(str(run) if word == "RUN" else word for word in words))
        assert (done.status, done.err.count("\n")) == (2, 1)
        assert expected in done.err
        assert len(done.err) <= MAX_LENGTH + len("exitwise: \n")

    def test_long_messages_keep_their_beginning_and_their_end(self) -> None:
        message = "the file " + 100 * "long/" + "name is wrong: give another one"
        short = shorten_message(message)
        assert len(short) <= MAX_LENGTH
        assert short.startswith("the file long")
        assert short.endswith("name is wrong: give another one")
        assert shorten_message("short") == "short"


class TestBudgets:
    COSTS = Costs((2e6, 5e6, 1e7))

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("5%", "`--budget` 5% is below the cost of the first exit: it must lie in 20% to 100%"),
            ("120%", "`--budget` 120% is above the cost of the last exit: it must lie in 20% to 100%"),
            ("50", "`--budget` 50 is below the cost of the first exit: it must lie in 2000000 to 10000000 MACs; "
             "did you mean 50%?"),
            ("0.5", "`--budget` 0.5 is below the cost of the first exit: it must lie in 2000000 to 10000000 MACs; "
             "did you mean 50%?"),
            ("1e5", "`--budget` 1e5 is below the cost of the first exit: it must lie in 2000000 to 10000000 MACs"),
            ("2e8", "`--budget` 2e8 is above the cost of the last exit"),
        ],
    )  # fmt: skip
    def test_are_answered_in_the_unit_that_was_typed(self, text: str, expected: str) -> None:
        with pytest.raises(InputError) as error:
            parse_budget(text, self.COSTS)
        assert str(error.value).startswith(expected)
        assert ("did you mean" in str(error.value)) == (text in ("50", "0.5"))

    def test_a_net_with_one_exit(self) -> None:
        with pytest.raises(InputError, match="`--budget` 60% must be 100%: the net has only one exit"):
            parse_budget("60%", Costs((1e7,)))
        assert parse_budget("100%", Costs((1e7,))) == 1e7

    def test_milliseconds(self) -> None:
        with pytest.raises(InputError, match=r"must lie in 2 to 40 ms"):
            parse_budget("1ms", Costs((2.0, 40.0), "ms"))
        assert parse_budget("3ms", Costs((2.0, 40.0), "ms")) == 3.0


class TestSuggestedCommands:
    def test_are_complete_and_quoted(self, run: Path) -> None:
        opened = Run(run)
        words = shlex.split(opened.command("collect", "--force"))
        assert words == ["exitwise", "collect", str(run), "--force", "--net", "mine:net"]
        assert shlex.split(opened.command("calibrate")) == ["exitwise", "calibrate", str(run)]

    def test_a_missing_trace(self, run: Path, exitwise: Command) -> None:
        (run / "trace.safetensors").unlink()
        done = exitwise("calibrate", run)
        assert f"run `exitwise collect {shlex.quote(str(run))} --net mine:net` first" in done.err

    def test_missing_times(self, run: Path, exitwise: Command) -> None:
        done = exitwise("evaluate", run, "--budget", "2ms")
        assert f"`exitwise bench {shlex.quote(str(run))} --net mine:net`" in done.err


class TestSmallDatasets:
    def test_get_a_smaller_batch(self, tmp_path: Path, exitwise: Command) -> None:
        rng = np.random.default_rng(0)
        for split, count in (("train", 12), ("test", 4)):
            for name in ("cat", "dog"):
                folder = tmp_path / "data" / split / name
                folder.mkdir(parents=True)
                for number in range(count):
                    pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(folder / f"{number}.png")
        options = (
            "train",
            "--data",
            f"folder:{tmp_path / 'data'}",
            "--model",
            "tiny-8",
            "--epochs",
            1,
            "--image-size",
            8,
        )
        done = exitwise(*options, "--recipe", "cifar100", "--out", tmp_path / "run")
        assert done.status == 0, done.err
        assert "batches have" in done.err
        recipe = json.loads((tmp_path / "run" / "run.json").read_text())["training"]["recipe"]
        assert 1 <= recipe["batch_size"] <= 6
        refused = exitwise(*options, "--batch-size", 500, "--out", tmp_path / "other")
        assert (refused.status, refused.err.splitlines()[-1].count("`--batch-size`")) == (2, 1)
        assert not (tmp_path / "other").exists()


class TestUnfinishedTraining:
    @pytest.mark.slow
    def test_collect_says_so(self, tmp_path: Path, exitwise: Command) -> None:
        place = tmp_path / "half done"
        assert exitwise("train", "--data", "digits", "--epochs", 1, "--out", place).status == 0
        done = exitwise("collect", place)
        assert done.status == 0, done.err
        assert "epochs" not in done.err
        metadata = json.loads((place / "run.json").read_text())
        metadata["training"]["recipe"]["epochs"] = 3
        write_json(place / "run.json", metadata)
        done = exitwise("collect", place, "--force")
        assert done.status == 0, done.err
        assert "stopped after 1 of 3 epochs" in done.err
        assert f"`exitwise train {shlex.quote(str(place))} --resume`" in done.err

    def test_heads_are_never_half_trained(self, tmp_path: Path) -> None:
        place = new_run(tmp_path / "heads", random_trace(), {"recipe": {"epochs": 9}, "freeze_backbone": True})
        History((EpochRecord(1, 0.1, 1.0, 1.0, (0.5,), 1.0, 1.0),), (1,)).save(place / "history.csv")
        assert Run(place).epochs_done() is None


class TestLabels:
    """Somebody's own network is not called MSDNet in tables; the key in JSON stays."""

    def test_by_family(self) -> None:
        assert model_labels("cifar100-small") == {}
        assert model_labels("cifar100-resnet14")["MSDNet (vanilla)"] == "plain"
        assert model_labels(None)["MSDNet (vanilla)"] == "plain"
        assert model_labels("not a preset any more")["MSDNet (vanilla)"] == "plain"

    @pytest.mark.slow
    def test_evaluate_and_ablate(self, run: Path, exitwise: Command) -> None:
        for words in (["evaluate", run, "--budget", "90%"], ["ablate", run, "--samples", "4"], ["policies", run]):
            done = exitwise(*words)
            assert done.status == 0, done.err
            assert "MSDNet" not in done.out
            assert "plain" in done.out
        found = exitwise("evaluate", run, "--budget", "90%", "--json").json
        assert "MSDNet (vanilla)" in found["methods"]

    @pytest.mark.slow
    def test_an_msdnet_keeps_its_name(self, tmp_path: Path, exitwise: Command) -> None:
        done = exitwise("evaluate", zoo_run(tmp_path / "run", samples=500), "--budget", "50%", "--method", "T_opt")
        assert "MSDNet (vanilla)" in done.out


class TestBusyMachine:
    def test_load_is_a_share(self) -> None:
        load = measure_load(0.05)
        assert load is None or 0 <= load <= 1

    def test_only_a_busy_machine_is_mentioned(self) -> None:
        assert describe_load(None) is None
        assert describe_load(0.05) is None
        warning = describe_load(0.6)
        assert warning is not None
        assert "60%" in warning
        assert "when it is idle" in warning

    def test_bench_says_it_before_it_starts_and_shows_progress(
        self, tmp_path: Path, exitwise: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from exitwise.runs import bench

        events: list[str] = []
        monkeypatch.setattr(bench, "measure_load", lambda: 0.42)
        net = ew.models.msdnet("tiny-8").eval()
        images, labels = torch.rand(40, 1, 8, 8), torch.arange(40) % 10
        place = tmp_path / "run"
        place.mkdir()
        ew.collect(net, [(images, labels)], [(images, labels)], [(images, labels)]).save(place / "trace.safetensors")
        ew.save_checkpoint(net, place / "net.safetensors")
        write_json(
            place / "run.json", run_metadata({"preset": "tiny-8"}, {"name": "digits", "root": None, "image_size": 8})
        )
        options = bench.BenchOptions(("90%",), "T_opt", ("torch",), (1,), 1, "torch:1", None)
        report = bench.bench_run(Run(place), options, lambda done, total: events.append(f"{done}/{total}"))
        assert events[0] == "0/2"
        assert events[-1] == "2/2"
        assert report.metadata["load"] == 0.42
        assert any("42%" in note for note in report.metadata["notes"])


def test_the_csv_says_where_exits_are_counted_from(tmp_path: Path) -> None:
    from exitwise.runs.predict import FIELDS
    from exitwise.runs.row_file import FORMATS, RowFile

    row = dict(zip(FIELDS, ("a.png", 1, "cat", 0.5, 0, 3.0, None), strict=True))
    with RowFile(tmp_path / "rows.csv", FORMATS["csv"], FIELDS) as file:
        file.add([row])
    header, line = csv.reader(io.StringIO((tmp_path / "rows.csv").read_text()))
    assert dict(zip(header, line, strict=True))["exit_from_0"] == "0"
    former = (tmp_path / "rows.csv").read_text().replace("exit_from_0", "exit")
    (tmp_path / "former.csv").write_text(former)
    with RowFile(tmp_path / "former.csv", FORMATS["csv"], FIELDS, resume=True) as file:
        assert [found["exit"] for found in file.existing_rows()] == ["0"]


def test_exits_in_the_summary_of_predict_are_those_of_the_rows() -> None:
    from exitwise.cli.deploy import _describe_summary
    from exitwise.runs.predict import Summary

    summary = Summary(images=4, cost=8.0)
    summary.exits.update([0, 0, 0, 2])
    text = _describe_summary(summary, 4.0, "MACs", 1.0)
    assert "75.0% at exit 0, 25.0% at exit 2" in text
    assert "counted from 0" in text


def test_tables_print_notes_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    tables.print_notes(tables.console(), ["keep [brackets] as they are"])
    assert "Note: keep [brackets] as they are" in capsys.readouterr().out
