"""A Hub repo as SOURCE, against a stand-in Hub on this machine: what is downloaded, recorded and refused."""

from __future__ import annotations

import json
import shutil
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import diffusers
import hub_clients
import pytest
import torch
import toys
from small_pipelines import build_flux_pipeline
from stand_in_hub import File, Repo, StandInHub, User

from shardconv import CheckpointError, HubError, Manifest, ShardconvError, convert
from shardconv.cli.main import main
from shardconv.remote import hub as hub_module

REPO = "org/tiny"
SAYS = f"{REPO}: not a folder here, and the Hub says: "
PART = {"subfolder": "transformer", "tp": 2}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repo's files: a small FluxPipeline, most components with a variant, stale weights beside an index, a set,
    a root-level file and a folder of another framework."""
    folder = tmp_path_factory.mktemp("repo") / "tiny"
    pipeline = build_flux_pipeline()
    pipeline.save_pretrained(folder, max_shard_size="2MB")
    toys.small_models.build("flux", 5).save_pretrained(folder / "transformer", variant="fp16", max_shard_size="2MB")
    pipeline.text_encoder.save_pretrained(folder / "text_encoder", variant="fp16")
    pipeline.text_encoder_2.save_pretrained(folder / "text_encoder_2", variant="fp16", max_shard_size="50kB")
    toys.write_weights(folder / "transformer" / toys.SINGLE, {})
    (folder / "flux1-dev.safetensors").write_bytes(b"never fetched")
    (folder / "README.md").write_text("card")
    (folder / "vae" / "onnx").mkdir()
    (folder / "vae" / "onnx" / "model.onnx").write_bytes(b"never fetched")
    (folder / "text_encoder" / "pytorch_model.bin").write_bytes(b"never fetched")
    return folder


@pytest.fixture
def repo(hub: StandInHub, pipe: Path) -> Repo:
    return hub.add_folder(REPO, pipe)


def shards(pipe: Path, variant: str = "") -> set[str]:
    """Index and shards of the transformer."""
    index = f"{toys.STEM}.safetensors.index{variant}.json"
    names = {index, *json.loads((pipe / "transformer" / index).read_text())["weight_map"].values()}
    return {f"transformer/{name}" for name in names}


@pytest.mark.slow
def test_only_what_a_conversion_needs_is_downloaded(hub: StandInHub, repo: Repo, pipe: Path, tmp_path: Path) -> None:
    """The command line on `--subfolder` of a repo fetches that component's config, index and shards, once, and converts
    them as from disk. The manifest records repo and commit; the second run finds all of it in the cache."""
    out, settings = tmp_path / "out", hub.settings(tmp_path / "home")
    argv = ["convert", "--tp", "2", REPO, str(out), "--subfolder", "transformer"]
    done = hub_clients.command(settings, *argv)
    assert done.returncode == 0, done.stderr
    assert Counter(hub.fetched(REPO)) == Counter({"transformer/config.json", *shards(pipe)})
    source = Manifest.read(out / "transformer" / "tp2").source
    assert (source.repo, source.revision) == (REPO, repo.refs["main"])
    assert (source.subfolder, source.variant) == ("transformer", None)
    with pytest.warns(match="ignored beside it"):  # the variant and the stale file, which a repo's snapshot lacks
        convert(pipe, tmp_path / "local", **PART)
    for path in (tmp_path / "local" / "transformer" / "tp2").glob("*.safetensors"):
        assert path.read_bytes() == (out / "transformer" / "tp2" / path.name).read_bytes()
    hub.log.clear()
    again = hub_clients.command(settings, *argv, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["sets"][0]["already_there"] is True
    assert hub.fetched(REPO) == []


@pytest.mark.slow
def test_b4_only_the_variant_is_downloaded(
    hub: StandInHub, repo: Repo, client: Any, pipe: Path, tmp_path: Path
) -> None:
    """With a variant the default weights of the component stay on the Hub."""
    manifest = convert(REPO, tmp_path / "out", **PART, variant="fp16")
    assert Counter(hub.fetched(REPO)) == Counter({"transformer/config.json", *shards(pipe, ".fp16")})
    assert manifest.source.variant == "fp16"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"low_disk": True}, {"dry_run": True}])
@pytest.mark.parametrize(("part", "where"), [({"tp": 2}, f"{REPO} at "), (PART, f"{REPO}/transformer at ")])
def test_b4_a_variant_that_the_repo_lacks(
    hub: StandInHub, repo: Repo, client: Any, tmp_path: Path, part: Any, where: str, options: Any
) -> None:
    """Refused with the variants that there are, before a weight file is asked for."""
    with pytest.raises(CheckpointError) as caught:
        convert(REPO, tmp_path / "out", **part, **options, variant="bf16")
    assert str(caught.value).startswith(where)
    assert str(caught.value).endswith(
        ": expected weights of variant 'bf16', found the default ones, fp16; choose another --variant or leave it out"
    )
    assert not [name for name in hub.fetched(REPO) if name.endswith(".safetensors")]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{"low_disk": True}, {"dry_run": True}, {}])
def test_a_header_beyond_the_limit_is_told_of_a_repo_too(
    hub: StandInHub, pipe: Path, client: Any, tmp_path: Path, options: Any
) -> None:
    """However the file is looked at: the declared length and what the format allows."""
    data = struct.pack("<Q", 100_000_001) + b'{"a":' + bytes(300_000)
    hub.add_repo("org/long", {"config.json": (pipe / "transformer" / "config.json").read_bytes(), toys.SINGLE: data})
    with pytest.raises(
        CheckpointError, match="its header takes 100,000,001 bytes, readers of the format take at most 100,000,000"
    ):
        convert("org/long", tmp_path / "out", tp=2, **options)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["fp16", None])
def test_b4_of_each_component_one_variant_is_downloaded(
    hub: StandInHub, repo: Repo, client: Any, pipe: Path, tmp_path: Path, variant: str | None
) -> None:
    """A pipeline: of every component the variant's files where it has such, the default ones where not, never both; no
    root-level weights, no other framework's, nothing twice. The result is a pipeline that loads, in real files."""
    out = tmp_path / "out"
    convert(REPO, out, tp=2, variant=variant)
    fetched = hub.fetched(REPO)
    assert len(fetched) == len(set(fetched))
    weights = {name for name in fetched if name.endswith((".safetensors", ".bin", ".onnx"))}
    index = f"model.safetensors.index.{variant}.json" if variant else None
    second = set(json.loads((pipe / "text_encoder_2" / index).read_text())["weight_map"].values()) if index else {
        "model.safetensors"
    }  # fmt: skip
    assert weights == {
        *(name for name in shards(pipe, f".{variant}" if variant else "") if name.endswith(".safetensors")),
        f"text_encoder/model.{variant}.safetensors" if variant else "text_encoder/model.safetensors",
        *(f"text_encoder_2/{name}" for name in second),
        "vae/diffusion_pytorch_model.safetensors",
    }
    assert not any(path.is_symlink() for path in out.rglob("*"))
    assert (out / "README.md").read_text() == "card"
    shutil.rmtree(out / "transformer")
    rest = diffusers.DiffusionPipeline.from_pretrained(out, transformer=None, variant=variant)
    assert rest.text_encoder_2 is not None


