"""TLS 1.3 between processes of a job: authority made of the secret, leaf certificates, errors.

In it: how long a leaf is valid; clocks that differ; what a foreign server or a wrong secret looks
like; HTTPS.

The authority is an Ed25519 key that HKDF (RFC 5869) makes of the secret, and a certificate in which
nothing is random: all that know the secret have the same one, and nothing has to pass it on. With
it a process issues itself a leaf that names its role and its node. What it hands to those that do
not have the secret is valid for hours. So what is sent between hosts, large data too, is encrypted,
and cannot be changed, added, dropped, repeated or cut short without an error.

`TlsSession` does no I/O: it takes and gives bytes, so blocking and asyncio ends share it.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import os
import socket
import ssl
import time
from collections.abc import Iterator
from typing import cast
from urllib.parse import quote

from ckptd.base.net.certificates import VARIABLES, certified, check_own, given_files, read_files
from ckptd.base.net.handed import (
    AskProof,
    FromFiles,
    HandedProof,
    Proof,
    asked_of_launcher,
    key_of_ranks,
)
from ckptd.base.net.roles import DOORS, Certified, Role
from ckptd.base.net.signing import SECRET_VARIABLE, checked_secret
from ckptd.base.runtime.memory import anonymous_file
from ckptd.errors import CkptdError, RefusedError, StoreError, TransientStoreError, UsageError

PROTOCOL = "ckptd/3"
"""Name of the protocol that both ends must speak: the version of handshake and frames."""
LEAF_S = 12 * 3600.0
"""How long a leaf that is handed out is valid, in seconds; at half of that there is a next one."""

_URI = "ckptd://"
_RECORD_BYTES = 1 << 14
_FOR_EVER = 253_402_300_799  # 9999-12-31: no end is known (RFC 5280)
_OTHER_SECRET = "the server and this client have different secrets"
_OTHER_AUTHORITY = "the server and this client have certificates of different authorities"
_NOT_VALID_NOW = (9, 10)  # X509_V_ERR_CERT_NOT_YET_VALID, X509_V_ERR_CERT_HAS_EXPIRED
_REFUSED = ("ALERT_UNKNOWN_CA", "ALERT_BAD_CERTIFICATE", "ALERT_CERTIFICATE", "ALERT_DECRYPT_ERROR")
_FOREIGN = (
    "WRONG_VERSION_NUMBER",
    "PROTOCOL_VERSION",
    "UNSUPPORTED_PROTOCOL",
    "HTTP_REQUEST",
    "PROXY_REQUEST",
)
_TURNED_AWAY = ("NO_APPLICATION_PROTOCOL", "HANDSHAKE_FAILURE", "UNRECOGNIZED_NAME")
"""Alerts of web servers and proxies; ckptd sends them if somebody changes a greeting on its way."""
_ADDRESS = "check the address: another server may have this port"


class TlsSession:
    """TLS of one connection, over bytes that the caller sends and receives.

    Parameters
    ----------
    identity
        Of this end; None: one that proves nothing and believes nothing, and may not ask anything.
    server
        Whether this is the side that was connected to.
    where
        The other end's name, for errors.

    Attributes
    ----------
    peer
        The other end, once the handshake is done and both are proved.
    """

    def __init__(self, identity: Identity | None, server: bool, where: str) -> None:
        context = _anonymous() if identity is None else identity.context(server)
        self.peer: Certified | None = None
        self._scoped = identity is not None and bool(identity.scope)
        self._files = identity is not None and identity.of_files
        self._where = where
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)

    @property
    def pending(self) -> bool:
        """Whether bytes have come that `read_into` was not asked for yet."""
        return bool(self._incoming.pending or self._tls.pending())

    def feed(self, data: bytes | memoryview) -> None:
        """Take bytes that have arrived."""
        self._incoming.write(data)

    def to_send(self) -> bytes:
        """Return what has to be sent now; empty if nothing has to."""
        return self._outgoing.read()

    def shake(self) -> bool:
        """Go on with the handshake as far as what has arrived goes; return whether it is done.

        Raises
        ------
        StoreError
            Kind ``permission``: the other end has another secret. It speaks another protocol.
        TransientStoreError
            Kind ``link-protocol``: what arrives was changed on the way.
        """
        if self.peer is None:
            with self._named():
                self._tls.do_handshake()
                spoken = self._tls.selected_alpn_protocol()
                if spoken is None or spoken.split()[0] != PROTOCOL:
                    raise self._foreign(spoken)
                self.peer = certified(self._tls.getpeercert() or {})
        return self.peer is not None

    def write(self, data: memoryview) -> None:
        """Encrypt; `to_send` returns it."""
        if data:
            self._tls.write(data)

    def read_into(self, view: memoryview) -> int:
        """Decrypt what has arrived into `view`; return how many bytes it is."""
        done = 0
        with self._named():
            while done < len(view):
                count = cast(int, self._tls.read(len(view) - done, view[done:]))
                if not count:
                    self._over()
                done += count
        return done

    def read(self) -> bytes:
        """Decrypt and return all that has arrived."""
        parts: list[bytes] = []
        with self._named():
            while data := self._tls.read(_RECORD_BYTES):
                parts.append(data)
            parts.clear()
            self._over()
        return b"".join(parts)

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Pass over the wish for more bytes, and raise named errors for those of OpenSSL."""
        try:
            yield
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            raise self._unproved(error) from error

    def _over(self) -> None:
        raise TransientStoreError("the connection was closed", kind="link-lost", where=self._where)

    def _unproved(self, error: ssl.SSLError) -> CkptdError:
        """Say what is wrong: the certificate, the protocol, or what came over the line."""
        reason = error.reason or str(error).upper().replace(" ", "_")  # it knows not all alerts
        late = getattr(error, "verify_code", 0) in _NOT_VALID_NOW or "CERTIFICATE_EXPIRED" in reason
        if late:
            return StoreError(
                "a certificate is not valid at this time",
                kind="permission",
                where=self._where,
                found=getattr(error, "verify_message", reason),
                hint="the clocks of the two machines differ by hours: set them",
            )
        if self._scoped and self.peer is None and self._tls.selected_alpn_protocol() == PROTOCOL:
            return RefusedError(
                "the controller of another job answers",
                kind="not-the-controller",
                where=self._where,
            )
        unproved = isinstance(error, ssl.SSLCertVerificationError)
        if self.peer is None and unproved and self._tls.selected_alpn_protocol() is None:
            return self._foreign("TLS of another program")
        if unproved or any(r in reason for r in _REFUSED):
            words = _OTHER_AUTHORITY if self._files else _OTHER_SECRET
            return StoreError(words, kind="permission", where=self._where)
        if self.peer is None and any(r in reason for r in _FOREIGN):
            return self._foreign("no TLS" if "WRONG_VERSION" in reason else reason)
        away = self.peer is None and any(r in reason for r in _TURNED_AWAY)
        return TransientStoreError(
            "the server turns ckptd's TLS away" if away else "bytes that arrived are not valid TLS",
            kind="link-protocol",
            where=self._where,
            found=error,
            hint=_ADDRESS if away else None,
        )

    def _foreign(self, found: object) -> StoreError:
        return StoreError(
            "the server is another program, or speaks another version of the protocol",
            where=self._where,
            wanted=f"TLS 1.3, {PROTOCOL}",
            found=found,
            hint=_ADDRESS,
        )


