"""What the Hub's client is asked and told: tokens that never show, content fetched once, gates, reasons."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hub_clients
import pytest
import small_sets
import toys
from stand_in_hub import File, Repo, StandInHub

import loader
import shardconv
from shardconv import CheckpointError, HubError, SetError, UsageError
from shardconv.cli.main import main
from shardconv.errors import as_one
from shardconv.hub_errors import without_secrets

REPO = "org/tiny-tp"
SOURCE = "their/flux"
RANK = "transformer/tp1/rank-00000-of-00001.safetensors"


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.fixture
def filled(hub: StandInHub, client: Any) -> Repo:
    """A repo whose component `transformer` has a set for one rank."""
    out = small_sets.converted("flux", 1)
    paths = [path for path in out.rglob("*") if path.is_file()]
    return hub.add_repo(REPO, {f"transformer/{path.relative_to(out)}": path.read_bytes() for path in paths})


def load(**options: Any) -> Any:
    """The model of the repo, in this process."""
    return loader.load_model(REPO, device="cpu", subfolder="transformer", **options)


# Tokens


@pytest.mark.parametrize("token", ["hf_alice\n", "  hf_alice \r\n", "hf_alice"])
def test_a_token_out_of_a_file_is_taken(hub: StandInHub, filled: Repo, token: str, monkeypatch: Any) -> None:
    """What a file or a variable has around a token does not matter."""
    monkeypatch.delenv("HF_TOKEN")
    filled.private = True
    load(token=token)
    assert {request.user for request in hub.log if "/storage/" not in request.path} == {"alice"}


@pytest.mark.parametrize("token", ["", " \n", None, True])
def test_no_token_is_the_saved_one(hub: StandInHub, filled: Repo, token: Any) -> None:
    """An empty token, None and True stand for the one that is saved."""
    filled.private = True
    load(token=token)


def test_false_sends_none(hub: StandInHub, filled: Repo) -> None:
    """`token=False` asks as nobody."""
    load(token=False)
    assert {request.user for request in hub.log} == {""}
    filled.private = True
    with pytest.raises(HubError, match="log in"):
        load(token=False, revision="main")


def test_true_without_a_saved_one_says_how_to_log_in(hub: StandInHub, filled: Repo, monkeypatch: Any) -> None:
    """`token=True` where nobody is logged in, and any error with it, is an ordinary error of the Hub."""
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match="hf auth login"):
        load(token=True)
    with pytest.raises(HubError, match="hf auth login"):
        shardconv.push(small_sets.converted("flux", 1), REPO, token=True)


@pytest.mark.parametrize("token", ["hf_ab\ncdefghi", "hf_abcd efghi", "hf_abcdefghü"])
def test_a_token_that_cannot_be_sent_is_not_quoted(filled: Repo, token: str) -> None:
    """What no header can hold is refused before anything is asked, and no part of it is printed."""
    with pytest.raises(UsageError, match=r"^token: expected printable ASCII") as caught:
        load(token=token)
    for part in token.split():
        assert part not in str(caught.value)


@pytest.mark.parametrize("secret", ["hf_secret12345", "plain/se+cret=7", "tok'en\"9\\8"])
def test_a_secret_is_blotted_out_in_every_form(secret: str) -> None:
    """As it is, as Python prints it in text and in bytes, in a URL, with a newline, twice in a line."""
    from base64 import b64encode
    from urllib.parse import quote

    line = f"{secret + chr(10)!r} {secret.encode()!r} {secret!r} {quote(secret, safe='')} {b64encode(secret.encode())}"
    told = without_secrets(f"Bearer {secret}: {line} {secret}{secret}", (f"{secret}\n",))
    for form in (secret, repr(secret)[1:-1], quote(secret, safe=""), b64encode(secret.encode()).decode()):
        assert form not in told
    assert "***" in told


def test_an_unknown_token_is_blotted_out_too() -> None:
    """What looks like a token of the Hub is never printed, whoever's it is; other words stay."""
    assert without_secrets("b'Bearer hf_AbCdEfGh12' hf_hub and hf_transfer1", ()) == "b'***' hf_hub and ***"


