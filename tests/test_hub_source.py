"""A Hub repo as SOURCE, against a stand-in Hub on this machine: what is downloaded, recorded and refused."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest
import toys
from small_pipelines import build_flux_pipeline

from shardconv import Manifest, convert

REPO = "org/tiny"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StandInHub(ThreadingHTTPServer):
    """Serves one repo, the files under `folder`, at one commit; `log` holds every request as "METHOD path"."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.log: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())

    def fetched(self) -> set[str]:
        """Names of the files whose content was asked for."""
        found = (re.fullmatch(rf"GET /{REPO}/resolve/{COMMIT}/(.*)", line) for line in self.log)
        return {match[1] for match in found if match}


class _Handler(BaseHTTPRequestHandler):
    server: StandInHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """The log is the server's."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.log.append(f"{self.command} {path}")
        files = self.server.files()
        resolve, api = f"/{REPO}/resolve/", f"/api/models/{REPO}"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            self._json({"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]})
        elif path == f"{api}/tree/{COMMIT}":
            self._json([self._entry(name) for name in files])
        elif path.startswith(resolve) and path.removeprefix(resolve).partition("/")[2] in files:
            self._file(path.removeprefix(resolve).partition("/")[2])
        else:
            code = "EntryNotFound" if path.startswith(resolve) else "RepoNotFound"
            self._json({"error": "Not found"}, 404, {"X-Error-Code": code})

    def _entry(self, name: str) -> dict[str, object]:
        data = (self.server.folder / name).read_bytes()
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def _file(self, name: str) -> None:
        data = (self.server.folder / name).read_bytes()
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        self._send(200, data, {"ETag": etag, "X-Repo-Commit": COMMIT, "Content-Type": "application/octet-stream"})

    def _json(self, document: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(document).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repo's files: a small FluxPipeline with a variant, stale weights beside the index and a root-level file."""
    folder = tmp_path_factory.mktemp("repo") / "tiny"
    build_flux_pipeline().save_pretrained(folder, max_shard_size="2MB")
    toys.small_models.build("flux", 5).save_pretrained(folder / "transformer", variant="fp16", max_shard_size="2MB")
    toys.write_weights(folder / "transformer" / toys.SINGLE, {})
    (folder / "flux1-dev.safetensors").write_bytes(b"never fetched")
    (folder / "README.md").write_text("card")
    return folder


@pytest.fixture
def hub(pipe: Path) -> Iterator[StandInHub]:
    server = StandInHub(pipe)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(endpoint: str, home: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own: the Hub's client reads its endpoint when it is imported."""
    settings = {
        "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1", "HF_TOKEN": "hf_secret",
        "NO_PROXY": "*",
    }  # fmt: skip
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    command = [sys.executable, "-m", "shardconv", *argv]
    return subprocess.run(command, env=kept | settings, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_only_what_a_conversion_needs_is_downloaded(hub: StandInHub, pipe: Path, tmp_path: Path) -> None:
    """`--subfolder` of a repo fetches that component's config, index and shards, and converts them as from disk.

    The manifest records the repo and the commit; the second run finds all of it in the cache.
    """
    out = tmp_path / "out"
    argv = ["convert", "--tp", "2", REPO, str(out), "--subfolder", "transformer"]
    done = run(hub.url, tmp_path / "home", *argv)
    assert done.returncode == 0, done.stderr
    index = json.loads((pipe / "transformer" / toys.INDEX).read_text())
    needed = {"config.json", toys.INDEX, *index["weight_map"].values()}
    assert hub.fetched() == {f"transformer/{name}" for name in needed}
    source = Manifest.read(out / "transformer" / "tp2").source
    assert (source.repo, source.revision, source.subfolder, source.variant) == (REPO, COMMIT, "transformer", None)
    with pytest.warns(match="ignored beside it"):  # the variant and the stale file, which a repo's snapshot lacks
        convert(pipe, tmp_path / "local", tp=2, subfolder="transformer")
    for path in (tmp_path / "local" / "transformer" / "tp2").glob("*.safetensors"):
        assert path.read_bytes() == (out / "transformer" / "tp2" / path.name).read_bytes()
    hub.log.clear()
    again = run(hub.url, tmp_path / "home", *argv, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["sets"][0]["already_there"] is True
    assert hub.fetched() == set()


@pytest.mark.slow
def test_b4_only_the_variant_is_downloaded(hub: StandInHub, pipe: Path, tmp_path: Path) -> None:
    """With `--variant` the default weights of the component stay on the Hub."""
    out = tmp_path / "out"
    argv = ["convert", "--tp", "2", REPO, str(out), "--subfolder", "transformer", "--variant", "fp16"]
    done = run(hub.url, tmp_path / "home", *argv)
    assert done.returncode == 0, done.stderr
    index_name = f"{toys.STEM}.safetensors.index.fp16.json"
    index = json.loads((pipe / "transformer" / index_name).read_text())
    needed = {"config.json", index_name, *index["weight_map"].values()}
    assert hub.fetched() == {f"transformer/{name}" for name in needed}
    assert Manifest.read(out / "transformer" / "tp2").source.variant == "fp16"


@pytest.mark.slow
def test_a_whole_pipeline_is_converted_without_its_root_level_weights(
    hub: StandInHub, pipe: Path, tmp_path: Path
) -> None:
    """A pipeline repo brings every component, real files instead of links, and no original-format file."""
    out = tmp_path / "out"
    done = run(hub.url, tmp_path / "home", "convert", "--tp", "2", REPO, str(out))
    assert done.returncode == 0, done.stderr
    assert "flux1-dev.safetensors" not in hub.fetched()
    assert f"transformer/{toys.SINGLE}" not in hub.fetched()
    assert not any(path.is_symlink() for path in out.rglob("*"))
    for path in (pipe / "vae").iterdir():
        assert (out / "vae" / path.name).read_bytes() == path.read_bytes()


def refusal(done: subprocess.CompletedProcess[str], out: Path) -> str:
    """The one line that a failed conversion says; nothing was written and the token is not in it."""
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("shardconv: ")
    assert "hf_secret" not in done.stderr
    assert not out.exists()
    return done.stderr


@pytest.mark.slow
def test_h9_a_repo_that_is_not_there_is_one_clear_error(hub: StandInHub, tmp_path: Path) -> None:
    """An unknown repo: its name, that it is no folder here either, and that the Hub has no such repo."""
    out = tmp_path / "out"
    said = refusal(run(hub.url, tmp_path / "home", "convert", "--tp", "2", "org/nope", str(out)), out)
    assert said.startswith("shardconv: org/nope: not a folder here, and the Hub says: ")
    assert "repository not found" in said.lower()


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_one_clear_error(tmp_path: Path) -> None:
    """Without a network the message names the repo and the failed connection."""
    out = tmp_path / "out"
    said = refusal(run("http://127.0.0.1:9", tmp_path / "home", "convert", "--tp", "2", REPO, str(out)), out)
    assert said.startswith(f"shardconv: {REPO}: ")
    assert "connect" in said.lower()


@pytest.mark.slow
def test_a_component_that_the_repo_lacks_is_one_clear_error(hub: StandInHub, tmp_path: Path) -> None:
    """A mistyped component is refused before anything is downloaded."""
    out = tmp_path / "out"
    argv = ["convert", "--tp", "2", REPO, str(out), "--subfolder", "transfromer"]
    said = refusal(run(hub.url, tmp_path / "home", *argv), out)
    assert "transfromer" in said
    assert hub.fetched() == set()
