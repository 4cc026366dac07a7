"""What we use of the Hub's client that it does not promise, or names otherwise in other versions."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path

import huggingface_hub
import pytest
from contracts import Name, found
from huggingface_hub import errors, hf_api
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import build_hf_headers, get_session

from shardconv.remote import failures
from shardconv.remote.hub_cache import Cache

HUB, FAILURES = "shardconv/remote/hub.py", "shardconv/remote/failures.py"
PUBLISH = "shardconv/remote/publish.py"
API = "huggingface_hub.HfApi"
FETCH = ("repo_id", "filename", "revision", "cache_dir", "force_download", "local_dir")
COMMIT = ("repo_id", "operations", "commit_message", "revision", "parent_commit", "create_pr")
NAMES = [
    Name(API, HUB, ("token",)),
    Name(f"{API}.model_info", HUB, ("repo_id", "revision", "files_metadata")),
    Name(f"{API}.hf_hub_download", HUB, FETCH),
    Name(f"{API}.snapshot_download", HUB, ("repo_id", "revision", "cache_dir", "local_files_only", "allow_patterns")),
    Name(f"{API}.whoami", PUBLISH),
    Name(f"{API}.auth_check", PUBLISH, ("repo_id",)),
    Name(f"{API}.create_repo", PUBLISH, ("repo_id", "private", "exist_ok")),
    Name(f"{API}.update_repo_settings", PUBLISH, ("repo_id", "gated")),
    Name(f"{API}.create_branch", PUBLISH, ("repo_id", "branch", "exist_ok")),
    Name(f"{API}.preupload_lfs_files", PUBLISH, ("repo_id", "additions", "revision", "create_pr", "free_memory")),
    Name(f"{API}.create_commit", PUBLISH, COMMIT),
    Name("huggingface_hub.CommitOperationAdd", PUBLISH, ("path_in_repo", "path_or_fileobj")),
    Name("huggingface_hub.CommitOperationDelete", PUBLISH, ("path_in_repo", "is_folder")),
    Name("huggingface_hub.ModelCard", PUBLISH, ("content", "ignore_metadata_errors")),
    Name("huggingface_hub.ModelCardData.to_yaml", PUBLISH),
    Name("huggingface_hub.hf_hub_url", HUB, ("repo_id", "filename", "revision", "endpoint")),
    Name("huggingface_hub.get_token", HUB),
    Name("huggingface_hub.utils.build_hf_headers", HUB, ("token",)),
    Name("huggingface_hub.utils.get_session", HUB),
    Name("huggingface_hub.utils.hf_raise_for_status", HUB, ("response",)),
    Name("huggingface_hub.utils.tqdm", HUB),
    Name("huggingface_hub.constants.HF_HUB_CACHE", HUB),
    Name("huggingface_hub.constants.HF_HUB_OFFLINE", HUB),
    Name("huggingface_hub.constants.HF_TOKEN_PATH", HUB),
]
# Told apart by the names of their classes, as text.
FAULTS = [
    "GatedRepoError", "RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError",
    "RemoteEntryNotFoundError", "OfflineModeIsEnabled", "LocalEntryNotFoundError", "FileMetadataError",
    "LocalTokenNotFoundError",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_each_name_stands(name: Name) -> None:
    """The name is there, takes what we pass, and is used where the table says."""
    name.check()


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_has_its_name(name: str) -> None:
    """An error of another name would get a vaguer sentence."""
    assert hasattr(errors, name), f"huggingface_hub.errors.{name} is gone; {FAILURES} knows it by this name"
    assert name in inspect.getsource(failures), f"{FAILURES} does not ask for {name} any more: remove it"


def test_the_hub_s_own_words_are_told() -> None:
    """An answer that is an error has the server's message, and the answer with its status."""
    for name in ("server_message", "response"):
        told = name in inspect.getsource(errors.HfHubHTTPError)
        assert told, f"huggingface_hub.errors.HfHubHTTPError.{name} is gone; {FAILURES} reads it"


