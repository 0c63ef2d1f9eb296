"""``ckptd sign`` and ``ckptd verify --key``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("blake3")

from cryptography.hazmat.primitives.asymmetric import ec, rsa

from ckptd.checkpoint.format.names import CommitName, commit_key
from tests.cli.roots import rank_file
from tests.cli.running import Cli
from tests.keys import key_pair


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, str]:
    return key_pair(tmp_path, "release")


@pytest.fixture
def signed(cli: Cli, root: str, keys: tuple[str, str]) -> Path:
    """Where the signature of step 20 is."""
    return Path(root, cli.json("sign", f"{root}@20", "--key", keys[0])["signature"])


def findings(cli: Cli, where: str, *keys: str) -> list[dict[str, str]]:
    args = [arg for key in keys for arg in ("--key", key)]
    document = cli.json("verify", where, *args, code=3)
    return [f for report in document["checkpoints"] for f in report["findings"]]


def test_what_is_signed_verifies(cli: Cli, root: str, keys: tuple[str, str], signed: Path) -> None:
    assert cli.good("verify", f"{root}@20", "--key", keys[1])
    again = cli.json("sign", f"{root}@20", "--key", keys[0])
    assert Path(root, again["signature"]) == signed
    assert findings(cli, f"{root}@10", keys[1])[0]["message"].startswith("no trusted key")
    assert cli("verify", f"{root}@20").code == 0


@pytest.mark.parametrize("curve", [ec.SECP256R1(), ec.SECP384R1(), ec.SECP521R1()])
def test_other_kinds_of_keys(cli: Cli, root: str, tmp_path: Path, curve: ec.EllipticCurve) -> None:
    private, public = key_pair(tmp_path, "curve", ec.generate_private_key(curve))
    cli.good("sign", f"{root}@20", "--key", private)
    cli.good("verify", f"{root}@20", "--key", public)


def test_keys_that_are_none(cli: Cli, root: str, tmp_path: Path, keys: tuple[str, str]) -> None:
    text = tmp_path / "text"
    text.write_text("a key")
    text.chmod(0o600)
    other = key_pair(tmp_path, "rsa", rsa.generate_private_key(65537, 2048))
    for bad in (str(text), other[0]):
        assert cli("sign", root, "--key", bad).code == 2
    Path(keys[0]).chmod(0o640)
    assert "others may read" in cli("sign", root, "--key", keys[0]).err
    assert cli("verify", root, "--key", other[1]).code == 2
    assert cli("verify", root, "--key", str(tmp_path / "nothing")).code == 4


@pytest.mark.parametrize("victim", ["commit", "manifest", "marker", "data", "digests"])
def test_any_file_of_it_is_covered(
    cli: Cli, root: str, keys: tuple[str, str], signed: Path, victim: str
) -> None:
    data = rank_file(root, 20, 1)
    path = {
        "commit": Path(root, commit_key(CommitName(20, 1))),
        "manifest": signed.with_name("manifest.json"),
        "marker": Path(root, "ckptd.json"),
        "data": data,
        "digests": data.with_suffix(".digests"),
    }[victim]
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    assert cli("verify", f"{root}@20", "--key", keys[1]).code == 3
    path.write_bytes(raw)
    assert cli("verify", f"{root}@20", "--key", keys[1]).code == 0


def test_keys_are_changed_one_for_another(
    cli: Cli,
    root: str,
    tmp_path: Path,
    keys: tuple[str, str],
    signed: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    new = key_pair(tmp_path, "new")
    assert "no trusted key" in findings(cli, f"{root}@20", new[1])[0]["message"]
    assert cli.good("verify", f"{root}@20", "--key", new[1], "--key", keys[1])
    monkeypatch.setenv("CKPTD_TRUST", keys[1])
    assert "no trusted key" in cli("sign", f"{root}@10", "--key", new[0]).err
    cli.good("sign", f"{root}@20", "--key", new[0])
    monkeypatch.delenv("CKPTD_TRUST")
    assert len(list(signed.parent.glob("signature-*.json"))) == 2
    signed.unlink()
    cli.good("verify", f"{root}@20", "--key", new[1])
    assert findings(cli, f"{root}@20", keys[1])  # the old one is not enough any more


def test_what_was_changed_is_not_signed_again(
    cli: Cli, root: str, keys: tuple[str, str], signed: Path
) -> None:
    """Other bytes with good digests pass `verify`: a key that has signed before compares them."""
    path = Path(root, commit_key(CommitName(20, 1)))
    text = path.read_text()
    cut = text[: text.rindex(',\n "digest"')] + "\n}\n"  # as of a version without digests
    path.write_text(cut.replace('"data_bytes"', '"data_bytes" '))
    assert cli("verify", f"{root}@20").code == 0
    result = cli("sign", f"{root}@20", "--key", keys[0])
    assert result.code == 3
    assert "not what was signed" in result.err


def test_a_copy_is_signed_again(
    cli: Cli, root: str, tmp_path: Path, keys: tuple[str, str], signed: Path
) -> None:
    """A copy has another root, and so another record: a signature of the first is not of it."""
    copy = str(tmp_path / "copy")
    result = cli("cp", f"{root}@20", copy)
    assert result.code == 0
    assert "is signed, and the copy is not" in result.err
    assert "no trusted key" in findings(cli, copy, keys[1])[0]["message"]
    (folder,) = Path(copy, "data").iterdir()
    shutil.copy(signed, folder)
    assert findings(cli, copy, keys[1])
    cli.good("sign", copy, "--key", keys[0])
    cli.good("verify", copy, "--key", keys[1])


def test_what_does_not_verify_is_not_signed(cli: Cli, root: str, keys: tuple[str, str]) -> None:
    path = rank_file(root, 20, 1)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    assert cli("sign", f"{root}@20", "--key", keys[0]).code == 3
    path.unlink()
    assert cli("sign", f"{root}@20", "--key", keys[0]).code == 3
    assert not list(Path(root).glob("data/*/signature-*"))