@pytest.mark.slow
def test_no_traceback_shows_a_token(hub: StandInHub, tmp_path: Path) -> None:
    """With SHARDCONV_DEBUG=1 the whole traceback of a failed request is free of the token."""
    settings = hub.settings(tmp_path, token="hf_mallory_12345") | {"SHARDCONV_DEBUG": "1"}
    done = hub_clients.command(settings, "convert", "--tp", "2", "org/nope", tmp_path / "out")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "mallory" not in done.stderr


# What is fetched


def test_a_commit_that_changes_nothing_else_costs_nothing(hub: StandInHub, filled: Repo) -> None:
    """After a commit of a card, and of a set of another degree, the files that did not change are not sent again."""
    load()
    filled.commit(filled.files() | {"README.md": File("README.md", b"card"), "tp8/x": File("tp8/x", b"1")}, "more")
    hub.log.clear()
    load()
    assert hub.fetched(REPO) == []
    load(force_download=True)
    assert RANK in hub.fetched(REPO)


def test_a_changed_file_is_fetched_and_compared(hub: StandInHub, filled: Repo) -> None:
    """Only what a commit changes is sent; when it arrives altered it is thrown away."""
    load()
    hub.log.clear()
    changed = File(RANK, filled.files()[RANK].data + b"1")
    hub.objects[changed.sha256] = changed
    filled.commit(filled.files() | {RANK: changed}, "other weights")
    hub.fail("GET", "/storage/", edit=lambda data: data[:-1] + b"?")
    with pytest.raises(HubError, match="arrived altered"):
        load()
    with pytest.raises(SetError):  # it is no file of the set, but it is what the Hub has
        load()
    assert hub.fetched(REPO) == [RANK, RANK]


def test_content_of_the_wrong_length_is_fetched_again(hub: StandInHub, filled: Repo, client: Any) -> None:
    """A file of the cache that became short is fetched again, under the commit it came with and under a later one."""
    expected = load(transfer="read").state_dict()
    for number in range(2):
        [blob] = {path.resolve() for path in Path(client["HF_HOME"]).glob(f"hub/*/snapshots/*/{RANK}")}
        os.truncate(blob, 5000)
        if number:
            filled.commit(filled.files() | {"README.md": File("README.md", b"card")}, "card")
        hub.log.clear()
        found = load(transfer="read").state_dict()
        assert hub.fetched(REPO) == [RANK]
        assert all(tensor.equal(expected[name]) for name, tensor in found.items())


LOAD = """
import sys, loader
loader.load_model(sys.argv[1], device="cpu", subfolder="transformer")
"""


@pytest.mark.slow
def test_two_groups_of_a_node_fetch_once(hub: StandInHub, filled: Repo, tmp_path: Path) -> None:
    """Two groups that start together with an empty cache: each file is sent once."""
    environment = hub_clients.environment(hub.settings(tmp_path / "home"))
    starting = [subprocess.Popen([sys.executable, "-c", LOAD, REPO], env=environment) for _ in range(2)]
    assert [process.wait(120) for process in starting] == [0, 0]
    fetched = [name for name in hub.fetched(REPO) if name.endswith(".safetensors")]
    assert len(fetched) == len(set(fetched)) > 0


def test_what_is_not_in_the_cache_is_named(filled: Repo, client: Any) -> None:
    """`local_files_only` with a file missing speaks of that file and of no option that nobody gave."""
    load()
    [link] = Path(client["HF_HOME"]).glob(f"hub/*/snapshots/*/{RANK}")
    link.unlink()
    with pytest.raises(HubError, match=f"{RANK}: not in the cache") as caught:
        load(local_files_only=True)
    assert "force" not in str(caught.value)
    with pytest.raises(UsageError, match="force_download: fetches afresh, which local_files_only forbids"):
        load(local_files_only=True, force_download=True)


