"""The command that serves a bundle over HTTP."""

from pathlib import Path
from typing import Annotated

import typer

from exitwise.core.errors import InputError
from exitwise.serving.settings import Settings, Strategy, parse_duration, parse_size

_DEFAULTS = Settings()


def serve(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Folder of the bundle.", show_default=False)],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 for a free one.", min=0, max=65535)] = 8000,
    slo: Annotated[
        str, typer.Option(help="Latency objective: under load, cheaper policies of the bundle keep to it.")
    ] = "50ms",
    threads: Annotated[int, typer.Option(help="Number of compute threads.", min=1)] = _DEFAULTS.threads,
    floor: Annotated[
        float | None,
        typer.Option(help="Least accuracy on validation samples that may be traded for speed, such as 0.65."),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Largest budget, also when there is little load.", show_default="that of the bundle"),
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the model in URLs.")] = _DEFAULTS.name,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with a key per line; clients must send one of them.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain for TLS, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate, PEM.")] = None,
    cors: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may call the service, or *; may be repeated.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name by which clients call the service, for example that of a proxy, or * for any; may be repeated.",
            show_default="any name, or on loopback only its own",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Port of /metrics.", show_default="that of the service", min=0, max=65535)
    ] = None,
    page: Annotated[bool, typer.Option(help="Serve the page at /, and /explain and /stats, which it needs.")] = True,
    page_port: Annotated[
        int | None,
        typer.Option(help="Port of the page and what it needs.", show_default="that of the service", min=0, max=65535),
    ] = None,
    strategy: Annotated[Strategy, typer.Option(help="Stage that a free thread runs next.")] = _DEFAULTS.strategy,
    max_batch: Annotated[int, typer.Option(help="Samples per batch.", min=1)] = _DEFAULTS.max_batch,
    max_queue: Annotated[int, typer.Option(help="Images that may wait.", min=1)] = _DEFAULTS.max_queue,
    max_images: Annotated[int, typer.Option(help="Images per request.", min=1)] = _DEFAULTS.max_images,
    max_body: Annotated[str, typer.Option(help="Size of a request.")] = "32MB",
    max_pixels: Annotated[int, typer.Option(help="Pixels of an image file.", min=1)] = _DEFAULTS.max_pixels,
    max_connections: Annotated[int, typer.Option(help="Open connections.", min=1)] = 1000,
    timeout: Annotated[str, typer.Option(help="Time after which a request is given up.")] = "30s",
    body_timeout: Annotated[str, typer.Option(help="Time within which a body must arrive.")] = "10s",
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Serve with Ray Serve: HOST:PORT of a cluster's head, or local for one on this machine.",
        ),
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="With --ray, processes that serve.", show_default="1", min=1)
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(help="With --ray, add replicas under load, up to this many.", min=1)
    ] = None,
) -> None:
    """Serve an ONNX bundle over HTTP; under load it computes less for each image instead of failing.

    It speaks the Open Inference Protocol V2, takes image files at /classify, and has a page at /. SIGTERM answers what
    was accepted and ends with status 0; SIGHUP reloads the bundle. Needs `exitwise[serve]`, but no torch at run time.
    """
    from exitwise.serving.errors import require_serve

    require_serve()
    from exitwise.serving.security import ApiKeys, is_loopback
    from exitwise.serving.server import Address, log_to_stderr, run

    settings = Settings(
        name=name,
        slo=parse_duration("slo", slo),
        threads=threads,
        floor=floor,
        budget=None if budget is None else _parse_budget(budget, bundle),
        strategy=strategy,
        max_batch=max_batch,
        max_queue=max_queue,
        max_images=max_images,
        max_body=parse_size("max_body", max_body),
        max_pixels=max_pixels,
        timeout=parse_duration("timeout", timeout),
        body_timeout=parse_duration("body_timeout", body_timeout),
        cors=tuple(cors or ()),
        hosts=(*([host] if is_loopback(host) else []), *(name.lower() for name in allowed_host or ())),
    )
    address = Address(host, port, metrics_port, page, page_port, tls_cert, tls_key, max_connections)
    keys = None if api_key_file is None else ApiKeys.read(api_key_file)
    if ray is not None:
        for option, value in (("--metrics-port", metrics_port), ("--page-port", page_port)):
            if value is not None:
                raise InputError(f"{option} and --ray exclude each other")
        from exitwise.serving import ray as on_ray

        on_ray.run(bundle, settings, address, keys, ray, on_ray.Scale(replicas or 1, max_replicas))
        return
    if replicas is not None or max_replicas is not None:
        raise InputError("--replicas and --max-replicas need --ray")
    log_to_stderr()
    run(bundle, settings, address, keys)


def _parse_budget(text: str, bundle: Path) -> float:
    """Return a budget in the unit of the bundle, from text such as 2e7 or 50%."""
    from exitwise.runtime.bundle import Manifest

    costs = Manifest.load(bundle).costs
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        raise InputError(f"`budget` must be like 2e7 or 50%, but got {text!r}") from None
    value = value / 100 * costs.values[-1] if text.endswith("%") else value
    costs.check_budget(value)
    return value
