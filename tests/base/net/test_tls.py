"""TLS of a job: one authority for a secret, leaves for hours, and no byte that can be changed."""

from __future__ import annotations

import random
import re
import secrets
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from ckptd.base.net import tls
from ckptd.base.net.handed import AskProof
from ckptd.base.net.roles import Certified
from ckptd.base.net.tls import LEAF_S, Identity, TlsSession, hand, identity, issue
from ckptd.errors import CkptdError, StoreError, TransientStoreError

SECRET, OTHER = b"s" * 32, b"t" * 32
SOON = time.time() + LEAF_S
RECORD = 5  # bytes of a record's head


def sessions(client: Identity | None = None, server: Identity | None = None) -> list[TlsSession]:
    ours, theirs = client or identity(SECRET, "rank", "n1"), server or identity(SECRET, "agent")
    return [
        TlsSession(ours, server=False, where="server"),
        TlsSession(theirs, server=True, where="client"),
    ]


class Made(Identity):
    """One with settings that a test made."""

    def __init__(self, authority: bytes, leaf: bytes) -> None:
        super().__init__(b"", "agent", "n")
        self.made = tls._bare(server=False)
        self.made.verify_mode = ssl.CERT_REQUIRED
        self.made.load_verify_locations(cadata=authority.decode())
        tls._load(self.made, leaf)

    def context(self, server: bool) -> ssl.SSLContext:
        assert not server
        return self.made


def shaken(
    client: TlsSession,
    server: TlsSession,
    change: Callable[[int, bytes], bytes] = lambda _, data: data,
) -> bool:
    """Pass what two ends say to each other, until both are done or nothing more is said."""
    client.shake()
    for number in range(10):
        sender, receiver = (client, server) if number % 2 == 0 else (server, client)
        said = sender.to_send()
        if not said:
            break
        receiver.feed(change(number, said))
        receiver.shake()
    return client.peer is not None and server.peer is not None


def got(receiver: TlsSession, size: int) -> bytes:
    """What of `size` bytes arrives before there is an error or nothing more.

    What a call was asked for is not used when it fails in the middle.
    """
    room = bytearray(size)
    with memoryview(room) as view, suppress(TransientStoreError):
        done = 0
        while count := receiver.read_into(view[done : done + 1000]):
            done += count
    return bytes(room[:done])


# --- who is let in --------------------------------------------------------------------------------


def test_all_that_know_a_secret_have_the_same_authority() -> None:
    now = time.time()
    first, leaf = issue(SECRET, "agent", "n1", now)
    again, other_leaf = issue(SECRET, "rank", "n2", now + 5e5)
    assert first == again
    assert leaf != other_leaf
    assert first != issue(OTHER, "agent", "n1", now)[0]
    code = f"print(issue({SECRET!r}, 'reader', 'n', 0.0)[0].decode(), end='')"
    in_a_process_of_its_own = subprocess.run(
        [sys.executable, "-c", "from ckptd.base.net.tls import issue; " + code],
        stdout=subprocess.PIPE,
        check=True,
    )
    assert in_a_process_of_its_own.stdout == first


def test_each_end_is_named_by_its_certificate() -> None:
    name = "gpu-7/rack ü%2F:" + "x" * 200
    client, server = sessions(Identity(SECRET, "rank", name))
    assert shaken(client, server)
    assert server.peer == Certified("rank", name)
    assert client.peer is not None
    assert client.peer.role == "agent"


def test_another_authority_is_refused_by_name() -> None:
    stranger = Identity(OTHER, "agent", "n")
    for ends in (sessions(client=stranger), sessions(server=stranger)):
        with pytest.raises(StoreError, match="different secrets") as caught:
            shaken(*ends)
        assert caught.value.kind == "permission"


def test_a_client_that_is_refused_hears_why() -> None:
    """It believes the server, and shows what another authority made."""
    stranger = Made(issue(SECRET, "agent", "n", 0.0)[0], issue(OTHER, "agent", "n", SOON)[1])
    client, server = sessions(client=stranger)
    with pytest.raises(StoreError, match="different secrets"):
        shaken(client, server)
    client.feed(server.to_send())
    with pytest.raises(StoreError, match="different secrets") as caught:
        client.read()
    assert caught.value.kind == "permission"


