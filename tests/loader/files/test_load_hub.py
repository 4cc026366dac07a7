"""Loading a pre-sharded repo over HTTP from a stand-in Hub: who fetches what, how often, and what a fault says."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import hub_clients
import huggingface_hub
import numpy as np
import pytest
import ranks
import small_pipelines
import small_sets
import stand_in_hub
import torch
import torch.distributed as dist
from stand_in_hub import File, StandInHub, User

import loader
import shardconv
from loader.files import fetch as remote
from shardconv import HubError, SetError

REPO = "org/tiny-tp"
WHOLE = "org/tiny"
TOLERANCE = 1e-5  # of an output between 0 and 1
Settings = Mapping[str, str]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(source, converted for 2 and 4 ranks) of a small FLUX pipeline."""
    base = tmp_path_factory.mktemp("load-hub")
    small_pipelines.build_flux_pipeline().save_pretrained(base / "source")
    for tp in (2, 4):
        shardconv.convert(base / "source", base / "out", tp=tp)
    return base / "source", base / "out"


@pytest.fixture(scope="module")
def component(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A component folder of the smallest model, with sets for 1, 2 and 8 ranks."""
    out = tmp_path_factory.mktemp("component") / "out"
    for tp in (1, 2, 8):
        shardconv.convert(small_sets.source("flux"), out, tp=tp)
    return out


@pytest.fixture
def filled(hub: StandInHub, component: Path) -> StandInHub:
    """A Hub that holds `component` as the component `transformer` of a repo."""
    paths = [path for path in component.rglob("*") if path.is_file()]
    hub.add_repo(REPO, {f"transformer/{path.relative_to(component)}": path.read_bytes() for path in paths})
    return hub


def images(pipeline: Any) -> np.ndarray:
    """Two images, values between 0 and 1."""
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(5)
    return pipeline(**small_pipelines.call_kwargs("flux"), generator=generator, output_type="np").images


def load_pipeline(settings: list[Settings], repo: str, **options: Any) -> np.ndarray:
    """On each rank under its own settings."""
    hub_clients.point_at(settings[dist.get_rank()])
    return images(loader.load_pipeline(repo, device="cpu", **options))


def load_component(settings: Settings, repo: str, options: Mapping[str, Any]) -> list[np.ndarray]:
    """The output of the model."""
    hub_clients.point_at(settings)
    model = loader.load_model(repo, device="cpu", **options)
    assert model.config._name_or_path == repo
    return [each.numpy() for each in small_sets.outputs(model, "flux")]


def load_alone(settings: Settings, repo: str, options: Mapping[str, Any]) -> list[str]:
    """The names of the parameters, of a set for one process."""
    hub_clients.point_at(settings)
    return [name for name, _ in loader.load_model(repo, device="cpu", **options).named_parameters()]


def cache_files(home: Path) -> dict[str, str]:
    """What is in the client's cache, locks and empty folders left out."""
    folder = home / "hub"
    paths = [path for path in folder.rglob("*") if path.is_file() and ".locks" not in path.parts]
    return {str(path.relative_to(folder)): str(path.stat().st_size) for path in paths if path.name != "CACHEDIR.TAG"}


def set_names(tp: int, *rank: int, prefix: str = "transformer/") -> set[str]:
    """What ranks of a set for `tp` fetch of it, with the config."""
    files = [f"rank-{each:05d}-of-{tp:05d}.safetensors" for each in rank]
    names = [*files, "replicated.safetensors", "shardconv.json"]
    return {f"{prefix}tp{tp}/{name}" for name in names} | {f"{prefix}config.json"}


# What is fetched


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_a_pushed_pipeline_loads_from_an_empty_cache(
    hub: StandInHub, folders: tuple[Path, Path], tmp_path: Path, tp: int
) -> None:
    """Push, then load on `tp` ranks of `tp` nodes and on `tp` ranks of one: the images are the unsharded pipeline's.

    Each rank fetches its own rank file and no other rank's, the replicated file is fetched once a node, and no ordinary
    weight file of the sharded component at all.
    """
    source, out = folders
    assert hub_clients.command(hub.settings(tmp_path / "pusher"), "push", out, REPO).returncode == 0
    hub.users |= {f"hf_rank{rank}": User(f"rank{rank}") for rank in range(tp)}
    expected = images(diffusers.DiffusionPipeline.from_pretrained(source))
    nodes = [hub.settings(tmp_path / f"node{rank}", f"hf_rank{rank}") for rank in range(tp)]
    hub.log.clear()
    for found in ranks.values(load_pipeline, nodes, REPO, n=tp):
        assert np.abs(found - expected).max() <= TOLERANCE
    for rank in range(tp):
        fetched = hub.fetched(REPO, f"rank{rank}")
        assert len(fetched) == len(set(fetched)), "twice"
        mine = {name for name in fetched if name.startswith("transformer/")}
        assert mine == set_names(tp, rank)
    one = [hub.settings(tmp_path / "one", f"hf_rank{rank}") for rank in range(tp)]
    hub.log.clear()
    for found in ranks.values(load_pipeline, one, REPO, n=tp):
        assert np.abs(found - expected).max() <= TOLERANCE
    fetched = hub.fetched(REPO)
    assert len(fetched) == len(set(fetched)), "twice"
    assert {name for name in fetched if name.startswith("transformer/")} == set_names(tp, *range(tp))
    for rank in range(1, tp):
        assert hub.fetched(REPO, f"rank{rank}") == [f"transformer/tp{tp}/rank-{rank:05d}-of-{tp:05d}.safetensors"]


@pytest.mark.slow
def test_f6_eight_ranks_start_together(hub: StandInHub, component: Path, tmp_path: Path) -> None:
    """20 times eight ranks on a cold cache, then on it warm: no failure, and each file is fetched once."""
    paths = [path for path in component.rglob("*") if path.is_file()]
    files = {f"transformer/{path.relative_to(component)}": path.read_bytes() for path in paths}
    repos = [f"org/tiny{attempt}" for attempt in range(20)]
    for name in repos:
        hub.add_repo(name, files)
    ranks.values(load_each, hub.settings(tmp_path), repos, n=8, timeout=300)
    for name in repos:
        assert Counter(hub.fetched(name)) == Counter(set_names(8, *range(8))), name
        assert len([request for request in hub.log if request.path == f"/api/models/{name}"]) == 2


def load_each(settings: Settings, repos: list[str]) -> None:
    """Each repo twice, all ranks starting at the same time."""
    hub_clients.point_at(settings)
    for name in repos:
        for _ in ("cold", "warm"):
            dist.barrier()
            loader.load_model(name, device="cpu", subfolder="transformer")


@pytest.mark.slow
def test_fewer_ranks_than_the_set_was_made_for(filled: StandInHub, tmp_path: Path) -> None:
    """4 ranks, sets for 1, 2 and 8: of the one for 8 each rank fetches the two files that it joins, and no other's."""
    filled.users |= {f"hf_rank{rank}": User(f"rank{rank}") for rank in range(4)}
    nodes = [filled.settings(tmp_path / f"node{rank}", f"hf_rank{rank}") for rank in range(4)]
    expected = small_sets.outputs(small_sets.build("flux"), "flux")
    for found in ranks.values(load_on_node, nodes, REPO, n=4):
        assert small_sets.difference([torch.from_numpy(each) for each in found], expected) <= TOLERANCE
    for rank in range(4):
        assert set(filled.fetched(REPO, f"rank{rank}")) == set_names(8, 2 * rank, 2 * rank + 1)


def load_on_node(nodes: list[Settings], repo: str) -> list[np.ndarray]:
    """The output of the model, loaded under this rank's settings."""
    return load_component(nodes[dist.get_rank()], repo, {"subfolder": "transformer"})


@pytest.mark.slow
def test_h10_offline_no_request_is_made(filled: StandInHub, tmp_path: Path) -> None:
    """HF_HUB_OFFLINE=1, `local_files_only` and a Hub that is gone: a cached repo loads, by branch name."""
    settings = filled.settings(tmp_path / "home")
    options = {"subfolder": "transformer"}
    ranks.values(load_component, settings, REPO, options, n=2)
    filled.log.clear()
    ranks.values(load_component, {**settings, "HF_HUB_OFFLINE": "1"}, REPO, options, n=2)
    ranks.values(load_component, settings, REPO, options | {"local_files_only": True}, n=2)
    assert filled.log == []


@pytest.mark.slow
def test_h13_offline_a_partial_cache_is_refused(filled: StandInHub, tmp_path: Path) -> None:
    """Rank 1's file was never fetched: offline the loader names it, on every rank, and does not guess."""
    settings = filled.settings(tmp_path / "home")
    options = {"subfolder": "transformer"}
    ranks.values(load_component, settings, REPO, options, n=2)
    [link] = (tmp_path / "home").glob("hub/*/snapshots/*/transformer/tp2/rank-00001-of-00002.safetensors")
    link.unlink()
    failed = ranks.same(ranks.run(load_component, {**settings, "HF_HUB_OFFLINE": "1"}, REPO, options, n=2))
    assert failed.error == "LoadError"
    commit, name = filled.repos[REPO].refs["main"], "transformer/tp2/rank-00001-of-00002.safetensors"
    said = "not in the cache, and the Hub is not asked or does not answer; fetch it once with a network"
    way = f"without HF_HUB_OFFLINE, or: hf download {REPO} {name} --revision {commit}"
    assert failed.issues == (f"rank 1: {REPO} at {commit[:7]}: {name}: {said} ({way})",)


@pytest.mark.slow
def test_a_revision_is_loaded_by_name_and_by_commit(filled: StandInHub, tmp_path: Path) -> None:
    """A branch, a pull request and a full commit; the latter, once cached, without any request."""
    repo = filled.repos[REPO]
    repo.refs["sharded"] = repo.refs["refs/pr/3"] = repo.refs["main"]
    repo.commit({"README.md": File("README.md", b"")}, "emptied")
    for revision in ("sharded", "refs/pr/3", repo.refs["sharded"]):
        settings = filled.settings(tmp_path / revision.replace("/", "-"))
        options = {"subfolder": "transformer", "revision": revision}
        ranks.values(load_component, settings, REPO, options, n=2)
        filled.log.clear()
        ranks.values(load_component, settings, REPO, options, n=2)
        assert len(filled.log) == (1 if revision == repo.refs["sharded"] else 2)


def test_the_files_of_a_rank_are_those_of_its_share() -> None:
    """The set's own degree: one file. A multiple of the group: as many as are joined, all different, all there."""
    assert remote.needed_files(4, 3, 4) == ["rank-00003-of-00004.safetensors"]
    assert remote.needed_files(8, 1, 2) == [f"rank-{rank:05d}-of-00008.safetensors" for rank in (4, 5, 6, 7)]
    for degree, size in ((1, 1), (8, 1), (8, 4), (12, 3)):
        names = [name for rank in range(size) for name in remote.needed_files(degree, rank, size)]
        assert names == [f"rank-{rank:05d}-of-{degree:05d}.safetensors" for rank in range(degree)]


PLAIN = """
import diffusers, sys
pipeline = diffusers.DiffusionPipeline.from_pretrained(sys.argv[1])
alone = diffusers.AutoModel.from_pretrained(sys.argv[1], subfolder="transformer", cache_dir=sys.argv[2])
expected = diffusers.AutoModel.from_pretrained(sys.argv[3], subfolder="transformer").state_dict()
for found in (pipeline.transformer.state_dict(), alone.state_dict()):
    assert found.keys() == expected.keys() and all(tensor.equal(expected[name]) for name, tensor in found.items())
"""


@pytest.mark.slow
def test_diffusers_does_not_see_our_folders(hub: StandInHub, folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Plain `from_pretrained` on a repo with ordinary weights and our sets beside them fetches none of our files."""
    source, out = folders
    repo = hub.add_folder(WHOLE, source)
    names = [str(path.relative_to(out)) for path in (out / "transformer").glob("tp*/*")]
    repo.commit(repo.files() | {name: File(name, (out / name).read_bytes()) for name in names}, "add the sets")
    argv = [sys.executable, "-c", PLAIN, WHOLE, str(tmp_path / "other"), str(source)]
    env = hub_clients.environment(hub.settings(tmp_path / "home"))
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    fetched = hub.fetched(WHOLE)
    assert not [name for name in fetched if "/tp" in name]
    assert fetched.count("transformer/diffusion_pytorch_model.safetensors") == 2


@pytest.mark.slow
def test_ordinary_weights_beside_a_set_are_not_fetched(
    hub: StandInHub, folders: tuple[Path, Path], client: Any, tmp_path: Path
) -> None:
    """The other way round: our loader, on a repo that holds both, leaves the component's ordinary weights there."""
    source, out = folders
    repo = hub.add_folder(WHOLE, source)
    shardconv.push(out, WHOLE, create_pr=True)
    settings = [hub.settings(tmp_path / "other")] * 2
    assert "transformer/tp2/shardconv.json" in repo.files("refs/pr/1")
    hub.log.clear()
    ranks.values(load_pipeline_of_pull, settings, WHOLE, n=2)
    assert {name for name in hub.fetched(WHOLE) if name.startswith("transformer/")} == set_names(2, 0, 1)


def load_pipeline_of_pull(settings: list[Settings], repo: str) -> None:
    """Without its text encoders."""
    hub_clients.point_at(settings[0])
    given = {"text_encoder": None, "text_encoder_2": None, "tokenizer": None, "tokenizer_2": None}
    loader.load_pipeline(repo, device="cpu", revision="refs/pr/1", **given)


@pytest.mark.slow
def test_b4_a_variant_of_the_other_components_is_fetched(hub: StandInHub, client: Any, tmp_path: Path) -> None:
    """`variant="fp16"`: the variant's files of the components that have it, the default ones of the others."""
    pipeline = small_pipelines.build_flux_pipeline()
    pipeline.save_pretrained(tmp_path / "source")
    pipeline.text_encoder.save_pretrained(tmp_path / "source" / "text_encoder", variant="fp16")
    shardconv.convert(tmp_path / "source", tmp_path / "out", tp=2)
    shardconv.push(tmp_path / "out", REPO)
    settings = [hub.settings(tmp_path / "other")] * 2
    hub.log.clear()
    ranks.values(load_variant, settings, REPO, n=2)
    fetched = {name for name in hub.fetched(REPO) if name.endswith(".safetensors") and "/tp2/" not in name}
    assert fetched == {
        "text_encoder/model.fp16.safetensors", "text_encoder_2/model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    }  # fmt: skip


def load_variant(settings: list[Settings], repo: str) -> None:
    """With a variant that one component has."""
    hub_clients.point_at(settings[0])
    loader.load_pipeline(repo, device="cpu", variant="fp16")


# What goes wrong


@pytest.fixture
def alone(filled: StandInHub, client: Any) -> Callable[..., Any]:
    """Load the set for one process, in this process."""
    return lambda repo=REPO, **options: loader.load_model(repo, device="cpu", subfolder="transformer", **options)


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def gate(hub: StandInHub) -> None:
    hub.repos[REPO].gated = "auto"
    hub.users["hf_alice"] = User("alice", may_write=())


def gate_nobody(hub: StandInHub) -> None:
    hub.repos[REPO].gated = "auto"
    del os.environ["HF_TOKEN"]


def hide(hub: StandInHub) -> None:
    hub.repos[REPO].private = True
    hub.users["hf_alice"] = User("alice", may_write=())


def forget(hub: StandInHub) -> None:
    hub.users.clear()


SAYS = f"{REPO}: not a folder here, and the Hub says: "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (gate, "gated, and your account has no access yet; ask for it on its page"),
        (gate_nobody, "gated, and no token was sent; accept its terms on its page, then: hf auth login"),
        (hide, "repository not found on the Hub; check the name, or log in if it is private: hf auth login"),
        (forget, "the Hub knows no such login (Invalid credentials in Authorization header); log in: hf auth login"),
    ],
)
def test_h9_each_refusal_has_its_own_words(
    filled: StandInHub, alone: Callable[..., Any], tmp_path: Path, change: Callable[[StandInHub], None], said: str
) -> None:
    """401 and 403 of a gated repo, a private one, an unknown token: what it is and the next step; nothing is cached."""
    change(filled)
    with pytest.raises(HubError) as caught:
        alone()
    assert str(caught.value) == SAYS + said
    assert cache_files(tmp_path / "home") == {}


def test_what_is_not_there_is_named(filled: StandInHub, alone: Callable[..., Any], tmp_path: Path) -> None:
    """No such repo, revision, component or degree: what was asked, what there is."""
    with pytest.raises(HubError, match=r"^org/nope: not a folder here, and the Hub says: repository not found"):
        alone("org/nope")
    with pytest.raises(HubError, match=f"^{SAYS}no revision 'nope' in the repo; check its branches and tags"):
        alone(revision="nope")
    with pytest.raises(SetError, match=r"the set is in transformer; add subfolder='transformer'$"):
        loader.load_model(REPO, device="cpu")
    with pytest.raises(SetError, match=r"nope: no converted set in it; run: shardconv convert --tp 1 org/tiny-tp OUT$"):
        loader.load_model(REPO, device="cpu", subfolder="nope")
    with pytest.raises(SetError, match=f"^{REPO}: no model_index.json, so not a converted pipeline; use load_model"):
        loader.load_pipeline(REPO, device="cpu")
    files = filled.repos[REPO].files()
    filled.add_repo("org/none", {name: file for name, file in files.items() if "/tp" not in name})
    with pytest.raises(SetError, match=r"no converted set in it; run: shardconv convert --tp 1 org/none OUT$"):
        alone("org/none")


@pytest.mark.slow
def test_a_degree_that_is_not_there_is_said_on_every_rank(filled: StandInHub, tmp_path: Path) -> None:
    """3 ranks, sets for 1, 2 and 8: every rank says which there are, and none fetched weights."""
    settings = filled.settings(tmp_path / "home")
    failed = ranks.same(ranks.run(load_component, settings, REPO, {"subfolder": "transformer"}, n=3))
    commit = filled.repos[REPO].refs["main"][:7]
    assert failed.issues == (
        f"every rank: {REPO} at {commit}, transformer: converted for tp degree 1 and 2 and 8, this group has 3 ranks; "
        "start as many as that, or run: shardconv convert --tp 3 SOURCE OUT",
    )
    assert filled.fetched(REPO) == ["transformer/config.json"]


@pytest.mark.slow
def test_a_wish_that_makes_no_sense_on_one_rank_is_said_on_all(filled: StandInHub, tmp_path: Path) -> None:
    """A token that cannot be sent, and force against `local_files_only`, on rank 1 alone: nobody waits for it."""
    settings = filled.settings(tmp_path / "home")
    wishes = [({"token": "hf_a b"}, "expected printable ASCII"), ({"force_download": True}, "local_files_only forbids")]
    for wish, words in wishes:
        options = [{"local_files_only": True}, {"local_files_only": True} | wish]
        failed = ranks.same(ranks.run(load_with, settings, options, n=2, timeout=20))
        assert failed.error == "LoadError"
        assert "rank 1: " in failed.text
        assert words in failed.text
    assert filled.log == []


def load_with(settings: Settings, options: list[Mapping[str, Any]]) -> None:
    """Each rank with options of its own."""
    load_component(settings, REPO, {"subfolder": "transformer"} | options[dist.get_rank()])


WEIGHTS = r"/storage/.*/tp1/rank-00000"


def reset(hub: StandInHub) -> None:
    hub.fail("GET", WEIGHTS, cut=1_000_000, reset=True)


def hang_up(hub: StandInHub) -> None:
    hub.fail("GET", WEIGHTS, cut=1_000_000)


def be_busy(hub: StandInHub) -> None:
    for method, path in (("GET", WEIGHTS), ("HEAD", "/tp1/rank-00000"), ("GET", "/api/models/")):
        hub.fail(method, path, status=503, headers={"Retry-After": "0"})
        hub.fail(method, path, status=429, headers={"Retry-After": "0"})


@pytest.mark.parametrize("fault", [reset, hang_up, be_busy])
def test_h3_a_download_that_stumbles_goes_on(
    filled: StandInHub, alone: Callable[..., Any], component: Path, fault: Callable[[StandInHub], None]
) -> None:
    """The connection is reset or ends in mid-file, the Hub is busy a few times: the load succeeds, bit for bit."""
    fault(filled)
    model = alone()
    expected = small_sets.build("flux").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"status": 503}, "the Hub fails with status 503 (injected), 5 attempts were made; run again later"),
        ({"status": 429}, "the Hub limits the rate of requests, 5 attempts were made; wait some minutes, or log in"),
        ({"status": 410, "text": "gone for good"}, "the Hub refuses with status 410 (gone for good); nothing more"),
        ({"edit": lambda data: data[:-100]}, "the Hub's client failed (OSError: Consistency check failed"),
        ({"edit": lambda data: data[:-99] + b"?" + data[-98:]}, "arrived altered (its digest is not the Hub's)"),
    ],
)
def test_h3_e9_a_download_that_fails_leaves_no_trace(
    filled: StandInHub, alone: Callable[..., Any], tmp_path: Path, fault: dict[str, Any], words: str
) -> None:
    """5xx and 429 for ever, another 4xx, a body cut short or altered: one sentence, no such file in the cache, and the
    next load is good."""
    filled.fail("GET", WEIGHTS, times=30, **fault)
    with pytest.raises(HubError) as caught:
        alone()
    assert "transformer/tp1/rank-00000-of-00001.safetensors: " + words in str(caught.value)
    assert "hf_alice" not in str(caught.value)
    asked = [request for request in filled.log if "/storage/" in request.path and "rank-" in request.path]
    assert len(asked) <= 30
    assert not [name for name in cache_files(tmp_path / "home") if "rank-" in name]
    digests = {file.sha256 for name, file in filled.repos[REPO].files().items() if "rank-" in name}
    assert not [name for name in cache_files(tmp_path / "home") if name.rpartition("/")[2] in digests]
    filled.faults.clear()
    alone(verify=True)


