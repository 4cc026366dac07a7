"""What a push looks at before it sends: who may read, what stands in the repo, what lies about in the folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import small_sets
from stand_in_hub import File, Repo, StandInHub

import loader
import shardconv
from shardconv import HubError, SetError
from shardconv.cli.main import main

REPO = "org/tiny-tp"
SOURCE = "their/flux"
RANK = "transformer/tp1/rank-00000-of-00001.safetensors"


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_gated_source_may_go_to_a_private_repo(hub: StandInHub, client: Any, out: Path) -> None:
    """Nobody can read there whom its owner did not let in."""
    hub.add_repo(SOURCE, gated="manual")
    repo = hub.add_repo(REPO, {"theirs": b"1"}, private=True)
    shardconv.push(out, REPO)
    assert pushed(repo)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "options"),
    [
        ({"status": 500}, {}),
        ({"status": 403}, {"create_pr": True}),
        ({"status": 401}, {"revision": "b"}),
        ({"status": 404}, {"dry_run": True}),
        ({"lost": True}, {}),
        ({"edit": lambda data: data.replace(b'"gated"', b'"other"')}, {}),
    ],
)
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


@pytest.mark.slow
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


@pytest.mark.slow
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


# Damaged repos


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
