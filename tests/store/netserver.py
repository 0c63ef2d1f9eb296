"""A store's server in a process of its own, which ends with its standard input at the latest."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ckptd.store.base import StoreSpec
from ckptd.store.net import StoreServer, new_secret

__all__ = ["ServerProcess", "server_process"]


@dataclass
class ServerProcess:
    """The process, and what opens its store."""

    process: subprocess.Popen[str]
    spec: StoreSpec

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)


@contextmanager
def server_process(
    store: StoreSpec, url: str = "ckptd://127.0.0.1:0", secret: str | None = None
) -> Iterator[ServerProcess]:
    """Serve `store` from a new process."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.store.netserver"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        setting = {"store": store.to_json().decode(), "url": url, "secret": secret or new_secret()}
        process.stdin.write(json.dumps(setting) + "\n")
        process.stdin.flush()
        try:
            yield ServerProcess(process, StoreSpec.from_json(process.stdout.readline()))
        finally:
            process.send_signal(signal.SIGCONT)  # a test may have stopped it
            process.stdin.close()
            try:
                process.wait(30)
            finally:
                process.kill()


def _main() -> None:
    setting = json.loads(sys.stdin.readline())
    with (
        StoreSpec.from_json(setting["store"]).open() as store,
        StoreServer(store, setting["url"], secret=setting["secret"]) as server,
    ):
        print(server.describe().to_json().decode(), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    _main()
