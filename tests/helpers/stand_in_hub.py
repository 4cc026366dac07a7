"""A Hub on this machine, small and deterministic, for the real huggingface_hub client.

    hub = StandInHub()                        # serves until `close`; or the fixture `hub` of a test module
    repo = hub.add_repo("org/tiny", {"config.json": b"{}"})
    subprocess.run([...], env=os.environ | hub.settings(home, token="hf_alice"))

It keeps repos, branches, commits, pull requests and LFS objects; answers with etags, redirects to a storage host and
ranges; knows tokens, private and gated repos; writes a log of every request; and goes wrong on demand (`fail`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import RLock, Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".model")
LFS_NBYTES = 10 << 20  # any file from this length on


class File:
    """A file of a commit. `nbytes` may exceed `data`: then only its start is ever served."""

    def __init__(self, path: str, data: bytes, nbytes: int | None = None) -> None:
        self.data = data
        self.nbytes = len(data) if nbytes is None else nbytes
        self.is_lfs = bool(data) and (path.endswith(LFS_SUFFIXES) or self.nbytes >= LFS_NBYTES)
        self.sha256 = hashlib.sha256(data).hexdigest()
        self.blob_id = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_lfs else self.blob_id

    def about(self, name_key: str, path: str, lfs_key: str) -> dict[str, object]:
        document: dict[str, object] = {name_key: path, "size": self.nbytes, "blobId": self.blob_id, "oid": self.blob_id}
        if self.is_lfs:
            document["lfs"] = {lfs_key: self.sha256, "size": self.nbytes, "pointerSize": 130}
        return document


@dataclass
class Repo:
    """Commits and what points at them."""

    name: str
    private: bool = False
    gated: str = ""  # "auto", "manual"
    commits: dict[str, dict[str, File]] = field(default_factory=dict)  # commit -> path -> file
    messages: list[str] = field(default_factory=list)
    refs: dict[str, str] = field(default_factory=dict)  # branch or refs/pr/N -> commit
    pulls: list[str] = field(default_factory=list)  # titles

    def commit(self, files: Mapping[str, File], message: str, ref: str = "main") -> str:
        """A new commit on `ref` that holds exactly `files`."""
        oid = hashlib.sha1(f"{self.name} {len(self.commits)} {message}".encode()).hexdigest()
        self.commits[oid] = dict(files)
        self.messages.append(message)
        self.refs[ref] = oid
        return oid

    def files(self, revision: str = "main") -> dict[str, File]:
        return self.commits[self.refs.get(revision, revision)]


@dataclass(frozen=True)
class User:
    name: str
    role: str = "write"
    may_write: tuple[str, ...] = ("org",)  # namespaces
    accepted: tuple[str, ...] = ()  # gated repos


@dataclass
class Request:
    """One line of the log."""

    method: str
    path: str  # decoded, without query
    user: str = ""  # "" for nobody, and at the storage host
    status: int = 0
    received: int = 0  # bytes of the request's body
    sent: int = 0  # bytes of the answer's body


@dataclass
class Fault:
    """What goes wrong with the next `times` requests that match."""

    method: str
    pattern: str  # searched in the path
    times: int
    status: int = 0  # answered instead of the work
    text: str = "injected"
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None  # bytes of the body that are sent before the connection is closed
    reset: bool = False  # ... and by a reset instead of an end
    edit: Callable[[bytes], bytes] | None = None  # changes the body
    lost: bool = False  # the work is done, the answer never comes
    drop: Collection[str] = ()  # headers that are left out of the answer
    put: Mapping[str, str] = field(default_factory=dict)  # headers of the answer that are other ones


class StandInHub(ThreadingHTTPServer):
    """See the module."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, Repo] = {}
        self.users: dict[str, User] = {"hf_alice": User("alice")}
        self.objects: dict[str, File] = {}  # sha256 -> LFS object
        self.parts: dict[str, dict[int, bytes]] = {}
        self.part_nbytes: int | None = None  # objects longer than this are sent in parts
        self.chunk_store: Path | None = None  # where a client that uses hf_xet puts what it uploads
        self.chunked: dict[str, bytes] = {}  # sha256 -> content, of what such a client is expected to upload
        self.log: list[Request] = []
        self.faults: list[Fault] = []
        self.watch: Callable[[str, Request], None] | None = None  # called with a stage: start, body, end
        self.lock = RLock()
        self._thread = Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that were killed are no news."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def storage_url(self) -> str:
        """Another host to the client, so that a token sent there shows."""
        return f"http://localhost:{self.server_address[1]}"

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def settings(self, home: Path, token: str | None = "hf_alice", **more: str) -> dict[str, str]:
        """Environment for a client process."""
        fixed = {
            "HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_HUB_OFFLINE": "0",
            "HF_HUB_DOWNLOAD_TIMEOUT": "5", "HF_HUB_ETAG_TIMEOUT": "5", "NO_PROXY": "*",
        }  # fmt: skip
        return fixed | ({"HF_TOKEN": token} if token else {}) | more

    def add_repo(self, name: str, files: Mapping[str, bytes | File] | None = None, **about: Any) -> Repo:
        repo = Repo(name, **about)
        held = {path: data if isinstance(data, File) else File(path, data) for path, data in (files or {}).items()}
        held[".gitattributes"] = File(".gitattributes", b"*.safetensors filter=lfs\n")
        repo.commit(held, "initial commit")
        self.repos[name] = repo
        self.objects |= {file.sha256: file for file in held.values() if file.is_lfs}
        return repo

    def add_folder(self, name: str, folder: Path, **about: Any) -> Repo:
        paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
        return self.add_repo(name, {str(path.relative_to(folder)): path.read_bytes() for path in paths}, **about)

    def fail(self, method: str, pattern: str, times: int = 1, **what: Any) -> None:
        self.faults.append(Fault(method, pattern, times, **what))

    def fault_of(self, request: Request) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.times and fault.method == request.method and re.search(fault.pattern, request.path):
                    fault.times -= 1
                    return fault
        return None

    def fetched(self, repo: str, user: str | None = None) -> list[str]:
        """Names of the files of `repo` whose content was sent, one for each time, sorted; those `user` asked for."""
        found = []
        for request in self.log:
            match = re.fullmatch(rf"/(?:storage/[0-9a-f]+/(\w*)/)?{repo}/resolve/[^/]+/(.*)", request.path)
            if match and request.method == "GET" and request.status in (200, 206):
                asked_by = match[1] if match[1] is not None else request.user
                found += [match[2]] if user in (None, asked_by) else []
        return sorted(found)

    def sent_nbytes(self) -> int:
        return sum(request.sent for request in self.log)

    def received_objects(self) -> list[str]:
        """sha256 of every LFS object that was uploaded, one for each time."""
        return [r.path.split("/")[2] for r in self.log if r.method == "PUT" and r.status == 200]


