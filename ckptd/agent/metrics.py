"""The agent's own ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ckptd.errors import StoreError, UsageError
from ckptd.events.metrics import Metrics

__all__ = ["parse_address", "serve_metrics"]


def parse_address(text: str, where: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``; an IPv6 address stands in brackets.

    Raises
    ------
    UsageError
        kind ``bad-argument``: it is none.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(
            "not an address",
            kind="bad-argument",
            where=where,
            wanted="HOST:PORT, such as 127.0.0.1:9400",
            found=text,
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


@contextmanager
def serve_metrics(host: str, port: int) -> Iterator[str]:
    """Serve what this process counts from now on, while the block runs.

    Parameters
    ----------
    port
        0 takes any that is free.

    Yields
    ------
    str
        The URL.

    Raises
    ------
    UsageError
        kind ``missing-package``: the extra ``metrics`` is not installed.
    StoreError
        kind ``listen``: the address cannot be had.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ModuleNotFoundError as error:
        raise UsageError(
            "metrics need prometheus-client, which is not installed",
            kind="missing-package",
            hint="pip install 'ckptd[metrics]'",
        ) from error
    metrics = Metrics()
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        metrics.close()
        raise StoreError(
            "metrics cannot be served here",
            kind="listen",
            where=f"{host}:{port}",
            found=error.strerror or str(error),
        ) from error
    try:
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        metrics.close()