@pytest.mark.slow
def test_e9_a_damaged_cache_is_fetched_afresh_when_asked(
    filled: StandInHub, alone: Callable[..., Any], tmp_path: Path
) -> None:
    """A cached file that lost its end is noticed and fetched again; one with a flipped byte by `verify`, and
    `force_download=True` brings the good one."""
    alone()
    [link] = (tmp_path / "home").glob("hub/*/snapshots/*/transformer/tp1/rank-00000-of-00001.safetensors")
    good = link.read_bytes()
    link.resolve().write_bytes(good[:-1])
    alone(verify=True)
    assert link.read_bytes() == good
    link.resolve().write_bytes(good[:-99] + b"?" + good[-98:])
    with pytest.raises(SetError, match="is damaged"):
        alone(verify=True)
    alone(verify=True, force_download=True)
    assert link.read_bytes() == good


@pytest.mark.slow
def test_force_download_fetches_each_file_once(filled: StandInHub, tmp_path: Path) -> None:
    """Two ranks, forced: the shared file comes once, not once for each rank."""
    settings = filled.settings(tmp_path / "home")
    options = {"subfolder": "transformer", "force_download": True}
    ranks.values(load_component, settings, REPO, options | {"force_download": False}, n=2)
    filled.log.clear()
    ranks.values(load_component, settings, REPO, options, n=2)
    assert Counter(filled.fetched(REPO)) == Counter(set_names(2, 0, 1))


