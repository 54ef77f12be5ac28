"""A server on this machine that answers as the Hugging Face hub does for one data set."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = "a" * 40


@contextmanager
def serve(repository: str, files: Mapping[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve the files of `repository` by name; yields the address, and the paths that were asked for, which grow."""
    asked: list[str] = []
    entries = [
        {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        for name, content in files.items()
    ]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            """Say nothing."""

        def answer(self, code: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(code)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            asked.append(path)
            about, content = f"/api/datasets/{repository}", f"/datasets/{repository}/resolve/"
            name = path.removeprefix(content).partition("/")[2]
            if path == about or path.startswith(f"{about}/revision/"):
                self.answer(200, json.dumps({"id": repository, "sha": COMMIT, "private": False}).encode())
            elif path.startswith((f"{about}/tree/", f"{about}/paths-info/")):
                self.answer(200, json.dumps(entries).encode())
            elif path.startswith(content) and name in files:
                digest = hashlib.sha1(files[name]).hexdigest()
                self.answer(200, files[name], ETag=f'"{digest}"', X_Repo_Commit=COMMIT)
            else:
                self.answer(404, b"{}", X_Error_Code="EntryNotFound" if repository in path else "RepoNotFound")

        do_HEAD = do_POST = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
