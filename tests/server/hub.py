"""A local server that speaks the part of the Hugging Face hub's API that huggingface_hub calls here, with faults that
the test controls. It is no proof of what huggingface.co does.
"""

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
from huggingface_hub import close_session

TOKEN = "hf_of_the_tests"
_SIGNATURE = "signed-by-the-hub"
_READ_BYTES = 1 << 16


class Refused(Exception):
    """Answers a request with an error, in the hub's form."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Entry:
    """A file in a commit. sha256: of a file that LFS stores, else None."""

    oid: str
    size: int
    sha256: str | None = None


@dataclass
class Repository:
    """Branches, and the files of every commit."""

    is_private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Entry]] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, Entry]) -> str:
        oid = hashlib.sha1(f"{len(self.commits)}".encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid

    def commit_of(self, revision: str) -> str:
        oid = self.branches.get(revision, revision)
        if oid not in self.commits:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid


class Hub:
    """A hub of one user, whose contents are in a directory.

    fails: given "METHOD PATH", True if the request must be answered with 507.
    damages: given a path, True if the hub must store it with its last byte changed.
    requests: all requests so far, as "METHOD PATH".
    received: bytes that arrived of each LFS object, complete or not, by sha256.
    sent: bytes that left of each file, by its name without directories.
    arriving: called with the sha256 of an LFS object and the bytes that have arrived of it so far.
    part_bytes: larger LFS objects are uploaded in parts.
    """

    def __init__(self, directory: Path) -> None:
        self.fails: Callable[[str], bool] = lambda request: False
        self.damages: Callable[[str], bool] = lambda path: False
        self.arriving: Callable[[str, int], None] = lambda sha256, num_bytes: None
        self.requests: list[str] = []
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.repositories: dict[str, Repository] = {}
        self.part_bytes = 1 << 30
        self._directory = directory
        self._lock = threading.RLock()

    def create(self, repo_id: str, is_private: bool) -> Repository:
        repository = self.repositories[repo_id] = Repository(is_private)
        repository.commit("main", {})
        return repository

    def add(self, repo_id: str, path: str, content: bytes) -> None:
        """Commits a file, with LFS if it has weights."""
        repository = self.repositories[repo_id]
        entry = self.store(content) if is_large(path) else self.store_small(content)
        repository.commit("main", {**repository.commits[repository.branches["main"]], path: entry})

    def files(self, repo_id: str, revision: str = "main") -> Mapping[str, Entry]:
        repository = self.repositories[repo_id]
        return repository.commits[repository.branches[revision]]

    def store(self, content: bytes) -> Entry:
        sha256 = hashlib.sha256(content).hexdigest()
        self.object_path(sha256).write_bytes(content)
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(content)}\n"
        return Entry(blob_id(pointer.encode()), len(content), sha256)

    def store_small(self, content: bytes) -> Entry:
        self.object_path(blob_id(content)).write_bytes(content)
        return Entry(blob_id(content), len(content))

    def object_path(self, digest: str) -> Path:
        return self._directory / digest

    def content(self, entry: Entry) -> bytes:
        return self.object_path(entry.sha256 or entry.oid).read_bytes()

    def repository(self, repo_id: str) -> Repository:
        if repo_id not in self.repositories:
            raise Refused(404, "Repository not found", "RepoNotFound")
        return self.repositories[repo_id]

    def commit(self, repo_id: str, branch: str, lines: list[dict]) -> str:
        with self._lock:
            repository = self.repository(repo_id)
            files = dict(repository.commits[repository.commit_of(branch)])
            for line in lines:
                self._apply(files, line["key"], line["value"])
            return repository.commit(branch, files)

    def _apply(self, files: dict[str, Entry], key: str, value: dict) -> None:
        match key:
            case "header":
                assert value["summary"]
            case "file":
                files[value["path"]] = self.store_small(
                    self._as_stored(value["path"], base64.b64decode(value["content"]))
                )
            case "lfsFile":
                if not self.object_path(value["oid"]).is_file():
                    raise Refused(400, f"{value['path']}: its LFS object {value['oid']} was never uploaded")
                content = self.object_path(value["oid"]).read_bytes()
                if len(content) != value["size"]:
                    raise Refused(400, f"{value['path']}: its LFS object has another size")
                files[value["path"]] = self.store(self._as_stored(value["path"], content))
            case "deletedFolder":
                gone = [path for path in files if path.startswith(value["path"])]
                if not gone or not value["path"].endswith("/"):
                    raise Refused(404, f"there is no folder {value['path']}", "EntryNotFound")
                for path in gone:
                    del files[path]
            case _:
                raise Refused(400, f"unknown operation {key}")

    def _as_stored(self, path: str, content: bytes) -> bytes:
        return content[:-1] + bytes([content[-1] ^ 1]) if self.damages(path) else content


def is_large(path: str) -> bool:
    return path.endswith(".safetensors")


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        request = f"{self.command} {path}"
        self.hub.requests.append(request)
        try:
            if self.hub.fails(request):
                raise Refused(507, f"no room for {self._endpoint}{self.path}")
            if path.startswith("/storage/"):
                self._storage(path)
            else:
                self._require_token()
                self._route(path)
        except Refused as refusal:
            # The body may not have been read.
            headers = {"X-Error-Message": str(refusal), "Connection": "close"}
            code = {"X-Error-Code": refusal.code} if refusal.code else {}
            self._send(refusal.status, {"error": str(refusal)}, {**headers, **code})
        except ConnectionError:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = _answer

    def _require_token(self) -> None:
        sent = self.headers.get("Authorization", "")
        if sent != f"Bearer {TOKEN}":
            raise Refused(401, f"Invalid credentials in Authorization header {sent}")

    def _route(self, path: str) -> None:
        name = r"([\w.-]+/[\w.-]+)"
        routes = {
            r"POST /api/repos/create": self._create,
            rf"GET /api/models/{name}(?:/revision/([^/]+))?": self._info,
            rf"POST /api/models/{name}/branch/([^/]+)": self._branch,
            rf"GET /api/models/{name}/tree/([^/]+)(?:/(.+))?": self._tree,
            rf"POST /api/models/{name}/preupload/([^/]+)": self._preupload,
            rf"POST /api/models/{name}/commit/([^/]+)": self._commit,
            rf"POST /{name}\.git/info/lfs/objects/batch": self._batch,
            rf"POST /{name}\.git/verify": self._verify,
            rf"(?:GET|HEAD) /{name}/resolve/([^/]+)/(.+)": self._resolve,
        }
        for pattern, handle in routes.items():
            if found := re.fullmatch(pattern, f"{self.command} {path}"):
                handle(*(None if part is None else unquote(part) for part in found.groups()))
                return
        raise Refused(404, f"this hub does not have {self.command} {path}")

    def _create(self) -> None:
        body = self._json()
        repo_id = f"{body['organization']}/{body['name']}"
        answer = {"url": f"{self._endpoint}/{repo_id}"}
        if repo_id in self.hub.repositories:
            self._send(409, {**answer, "error": "You already created this model repo"})
            return
        self.hub.create(repo_id, body.get("visibility") == "private" or body.get("private") is True)
        self._send(200, answer)

    def _info(self, repo_id: str, revision: str | None) -> None:
        repository = self.hub.repository(repo_id)
        sha = repository.commit_of(revision or "main")
        self._send(200, {"id": repo_id, "private": repository.is_private, "sha": sha, "tags": [], "siblings": []})

    def _branch(self, repo_id: str, branch: str) -> None:
        repository = self.hub.repository(repo_id)
        self._json()
        repository.branches[branch] = repository.branches["main"]
        self._send(200, {})

    def _tree(self, repo_id: str, revision: str, directory: str | None) -> None:
        repository = self.hub.repository(repo_id)
        prefix = f"{directory}/" if directory else ""
        is_recursive = parse_qs(urlsplit(self.path).query)["recursive"] == ["true"]
        entries: dict[str, dict] = {}
        for path, entry in repository.commits[repository.commit_of(revision)].items():
            if not path.startswith(prefix):
                continue
            parts = path.removeprefix(prefix).split("/")
            for depth in range(1, len(parts) if is_recursive else min(2, len(parts))):
                above = prefix + "/".join(parts[:depth])
                entries[above] = {"type": "directory", "oid": "0" * 40, "size": 0, "path": above}
            if is_recursive or len(parts) == 1:
                entries[path] = _listed(path, entry)
        if directory and not entries:
            raise Refused(404, f"{directory} does not exist on {revision}", "EntryNotFound")
        self._send(200, list(entries.values()))

    def _preupload(self, repo_id: str, revision: str) -> None:
        repository = self.hub.repository(repo_id)
        there = repository.commits[repository.commit_of(revision)]
        files = []
        for file in self._json()["files"]:
            known = there.get(file["path"])
            mode = "lfs" if is_large(file["path"]) else "regular"
            oid = {"oid": known.sha256 or known.oid} if known else {}
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, **oid})
        self._send(200, {"files": files})

    def _batch(self, repo_id: str) -> None:
        self.hub.repository(repo_id)
        body = self._json()
        assert body["operation"] == "upload" and set(body["transfers"]) == {"basic", "multipart"}
        self._send(200, {"transfer": "basic", "objects": [self._upload_of(repo_id, one) for one in body["objects"]]})

    def _upload_of(self, repo_id: str, wanted: dict) -> dict:
        oid, size = wanted["oid"], wanted["size"]
        if self.hub.object_path(oid).is_file():
            return {"oid": oid, "size": size}
        href, part_bytes = f"{self._endpoint}/storage/{oid}", self.hub.part_bytes
        upload: dict = {"href": f"{href}?signature={_SIGNATURE}&size={size}"}
        if size > part_bytes:
            parts = range(1, -(-size // part_bytes) + 1)
            urls = {str(number): f"{href}.part-{number}?signature={_SIGNATURE}" for number in parts}
            upload = {
                "href": f"{href}/complete?signature={_SIGNATURE}",
                "header": {"chunk_size": str(part_bytes), **urls},
            }
        verify = {"href": f"{self._endpoint}/{repo_id}.git/verify"}
        return {"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}}

    def _verify(self, repo_id: str) -> None:
        body = self._json()
        path = self.hub.object_path(body["oid"])
        if not path.is_file() or path.stat().st_size != body["size"]:
            raise Refused(400, f"{body['oid']} was not uploaded")
        self._send(200, {})

    def _commit(self, repo_id: str, branch: str) -> None:
        lines = [json.loads(line) for line in self._body().splitlines()]
        oid = self.hub.commit(repo_id, branch, lines)
        self._send(200, {"commitUrl": f"{self._endpoint}/{repo_id}/commit/{oid}", "commitOid": oid, "success": True})

    def _resolve(self, repo_id: str, revision: str, path: str) -> None:
        repository = self.hub.repository(repo_id)
        commit = repository.commit_of(revision)
        entry = repository.commits[commit].get(path)
        if entry is None:
            raise Refused(404, f"{path} does not exist", "EntryNotFound")
        headers = {"X-Repo-Commit": commit}
        if entry.sha256:
            location = f"{self._endpoint}/storage/{entry.sha256}/{Path(path).name}?signature={_SIGNATURE}"
            linked = {"X-Linked-Etag": f'"{entry.sha256}"', "X-Linked-Size": str(entry.size)}
            self._send_bytes(302, b"", {**headers, **linked, "Location": location})
        else:
            self._send_content(self.hub.content(entry), Path(path).name, {**headers, "ETag": f'"{entry.oid}"'})

    def _storage(self, path: str) -> None:
        """Answers requests for LFS objects, which have no token but a signature."""
        query = parse_qs(urlsplit(self.path).query)
        if query.get("signature") != [_SIGNATURE] or (self.command == "PUT" and "Authorization" in self.headers):
            raise Refused(403, "the signature does not match")
        name, _, of = path.removeprefix("/storage/").partition("/")
        if self.command == "PUT":
            self._receive(name)
        elif self.command == "POST":
            self._complete(name)
        elif self.hub.object_path(name).is_file():
            self._send_content(self.hub.object_path(name).read_bytes(), of, {"ETag": f'"{name}"'})
        else:
            raise Refused(404, "no such object")

    def _receive(self, name: str) -> None:
        content, oid = self._body(counted_as=name.partition(".")[0]), name.partition(".")[0]
        if name == oid and hashlib.sha256(content).hexdigest() != oid:
            raise Refused(400, "the content does not have the sha256 of its name")
        self.hub.object_path(name).write_bytes(content)
        self._send_bytes(200, b"", {"ETag": f'"{hashlib.md5(content).hexdigest()}"'})

    def _complete(self, oid: str) -> None:
        parts = [self.hub.object_path(f"{oid}.part-{part['partNumber']}") for part in self._json()["parts"]]
        content = b"".join(part.read_bytes() for part in parts)
        if hashlib.sha256(content).hexdigest() != oid:
            raise Refused(400, "the parts do not have the sha256 of their name")
        self.hub.object_path(oid).write_bytes(content)
        self._send(200, {})

    @property
    def _endpoint(self) -> str:
        return f"http://{self.headers['Host']}"

    def _json(self) -> dict:
        return json.loads(self._body())

    def _body(self, counted_as: str | None = None) -> bytes:
        content = bytearray()
        for piece in self._pieces():
            content += piece
            if counted_as:
                self.hub.received[counted_as] += len(piece)
                self.hub.arriving(counted_as, len(content))
        return bytes(content)

    def _pieces(self) -> Iterator[bytes]:
        left = int(self.headers["Content-Length"])
        while left:
            piece = self.rfile.read(min(left, _READ_BYTES))
            if not piece:
                raise ConnectionResetError("the sender is gone")
            left -= len(piece)
            yield piece

    def _send_content(self, content: bytes, name: str, headers: Mapping[str, str]) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            self.hub.sent[name] += len(content)
            self._send_bytes(200, content, {"Accept-Ranges": "bytes", **headers})
            return
        first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
        if first > last:
            raise Refused(416, "the range is not in the file")
        self.hub.sent[name] += last + 1 - first
        span = {"Content-Range": f"bytes {first}-{last}/{len(content)}"}
        self._send_bytes(206, content[first : last + 1], {**span, **headers})

    def _send(self, status: int, body: object, headers: Mapping[str, str] | None = None) -> None:
        self._send_bytes(status, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send_bytes(self, status: int, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


class _Server(ThreadingHTTPServer):
    request_queue_size = 128


def _listed(path: str, entry: Entry) -> dict:
    lfs = {"lfs": {"oid": entry.sha256, "size": entry.size, "pointerSize": 134}} if entry.sha256 else {}
    return {"type": "file", "oid": entry.oid, "size": entry.size, "path": path, **lfs}


@contextmanager
def hub_server(directory: Path) -> Iterator[Hub]:
    """Runs a hub without repositories, and points this process and its children to it, with the right token."""
    hub = Hub(directory)
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    endpoint = f"http://127.0.0.1:{server.server_port}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"HF_ENDPOINT": endpoint, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}.items():
            patch.setenv(name, value)
        # The library has read its environment already.
        patch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
        patch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        thread.start()
        try:
            yield hub
        finally:
            close_session()  # which the library otherwise leaves to the end of the process
            server.shutdown()
            thread.join()
            server.server_close()
