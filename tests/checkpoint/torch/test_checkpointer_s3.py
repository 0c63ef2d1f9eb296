"""The checkpointer on an object store: no rename, no local files, another process writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ckptd
from ckptd.checkpoint.root.catalogue import Catalogue
from ckptd.checkpoint.tools.verify import verify
from ckptd.errors import CorruptError
from ckptd.store import open_store
from tests.servers import MOTO, RADOSGW, s3_moto, s3_radosgw, s3_url

pytestmark = pytest.mark.usefixtures("writing_thread")

__all__ = ["s3_moto", "s3_radosgw"]


@pytest.fixture(params=[MOTO, RADOSGW])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the options of a real server, or skip with its reason."""
    found: dict[str, Any] = request.getfixturevalue(request.param)
    return found


def test_save_load_verify_and_damage(options: dict[str, Any]) -> None:
    url = s3_url()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 700), torch.nn.Linear(700, 300))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 300)).sum().backward()
    optim.step()
    state = {"model": model, "optim": optim, "n": 1, "rng": ckptd.Rng()}
    expected = {k: v.clone() for k, v in model.state_dict().items()}
    with ckptd.Checkpointer(url, keep=2, store_options=options) as ck:
        for step in (1, 2, 3):
            ck.save(step, state)
    # Another life, so that the retention of the first has ended: a load claims a generation, and
    # an older one deletes nothing from then on.
    with ckptd.Checkpointer(url, store_options=options) as ck:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        assert ck.load(state) == 3
        assert ck.last_load is not None
        read = ck.last_load.read
        assert read.bytes_fetched <= 1.1 * read.bytes_needed + (1 << 20)
    assert all(torch.equal(v, expected[k]) for k, v in model.state_dict().items())

    store = open_store(url, **options)
    catalogue = Catalogue(store)
    assert [n.step for n in catalogue.line()] == [2, 3]
    assert not [i.key for i in store.list() if "/parts/" in i.key]
    name = catalogue.latest()
    assert name is not None
    assert not verify(catalogue, name).findings

    path = catalogue.manifest(name).files[0].path
    raw = np.frombuffer(store.get(path), dtype=np.uint8).copy()
    raw[-1000] ^= 1
    store.put(path, raw.tobytes())
    with ckptd.Checkpointer(url, store_options=options) as ck:
        with pytest.raises(CorruptError):
            ck.load(state, 3)
        assert ck.load(state) == 2
