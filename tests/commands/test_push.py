"""`shardconv push` against a stand-in Hub: what is sent, what never is, and what a reader of the repo can see."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hub_clients
import pytest
import small_sets
import toys
from stand_in_hub import File, Repo, Request, StandInHub, User

import shardconv
from shardconv import HubError, SetError
from shardconv.cli.main import main
from shardconv.commands import push as pushing
from shardconv.format.summary import human
from shardconv.remote.hub_cache import digest_of

REPO = "org/tiny-tp"
SECRET = "hf_alice"
SET2 = [
    "tp2/rank-00000-of-00002.safetensors",
    "tp2/rank-00001-of-00002.safetensors",
    "tp2/replicated.safetensors",
    "tp2/shardconv.json",
]


@pytest.fixture(scope="module")
def component(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A component folder with sets for 2 and 4 ranks, of one source. Copy before changing it."""
    out = tmp_path_factory.mktemp("push") / "out"
    for tp in (2, 4):
        shardconv.convert(small_sets.source("flux"), out, tp=tp)
    return out


@pytest.fixture
def out(component: Path, tmp_path: Path) -> Path:
    """A copy of `component` to damage."""
    return small_sets.copied(component, tmp_path / "out")


@pytest.fixture
def pipeline(component: Path, tmp_path: Path) -> Path:
    """A pipeline folder around `component`: a vae of a few bytes, a licence, the source's card."""
    folder = tmp_path / "pipe"
    shutil.copytree(component, folder / "transformer")
    names = {"transformer": ["diffusers", "FluxTransformer2DModel"], "vae": ["diffusers", "AutoencoderKL"]}
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline", **names}))
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text("{}")
    (folder / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"weights of a vae")
    (folder / "LICENSE.md").write_text("as is")
    (folder / "README.md").write_text(
        "---\nlicense: other\nlicense_name: tiny-licence\nlicense_link: LICENSE.md\n"
        "extra_gated_prompt: Say please.\ntags:\n- theirs\n---\n# Their card\n"
    )
    return folder


def check_whole(repo: Repo, revision: str = "main") -> list[str]:
    """Every set that a reader of `revision` sees has all files of its manifest, of one conversion; returns the sets."""
    files = repo.files(revision)
    manifests = [name for name in files if name.endswith("/shardconv.json")]
    for name in manifests:
        folder, document = name.rpartition("/")[0], json.loads(files[name].data)
        for record in document["files"]:
            data = files[f"{folder}/{record['name']}"].data
            assert len(data) == record["nbytes"]
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            assert json.loads(header["__metadata__"]["shardconv"])["conversion_id"] == document["conversion_id"]
        held = {each for each in files if each.startswith(f"{folder}/")}
        assert held == {f"{folder}/{record['name']}" for record in document["files"]} | {name}
    return sorted(name.rpartition("/")[0] for name in manifests)


def check_history(repo: Repo) -> None:
    """As `check_whole`, at every commit there ever was."""
    for commit in repo.commits:
        check_whole(repo, commit)


def writes(hub: StandInHub) -> list[str]:
    """Requests that could change something, by path."""
    return [request.path for request in hub.log if request.method not in ("GET", "HEAD")]


