"""Checksums of folders and files on disk: they are sealed after they were written, and checked before they are used.

Clients seal their states and features, the server its checkpoints.
"""

import hashlib
import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from piecework.device_profiles.documents import read_json

MANIFEST = "manifest.json"


def seal(folder: Path) -> None:
    """Write the manifest of a folder, with the sha256 of every file in it."""
    (folder / MANIFEST).write_text(json.dumps({name: sha256(path) for name, path in _files(folder).items()}))


def damage(folder: Path) -> str:
    """Return what is wrong with a sealed folder, as text, empty if it is intact. Its arrays are not loaded.

    Writers need no fsync, because this check also finds files that a power cut damaged.
    """
    try:
        manifest = read_json((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    if not isinstance(manifest, dict):
        return f"{MANIFEST} is not a JSON object"
    files = _files(folder)
    if differing := sorted(files.keys() ^ manifest.keys()):
        return f"{differing[0]} " + ("is not in its manifest" if differing[0] in files else "is missing")
    faults = (f"{name} {fault}" for name, path in files.items() if (fault := _fault(path, manifest[name])))
    return next(faults, "")


def _fault(path: Path, checksum: object) -> str:
    try:
        if sha256(path) != checksum:
            return "does not match its checksum"
        if path.suffix == ".safetensors" and not is_safetensors(path):
            return "is not a safetensors file"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return ""


def seal_file(path: Path) -> None:
    """Append the sha256 of a file to it, 32 bytes, which readers of .npy files pass over."""
    with path.open("r+b") as file:
        file.write(hashlib.file_digest(file, "sha256").digest())  # it has read to the end


def is_sealed(path: Path) -> bool:
    """Return whether a file ends with the sha256 of what stands before. Raises FileNotFoundError."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        left = path.stat().st_size - digest.digest_size
        while left > 0 and (block := file.read(min(left, 2**18))):
            digest.update(block)
            left -= len(block)
        return left == 0 and file.read() == digest.digest()


def is_safetensors(path: Path) -> bool:
    """Return whether a file has the header of a safetensors file and the length that the header declares."""
    try:
        with safe_open(path, framework="np"):
            return True
    except SafetensorError:
        return False


def sha256(path: Path) -> str:
    """Return the sha256 hex digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> dict[str, Path]:
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir())
    return {name: path for path in paths if (name := path.relative_to(folder).as_posix()) != MANIFEST}
