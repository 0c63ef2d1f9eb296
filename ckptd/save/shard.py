"""One rank's share of a snapshot, digested where it was staged: what memory and peers keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from ckptd import events
from ckptd.format.digest import digest_hex
from ckptd.format.names import digests_key, file_key, part_key
from ckptd.save.arena import Slot, half_staged
from ckptd.save.commit import blob_key, plan_key
from ckptd.save.digester import Digester
from ckptd.save.drain import SLICE_BYTES, data_file
from ckptd.save.messages import Part, Save, Sealed
from ckptd.save.rankplan import RankPlan
from ckptd.store.base import Store

__all__ = ["Held", "hold_share", "put_share"]


@dataclass(frozen=True, slots=True)
class Held:
    """A rank's share: its data file lies in a slot, all the rest is small.

    Attributes
    ----------
    save
        The save that it is of.
    rank
        Whose share.
    slot
        Where the data section lies, from the front; valid while `Slot.sealed` names the job.
    header
        What precedes the data section in the file; empty when the rank has nothing to write.
    data_bytes
        Length of the data section.
    small
        The other objects by key, the part last: whoever finds the part finds everything.
    root
        Identity of the root that it is of.
    """

    save: Save
    rank: int
    slot: Slot
    header: bytes
    data_bytes: int
    small: dict[str, bytes]
    root: str = ""

    @property
    def key(self) -> str:
        """Key of the data file."""
        return file_key(self.save.folder, self.rank)

    @property
    def is_whole(self) -> bool:
        """Whether the slot still holds this very snapshot."""
        return self.slot.fd >= 0 and self.slot.sealed == self.save.job


def hold_share(
    plan: RankPlan,
    save: Save,
    slot: Slot,
    wait: Callable[[int], None],
    sealed: Callable[[], Sealed],
    root: str = "",
) -> Held:
    """Digest what a slot gets as it gets it, and return the share once the slot is sealed.

    Parameters
    ----------
    wait
        ``wait(nbytes)`` returns when so many bytes are staged, or raises.
    sealed
        Returns what was said when the snapshot was whole, or raises.
    root
        See `Held`.

    Raises
    ------
    SaveError
        The snapshot will never be whole.
    """
    file = data_file(plan, save)
    small: dict[str, bytes] = {}
    header, nbytes, index = b"", 0, ""
    if file is not None:
        header, nbytes = file.header, file.data_bytes
        digester = Digester(file.ends)
        with events.span("digest", nbytes=nbytes):
            for start in range(0, nbytes, SLICE_BYTES):
                end = min(start + SLICE_BYTES, nbytes)
                wait(end)
                digester.update(slot.data[start:end])
        raw = digester.index().encode()
        index = digest_hex(raw)
        small[digests_key(file_key(save.folder, plan.rank))] = raw
    seal = sealed()
    slots, values = plan.witness(slot.data)
    small[plan_key(save.folder)] = msgspec.msgpack.encode(plan.plan)
    small |= {blob_key(save.folder, b.digest): b.body for b in seal.blobs}
    part = Part(
        rank=plan.rank,
        plan=save.plan,
        data_start=len(header),
        data_bytes=nbytes,
        index=index,
        extra=save.extra,
        objects=save.objects,
        replicas=seal.replicas,
        slots=slots,
        values=values,
        metadata=save.metadata,
        root=root,
    )
    small[part_key(save.folder, plan.rank)] = part.encode()
    return Held(save, plan.rank, slot, header, nbytes, small, root)


def put_share(store: Store, held: Held) -> None:
    """Write a share into another node's memory; its part goes last.

    Raises
    ------
    SaveError
        kind ``half-staged``: the slot was taken for another snapshot meanwhile.
    StoreError, TransientStoreError
        As the store says.
    """
    with events.span("upload", nbytes=held.data_bytes):
        if held.header:
            with store.writer(held.key, len(held.header) + held.data_bytes) as writer:
                writer.write(memoryview(held.header))
                for piece in _slices(held):
                    writer.write(piece)
                _check_whole(held)
                writer.commit()
        for key, body in held.small.items():
            store.put(key, body)


def _slices(held: Held) -> Iterator[memoryview]:
    for start in range(0, held.data_bytes, SLICE_BYTES):
        _check_whole(held)
        yield held.slot.data[start : min(start + SLICE_BYTES, held.data_bytes)]


def _check_whole(held: Held) -> None:
    if not held.is_whole:
        raise half_staged(f"the snapshot of step {held.save.step}", held.slot.staged)