@pytest.mark.slow
def test_a_repo_with_sets_beside_its_weights_is_converted(
    hub: StandInHub, repo: Repo, client: Any, tmp_path: Path
) -> None:
    """Sets that somebody pushed into the repo are not fetched, and do not make it look converted."""
    more = {f"transformer/tp4/{name}": File(name, b"x") for name in ("shardconv.json", "replicated.safetensors")}
    repo.commit(repo.files() | more, "sets")
    convert(REPO, tmp_path / "out", tp=2)
    assert not [name for name in hub.fetched(REPO) if "/tp4/" in name]


@pytest.mark.parametrize("revision", ["dev", "refs/pr/1", None])
def test_a_revision_is_pinned(hub: StandInHub, repo: Repo, client: Any, tmp_path: Path, revision: str | None) -> None:
    """The commit that a branch names is what is fetched and recorded, also when the branch moves on meanwhile."""
    commit = repo.refs["main"]
    repo.refs["dev"] = repo.refs["refs/pr/1"] = commit

    def move(stage: str, request: Any) -> None:
        if stage == "end" and request.method == "GET" and request.path.endswith("/transformer/config.json"):
            hub.watch = None
            repo.commit({}, "emptied", revision or "main")

    hub.watch = move
    assert convert(REPO, tmp_path / "out", **PART, revision=revision).source.revision == commit


