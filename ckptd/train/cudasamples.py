"""Values that are looked at on a CUDA device, in order with the copies, and read after them.

Digests of what ranks hold in common must be of the step that is saved, and the host must not wait
for them; and a replayed CUDA graph changes tensors without torch counting it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch

from ckptd.train.cudacopy import CudaLane, device_bytes
from ckptd.train.replicas import Samples, digest_of_sample, sampled_ranges

__all__ = ["DeviceSamples", "Unchanged"]

MOST_WATCHED = 64
WATCHED_BYTES = 256


class DeviceSamples:
    """The bytes that `replicas.sample_digest` digests, of tensors on one device."""

    def __init__(self) -> None:
        self._of: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._taken: list[torch.Tensor] = []
        self._host: torch.Tensor | None = None

    def take(self, tensors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Take the samples of ``(tensor, its local part)`` on the current stream."""
        parts = []
        for tensor, local in tensors:
            parts.append(_sample(device_bytes(local)))
            self._of.append(tensor)
            self._sizes.append(parts[-1].numel())
        if parts:
            self._taken.append(torch.cat(parts))

    def fetch(self, lane: CudaLane) -> None:
        """Bring to the host what was taken, on the current stream."""
        if self._taken:
            self._host = lane.fetch(torch.cat(self._taken))

    def give(self, samples: Samples) -> None:
        """Digest what was fetched, once that is done."""
        if self._host is None:
            return
        raw = self._host.numpy()
        at = 0
        for tensor, size in zip(self._of, self._sizes, strict=True):
            samples.put(tensor, digest_of_sample(raw[at : at + size]))
            at += size


def _sample(raw: torch.Tensor) -> torch.Tensor:
    where = _indexes(raw.numel(), raw.device)
    return raw if where is None else raw[where]


@cache
def _indexes(nbytes: int, device: torch.device) -> torch.Tensor | None:
    ranges = sampled_ranges(nbytes)
    if ranges is None:
        return None
    starts, width = ranges
    at = torch.tensor(starts)[:, None] + torch.arange(width)
    return at.flatten().to(device)


class Unchanged:
    """Watches the first bytes of some tensors: a step that torch does not count changes nearly all.

    Parameters
    ----------
    tensors
        Local tensors on one device, by name, that may not change until they are copied. They are
        looked at on the current stream.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        whole = {n: t for n, t in tensors.items() if t.is_contiguous() and t.numel()}
        every = -(-len(whole) // MOST_WATCHED) or 1
        self._watched = dict(list(whole.items())[::every])
        self._before = self._look()
        self._same: torch.Tensor | None = None

    def _look(self) -> torch.Tensor | None:
        parts = [device_bytes(t)[:WATCHED_BYTES] for t in self._watched.values()]
        return torch.cat(parts) if parts else None

    def look_again(self, lane: CudaLane) -> None:
        """Compare, on the current stream: behind the copies, before anything may change."""
        now = self._look()
        if now is not None and self._before is not None:
            self._same = lane.fetch(now == self._before)

    def changed(self) -> list[str]:
        """Return the names of what has changed, once that is fetched."""
        if self._same is None:
            return []
        found = []
        at = 0
        for name, tensor in self._watched.items():
            end = at + min(WATCHED_BYTES, tensor.numel() * tensor.element_size())
            if not bool(self._same[at:end].all()):
                found.append(name)
            at = end
        return found
