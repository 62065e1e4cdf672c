"""A hub on this machine: what huggingface_hub asks of the real one to make a repository, upload and download."""

import base64
import json
import re
import threading
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0" * 40


class Stub(BaseHTTPRequestHandler):
    """Repositories are a dict of the server: id -> file -> bytes."""

    def log_message(self, *words):
        pass

    def _answer(self, value, status=200, **headers):
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, content in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), content)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _asked(self):
        length = int(self.headers.get("Content-Length") or 0)
        return self.rfile.read(length)

    def do_POST(self):
        asked = self._asked()
        if self.path == "/api/repos/create":
            name = json.loads(asked)["name"]
            name = f"{json.loads(asked).get('organization') or 'somebody'}/{name}"
            new = name not in self.server.repositories
            self.server.repositories.setdefault(name, {})
            return self._answer({"url": f"{self.server.address}/{name}"}, 200 if new else 409)
        if "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(asked)["files"]
            ]
            return self._answer({"files": files})
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        name = re.fullmatch(r"/api/models/(.+)/commit/main(\?.*)?", self.path)[1]
        for line in asked.decode().splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                content = base64.b64decode(entry["value"]["content"])
                self.server.repositories[name][entry["value"]["path"]] = content
        address = f"{self.server.address}/{name}"
        return self._answer(
            {
                "success": True,
                "commitOid": COMMIT,
                "commitUrl": f"{address}/commit/{COMMIT}",
                "pullRequestUrl": None,
            }
        )

    def do_GET(self):
        asked_file = re.fullmatch(r"/(.+)/resolve/(?:main|0{40})/(.+)", self.path)
        if asked_file is None:
            name = re.sub(r"^/api/models/|/revision/main$|\?.*", "", self.path)
            if name in self.server.repositories:
                return self._answer({"id": name, "sha": COMMIT, "siblings": []})
            return self._answer({}, 404, X_Error_Code="RepoNotFound")
        content = self.server.repositories.get(asked_file[1], {}).get(asked_file[2])
        if content is None:
            code = "EntryNotFound" if asked_file[1] in self.server.repositories else "RepoNotFound"
            return self._answer({}, 404, X_Error_Code=code)
        return self._answer(content, ETag=f'"{sha1(content).hexdigest()}"', X_Repo_Commit=COMMIT)

    do_HEAD = do_GET


@contextmanager
def hub(monkeypatch, cache):
    """The stub's repositories, with huggingface_hub pointed at it."""
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Stub)
    server.repositories, server.address = {}, f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    try:
        yield server.repositories
    finally:
        server.shutdown()
