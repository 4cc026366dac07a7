"""What the Hub's client is asked and told: tokens that never show, content fetched once, gates, reasons."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hub_clients
import huggingface_hub
import pytest
import small_sets
import toys
from stand_in_hub import File, Repo, StandInHub

import loader
import shardconv
from shardconv import CheckpointError, HubError, SetError, UsageError
from shardconv.cli.main import main
from shardconv.errors import as_one
from shardconv.tokens import without_secrets

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
    """What looks like a token of the Hub is never printed, whoever's it is, nor passwords in addresses and signed
    queries; other words, and repos that are called so, stay."""
    words = "hf_hub_download org/hf_internal_testing_model hf_transfer1"
    assert without_secrets(f"b'Bearer hf_AbCdEfGh12' {words} hf_{'aB3' * 11}", ()) == f"b'***' {words} ***"
    address = "https://me:word@mirror.org/x?X-Signature=abc&Expires=1 http://127.0.0.1:80/y"
    assert without_secrets(address, ()) == "https://***@mirror.org/x?*** http://127.0.0.1:80/y"


@pytest.mark.parametrize("before", ["", "a", "me", "you"])
@pytest.mark.parametrize("behind", ["", "\n", ":x"])
def test_a_secret_is_blotted_out_in_base64(before: str, behind: str) -> None:
    """Wherever it stands in what was encoded, in either alphabet: nothing of it can be read back."""
    from base64 import b64encode, urlsafe_b64encode

    secret = "hf_a?b>c~9"
    for encode in (b64encode, urlsafe_b64encode):
        coded = encode(f"{before}:{secret}{behind}".encode()).decode()
        assert without_secrets(f"Basic {coded}, says x", (secret,)) == "Basic ***, says x"


@pytest.mark.parametrize("token", [5, b"hf_alice", ["hf_alice"]])
def test_a_token_of_another_kind_is_refused(filled: Repo, token: Any) -> None:
    """Bytes, numbers and lists are no token, and are not quoted."""
    with pytest.raises(
        UsageError, match=r"^token: expected text, True, False or None, found (int|bytes|list)"
    ) as caught:
        load(token=token)
    assert "alice" not in str(caught.value)


def test_a_saved_token_that_cannot_be_had_is_said(hub: StandInHub, filled: Repo, client: Any, monkeypatch: Any) -> None:
    """The file of the login cannot be read, or HF_TOKEN holds what cannot be sent: one sentence, nothing is asked; with
    a token given, and offline, it does not matter."""
    load()
    hub.log.clear()
    monkeypatch.setenv("HF_TOKEN", "hf_\u00e4lice")
    with pytest.raises(HubError, match="holds what no token does; copy it again: hf auth login") as caught:
        load()
    assert "lice" not in str(caught.value)
    monkeypatch.delenv("HF_TOKEN")
    Path(client["HF_HOME"], "token").mkdir()
    with pytest.raises(HubError, match=r"the saved token cannot be had \(.*/token: Is a directory\); log in"):
        load()
    assert hub.log == []
    load(token="hf_alice")
    load(token=False)
    load(local_files_only=True)


def test_pushing_without_a_token_makes_no_sense(hub: StandInHub, client: Any) -> None:
    """`token=False`, or one that cannot be sent, is refused before anything is read."""
    for token, words in ((False, "without one nothing can be pushed"), ("hf_a b", "expected printable ASCII")):
        with pytest.raises(UsageError, match=f"^token: .*{words}"):
            shardconv.push("nowhere", REPO, token=token)


def chain(error: BaseException | None) -> list[str]:
    """The texts of an error and of all that led to it, shown or not."""
    said = []
    while error is not None:
        said += [str(error), repr(error), *map(str, getattr(error, "__notes__", ()))]
        error = error.__cause__ or error.__context__
    return said


@pytest.mark.parametrize("status", [403, 418])
def test_nothing_raised_with_an_error_shows_a_token(
    hub: StandInHub, filled: Repo, client: Any, monkeypatch: Any, status: int
) -> None:
    """A server that repeats the tokens that it could know: the one given, that of HF_TOKEN and the saved one."""
    Path(client["HF_HOME"]).mkdir()
    Path(client["HF_HOME"], "token").write_text("hf_saved12\n")
    hub.users["hf_given34"] = hub.users["hf_alice"]
    secrets = ("hf_given34", "hf_alice", "hf_saved12")
    hub.fail("GET", "/api/models/", status=status, text=f"no {' '.join(secrets)}")
    with pytest.raises(HubError) as caught:
        load(token="hf_given34\n")
    assert not [text for text in chain(caught.value) for secret in secrets if secret in text]


def test_an_unforeseen_fault_comes_with_its_traceback(hub: StandInHub, filled: Repo, monkeypatch: Any) -> None:
    """What the client did is there for SHARDCONV_DEBUG=1, without the token in it."""

    def fail(*args: Any, **options: Any) -> None:
        raise LookupError("hf_alice did what nobody foresaw")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(HubError, match=r"the Hub's client failed \(LookupError: \*\*\* did what") as caught:
        load()
    assert "in fail\n" in str(caught.value.__cause__)
    assert not [text for text in chain(caught.value) if "hf_alice" in text]


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


def test_what_is_not_in_the_cache_is_named(filled: Repo, client: Any, monkeypatch: Any) -> None:
    """`local_files_only`, or HF_HUB_OFFLINE, with files missing names each with repo and commit, says how to fetch it,
    and speaks of no option that nobody gave; one that was given is refused."""
    load()
    commit = filled.refs["main"]
    names, command = ["transformer/config.json", RANK], f"hf download {REPO}"
    for name in names:
        [link] = Path(client["HF_HOME"]).glob(f"hub/*/snapshots/*/{name}")
        link.unlink()
    words = "not in the cache, and the Hub is not asked or does not answer; fetch it once with a network"
    for options, instead in (({"local_files_only": True}, "local_files_only"), ({}, "HF_HUB_OFFLINE")):
        with pytest.raises(HubError) as caught:
            load(**options)
        assert caught.value.issues == tuple(
            f"{REPO} at {commit[:7]}: {name}: {words} (without {instead}, or: {command} {name} --revision {commit})"
            for name in names
        )
        with pytest.raises(UsageError, match=f"force_download: fetches afresh, which {instead} forbids"):
            load(**options, force_download=True)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match=r"org/never at v1: not in the cache, and the Hub is not asked"):
        loader.load_model("org/never", revision="v1", local_files_only=True)


def test_what_another_program_fetched_in_part_is_enough(hub: StandInHub, filled: Repo, client: Any) -> None:
    """A cache that holds what a rank needs and not all of the repo, and knows that, loads offline."""
    filled.commit(filled.files() | {"other/big.bin": File("x", b"of no matter")}, "more")
    huggingface_hub.snapshot_download(REPO, allow_patterns=["transformer/**"])
    hub.log.clear()
    load(local_files_only=True)
    assert hub.log == []


def test_the_first_file_is_compared_too(hub: StandInHub, filled: Repo, client: Any) -> None:
    """The config, which is fetched by the name of the revision, arrives altered: an error, and it does not stay."""
    hub.fail("GET", "/resolve/main/transformer/config.json", edit=lambda data: b"?" + data[1:])
    with pytest.raises(HubError, match=r"transformer/config.json: arrived altered"):
        load()
    assert not list(Path(client["HF_HOME"]).glob("hub/*/snapshots/*/transformer/config.json"))
    load()


def test_force_fetches_each_file_once_from_an_empty_cache_too(hub: StandInHub, filled: Repo) -> None:
    """Also the one that says which commit it is."""
    for _ in range(2):
        hub.log.clear()
        load(force_download=True)
        assert sorted(set(hub.fetched(REPO))) == hub.fetched(REPO)
        assert len(hub.fetched(REPO)) == 4


def test_content_under_another_etag_is_compared(hub: StandInHub, filled: Repo) -> None:
    """A mirror with etags of its own: what the cache has by the Hub's digest is not what arrives."""
    load()
    filled.commit(filled.files() | {"README.md": File("README.md", b"card")}, "card")
    hub.fail("HEAD", f"/resolve/.*{RANK}", times=2, put={"X-Linked-ETag": '"of-the-mirror"'})
    hub.fail("GET", "/storage/", edit=lambda data: data[:-1] + b"?")
    with pytest.raises(HubError, match=f"{RANK}: arrived altered"):
        load()


