"""What this machine brings along."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from ckptd.base.runtime.host import mapped_files


def test_a_mapping_stays_when_its_file_is_closed_whatever_its_name(tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"two words \xff")
    Path(os.fsdecode(path)).write_bytes(b"x" * mmap.PAGESIZE)
    with open(path, "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    assert os.fsdecode(path) in mapped_files()
    mapped.close()
    assert os.fsdecode(path) not in mapped_files()
