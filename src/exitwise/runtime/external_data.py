"""Find data outside of an ONNX graph, from the bytes of its protobuf message. Imports no onnx.

onnxruntime reads external data of a graph from files that the graph names, relative to the current folder: no hash
covers them.
"""

from collections.abc import Iterator

from exitwise.core.errors import InputError

# Fields, by message, that lead to tensors: number of the field and message in it.
_FIELDS = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse tensor"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse tensor", 23: "sparse tensor"},
    "sparse tensor": {1: "tensor", 2: "tensor"},
}
_EXTERNAL_DATA, _DATA_LOCATION = 13, 14  # fields of a tensor
_MAX_DEPTH = 100  # of nested messages, as protobuf itself


def has_external_data(model: bytes) -> bool:
    """Return whether a tensor of a serialized ONNX model is stored outside of it; raise InputError if it is damaged."""
    pending = [("model", memoryview(model), 0)]
    while pending:
        kind, message, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise InputError(f"its messages are nested more than {_MAX_DEPTH} deep")
        for number, value in _fields(message):
            if kind == "tensor":
                if number == _EXTERNAL_DATA or (number == _DATA_LOCATION and value != 0):
                    return True
            elif (inner := _FIELDS[kind].get(number)) is not None and isinstance(value, memoryview):
                pending.append((inner, value, depth + 1))
    return False


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Iterate over the fields of a protobuf message: their numbers, and their values as integers or bytes."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, wire_type = key >> 3, key & 7
        if wire_type == 0:
            value, position = _varint(message, position)
            yield number, value
            continue
        if wire_type == 2:
            size, position = _varint(message, position)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise InputError(f"it is not a protobuf message: wire type {wire_type}")
        if size > len(message) - position:
            raise InputError("it is cut off")
        yield number, message[position : position + size]
        position += size


def _varint(message: memoryview, position: int) -> tuple[int, int]:
    """Return the integer at a position, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(message):
            raise InputError("it is cut off")
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise InputError("it is not a protobuf message: an integer has more than ten bytes")