def test_a_dry_run_counts_what_the_cache_has(hub: StandInHub, client: Any, tmp_path: Path, capsys: Any) -> None:
    """Content that was fetched with another commit would not be downloaded again."""
    source = hub.add_folder(SOURCE, small_sets.source("flux"))
    shardconv.convert(SOURCE, tmp_path / "out", tp=2)
    source.commit(source.files() | {"README.md": File("README.md", b"card")}, "card")
    assert main(["convert", "--tp", "4", "--dry-run", "--json", SOURCE, str(tmp_path / "new")]) == 0
    assert json.loads(capsys.readouterr().out)["download"] == {"README.md": 4}


def test_low_disk_does_not_take_a_shortened_file_of_the_cache(hub: StandInHub, client: Any, tmp_path: Path) -> None:
    """The client would copy it; it is downloaded instead."""
    hub.add_folder(SOURCE, small_sets.source("flux"))
    shardconv.convert(SOURCE, tmp_path / "out", tp=2)
    [link] = Path(client["HF_HOME"]).glob("hub/*/snapshots/*/*.safetensors")
    os.truncate(link.resolve(), 5000)
    shardconv.convert(SOURCE, tmp_path / "new", tp=2, low_disk=True)
    assert toys.contents(tmp_path / "new") == toys.contents(tmp_path / "out")