# Gates


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A set whose manifest says that it came from SOURCE."""
    folder = tmp_path / "out"
    shardconv.convert(small_sets.source("flux"), folder, tp=2)
    manifest = shardconv.Manifest.read(folder / "tp2")
    source = replace(manifest.source, repo=SOURCE, revision="0" * 40)
    (folder / "tp2" / "shardconv.json").write_text(replace(manifest, source=source).to_json())
    return folder


def pushed(repo: Repo) -> bool:
    """Whether a reader of the repo finds weights."""
    return any(name.endswith(".safetensors") for name in repo.files())


@pytest.mark.parametrize(("gate", "there"), [("auto", ""), ("manual", ""), ("manual", "auto")])
def test_a_gated_source_is_not_published_more_openly(
    hub: StandInHub, client: Any, out: Path, gate: str, there: str
) -> None:
    """A repo that exists and is gated less than the source is refused, at every push, before anything is sent; gated
    alike or more it is taken."""
    hub.add_repo(SOURCE, gated=gate)
    repo = hub.add_repo(REPO, {"theirs": b"1"}, gated=there)
    for dry_run in (True, False):
        with pytest.raises(HubError, match=rf"to {SOURCE}, which its weights come from, it is gated \({gate}\)"):
            shardconv.push(out, REPO, dry_run=dry_run)
    assert not pushed(repo)
    repo.gated = "manual"
    shardconv.push(out, REPO)
    assert pushed(repo)


def test_a_gate_that_failed_once_is_closed_by_the_next_push(hub: StandInHub, client: Any, out: Path) -> None:
    """The repo is created, gating it fails: nothing was sent, and the next push gates it first."""
    hub.add_repo(SOURCE, gated="auto")
    hub.fail("PUT", "/settings", status=403, text="not now")
    with pytest.raises(HubError, match="not now"):
        shardconv.push(out, REPO)
    assert not pushed(hub.repos[REPO])
    shardconv.push(out, REPO)
    assert hub.repos[REPO].gated == "auto"
    paths = [request.path for request in hub.log if request.method not in ("GET", "HEAD")]
    assert paths.index(f"/api/models/{REPO}/settings") < next(i for i, path in enumerate(paths) if "/upload/" in path)


def test_a_source_that_cannot_be_asked_is_taken_for_gated(hub: StandInHub, client: Any, out: Path) -> None:
    """The source is gone, or not ours to see: refused with the reason, unless the target is gated already."""
    repo = hub.add_repo(REPO)
    with pytest.raises(HubError, match=f"whether access to {SOURCE}, .* is gated cannot be known .*not found"):
        shardconv.push(out, REPO)
    assert not pushed(repo)
    repo.gated = "auto"
    shardconv.push(out, REPO)
    assert pushed(repo)


# Reasons


def test_a_mirror_that_leaves_headers_out_is_told_so(hub: StandInHub, filled: Repo) -> None:
    """A server whose answers lack what the Hub's have: the client's own reason arrives, not advice on a network."""
    hub.fail("HEAD", "/resolve/", times=100, drop=("X-Repo-Commit", "ETag", "X-Linked-ETag"))
    with pytest.raises(HubError, match=r"does not answer as the Hub does .*check HF_ENDPOINT"):
        load()


def test_the_kind_of_a_fault_survives() -> None:
    """What kind of refusal it was is still known after joining and pickling."""
    errors = [HubError("a: gated"), HubError("b: gated")]
    for error in errors:
        error.kind = "gated"
    joined = as_one(errors, CheckpointError)
    assert (joined.issues, joined.kind) == (("a: gated", "b: gated"), "gated")
    copy = pickle.loads(pickle.dumps(joined))
    assert (type(copy), copy.issues, copy.kind, str(copy)) == (HubError, joined.issues, "gated", str(joined))
    errors[0].kind = "no repo"
    assert as_one(errors, CheckpointError).kind == ""


def test_a_revision_is_named(hub: StandInHub, filled: Repo, tmp_path: Path, capsys: Any) -> None:
    """Every way to a repo says which revision it does not have."""
    with pytest.raises(HubError, match="no revision 'v9' in the repo"):
        load(revision="v9")
    assert main(["convert", "--tp", "2", "--revision", "v9", REPO, str(tmp_path / "out")]) == 1
    assert "no revision 'v9' in the repo" in capsys.readouterr().err


# Damaged repos


def test_a_set_without_rank_files_is_left_off_the_card(hub: StandInHub, client: Any, out: Path, capsys: Any) -> None:
    """A manifest alone, beside what is pushed: one sentence, no crash, and the card does not offer it."""
    hub.add_repo(SOURCE)
    shardconv.push(out, REPO)
    repo = hub.repos[REPO]
    files = repo.files()
    shardconv.reshard(out, out, tp=4)
    manifest = (out / "tp4" / "shardconv.json").read_bytes()
    repo.commit(files | {"tp4/shardconv.json": File("x", manifest)}, "half a set")
    assert main(["push", "--degrees", "2", str(out), REPO]) == 0
    assert f"{REPO}: tp4 lacks rank files" in capsys.readouterr().err
    assert "| 4 |" not in repo.files()["README.md"].data.decode()


def test_a_remote_manifest_is_bounded(hub: StandInHub, client: Any, out: Path) -> None:
    """A manifest of a repo that is longer than any of ours is not read."""
    hub.add_repo(SOURCE)
    hub.add_repo(REPO, {"tp8/shardconv.json": File("x", b"{}", nbytes=200_000_000)})
    with pytest.raises(HubError, match=r"tp8/shardconv.json: 200,000,000 bytes, at most 100,000,000 are read"):
        shardconv.push(out, REPO)


@pytest.mark.parametrize("name", [".DS_Store", ".nfs0001", ".shardconv.json.swp", "._rank"])
def test_hidden_files_are_never_sent_and_stop_nothing(
    hub: StandInHub, client: Any, out: Path, name: str, capsys: Any
) -> None:
    """What a system or an editor leaves in a set's folder is said in a line, by verify and by push, and stays here; a
    visible file that is none of the set's is refused; convert, reshard and merge do not mind either."""
    hub.add_repo(SOURCE)
    (out / "tp2" / name).write_bytes(b"private")
    assert main(["verify", str(out)]) == 0
    assert f"{out / 'tp2'}: {name} ignored" in capsys.readouterr().err
    assert main(["push", str(out), REPO]) == 0
    assert capsys.readouterr().err.count(f"{name} not sent") == 1
    assert not [each for each in hub.repos[REPO].files() if name in each]
    source = small_sets.source("flux")
    shardconv.convert(source, out, tp=2, self_contained=True, overwrite=True)
    shardconv.reshard(out, out, tp=4)
    shardconv.merge(out, out.parent / "merged")
    (out / "tp4" / "notes.txt").write_bytes(b"")
    assert main(["verify", "--quiet", str(out)]) == 1


