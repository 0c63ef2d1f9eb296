from __future__ import annotations

from tests.servers import s3_moto, s3_radosgw

__all__ = ["s3_moto", "s3_radosgw"]