def test_a_broken_connection_has_its_name() -> None:
    """Whatever HTTP library the client stands on: its errors have the names by which we try again."""
    library = sys.modules[type(get_session()).__module__.partition(".")[0]]
    for name in (*failures._BROKEN, "HTTPError"):
        cls = getattr(library, name, None)
        assert cls is not None, f"{library.__name__}.{name} is gone; {FAILURES} knows it by this name"
        assert "HTTPError" in {base.__name__ for base in cls.__mro__}, f"{library.__name__}.{name} is no HTTPError"


def test_an_answer_can_be_read_in_parts() -> None:
    """`get_session().stream(...)` gives an answer whose bytes come piece by piece (`Repo.read_start`)."""
    session = get_session()
    taken = inspect.signature(session.stream).parameters
    assert {"method", "url", "headers", "timeout"} <= taken.keys(), f"get_session().stream changed; {HUB} calls it"
    answer = found(f"{type(session).__module__.partition('.')[0]}.Response", HUB)
    assert hasattr(answer, "iter_bytes"), f"Response.iter_bytes is gone; {HUB} reads by it"


def test_headers_carry_the_token() -> None:
    """shardconv/remote/tokens.py looks whether what is sent as authorization can be sent."""
    assert build_hf_headers(token="hf_x")["authorization"] == "Bearer hf_x", "build_hf_headers(token=...)"


@pytest.mark.parametrize(
    ("record", "names"),
    [
        ("ModelInfo", ("sha", "siblings", "gated", "private")),
        ("CommitInfo", ("oid", "pr_revision", "pr_url", "commit_url")),
    ],
)
def test_records_have_what_we_read(record: str, names: tuple[str, ...]) -> None:
    """Of a repo: commit, files, who may read it; of a commit: itself and where it shows."""
    cls = found(f"huggingface_hub.hf_api.{record}", HUB)
    held = {field.name for field in dataclasses.fields(cls)} | set(dir(cls)) | set(cls.__annotations__)
    missing = [name for name in names if name not in held]
    assert not missing, f"huggingface_hub.{record}.{', '.join(missing)} is gone; {HUB} reads it"


def test_files_have_name_length_and_digest() -> None:
    """Of a file: its name, length, and the digest of git or of what stores large files."""
    large = {"sha256": "5" * 64, "size": 7, "pointerSize": 130}
    info = hf_api.ModelInfo(
        id="org/x", siblings=[{"rfilename": "w.safetensors", "size": 7, "blobId": "b" * 40, "lfs": large}]
    )
    (file,) = info.siblings or []
    told = (file.rfilename, file.size, file.blob_id, file.lfs and file.lfs.sha256, file.lfs and file.lfs.size)
    assert told == ("w.safetensors", 7, "b" * 40, "5" * 64, 7), f"RepoSibling changed; {HUB} reads it"


def test_what_is_sent_knows_its_length() -> None:
    """`CommitOperationAdd` has read the start and the length of its file (`Repo.upload`)."""
    addition = huggingface_hub.CommitOperationAdd("x", b"1234")
    assert addition.upload_info.size == 4, f"CommitOperationAdd.upload_info.size; {HUB} sends small files together"
    assert addition.path_in_repo == "x", f"CommitOperationAdd.path_in_repo; {HUB} tells it"


def test_a_card_keeps_what_is_said_of_the_model() -> None:
    """The front matter of a card goes in and out as a dict."""
    card = huggingface_hub.ModelCard("---\nlicense: mit\n---\n# x\n", ignore_metadata_errors=True)
    assert card.data.to_dict() == {"license": "mit"}, f"ModelCard.data.to_dict; {HUB} reads cards by it"
    assert huggingface_hub.ModelCardData(license="mit").to_yaml() == "license: mit", "ModelCardData.to_yaml"


def test_the_cache_is_laid_out_as_we_look() -> None:
    """A repo's folder in the cache has the name that shardconv/remote/hub_cache.py makes."""
    folder = repo_folder_name(repo_id="org/name", repo_type="model")
    assert Cache.of("org/name", Path("cache")).folder.name == folder, "a repo's folder in the client's cache"