def refused(capsys: pytest.CaptureFixture[str], *argv: object, code: int = 1) -> str:
    """The one line a push that must fail says; no token is in it."""
    capsys.readouterr()
    assert main(["push", "--quiet", *map(str, argv)]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("shardconv: ")
    assert said.err.count("\n") == 1
    assert SECRET not in said.err
    return said.err.removeprefix("shardconv: ").rstrip()


def test_a_push_makes_the_repo_hold_what_is_here(hub: StandInHub, client: Any, component: Path) -> None:
    """A new repo gets every file of every set, bit for bit, its config and a card, in one commit."""
    done = shardconv.push(component, REPO)
    repo = hub.repos[REPO]
    assert check_whole(repo) == ["tp2", "tp4"]
    assert len(repo.commits) == 2  # the one that the Hub makes, and ours
    assert done.created
    assert done.url == f"{hub.url}/{REPO}/commit/{repo.refs['main']}"
    held = {name: file.data for name, file in repo.files().items()}
    assert set(done.sent) == set(held) - {".gitattributes"}
    for name in set(held) - {".gitattributes", "README.md"}:
        assert held[name] == (component / name).read_bytes()
        assert done.sent[name] == len(held[name])
    assert not repo.private


@pytest.mark.slow
def test_a_second_push_sends_nothing(hub: StandInHub, client: Any, pipeline: Path) -> None:
    """With nothing changed only questions are asked."""
    shardconv.push(pipeline, REPO)
    hub.log.clear()
    commits = len(hub.repos[REPO].commits)
    done = shardconv.push(pipeline, REPO)
    assert (done.sent, done.deleted, done.url, done.created) == ({}, (), "", False)
    assert writes(hub) == []
    assert len(hub.repos[REPO].commits) == commits


@pytest.mark.slow
def test_a_pipeline_goes_along_whole(hub: StandInHub, client: Any, pipeline: Path) -> None:
    """The other components, model_index.json and the licence are sent as they are; the source's card is not."""
    shardconv.push(pipeline, REPO, private=True)
    files = hub.repos[REPO].files()
    names = {str(path.relative_to(pipeline)) for path in pipeline.rglob("*") if path.is_file()}
    assert set(files) == names | {".gitattributes"}
    assert all(files[name].data == (pipeline / name).read_bytes() for name in names - {"README.md"})
    assert "Their card" not in files["README.md"].data.decode()
    assert hub.repos[REPO].private


@pytest.mark.slow
@pytest.mark.parametrize("junk", [
    "tp2/.tmpAbC123", "tp2/notes.txt", ".tp8.partial/rank-00000-of-00008.safetensors", "secret.env", ".env",
    ".git/config", "diffusion_pytorch_model.safetensors", "tp2/rank-00000-of-00003.safetensors",
])  # fmt: skip
def test_e3_what_no_manifest_lists_is_never_sent(hub: StandInHub, client: Any, out: Path, junk: str) -> None:
    """Leftovers, hidden files and a person's own files stay here; in a set's folder, or unfinished, they are said."""
    (out / junk).parent.mkdir(exist_ok=True)
    (out / junk).write_bytes(b"private")
    if ".partial" in junk or (junk.startswith("tp2/") and "/." not in junk):
        with pytest.raises(SetError, match=r"unfinished conversion|not a file of a set|of another set"):
            shardconv.push(out, REPO)
        assert hub.log == []
        shardconv.push(out, REPO, degrees=[4])
    else:
        shardconv.push(out, REPO)
    assert junk not in hub.repos[REPO].files()
    assert "tp4" in check_whole(hub.repos[REPO])


@pytest.mark.slow
def test_h5_garbage_left_by_an_uploader_is_no_matter(hub: StandInHub, client: Any, pipeline: Path) -> None:
    """State files of another upload tool, damaged, in the folder and in a component: not read, not sent."""
    for folder in (pipeline, pipeline / "vae"):
        state = folder / ".cache" / "huggingface" / "upload" / "model_index.json.metadata"
        state.parent.mkdir(parents=True)
        state.write_bytes(b"\0garbage{")
    shardconv.push(pipeline, REPO)
    assert not [name for name in hub.repos[REPO].files() if ".cache" in name]


@pytest.mark.slow
def test_degrees_choose_the_sets(hub: StandInHub, client: Any, component: Path, capsys: Any) -> None:
    """`--degrees 4` sends that set alone; a degree that is not there is a mistake of the command line."""
    assert main(["push", "--quiet", "--degrees", "4", str(component), REPO]) == 0
    assert check_whole(hub.repos[REPO]) == ["tp4"]
    said = refused(capsys, "--degrees", "2,8", component, REPO, code=2)
    assert said == f"--degrees: {component} has no set of tp degree 8, found 2, 4; convert for it"
    assert "expected tp degrees such as 4,8" in refused(capsys, "--degrees", "two", component, REPO, code=2)


@pytest.mark.slow
def test_a_replaced_set_goes_in_the_same_commit(hub: StandInHub, client: Any, out: Path) -> None:
    """A set converted anew takes the place of the old one in one step; files of others, and other sets, stay."""
    shardconv.push(out, REPO)
    repo = hub.repos[REPO]
    repo.commit(repo.files() | {"tp2/own.txt": File("own.txt", b"of a person"), "b": File("b", b"b")}, "by hand")
    before, commits = repo.files(), len(repo.commits)
    shardconv.convert(small_sets.source("flux"), out, tp=2, self_contained=True, overwrite=True)
    done = shardconv.push(out, REPO)
    after = repo.files()
    assert len(repo.commits) == commits + 1
    assert done.deleted == ("tp2/replicated.safetensors",)
    changed = {name for name in after if name not in before or after[name].data != before[name].data}
    assert changed == {*SET2, "README.md"} - {"tp2/replicated.safetensors"}
    assert set(before) - set(after) == {"tp2/replicated.safetensors"}
    del after["tp2/own.txt"]
    repo.commit(after, "tidy")
    assert check_whole(repo) == ["tp2", "tp4"]


@pytest.mark.slow
def test_a_branch_and_a_pull_request(hub: StandInHub, client: Any, component: Path) -> None:
    """`revision` makes the branch; `create_pr`, and going on with that one, need no write access; main stays."""
    repo = hub.add_repo(REPO, {"config.json": (component / "config.json").read_bytes()})
    main_commit = repo.refs["main"]
    shardconv.push(component, REPO, revision="sharded")
    hub.users[SECRET] = User("alice", may_write=())
    done = shardconv.push(component, REPO, create_pr=True)
    assert done.url == f"{hub.url}/{REPO}/discussions/1"
    assert repo.refs["main"] == main_commit
    assert check_whole(repo, "sharded") == check_whole(repo, "refs/pr/1") == ["tp2", "tp4"]
    assert shardconv.push(component, REPO, revision="refs/pr/1").sent == {}
    repo.commit(repo.commits[main_commit], "undo", "refs/pr/1")
    shardconv.push(component, REPO, revision="refs/pr/1", degrees=[4])
    assert check_whole(repo, "refs/pr/1") == ["tp4"]
    hub.users[SECRET] = User("alice")
    hub.log.clear()
    assert shardconv.push(component, REPO, revision="sharded").sent == {}
    assert writes(hub) == []


@pytest.mark.slow
def test_a_push_of_many_files_takes_several_commits(
    hub: StandInHub, client: Any, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the Hub's advice for one commit there are several, none of which divides a set."""
    monkeypatch.setattr(pushing, "COMMIT_FILES", 5)
    shardconv.push(pipeline, REPO)
    repo = hub.repos[REPO]
    assert len(repo.commits) == 5
    check_history(repo)
    assert check_whole(repo) == ["transformer/tp2", "transformer/tp4"]
    hub.log.clear()
    assert shardconv.push(pipeline, REPO, create_pr=True).sent == {}


@pytest.mark.slow
def test_large_files_go_in_parts(hub: StandInHub, client: Any, component: Path) -> None:
    """Where the Hub asks for parts they are sent, and make up the file."""
    hub.part_nbytes = 500_000
    shardconv.push(component, REPO, degrees=[2])
    assert check_whole(hub.repos[REPO]) == ["tp2"]
    assert len([request for request in hub.log if request.path.startswith("/complete/")]) == 3


@pytest.mark.slow
def test_large_files_go_through_the_chunk_store(hub: StandInHub, component: Path, tmp_path: Path) -> None:
    """The client's default way (hf_xet): the content goes to the chunk store, nothing to the older storage, and the
    second push sends nothing."""
    hub.chunk_store = tmp_path / "chunks"
    files = {path: path.read_bytes() for path in component.glob("tp2/*.safetensors")}
    hub.chunked = {digest_of(path, "0" * 64): data for path, data in files.items()}
    settings = hub.settings(tmp_path / "home", HF_HUB_DISABLE_XET="0")
    for _ in range(2):
        hub.log.clear()
        done = hub_clients.command(settings, "push", "--degrees", "2", component, REPO)
        assert done.returncode == 0, done.stderr
    assert writes(hub) == []
    assert check_whole(hub.repos[REPO]) == ["tp2"]
    assert hub.received_objects() == []
    stored = sum(path.stat().st_size for path in hub.chunk_store.rglob("*") if path.is_file())
    assert stored > 0.8 * sum(map(len, files.values()))


def test_a_dry_run_asks_only(hub: StandInHub, client: Any, component: Path, capsys: Any) -> None:
    """`--dry-run --json` says what would be sent, and neither creates nor sends."""
    assert main(["push", "--dry-run", "--json", "--degrees", "2", str(component), REPO]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["sent"]) == {*SET2, "config.json", "README.md"}
    assert (document["dry_run"], document["created"], document["url"]) == (True, True, "")
    assert writes(hub) == []
    assert hub.repos == {}


# The card


@pytest.mark.slow
def test_a_new_card_says_what_it_is(hub: StandInHub, client: Any, pipeline: Path) -> None:
    """Front matter: base model, tags, the source's licence and gate; then the degrees with bytes, and how to load."""
    from_hub(pipeline, "their/flux", "0" * 40)
    hub.add_repo("their/flux", gated="auto")
    shardconv.push(pipeline, REPO)
    card = hub.repos[REPO].files()["README.md"].data.decode()
    import huggingface_hub

    data = huggingface_hub.ModelCard(card).data.to_dict()
    assert data["base_model"] == "their/flux"
    assert data["base_model_relation"] == "quantized"
    assert data["tags"] == ["shardconv", "tensor-parallel", "diffusers"]
    assert (data["license"], data["license_name"], data["license_link"]) == ("other", "tiny-licence", "LICENSE.md")
    assert data["extra_gated_prompt"] == "Say please."
    for tp in (2, 4):
        files = (pipeline / "transformer" / f"tp{tp}").glob("*.safetensors")
        total = sum(path.stat().st_size for path in files)
        assert f"| transformer | {tp} | {human(total)} |" in card
    assert f'loader.load_pipeline("{REPO}"' in card
    assert hub.repos[REPO].gated == "auto"


def from_hub(pipeline: Path, repo: str, commit: str) -> None:
    """Make the sets say that they were converted from a repo; no id or digest depends on that."""
    for path in pipeline.glob("transformer/tp*/shardconv.json"):
        manifest = shardconv.Manifest.read(path.parent)
        source = replace(manifest.source, repo=repo, revision=commit)
        path.write_text(replace(manifest, source=source).to_json())


@pytest.mark.slow
def test_an_existing_card_is_kept(hub: StandInHub, client: Any, component: Path, out: Path) -> None:
    """Only what stands between our markers is ours; without markers the section comes at the end."""
    theirs = "---\nlicense: mit\n---\n# Mine\n\nWords.\n"
    repo = hub.add_repo(REPO, {"README.md": theirs.encode()})
    shardconv.push(component, REPO, degrees=[2])
    first = repo.files()["README.md"].data.decode()
    assert first.startswith(theirs)
    assert "| (root) | 2 |" in first
    assert "| (root) | 4 |" not in first
    edited = first.replace("Words.", "Other words.") + "\nA last line.\n"
    repo.commit(repo.files() | {"README.md": File("README.md", edited.encode())}, "edit")
    shardconv.push(component, REPO, degrees=[4])
    second = repo.files()["README.md"].data.decode()
    assert second.startswith(theirs.replace("Words.", "Other words."))
    assert second.endswith("\nA last line.\n")
    assert second.count("<!-- shardconv: begin -->") == 1
    assert "| (root) | 2 |" in second
    assert "| (root) | 4 |" in second


# Refused before a byte is sent


def damage_byte(out: Path) -> None:
    path = out / "tp2" / "rank-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def shorten(out: Path) -> None:
    path = out / "tp2" / "replicated.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def lose_a_file(out: Path) -> None:
    (out / "tp2" / "rank-00000-of-00002.safetensors").unlink()


def lose_the_manifest(out: Path) -> None:
    (out / "tp2" / "shardconv.json").unlink()


def change_the_config(out: Path) -> None:
    toys.edit_json(out / "config.json", guidance_embeds=True)


def link_out(out: Path) -> None:
    outside = out.parent / "elsewhere.json"
    (out / "config.json").rename(outside)
    (out / "config.json").symlink_to(outside)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_byte, "is damaged (its digest differs from the manifest's); fetch it again"),
        (shorten, "the copy is incomplete"),
        (lose_a_file, "cannot be read (No such file or directory)"),
        (lose_the_manifest, "tp2: an unfinished conversion; run shardconv convert again, then push"),
        (change_the_config, "not the config that was converted"),
        (link_out, "a link that leads out of"),
        (shutil.rmtree, "no such folder; give the folder that shardconv convert wrote"),
    ],
)
def test_a_set_that_is_not_sound_is_refused(
    hub: StandInHub, client: Any, out: Path, capsys: Any, damage: Any, words: str
) -> None:
    """A damaged, incomplete or unfinished set is refused before the Hub hears of it."""
    damage(out)
    assert words in refused(capsys, out, REPO)
    assert hub.log == []


