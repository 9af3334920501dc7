"""Values that were tuned to a bound of their search are named, with what to do."""

from dataclasses import replace

import pytest
from cases import random_trace

import exitwise as ew
from exitwise.calibration.search_bounds import describe_values_at_bounds, find_values_at_bounds

pytestmark = pytest.mark.numerical


def confident_trace(scale: float) -> ew.Trace:
    """A trace whose logits are scaled, so that the best temperatures are scaled, too."""
    trace = random_trace()
    heads = tuple(replace(head, weight=head.weight * scale, bias=head.bias * scale) for head in trace.heads)
    return replace(trace, heads=heads)


def test_values_inside_their_grid_are_not_mentioned() -> None:
    trace = random_trace()
    temperatures = ew.calibrate(trace, "T_opt", search="continuous").temperatures
    grid = sorted({0.01, *temperatures, 50.0})
    assert describe_values_at_bounds(ew.calibrate(trace, "T_opt", temperatures=grid)) == []
    assert describe_values_at_bounds(ew.calibrate(trace, "MSDNet (vanilla)")) == []


def test_a_temperature_at_the_lower_edge_hints_at_images_that_were_trained_on() -> None:
    calibration = ew.calibrate(confident_trace(1e-3), "T_opt")
    assert set(calibration.temperatures) == {0.3}
    (note,) = describe_values_at_bounds(calibration)
    assert "temperature is at the edge of its grid, 0.3, at all exits" in note
    assert "--search continuous" in note
    assert "trained on these validation images" in note
    assert len(note) <= 300


def test_the_continuous_search_has_bounds_as_well() -> None:
    calibration = ew.calibrate(confident_trace(1e-4), "T_opt", search="continuous")
    (note,) = describe_values_at_bounds(calibration)
    assert "at the bound of its search, 0.05," in note
    assert "--search continuous" not in note
    calibration = ew.calibrate(confident_trace(1e4), "T_opt", search="continuous")
    assert {value.bound for value in find_values_at_bounds(calibration)} == {20.0}


def test_prior_variances_of_some_exits() -> None:
    trace = random_trace()
    two = ew.calibrate(trace, "Laplace sigma_opt", prior_vars=[1e-4, 2e-4])
    (note,) = describe_values_at_bounds(two)
    assert note.startswith("The prior variance is at the edge of its grid, ")
    assert "at all exits. Search further with --search continuous." in note
    (note,) = describe_values_at_bounds(two, "`exitwise calibrate RUN --search continuous`")
    assert note.endswith("Search further with `exitwise calibrate RUN --search continuous`.")
    one = ew.calibrate(trace, "Laplace sigma_opt", prior_vars=[0.01])
    assert describe_values_at_bounds(one) == []  # a grid of one value was chosen by the caller
