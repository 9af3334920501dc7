"""The parts of the drift experiment that could be wrong without anyone seeing it in the results."""

from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest
import torch
from paths import ROOT
from torch import Tensor, nn

import exitwise as ew

pytestmark = pytest.mark.numerical

EXPERIMENTS = ROOT / "experiments"


@pytest.fixture
def corruptions(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    import corruptions

    return corruptions


@pytest.fixture
def drift(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    import drift

    return drift


def pictures(n: int = 8, size: int = 32) -> Tensor:
    """Smooth shapes over the whole range of bytes, so that blurring and cutting off both show."""
    y, x = torch.meshgrid(torch.linspace(0, 6, size), torch.linspace(0, 6, size), indexing="ij")
    phase = torch.rand(n, 3, 1, 1, generator=torch.Generator().manual_seed(1)) * 6
    return ((torch.sin(x * 2 + phase) * torch.cos(y * 3 - phase) + 1) * 127.5).to(torch.uint8)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", ["noise", "blur", "contrast"])
def test_corruptions_grow_with_severity(corruptions: ModuleType, name: str) -> None:
    images = pictures()
    before = images.clone()
    worse = [corruptions.CORRUPTIONS[name](images, severity, seeded()) for severity in range(1, 6)]
    assert torch.equal(images, before)
    for each in worse:
        assert each.dtype == torch.uint8
        assert each.shape == images.shape
    changes = [(each.int() - images.int()).abs().float().mean().item() for each in worse]
    assert changes[0] > 0
    assert all(low < high for low, high in pairwise(changes))
    for severity in (0, 6):
        with pytest.raises(ValueError, match="severity"):
            corruptions.CORRUPTIONS[name](images, severity, seeded())


@pytest.mark.parametrize("name", ["noise", "blur", "contrast"])
def test_corruptions_follow_from_the_generator(corruptions: ModuleType, name: str) -> None:
    corrupt = corruptions.CORRUPTIONS[name]
    assert torch.equal(corrupt(pictures(), 3, seeded(5)), corrupt(pictures(), 3, seeded(5)))
    assert torch.equal(corrupt(pictures(), 3, seeded(5)), corrupt(pictures(), 3, seeded(6))) == (name != "noise")


def test_noise_is_cut_off_where_bytes_end(corruptions: ModuleType) -> None:
    """Wrapped around instead, black would become nearly white."""
    for value in (0, 255):
        flat = torch.full((4, 3, 32, 32), value, dtype=torch.uint8)
        noisy = corruptions.noise(flat, 5, seeded())
        assert (noisy.int() - value).abs().max() < 180
        assert 0.4 < (noisy == value).float().mean() < 0.6  # half of the noise goes beyond the range


def test_noise_has_the_strength_it_states(corruptions: ModuleType) -> None:
    grey = torch.full((16, 3, 32, 32), 128, dtype=torch.uint8)
    for severity, strength in enumerate(corruptions.STRENGTHS["noise"], start=1):
        deviation = corruptions.noise(grey, severity, seeded()).float().std().item()
        assert deviation == pytest.approx(255 * strength, rel=0.02)


def test_blur_is_scipys(corruptions: ModuleType) -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    images = pictures(2)
    for severity, strength in enumerate(corruptions.STRENGTHS["blur"], start=1):
        radius = int(np.ceil(3 * strength))
        sigmas = (0, 0, strength, strength)
        expected = ndimage.gaussian_filter(
            images.double().numpy(), sigmas, mode="mirror", radius=(0, 0, radius, radius)
        )
        found = corruptions.blur(images, severity, seeded()).numpy()
        assert np.abs(found - expected).max() <= 0.51  # half a byte of rounding


def tiny_net() -> ew.MultiExitNet:
    """Two exits on images of 3 x 8 x 8, random and overconfident."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        stages = [first, nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())]
        heads = [ew.Head(nn.Flatten(), nn.Linear(512, 5)) for _ in stages]
        for head in heads:
            head.last.weight.data *= 12
    return ew.MultiExitNet(stages, heads)


class Half:
    """Stand-in for the dataset's statistics."""

    mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


@pytest.mark.parametrize("method", ["MSDNet (vanilla)", "MIE Laplace T_opt sigma_opt"])
@pytest.mark.slow
def test_the_attack_lowers_confidence_within_its_bounds(drift: ModuleType, method: str) -> None:
    net = tiny_net().eval().requires_grad_(False)
    import slowdown  # which `drift` has made importable

    normalize = drift.Normalize(Half())
    pixels = torch.rand(60, 3, 8, 8, generator=seeded(1)).mul(1.4).sub(0.2).clamp(0, 1)  # some black, some white
    labels = torch.arange(60) % 5
    batch = [(normalize(255 * pixels), labels)]
    trace = ew.collect(net, train=batch, val=batch, test=batch)
    calibration = ew.calibrate(trace, method, samples=10)
    exits = slowdown.white_box(calibration)
    assert slowdown.check_white_box(calibration, trace.test.features) < 1e-5

    victim = slowdown.log_confidences(net, exits, normalize)
    images = pixels[:16]
    moved = slowdown.slow_down(victim, images, seeded(2))
    assert not moved.requires_grad
    assert (moved - images).abs().max() <= 8 / 255 + 1e-6
    assert moved.min() >= 0
    assert moved.max() <= 1
    # What is really used says so, not only what was differentiated.
    confidence = [calibration.predict(net.features(normalize(255 * x))).probs.amax(2).log() for x in (images, moved)]
    random = images + 8 / 255 * torch.randn(images.shape, generator=seeded(4)).sign()
    by_chance = calibration.predict(net.features(normalize(255 * random.clamp(0, 1)))).probs.amax(2).log()
    assert (confidence[1].sum(0) < confidence[0].sum(0)).all()
    gained = (confidence[0] - confidence[1]).mean()
    assert gained > 3 * (confidence[0] - by_chance).mean().abs()
    assert torch.equal(moved, slowdown.slow_down(victim, images, seeded(2)))


def test_when_a_stream_has_settled(drift: ModuleType) -> None:
    """Computed with a plain loop over batches."""
    generator = np.random.default_rng(0)
    cost = 1 + 0.06 * generator.standard_normal(3 * drift.BATCHES)
    cost[drift.BATCHES : drift.BATCHES + 6] += 0.5
    running = [cost[max(0, t - drift.WINDOW + 1) : t + 1].mean() for t in range(len(cost))]
    np.testing.assert_allclose(drift.running_mean(cost), running)
    for place in range(3):
        inside = [abs(value - 1) <= drift.BAND for value in running[place * drift.BATCHES :][: drift.BATCHES]]
        expected = next((n + 1 for n in range(len(inside)) if all(inside[n:])), np.inf)
        assert drift.batches_to_settle(cost, place) == expected
    assert drift.batches_to_settle(np.ones(80), 1) == 1
    assert drift.batches_to_settle(np.full(80, 1.5), 1) == np.inf