class Identity:
    """The proof of a process: its leaf, which is renewed before it ends.

    Parameters
    ----------
    proof
        The secret that the authority is derived from, or whom the leaf is asked of.
    role, node
        What the leaf says of this process.
    scope
        What both ends should serve, which either may know of the other before it is proved.
    """

    def __init__(self, proof: Proof | FromFiles, role: Role, node: str, scope: str = "") -> None:
        self.scope, self.of_files = scope, isinstance(proof, FromFiles)
        self._proof, self._role, self._node = proof, role, node
        self._made: dict[bool, tuple[ssl.SSLContext, float]] = {}

    def context(self, server: bool) -> ssl.SSLContext:
        """Return the settings of a new connection, with a leaf that is valid for hours."""
        context, until = self._made.get(server, (None, 0.0))
        if context is None or time.time() >= until or until - time.time() > LEAF_S:
            try:
                self._made[server] = self._new(server)
            except CkptdError:
                if context is None:
                    raise
                return context  # peers refuse the old leaf once it is over
        return self._made[server][0]

    def _new(self, server: bool) -> tuple[ssl.SSLContext, float]:
        authority, leaf, until = self._leaf()
        context = _bare(server, self.scope)
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(cadata=authority.decode())
            _load(context, leaf)
            if self.of_files:
                check_own(leaf, self._role, self._node)
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(
                f"the certificate of role {self._role} and its key cannot be used",
                where=", ".join(VARIABLES),
                found=getattr(error, "reason", None) or error,
            ) from error
        return context, until

    def _leaf(self) -> tuple[bytes, bytes, float]:
        if isinstance(self._proof, FromFiles):
            return read_files(self._role)
        if isinstance(self._proof, bytes):
            # The secret lies beside it: that it ended would shut out nobody but wrong clocks.
            return issued(self._proof, self._role, self._node, _FOR_EVER)
        if self._role not in ("rank", "worker"):
            raise UsageError("a launcher hands out no such certificate", found=self._role)
        handed = asked_of_launcher(self._role)
        return handed.authority, handed.leaf, handed.until


def identity_at(
    purpose: str, proof: Proof, role: Role, node: str = "", scope: str = ""
) -> Identity:
    """Return `identity` for one of `DOORS`: from files where there are, for the job's doors."""
    files = DOORS[purpose].of_job and isinstance(proof, bytes) and given_files()
    return identity(FromFiles() if files else proof, role, node, scope)


