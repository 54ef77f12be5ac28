"""Register with a SuperLink which node keys it may admit, and revoke keys.

It uses the client of Flower's own command line, because `flwr supernode list` shows neither names nor keys, so our nodes could
not be identified.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, uses_nist_ec_curve

REVOKED = "unregistered"  # Flower's word; it keeps a revoked key and never accepts it again


@dataclass(frozen=True)
class Registered:
    """One of our nodes: Flower's id, what was done, and its state (registered, online, offline, revoked)."""

    node: str
    node_id: int
    done: str
    state: str


def register(folder: Path, superlink: str, root_certificates: Path) -> list[Registered]:
    """Register every nodes/*.pub of a folder with a SuperLink (HOST:PORT); registered and revoked keys stay so.

    Raises ConnectionError if the SuperLink cannot be reached or refuses, ValueError for a folder without good keys.
    """
    keys = public_keys(folder)
    with open_control(superlink, root_certificates) as client:
        known = nodes_by_key(client)
        for node, key in keys.items():
            if key not in known:
                client.RegisterNode(RegisterNodeRequest(public_key=key, name=node))
        now = nodes_by_key(client)
    return [describe_node(node, now[key], "kept" if key in known else "registered") for node, key in keys.items()]


def revoke(folder: Path, node: str, superlink: str, root_certificates: Path) -> Registered:
    """Revoke a node's key permanently; a node that is online with it is disconnected. Raises as `register` does."""
    keys = public_keys(folder)
    if node not in keys:
        raise ValueError(f"there is no key of '{node}' in {folder / 'nodes'}; there are {', '.join(keys)}")
    with open_control(superlink, root_certificates) as client:
        known = nodes_by_key(client).get(keys[node])
        if known is None:
            raise ValueError(f"{node} is not registered at {superlink}: there is nothing to revoke")
        if known.status == REVOKED:
            return describe_node(node, known, "kept")
        client.UnregisterNode(UnregisterNodeRequest(node_id=known.node_id))
        return describe_node(node, nodes_by_key(client)[keys[node]], "revoked")


def describe_node(node: str, info: NodeInfo, done: str) -> Registered:
    """Return a node as the SuperLink sees it, in our words."""
    return Registered(node, info.node_id, done, "revoked" if info.status == REVOKED else info.status)


def nodes_by_key(client: ControlHttpClient) -> dict[bytes, NodeInfo]:
    """Return all present and past nodes of a SuperLink by public key."""
    return {info.public_key: info for info in client.ListNodes(ListNodesRequest()).nodes_info}


def public_keys(folder: Path) -> dict[str, bytes]:
    """Return the public keys of a folder by node, as Flower compares them (PEM). Raises ValueError."""
    files = sorted((folder / "nodes").glob("*.pub"), key=lambda path: (len(path.stem), path.stem))
    if not files:
        raise ValueError(
            f"no nodes/*.pub in {folder}: make them with `piecework certs`, or put the keys made by devices there"
        )
    return {path.stem: public_key(path) for path in files}


def public_key(path: Path) -> bytes:
    """Convert a public key file in OpenSSH format to PEM. Raises ValueError, which names the file."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{path} is not a public key in OpenSSH format: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not uses_nist_ec_curve(key):
        raise ValueError(f"{path} is not on a NIST curve, as Flower demands: make it with `ssh-keygen -t ecdsa -b 384`")
    return public_key_to_bytes(key)


@contextmanager
def open_control(superlink: str, root_certificates: Path) -> Iterator[ControlHttpClient]:
    """Open a TLS connection to the Control API of a SuperLink. Raises ConnectionError."""
    client = ControlHttpClient.from_server_address(
        superlink,
        insecure=False,
        root_certificates=root_certificates.read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
    )
    try:
        yield client
    except httpx.HTTPStatusError as error:
        raise ConnectionError(f"the SuperLink at {superlink} refused: {detail(error.response)}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConnectionError(
            f"no SuperLink with TLS of {root_certificates} answers at {superlink}: {error}; "
            "start it with --ssl-certfile, --ssl-keyfile and --ssl-ca-certfile, and give a HOST that its certificate names"
        ) from error
    finally:
        client.close()


def detail(response: httpx.Response) -> str:
    """Return the text of a Flower error."""
    try:
        content = json.loads(response.text)
    except json.JSONDecodeError:
        return f"status {response.status_code}"
    return str(content.get("message") or content.get("detail") or content)