# Gates


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A set whose manifest says that it came from SOURCE."""
    folder = tmp_path / "out"
    shardconv.convert(small_sets.source("flux"), folder, tp=2)
    come_from(folder, SOURCE)
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
    repo.gated = "auto"  # of whoever accepts its terms: the source may be private
    with pytest.raises(HubError, match=r"gated \(auto\), whether access to .*; log in .* by hand \(manual\)"):
        shardconv.push(out, REPO)
    repo.gated = "manual"
    shardconv.push(out, REPO)
    assert pushed(repo)


def test_a_private_source_is_not_published(hub: StandInHub, client: Any, out: Path) -> None:
    """A private repo's weights go to a private repo, or to one whose readers are chosen by hand; a new one is not made
    public, one that is public is left alone."""
    hub.add_repo("org/secret", private=True)
    come_from(out, "org/secret")
    with pytest.raises(HubError, match=r"would be open, to org/secret, .*, it is private; add --private$"):
        shardconv.push(out, REPO)
    assert REPO not in hub.repos
    for about in ({}, {"gated": "auto"}):
        repo = hub.add_repo(REPO, **about)
        with pytest.raises(HubError, match=r"access to it is .*, it is private; make it private in its settings$"):
            shardconv.push(out, REPO)
        assert not pushed(repo)
    for about in ({"gated": "manual"}, {"private": True}):
        repo = hub.add_repo(REPO, **about)
        shardconv.push(out, REPO)
        assert pushed(repo)
    shardconv.push(out, "org/new", private=True)
    assert hub.repos["org/new"].private


def come_from(out: Path, *sources: str) -> None:
    """Make each set of `out` say that it was converted from one of `sources`, the last one for all that are left."""
    for number, folder in enumerate(sorted(out.glob("**/tp*"))):
        manifest = shardconv.Manifest.read(folder)
        source = replace(manifest.source, repo=sources[min(number, len(sources) - 1)], revision="0" * 40)
        (folder / "shardconv.json").write_text(replace(manifest, source=source).to_json())


def test_a_gated_source_may_go_to_a_private_repo(hub: StandInHub, client: Any, out: Path) -> None:
    """Nobody can read there whom its owner did not let in."""
    hub.add_repo(SOURCE, gated="manual")
    repo = hub.add_repo(REPO, {"theirs": b"1"}, private=True)
    shardconv.push(out, REPO)
    assert pushed(repo)


@pytest.mark.parametrize(
    "fault",
    [
        {"status": 500},
        {"status": 403},
        {"status": 401},
        {"status": 404},
        {"lost": True},
        {"edit": lambda data: data.replace(b'"gated"', b'"other"')},
    ],
)
@pytest.mark.parametrize("options", [{}, {"create_pr": True}, {"revision": "b"}, {"dry_run": True}])
def test_any_fault_of_asking_for_the_gate_closes_it(
    hub: StandInHub, client: Any, out: Path, fault: Any, options: Any
) -> None:
    """Whatever keeps the gate of the source from being known, and wherever the weights would go: nothing is sent, the
    reason is told, and pushing to a private repo is a way to go on."""
    hub.add_repo(SOURCE, gated="auto")
    hub.fail("GET", f"/api/models/{SOURCE}", times=9, **fault)
    hub.add_repo(REPO, {"theirs": b"1"})
    with pytest.raises(HubError, match=rf"whether access to {SOURCE}, .* cannot be known \({SOURCE}: .*private"):
        shardconv.push(out, REPO, **options)
    assert [request.method for request in hub.log if request.method not in ("GET", "HEAD")] == []
    hub.faults.clear()
    hub.fail("GET", f"/api/models/{SOURCE}", times=9, **fault)
    shardconv.push(out, "org/new", private=True)
    assert hub.repos["org/new"].private
    assert pushed(hub.repos["org/new"])


def test_the_strictest_of_several_sources_counts(hub: StandInHub, client: Any, out: Path) -> None:
    """Two sets of two repos: a new repo is gated as the stricter; every source that asks for more is named."""
    shardconv.reshard(out, out, tp=4)
    come_from(out, SOURCE, "their/other")
    hub.add_repo(SOURCE, gated="auto")
    hub.add_repo("their/other", gated="manual")
    shardconv.push(out, "org/new")
    assert hub.repos["org/new"].gated == "manual"
    hub.add_repo(REPO, {"theirs": b"1"})
    with pytest.raises(HubError) as caught:
        shardconv.push(out, REPO)
    assert len(caught.value.issues) == 2


def test_an_empty_repo_is_gated_before_anything_is_sent(hub: StandInHub, client: Any, out: Path) -> None:
    """One that shows nothing yet, and is gated less than it must be."""
    hub.add_repo(SOURCE, gated="manual")
    repo = hub.add_repo(REPO, gated="auto")
    shardconv.push(out, REPO)
    assert (repo.gated, pushed(repo)) == ("manual", True)


def test_a_gate_that_is_not_there_after_all_stops_the_push(
    hub: StandInHub, client: Any, out: Path, monkeypatch: Any
) -> None:
    """The Hub says yes to gating and to privacy, and does neither: looked at before anything is sent."""
    hub.add_repo(SOURCE, gated="auto")
    monkeypatch.setattr(huggingface_hub.HfApi, "update_repo_settings", lambda *args, **options: None)
    with pytest.raises(HubError, match=r"is open, .* it is gated \(auto\); .* \(created, nothing was sent; push again"):
        shardconv.push(out, REPO)
    hub.repos[SOURCE].gated = ""
    monkeypatch.setattr(
        huggingface_hub.HfApi, "create_repo", lambda self, name, **options: hub.add_repo(name, private=False)
    )
    with pytest.raises(HubError, match="expected it to be private, found it open"):
        shardconv.push(out, "org/new", private=True)
    assert not any(map(pushed, hub.repos.values()))


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


def test_a_set_that_lacks_a_file_is_no_set(hub: StandInHub, client: Any, out: Path, capsys: Any) -> None:
    """A repo's set of another degree with one file missing or short is left off the card; to load it is refused by
    what it lacks."""
    hub.add_repo(SOURCE)
    shardconv.reshard(out, out, tp=1)
    shardconv.push(out, REPO)
    repo = hub.repos[REPO]
    for name in ("rank-00000-of-00001.safetensors", "replicated.safetensors"):
        whole, name = repo.files(), f"tp1/{name}"
        for data in (None, b"short"):
            left = {each: file for each, file in whole.items() if each != name}
            repo.commit(left | ({name: File(name, data)} if data else {}), "damage")
            assert main(["push", "--degrees", "2", str(out), REPO]) == 0
            assert f"{REPO}: tp1 lacks" in capsys.readouterr().err
            assert "| (root) | 1 |" not in repo.files()["README.md"].data.decode()
            if not data and name.startswith("tp1/rank"):
                with pytest.raises(SetError, match=rf"{REPO} at \w+: tp1 lacks {name}; push it again, whole"):
                    loader.load_model(REPO, device="cpu")
        repo.commit(whole, "mended")


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda text: text.replace('"F32"', '"F16"', 1), "contradicts itself"),
        (lambda text: text.replace('"version":"', '"version":"9'), "not as it was written"),
        (lambda text: "[" * 100_000, "not JSON"),
        (lambda text: "{}", "not a well-formed manifest"),
    ],
)  # fmt: skip
def test_a_remote_manifest_is_read_as_strictly_as_ours(
    hub: StandInHub, client: Any, out: Path, edit: Any, words: str
) -> None:
    """A manifest in the repo, beside what is pushed, that was edited or damaged: what is wrong and what to do, nothing
    sent."""
    hub.add_repo(SOURCE)
    shardconv.reshard(out, out, tp=4)
    text = (out / "tp4" / "shardconv.json").read_text()
    assert edit(text) != text
    repo = hub.add_repo(REPO, {"tp4/shardconv.json": edit(text).encode()})
    with pytest.raises(SetError, match=rf"^{REPO}: tp4/shardconv.json: {words}.*; push that set again, or remove it"):
        shardconv.push(out, REPO, degrees=[2])
    assert not pushed(repo)


def test_a_card_that_is_no_text_is_named(hub: StandInHub, client: Any, out: Path) -> None:
    """Of the repo or of the folder, in another encoding: which one, before anything is sent."""
    hub.add_repo(SOURCE)
    (out / "README.md").write_bytes("caf\u00e9".encode("latin-1"))
    with pytest.raises(SetError, match=rf"^{out}/README.md: expected text in UTF-8"):
        shardconv.push(out, REPO)
    assert REPO not in hub.repos
    repo = hub.add_repo(REPO, {"README.md": "caf\u00e9".encode("latin-1")})
    with pytest.raises(SetError, match=rf"^{REPO}: README.md: expected text in UTF-8"):
        shardconv.push(out, REPO)
    assert not pushed(repo)


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


@pytest.mark.parametrize("exchange", [True, False])
def test_hidden_files_outlive_a_replaced_set(out: Path, monkeypatch: Any, exchange: bool) -> None:
    """`--overwrite` takes them over, files and folders, as does a second kill-free run; nothing is left beside the
    set, also where the system cannot exchange two folders."""
    if not exchange:
        monkeypatch.setattr("ctypes.CDLL", lambda *args, **options: None)
    (out / "tp2" / ".DS_Store").write_bytes(b"view")
    (out / "tp2" / ".ipynb_checkpoints").mkdir()
    (out / "tp2" / ".ipynb_checkpoints" / "a").write_bytes(b"a")
    for whole in (True, False):
        shardconv.convert(small_sets.source("flux"), out, tp=2, self_contained=whole, overwrite=True)
        assert (out / "tp2" / ".DS_Store").read_bytes() == b"view"
        assert (out / "tp2" / ".ipynb_checkpoints" / "a").read_bytes() == b"a"
        assert sorted(path.name for path in out.iterdir()) == ["config.json", "tp2"]
    shardconv.convert(small_sets.source("flux"), out, tp=2)
    [found] = shardconv.verify(out)
    assert found.ignored == (".DS_Store", ".ipynb_checkpoints")


def test_hidden_files_of_a_killed_replacement_go_back(out: Path) -> None:
    """What a killed process left of the old set is cleared away but for them."""
    old = out / ".tp2.partial"
    shutil.copytree(out / "tp2", old)
    (old / ".DS_Store").write_bytes(b"view")
    shardconv.convert(small_sets.source("flux"), out, tp=2)
    assert (out / "tp2" / ".DS_Store").read_bytes() == b"view"
    assert not old.exists()


def test_hidden_folders_hold_no_sets(hub: StandInHub, client: Any, out: Path, tmp_path: Path, capsys: Any) -> None:
    """A backup or a system's folder with sets in it, in a pipeline or beside a component: not verified, inspected,
    merged, loaded nor sent; hidden files of the other components are not converted."""
    pipe = tmp_path / "pipe"
    for name in ("transformer", ".backup"):
        shutil.copytree(out, pipe / name)
    names = {"transformer": ["diffusers", "FluxTransformer2DModel"], "vae": ["diffusers", "AutoencoderKL"]}
    (pipe / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", **names}))
    (pipe / "vae" / ".cache").mkdir(parents=True)
    for name in ("config.json", ".DS_Store", ".cache/x"):
        (pipe / "vae" / name).write_text("{}")
    (pipe / ".backup" / "tp2" / "replicated.safetensors").write_bytes(b"damaged")
    hub.add_repo(SOURCE)
    assert len(shardconv.verify(pipe)) == 1
    assert main(["inspect", str(pipe)]) == 0
    assert "backup" not in capsys.readouterr().out
    shardconv.push(pipe, REPO)
    assert not [name for name in hub.repos[REPO].files() if "/." in f"/{name}" and name != ".gitattributes"]
    merged = shardconv.merge(pipe, tmp_path / "merged")
    assert sorted(merged) == [
        "model_index.json",
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/config.json",
    ]
    with pytest.raises(SetError, match=r"the set is in transformer; add subfolder='transformer'$"):
        loader.load_model(pipe, device="cpu")


@pytest.fixture
def faulty(hub: StandInHub, client: Any, tmp_path: Path, capsys: Any) -> Any:
    """The files of a pipeline's repo; and what converting says of it with other files: one fault after another."""
    names = {"transformer": ["diffusers", "FluxTransformer2DModel"], "text_encoder": ["transformers", "CLIPTextModel"]}
    source = tmp_path / "source"
    toys.save(toys.small_models.build("flux"), source / "transformer", max_shard_size="2MB")
    (source / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", **names}))
    (source / "text_encoder").mkdir()
    (source / "text_encoder" / "config.json").write_text("{}")
    repo = hub.add_folder(SOURCE, source)

    def said(option: str, files: dict[str, File]) -> str:
        commit = repo.commit(files, f"{len(repo.commits)}")
        capsys.readouterr()
        assert main(["convert", "--tp", "2", option, SOURCE, str(tmp_path / "out")]) == 1
        text = capsys.readouterr().err
        assert "/tmp" not in text
        assert "hub/models--" not in text
        assert re.match(rf"shardconv: (\d+ problems:\n  - )?{SOURCE}(/[\w./]*\w)? at {commit[:7]}: ", text)
        return text

    return repo.files(), said


@pytest.mark.parametrize("option", ["--dry-run", "--low-disk", "--quiet"])
def test_a_faulty_repo_is_told_by_its_own_names(faulty: Any, option: str) -> None:
    """Faults of a repo's files name the repo, the commit and the file, never a folder on this disk, and say what helps
    with a repo."""
    whole, said = faulty
    stem = "transformer/diffusion_pytorch_model"
    index, config = f"{stem}.safetensors.index.json", "transformer/config.json"
    shard = next(name for name in whole if name.startswith(stem) and name.endswith(".safetensors"))
    name = shard.rpartition("/")[2]

    def but(removed: str, **put: bytes) -> dict[str, File]:
        files = {each: file for each, file in whole.items() if not each.startswith(removed)}
        return files | {f"transformer/{each.replace('__', '.')}": File(each, data) for each, data in put.items()}

    assert f"{name}: named by {index}, absent from the repo; tell its owner" in said(option, but(shard))
    assert f"{index.rpartition('/')[2]}: cannot be read" in said(option, whole | {index: File("x", b"{")})
    assert f"/{config} at" in said(option, whole | {config: File("x", b"{")})
    assert "model_index.json at" in said(option, whole | {"model_index.json": File("x", b"{")})
    assert f"{name}: a web page" in said(option, whole | {shard: File("x", b"<!DOCTYPE html>" * 100)})
    wide = json.loads(whole[config].data) | {"num_layers": 9}
    text = said(option, whole | {config: File("x", json.dumps(wide).encode())})
    assert text.count(f"{SOURCE}/transformer at ") == text.count("\n") - 1 > 20
    assert "text_encoder" in said(option, but("text_encoder/"))
    assert "no weights (diffusion_pytorch_model*.safetensors); choose another revision" in said(option, but(stem))
    text = said(option, but(stem, diffusion_pytorch_model__bin=b"weights"))
    assert "only pickled weights (diffusion_pytorch_model.bin), expected safetensors" in text
    assert "holds a LoRA" in said(option, but(stem, pytorch_lora_weights__safetensors=b"lora"))
    assert "name it with --variant" in said(option, but(stem) | {f"{stem}.fp16.safetensors": whole[shard]})
    single = {"flux1-dev.safetensors": whole[shard], "README.md": File("x", b"card")}
    assert "no config.json, found flux1-dev.safetensors; an original-format file" in said(option, single)


@pytest.mark.parametrize("option", ["--dry-run", "--low-disk", "--quiet"])
def test_pickled_weights_of_other_components_go_along(
    faulty: Any, hub: StandInHub, tmp_path: Path, option: str
) -> None:
    """A text encoder that has no safetensors keeps the files it has, of one variant, as from a folder; one that has
    some goes without."""
    files, _ = faulty
    pickled = ["pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"]
    more = {f"text_encoder/{name}": File("x.bin", name.encode()) for name in [*pickled, "pytorch_model.fp16.bin"]}
    hub.objects |= {file.sha256: file for file in more.values()}
    hub.repos[SOURCE].commit(files | more, "pickled")
    assert main(["convert", "--tp", "2", option, SOURCE, str(tmp_path / "out")]) == 0
    held = {path.name for path in (tmp_path / "out").glob("text_encoder/*")}
    assert held == (set() if option == "--dry-run" else {"config.json", *pickled})
