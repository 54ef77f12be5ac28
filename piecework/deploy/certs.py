"""Certificates and keys of a federation: its own authority, a server certificate, and the files of each node.

    ca.crt, ca.key          the authority; every process trusts ca.crt, and ca.key stays with its owner
    server.crt, server.key  TLS of the SuperLink
    executor.secret         between the SuperLink and the executor of the ServerApp
    nodes/node-I.key, .pub          identify node I to the SuperLink (OpenSSH, NIST P-384)
    nodes/node-I.crt, .tls.key      TLS between node I and its executor
    nodes/node-I.secret             between node I and its executor

Every node has its own secret, because with the server's a node could take the tasks of the ServerApp.
"""

import ipaddress
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from piecework.client_app.disk import write_atomically

MOST_NODES = 10_000  # whose keys and certificates are made at once
AUTHORITY_DAYS = 3650
LAST_PART = 0.1  # last fraction of its validity in which a certificate is issued again
EARLY = timedelta(days=1)  # certificates are valid from yesterday, for boards whose clock is behind
HERE = ("localhost", "127.0.0.1")
LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
PUBLIC, PRIVATE = 0o644, 0o600  # modes of files: keys and secrets are their owner's
PEM, OPENSSH = serialization.Encoding.PEM, serialization.Encoding.OpenSSH


@dataclass(frozen=True)
class Made:
    """A file, whether it was "made" or "kept", and for a certificate its names and the day it expires."""

    file: str
    done: str
    names: tuple[str, ...] = ()
    until: str = ""


@dataclass(frozen=True)
class Authority:
    """A certificate that signs; `key` is None if ca.key is kept elsewhere."""

    folder: Path
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey | None


def issue(names: Sequence[str], nodes: int, folder: Path, days: int = 825) -> list[Made]:
    """Make the missing files in `folder` for a server with these names and `nodes` nodes; valid files are kept.

    A certificate is issued again if its names changed or in the last tenth of its validity. Names are DNS names or IP
    addresses; localhost and 127.0.0.1 are always added. Without names the server keeps its present ones. Raises ValueError,
    OSError.
    """
    if not 1 <= nodes <= MOST_NODES:
        raise ValueError(f"nodes is {nodes}: it must be 1 to {MOST_NODES}")
    if not 1 <= days <= AUTHORITY_DAYS:
        raise ValueError(f"days is {days}: it must be 1 to {AUTHORITY_DAYS}")
    alternatives([*names, *HERE])  # rejects a bad name before anything is written
    if foreign := foreign_file(folder):
        raise ValueError(f"{folder} holds {foreign} and no ca.crt: give a new folder, or one that this command made")
    (folder / "nodes").mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    authority, made = open_authority(folder)
    made += certify(authority, "server", names, days)
    made.append(make_secret(folder, "executor.secret"))
    for number in range(nodes):
        node = f"node-{number}"
        made += make_identity(folder, node)
        made += certify(authority, f"nodes/{node}", [node], days, key_suffix=".tls.key")
        made.append(make_secret(folder, f"nodes/{node}.secret"))
    return made


