"""The agent's own ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from ckptd.base.net.address import parse_address
from ckptd.events.metrics import Metrics


@contextmanager
def serve_metrics(address: str, where: str) -> Iterator[str]:
    """Serve what this process counts from now on, while the block runs.

    Parameters
    ----------
    address
        ``HOST:PORT``; port 0 takes any that is free.
    where
        Which option or variable gave it, for the error.

    Yields
    ------
    str
        The URL.

    Raises
    ------
    UsageError
        It is no address. Kind ``missing-package``: the extra ``metrics`` is not installed.
    StoreError
        kind ``listen``: the address cannot be had.
    """
    host, port = parse_address(address, "an address", where=where, any_port=True)
    with closing(Metrics()) as metrics:
        registry = metrics.registry()
        from prometheus_client import make_wsgi_app

        from ckptd.base.net.wsgi import serve_wsgi

        with serve_wsgi(host, port, make_wsgi_app(registry), "the agent's metrics") as at:
            yield f"http://{at}/metrics"