# A dry run


def big_repo(hub: StandInHub) -> dict[str, File]:
    """The files of a FLUX.2-sized pipeline: real config, index and headers; payload that is never served."""
    with torch.device("meta"):
        model = diffusers.Flux2Transformer2DModel()
    files: dict[str, File] = {}
    entries: list[dict[str, Any]] = [{}]
    position = 0
    weight_map: dict[str, int] = {}
    for name, tensor in model.state_dict().items():
        nbytes = tensor.numel() * 2
        if position + nbytes > 5_000_000_000:
            entries.append({})
            position = 0
        entries[-1][name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [position, position + nbytes],
        }
        weight_map[name] = len(entries)
        position += nbytes
    names = {i: f"{toys.STEM}-{i:05d}-of-{len(entries):05d}.safetensors" for i in range(1, len(entries) + 1)}
    for i, held in enumerate(entries, 1):
        raw = json.dumps(held).encode()
        total = 8 + len(raw) + max(entry["data_offsets"][1] for entry in held.values())
        first_bytes = struct.pack("<Q", len(raw)) + raw + bytes(128 << 10)  # little payload may come with the header
        files[f"transformer/{names[i]}"] = File(names[i], first_bytes, total)
    index = {"weight_map": {name: names[i] for name, i in weight_map.items()}}
    files[f"transformer/{toys.INDEX}"] = File("x.json", json.dumps(index).encode())
    config = {"_class_name": "Flux2Transformer2DModel", **dict(model.config)}
    files["transformer/config.json"] = File("x.json", json.dumps(config, default=list).encode())
    components = {"transformer": ["diffusers", "Flux2Transformer2DModel"], "vae": ["diffusers", "AutoencoderKLFlux2"],
                  "text_encoder": ["transformers", "Mistral3ForConditionalGeneration"],
                  "tokenizer": ["transformers", "PixtralProcessor"]}  # fmt: skip
    files["model_index.json"] = File("x.json", json.dumps({"_class_name": "Flux2Pipeline", **components}).encode())
    files["tokenizer/tokenizer.json"] = File("x.json", b"{}")
    files["text_encoder/config.json"] = files["vae/config.json"] = File("x.json", b"{}")
    for i in range(1, 11):
        files[f"text_encoder/model-{i:05d}-of-00010.safetensors"] = File("x.safetensors", b"%d" % i, 4_800_000_000)
    weights = {str(i): f"model-{i:05d}-of-00010.safetensors" for i in range(1, 11)}
    files["text_encoder/model.safetensors.index.json"] = File("x.json", json.dumps({"weight_map": weights}).encode())
    files["vae/diffusion_pytorch_model.safetensors"] = File("x.safetensors", bytes(128 << 10), 160_000_000)
    return files


@pytest.mark.slow
def test_a_dry_run_reads_headers_only(
    hub: StandInHub, client: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repo of 112 GB, 64 GB of them cut: under 5 MB go over the wire, no weight file, nothing is written; what would
    be downloaded is said."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    files = big_repo(hub)
    hub.add_repo("org/big", files)
    argv = ["convert", "--tp", "8", "--dry-run", "--json", "org/big", str(tmp_path / "out")]
    assert main(argv) == 0
    document = json.loads(capsys.readouterr().out)
    assert hub.sent_nbytes() < 5_000_000
    [found] = document["sets"]
    weights = {name: file.nbytes for name, file in files.items() if name.startswith("transformer/") and file.is_lfs}
    assert 64e9 < sum(weights.values()) < 65e9
    assert abs(found["nbytes"] - sum(weights.values())) < 1_000_000
    missing = {name: file.nbytes for name, file in files.items()} | document["download"]
    assert missing == {name: file.nbytes for name, file in files.items()}
    assert sum(document["download"].values()) > 110e9
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "temporary").iterdir())
    assert {request.status for request in hub.log} <= {200, 206, 302}


