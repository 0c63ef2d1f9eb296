"""The store of the attacked job, on a machine of its own: ``FOLDER ADDRESS``."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from ckptd.store import open_store
from ckptd.store.net import Limits, StoreServer, new_secret


def main() -> None:
    """Serve a folder until killed."""
    folder = Path(sys.argv[1])
    limits = Limits(greeting_s=3.0, frame_s=3.0)
    with (
        open_store(folder / "objects") as inner,
        StoreServer(
            inner, f"ckptd://{sys.argv[2]}:0", secret=new_secret(), limits=limits
        ) as server,
    ):
        (folder / "store.new").write_bytes(server.describe().to_json())
        (folder / "store.new").rename(folder / "store.json")
        threading.Event().wait()


if __name__ == "__main__":
    main()
