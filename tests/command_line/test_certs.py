"""What `piecework certs` makes: verified by the strict rules of the web, never overwritten, private."""

import json
import ssl
import stat
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from typer.testing import CliRunner

from piecework.cli import app
from piecework.deploy import certs, registration
from piecework.engines.processes import free_ports

OF_A_NODE = {".key", ".pub", ".crt", ".tls.key", ".secret"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    certs.issue(["superlink", "10.1.2.3"], 2, tmp_path / "certs")
    return tmp_path / "certs"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def changed(before: dict[str, bytes], after: dict[str, bytes]) -> set[str]:
    assert before.keys() <= after.keys()
    return {name for name, content in after.items() if before.get(name) != content}


def verify(folder: Path, file: str, name: str) -> None:
    try:
        subject: x509.GeneralName = x509.IPAddress(ip_address(name))
    except ValueError:
        subject = x509.DNSName(name)
    store = Store([x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())])
    certificate = x509.load_pem_x509_certificate((folder / file).read_bytes())
    PolicyBuilder().store(store).build_server_verifier(subject).verify(certificate, [])


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("server.crt", ["superlink", "10.1.2.3", "localhost", "127.0.0.1"]),
        ("nodes/node-1.crt", ["node-1", "localhost", "127.0.0.1"]),
    ],
)
def test_certificates_hold_for_their_names_only(folder: Path, file: str, names: list[str]) -> None:
    for name in names:
        verify(folder, file, name)
    for name in ("node-0", "elsewhere", "10.1.2.4"):
        with pytest.raises(VerificationError):
            verify(folder, file, name)


def shake_hands(certificate: Path, key: Path, authority: Path, name: str) -> None:
    """A whole TLS handshake in memory, with the strict checks that Python 3.13 makes."""
    client_context, server_context = (
        ssl.create_default_context(cafile=str(authority)),
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
    )
    client_context.verify_flags |= ssl.VERIFY_X509_STRICT
    server_context.load_cert_chain(certificate, key)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=name)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() == "TLSv1.3"
    assert client.getpeercert()