@pytest.mark.slow
def test_a_dry_run_says_what_the_conversion_says(hub: StandInHub, repo: Repo, client: Any, tmp_path: Path) -> None:
    """Same layout as on disk; then, with everything cached, nothing is left to download."""
    planned = convert(REPO, tmp_path / "out", **PART, dry_run=True)
    made = convert(REPO, tmp_path / "out", **PART)
    assert [file.nbytes for file in planned.files] == [file.nbytes for file in made.files]
    assert planned.tensors == made.tensors
    hub.log.clear()
    assert main(["convert", "--tp", "2", "--dry-run", "--quiet", REPO, str(tmp_path / "new")]) == 0
    assert hub.sent_nbytes() < 1_000_000


# Refusals


def refusal(capsys: pytest.CaptureFixture[str], out: Path, *argv: str) -> str:
    """The one line that a failed conversion says; nothing was written and no token is in it."""
    assert main(["convert", "--tp", "2", *argv[:1], str(out), *argv[1:]]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert "hf_alice" not in said.err
    assert not out.exists()
    return said.err.removeprefix("shardconv: ").rstrip()


@pytest.mark.slow
def test_h9_refusals_are_told_apart(
    hub: StandInHub, repo: Repo, client: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """404, 403 of a gated repo, 401 without a token: three messages with the next step, before any work."""
    out = tmp_path / "out"
    said = "repository not found on the Hub; check the name, or log in if it is private: hf auth login"
    assert refusal(capsys, out, "org/nope") == f"org/nope: not a folder here, and the Hub says: {said}"
    repo.gated = "manual"
    hub.users["hf_alice"] = User("alice", may_write=())
    assert refusal(capsys, out, REPO) == f"{SAYS}gated, and your account has no access yet; ask for it on its page"
    monkeypatch.delenv("HF_TOKEN")
    said = refusal(capsys, out, REPO, "--dry-run")
    assert said == f"{SAYS}gated, and no token was sent; accept its terms on its page, then: hf auth login"
    assert hub.fetched(REPO) == []
    hub.users["hf_alice"] = User("alice", may_write=(), accepted=(REPO,))
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    convert(REPO, out, **PART)


def test_what_is_not_there_is_one_clear_error(
    hub: StandInHub, repo: Repo, client: Any, tmp_path: Path, capsys: Any
) -> None:
    """A mistyped component or revision is refused before anything is downloaded."""
    out = tmp_path / "out"
    said = refusal(capsys, out, REPO, "--subfolder", "transfromer")
    assert said == f"{REPO}: nothing to convert in transfromer, it has no transfromer/config.json; check the name"
    said = refusal(capsys, out, REPO, "--revision", "v9")
    assert said == f"{SAYS}no revision 'v9' in the repo; check its branches and tags on its page"
    assert hub.fetched(REPO) == []


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_one_clear_error(tmp_path: Path, hub: StandInHub) -> None:
    """Without a network the message names the repo and the failed connection; the command line, for real."""
    settings = hub.settings(tmp_path / "home") | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = hub_clients.command(settings, "convert", "--tp", "2", REPO, tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.startswith(f"shardconv: {SAYS}the Hub cannot be reached, the connection failed")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../../secret.safetensors", "/etc/secret.safetensors", "..", "a/b.safetensors"])
@pytest.mark.parametrize("dry_run", [True, False])
def test_h1_an_index_that_leads_out_is_refused(
    hub: StandInHub, repo: Repo, client: Any, tmp_path: Path, name: str, dry_run: bool
) -> None:
    """`weight_map` values of a repo are plain names of their own folder or nothing is fetched by them."""
    files = repo.files()
    index = json.loads(files[f"transformer/{toys.INDEX}"].data)
    index["weight_map"][next(iter(index["weight_map"]))] = name
    repo.commit(files | {f"transformer/{toys.INDEX}": File("x.json", json.dumps(index).encode())}, "evil")
    with pytest.raises(
        CheckpointError, match=r"expected (plain file names of its own folder|safetensors files), found"
    ):
        convert(REPO, tmp_path / "out", **PART, dry_run=dry_run)
    assert not (tmp_path / "out").exists()
    assert set(hub.fetched(REPO)) == {"transformer/config.json", f"transformer/{toys.INDEX}"}


def test_b6_a_shard_that_the_repo_lacks_is_named(hub: StandInHub, repo: Repo, client: Any, tmp_path: Path) -> None:
    """An index that names a file the repo does not have: which one; no output."""
    shard = sorted(name for name in shards_of(repo) if name.endswith(".safetensors"))[0]
    repo.commit({name: file for name, file in repo.files().items() if name != shard}, "lost")
    for dry_run in (True, False):
        with pytest.raises(ShardconvError, match=shard.rpartition("/")[2]):
            convert(REPO, tmp_path / "out", **PART, dry_run=dry_run)
    assert not (tmp_path / "out").exists()


def shards_of(repo: Repo) -> set[str]:
    index = json.loads(repo.files()[f"transformer/{toys.INDEX}"].data)
    return {f"transformer/{name}" for name in index["weight_map"].values()}


@pytest.mark.slow
def test_h10_offline_no_request_is_made(
    hub: StandInHub, repo: Repo, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HF_HUB_OFFLINE=1: a cached repo converts, by branch name, with the same commit in the manifest; one that is not
    cached is one sentence."""
    online = convert(REPO, tmp_path / "out", tp=2)
    hub.log.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    offline = convert(REPO, tmp_path / "again", tp=2)
    assert (offline.conversion_id, offline.source) == (online.conversion_id, online.source)
    assert convert(REPO, tmp_path / "again", tp=4, dry_run=True).source.revision == repo.refs["main"]
    with pytest.raises(HubError, match=r"^org/other at main: not in the cache, and the Hub is not asked or does not"):
        convert("org/other", tmp_path / "other", tp=2)
    assert hub.log == []


@pytest.mark.slow
def test_h13_offline_a_partial_cache_is_refused(
    hub: StandInHub, repo: Repo, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the shards is not in the cache: offline it is named, and nothing is written."""
    convert(REPO, tmp_path / "out", **PART)
    shard = sorted(name for name in shards_of(repo))[-1]
    [link] = (tmp_path / "home").glob(f"hub/*/snapshots/*/{shard}")
    link.unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ShardconvError, match=link.name):
        convert(REPO, tmp_path / "again", **PART)
    assert not (tmp_path / "again").exists()


@pytest.mark.slow
def test_h11_a_cache_that_cannot_be_written_is_read(hub: StandInHub, repo: Repo, client: Any, tmp_path: Path) -> None:
    """A filled cache without write access, and with another's locks, is converted from and stays as it is."""
    convert(REPO, tmp_path / "out", **PART)
    cache = tmp_path / "home" / "hub"
    shutil.rmtree(cache / ".locks")
    (cache / ".locks").write_text("a file, so that no lock can be made in it, not even by root")
    folders = [cache, *(path for path in cache.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    before = {path: (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in cache.rglob("*")}
    try:
        convert(REPO, tmp_path / "again", **PART)
        assert {path: (path.lstat().st_mtime_ns, path.lstat().st_ino) for path in cache.rglob("*")} == before
    finally:
        for folder in folders:
            folder.chmod(0o755)


@pytest.mark.slow
def test_e9_a_download_altered_on_the_way_is_thrown_away(
    hub: StandInHub, repo: Repo, client: Any, tmp_path: Path
) -> None:
    """A shard of the right length with a wrong byte is not converted nor kept in the cache; a run later works."""
    hub.fail("GET", r"/storage/.*/transformer/.*-00002-of", edit=lambda data: data[:-9] + b"?" + data[-8:])
    with pytest.raises(HubError, match=r"-00002-of-\d+.safetensors: arrived altered \(its digest is not the Hub's\)"):
        convert(REPO, tmp_path / "out", **PART)
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "home").glob("hub/*/snapshots/*/transformer/*-00002-of*"))
    convert(REPO, tmp_path / "out", **PART)


def test_ctrl_c_while_downloading_says_where_it_stays(
    hub: StandInHub, repo: Repo, client: Any, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a download leaves nothing in OUT, and does not claim to leave nothing in the Hub's cache."""

    def stopped(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub_module.Repo, "fetch", stopped)
    assert main(["convert", "--tp", "2", REPO, str(tmp_path / "out")]) == 130
    said = capsys.readouterr().err
    assert said == f"shardconv: stopped; what came of {REPO} stays in the Hub's cache, where the next run goes on\n"
    assert not (tmp_path / "out").exists()