def open_authority(folder: Path) -> tuple[Authority, list[Made]]:
    """Open the authority of a folder, or make one. Raises ValueError if its files are not an authority."""
    certificate_file, key_file = folder / "ca.crt", folder / "ca.key"
    done = "kept"
    if not certificate_file.exists():
        if key_file.exists():
            raise ValueError(f"{key_file} is there but {certificate_file} is not: restore it, or use another folder")
        done, key = "made", ec.generate_private_key(ec.SECP384R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Piecework {secrets.token_hex(4)}")])
        builder = builder_for(name, name, key.public_key(), AUTHORITY_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(key_usage(signs=True), critical=True)
        certificate = builder.sign(key, hashes.SHA384())
        write_atomically(key_file, pem_of(key), mode=PRIVATE)
        write_atomically(certificate_file, certificate.public_bytes(PEM), mode=PUBLIC)
    certificate = read_certificate(certificate_file)
    private = read_key(key_file) if key_file.exists() else None
    if private is not None and private.public_key() != certificate.public_key():
        raise ValueError(f"{key_file} is not the key of {certificate_file}: restore the right one")
    if certificate.not_valid_after_utc < datetime.now(UTC):
        raise ValueError(f"{certificate_file} expired on {day(certificate)}: make a new authority in another folder")
    found = [Made("ca.crt", done, (), day(certificate)), Made("ca.key", done if private else "kept elsewhere")]
    return Authority(folder, certificate, private), found


def certify(
    authority: Authority, stem: str, names: Sequence[str], days: int, key_suffix: str = ".key"
) -> tuple[Made, Made]:
    """Make a certificate for the given names and its key, or keep valid ones. Raises ValueError if ca.key is missing."""
    certificate_file, key_file = authority.folder / f"{stem}.crt", authority.folder / f"{stem}{key_suffix}"
    old = read_certificate(certificate_file) if certificate_file.exists() and key_file.exists() else None
    wanted = alternatives([*names, *HERE]) if names or old is None else names_of(old)
    if old is not None and holds(old, authority, wanted):
        return Made(f"{stem}.crt", "kept", texts(wanted), day(old)), Made(f"{stem}{key_suffix}", "kept")
    if authority.key is None:
        raise ValueError(f"{certificate_file} must be issued, which needs {authority.folder / 'ca.key'}: put it there")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, Path(stem).name)])
    left = (authority.certificate.not_valid_after_utc - datetime.now(UTC)).days
    builder = builder_for(subject, authority.certificate.subject, key.public_key(), min(days, left))
    signer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
        authority.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(key_usage(signs=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    builder = builder.add_extension(x509.SubjectAlternativeName(wanted), critical=False)
    builder = builder.add_extension(signer, critical=False)
    certificate = builder.sign(authority.key, hashes.SHA256())
    write_atomically(key_file, pem_of(key), mode=PRIVATE)
    write_atomically(certificate_file, certificate.public_bytes(PEM), mode=PUBLIC)
    return Made(f"{stem}.crt", "made", texts(wanted), day(certificate)), Made(f"{stem}{key_suffix}", "made")


def holds(certificate: x509.Certificate, authority: Authority, names: Iterable[x509.GeneralName]) -> bool:
    """Return whether a certificate is of this authority, for these names, and not in the last part of its validity."""
    try:
        certificate.verify_directly_issued_by(authority.certificate)
    except (InvalidSignature, ValueError, TypeError):  # signed by another authority
        return False
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return set(names_of(certificate)) == set(names) and datetime.now(UTC) < ends - LAST_PART * (ends - begins)


def make_identity(folder: Path, node: str) -> tuple[Made, ...]:
    """Make or keep the key pair that identifies a node. A .pub without its .key was made on the device, and is kept."""
    private_file, public_file = folder / "nodes" / f"{node}.key", folder / "nodes" / f"{node}.pub"
    if public_file.exists() and not private_file.exists():
        return (Made(f"nodes/{node}.pub", "kept"),)
    done = "kept" if private_file.exists() else "made"
    if done == "made":
        key = ec.generate_private_key(ec.SECP384R1())
        write_atomically(private_file, pem_of(key, serialization.PrivateFormat.OpenSSH), mode=PRIVATE)
    try:
        private = serialization.load_ssh_private_key(private_file.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{private_file} is not an unencrypted private key in OpenSSH format: {error}") from None
    public = private.public_key().public_bytes(OPENSSH, serialization.PublicFormat.OpenSSH)
    write_atomically(public_file, public + f" {node}\n".encode(), mode=PUBLIC)
    return Made(f"nodes/{node}.key", done), Made(f"nodes/{node}.pub", done)


def make_secret(folder: Path, file: str) -> Made:
    """Make or keep a file of random bytes, the secret of two processes."""
    path = folder / file
    if path.exists():
        return Made(file, "kept")
    write_atomically(path, secrets.token_bytes(48), mode=PRIVATE)
    return Made(file, "made")


def alternatives(names: Iterable[str]) -> list[x509.GeneralName]:
    """Return subject alternative names without repetition. Raises ValueError for neither a DNS name nor an IP address."""
    found: list[x509.GeneralName] = []
    for name in names:
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name)))
            continue
        except ValueError:
            labels = name.split(".")
        if len(name) > 253 or not all(map(LABEL.fullmatch, labels)) or labels[-1].isdecimal():
            raise ValueError(f"'{name}' is neither a host name nor an IP address (write it without port and scheme)")
        found.append(x509.DNSName(name))
    return list(dict.fromkeys(found))


def foreign_file(folder: Path) -> str:
    """Return a file which shows that a folder is not ours to make private, or ''. Keys made by devices are allowed."""
    if not folder.exists() or (folder / "ca.crt").exists() or (folder / "ca.key").exists():
        return ""
    return next((path.name for path in sorted(folder.iterdir()) if path.name != "nodes"), "")


def builder_for(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    """Return a builder with what certificates of both kinds have in common."""
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def key_usage(signs: bool) -> x509.KeyUsage:
    """Return the key usage: an authority signs certificates, a server signs handshakes."""
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def names_of(certificate: x509.Certificate) -> list[x509.GeneralName]:
    """List the subject alternative names of a certificate."""
    return list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)


def texts(names: Iterable[x509.GeneralName]) -> tuple[str, ...]:
    """Return names as text."""
    return tuple(str(name.value) for name in names)


def day(certificate: x509.Certificate) -> str:
    """Return the day a certificate expires."""
    return certificate.not_valid_after_utc.date().isoformat()


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate. Raises ValueError, which names the file."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not a certificate in PEM ({error}): delete it or restore the right one") from None


def read_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a private key. Raises ValueError, which names the file."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not an unencrypted private key in PEM: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{path} is not an elliptic-curve key: use the ca.key that was made here")
    return key


def pem_of(
    key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat = serialization.PrivateFormat.PKCS8
) -> bytes:
    """Encode a private key without encryption, because processes that start by themselves cannot be asked for a password."""
    return key.private_bytes(PEM, form, serialization.NoEncryption())
