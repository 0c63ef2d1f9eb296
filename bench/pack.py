"""Cost and gain of packing data files: byte planes under zstd, for the tensors of a training.

    python bench/pack.py [--mib 128] [--reps 5]

Ratio, and GB/s of logical bytes a core (processor time, which other load on the machine does not
change much), of the frames that `PackSpec` makes: for bf16 weights, fp32 weights and Adam moments
as training leaves them, an embedding of which few rows were seen, and noise; against zstd without
planes (its own level 1, same frames, same threads). Packing and sending overlap: a save gets
quicker where the link is slower than the cores pack, a load where it is slower than they unpack.
"""

from __future__ import annotations

import math
import os
import random
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import common
import numpy as np
import zstandard
from numpy.typing import NDArray

from ckptd.store import PackSpec, Store, StoreSpec
from ckptd.store.pack import FRAME_BYTES, ZSTD, PackFrame, decode_frame, encode_frame

KEY = "a.safetensors"
PIECE = 8 * common.MIB
ALONE = "zstd 1, no planes"
Array = NDArray[Any]
Pack = Callable[[memoryview], PackFrame]
Unpack = Callable[[PackFrame, memoryview], None]


def trained(mib: int) -> dict[str, Array]:
    """Return tensors of a small model after real steps of AdamW on data with a few rare words."""
    import torch

    torch.manual_seed(0)
    words, width = 20_000, 512
    embed = torch.nn.Embedding(words, width)
    body = torch.nn.Sequential(
        torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
    )
    parameters = [*embed.parameters(), *body.parameters()]
    optim = torch.optim.AdamW(parameters, lr=1e-3)
    teacher = torch.randn(words, width)
    ranks = torch.arange(1, words + 1, dtype=torch.float32)
    for _ in range(12):
        ids = torch.multinomial(1 / ranks, 256, replacement=True)
        loss = (body(embed(ids)) - teacher[ids]).square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
    dense = body[0].weight
    moments = optim.state[dense]
    rare = optim.state[embed.weight]["exp_avg_sq"]
    found = {
        "bf16 weights": dense.detach().bfloat16().view(torch.int16),
        "fp32 master weights": dense.detach(),
        "fp32 Adam exp_avg": moments["exp_avg"],
        "fp32 Adam exp_avg_sq": moments["exp_avg_sq"],
        "embedding, exp_avg_sq": rare,
    }
    out = {name: _spread(t.numpy(), mib) for name, t in found.items()}
    out["noise"] = np.frombuffer(random.Random(0).randbytes(mib << 20), np.uint8)
    return out


def _spread(values: Array, mib: int) -> Array:
    """Return `mib` MiB of numbers like `values`: rows by chance, no two of them alike."""
    rng = np.random.default_rng(0)
    rows = values.reshape(-1, 512)
    count = math.ceil((mib << 20) / rows[0].nbytes)
    picked = rows[rng.integers(0, len(rows), count)]
    if rows.dtype == np.float32:
        # A repeated row is no news: the lowest bits of each are its own, zeros stay zeros.
        noise = rng.integers(0, 1 << 16, picked.shape, dtype=np.uint32)
        picked = np.where(picked == 0, 0, picked.view(np.uint32) ^ noise).astype(np.uint32)
    else:
        noise = rng.integers(0, 1 << 5, picked.shape, dtype=np.int16)
        picked = picked ^ noise
    return np.ascontiguousarray(picked)


def core_seconds(act: Callable[[], Any]) -> float:
    """Return the processor time of `act`, over all threads: other load does not count."""
    start = time.process_time()
    act()
    return time.process_time() - start


def write(store: Store, data: memoryview) -> None:
    with store.writer(KEY, len(data)) as writer:
        for at in range(0, len(data), PIECE):
            writer.write(data[at : at + PIECE])
        writer.commit()


def read(store: Store, out: memoryview) -> None:
    for at in range(0, len(out), PIECE):
        store.read_into(KEY, at, out[at : at + PIECE])


