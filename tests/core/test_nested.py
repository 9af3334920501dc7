"""Nested states: which containers are walked, in which order, and what becomes of them."""

from collections import OrderedDict, UserDict, namedtuple
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

import exitwise as ew
from exitwise.core.nested import describe, first_sample, iter_tensors, map_tensors, num_samples, replace_tensors

Pair = namedtuple("Pair", ["first", "second"])


class Stack(list[Any]):
    """List of an unregistered type."""


ONE, TWO, THREE = (torch.full((2, 3), value) for value in (1.0, 2.0, 3.0))


def double(tensor: Tensor) -> Tensor:
    return 2 * tensor


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, MappingProxyType])
def test_every_mapping_is_walked_in_its_order_and_becomes_a_dict(kind: Any) -> None:
    state = kind({"b": ONE, "a": [TWO, None]})
    assert [int(tensor[0, 0]) for tensor in iter_tensors(state)] == [1, 2]
    result = map_tensors(double, state)
    assert type(result) is dict
    assert list(result) == ["b", "a"]
    assert torch.equal(result["a"][0], 2 * TWO)
    assert result["a"][1] is None


@pytest.mark.parametrize("state", [[ONE, TWO], (ONE, TWO), Stack([ONE, TWO]), Pair(ONE, TWO)], ids=type)
def test_sequences_keep_their_type(state: Any) -> None:
    result = map_tensors(double, state)
    assert type(result) is type(state)
    assert [int(tensor[0, 0]) for tensor in iter_tensors(result)] == [2, 4]


def test_other_leaves_stay_as_in_the_first_state() -> None:
    leaf = object()
    result = map_tensors(torch.add, [ONE, leaf, None, 3], (TWO, 4, 5, 6))
    assert torch.equal(result[0], THREE)
    assert result[1:] == [leaf, None, 3]


def test_states_of_other_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        map_tensors(torch.add, [ONE], [ONE, TWO])
    with pytest.raises(KeyError):
        map_tensors(torch.add, {"a": ONE}, {"b": ONE})


def test_tensors_are_replaced_in_order() -> None:
    state = {"b": ONE, "a": Pair(TWO, "text")}
    result = replace_tensors(state, iter([THREE, ONE]))
    assert result["b"] is THREE
    assert result["a"] == Pair(ONE, "text")


def test_all_tensors_must_have_one_row_per_sample() -> None:
    assert num_samples({"a": ONE, "b": [torch.zeros(2)]}) == 2
    for state, shapes in (
        ([ONE, torch.zeros(3)], r"\[\(2, 3\), \(3,\)\]"),
        (torch.tensor(1.0), r"\[\(\)\]"),
        ([], r"\[\]"),
    ):
        with pytest.raises(ew.InputError, match=f"`x` must hold tensors with one entry per sample first.*{shapes}"):
            num_samples(state, "`x`")


def test_the_first_sample_is_a_batch_of_one() -> None:
    assert torch.equal(first_sample([THREE])[0], THREE[:1])
    assert torch.equal(first_sample([torch.ones(0, 4)])[0], torch.zeros(1, 4))


def test_descriptions_show_structure_types_and_shapes() -> None:
    state = {"a": [ONE, None], "b": Pair(torch.zeros(2, dtype=torch.int64), "text")}
    assert describe(state) == "{'a': list of [float32 (2, 3), NoneType], 'b': Pair of [int64 (2,), str]}"
