"""Heads with convolutions of their own: their shapes, their cost, and the spec that rebuilds them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import exitwise as ew
from exitwise.models.attach.conv_head import make_convolutions


def kinds(head: ew.Head) -> list[str]:
    return [type(part).__name__ for part in head.neck if not isinstance(part, nn.Sequential)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("channels", "shape", "widths", "small"),
    [
        (16, (32, 32), [32, 64, 128], (4, 4)),
        (16, (8, 8), [32], (4, 4)),
        (256, (56, 56), [128, 128, 128, 128], (4, 4)),
        (1024, (14, 14), [256, 256], (4, 4)),
        (8, (40,), [16, 32, 64, 128], (3,)),
        (8, (9, 5, 5), [16, 32], (3, 2, 2)),
        (64, (4, 4), [], (4, 4)),
    ],
)
def test_each_convolution_halves_the_map_until_no_side_is_longer_than_4(
    channels: int, shape: tuple[int, ...], widths: list[int], small: tuple[int, ...]
) -> None:
    layers, width, reduced = make_convolutions(channels, shape, torch.device("cpu"), torch.float32)
    out: Tensor = nn.Sequential(*layers)(torch.rand(2, channels, *shape))
    assert out.shape == (2, width, *reduced)
    assert reduced == small
    convolutions = [layer for layer in layers if hasattr(layer, "kernel_size")]
    assert [layer.weight.shape[1] for layer in convolutions[::2]] == [1] * len(widths)  # every channel by itself
    assert [layer.weight.shape[0] for layer in convolutions[1::2]] == widths


def test_convolutions_of_a_head_are_cheap() -> None:
    module, x = ew.models.resnet("cifar100-resnet14").eval(), torch.rand(1, 3, 32, 32)
    at = ["stages.0.layer1", "stages.0.layer2"]
    mlp, conv = (ew.macs(ew.attach(module, at, head=kind, example_inputs=x), (3, 32, 32)) for kind in ("mlp", "conv"))
    # Of the first head, by hand: maps of 16 x 16, 8 x 8 and 4 x 4, whose channels are then mixed into twice as many.
    maps = [(16, 256), (32, 64), (64, 16)]
    convolutions = sum(pixels * (9 * channels + channels * 2 * channels) for channels, pixels in maps)
    normalized = sum(pixels * 2 * channels for channels, pixels in maps)
    assert conv[0] - mlp[0] == pytest.approx(convolutions, abs=6 * normalized + 128 * 128)
    assert conv[-1] < 1.04 * mlp[-1]


def test_only_large_maps_get_convolutions() -> None:
    module = ew.models.resnet("cifar100-resnet8").eval()
    at = ["stages.0.layer1", "stages.0.layer2"]
    net = ew.attach(module, at, head="conv", example_inputs=torch.rand(1, 3, 16, 16))
    large, small = (kinds(head) for head in net.exits[:-1])  # of 16 x 16 and 8 x 8
    assert large.count("Conv2d") == 2 * 2
    assert small.count("Conv2d") == 1 * 2
    plain = ew.attach(module, at, example_inputs=torch.rand(1, 3, 16, 16))
    last = net(x := torch.rand(3, 3, 16, 16))[-1]
    assert torch.equal(last, plain(x)[-1])


def test_a_grid_has_more_features_than_an_mlp_where_there_are_few_channels(tmp_path: Path) -> None:
    module, x = ew.models.resnet("cifar100-resnet14").eval(), torch.rand(2, 3, 32, 32)
    at = ["stages.0.layer1", "stages.0.layer2", "stages.0.layer3.0"]  # 16, 32 and 64 channels
    widths = {}
    for kind in ("mlp", "grid"):
        net = ew.attach(module, at, head=kind, example_inputs=x)
        widths[kind] = [
            next(part.in_features for part in head.neck if isinstance(part, nn.Linear)) for head in net.exits[:-1]
        ]  # type: ignore[union-attr]
    assert widths == {"mlp": [16 * 16, 32 * 4, 64 * 4], "grid": [16 * 16, 32 * 16, 64 * 16]}
    ew.save_checkpoint(net, tmp_path / "net.safetensors")
    again = ew.load_net(tmp_path / "net.safetensors").eval()
    assert all(torch.equal(*pair) for pair in zip(net(x), again(x), strict=True))


def test_other_features_get_the_head_of_an_mlp() -> None:
    module = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    heads = [ew.attach(module, ["1"], head=kind).exits[0] for kind in ("conv", "mlp")]
    assert kinds(heads[0]) == kinds(heads[1]) == ["Linear", "ReLU"]


def test_a_net_of_images_of_another_size_is_rebuilt(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = ew.models.resnet("cifar100-resnet8", num_classes=10, in_channels=1).eval()
    net = ew.attach(module, "auto", head="conv", exits=3, example_inputs=torch.rand(1, 1, 8, 8))
    ew.save_checkpoint(net, tmp_path / "net.safetensors")
    again = ew.load_net(tmp_path / "net.safetensors").eval()
    x = torch.rand(4, 1, 8, 8)
    assert again.cuts == net.cuts
    assert all(torch.equal(*pair) for pair in zip(net(x), again(x), strict=True))


@pytest.mark.parametrize("shape", [[], [0, 8, 8], [1, 10**9, 8], [1, 2, 3, 4], "1,8,8", [1.5, 8, 8]])
def test_a_spec_with_an_impossible_input_is_refused(shape: object) -> None:
    attached = {"at": ["stages.0.layer1"], "head": "conv", "input_shape": shape}
    with pytest.raises(ew.InputError, match="must hold `at`, `head` and at most `input_shape`"):
        ew.models.rebuild({"preset": "cifar100-resnet8", "attach": attached})


@pytest.mark.parametrize("head", ["mlp", "linear"])
def test_heads_for_images_of_another_size_come_back_from_a_file(head: str, tmp_path: Path) -> None:
    module, x = ew.models.resnet("cifar100-resnet8").eval(), torch.rand(2, 3, 48, 48)
    net = ew.attach(module, ["stages.0.layer1", "stages.0.layer2"], head=head, example_inputs=x)
    ew.save_checkpoint(net, tmp_path / "net.safetensors")
    again = ew.load_net(tmp_path / "net.safetensors")
    assert again.spec == net.spec
    for expected, given in zip(net(x), again(x), strict=True):
        assert torch.equal(given, expected)
    own = ew.attach(module, ["stages.0.layer1"], head=head, example_inputs=x[..., :32, :32])
    assert own.spec == {"preset": "cifar100-resnet8", "attach": {"at": ["stages.0.layer1"], "head": head}}
