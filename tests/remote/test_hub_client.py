"""What the Hub's client is asked for: content once, compared; reasons are kept, faults speak of the repo."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import hub_clients
import huggingface_hub
import pytest
import ranks
import small_sets
import torch.distributed as dist
import toys
from stand_in_hub import File, Repo, StandInHub

import loader
import shardconv
from shardconv import CheckpointError, HubError, SetError, UsageError
from shardconv.cli.main import main
from shardconv.errors import as_one

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


# What is fetched


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_two_groups_of_a_node_fetch_once(hub: StandInHub, filled: Repo, tmp_path: Path) -> None:
    """Two groups that start together with an empty cache: each file is sent once."""
    ranks.values(load_in_own_group, hub.settings(tmp_path / "both"), n=2)
    fetched = hub.fetched(REPO)
    assert sorted(set(fetched)) == fetched
    assert len(fetched) == 4


def load_in_own_group(settings: dict[str, str]) -> None:
    """Each of two processes alone in a group, at the same time."""
    hub_clients.point_at(settings)
    groups = [dist.new_group([rank]) for rank in range(2)]
    dist.barrier()
    load(group=groups[dist.get_rank()])


@pytest.mark.slow
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


@pytest.mark.slow
def test_force_fetches_each_file_once_from_an_empty_cache_too(hub: StandInHub, filled: Repo) -> None:
    """Also the one that says which commit it is."""
    for _ in range(2):
        hub.log.clear()
        load(force_download=True)
        assert sorted(set(hub.fetched(REPO))) == hub.fetched(REPO)
        assert len(hub.fetched(REPO)) == 4


@pytest.mark.slow
def test_content_under_another_etag_is_compared(hub: StandInHub, filled: Repo) -> None:
    """A mirror with etags of its own: what the cache has by the Hub's digest is not what arrives."""
    load()
    filled.commit(filled.files() | {"README.md": File("README.md", b"card")}, "card")
    hub.fail("HEAD", f"/resolve/.*{RANK}", times=2, put={"X-Linked-ETag": '"of-the-mirror"'})
    hub.fail("GET", "/storage/", edit=lambda data: data[:-1] + b"?")
    with pytest.raises(HubError, match=f"{RANK}: arrived altered"):
        load()


@pytest.mark.slow
def test_a_dry_run_counts_what_the_cache_has(hub: StandInHub, client: Any, tmp_path: Path, capsys: Any) -> None:
    """Content that was fetched with another commit would not be downloaded again."""
    source = hub.add_folder(SOURCE, small_sets.source("flux"))
    shardconv.convert(SOURCE, tmp_path / "out", tp=2)
    source.commit(source.files() | {"README.md": File("README.md", b"card")}, "card")
    assert main(["convert", "--tp", "4", "--dry-run", "--json", SOURCE, str(tmp_path / "new")]) == 0
    assert json.loads(capsys.readouterr().out)["download"] == {"README.md": 4}


@pytest.mark.slow
def test_low_disk_does_not_take_a_shortened_file_of_the_cache(hub: StandInHub, client: Any, tmp_path: Path) -> None:
    """The client would copy it; it is downloaded instead."""
    hub.add_folder(SOURCE, small_sets.source("flux"))
    shardconv.convert(SOURCE, tmp_path / "out", tp=2)
    [link] = Path(client["HF_HOME"]).glob("hub/*/snapshots/*/*.safetensors")
    os.truncate(link.resolve(), 5000)
    shardconv.convert(SOURCE, tmp_path / "new", tp=2, low_disk=True)
    assert toys.contents(tmp_path / "new") == toys.contents(tmp_path / "out")


# Reasons


def test_a_mirror_that_leaves_headers_out_is_told_so(hub: StandInHub, filled: Repo) -> None:
    """A server whose answers lack what the Hub's have: the client's own reason arrives, not advice on a network."""
    hub.fail("HEAD", "/resolve/", times=100, drop=("X-Repo-Commit", "ETag", "X-Linked-ETag"))
    with pytest.raises(HubError, match=r"does not answer as the Hub does .*check HF_ENDPOINT"):
        load()


def test_a_mirror_that_names_no_commit_is_told_so(hub: StandInHub, filled: Repo) -> None:
    """Its answer about the repo lacks what everything is pinned to."""
    hub.fail("GET", "/api/models/", edit=lambda data: data.replace(b'"sha"', b'"other"'))
    with pytest.raises(HubError, match="the answer names no commit, so it is not the Hub's; check HF_ENDPOINT"):
        load()


@pytest.mark.parametrize("name", ["transformer/../../../secret", "/etc/passwd", ".."])
def test_a_repo_that_names_files_outside_is_not_trusted(
    hub: StandInHub, filled: Repo, tmp_path: Path, name: str
) -> None:
    """Whatever a server lists, no file of this disk is taken for one of the repo."""
    filled.commit(filled.files() | {name: File("x", b"x")}, "evil")
    for act in (load, lambda: shardconv.convert(REPO, tmp_path / "out", tp=2)):
        with pytest.raises(HubError, match=rf"names '{name}', outside of itself; do not trust it"):
            act()


@pytest.mark.slow
def test_a_mirror_that_tells_no_lengths_and_digests_is_used(hub: StandInHub, filled: Repo) -> None:
    """Nothing can be compared then; and what the cache has is not taken for short."""
    hub.fail(
        "GET", "/api/models/", times=2, edit=lambda data: re.sub(rb'"(size|blobId|lfs|sha256)":', rb'"x\1":', data)
    )
    load(verify=True)
    hub.log.clear()
    load(verify=True)
    assert hub.fetched(REPO) == []


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


# Faulty repos


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


@pytest.mark.slow
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


@pytest.mark.slow
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