def test_h6_a_file_over_the_limit_is_refused(
    hub: StandInHub, client: Any, component: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank file larger than the Hub takes is named, with what helps, before anything is sent."""
    monkeypatch.setattr(pushing, "MAX_FILE_NBYTES", 1 << 20)
    with pytest.raises(SetError) as caught:
        shardconv.push(component, REPO, degrees=[2])
    assert len(caught.value.issues) == 3
    said = caught.value.issues[0]
    assert said.startswith(
        "tp2/rank-00000-of-00002.safetensors: 2,378,240 bytes, the Hub takes files of at most 1,048,"
    )
    assert said.endswith("; convert for a higher tp degree")
    assert hub.log == []


@pytest.mark.slow
@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize(
    ("user", "words"),
    [
        (User("alice", role="read"), "alice's token may only read; use one that may write: hf auth login"),
        (User("alice", may_write=()), "You don't have the rights required to write to this repo"),
        (None, "the Hub knows no such login (Invalid credentials in Authorization header)"),
    ],
)
def test_without_write_access_nothing_is_sent(
    hub: StandInHub, client: Any, component: Path, capsys: Any, user: User | None, words: str, exists: bool
) -> None:
    """A token that only reads, that has no rights in the organization, or that nobody knows."""
    if exists:
        hub.add_repo(REPO)
    hub.users = {SECRET: user} if user else {}
    assert words in refused(capsys, component, REPO)
    assert set(writes(hub)) <= {"/api/repos/create"}
    assert list(hub.repos) == ([REPO] if exists else [])


@pytest.mark.slow
def test_sets_of_other_weights_are_not_mixed(hub: StandInHub, client: Any, component: Path, tmp_path: Path) -> None:
    """A repo that holds a set of another model's weights, or another config, is left alone."""
    shardconv.push(component, REPO, degrees=[4])
    other = small_sets.build("flux")
    with small_sets.torch.no_grad():
        next(other.parameters()).add_(1)
    other.save_pretrained(tmp_path / "other")
    shardconv.convert(tmp_path / "other", tmp_path / "theirs", tp=2)
    hub.log.clear()
    with pytest.raises(SetError, match=r"tp4 is of other weights or another config than what is pushed"):
        shardconv.push(tmp_path / "theirs", REPO)
    assert writes(hub) == []


@pytest.mark.slow
def test_a_damaged_set_in_the_repo_is_named(hub: StandInHub, client: Any, component: Path) -> None:
    """What stands beside the pushed set cannot be judged: one sentence, nothing sent; pushed along, it is mended."""
    repo = hub.add_repo(REPO, {"tp4/shardconv.json": b"{half a manif"})
    with pytest.raises(SetError, match=rf"^{REPO}: tp4/shardconv.json: not JSON .*; push that set again, or remove it"):
        shardconv.push(component, REPO, degrees=[2])
    assert writes(hub) == []
    shardconv.push(component, REPO)
    assert check_whole(repo) == ["tp2", "tp4"]


def test_without_a_login_nothing_is_sent(
    hub: StandInHub, client: Any, component: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token at all: what to do is said."""
    monkeypatch.delenv("HF_TOKEN")
    said = refused(capsys, component, REPO)
    assert said.startswith(f"{REPO}: the Hub knows no such login (")
    assert said.endswith("; log in: hf auth login")
    assert writes(hub) == []


def test_what_makes_no_sense_is_said(client: Any, component: Path, capsys: Any) -> None:
    """Mistakes of the command line: exit code 2."""
    assert "expected a repo such as org/name" in refused(capsys, component, "tiny", code=2)
    assert "give one of them" in refused(capsys, "--create-pr", "--revision", "b", component, REPO, code=2)


# A Hub that fails


def test_h3_a_permanent_refusal_ends_at_once(hub: StandInHub, client: Any, component: Path, capsys: Any) -> None:
    """403 on the commit: one attempt, the server's words, the repo as before."""
    hub.fail("POST", "/commit/", times=100, status=403, text="Storage quota of org exceeded")
    said = refused(capsys, "--degrees", "2", component, REPO)
    assert said == f"{REPO}: the Hub refuses (Storage quota of org exceeded); use a token that may do this"
    assert len([path for path in writes(hub) if "/commit/" in path]) == 1
    assert check_whole(hub.repos[REPO]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", ["/commit/", "/api/models/[^/]+/[^/]+$", "/api/repos/create", "/preupload/", "/batch"]
)
@pytest.mark.parametrize("status", [429, 503])
def test_h3_a_busy_hub_is_waited_for(hub: StandInHub, client: Any, component: Path, where: str, status: int) -> None:
    """429 and 503, twice each, at every step: the push goes on."""
    for method in ("GET", "POST"):
        hub.fail(method, where, times=2, status=status, headers={"Retry-After": "0"})
    shardconv.push(component, REPO, degrees=[2])
    assert check_whole(hub.repos[REPO]) == ["tp2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "words"),
    [
        (429, "the Hub limits the rate of requests, 5 attempts were made; wait some minutes, or log in"),
        (502, "the Hub fails with status 502 (injected), 5 attempts were made; run again later"),
    ],
)
def test_h3_waiting_has_an_end(
    hub: StandInHub, client: Any, component: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, status: int, words: str
) -> None:
    """A Hub that stays busy is given up after five attempts and pauses that grow."""
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    hub.fail("POST", "/commit/", times=100, status=status)
    assert refused(capsys, "--degrees", "2", component, REPO) == f"{REPO}: {words}"
    assert pauses == [1, 2, 4, 8]
    assert check_whole(hub.repos[REPO]) == []


def test_a_commit_whose_answer_was_lost_is_not_made_twice(hub: StandInHub, client: Any, component: Path) -> None:
    """The connection ends after the commit was made: the push looks, finds it there and is content."""
    hub.fail("POST", "/commit/", lost=True)
    shardconv.push(component, REPO, degrees=[2])
    assert len(hub.repos[REPO].commits) == 2
    assert check_whole(hub.repos[REPO]) == ["tp2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "calls", "flags", "stands"),
    [
        ("create", 0, (), "main shows nothing of it yet, .* the repo itself may be there, empty"),
        ("create_branch", 0, ("--revision", "tp"), "tp shows nothing of it yet"),
        ("upload", 0, (), "main shows nothing of it yet"),
        ("commit", 1, (), r"main has 1 of 3 commits \(http://\S+/commit/\w+\), each whole"),
        ("listing", 1, ("--create-pr",), "the pull request shows nothing of it yet"),
        ("upload", 2, ("--create-pr",), r"the pull request has 2 of 3 commits \(http://\S+/discussions/\d+, "),
    ],
)
def test_ctrl_c_tells_what_the_repo_shows(
    hub: StandInHub, client: Any, component: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch,
    step: str, calls: int, flags: tuple[str, ...], stands: str,
) -> None:  # fmt: skip
    """Ctrl-C in the call after `calls` of a `step`: before the first commit it says that nothing shows, and where;
    after it how many commits are made and which."""
    monkeypatch.setattr(pushing, "COMMIT_FILES", 5)
    if flags:
        hub.add_repo(REPO)
    real, called = getattr(pushing.WritableRepo, step), itertools.count()

    def stopped(self: Any, *args: Any) -> Any:
        if next(called) == calls:
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(pushing.WritableRepo, step, stopped)
    assert main(["push", "--quiet", *flags, str(component), REPO]) == 130
    said = capsys.readouterr().err
    assert re.match(f"shardconv: stopped; {REPO}: {stands}", said), said
    assert "half-done" not in said


@pytest.mark.slow
def test_somebody_else_pushing_meanwhile_is_noticed(hub: StandInHub, client: Any, component: Path, capsys: Any) -> None:
    """A commit between our look and our commit: refused by the Hub, nothing of theirs is lost."""
    repo = hub.add_repo(REPO)

    def meddle(stage: str, request: Request) -> None:
        if stage == "start" and "/preupload/" in request.path and "theirs" not in repo.files():
            repo.commit(repo.files() | {"theirs": File("theirs", b"theirs")}, "theirs")

    hub.watch = meddle
    said = refused(capsys, "--degrees", "2", component, REPO)
    assert said == f"{REPO}: somebody else changed the repo meanwhile; run again"
    assert check_whole(repo) == []
    assert main(["push", "--quiet", "--degrees", "2", str(component), REPO]) == 0
    assert check_whole(repo) == ["tp2"]
    assert "theirs" in repo.files()


@pytest.mark.slow
@pytest.mark.parametrize("part_nbytes", [None, 400_000])
def test_h4_what_arrived_is_not_sent_again(
    hub: StandInHub, client: Any, component: Path, capsys: Any, part_nbytes: int | None
) -> None:
    """The third of four rank files fails for good; the next push sends that one and what came after it, no more."""
    hub.part_nbytes = part_nbytes
    third = digest_of(component / "tp4" / "rank-00002-of-00004.safetensors", "0" * 64)
    hub.fail("PUT", f"/upload/{third}/", times=1, status=403, text="storage says no")
    said = refused(capsys, "--degrees", "4", component, REPO)
    assert said.startswith(f"{REPO}: tp4/rank-00002-of-00004.safetensors: the Hub refuses (storage says no)")
    first = set(hub.received_objects())
    assert len(first) == 2
    assert check_whole(hub.repos[REPO]) == []
    hub.log.clear()
    assert main(["push", "--quiet", "--degrees", "4", str(component), REPO]) == 0
    assert first & set(hub.received_objects()) == set()
    assert len(set(hub.received_objects())) == 3
    assert check_whole(hub.repos[REPO]) == ["tp4"]


def test_a_connection_lost_in_mid_upload_is_taken_up(hub: StandInHub, client: Any, component: Path) -> None:
    """The storage host hangs up on one file: it is sent again, once, and the push goes through."""
    hub.fail("PUT", "/upload/", lost=True)
    shardconv.push(component, REPO, degrees=[2])
    assert check_whole(hub.repos[REPO]) == ["tp2"]


def test_no_network_is_one_sentence(hub: StandInHub, client: Any, component: Path, capsys: Any) -> None:
    """A Hub that does not answer at all."""
    hub.close()
    assert "the Hub cannot be reached" in refused(capsys, component, REPO)


def test_offline_a_push_is_refused(
    client: Any, component: Path, monkeypatch: pytest.MonkeyPatch, hub: StandInHub
) -> None:
    """HF_HUB_OFFLINE=1: no request."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        shardconv.push(component, REPO)
    assert hub.log == []


def killer(process: subprocess.Popen[bytes], steps: int) -> Callable[[str, Request], None]:
    """Kills `process` at the `steps`-th step of what it asks of the Hub."""
    left = itertools.count(steps - 1, -1)

    def kill(stage: str, request: Request) -> None:
        if next(left) == 0:
            process.send_signal(signal.SIGKILL)

    return kill


@pytest.mark.slow
def test_a_push_killed_anywhere_never_shows_half_a_set(hub: StandInHub, out: Path, tmp_path: Path) -> None:
    """30 pushes killed at a request, or a piece of one, drawn by a seed: every commit of the repo holds whole sets
    only, and the last push, left alone, completes it. Each round replaces the sets by those of another conversion."""
    draw = random.Random(20)
    settings = hub.settings(tmp_path / "home")
    argv = [sys.executable, "-m", "shardconv", "push", "--quiet", str(out), REPO]
    variants = [out, small_sets.copied(out, tmp_path / "other")]
    for tp in (2, 4):
        shardconv.convert(small_sets.source("flux"), variants[1], tp=tp, self_contained=True, overwrite=True)
    killed = 0
    for attempt in range(30):
        argv[-2] = str(variants[attempt % 2])
        process = subprocess.Popen(argv, env=hub_clients.environment(settings), stderr=subprocess.DEVNULL)
        hub.watch = killer(process, draw.randrange(1, 140))
        killed += process.wait(timeout=120) == -signal.SIGKILL
        hub.watch = None
        if REPO in hub.repos:
            check_history(hub.repos[REPO])
    assert killed >= 10  # the others were done before their step came
    done = subprocess.run(argv, env=hub_clients.environment(settings), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert check_whole(hub.repos[REPO]) == ["tp2", "tp4"]
    check_history(hub.repos[REPO])
