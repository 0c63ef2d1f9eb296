"""What agents and the daemon say to each other: sheets and findings go up, orders come down.

A sheet is what the ranks of one node show at a moment (of several nodes, from a forwarder). It
holds ages in place of times, so that clocks never cross nodes. All of it is untrusted where it
arrives: `unpack` checks everything before anybody uses it.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
import zstandard

from ckptd.decoding import msgpack_decoder
from ckptd.monitor.messages import (
    GAP,
    SHEET_RANK,
    STEP,
    SUM,
    TABLES,
    VERSION,
    AgentState,
    Fencing,
    Found,
    GroupInfo,
    Orders,
    Probe,
    ProbeResult,
    Sheet,
    SheetLimits,
    Stack,
)
from ckptd.monitor.sheetcheck import bad, check_found, check_orders, check_sheet

__all__ = [
    "GAP",
    "SHEET_RANK",
    "STEP",
    "SUM",
    "TABLES",
    "VERSION",
    "AgentState",
    "Fencing",
    "Found",
    "GroupInfo",
    "Orders",
    "Probe",
    "ProbeResult",
    "Sheet",
    "SheetLimits",
    "Stack",
    "pack",
    "unpack",
    "unpack_fencing",
    "unpack_found",
    "unpack_orders",
]

Message = TypeVar("Message", Sheet, Orders, Found, Fencing)

_PLAIN, _PACKED = b"\x00", b"\x01"
_PACK_ABOVE = 4096
_RATIO = 512
_encoder = msgspec.msgpack.Encoder()
_sheets = msgpack_decoder(Sheet)
_orders = msgpack_decoder(Orders)
_found = msgpack_decoder(Found)
_fencing = msgpack_decoder(Fencing)
_MOST_GENERATION = 1 << 62
_MOST_REASON = 2000


def pack(message: Sheet | Orders | Found | Fencing) -> bytes:
    """Return the bytes of a message: msgpack, with zstd where that is worth it."""
    raw = _encoder.encode(message)
    if len(raw) <= _PACK_ABOVE:
        return _PLAIN + raw
    return _PACKED + zstandard.ZstdCompressor(level=1).compress(raw)


def unpack(data: bytes, limits: SheetLimits | None = None) -> Sheet:
    """Return the sheet that `data` holds, with everything checked.

    Raises
    ------
    CorruptError
        kind ``bad-sheet``: these bytes are not a sheet, or it claims more than `limits`.
    """
    limits = limits or SheetLimits()
    sheet = _decoded(data, _sheets, limits)
    check_sheet(sheet, limits)
    return sheet


def unpack_found(data: bytes, limits: SheetLimits | None = None) -> Found:
    """Return the findings that `data` holds; errors as of `unpack`."""
    limits = limits or SheetLimits()
    found = _decoded(data, _found, limits)
    check_found(found, limits)
    return found


def unpack_orders(data: bytes, limits: SheetLimits | None = None) -> Orders:
    """Return the orders that `data` holds; errors as of `unpack`."""
    limits = limits or SheetLimits()
    orders = _decoded(data, _orders, limits)
    check_orders(orders, limits)
    return orders


def unpack_fencing(data: bytes, limits: SheetLimits | None = None) -> Fencing:
    """Return the fencing that `data` holds; errors as of `unpack`."""
    fencing = _decoded(data, _fencing, limits or SheetLimits())
    if not 0 <= fencing.below < _MOST_GENERATION or len(fencing.reason) > _MOST_REASON:
        raise bad("a generation, and a reason in a few words", f"generation {fencing.below}")
    return fencing


def _decoded(
    data: bytes, decoder: msgspec.msgpack.Decoder[Message], limits: SheetLimits
) -> Message:
    if not 0 < len(data) <= limits.packed:
        raise bad(f"1 to {limits.packed} bytes", f"{len(data)} bytes")
    try:
        return decoder.decode(_plain(data, limits))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad("a message of this version", str(error)) from error


def _plain(data: bytes, limits: SheetLimits) -> bytes | memoryview:
    head, body = data[:1], memoryview(data)[1:]
    if head == _PLAIN:
        return body
    if head != _PACKED:
        raise bad("a message of this version", f"first byte {head.hex()}")
    most = min(limits.unpacked, (1 << 20) + _RATIO * len(body))
    try:
        # Without a stated size the decompressor would decide itself how much it allocates.
        size = zstandard.frame_content_size(body)
        if not 0 < size <= most:
            raise bad(f"1 to {most} bytes, stated", str(size))
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=size)
    except zstandard.ZstdError as error:
        raise bad("a zstd frame", str(error)) from error
