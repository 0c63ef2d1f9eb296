"""Rebuild a tensor without ckptd: python recover.py ROOT/commits/X.json NAME [OUT.npy]."""

from __future__ import annotations

import json
import re
import sys
from itertools import accumulate, chain, pairwise, product, repeat, starmap
from pathlib import Path

import numpy as np
from safetensors import safe_open


def slices(runs):  # [[size, count], ...] as consecutive slices
    return list(starmap(slice, pairwise(accumulate(chain(*starmap(repeat, runs)), initial=0))))


def chunk(path, name):  # its bytes; types that numpy lacks are read past the library
    with safe_open(path, "np") as file:
        if file.get_slice(name).get_dtype()[:2] not in ("BF", "F8"):
            return file.get_tensor(name).reshape(-1).view(np.uint8)
    head = 8 + int(np.fromfile(path, "<u8", 1)[0])
    start, end = json.loads(np.fromfile(path, "u1", head)[8:].tobytes())[name]["data_offsets"]
    return np.fromfile(path, "u1", end - start, offset=head + start)


def recover(commit, name):  # bytes, in one more dimension, where numpy lacks the type
    root, commit = Path(commit).parents[1], json.loads(Path(commit).read_bytes())
    raw = (root / commit["folder"] / commit["manifest"]).read_bytes()
    if commit["manifest"].endswith(".zst"):
        raw = __import__("zstandard").ZstdDecompressor().decompress(raw)
    m = json.loads(raw)
    t = next(t for t in m["tensors"] if name in (t["name"], *t.get("aliases", ())))
    per_rank = any(o.get("per_rank") and o["tensor"] == t["name"] for o in m.get("objects", ()))
    grid, base = m["grids"][t["grid"]], t["name"].replace("%", "%25").replace("@", "%40")
    size = sum(f.stat().st_size for f in {root / f["path"] for f in m["files"]} if f.exists())
    tables = (m["owners"][t["owners"]], *grid["axes"], *grid.get("flat", ()))
    if max(sum(n for *_, n in runs) for runs in tables) > 2**20 + size // 48:
        sys.exit("it claims more than its files can hold")
    owners = iter([f + s * i for f, s, n in m["owners"][t["owners"]] for i in range(n)])
    itemsize = max(1, int((re.findall(r"\d+", d := t["dtype"]) or ["8"])[0]) // 8)
    out = np.zeros((*t["shape"], itemsize), np.uint8)
    flats = [[(f":{part.start}", part) for part in slices(f)] for f in grid.get("flat", ())]
    for i, cell in enumerate(product(*map(slices, grid["axes"]))):
        box = out[cell].reshape(-1, itemsize).copy()
        for suffix, part in flats[i % len(flats)] if flats else [("", slice(None))]:
            if (owner := next(owners)) >= 0:  # -1: absent on purpose
                file = m["files"][owner + t.get("base", 0)]
                label = f"{base}@{','.join(str(s.start) for s in cell)}{suffix}"
                label = base if out[cell].shape == out.shape and not suffix else label
                label = f"{base}@r{file['rank']}" if per_rank else label
                box[part] = chunk(root / file["path"], label).reshape(-1, itemsize)
        out[cell] = box.reshape(out[cell].shape)
    return out.view(d)[..., 0] if hasattr(np, d) or d == "bool" else out


if __name__ == "__main__":
    print(tensor := recover(*sys.argv[1:3]), tensor.dtype, tensor.shape, sep="\n")
    np.save(sys.argv[3], tensor) if sys.argv[3:] else None
