"""Checkpoints of DeepSpeed in a root of ckptd: all of its files are there, or none.

    engine, *_ = deepspeed.initialize(...)
    engine.checkpoint_engine = files = CkptdEngine("s3://bucket/run")
    if files.place(folder):
        engine.load_checkpoint(folder)
    ...
    engine.save_checkpoint(folder)

The folder has names of files then and a file ``latest``, and no data. What ZeRO-Infinity keeps in
swap files on NVMe, DeepSpeed copies into the folder before it commits: it is taken from there.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from ckptd.checkpoint.save import BoxRoot
from ckptd.types import Box
from ckptd_dcp import CkptdWriter

TAG = "global_step"
SWAPPED = "offloaded_tensors"
"""DeepSpeed's folder of copies of swap files, with one for each rank in it."""


class CkptdEngine(CheckpointEngine):  # type: ignore[misc]
    """Puts every file that DeepSpeed saves into one checkpoint of ckptd, as bytes."""

    def __init__(self, url: str) -> None:
        self.url, self.files = url, dict[str, torch.Tensor]()

    def create(self, info: Any) -> None:
        """Begin a checkpoint."""
        self.files = {}

    def save(self, state_dict: Any, path: str) -> None:
        """Take a file of this rank."""
        body = io.BytesIO()
        torch.save(state_dict, body)
        name = "/".join(Path(path).parts[-2:])  # the tag, which has the step, and the file
        self.files[name] = torch.frombuffer(body.getbuffer(), dtype=torch.uint8)
        Path(path).touch()

    def commit(self, info: Any) -> bool:
        """Save the files of all ranks; the checkpoint exists on return."""
        step = int(info.tag.removeprefix(TAG))
        for path in swap_files(Path(info.save_dir, info.tag)):
            name = "/".join(path.parts[-4:])
            self.files[name] = torch.from_numpy(np.fromfile(path, np.uint8))
            path.write_bytes(b"")
        dcp.save(self.files, storage_writer=CkptdWriter(self.url, step, new_run=False))
        self.files = {}
        return True

    def place(self, folder: str, step: int | None = None) -> bool:
        """Make what DeepSpeed looks for before it loads: the names of a checkpoint's files.

        Swap files of this rank are written whole, since DeepSpeed copies them to NVMe by itself.
        Returns whether there is a checkpoint.
        """
        with BoxRoot(self.url) as root:
            step = root.latest() if step is None else step
            if step is None:
                return False
            with root.open(step) as checkpoint:
                for name in checkpoint.infos:
                    path = Path(folder, name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    if SWAPPED not in path.parts:
                        path.touch()
                    elif rank_of(path.parent.name) == own_rank():
                        whole = Box.whole(checkpoint.info(name).shape)
                        (body,) = checkpoint.read([(name, whole)])
                        path.write_bytes(body.tobytes())
        Path(folder, "latest").write_text(f"{TAG}{step}")
        return True

    def load(self, path: str, map_location: Any = None) -> Any:
        """Read a file of a checkpoint, compared with its digests, as DeepSpeed reads its own."""
        tag, name = Path(path).parts[-2:]
        with BoxRoot(self.url) as root, root.open(int(tag.removeprefix(TAG))) as checkpoint:
            whole = Box.whole(checkpoint.info(f"{tag}/{name}").shape)
            (body,) = checkpoint.read([(f"{tag}/{name}", whole)])
        return torch.load(io.BytesIO(body.tobytes()), map_location, weights_only=False)


def own_rank() -> int:
    """Return the global rank of this process."""
    return dist.get_rank() if dist.is_initialized() else 0


def rank_of(folder: str) -> int:
    """Return the rank in the name of a folder of swap files, as ``rank3`` or ``rank003``."""
    return int(folder.removeprefix("rank"))


def swap_files(folder: Path) -> list[Path]:
    """Return this rank's copies of swap files in the folder of a step; none without ZeRO-Infinity.

    Raises
    ------
    RuntimeError
        There are some, and none of this rank: with ``use_node_local_storage`` they are numbered
        within the node, and those of two nodes would have one name.
    """
    if not (folder / SWAPPED).is_dir():
        return []
    own = [p for p in (folder / SWAPPED).iterdir() if rank_of(p.name) == own_rank()]
    if not own:
        raise RuntimeError(
            f"no swap files of rank {own_rank()} in {folder / SWAPPED}: "
            "set use_node_local_storage to false in the checkpoint section of DeepSpeed's config"
        )
    return sorted(p for p in own[0].rglob("*") if p.is_file())