def test_a_leaf_is_no_authority() -> None:
    """One that holds a leaf, and not the secret, makes no other one."""
    begin = b"-----BEGIN CERTIFICATE"
    authority, leaf = issue(SECRET, "rank", "n1", SOON)
    key, own = load_pem_private_key(leaf, None), leaf[leaf.index(begin) :]
    _, wish = issue(OTHER, "controller", "n1", SOON)
    wished = x509.load_pem_x509_certificate(wish[wish.index(begin) :])
    names = wished.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    made = (
        x509.CertificateBuilder()
        .subject_name(wished.subject)
        .issuer_name(x509.load_pem_x509_certificate(own).subject)
        .public_key(wished.public_key())
        .serial_number(1)
        .not_valid_before(wished.not_valid_before_utc)
        .not_valid_after(wished.not_valid_after_utc)
        .add_extension(names.value, False)
        .sign(key, None)  # type: ignore[arg-type]
    )
    forged = wish[: wish.index(begin)] + made.public_bytes(Encoding.PEM) + own
    with pytest.raises(StoreError, match="different secrets"):
        shaken(*sessions(client=Made(authority, forged)))


def test_a_server_of_another_scope_is_told_from_one_of_another_secret() -> None:
    def ends(secret: bytes, scope: str) -> list[TlsSession]:
        there = Identity(secret, "controller", "n", scope)
        return sessions(client=Identity(SECRET, "agent", "n", "j"), server=there)

    assert shaken(*ends(SECRET, "j"))
    assert shaken(*ends(SECRET, "k"))  # the server says of what job it is
    for secret, scope, kind in ((OTHER, "j", "permission"), (OTHER, "k", "not-the-controller")):
        with pytest.raises(CkptdError) as caught:
            shaken(*ends(secret, scope))
        assert caught.value.kind == kind


@pytest.mark.parametrize("off_s", [0.0, 50 * 60, -50 * 60, 86_400.0, -86_400.0, 3e8, -3e8])
def test_clocks_of_those_that_have_the_secret_may_differ(
    monkeypatch: pytest.MonkeyPatch, off_s: float
) -> None:
    """A clock a day off cost the near tiers: its node and all others refused each other."""
    there = Identity(SECRET, "rank", "n1")
    now = time.time()
    with monkeypatch.context() as patched:
        patched.setattr(tls.time, "time", lambda: now + off_s)
        there.context(server=False)
        assert shaken(*sessions(there))


@pytest.mark.parametrize(
    ("off_s", "fits"), [(3e8, True), (-11 * 3600, True), (-LEAF_S - 60, False)]
)
def test_a_leaf_that_was_handed_out_is_over_after_hours(
    monkeypatch: pytest.MonkeyPatch, off_s: float, fits: bool
) -> None:
    """The clock of the launcher that hands it out is off."""
    now, secret = time.time(), secrets.token_hex(16)
    with monkeypatch.context() as patched:
        patched.setattr(tls.time, "time", lambda: now + off_s)
        handed = hand(secret, "n1", AskProof("rank"))
    there = Identity(secret.encode(), "agent", "n2")
    client, server = sessions(Made(handed.authority, handed.leaf), there)
    if fits:
        assert shaken(client, server)
        return
    with pytest.raises(StoreError, match="not valid at this time") as caught:
        shaken(client, server)
    assert caught.value.kind == "permission"
    assert "clocks" in str(caught.value.hint)


def test_a_leaf_is_renewed_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, now = Identity(SECRET, "rank", "n1"), time.time()
    first = ours.context(server=False)
    assert ours.context(server=False) is first
    for later in (LEAF_S / 2 + 1, -3600.0):  # and after a clock was set back
        with monkeypatch.context() as patched:
            patched.setattr(tls.time, "time", lambda later=later: now + later)
            renewed = ours.context(server=False)
            assert renewed is not first
            assert ours.context(server=False) is renewed
        first = renewed
    assert shaken(*sessions(ours))


def test_nothing_older_than_tls_1_3_and_no_ticket() -> None:
    client, server = sessions()
    assert shaken(client, server)
    assert client._tls.version() == "TLSv1.3"
    assert server.to_send() == b""  # no ticket: each connection proves both ends
    old = Made(*issue(SECRET, "agent", "n", SOON))
    old.made.minimum_version = ssl.TLSVersion.TLSv1_2
    old.made.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(StoreError, match="another version"):
        shaken(*sessions(client=old))