@pytest.mark.parametrize("option", ["--dry-run", "--low-disk", "--quiet"])
def test_a_faulty_repo_is_told_by_its_own_names(
    hub: StandInHub, client: Any, tmp_path: Path, option: str, capsys: Any
) -> None:
    """Faults of a repo's files name the repo, the commit and the file, never a folder on this disk."""
    source = toys.save(toys.small_models.build("flux"), tmp_path / "source", max_shard_size="2MB")
    repo = hub.add_folder(SOURCE, source)
    whole = repo.files()

    def said(files: dict[str, File]) -> str:
        commit = repo.commit(files, "damaged")
        assert main(["convert", "--tp", "2", option, SOURCE, str(tmp_path / "out")]) == 1
        text = capsys.readouterr().err
        assert str(tmp_path) not in text
        assert "/tmp" not in text
        assert re.search(rf"{SOURCE}(/\S*)? at {commit[:7]}|{SOURCE}: .*\.safetensors: the repo has no such file", text)
        return text

    shard = next(name for name in whole if name.endswith(".safetensors"))
    assert shard in said({name: file for name, file in whole.items() if name != shard})
    assert "config.json" in said(whole | {"config.json": File("config.json", b"{")})
    assert shard in said(whole | {shard: File("x", b"<!DOCTYPE html>" * 100)})
    pickled = {name: file for name, file in whole.items() if "safetensors" not in name}
    text = said(pickled | {"diffusion_pytorch_model.bin": File("x", b"weights")})
    assert "only pickled weights (diffusion_pytorch_model.bin), expected safetensors" in text