@pytest.mark.slow
def test_h11_a_cache_that_cannot_be_written_is_read(
    filled: StandInHub, alone: Callable[..., Any], tmp_path: Path
) -> None:
    """A filled cache without write access, and with another's locks: loads online and offline, and nothing changes."""
    alone()
    cache = tmp_path / "home" / "hub"
    shutil.rmtree(cache / ".locks")
    (cache / ".locks").write_text("a file, so that no lock can be made in it, not even by root")
    folders = [cache, *(path for path in cache.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    before = {path: (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in cache.rglob("*")}
    try:
        alone()
        alone(local_files_only=True)
        assert {path: (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in cache.rglob("*")} == before
        with pytest.raises(HubError, match=r"the cache cannot be written .*; set HF_HOME to a folder of your own"):
            alone(force_download=True)
    finally:
        for folder in folders:
            folder.chmod(0o755)


@pytest.mark.slow
def test_h5_a_cache_with_garbage_in_it_is_used(filled: StandInHub, alone: Callable[..., Any], tmp_path: Path) -> None:
    """Leftovers of a killed client, and damaged notes of which commit is main: ignored or rebuilt."""
    alone()
    [repo] = (tmp_path / "home" / "hub").glob("models--*")
    (repo / "refs" / "main").write_bytes(b"\0garbage")
    (repo / "trees").mkdir(exist_ok=True)
    (repo / "trees" / f"{filled.repos[REPO].refs['main']}.json").write_bytes(b"{garbage")
    (repo / "blobs" / "0123.incomplete").write_bytes(b"half a file")
    alone()
    assert (repo / "refs" / "main").read_text() == filled.repos[REPO].refs["main"]
    alone(local_files_only=True)


@pytest.mark.slow
def test_a_full_disk_is_said(filled: StandInHub, tmp_path: Path) -> None:
    """The system refuses to write on: one sentence, and nothing of the file is left."""
    settings = filled.settings(tmp_path / "home")
    [failed] = ranks.run(load_with_little_room, settings, n=1, group=False, env={"WORLD_SIZE": "1"})
    assert failed.error == "HubError"
    assert failed.text.endswith("no room left on the disk of the cache; make room, or set HF_HOME to another disk")
    assert not [name for name in cache_files(tmp_path / "home") if "rank-" in name or "incomplete" in name]


def load_with_little_room(settings: Settings) -> None:
    """No file may grow beyond a megabyte."""
    hub_clients.point_at(settings)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    loader.load_model(REPO, device="cpu", subfolder="transformer")


@pytest.mark.slow
def test_no_network_is_said(filled: StandInHub, alone: Callable[..., Any]) -> None:
    """A Hub that does not answer; that offline would do is in the message, and it does."""
    alone()
    filled.close()
    huggingface_hub.close_session()  # what is open would go on
    with pytest.raises(HubError, match=r"the Hub cannot be reached, .*; check the network, or set HF_HUB_OFFLINE=1"):
        alone()
    alone(local_files_only=True)


def test_a_folder_here_comes_before_a_repo(
    filled: StandInHub, client: Any, component: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`org/tiny-tp` that exists on disk is that folder; the Hub is not asked."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(component, tmp_path / REPO)
    loader.load_model(REPO, device="cpu")
    assert filled.log == []


@pytest.mark.slow
def test_the_token_given_is_the_one_sent(filled: StandInHub, alone: Callable[..., Any]) -> None:
    """`token=` wins over the environment, and no message shows it."""
    filled.users["hf_given"] = User("given", may_write=())
    alone(token="hf_given")
    assert {request.user for request in filled.log if "/storage/" not in request.path} == {"given"}
    filled.users.clear()
    filled.fail("GET", "/api/models/", status=403, text="hf_given may not", times=9)
    with pytest.raises(HubError) as caught:
        alone(token="hf_given")
    assert "(*** may not)" in str(caught.value)


@pytest.mark.slow
def test_the_stand_in_keeps_tokens_from_its_storage(filled: StandInHub, alone: Callable[..., Any]) -> None:
    """What the client fetched at the storage host came without a token; the stand-in would have refused it."""
    alone()
    storage = [request for request in filled.log if "/storage/" in request.path]
    assert storage
    assert all(request.user == "" and request.status == 200 for request in storage)


def test_the_stand_in_sees_what_it_forbids(client: Any) -> None:
    """Its own checks work: a payload that is never served, a wrong digest, an unknown commit."""
    file = File("a.safetensors", b"head", nbytes=1 << 36)
    assert (file.nbytes, file.is_lfs) == (1 << 36, True)
    with stand_in_hub.serving() as hub:
        hub.add_repo(REPO, {"a.safetensors": file})
        session = huggingface_hub.get_session()
        place = f"{hub.storage_url}/storage/{file.sha256}//{REPO}/resolve/main/a.safetensors"
        assert session.get(place).status_code == 500
        assert session.get(place, headers={"Range": "bytes=0-3"}).content == b"head"
        assert session.get(place, headers={"Range": "bytes=0-4"}).status_code == 500
        assert session.put(f"{hub.url}/upload/{'0' * 64}/0", content=b"x").status_code == 400
        assert json.loads(session.get(f"{hub.url}/api/models/{REPO}/revision/nope").content)["error"]
