"""A model hub on this machine: the part of the Hugging Face hub's HTTP API that uploads use."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_right"


class HubServer:
    """Serves until ``close``; refuses uploads of step ``refused_step`` and later ones.

    Attributes:
        repositories: by id, contents of files by path.
        settings: by id, the payload that created the repository.
        messages: of all commits, in order.
    """

    def __init__(self, refused_step: int | None = None) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.settings: dict[str, dict[str, Any]] = {}
        self.messages: list[str] = []
        self.refused_step = refused_step
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                status, answer = hub.answer(self.path, self.headers.get("Authorization", ""), body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, path: str, authorization: str, body: bytes) -> tuple[int, Any]:
        """Return the status and the JSON of an answer to a request."""
        if authorization != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/repos/create":
            payload = json.loads(body)
            repo = f"{payload['organization'] or 'me'}/{payload['name']}"
            self.repositories.setdefault(repo, {})
            self.settings.setdefault(repo, payload)
            return 200, {"url": f"{self.url}/{repo}", "name": repo}
        if path == "/api/validate-yaml":
            is_local = "base_model: /" in json.loads(body)["content"]
            errors = [{"message": '"base_model" is not a model id'}] if is_local else []
            return 400 if is_local else 200, {"errors": errors, "warnings": []}
        kind = "preupload" if "/preupload/" in path else "commit"
        repo, _, revision = path.removeprefix("/api/models/").rpartition(f"/{kind}/")
        if repo not in self.repositories or revision != "main":
            return 404, {"error": f"no {path}"}
        if kind == "preupload":
            files = [each["path"] for each in json.loads(body)["files"]]
            return 200, {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in files]}
        lines = [json.loads(line) for line in body.splitlines()]
        message = next(line["value"]["summary"] for line in lines if line["key"] == "header")
        step = int(message.removeprefix("Training in progress, step ").partition(",")[0])
        if self.refused_step is not None and step >= self.refused_step:
            return 403, {"error": "Storage quota exceeded."}
        self.messages.append(message)
        for line in lines:
            if line["key"] == "file":
                self.repositories[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        number = f"{len(self.messages):040x}"
        return 200, {"success": True, "commitUrl": f"{self.url}/{repo}/commit/{number}", "commitOid": number}

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