def through_store(data: memoryview, level: int) -> float:
    """Return the ratio, of a store that gives back what it got."""
    spec = StoreSpec(f"memory://{uuid.uuid4().hex}").wrapped(PackSpec(level))
    out = memoryview(bytearray(len(data)))
    with spec.open() as store, StoreSpec(spec.url).open() as bare:
        write(store, data)
        [stored] = [o.size for o in bare.list()]
        read(store, out)
        assert out == data
        bare.delete([o.key for o in bare.list()])
    return len(data) / stored


def frames(pack: Pack, unpack: Unpack, data: memoryview, threads: int) -> dict[str, float]:
    """Pack and unpack frame by frame in threads, into memory that is there already."""
    cut = [data[at : at + FRAME_BYTES] for at in range(0, len(data), FRAME_BYTES)]
    out = memoryview(bytearray(len(data)))
    places = [out[at : at + FRAME_BYTES] for at in range(0, len(data), FRAME_BYTES)]
    with ThreadPoolExecutor(threads) as pool:
        packed: list[PackFrame] = []
        pack_s = core_seconds(lambda: packed.extend(pool.map(pack, cut)))
        unpack_s = core_seconds(lambda: list(pool.map(unpack, packed, places)))
    assert out == data
    ratio = len(data) / sum(len(f.data) for f in packed)
    return {"ratio": ratio, "pack_s": pack_s, "unpack_s": unpack_s}


def zstd_alone(frame: memoryview) -> PackFrame:
    return PackFrame(zstandard.ZstdCompressor(level=1).compress(frame), ZSTD, 1, 0)


def unpack_alone(frame: PackFrame, out: memoryview) -> None:
    out[:] = zstandard.ZstdDecompressor().decompress(frame.data)


def unpack_planes(frame: PackFrame, out: memoryview) -> None:
    decode_frame(frame, out, "here")


def main() -> None:
    options = common.arguments(__doc__, mib=128)
    threads = len(os.sched_getaffinity(0))
    tensors = trained(options.mib)
    ways: dict[str, tuple[Pack, Unpack]] = {
        ALONE: (zstd_alone, unpack_alone),
        "packed 1": (lambda frame: encode_frame(frame, 1), unpack_planes),
        "packed 3": (lambda frame: encode_frame(frame, 3), unpack_planes),
    }
    views = {name: memoryview(array).cast("B") for name, array in tensors.items()}
    stored = {name: through_store(view, 1) for name, view in views.items()}
    found: dict[str, list[dict[str, float]]] = {}
    order = random.Random(0)
    cases = [(name, way) for name in tensors for way in ways]
    for rep in range(options.reps + 1):
        order.shuffle(cases)
        for name, way in cases:
            sample = frames(*ways[way], views[name], threads) | {"bytes": len(views[name])}
            if rep:  # the first is for caches and memory
                found.setdefault(f"{name}: {way}", []).append(sample)
        print(f"rep {rep}", file=sys.stderr)
    rows = [row(found, name, way) for name in tensors for way in ways]
    headers = ["tensors", "stored as", "plain / stored", "zstd's / stored"]
    headers += ["pack GB/s a core", "unpack GB/s a core"]
    text = f"{threads} cores, {options.mib} MiB a tensor.\n\n" + common.table(headers, rows)
    common.publish("pack", "python bench/pack.py", text, {"stored": stored, "frames": found})
    common.remove(options.dir)


def row(found: dict[str, list[dict[str, float]]], name: str, way: str) -> list[Any]:
    samples = found[f"{name}: {way}"]
    size = samples[0]["bytes"] / 1e9
    ratio = common.median(samples, "ratio")
    pack, unpack = (size / common.median(samples, k) for k in ("pack_s", "unpack_s"))
    alone = common.median(found[f"{name}: {ALONE}"], "ratio")
    return [name, way, ratio, ratio / alone, pack, unpack]


if __name__ == "__main__":
    main()