@pytest.mark.parametrize(
    ("stem", "key", "name"),
    [("server", ".key", "superlink"), ("server", ".key", "10.1.2.3"), ("nodes/node-0", ".tls.key", "node-0")],
)
def test_python_trusts_the_certificates(folder: Path, tmp_path: Path, stem: str, key: str, name: str) -> None:
    pair = folder / f"{stem}.crt", folder / f"{stem}{key}"
    shake_hands(*pair, folder / "ca.crt", name)
    certs.issue(["superlink"], 1, tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        shake_hands(*pair, tmp_path / "other" / "ca.crt", name)


def test_private_files_are_for_their_owner(folder: Path) -> None:
    modes = {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert modes.pop("nodes") == 0o700
    assert {f"nodes/node-{i}{end}" for i in (0, 1) for end in OF_A_NODE} < modes.keys()
    for name, mode in modes.items():
        assert mode == (0o644 if name.endswith((".crt", ".pub")) else 0o600), name
    secrets = [content for name, content in contents(folder).items() if name.endswith(".secret")]
    assert len(set(secrets)) == 3
    assert min(map(len, secrets)) >= 32


def test_keys_are_what_flower_reads(folder: Path) -> None:
    for node in ("node-0", "node-1"):
        private = serialization.load_ssh_private_key((folder / "nodes" / f"{node}.key").read_bytes(), None)
        assert isinstance(private, ec.EllipticCurvePrivateKey)
        public = public_key_to_bytes(private.public_key())
        assert try_load_public_key(folder / "nodes" / f"{node}.pub") == public
        assert registration.public_keys(folder)[node] == public


def test_again_keeps_everything(folder: Path) -> None:
    before = contents(folder)
    made = certs.issue(["superlink", "10.1.2.3"], 2, folder)
    assert contents(folder) == before
    assert {file.done for file in made} == {"kept"}
    certs.issue([], 1, folder)  # no names: those it has; fewer nodes: no client's key is removed
    assert contents(folder) == before


def test_again_adds_what_is_missing(folder: Path) -> None:
    before = contents(folder)
    certs.issue([], 3, folder)
    assert changed(before, contents(folder)) == {f"nodes/node-2{end}" for end in OF_A_NODE}
    before = contents(folder)
    certs.issue(["superlink", "new.example.org"], 3, folder)
    assert changed(before, contents(folder)) == {"server.crt", "server.key"}
    verify(folder, "server.crt", "new.example.org")
    with pytest.raises(VerificationError):
        verify(folder, "server.crt", "10.1.2.3")


def move_clock(monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    class Later(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:
            return datetime.now(UTC) + timedelta(days=days)

    monkeypatch.setattr(certs, "datetime", Later)


def test_certificates_are_renewed_before_they_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(folder)
    move_clock(monkeypatch, 700)
    certs.issue([], 2, folder)
    assert contents(folder) == before
    move_clock(monkeypatch, 760)
    certs.issue([], 2, folder)
    renewed = {f"nodes/node-{i}{end}" for i in (0, 1) for end in (".crt", ".tls.key")} | {"server.crt", "server.key"}
    assert changed(before, contents(folder)) == renewed
    move_clock(monkeypatch, 3651)
    with pytest.raises(ValueError, match=r"ca\.crt expired on"):
        certs.issue([], 2, folder)


def test_a_certificate_of_another_authority_is_replaced(folder: Path, tmp_path: Path) -> None:
    certs.issue(["superlink", "10.1.2.3"], 1, tmp_path / "other")
    for file in ("server.crt", "server.key"):
        (folder / file).write_bytes((tmp_path / "other" / file).read_bytes())
    certs.issue([], 2, folder)
    verify(folder, "server.crt", "10.1.2.3")


def test_the_authoritys_key_may_be_kept_elsewhere(folder: Path, tmp_path: Path) -> None:
    before = contents(folder)
    (folder / "ca.key").rename(tmp_path / "safe.key")
    made = {file.file: file.done for file in certs.issue([], 2, folder)}
    assert made["ca.key"] == "kept elsewhere"
    with pytest.raises(ValueError, match=r"node-2\.crt must be issued, which needs .*ca\.key"):
        certs.issue([], 3, folder)
    certs.issue([], 1, tmp_path / "other")
    (folder / "ca.key").write_bytes((tmp_path / "other" / "ca.key").read_bytes())
    with pytest.raises(ValueError, match=r"ca\.key is not the key of"):
        certs.issue([], 2, folder)
    assert contents(folder)["ca.crt"] == before["ca.crt"]


def test_a_key_made_on_the_device_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    (folder / "nodes").mkdir(parents=True)
    public = ec.generate_private_key(ec.SECP256R1()).public_key()
    ssh = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / "nodes" / "node-0.pub").write_bytes(ssh)
    certs.issue([], 1, folder)
    assert (folder / "nodes" / "node-0.pub").read_bytes() == ssh
    assert not (folder / "nodes" / "node-0.key").exists()
    assert registration.public_keys(folder) == {"node-0": public_key_to_bytes(public)}


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("ca.crt", "ca.crt is not a certificate in PEM"),
        ("ca.key", "ca.key is not an unencrypted private key"),
        ("server.crt", "server.crt is not a certificate in PEM"),
        ("nodes/node-1.key", "node-1.key is not an unencrypted private key in OpenSSH"),
    ],
)
def test_a_damaged_file_is_named_and_left(folder: Path, file: str, message: str) -> None:
    (folder / file).write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(ValueError, match=message):
        certs.issue([], 2, folder)
    assert (folder / file).read_bytes() == b"\x80\x04K\x01."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["host:8000"], "'host:8000' is neither a host name nor an IP address"),
        (["https://host"], "'https://host' is neither"),
        (["10.1.2.300"], "'10.1.2.300' is neither"),
        (["bücher.example"], "'bücher.example' is neither"),
        ([""], "'' is neither"),
        (["host", "--nodes", "0"], "nodes is 0"),
        (["host", "--days", "0"], "days is 0: it must be 1 to 3650"),
    ],
)
def test_bad_input_writes_nothing(tmp_path: Path, arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["certs", "--out", str(tmp_path / "certs"), "--json", *arguments])
    assert done.exit_code == 2
    assert message in json.loads(done.stdout.splitlines()[-1])["reason"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    tmp_path.chmod(0o755)
    done = CliRunner().invoke(app, ["certs", "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "holds README.md and no ca.crt" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_the_command_lists_the_files_it_made(tmp_path: Path) -> None:
    call = ["certs", "superlink", "--nodes", "2", "--out", str(tmp_path / "certs")]
    first = json.loads(CliRunner().invoke(app, [*call, "--json"]).stdout)
    assert {file["file"] for file in first["files"]} == contents(tmp_path / "certs").keys()
    (server,) = [file for file in first["files"] if file["file"] == "server.crt"]
    assert server["names"] == ["superlink", "localhost", "127.0.0.1"]
    assert server["until"] == (datetime.now(UTC) + timedelta(days=825)).date().isoformat()
    assert "kept" in CliRunner().invoke(app, call).stdout


def test_registering_needs_good_keys_and_a_superlink(folder: Path) -> None:
    (port,) = free_ports(1)
    call = ["register", str(folder), "--superlink", f"127.0.0.1:{port}"]
    nobody = CliRunner().invoke(app, call)
    assert nobody.exit_code == 2
    assert f"answers at 127.0.0.1:{port}" in nobody.stderr
    stranger = CliRunner().invoke(app, [*call, "--revoke", "node-9"])
    assert stranger.exit_code == 2
    assert "no key of 'node-9'" in stranger.stderr
    assert "node-0, node-1" in stranger.stderr
    rsa_key = rsa.generate_private_key(65537, 2048).public_key()
    ssh = rsa_key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (folder / "nodes" / "node-1.pub").write_bytes(ssh)
    with pytest.raises(ValueError, match=r"node-1\.pub is not on a NIST curve"):
        registration.public_keys(folder)
    (folder / "nodes" / "node-1.pub").write_text("garbage")
    with pytest.raises(ValueError, match=r"node-1\.pub is not a public key"):
        registration.public_keys(folder)
    with pytest.raises(ValueError, match=r"no nodes/\*\.pub"):
        registration.public_keys(folder / "nodes")