def test_what_uses_no_network_imports_no_tls() -> None:
    """So a process pays for it with its first connection to another host."""
    code = (
        "import sys, ckptd, ckptd.store.net, ckptd.base.net.door, ckptd.publish.client\n"
        "print([m for m in ('ssl', 'cryptography', 'ckptd.base.net.tls') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert found.stdout.strip() == b"[]"


# --- what passes ----------------------------------------------------------------------------------


def records(raw: bytes) -> list[bytes]:
    out, at = [], 0
    while at < len(raw):
        end = at + RECORD + int.from_bytes(raw[at + 3 : at + 5], "big")
        out.append(raw[at:end])
        at = end
    return out


def meddled(dice: random.Random, raw: bytes) -> bytes:
    """Change, drop, repeat, swap, add or cut something; the result differs from `raw`."""
    parts = records(raw)
    k = dice.randrange(len(parts))
    at = dice.randrange(len(raw))
    match dice.randrange(7):
        case 0:
            return raw[:at] + bytes([raw[at] ^ 1 << dice.randrange(8)]) + raw[at + 1 :]
        case 1:
            return raw[:at] + raw[at + dice.randrange(1, 3000) :]
        case 2:
            return b"".join(parts[:k] + parts[k + 1 :])
        case 3:
            return b"".join(parts[: k + 1] + parts[k:])
        case 4 if len(parts) > 1:
            other = (k + 1) % len(parts)
            parts[k], parts[other] = parts[other], parts[k]
            return b"".join(parts)
        case 5:
            return raw[:at] + dice.randbytes(dice.randrange(1, 50)) + raw[at:]
    return raw[:at]


def test_no_byte_can_be_changed_dropped_repeated_or_added() -> None:
    dice = random.Random(7)
    data = dice.randbytes(50_000)
    for _ in range(400):
        client, server = sessions()
        assert shaken(client, server)
        sender, receiver = dice.choice([(client, server), (server, client)])
        sender.write(memoryview(data))
        receiver.feed(meddled(dice, sender.to_send()))
        arrived = got(receiver, len(data))
        assert data.startswith(arrived)
    client, server = sessions()  # of the test itself: whole without a change
    assert shaken(client, server)
    client.write(memoryview(data))
    server.feed(client.to_send())
    assert got(server, len(data)) == data


def test_what_one_connection_said_is_worth_nothing_in_another() -> None:
    first, there = sessions()
    assert shaken(first, there)
    first.write(memoryview(b"delete it"))
    said = first.to_send()
    client, server = sessions()
    assert shaken(client, server)
    server.feed(said)
    with pytest.raises(TransientStoreError):
        server.read()
    client.feed(said)  # nor sent back
    with pytest.raises(TransientStoreError):
        client.read()


def test_a_handshake_that_is_meddled_with_proves_nothing_wrong() -> None:
    dice = random.Random(8)
    done = 0
    for _ in range(150):
        client, server = sessions()
        turn = dice.randrange(3)

        def change(number: int, said: bytes, turn: int = turn) -> bytes:
            return meddled(dice, said) if number == turn else said

        try:
            both = shaken(client, server, change)
        except CkptdError:
            continue
        if both:  # only what means nothing was changed
            done += 1
            client.write(memoryview(b"x" * 100))
            server.feed(client.to_send())
            assert got(server, 100) in (b"", b"x" * 100)
            assert server.peer == Certified("rank", "n1")
    assert done < 40


def test_nothing_of_what_is_said_can_be_read() -> None:
    seen: list[bytes] = []

    def keep(_: int, said: bytes) -> bytes:
        seen.append(said)
        return said

    client, server = sessions(Identity(SECRET, "rank", "name-of-a-node"))
    assert shaken(client, server, keep)
    client.write(memoryview(b"weights " * 1000))
    seen.append(client.to_send())
    raw = b"".join(seen)
    assert b"weights" not in raw
    assert SECRET not in raw
    assert re.search(rb"s{16}", raw) is None
    assert b"name-of-a-node" not in raw  # a client's name is encrypted as well
