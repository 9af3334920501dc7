"""The page of a service at `/`, and its two sources of data: `/explain` for one image, `/stats` for the load."""

import asyncio
import base64
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from exitwise.core.errors import InputError
from exitwise.core.image_files import decode_image
from exitwise.core.pages import fill_template, read_asset, read_shared_script, read_shared_style
from exitwise.serving.errors import ClientDisconnectedError, RequestError
from exitwise.serving.exchange import json_response, note, parse_top, read_body
from exitwise.serving.explain import describe_policies, explain_image
from exitwise.serving.images import split_upload
from exitwise.serving.queues import DeadlineError, Recorder
from exitwise.serving.scheduler import OverloadedError
from exitwise.serving.service import LoadedBundle, RequestOptions, Service, wait_for_disconnect

_MAX_WAITING = 8  # images that wait while another one is explained; more are refused
_SCRIPTS = ("page.js", "exits.js", "load.js")
NO_PREPROCESSING = "the bundle has no preprocessing for image files"


class PageEndpoints:
    """Handlers of the page.

    To explain an image costs as much as the most expensive policy, however high the load is. So that it cannot starve
    other requests, one image at a time is explained: its samples pass through the queues of all others.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._settings = service, service.settings
        self._turn = asyncio.Semaphore(1)
        self._waiting = 0

    def routes(self) -> list[Route]:
        """Return the routes of the page."""
        return [
            Route("/", self.page),
            Route("/explain", self.describe, methods=["GET"]),
            Route("/explain", self.explain, methods=["POST"]),
            Route("/stats", self.stats),
        ]

    async def page(self, request: Request) -> Response:
        note(request, endpoint="page")
        html, policy = render_page()
        headers = {
            "Content-Security-Policy": policy,
            "Cache-Control": "no-cache",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return Response(html, headers=headers, media_type="text/html")

    async def describe(self, request: Request) -> Response:
        """Answer what can be explained: exits, policies, and which images."""
        note(request, endpoint="explain")
        bundle, settings = self._service.bundle, self._settings
        session, preprocessing = bundle.session, bundle.session.preprocessing
        return json_response(
            {
                "model": settings.name,
                "reloads": self._service.reloads,
                "method": session.manifest.method,
                "num_classes": session.manifest.num_classes,
                "unit": bundle.unit,
                "costs": list(session.costs.values),
                "score": bundle.family[0].policy.score,
                "policies": describe_policies(bundle),
                "allowed": [bundle.load.lowest, bundle.load.highest],
                "image": None if preprocessing is None else {"size": preprocessing.size},
                "max_body": settings.max_body,
                "slo_ms": 1000 * settings.slo,
            }
        )

    async def explain(self, request: Request) -> Response:
        """Answer the predictions of all exits for one image file, and the exit of every policy."""
        note(request, endpoint="explain")
        service, arrived = self._service, time.monotonic()
        top = parse_top(request.query_params.get("top"))
        if self._waiting > _MAX_WAITING:
            raise OverloadedError(f"{_MAX_WAITING} other images wait to be explained", 1)
        body = await read_body(request, self._settings)
        kind = request.headers.get("content-type")
        (upload,) = await service.run_in_thread(lambda: split_upload(kind, body, 1), len(body))
        with service.use_bundle() as bundle:
            preprocessing = bundle.session.preprocessing
            if preprocessing is None:
                raise InputError(NO_PREPROCESSING)
            if self._waiting > _MAX_WAITING:  # again: others may have come while the body arrived
                raise OverloadedError(f"{_MAX_WAITING} other images wait to be explained", 1)
            options = service.parse_options(bundle, request.query_params, arrived)
            bundle.scheduler.check_capacity(1, options.timeout)
            self._waiting += 1
            try:
                async with asyncio.timeout(options.timeout), self._take_turn(request.receive):
                    image = await service.run_in_thread(
                        lambda: decode_image(upload.data, preprocessing, self._settings.max_pixels)
                    )
                    return await self._run(request, bundle, image, options, top)
            except TimeoutError:
                raise DeadlineError("the image could not be explained in time") from None
            finally:
                self._waiting -= 1

    @asynccontextmanager
    async def _take_turn(self, receive: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
        """Wait until no other image is explained; raise ClientDisconnectedError if the client goes away before."""
        turn, watcher = asyncio.ensure_future(self._turn.acquire()), asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({turn, watcher}, return_when=asyncio.FIRST_COMPLETED)
            watcher.cancel()
            if not turn.done():
                raise ClientDisconnectedError
            yield
        finally:
            watcher.cancel()
            if turn.done():
                self._turn.release()
            turn.cancel()

    async def _run(
        self, request: Request, bundle: LoadedBundle, image: Any, options: RequestOptions, top: int
    ) -> Response:
        service = self._service
        recorder = Recorder(bundle.family[0].policy)
        rows = await service.classify(bundle, image[None], options, request.receive, recorder)
        if rows.errors:
            raise RequestError(422, rows.errors[0])
        predictions = [recorder.predictions[exit] for exit in range(bundle.backend.num_exits)]
        return json_response({**explain_image(bundle, predictions, top), "policy": rows.policy, "unit": bundle.unit})

    async def stats(self, request: Request) -> Response:
        """Answer load, latency, policy and exits of the last minutes."""
        note(request, endpoint="stats", quiet=True)
        service = self._service
        service.update_metrics()
        bundle = service.bundle
        recent = service.metrics.recent.summarize(bundle.backend.num_exits)
        now = {**recent["now"], **bundle.describe_policy(bundle.load.index), "queued": bundle.scheduler.pending}
        return json_response({**recent, "now": now, "reloads": service.reloads})


@cache
def render_page() -> tuple[str, str]:
    """Return the page and its Content-Security-Policy, which allows only its own style and script."""
    parts = {
        "style": read_shared_style() + read_asset("exitwise.serving", "page.css"),
        "script": "\n".join([read_shared_script(), *(read_asset("exitwise.serving", name) for name in _SCRIPTS)]),
    }
    html = fill_template(read_asset("exitwise.serving", "page.html"), parts)
    policy = {
        "default-src": "'none'",
        "script-src": _hash(parts["script"]),
        "style-src": _hash(parts["style"]),
        "img-src": "blob: data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return html, "; ".join(f"{name} {value}" for name, value in policy.items())


def _hash(text: str) -> str:
    """Return the source expression that allows an inline element with exactly this text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
