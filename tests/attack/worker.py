"""A rollout of one: it takes versions for as long as it is let, and looks at each byte."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import ckptd
from ckptd.errors import CkptdError
from ckptd.store.base import StoreSpec
from tests.attack.rank import filled, wrong


def stored(folder: Path, name: str, number: int) -> None:
    """Put an object into the store of another machine, and read it back."""
    spec = StoreSpec.from_json((folder / "store.json").read_bytes())
    data, key = bytes(filled(number).numpy()), f"of-{name}/{number}"
    with spec.open() as store:
        store.put(key, data)
        if store.get(key) != data:
            wrong(folder, f"the store has other bytes than worker {name} put")
        store.delete([key])


def main() -> None:
    """Follow the publisher, and start again after whatever the network does."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    taken, last = 0, 0
    while not (folder / "finish").exists():
        weights = filled(0)
        try:
            place = folder / "place"
            with ckptd.Subscriber(f"{folder}/job.lay:rollout", {"w": weights}, place) as follower:
                while not (folder / "finish").exists():
                    update = follower.update(wait_s=2.0)
                    if update is None:
                        continue
                    last = update.version.step
                    if not torch.equal(weights, filled(last)):
                        wrong(folder, f"worker {name} took step {last} with other bytes")
                    stored(folder, name, taken)
                    taken += 1
                    (folder / f"taken-{name}").write_text(f"{taken} {last}")
        except CkptdError as error:
            with (folder / f"errors-{name}").open("a") as file:
                file.write(f"{type(error).__name__} {error.kind}: {error.message}\n")
            time.sleep(0.2)


if __name__ == "__main__":
    main()
