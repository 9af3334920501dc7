"""The ASGI application: Open Inference Protocol V2, image files at /classify, metrics, and the OpenAPI document."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from exitwise.core.errors import InputError, shorten
from exitwise.core.version import __version__
from exitwise.serving import protocol
from exitwise.serving.api_page import CONTENT_SECURITY_POLICY, render_api
from exitwise.serving.bodies import LimitBodies
from exitwise.serving.errors import RequestError, require_serve
from exitwise.serving.exchange import find_header, parse_top, read_body
from exitwise.serving.exchange import json_response as _json
from exitwise.serving.exchange import note as _note
from exitwise.serving.explain import rank_classes
from exitwise.serving.images import Upload, decode_uploads, split_upload
from exitwise.serving.middleware import AccessLog, CheckOrigin, RequireApiKey
from exitwise.serving.openapi import describe_api
from exitwise.serving.page import PageEndpoints
from exitwise.serving.queues import DeadlineError, ServedRows
from exitwise.serving.scheduler import ClosedError, OverloadedError
from exitwise.serving.security import ApiKeys
from exitwise.serving.service import LoadedBundle, Service, output_tensors
from exitwise.serving.settings import Settings

_HEADER_LENGTH = protocol.HEADER_LENGTH.lower().encode()


def app(
    bundle: str | Path,
    settings: Settings | None = None,
    *,
    api_keys: ApiKeys | None = None,
    metrics: bool = True,
    page: bool = True,
) -> Starlette:
    """Return an ASGI application that serves a bundle; it runs the bundle between lifespan startup and shutdown.

    Args:
        bundle: Folder that `Classifier.export` or `exitwise export` wrote.
        settings: Limits and objectives; see `Settings`.
        api_keys: Keys that clients must have.
        metrics: Whether /metrics is part of it.
        page: Whether the page at / is part of it, with /explain and /stats, which it needs.

    Returns:
        The application, with the service as `app.state.service`.

    Raises:
        InputError: If the bundle is not usable, the settings do not fit it, or the extra `serve` is not installed.

    Example:
        >>> import exitwise as ew
        >>> ew.serving.app("nowhere")
        Traceback (most recent call last):
        exitwise.core.errors.InputError: nowhere is not a bundle: it has no manifest.json
    """
    require_serve()
    service = Service(bundle, settings or Settings())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    endpoints = _Endpoints(service, page, metrics)
    application = Starlette(
        routes=[*endpoints.routes(), *(PageEndpoints(service).routes() if page else ())],
        middleware=[*_middleware(service, api_keys), Middleware(InferShortcut, endpoints=endpoints)],
        exception_handlers=_exception_handlers(endpoints),
        lifespan=lifespan,
    )
    application.state.service = service
    return application


def page_app(service: Service, api_keys: ApiKeys | None = None) -> Starlette:
    """Return an application that serves only the page of a service and what it needs, for a port of their own."""
    handlers = _exception_handlers(_Endpoints(service))
    return Starlette(
        routes=PageEndpoints(service).routes(), middleware=_middleware(service, api_keys), exception_handlers=handlers
    )


def metrics_app(service: Service) -> Starlette:
    """Return an application that serves only the metrics of a service, for a port of their own."""
    endpoints = _Endpoints(service)
    routes, handlers = [Route("/metrics", endpoints.metrics)], {HTTPException: _refuse_http}
    return Starlette(routes=routes, middleware=[_origin_check(service)], exception_handlers=handlers)


def _middleware(service: Service, api_keys: ApiKeys | None) -> list[Middleware]:
    """Return what surrounds all endpoints but metrics on a port of their own: log, limits, and who may come in."""
    cors, metrics = service.settings.cors, service.metrics
    middleware = [
        Middleware(AccessLog, metrics=metrics),
        Middleware(LimitBodies, memory=service.body_memory),
        _origin_check(service),
    ]
    if cors:
        allowed = ["Authorization", "Content-Type", "X-API-Key", protocol.HEADER_LENGTH]
        options: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": allowed}
        middleware.append(Middleware(CORSMiddleware, allow_origins=list(cors), **options))
    if api_keys is not None:
        middleware.append(Middleware(RequireApiKey, keys=api_keys, metrics=metrics))
    return middleware


def _origin_check(service: Service) -> Middleware:
    return Middleware(CheckOrigin, hosts=service.settings.hosts, cors=service.settings.cors, metrics=service.metrics)


def _exception_handlers(endpoints: "_Endpoints") -> dict[Any, Any]:
    return {
        InputError: endpoints.refuse,
        HTTPException: endpoints.refuse,
        Exception: _fail,
    }


async def _fail(_: Request, __: Exception) -> Response:
    return _json({"error": "internal error"}, 500)


async def _refuse_http(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"error": error.detail}, error.status_code, error.headers)


class InferShortcut:
    """Pass requests to infer directly to their endpoint: the search for it takes as long as to parse a request.

    Args:
        app: The application, with the routes of all requests.
        endpoints: Handlers of the application.
    """

    def __init__(self, app: ASGIApp, endpoints: "_Endpoints") -> None:
        self._app, self._endpoints = app, endpoints
        self._path = f"/v2/models/{endpoints.model}/infer"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != self._path or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await self._endpoints.answer_infer(request)
        except InputError as error:
            response = await self._endpoints.refuse(request, error)
        await response(scope, receive, send)


class _Endpoints:
    """Handlers of the application."""

    def __init__(self, service: Service, page: bool = False, metrics: bool = False) -> None:
        self._service, self._settings, self._metrics = service, service.settings, metrics
        self.model = service.settings.name
        self._api = describe_api(self._settings.name, self._settings.max_images, page, metrics)

    def routes(self) -> list[Route]:
        model, version = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
        routes = [
            Route(f"{model}/infer", self.infer, methods=["POST"]),  # first: the search goes through them in order
            Route("/v2", self.describe_server),
            Route("/v2/health/live", self.live),
            Route("/v2/health/ready", self.ready),
            Route("/classify", self.classify, methods=["POST"]),
            Route("/openapi.json", self.openapi),
            Route("/docs", self.api_page),
        ]
        for path in (model, version):
            routes += [Route(path, self.describe_model), Route(f"{path}/ready", self.model_ready)]
        routes.append(Route(f"{version}/infer", self.infer, methods=["POST"]))
        return [*routes, Route("/metrics", self.metrics)] if self._metrics else routes

    async def live(self, request: Request) -> Response:
        _note(request, endpoint="health")
        is_alive = self._service.is_alive
        return _json({"live": is_alive}, 200 if is_alive else 503)

    async def ready(self, request: Request) -> Response:
        _note(request, endpoint="health")
        is_ready = self._service.is_ready
        return _json({"ready": is_ready}, 200 if is_ready else 503)

    async def describe_server(self, request: Request) -> Response:
        _note(request, endpoint="metadata")
        return _json({"name": "exitwise", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def model_ready(self, request: Request) -> Response:
        self._check_model(request)
        _note(request, endpoint="health")
        is_ready = self._service.is_ready
        return _json({"name": self._settings.name, "ready": is_ready}, 200 if is_ready else 503)

    async def describe_model(self, request: Request) -> Response:
        self._check_model(request)
        _note(request, endpoint="metadata")
        bundle = self._service.bundle
        manifest = bundle.session.manifest
        data = protocol.describe_model(self._settings.name, manifest.inputs, manifest.num_classes)
        data["parameters"] = {
            "unit": bundle.unit,
            "method": manifest.method,
            "policies": [bundle.describe_policy(index) for index in range(len(bundle.family))],
            "costs": list(bundle.session.costs.values),
            "classes": None if manifest.classes is None else list(manifest.classes),
        }
        return _json(data)

    async def openapi(self, request: Request) -> Response:
        _note(request, endpoint="metadata")
        return _json(self._api)

    async def api_page(self, request: Request) -> Response:
        _note(request, endpoint="metadata")
        page = render_api(self._api)
        headers = {"Content-Security-Policy": CONTENT_SECURITY_POLICY, "X-Content-Type-Options": "nosniff"}
        return Response(page, headers=headers, media_type="text/html")

    async def metrics(self, request: Request) -> Response:
        _note(request, endpoint="metrics")
        self._service.update_metrics()
        return Response(self._service.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _check_model(self, request: Request) -> None:
        name, version = request.path_params["name"], request.path_params.get("version", "1")
        if name != self._settings.name or version != "1":
            raise RequestError(404, f"the model is {self._settings.name}, version 1, not {shorten(name)}")

    async def infer(self, request: Request) -> Response:
        """Answer a request of the Open Inference Protocol V2."""
        self._check_model(request)
        return await self.answer_infer(request)

    async def answer_infer(self, request: Request) -> Response:
        """Answer a request to infer that names the model."""
        _note(request, endpoint="infer")
        service, arrived = self._service, time.monotonic()
        body = await read_body(request, self._settings)
        service.bundle.scheduler.check_capacity()  # before the work of parsing
        header_length = find_header(request.scope, _HEADER_LENGTH)
        parsed = await service.run_in_thread(
            lambda: protocol.parse_infer(body, header_length, self._settings.max_images), len(body)
        )
        with service.use_bundle() as bundle:
            options = service.parse_options(bundle, parsed.parameters, arrived)
            images = protocol.check_inputs(parsed.inputs, bundle.session.manifest.inputs)
            rows = await service.classify(bundle, images, options, request.receive)
            self._note_rows(request, bundle, rows)
            if rows.errors:
                row, message = min(rows.errors.items())
                raise RequestError(422, f"image {row}: {message}")
            tensors = output_tensors(rows, bundle.session.costs.values)
            described = bundle.describe_policy(rows.policy)
        answer = await service.run_in_thread(
            lambda: protocol.build_response(parsed, self._settings.name, tensors, described), rows.probs.nbytes
        )
        if answer.header_length is None:
            return Response(answer.body, media_type="application/json")
        headers = {protocol.HEADER_LENGTH: str(answer.header_length)}
        return Response(answer.body, headers=headers, media_type="application/octet-stream")

    async def classify(self, request: Request) -> Response:
        """Answer image files: one as the raw body, or several as multipart/form-data."""
        _note(request, endpoint="classify")
        service, arrived = self._service, time.monotonic()
        top = parse_top(request.query_params.get("top"))
        body = await read_body(request, self._settings)
        kind, limit = request.headers.get("content-type"), self._settings.max_images
        uploads = await service.run_in_thread(lambda: split_upload(kind, body, limit), len(body))
        with service.use_bundle() as bundle:
            options = service.parse_options(bundle, request.query_params, arrived)
            preprocessing = bundle.session.preprocessing
            if preprocessing is None:
                raise InputError("the bundle has no preprocessing for image files: POST tensors to infer")
            bundle.scheduler.check_capacity(len(uploads), options.timeout)  # before the work of decoding
            decoded = await service.run_in_thread(
                lambda: decode_uploads(uploads, preprocessing, self._settings.max_pixels, options.deadline)
            )
            images = [image for image in decoded if not isinstance(image, InputError)]
            if not images:
                raise InputError(str(decoded[0]))
            rows = await service.classify(bundle, np.stack(images), options, request.receive)
            self._note_rows(request, bundle, rows)
            results = _list_results(bundle, uploads, decoded, rows, top)
            return _json({"results": results, **bundle.describe_policy(rows.policy)})

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Answer an error that the client or the load caused."""
        if isinstance(error, HTTPException):
            if error.status_code == 405:
                self._service.metrics.reject("invalid")
            return await _refuse_http(request, error)
        status, reason, headers = 400, "invalid", {}
        if isinstance(error, OverloadedError):
            status, reason, headers = 503, "overload", {"Retry-After": str(error.retry_after)}
        elif isinstance(error, ClosedError):
            status, reason, headers = 503, "shutdown", {"Retry-After": "1"}
        elif isinstance(error, DeadlineError):
            status, reason = 504, "deadline"
        elif isinstance(error, RequestError):
            status, reason = error.status, "too_large" if error.status == 413 else "invalid"
        self._service.metrics.reject(reason)
        if status in (408, 413):
            headers = {"Connection": "close"}  # the rest of the body is not read
        return _json({"error": str(error)}, status, headers)

    def _note_rows(self, request: Request, bundle: LoadedBundle, rows: ServedRows) -> None:
        _note(request, images=len(rows.exits), policy=rows.policy, budget=bundle.family[rows.policy].budget)


def _list_results(
    bundle: LoadedBundle, uploads: list[Upload], decoded: list[Any], rows: ServedRows, top: int
) -> list[dict[str, Any]]:
    """Return for each file its class, label, probability, exit, cost and most probable classes, or its error."""
    classes, costs = bundle.session.classes, bundle.session.costs.values
    row, results = 0, []
    for upload, image in zip(uploads, decoded, strict=True):
        entry: dict[str, Any] = {} if upload.name is None else {"file": upload.name}
        error = str(image) if isinstance(image, InputError) else rows.errors.get(row)
        if error is not None:
            results.append({**entry, "error": error})
        else:
            exit, ranked = int(rows.exits[row]), rank_classes(rows.probs[row], classes, top)
            results.append({**entry, **ranked[0], "exit": exit, "cost": costs[exit], "top": ranked})
        row += not isinstance(image, InputError)
    return results
