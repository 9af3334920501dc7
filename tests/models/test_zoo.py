"""Networks of timm, torchvision and transformers, from attached exits to ONNX; the sweep has many more."""

import json
from pathlib import Path

import pytest
import torch
from other_libraries import experiment, require

import exitwise as ew
from exitwise.core.nested import map_tensors

pytestmark = [pytest.mark.numerical, pytest.mark.slow]

LIBRARIES = {"timm": "timm", "torchvision": "torchvision", "hf": "transformers"}
SAME_LAYER = ("timm:test_resnet", "timm:test_vit", "timm:test_convnext", "timm:test_vit_relpos", "hf:albert")
FOLDED = ("timm:deit_tiny_distilled_patch16_224", "timm:levit_128s", "timm:repghostnet_050", "hf:gpt2")
EXPORTED = (
    "timm:test_vit_relpos",
    "torchvision:squeezenet1_1",
    "hf:gpt2",
    "hf:modernbert",
    "hf:xlnet",
    "hf:efficientnet",
)


@pytest.fixture(autouse=True)
def library(request: pytest.FixtureRequest) -> None:
    """Skip a test whose library is not installed."""
    if hasattr(request.node, "callspec"):
        require(LIBRARIES[request.node.callspec.params["name"].partition(":")[0]])


@pytest.mark.filterwarnings("ignore")  # of other libraries
@pytest.mark.parametrize("name", [*SAME_LAYER, *FOLDED])
def test_the_last_exit_gives_the_logits_of_the_network(name: str) -> None:
    zoo = experiment("zoo")
    module, example, _ = zoo.build(name)
    inputs = zoo.draw_inputs(example, 3)
    net = ew.attach(module, "auto", exits=3, example_inputs=map_tensors(lambda tensor: tensor[:1], inputs))
    with torch.no_grad():
        output = module(**inputs).logits if isinstance(inputs, dict) else module(inputs)
        logits = net(inputs)
    assert [tuple(rows.shape) for rows in logits] == [(3, zoo.CLASSES)] * 3
    if name in FOLDED:
        torch.testing.assert_close(logits[-1], output, rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(logits[-1], output)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", EXPORTED)
def test_probabilities_of_all_exits_are_equal_in_onnx(name: str, tmp_path: Path) -> None:
    record: dict[str, float] = {}
    experiment("zoo_sweep").run_steps(name, record, lambda _: None, tmp_path)
    assert record["difference"] <= 1e-4
    assert record["spread"] > 100 * record["difference"]


def test_the_page_shows_the_records_of_the_sweep() -> None:
    sweep = experiment("zoo_sweep")
    page = sweep.PAGE.read_text(encoding="utf-8")
    assert sweep.filled(page) == page, "run `python experiments/zoo_sweep.py --fill`"
    listed = {name for names in json.loads(sweep.NETWORKS.read_text()).values() for name in names}
    assert {name.partition(":")[2] for name in sweep.load_records()} <= listed
