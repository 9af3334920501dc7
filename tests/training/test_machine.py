"""Settings of a machine are checked before anything is started."""

from typing import Any

import pytest

import exitwise as ew


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accelerator": "tpu"}, "`accelerator` must be one of auto, cpu, cuda, mps, but got 'tpu'"),
        ({"precision": "8"}, "`precision` must be one of 32-true, 16-mixed, bf16-mixed, but got '8'"),
        ({"strategy": "fsdp"}, "`strategy` must be one of auto, ddp, but got 'fsdp'"),
        ({"devices": 0}, "`devices` must be a whole number of at least 1, but got 0"),
        ({"devices": 1.5}, "`devices` must be a whole number of at least 1, but got 1.5"),
        ({"num_nodes": 0}, "`num_nodes` must be a whole number of at least 1, but got 0"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ew.InputError) as error:
        ew.Machine(**settings)
    assert str(error.value) == message


def test_more_devices_than_the_machine_has_are_refused() -> None:
    with pytest.raises(ew.InputError, match=r"`devices` must be at most the [0-9]+ CPU cores of this machine"):
        ew.Machine(accelerator="cpu", devices=100_000).fabric()
