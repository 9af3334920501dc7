"""Open Inference Protocol V2: tensors in JSON or binary, from bytes to arrays and back. No web framework here."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from exitwise.core.checks import is_finite, is_integer
from exitwise.core.errors import InputError, first_line, shorten
from exitwise.core.files import parse_json
from exitwise.core.predictions import Array
from exitwise.runtime.bundle import InputSpec

HEADER_LENGTH = "Inference-Header-Content-Length"
_TYPES = {
    "BOOL": "?",
    "UINT8": "u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "INT8": "i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
_NAMES = {np.dtype(code).newbyteorder("="): name for name, code in _TYPES.items()}
_OUTPUT_NAMES = ("probs", "predicted", "exits", "costs")
_MAX_ID, _MAX_DIMENSIONS = 256, 8
_SMALL_HEADER = 1024  # bytes of JSON that is kept parsed
_encode = json.JSONEncoder(allow_nan=False).encode  # `json.dumps` with options makes an encoder for every call


@dataclass(frozen=True)
class RequestedOutput:
    """An output that a request names, and whether to send it as binary data."""

    name: str
    binary: bool


@dataclass(frozen=True, eq=False)
class InferRequest:
    """A parsed request: its id, parameters, inputs by name, and outputs; no outputs means all."""

    id: str | None
    parameters: Mapping[str, Any]
    inputs: Mapping[str, Array]
    outputs: Sequence[RequestedOutput]
    binary_output: bool = False


@dataclass(frozen=True, eq=False)
class InferResponse:
    """An answer: the body, and the length of its JSON part if binary tensors follow."""

    body: bytes
    header_length: int | None = None


def datatype(array_type: Any) -> str:
    """Return the name of a NumPy type in the protocol, such as FP32."""
    return _NAMES[np.dtype(array_type).newbyteorder("=")]


def parse_infer(body: bytes, header_length: str | None, max_images: int) -> InferRequest:
    """Parse and check a request.

    Args:
        body: The body: JSON, or JSON followed by binary tensors.
        header_length: Value of the header `Inference-Header-Content-Length`; None for a body of JSON only.
        max_images: Largest number of images.

    Returns:
        The request, with arrays whose sizes agree with their shapes.

    Raises:
        InputError: If anything in the request is invalid.
    """
    header, rest = _split_body(body, header_length)
    data = _parse_small_object(header) if len(header) <= _SMALL_HEADER else _parse_object(header)
    request_id = data.get("id")
    if request_id is not None and (not isinstance(request_id, str) or len(request_id) > _MAX_ID):
        raise InputError(f"`id` must be a string of at most {_MAX_ID} characters, but is {shorten(request_id)}")
    parameters = _parse_parameters(data, "the request")
    inputs, position = _parse_inputs(data.get("inputs"), rest, max_images)
    if position != len(rest):
        raise InputError(f"{len(rest) - position} bytes of binary data belong to no input")
    binary_output = parameters.get("binary_data_output", False)
    if not isinstance(binary_output, bool):
        raise InputError(f"`binary_data_output` must be true or false, but is {shorten(binary_output)}")
    outputs = _parse_outputs(data.get("outputs", []), binary_output)
    return InferRequest(request_id, parameters, inputs, outputs, binary_output)


def _split_body(body: bytes, header_length: str | None) -> tuple[bytes, memoryview]:
    if header_length is None:
        return body, memoryview(b"")
    if not re.fullmatch(r"[0-9]{1,12}", header_length) or not 0 < int(header_length) <= len(body):
        raise InputError(
            f"`{HEADER_LENGTH}` must be the bytes of JSON in a body of {len(body)}, but is {shorten(header_length)}"
        )
    length = int(header_length)
    return body[:length], memoryview(body)[length:]


def _parse_object(text: bytes) -> dict[str, Any]:
    try:
        data = parse_json(text, allow_nan=False)
    except RecursionError:
        raise InputError("the request is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        raise InputError(f"the request is not valid JSON: {first_line(error)[:200]}") from None
    if not isinstance(data, dict):
        raise InputError(f"the request must be a JSON object, but is a {type(data).__name__}")
    return data


# A client sends the same JSON with every request of binary tensors. What is parsed is read, and never changed.
_parse_small_object = lru_cache(maxsize=256)(_parse_object)


def _parse_parameters(data: Mapping[str, Any], owner: str) -> dict[str, Any]:
    parameters = data.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict) or not all(
        isinstance(value, str | bool) or is_finite(value) for value in parameters.values()
    ):
        raise InputError(f"`parameters` of {owner} must be an object of strings, numbers and booleans")
    return parameters


def _parse_inputs(entries: Any, rest: memoryview, max_images: int) -> tuple[dict[str, Array], int]:
    if not isinstance(entries, list) or not entries:
        raise InputError("`inputs` must be a list of at least one tensor")
    inputs: dict[str, Array] = {}
    position = 0
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            raise InputError(f"an input must be an object with a name, but is {shorten(entry)}")
        name = entry["name"]
        if name in inputs:
            raise InputError(f"input {shorten(name)} occurs twice")
        shape = _parse_shape(name, entry.get("shape"), max_images)
        kind = entry.get("datatype")
        if not isinstance(kind, str) or kind not in _TYPES:
            raise InputError(
                f"`datatype` of {shorten(name)} must be one of {', '.join(_TYPES)}, but is {shorten(kind)}"
            )
        size = _parse_parameters(entry, f"input {shorten(name)}").get("binary_data_size")
        if size is not None:
            inputs[name] = _read_binary(name, rest[position:], size, shape, kind)
            position += size
        else:
            inputs[name] = _read_json(name, entry.get("data"), shape, kind)
    return inputs, position


def _parse_shape(name: str, shape: Any, max_images: int) -> tuple[int, ...]:
    valid = isinstance(shape, list) and 0 < len(shape) <= _MAX_DIMENSIONS
    if not valid or not all(is_integer(size) and 0 < size < 1 << 31 for size in shape):
        raise InputError(
            f"`shape` of {shorten(name)} must be a list of positive whole numbers, but is {shorten(shape)}"
        )
    if shape[0] > max_images:
        raise InputError(f"a request may have at most {max_images} images, but {shorten(name)} has {shape[0]}")
    return tuple(shape)


def _read_binary(name: str, rest: memoryview, size: Any, shape: tuple[int, ...], kind: str) -> Array:
    expected = prod(shape) * np.dtype(_TYPES[kind]).itemsize
    if not is_integer(size) or size != expected:
        raise InputError(
            f"`binary_data_size` of {shorten(name)} must be {expected} for shape {list(shape)} of {kind}, "
            f"but is {shorten(size)}"
        )
    if size > len(rest):
        raise InputError(f"the binary data of {shorten(name)} must be {size} bytes, but only {len(rest)} came")
    array = np.frombuffer(rest[:size], dtype=_TYPES[kind]).reshape(shape)
    _check_finite(name, array)
    return array


def _read_json(name: str, data: Any, shape: tuple[int, ...], kind: str) -> Array:
    if not isinstance(data, list):
        raise InputError(f"`data` of {shorten(name)} must be a list, or there must be a `binary_data_size`")
    target = np.dtype(_TYPES[kind])
    try:
        array = np.asarray(data)
    except (OverflowError, TypeError, ValueError):  # rows of different lengths
        raise InputError(f"`data` of {shorten(name)} must be a flat or regular list of numbers") from None
    expected_kinds = "b" if target.kind == "b" else "iu" if target.kind in "iu" else "iuf"
    if array.dtype.kind not in expected_kinds:
        raise InputError(f"`data` of {shorten(name)} must be values of {kind}, but are {array.dtype}")
    if array.shape != shape and array.shape != (prod(shape),):
        raise InputError(f"`data` of {shorten(name)} must have shape {list(shape)}, but has {list(array.shape)}")
    if target.kind in "iu" and array.size:
        limits = np.iinfo(target)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise InputError(f"`data` of {shorten(name)} must be values of {kind}, but some are out of its range")
    with np.errstate(over="ignore"):
        array = array.astype(target).reshape(shape)
    _check_finite(name, array)
    return array


def _check_finite(name: str, array: Array) -> None:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InputError(f"input {shorten(name)} holds values that are not finite")


def _parse_outputs(entries: Any, binary_default: bool) -> list[RequestedOutput]:
    if not isinstance(entries, list) or len(entries) > len(_OUTPUT_NAMES):
        raise InputError(f"`outputs` must be a list of at most {len(_OUTPUT_NAMES)} outputs")
    outputs = []
    for entry in entries:
        if not isinstance(entry, dict) or entry.get("name") not in _OUTPUT_NAMES:
            raise InputError(f"an output must be an object named {', '.join(_OUTPUT_NAMES)}, but is {shorten(entry)}")
        parameters = _parse_parameters(entry, f"output {entry['name']}")
        binary = parameters.get("binary_data", binary_default)
        classes = parameters.get("classification")
        if not isinstance(binary, bool):
            raise InputError(f"`binary_data` must be true or false, but is {shorten(binary)}")
        if classes is not None:
            raise InputError("the parameter `classification` is not supported: ask for `probs`, or POST to /classify")
        outputs.append(RequestedOutput(entry["name"], binary))
    if len({output.name for output in outputs}) < len(outputs):
        raise InputError("`outputs` names an output twice")
    return outputs


def check_inputs(inputs: Mapping[str, Array], specs: Sequence[InputSpec]) -> Array | dict[str, Array]:
    """Return the inputs in the form that a backend takes; raise InputError unless they are those of the bundle."""
    names = [spec.name for spec in specs]
    if set(inputs) != set(names):
        raise InputError(f"`inputs` must be {', '.join(names)}, but are {shorten(', '.join(inputs))}")
    arrays = {name: inputs[name].astype(inputs[name].dtype.newbyteorder("="), copy=False) for name in names}
    return arrays[names[0]] if len(names) == 1 else arrays


def build_response(
    request: InferRequest, model: str, tensors: Mapping[str, Callable[[], Array]], parameters: Mapping[str, Any]
) -> InferResponse:
    """Return the body of an answer.

    Args:
        request: The request; its id and its choice of outputs are used.
        model: Name of the model.
        tensors: Functions by name that compute the outputs: only those that the request asks for are computed.
        parameters: Parameters of the answer.
    """
    chosen = request.outputs or [RequestedOutput(name, request.binary_output) for name in tensors]
    entries, chunks = [], []
    for output in chosen:
        array = tensors[output.name]()
        entry: dict[str, Any] = {
            "name": output.name,
            "datatype": datatype(array.dtype),
            "shape": list(array.shape),
        }
        if output.binary:
            chunks.append(np.ascontiguousarray(array, dtype=_TYPES[entry["datatype"]]).tobytes())
            entry["parameters"] = {"binary_data_size": len(chunks[-1])}
        else:
            entry["data"] = array.ravel().tolist()
        entries.append(entry)
    data: dict[str, Any] = {"model_name": model, "model_version": "1"}
    if request.id is not None:
        data["id"] = request.id
    data |= {"parameters": dict(parameters), "outputs": entries}
    header = _encode(data).encode()
    return InferResponse(header + b"".join(chunks), len(header) if chunks else None)


def describe_model(
    name: str, specs: Sequence[InputSpec], num_classes: int, parameters: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the metadata of a model: its inputs and outputs, with -1 for the number of images."""
    return {
        "name": name,
        "versions": ["1"],
        "platform": "onnxruntime_exitwise",
        "inputs": [{"name": spec.name, "datatype": datatype(spec.dtype), "shape": [-1, *spec.shape]} for spec in specs],
        "outputs": [
            {"name": "probs", "datatype": "FP32", "shape": [-1, num_classes]},
            {"name": "predicted", "datatype": "INT64", "shape": [-1]},
            {"name": "exits", "datatype": "INT64", "shape": [-1]},
            {"name": "costs", "datatype": "FP64", "shape": [-1]},
        ],
        **({} if parameters is None else {"parameters": dict(parameters)}),
    }
