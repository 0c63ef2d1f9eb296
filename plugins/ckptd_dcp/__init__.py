"""torch.distributed.checkpoint on roots of ckptd: `CkptdWriter` and `CkptdReader`."""

from __future__ import annotations

from ckptd_dcp.reader import CkptdReader
from ckptd_dcp.writer import CkptdWriter

__all__ = ["CkptdReader", "CkptdWriter"]