@functools.lru_cache(maxsize=64)
def identity(proof: Proof | FromFiles, role: Role, node: str = "", scope: str = "") -> Identity:
    """Return this process's identity in a role, under the authority of `proof`.

    Parameters
    ----------
    node
        Its node's name; the host's by default.
    scope
        See `Identity`.
    """
    own = "" if isinstance(proof, FromFiles) else socket.gethostname()
    return Identity(proof, role, node or own, scope)


@functools.lru_cache(maxsize=1)
def _anonymous() -> ssl.SSLContext:
    context = _bare(server=False)
    context.verify_mode = ssl.CERT_NONE
    return context


def https(context: ssl.SSLContext | None = None) -> ssl.SSLContext | None:
    """Return what serves HTTPS by the files of role `operator`; None where there are none.

    Parameters
    ----------
    context
        Gets the newest certificate, for new connections.

    Raises
    ------
    UsageError
        The files cannot be read, or do not fit one another.
    """
    if not given_files():
        return None
    _, leaf, _ = read_files("operator")
    fit = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for each in (fit, context or fit):  # it is tried first: what serves keeps what it has
        each.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            _load(each, leaf)
            check_own(leaf, "operator", "")
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(
                "the certificate of role operator and its key cannot be used",
                where=", ".join(VARIABLES),
                found=getattr(error, "reason", None) or error,
            ) from error
    return context or fit


def issued(secret: bytes, role: Role, node: str, end: float) -> tuple[bytes, bytes, float]:
    """Return what `issue` does, and when the next leaf is due."""
    return (*issue(secret, role, node, end), time.time() + LEAF_S / 2)


def hand(given: str | None, node: str, asked: AskProof) -> HandedProof:
    """Return what a launcher answers.

    Parameters
    ----------
    given
        The job's secret, as the launcher's environment has it.
    node
        Its own.
    """
    if not given:
        return HandedProof()
    secret = checked_secret(os.fsencode(given), SECRET_VARIABLE)
    key = key_of_ranks(secret)
    if not asked.role:
        return HandedProof(key)
    if given_files():
        return HandedProof(key, *read_files(asked.role))
    return HandedProof(key, *issued(secret, asked.role, node, time.time() + LEAF_S))


def issue(secret: bytes, role: Role, node: str, end: float) -> tuple[bytes, bytes]:
    """Return the authority's certificate, and a new leaf with its key, in PEM.

    Parameters
    ----------
    end
        When the leaf is over, in seconds since the epoch. It has no beginning: clocks differ.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    raw = HKDF(SHA256(), 32, salt=None, info=b"ckptd authority").derive(secret)
    authority_key, key = Ed25519PrivateKey.from_private_bytes(raw), Ed25519PrivateKey.generate()
    issuer = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    number = int.from_bytes(issuer.digest, "big") >> 1

    def certificate(
        name: str, public: Ed25519PrivateKey, serial: int, end: float, ca: bool
    ) -> x509.CertificateBuilder:
        usage = x509.KeyUsage(not ca, False, False, False, False, ca, ca, False, False)
        own = x509.SubjectKeyIdentifier.from_public_key(public.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{number:x}")]))
            .public_key(public.public_key())
            .serial_number(serial)
            .not_valid_before(datetime.datetime.fromtimestamp(0, datetime.UTC))
            .not_valid_after(datetime.datetime.fromtimestamp(int(end), datetime.UTC))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=0 if ca else None), True)
            .add_extension(usage, True)
            .add_extension(own, False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), False
            )
        )

    of_authority = certificate(f"{number:x}", authority_key, number, _FOR_EVER, True)
    leaf = certificate(role, key, x509.random_serial_number(), end, False)
    uri = x509.UniformResourceIdentifier(f"{_URI}{role}/{quote(node, safe='')}")
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    leaf = leaf.add_extension(x509.SubjectAlternativeName([uri]), False).add_extension(
        x509.ExtendedKeyUsage(both), False
    )
    return (
        of_authority.sign(authority_key, None).public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + leaf.sign(authority_key, None).public_bytes(Encoding.PEM),
    )


def _bare(server: bool, scope: str = "") -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # certificates name a role and a node, not a host
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    spoken = f"{PROTOCOL} {hashlib.sha256(scope.encode()).hexdigest()[:16]}"
    context.set_alpn_protocols([spoken, PROTOCOL] if scope else [PROTOCOL])
    if server:
        context.num_tickets = 0  # every connection proves both ends
    return context


def _load(context: ssl.SSLContext, leaf: bytes) -> None:
    """Give a context its leaf and key, which it reads from a file: one in memory."""
    fd = anonymous_file("leaf")
    try:
        os.write(fd, leaf)
        os.lseek(fd, 0, os.SEEK_SET)  # some systems open it where it stands
        context.load_cert_chain(f"/dev/fd/{fd}")
    finally:
        os.close(fd)
