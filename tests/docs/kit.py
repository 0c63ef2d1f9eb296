"""Run the code blocks of one page: python kit.py BLOCKS.json, in a folder of its own.

Blocks leave out what their readers have: a model, its loader, a loop's length. That is here, small.
Each block gets all of it afresh. ``s3://bucket`` and ``/shared`` are folders below this one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ckptd
import ckptd.elastic

LENGTH = 3


class Model(nn.Module):
    """What blocks train."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.weight = nn.Parameter(torch.ones(16, 4))

    def forward(self, x: torch.Tensor | list[torch.Tensor], *_: object) -> torch.Tensor:
        x = x[0] if isinstance(x, list) else x
        return self.embed(x.long().reshape(-1) % 16) @ self.weight.T


class Enough(Exception):
    """Ends a loop that has no end."""


def batch(*_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(4), torch.arange(4)


def names(folder: Path) -> dict[str, Any]:
    """What a block of a guide takes for granted."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loader = DataLoader(TensorDataset(torch.arange(64)), batch_size=4)

    def train(*_: object) -> None:
        model(batch()[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    data = ckptd.Batches(loader)
    state: dict[str, Any] = {"model": model, "optim": optimizer, "data": data}
    return {
        "Dataset": Dataset,
        "DataLoader": DataLoader,
        "batch_tokens": 4,
        "batches": iter(loader),
        "ckptd": ckptd,
        "count": len,
        "data": data,
        "dataclasses": dataclasses,
        "epochs": 1,
        "evaluate": lambda *_: 0.5,
        "flip": lambda x, _: x,
        "get_batch": batch,
        "graph": SimpleNamespace(replay=train),
        "last": LENGTH,
        "loader": loader,
        "loss": torch.tensor(0.5),
        "loss_sum": lambda x: x.square().sum(),
        "model": model,
        "optimizer": optimizer,
        "rank": -9400,  # so that ports counted from 9400 are any
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "seed": 1,
        "seen": 2,
        "signal": signal,
        "start": 0,
        "state": state,
        "static_input": SimpleNamespace(copy_=lambda _: None),
        "step": 0,
        "steps": LENGTH,
        "torch": torch,
        "total": LENGTH,
        "train": train,
        "train_one_step": train,
        "url": f"{folder}/url",
        "value": [1],
    }


def prepare(code: str, given: dict[str, Any]) -> None:
    """Make what a block expects to be there: a checkpoint that it opens, weights, a group."""
    opening = r"(?:zarr_store|annotates|Checkpointer(?=.* as evaluation:))"
    for url, step in re.findall(opening + r'\("([^"]+)"(?:, step=(\d+))?', code):
        with ckptd.Checkpointer(url) as ck:
            ck.save(int(step or 1), {"model": given["model"]}).durable()
            ck.tag(int(step or 1), "prod")
    if "./Llama" in code:
        from safetensors.torch import save_file

        Path("Llama").mkdir()
        save_file(dict(given["model"].state_dict()), "Llama/model.safetensors")
    if "ck." in code and "Checkpointer(" not in code:
        given["ck"] = ckptd.Checkpointer("made", every=1)
        if "annotate" in code:
            given["ck"].save(120, given["state"]).durable()
    if "release.pem" in code:
        from tests.keys import key_pair

        key_pair(Path(), "release")
    if "Schedule(" in code:
        given["data"] = TensorDataset(torch.arange(256))
    if "while True" in code:
        numbers = iter(range(LENGTH))

        def some(*_: object) -> object:
            given["iter_num"] = next(numbers, None)
            if given["iter_num"] is None:
                raise Enough
            return batch()

        given["get_batch"] = some
    if "init_process_group" not in code:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        given["ddp_model"] = nn.parallel.DistributedDataParallel(given["model"])


def run(code: str, page: str, line: int) -> None:
    """Run one block in a folder of its own."""
    folder = Path.cwd() / f"line{line}"
    folder.mkdir()
    with contextlib.chdir(folder):
        text = code.replace('"/shared', f'"{folder}').replace("/nvme", f"{folder}/nvme")
        if not re.search(r"endpoint_url|StoreSpec", code):  # a store is only opened, not asked
            text = text.replace("s3://bucket", f"{folder}/bucket")
        text = re.sub(r"\b10_000\b", str(LENGTH), text).replace("time.sleep(0.05)", "")
        given = {"__name__": "__main__", **names(folder)}
        try:
            prepare(text, given)
            # Line numbers of a traceback are those of the page.
            with contextlib.suppress(Enough):
                exec(compile("\n" * line + text, page, "exec"), given)
            for checkpointer in [v for v in given.values() if isinstance(v, ckptd.Checkpointer)]:
                checkpointer.close()
        finally:
            # Before its group: a reducer of DDP that is the last to hold one of gloo waits for
            # threads with the GIL, which they may want, and the process hangs.
            given.clear()
            if dist.is_initialized():
                dist.destroy_process_group()


def main() -> None:
    """Run all blocks of a page; what fails is told, and the rest runs."""
    given = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    failed = 0
    for line, code in given["blocks"]:
        try:
            run(code, given["page"], line)
        except BaseException:  # noqa: BLE001 - whatever a page does
            failed += 1
            traceback.print_exc()
    sys.exit(failed)


if __name__ == "__main__":
    main()