@contextmanager
def serving() -> Iterator[StandInHub]:
    hub = StandInHub()
    try:
        yield hub
    finally:
        hub.close()


class _Answer(Exception):
    """Ends the work on a request."""

    def __init__(self, status: int, body: object = None, headers: Mapping[str, str] | None = None) -> None:
        self.status = status
        self.body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.headers = dict(headers or {})


def _refusal(status: int, text: str, code: str = "") -> _Answer:
    headers = {"X-Error-Message": text} | ({"X-Error-Code": code} if code else {})
    return _Answer(status, {"error": text}, headers)


class _Handler(BaseHTTPRequestHandler):
    server: StandInHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *args: object) -> None:
        """The log is the server's."""

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        self.query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        known = self.server.users.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        request = Request(self.command, unquote(parts.path), known.name if known else "")
        with self.server.lock:
            self.server.log.append(request)
        self._watch("start", request)
        self.body = self._read_body(request)
        fault = self.server.fault_of(request)
        if fault and fault.status:
            answer = _Answer(fault.status, {"error": fault.text}, {"X-Error-Message": fault.text, **fault.headers})
        else:
            try:
                with self.server.lock:
                    self._work(request.path)
                answer = _refusal(404, f"no such route: {request.method} {request.path}")
            except _Answer as found:
                answer = found
        self._watch("end", request)
        self._send(request, answer, fault)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def _watch(self, stage: str, request: Request) -> None:
        if self.server.watch:
            self.server.watch(stage, request)

    def _read_body(self, request: Request) -> bytes:
        left = int(self.headers.get("Content-Length") or 0)
        chunks = []
        while left:
            chunk = self.rfile.read1(min(left, 1 << 16))
            if not chunk:
                raise ConnectionError("the client went away")
            left -= len(chunk)
            request.received += len(chunk)
            chunks.append(chunk)
            self._watch("body", request)
        return b"".join(chunks)

    def _send(self, request: Request, answer: _Answer, fault: Fault | None) -> None:
        body, headers = answer.body, {"Content-Type": "application/json"} | answer.headers
        if fault and fault.edit and answer.status in (200, 206):
            body = fault.edit(body)
        if fault and fault.lost:
            self.close_connection = True
            return
        request.status = answer.status
        self.send_response(answer.status)
        for key, value in ({"Content-Length": str(len(body))} | headers | dict(fault.put if fault else {})).items():
            if not (fault and key in fault.drop):
                self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault and fault.cut is not None:
            body = body[: fault.cut]
            self.close_connection = True
        request.sent = len(body)
        self.wfile.write(body)
        if fault and fault.reset:
            self.wfile.flush()
            self.connection.setsockopt(1, 13, struct.pack("ii", 1, 0))  # SO_LINGER 0: closing resets
            self.connection.close()

    # Who asks, and for what

    def _user(self) -> User | None:
        given = self.headers.get("Authorization", "")
        if not given:
            return None
        user = self.server.users.get(given.removeprefix("Bearer "))
        if user is None:
            raise _refusal(401, "Invalid credentials in Authorization header")
        return user

    def _repo(self, name: str) -> Repo:
        user, repo = self._user(), self.server.repos.get(name)
        if repo is None or (repo.private and not self._owns(user, name)):
            raise _refusal(404 if user else 401, "Repository not found", "RepoNotFound")
        return repo

    @staticmethod
    def _owns(user: User | None, name: str) -> bool:
        return user is not None and name.split("/")[0] in (user.name, *user.may_write)

    def _check_write(self, name: str) -> None:
        user = self._user()
        if user is None:
            raise _refusal(401, "Log in first")
        if user.role != "write" or not self._owns(user, name):
            raise _refusal(403, "You don't have the rights required to write to this repo")

    def _check_gate(self, repo: Repo) -> None:
        user = self._user()
        if repo.gated and not self._owns(user, repo.name) and not (user and repo.name in user.accepted):
            text = f"Access to model {repo.name} is restricted"
            raise _refusal(403 if user else 401, text, "GatedRepo")

    @staticmethod
    def _commit_id(repo: Repo, revision: str) -> str:
        oid = repo.refs.get(revision, revision)
        if oid not in repo.commits:
            raise _refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid

    # The work

    def _work(self, path: str) -> None:
        for method, pattern, work in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method:
                work(self, *match.groups())

    def _whoami(self) -> None:
        user = self._user()
        if user is None:
            raise _refusal(401, "Log in first")
        token = {"displayName": "test", "role": user.role}
        raise _Answer(200, {"type": "user", "name": user.name, "orgs": [], "auth": {"accessToken": token}})

    def _create(self) -> None:
        asked = json.loads(self.body)
        name = f"{asked.get('organization') or self._user().name}/{asked['name']}"
        self._check_write(name)
        url = {"url": f"{self.server.url}/{name}", "name": name}
        if name in self.server.repos:
            raise _Answer(409, {"error": "You already created this model repo", **url})
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.server.add_repo(name, private=private)
        raise _Answer(200, url)

    def _card(self) -> None:
        raise _Answer(200, {"errors": [], "warnings": []})

    def _auth_check(self, name: str, write: str | None) -> None:
        repo = self._repo(name)
        self._check_gate(repo)
        if write:
            self._check_write(name)
        raise _Answer(200, {})

    def _settings(self, name: str) -> None:
        self._check_write(name)
        self._repo(name).gated = str(json.loads(self.body).get("gated") or "")
        raise _Answer(200, {})

    def _branch(self, name: str, branch: str) -> None:
        repo = self._repo(name)
        self._check_write(name)
        if branch in repo.refs:
            raise _refusal(409, "Reference already exists")
        start = json.loads(self.body or b"{}").get("startingPoint") or "main"
        repo.refs[branch] = self._commit_id(repo, start)
        raise _Answer(200, {})

    def _info(self, name: str, revision: str | None) -> None:
        repo = self._repo(name)
        oid = self._commit_id(repo, revision or "main")
        siblings = [file.about("rfilename", path, "sha256") for path, file in repo.commits[oid].items()]
        raise _Answer(
            200, {"id": name, "sha": oid, "private": repo.private, "gated": repo.gated or False, "siblings": siblings}
        )

    def _tree(self, name: str, revision: str) -> None:
        repo = self._repo(name)
        oid = self._commit_id(repo, revision)
        raise _Answer(
            200, [{"type": "file", **file.about("path", path, "oid")} for path, file in repo.commits[oid].items()]
        )

    def _preupload(self, name: str, revision: str) -> None:
        repo = self._repo(name)
        if "create_pr" not in self.query and not revision.startswith("refs/pr/"):
            self._check_write(name)
        held = repo.commits[self._commit_id(repo, revision)]
        answer = []
        for file in json.loads(self.body)["files"]:
            is_lfs = file["path"].endswith(LFS_SUFFIXES) or file["size"] >= LFS_NBYTES
            known = {"oid": held[file["path"]].etag} if file["path"] in held else {}
            mode = "lfs" if is_lfs else "regular"
            answer.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, **known})
        raise _Answer(200, {"files": answer})

    def _chunk_token(self, name: str, _: str) -> None:
        self._repo(name)
        self._check_write(name)
        raise _Answer(200, {"casUrl": f"local://{self.server.chunk_store}", "accessToken": "token", "exp": 1 << 40})

    def _lfs_batch(self, name: str) -> None:
        self._repo(name)
        user = self._user()
        if user is None:
            raise _refusal(401, "Log in first")
        objects = []
        for item in json.loads(self.body)["objects"]:
            oid, nbytes, url = item["oid"], item["size"], self.server.storage_url
            part = self.server.part_nbytes
            if oid in self.server.objects:
                objects.append({"oid": oid, "size": nbytes})
                continue
            upload: dict[str, object] = {"href": f"{url}/upload/{oid}/0"}
            if part and nbytes > part:
                count = -(-nbytes // part)
                parts = {f"{i:05d}": f"{url}/upload/{oid}/{i}" for i in range(1, count + 1)}
                upload = {"href": f"{url}/complete/{oid}", "header": {"chunk_size": str(part), **parts}}
            verify = {"href": f"{self.server.url}/verify/{oid}"}
            objects.append({"oid": oid, "size": nbytes, "actions": {"upload": upload, "verify": verify}})
        raise _Answer(200, {"transfer": "basic", "objects": objects})

    def _upload(self, oid: str, part: str) -> None:
        self._no_token()
        if part == "0":
            self._keep(oid, self.body)
        else:
            self.server.parts.setdefault(oid, {})[int(part)] = self.body
        raise _Answer(200, b"", {"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})

    def _complete(self, oid: str) -> None:
        held = self.server.parts.get(oid, {})
        self._keep(oid, b"".join(held[part["partNumber"]] for part in json.loads(self.body)["parts"]))
        raise _Answer(200, {})

    def _keep(self, oid: str, data: bytes) -> None:
        if hashlib.sha256(data).hexdigest() != oid:
            raise _refusal(400, "the digest does not match")
        self.server.objects[oid] = File("x.bin", data)

    def _verify(self, oid: str) -> None:
        held = self.server.objects.get(oid)
        if held is None or held.nbytes != json.loads(self.body)["size"]:
            raise _refusal(404, "no such object")
        raise _Answer(200, {})

    def _commit(self, name: str, revision: str) -> None:
        repo = self._repo(name)
        is_pull = "create_pr" in self.query
        if not is_pull and not revision.startswith("refs/pr/"):
            self._check_write(name)
        lines = [json.loads(line) for line in self.body.splitlines()]
        header = lines[0]["value"]
        head = self._commit_id(repo, revision)
        if header.get("parentCommit", head) != head:
            raise _refusal(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repo.commits[head])
        for line in lines[1:]:
            self._apply(files, line["key"], line["value"])
        ref = f"refs/pr/{len(repo.pulls) + 1}" if is_pull else revision
        oid = repo.commit(files, header["summary"], ref)
        answer = {"commitUrl": f"{self.server.url}/{name}/commit/{oid}", "commitOid": oid}
        if is_pull:
            repo.pulls.append(header["summary"])
            answer["pullRequestUrl"] = f"{self.server.url}/{name}/discussions/{len(repo.pulls)}"
        raise _Answer(200, answer)

    def _apply(self, files: dict[str, File], key: str, value: Mapping[str, Any]) -> None:
        path = value["path"]
        if key == "file":
            files[path] = File(path, base64.b64decode(value["content"]))
        elif key == "lfsFile":
            if value["oid"] in self.server.chunked:
                self.server.objects[value["oid"]] = File(path, self.server.chunked[value["oid"]])
            if value["oid"] not in self.server.objects:
                raise _refusal(400, f"{path}: its LFS object was never uploaded")
            files[path] = File(path, self.server.objects[value["oid"]].data)
        elif key == "deletedFile" and files.pop(path, None) is None:
            raise _refusal(404, "A file with this name doesn't exist", "EntryNotFound")

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repo = self._repo(name)
        oid = self._commit_id(repo, revision)
        self._check_gate(repo)
        file = repo.commits[oid].get(path)
        headers = {"X-Repo-Commit": oid}
        if file is None:
            raise _Answer(404, {"error": "Entry not found"}, headers | {"X-Error-Code": "EntryNotFound"})
        if file.is_lfs:
            user = self._user()
            who = user.name if user else ""
            where = f"{self.server.storage_url}/storage/{file.sha256}/{who}/{name}/resolve/{oid}/{path}"
            linked = {"X-Linked-ETag": f'"{file.etag}"', "X-Linked-Size": str(file.nbytes)}
            raise _Answer(302, b"", headers | linked | {"Location": where})
        self._content(file, headers)

    def _storage(self, sha256: str, _: str) -> None:
        self._no_token()
        self._content(self.server.objects[sha256], {})

    def _content(self, file: File, headers: dict[str, str]) -> None:
        headers = headers | {"ETag": f'"{file.etag}"', "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if not asked:
            if self.command == "GET" and file.nbytes > len(file.data):
                raise _refusal(500, "the payload of this file is never served")
            raise _Answer(200, file.data, headers | {"Content-Type": "application/octet-stream"})
        start, end = int(asked[1]), min(int(asked[2] or file.nbytes - 1), file.nbytes - 1)
        if end >= len(file.data):
            raise _refusal(500, "the payload of this file is never served")
        span = {"Content-Range": f"bytes {start}-{end}/{file.nbytes}", "Content-Type": "application/octet-stream"}
        raise _Answer(206, file.data[start : end + 1], headers | span)

    def _no_token(self) -> None:
        if self.headers.get("Authorization"):
            raise _refusal(400, "a token was sent to the storage host")


_REPO = r"([\w.-]+/[\w.-]+)"
_ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("GET", r"/api/whoami-v2", _Handler._whoami),
    ("POST", r"/api/repos/create", _Handler._create),
    ("POST", r"/api/validate-yaml", _Handler._card),
    ("GET", rf"/api/models/{_REPO}/auth-check(/write)?", _Handler._auth_check),
    ("PUT", rf"/api/models/{_REPO}/settings", _Handler._settings),
    ("POST", rf"/api/models/{_REPO}/branch/(.+)", _Handler._branch),
    ("GET", rf"/api/models/{_REPO}(?:/revision/(.+))?", _Handler._info),
    ("GET", rf"/api/models/{_REPO}/tree/(.+)", _Handler._tree),
    ("POST", rf"/api/models/{_REPO}/preupload/(.+)", _Handler._preupload),
    ("GET", rf"/api/models/{_REPO}/xet-write-token/(.+)", _Handler._chunk_token),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _Handler._lfs_batch),
    ("PUT", r"/upload/(\w+)/(\d+)", _Handler._upload),
    ("POST", r"/complete/(\w+)", _Handler._complete),
    ("POST", r"/verify/(\w+)", _Handler._verify),
    ("POST", rf"/api/models/{_REPO}/commit/(.+)", _Handler._commit),
    ("GET HEAD", rf"/{_REPO}/resolve/(refs/pr/\d+|[^/]+)/(.+)", _Handler._resolve),
    ("GET HEAD", r"/storage/(\w+)/(.*)", _Handler._storage),
]
