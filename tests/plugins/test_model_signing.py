"""The package of OpenSSF Model Signing verifies what `sign` signs, where it is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("blake3")
pytest.importorskip("model_signing")

import torch
from cryptography.hazmat.primitives.asymmetric import ec
from model_signing import verifying

import ckptd
from tests.keys import key_pair
from tests.processes import PATIENCE_S

pytestmark = pytest.mark.plugins


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1()])
def test_a_signed_save_verifies_and_a_changed_one_does_not(
    tmp_path: Path, curve: ec.EllipticCurve
) -> None:
    private, public = key_pair(tmp_path, "release", ec.generate_private_key(curve))
    root = tmp_path / "root"
    with ckptd.Checkpointer(str(root), sign=private, timeout_s=PATIENCE_S) as ck:
        ck.save(1, {"x": torch.arange(1 << 21)}).durable(PATIENCE_S)
    (signature,) = root.glob("data/*/signature-*")
    check = verifying.Config().use_elliptic_key_verifier(public_key=public)
    check.set_ignore_unsigned_files(True)
    check.verify(root, signature)
    (data,) = root.glob("data/*/r00000.safetensors")
    raw = data.read_bytes()
    data.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"Hash mismatch for .*r00000"):
        check.verify(root, signature)
