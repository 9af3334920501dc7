"""The OpenAPI document of the service."""

from typing import Any

from exitwise.core.version import __version__

_ERROR = {
    "description": "The request was refused.",
    "content": {
        "application/json": {
            "schema": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
        }
    },
}
_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "datatype": {"type": "string"},
        "parameters": {"type": "object"},
        "data": {"type": "array", "items": {}},
    },
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_REFUSALS = ("400", "401", "408", "413", "415", "503", "504")


def describe_api(model: str, max_images: int, page: bool = True, metrics: bool = True) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document.

    Args:
        model: Name of the model in paths.
        max_images: Largest number of images per request.
        page: Whether the page is at the same address, with its data.
        metrics: Whether /metrics is.
    """
    infer = {
        "summary": "Classify tensors (Open Inference Protocol V2).",
        "requestBody": {"required": True, "content": {"application/json": {"schema": _infer_schema()}}},
        "responses": _responses(_infer_answer(), extra=("404", "422")),
    }
    files = {"type": "object", "properties": {"file": {"type": "array", "items": _BINARY["schema"]}}}
    classify = {
        "summary": f"Classify an image file, or up to {max_images} of them.",
        "parameters": [
            _query("budget", "Largest budget: a cost, or a percentage of the full cost such as 50%.", "string"),
            _query("deadline_ms", "Milliseconds after which an answer is of no use.", "number"),
            _query("top", "Number of classes to list for each image.", "integer"),
        ],
        "requestBody": {
            "required": True,
            "content": {"image/*": _BINARY, "multipart/form-data": {"schema": files}},
        },
        "responses": _responses(_classify_answer()),
    }
    explain = {
        "summary": "Run an image file through all exits, and tell where every policy exits; one at a time.",
        "parameters": [
            _query("deadline_ms", "Milliseconds after which an answer is of no use.", "number"),
            _query("top", "Number of classes to list at each exit.", "integer"),
        ],
        "requestBody": {"required": True, "content": {"image/*": _BINARY}},
        "responses": _responses(_explain_answer(), extra=("422",)),
    }
    stats = {"summary": "Load and latency of the last two minutes.", "responses": _responses(_stats_answer())}
    of_page: dict[str, Any] = {
        "/": {"get": _simple("The page.")},
        "/explain": {"get": _simple("Exits, policies and limits, for the page."), "post": explain},
        "/stats": {"get": stats},
    }
    path = f"/v2/models/{model}"
    return {
        "openapi": "3.1.0",
        "info": {"title": "exitwise serve", "version": __version__},
        "paths": {
            "/v2": {"get": _simple("Name, version and extensions of the server.")},
            "/v2/health/live": {"get": _simple("Whether the server runs.")},
            "/v2/health/ready": {"get": _simple("Whether the server accepts requests: 503 if not.")},
            path: {"get": _simple("Inputs, outputs, classes and policies of the model.")},
            f"{path}/ready": {"get": _simple("Whether the model accepts requests.")},
            f"{path}/infer": {"post": infer},
            "/classify": {"post": classify},
            **(of_page if page else {}),
            **({"/metrics": {"get": _simple("Metrics for Prometheus.")}} if metrics else {}),
        },
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            }
        },
    }


def _simple(summary: str) -> dict[str, Any]:
    return {"summary": summary, "responses": {"200": {"description": "OK"}}}


def _query(name: str, description: str, kind: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "description": description, "schema": {"type": kind}}


def _responses(schema: dict[str, Any], extra: tuple[str, ...] = ()) -> dict[str, Any]:
    answered = {"description": "The answers.", "content": {"application/json": {"schema": schema}}}
    return {"200": answered, **dict.fromkeys(sorted((*_REFUSALS, *extra)), _ERROR)}


def _infer_schema() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "parameters": {
                "type": "object",
                "properties": {
                    "budget": {"type": ["number", "string"]},
                    "deadline_ms": {"type": "number"},
                    "binary_data_output": {"type": "boolean"},
                },
            },
            "inputs": {"type": "array", "items": _TENSOR},
            "outputs": {"type": "array", "items": {"type": "object", "required": ["name"]}},
        },
    }


def _infer_answer() -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "parameters": {"type": "object"},
            "outputs": {"type": "array", "items": _TENSOR},
        },
    }


def _classify_answer() -> dict[str, Any]:
    result = {
        "type": "object",
        "properties": {
            "file": {"type": "string"},
            "class": {"type": "integer"},
            "label": {"type": ["string", "null"]},
            "probability": {"type": "number"},
            "exit": {"type": "integer"},
            "cost": {"type": "number"},
            "top": {"type": "array", "items": {"type": "object"}},
            "error": {"type": "string"},
        },
    }
    return {
        "type": "object",
        "properties": {
            "results": {"type": "array", "items": result},
            "policy": {"type": "integer"},
            "budget": {"type": "number"},
            "unit": {"type": "string"},
            "expected_accuracy": {"type": "number"},
        },
    }


def _array(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _explain_answer() -> dict[str, Any]:
    number, integer = {"type": "number"}, {"type": "integer"}
    entry = {"class": integer, "label": {"type": ["string", "null"]}, "probability": number}
    top = _array({"type": "object", "properties": entry})
    exit = {"type": "object", "properties": {"exit": integer, "cost": number, "top": top}}
    policy = {
        "policy": integer,
        "budget": number,
        "unit": {"type": "string"},
        "expected_accuracy": number,
        "cost": number,
        "scores": _array(number),
        "thresholds": _array({"type": ["number", "string"], "description": 'A number, "inf" or "-inf".'}),
        "exit": integer,
    }
    return {
        "type": "object",
        "properties": {
            "exits": _array(exit),
            "score": {"type": "string"},
            "policies": _array({"type": "object", "properties": policy}),
            "policy": integer,
            "unit": {"type": "string"},
        },
    }


def _stats_answer() -> dict[str, Any]:
    counts, latencies = _array({"type": "integer"}), _array({"type": ["number", "null"]})
    series = {
        "requests": counts,
        "rejected": counts,
        "p50_ms": latencies,
        "p99_ms": latencies,
        "policy": _array({"type": ["integer", "null"]}),
        "exits": _array(counts),
    }
    described = {**series, "now": {"type": "object"}, "reloads": {"type": "integer"}}
    return {"type": "object", "description": "Series have a value per second.", "properties": described}
