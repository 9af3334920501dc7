"""Samples of one batch with different policies get what each policy gives them alone."""

from math import inf

import numpy as np
import pytest

from exitwise.core.predictions import ExitPrediction
from exitwise.policies.policy import Policy, mixed_exit_mask


@pytest.mark.parametrize("score", ["confidence", "patience"])
@pytest.mark.parametrize("seed", range(3))
def test_the_mask_is_that_of_each_policy(score: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    # A few values only, so that scores lie on thresholds and ties are broken.
    probs = generator.choice([0.25, 0.5, 0.75], 40)
    pred = ExitPrediction(np.stack([probs, 1 - probs], axis=1).astype(np.float32))
    rows = [(-inf, -inf), (0.5, -inf), (0.75, -inf), (0.6, -inf), (inf, -inf)]
    policies = [Policy(thresholds, score=score) for thresholds in rows]
    which = generator.integers(0, len(policies), 40)
    mask, state = mixed_exit_mask(policies, which, 0, pred, None)
    for index, policy in enumerate(policies):
        mine = np.flatnonzero(which == index)
        expected, own_state = policy.exit_mask(0, pred.take(mine), None)
        assert (mask[mine] == expected).all()
        if own_state is not None and state is not None:
            assert np.array_equal(state[mine], own_state)
    last, state = mixed_exit_mask(policies, which, 1, pred, state)
    assert last.all()
    assert state is None
