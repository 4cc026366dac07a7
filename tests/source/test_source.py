"""What counts as the checkpoint: which files are read, and what is refused by name before anything is written."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import diffusers
import pytest
import safetensors.torch
import torch
import toys
from toys import INDEX, SHARDS, SINGLE, STEM

from shardconv import CheckpointError, PlanError, ShardconvWarning, convert
from shardconv.format.weights import select_files

FIRST = "blocks.0.attn.to_q.weight"  # a tensor of T that every check may look at


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T, saved once; tests work on copies."""
    return toys.save(toys.build(toys.ToyTransformer), tmp_path_factory.mktemp("pristine") / "T")


@pytest.fixture
def source(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of T to break."""
    toys.install(monkeypatch)
    assert set(os.listdir(pristine)) == {"config.json", INDEX, *SHARDS}
    return Path(shutil.copytree(pristine, tmp_path / "T"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], source: Path, out: Path) -> Refused:
    """Converts `source` for 2 ranks, which must fail and leave nothing; gives the message."""

    def run(error: type[Exception] = CheckpointError, given: object = source, **options: object) -> str:
        return toys.refused(capsys, error, given, out, root=source.parent, **({"tp": 2} | options))

    return run


def state(folder: Path, files: Iterable[str] = SHARDS) -> dict[str, torch.Tensor]:
    return {
        key: tensor for name in files for key, tensor in safetensors.torch.load((folder / name).read_bytes()).items()
    }


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def set_of(out: Path, tp: int = 2) -> dict[str, torch.Tensor]:
    """The tensors of a tp 1 set, or rank 0's of another one."""
    return toys.rank_states(out / f"tp{tp}")[0]


# --- B: which files belong to the checkpoint


def test_b1_the_index_is_the_only_authority(source: Path, out: Path) -> None:
    """A stale shard set beside the index is left alone: its values reach no rank file, and one warning names it."""
    stale = [f"{STEM}-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    names = list(state(source))
    for i, name in enumerate(stale):
        toys.write_weights(source / name, {key: torch.full((2, 2), 7.0) for key in names[i::3]})
    with pytest.warns(ShardconvWarning) as caught:
        convert(source, out, tp=1)
    assert len(caught) == 1
    assert str(caught[0].message) == f"{source}: {INDEX} decides; ignored beside it: {', '.join(stale)}"
    whole = state(source)
    made = set_of(out, 1)
    assert set(made) == set(whole)
    assert all(torch.equal(made[key], whole[key]) for key in whole)


def test_b1_a_name_in_two_selected_files_is_an_error(source: Path, refused: Refused) -> None:
    """When two files of the index hold one name, neither wins: both files and the tensor are named."""
    second = state(source, SHARDS[1:])
    toys.write_weights(source / SHARDS[1], second | {FIRST: state(source)[FIRST]})
    assert f"{FIRST}: stands in {SHARDS[0]} and in {SHARDS[1]}" in refused()


def test_b2_pickled_weights_beside_safetensors_are_ignored_aloud(source: Path, out: Path) -> None:
    """Weights saved again as .bin change nothing: the safetensors files are taken, as `from_pretrained` does."""
    model = toys.build(diffusers.ToyTransformer)
    torch.nn.init.zeros_(model.blocks[0].attn.to_q.weight)
    model.save_pretrained(source.parent / "pickled", safe_serialization=False)
    shutil.copy(source.parent / "pickled" / f"{STEM}.bin", source)
    with pytest.warns(ShardconvWarning, match=f"{INDEX} decides; ignored beside it: {STEM}.bin"):
        convert(source, out, tp=1)
    loaded = diffusers.ToyTransformer.from_pretrained(source).state_dict()
    made = set_of(out, 1)
    assert all(torch.equal(made[key], loaded[key]) for key in loaded)


def test_b2_an_index_left_by_a_sharded_save_is_not_guessed_around(source: Path, refused: Refused) -> None:
    """Saved in one file over shards, the old index stays and names absent files: refused, as `from_pretrained` does."""
    toys.save(toys.build(diffusers.ToyTransformer), source, max_shard_size="1GB")
    assert set(os.listdir(source)) == {"config.json", INDEX, SINGLE}
    with pytest.raises(FileNotFoundError):
        diffusers.ToyTransformer.from_pretrained(source)
    message = refused()
    assert f"{SHARDS[0]}: named by the index" in message
    assert f"{SHARDS[1]}: named by the index" in message


def test_b4_only_the_files_of_the_variant_are_read(source: Path, out: Path) -> None:
    """With a variant the default files are not so much as opened, and the manifest says which files were taken."""
    toys.save(toys.build(diffusers.ToyTransformer), source, variant="fp16")
    for name in SHARDS:
        (source / name).write_bytes(b"not a safetensors file")
    with pytest.warns(ShardconvWarning, match="ignored beside it"):
        manifest = convert(source, out, tp=2, variant="fp16")
    assert manifest.source.variant == "fp16"
    assert [file.name for file in manifest.source.files] == [
        f"{STEM}.fp16-00001-of-00002.safetensors", f"{STEM}.fp16-00002-of-00002.safetensors"
    ]  # fmt: skip


def test_b4_without_a_variant_its_files_are_not_read(source: Path, out: Path) -> None:
    """No variant asked for: the default files are taken, whatever variants stand beside them."""
    (source / f"{STEM}.fp16.safetensors").write_bytes(b"not a safetensors file")
    with pytest.warns(ShardconvWarning, match=rf"ignored beside it: {STEM}\.fp16\.safetensors"):
        manifest = convert(source, out, tp=2)
    assert manifest.source.variant is None
    assert [file.name for file in manifest.source.files] == list(SHARDS)


@pytest.mark.slow
@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("saved", "found"),
    [
        ([], "the default ones"),
        ([f"{STEM}.fp32.safetensors", f"{STEM}.fp32-00001-of-00002.safetensors"], "the default ones, fp32"),
        ([f"{STEM}.safetensors.index.fp32.json", f"{STEM}.safetensors.non_ema.index.json"],
         "the default ones, fp32, non_ema"),
        ([f"{STEM}.bf16.bin", f"{STEM}-00001-of-00002.bf16.safetensors"], "the default ones"),
    ],
)  # fmt: skip
def test_b4_a_variant_of_which_there_is_nothing(
    source: Path, refused: Refused, saved: list[str], found: str, dry_run: bool
) -> None:
    """A folder without weights of the variant is refused, as by `from_pretrained`, with the variants that there are;
    pickled ones and shards without their index are none."""
    for name in saved:
        (source / name).write_bytes(b"not read")
    with pytest.raises(OSError, match="no file named"):
        diffusers.ToyTransformer.from_pretrained(source, variant="bf16", use_safetensors=True)
    options = {"dry_run": True} if dry_run else {}
    assert refused(variant="bf16", **options) == (
        f"{source}: expected weights of variant 'bf16', found {found}; choose another --variant or leave it out"
    )


def test_b4_the_only_weights_are_of_another_variant(source: Path, refused: Refused) -> None:
    """The default files are not among what is offered where there are none."""
    for name in (INDEX, *SHARDS):
        (source / name).unlink()
    toys.save(toys.build(diffusers.ToyTransformer), source, variant="fp16")
    assert "expected weights of variant 'bf16', found fp16; choose" in refused(variant="bf16")


def test_b6_a_tensor_that_the_index_lacks(source: Path, refused: Refused) -> None:
    """A tensor in a shard but not in the index: the message names it, its file and the index."""
    listed = weight_map(source)
    file = listed.pop(FIRST)
    toys.edit_json(source / INDEX, weight_map=listed)
    assert refused() == f"{FIRST}: stands in {file} but is not in {INDEX}; the index is incomplete"


def test_b6_i4_a_shard_that_is_absent(source: Path, refused: Refused) -> None:
    """An absent shard is the first thing said, with a tensor it would hold, and nothing about tp."""
    (source / SHARDS[1]).unlink()
    first = next(name for name, file in weight_map(source).items() if file == SHARDS[1])
    assert refused() == f"{SHARDS[1]}: named by the index (for {first} and others), absent from {source}; fetch it"


def test_b6_a_shard_of_another_revision(source: Path, refused: Refused) -> None:
    """A shard that lacks a tensor the index promises: the message names tensor, file and the likely cause."""
    second = state(source, SHARDS[1:])
    lost = next(iter(second))
    toys.write_weights(source / SHARDS[1], {key: tensor for key, tensor in second.items() if key != lost})
    assert refused() == f"{lost}: {INDEX} says {SHARDS[1]}, which lacks it; the file is of another revision"


def test_b6_a_tensor_in_another_shard_than_the_index_says(source: Path, refused: Refused) -> None:
    """Files and index that disagree about where a tensor stands are a mixed set, refused by name."""
    listed = weight_map(source)
    file = listed[FIRST]
    listed[FIRST] = next(name for name in SHARDS if name != file)
    toys.edit_json(source / INDEX, weight_map=listed)
    assert refused().startswith(f"{FIRST}: {INDEX} says {listed[FIRST]}, found in {file}")


def test_b2_an_index_left_by_a_pickled_save_is_not_guessed_around(source: Path, refused: Refused) -> None:
    """Saved as .bin over shards, which deletes them: the index left behind is believed, and the absent files named."""
    toys.build(diffusers.ToyTransformer).save_pretrained(source, safe_serialization=False)
    assert set(os.listdir(source)) == {"config.json", INDEX, f"{STEM}.bin"}
    assert f"{SHARDS[0]}: named by the index" in refused()


@pytest.mark.parametrize("name", ["consolidated.safetensors", "model.safetensors", "flux1-dev.safetensors"])
def test_b8_original_format_files_beside_the_shards_are_not_read(source: Path, out: Path, name: str) -> None:
    """A full original-format file beside T is not opened, only mentioned."""
    (source / name).write_bytes(b"never opened")
    with pytest.warns(ShardconvWarning, match=f"ignored beside it: {name}"):
        convert(source, out, tp=2)
    assert set(set_of(out)) == set(weight_map(source))


def test_b10_diffusers_never_takes_or_deletes_our_files(source: Path, out: Path) -> None:
    """`save_pretrained` over OUT or into a set deletes none of our files, and `from_pretrained` loads none of them."""
    convert(source, out, tp=2)
    before = toys.contents(out / "tp2")
    for folder in (out, out / "tp2"):
        with pytest.raises(OSError, match="no file named"):
            diffusers.ToyTransformer.from_pretrained(folder, config=str(source))
        diffusers.ToyTransformer.from_pretrained(source).save_pretrained(folder, max_shard_size="1MB")
    assert before.items() <= toys.contents(out / "tp2").items()
    assert not any(name.startswith(STEM) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "model."])
def test_b13_names_with_a_wrapper_prefix(source: Path, refused: Refused, wrapper: str) -> None:
    """Keys with one level more than the model are refused: what is missing, what stands there, and why."""
    whole = state(source)
    for name in (INDEX, *SHARDS):
        (source / name).unlink()
    toys.write_weights(source / SINGLE, {wrapper + key: tensor for key, tensor in whole.items()})
    message = refused()
    assert f"{FIRST}: the model has it, the checkpoint does not" in message
    assert f": every name starts with {wrapper!r}; save the model without its wrapper" in message


def test_b13_names_that_do_not_match_are_listed_both_ways(source: Path, refused: Refused) -> None:
    """When the model lacks some names and the checkpoint others, the one error lists both, so a renaming shows."""
    whole = state(source)
    for name in (INDEX, *SHARDS):
        (source / name).unlink()
    renamed = {key.replace("proj_in", "x_embedder"): tensor for key, tensor in whole.items()}
    toys.write_weights(source / SINGLE, renamed)
    message = refused()
    for leaf in ("weight", "bias"):
        assert f"proj_in.{leaf}" in message
        assert f"x_embedder.{leaf}" in message


def test_b14_missing_keys_are_named(source: Path, refused: Refused) -> None:
    """A config of 3 layers over weights of 2 fails, naming each absent tensor."""
    toys.edit_json(source / "config.json", num_layers=3)
    message = refused()
    whole = [key for key in state(source) if key.startswith("blocks.1.")]
    for key in whole:
        assert f"{key.replace('.1.', '.2.', 1)}: the model has it, the checkpoint does not" in message


def test_b14_shapes_of_another_model_are_named(source: Path, refused: Refused) -> None:
    """A tensor of the right name but another shape is refused with both shapes."""
    whole = state(source)
    toys.write_weights(source / SHARDS[0], {
        key: torch.zeros(3, 5) if key == FIRST else tensor for key, tensor in state(source, SHARDS[:1]).items()
    })  # fmt: skip
    assert refused() == (
        f"{FIRST}: expected shape {list(whole[FIRST].shape)} by config.json, found [3, 5] in {SHARDS[0]}; "
        "config and weights are of different models"
    )


def test_unexpected_tensors_are_left_out_aloud(source: Path, out: Path) -> None:
    """A tensor that the model does not have is warned about by name and stands in no rank file."""
    toys.write_weights(source / SHARDS[1], state(source, SHARDS[1:]) | {"extra.weight": torch.ones(2)})
    toys.edit_json(source / INDEX, weight_map=weight_map(source) | {"extra.weight": SHARDS[1]})
    with pytest.warns(ShardconvWarning) as caught:
        manifest = convert(source, out, tp=2)
    assert [str(each.message) for each in caught] == [
        f"{source}: tensors that ToyTransformer does not have are left out: extra.weight"
    ]
    assert manifest.left_out == ("extra.weight",)
    assert all("extra.weight" not in each for each in toys.rank_states(out / "tp2"))


def test_unexpected_tensors_that_the_class_ignores_are_left_out_quietly(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a class lists in `_keys_to_ignore_on_load_unexpected` is left out without a word, scales too."""
    toys.install(monkeypatch, _keys_to_ignore_on_load_unexpected=[r"norm_added_q", r"^old\."])
    extra = {"blocks.0.norm_added_q.weight": torch.ones(2), "old.weight_scale": torch.ones(2)}
    toys.write_weights(source / SHARDS[1], state(source, SHARDS[1:]) | extra)
    toys.edit_json(source / INDEX, weight_map=weight_map(source) | dict.fromkeys(extra, SHARDS[1]))
    manifest = convert(source, out, tp=2)
    assert set(manifest.left_out) == set(extra)


@pytest.mark.slow
@pytest.mark.parametrize(
    "leaf",
    ["weight_scale", "weight_scale_inv", "input_scale", "scale_weight", "weight.absmax", "weight.quant_map", "SCB",
     "weight.quant_state.bitsandbytes__nf4", "weight.nested_absmax", "qweight", "qzeros", "scales", "g_idx"],
)  # fmt: skip
def test_quantizer_state_is_an_error_not_a_warning(source: Path, refused: Refused, leaf: str) -> None:
    """An unexpected tensor that looks like a scale means the weights are quantized: refused by name."""
    key = f"blocks.0.attn.to_q.{leaf}"
    toys.write_weights(source / SHARDS[1], state(source, SHARDS[1:]) | {key: torch.ones(2)})
    toys.edit_json(source / INDEX, weight_map=weight_map(source) | {key: SHARDS[1]})
    assert refused() == (f"{key}: looks like quantizer state, the model has no such tensor; convert an unquantized one")


@pytest.mark.parametrize("key", ["double_blocks.0.img_attn.qkv.weight", "model.diffusion_model.x_embedder.weight"])
def test_b15_original_format_keys_are_refused(source: Path, out: Path, refused: Refused, key: str) -> None:
    """Original-format weights, whose fused rows are laid out otherwise, are refused wherever they stand."""
    original = {key: torch.ones(4, 4)}
    for name in (INDEX, *SHARDS):
        (source / name).unlink()
    toys.write_weights(source / SINGLE, original)
    assert f"{key}: an original-format key (1 in all), not diffusers layout; convert it first" in refused()
    alone = toys.write_weights(source.parent / "flux1-dev.safetensors", original)
    assert "an original-format single file, not diffusers layout; convert it first" in refused(given=alone)
    (source / "config.json").unlink()
    assert f"no config.json, found {SINGLE}; an original-format file is not diffusers layout" in refused()


# --- what stands in place of weights


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345678\n",
         "a Git LFS pointer, not the weights; run: git lfs pull"),
        (b"<!DOCTYPE html>\n<html><body>Access denied</body></html>", "a web page, not the weights"),
        (b"", "the file is empty; fetch it again"),
        (b"PK\x03\x04" + b"\0" * 100, "a pickled PyTorch file under a .safetensors name"),
    ],
    ids=["lfs", "html", "empty", "pickle"],
)  # fmt: skip
def test_a7_what_is_not_weights_is_called_by_name(source: Path, refused: Refused, data: bytes, said: str) -> None:
    """A pointer, a web page, nothing or a pickle in place of a shard is called what it is, before any output."""
    (source / SHARDS[1]).write_bytes(data)
    message = refused()
    assert message.startswith(f"{SHARDS[1]}: ")
    assert said in message


def test_a7_every_bad_shard_is_named_at_once(source: Path, refused: Refused) -> None:
    """All unusable shards stand in one error, not one a run."""
    (source / SHARDS[0]).write_bytes(b"")
    (source / SHARDS[1]).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    message = refused()
    assert f"{SHARDS[0]}: the file is empty" in message
    assert f"{SHARDS[1]}: a Git LFS pointer" in message


@pytest.mark.parametrize("extra", [b"\0", b"more"])
def test_a13_trailing_bytes_are_refused(source: Path, refused: Refused, extra: bytes) -> None:
    """A shard that is longer than its header says is refused with both lengths."""
    path = source / SHARDS[1]
    nbytes = path.stat().st_size
    path.write_bytes(path.read_bytes() + extra)
    assert refused() == (
        f"{SHARDS[1]}: header declares {nbytes:,} bytes, file has {nbytes + len(extra):,}; something was added to it, "
        "fetch it again"
    )


@pytest.mark.parametrize("cut", [1, 4096])
def test_e9_a_truncated_shard_is_refused(source: Path, refused: Refused, cut: int) -> None:
    """A shard cut short is refused with both lengths and the advice to fetch it again."""
    path = source / SHARDS[1]
    nbytes = path.stat().st_size
    os.truncate(path, nbytes - cut)
    assert refused() == (
        f"{SHARDS[1]}: header declares {nbytes:,} bytes, file has {nbytes - cut:,}; the copy is incomplete, "
        "fetch it again"
    )


# --- H1: links and names that lead out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../secret/x.safetensors", "/abs/x.safetensors", "sub/x.safetensors", "..",
                                  "a\\x.safetensors", ""])  # fmt: skip
def test_h1_names_that_leave_the_folder_are_refused(source: Path, refused: Refused, name: str) -> None:
    """An index may name plain files of its own folder only, even where the other file exists."""
    toys.write_weights(source.parent / "secret" / "x.safetensors", state(source, SHARDS[1:]))
    toys.write_weights(source / "sub" / "x.safetensors", state(source, SHARDS[1:]))
    listed = {key: name if file == SHARDS[1] else file for key, file in weight_map(source).items()}
    toys.edit_json(source / INDEX, weight_map=listed)
    assert refused() == f"{INDEX}: expected plain file names of its own folder, found {name!r}; do not trust it"


def test_h1_a_link_inside_the_folder_is_followed(source: Path, out: Path) -> None:
    """A link to a file of the same folder is no way out."""
    (source / SHARDS[1]).rename(source / "store")
    (source / SHARDS[1]).symlink_to("store")
    convert(source, out, tp=2)
    assert set(set_of(out)) == set(weight_map(source))


def hub_cache(source: Path, cache: Path, *, shared: bool = False) -> Path:
    """Move T into a Hub cache as huggingface_hub lays it out; gives the component folder of the snapshot."""
    repo = cache / "models--org--tiny"
    snapshot = repo / "snapshots" / ("c" * 40) / "transformer"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for position, name in enumerate(sorted(os.listdir(source))):
        blob = repo / "blobs" / f"{position:064x}"
        if shared:  # with Xet a blob is itself a link, into a store of the whole cache
            store = cache / "blobs" / "ab" / f"ab{position:062x}"
            store.parent.mkdir(parents=True, exist_ok=True)
            (source / name).rename(store)
            blob.symlink_to(os.path.relpath(store, blob.parent))
        else:
            (source / name).rename(blob)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["blobs", "shared-blobs"])
@pytest.mark.parametrize("above", ["hub", "snapshots/hub"])
def test_h1_the_links_of_a_hub_cache_are_followed(source: Path, out: Path, shared: bool, above: str) -> None:
    """A snapshot in the Hub cache converts as it stands, also where a blob is itself a link, wherever the cache is."""
    whole = state(source)
    snapshot = hub_cache(source, source.parent / above, shared=shared)
    convert(snapshot, out, tp=1)
    made = set_of(out, 1)
    assert all(torch.equal(made[key], whole[key]) for key in whole)


def test_h1_a_snapshot_may_not_take_the_blobs_of_another_repo(source: Path, refused: Refused) -> None:
    """A link out of a snapshot into another repo's blobs would publish that repo's weights: refused."""
    cache = source.parent / "hub"
    snapshot = hub_cache(source, cache)
    other = cache / "models--org--private" / "blobs" / ("d" * 64)
    other.parent.mkdir(parents=True)
    (snapshot / SHARDS[1]).resolve().rename(other)
    (snapshot / SHARDS[1]).unlink()
    (snapshot / SHARDS[1]).symlink_to(other)
    assert "a link that leads out of its folder" in refused(given=snapshot)


def test_e9_a_truncated_blob_of_the_cache_is_refused(source: Path, refused: Refused) -> None:
    """A blob cut short behind an intact link is found by its header and named by its file name."""
    snapshot = hub_cache(source, source.parent / "hub")
    blob = (snapshot / SHARDS[1]).resolve()
    os.truncate(blob, blob.stat().st_size // 2)
    message = refused(given=snapshot)
    assert message.startswith(f"{SHARDS[1]}: header declares ")
    assert message.endswith("the copy is incomplete, fetch it again")


def test_h13_a_snapshot_of_a_partial_download_is_refused(source: Path, refused: Refused) -> None:
    """A cache with one of two shards is not complete: the missing one is named."""
    snapshot = hub_cache(source, source.parent / "hub")
    (snapshot / SHARDS[1]).unlink()
    assert refused(given=snapshot).startswith(f"{SHARDS[1]}: named by the index")


def test_h13_a_link_whose_blob_is_gone_is_refused(source: Path, refused: Refused) -> None:
    """A dangling link of the cache counts as an absent shard."""
    snapshot = hub_cache(source, source.parent / "hub")
    (snapshot / SHARDS[1]).resolve().unlink()
    assert refused(given=snapshot).startswith(f"{SHARDS[1]}: named by the index")


# --- variants and the names they have had


def sharded(folder: Path, model: toys.ToyTransformer, value: float, prefix: str, suffix: str, index: str) -> None:
    """A two-file checkpoint of `model`, all `value`, under chosen names."""
    files = [f"{prefix}-{i:05d}-of-00002{suffix}.safetensors" for i in (1, 2)]
    tensors = {key: torch.full_like(tensor, value) for key, tensor in model.state_dict().items()}
    names = list(tensors)
    for file, part in zip(files, (names[::2], names[1::2]), strict=True):
        toys.write_weights(folder / file, {key: tensors[key] for key in part}, {"format": "pt"})
    listed = {key: files[i % 2] for i, key in enumerate(names)}
    (folder / index).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": listed}))


def single(folder: Path, model: toys.ToyTransformer, value: float, name: str) -> None:
    tensors = {key: torch.full_like(tensor, value) for key, tensor in model.state_dict().items()}
    toys.write_weights(folder / name, tensors, {"format": "pt"})


KINDS: dict[str, Callable[[Path, toys.ToyTransformer, float], None]] = {
    "single": lambda folder, model, value: single(folder, model, value, SINGLE),
    "sharded": lambda folder, model, value: sharded(folder, model, value, STEM, "", INDEX),
    "fp16 single": lambda folder, model, value: single(folder, model, value, f"{STEM}.fp16.safetensors"),
    "fp16 sharded": lambda folder, model, value: sharded(
        folder, model, value, f"{STEM}.fp16", "", f"{STEM}.safetensors.index.fp16.json"
    ),
    "fp16 legacy": lambda folder, model, value: sharded(
        folder, model, value, STEM, ".fp16", f"{STEM}.safetensors.fp16.index.json"
    ),
}


@pytest.mark.parametrize(
    ("kinds", "variant"),
    [
        (["single"], None),
        (["sharded"], None),
        (["single", "sharded"], None),
        (["single", "fp16 single", "fp16 sharded"], None),
        (["sharded", "fp16 single"], "fp16"),
        (["single", "fp16 sharded"], "fp16"),
        (["single", "fp16 legacy"], "fp16"),
        (["sharded", "fp16 legacy"], "fp16"),
        (["fp16 single", "fp16 sharded"], "fp16"),
        (["fp16 single", "fp16 legacy"], "fp16"),
        (["fp16 legacy", "fp16 sharded"], "fp16"),
        (["single", "sharded", "fp16 single", "fp16 legacy", "fp16 sharded"], "fp16"),
    ],
    ids=lambda value: "+".join(value).replace(" ", "-") if isinstance(value, list) else str(value),
)
@pytest.mark.filterwarnings("ignore::shardconv.ShardconvWarning", "ignore:This serialization format:FutureWarning")
def test_contract_the_files_taken_are_those_from_pretrained_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: list[str], variant: str | None
) -> None:
    """Of all the ways diffusers has named its files, we take from a folder what its `from_pretrained` takes."""
    cls = toys.install(monkeypatch, _small, _tp_plan={"up": "colwise", "proj_in": "rowwise"})
    model = toys.build(cls)
    source = tmp_path / "source"
    model.save_config(source)
    for position, kind in enumerate(kinds):
        KINDS[kind](source, model, float(position + 1))
    loaded = cls.from_pretrained(source, variant=variant).state_dict()
    assert len({tensor.unique().item() for tensor in loaded.values()}) == 1
    convert(source, tmp_path / "out", tp=1, variant=variant)
    made = set_of(tmp_path / "out", 1)
    assert set(made) == set(loaded)
    assert all(torch.equal(made[key].float(), loaded[key].float()) for key in loaded)


def _small(model: toys.ToyTransformer) -> None:
    """Two layers, so that writing many copies is quick."""
    del model.blocks, model.time_embedder
    model.up = torch.nn.Linear(16, 48)
    model.proj_in = torch.nn.Linear(48, 16)


def test_b4_the_default_files_are_no_variant() -> None:
    """`select_files` takes a variant's file over the default, and nothing of another variant."""
    assert select_files([f"{STEM}.fp16.safetensors"], None) is None
    assert select_files([f"{STEM}.fp16.safetensors"], "bf16") is None
    assert select_files([f"{STEM}.fp16.safetensors", SINGLE], "bf16").single == SINGLE


# --- what is not a convertible model


def test_quantized_checkpoints_are_refused(source: Path, refused: Refused) -> None:
    """A config with a quantization_config is refused, naming the method, before any weights are looked at."""
    for name in SHARDS:
        (source / name).unlink()
    toys.edit_json(source / "config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert refused() == (
        f"{source}/config.json: the checkpoint is quantized (bitsandbytes), quantized weights cannot be cut; "
        "convert the unquantized checkpoint"
    )


@pytest.mark.parametrize(
    "key", ["blocks.0.attn.to_q.lora_A.weight", "blocks.0.attn.to_q.lora_B.default.weight",
            "blocks.0.attn.to_q.base_layer.weight", "lora_unet_blocks_0.lora_down.weight"],
)  # fmt: skip
def test_c14_lora_keys_are_refused(source: Path, refused: Refused, key: str) -> None:
    """A checkpoint with an adapter in it is never partly sharded: refused, with what to do first."""
    toys.write_weights(source / SHARDS[1], state(source, SHARDS[1:]) | {key: torch.ones(2, 2)})
    toys.edit_json(source / INDEX, weight_map=weight_map(source) | {key: SHARDS[1]})
    assert refused() == (f"{key}: a LoRA key (1 in all); fuse the adapter first (fuse_lora), then save and convert")


def test_c14_a_lora_file_is_refused(source: Path, refused: Refused) -> None:
    """A LoRA file is called a LoRA, given as SOURCE, in a folder without a config, or as the only weights there."""
    lora = {"transformer.blocks.0.attn.to_q.lora_A.weight": torch.ones(2, 2)}
    folder = source.parent / "lora"
    path = toys.write_weights(folder / "pytorch_lora_weights.safetensors", lora)
    assert "holds a LoRA, not a model; fuse it into its base model first (fuse_lora)" in refused(given=path)
    assert "holds a LoRA (pytorch_lora_weights.safetensors), not a model" in refused(given=folder)
    shutil.copy(source / "config.json", folder)
    assert "holds a LoRA (pytorch_lora_weights.safetensors), not a model" in refused(given=folder)


@pytest.mark.parametrize("suffix", ["bin", "pt", "ckpt"])
def test_pickled_weights_are_never_opened(source: Path, refused: Refused, suffix: str) -> None:
    """Pickled weights are refused unread, in a folder and as SOURCE, with how to save them anew."""
    for name in (INDEX, *SHARDS):
        (source / name).unlink()
    path = source / f"{STEM}.{suffix}"
    path.write_bytes(b"cos\nsystem\n(S'echo pwned'\ntR.")
    assert f"only pickled weights ({path.name}), expected safetensors" in refused()
    message = refused(given=path)
    assert message == (
        f"{path}: pickled weights are never opened; save them with save_pretrained(..., safe_serialization=True)"
    )


def test_gguf_is_refused(source: Path, refused: Refused) -> None:
    """Weights of another format are named, and how to get to safetensors."""
    for name in (INDEX, *SHARDS):
        (source / name).unlink()
    (source / "flux-Q4_0.gguf").write_bytes(b"GGUF")
    assert "only foreign-format weights (flux-Q4_0.gguf), expected safetensors" in refused()
    assert "expected a folder or a Hub repo id, found a file" in refused(given=source / "flux-Q4_0.gguf")


def test_a_folder_without_weights_is_refused(source: Path, refused: Refused) -> None:
    """Without any weights the message says which files are wanted; with a variant alone, how to ask for it."""
    for name in (INDEX, *SHARDS):
        (source / name).unlink()
    assert refused() == f"{source}: no weights ({STEM}*.safetensors); fetch them"
    toys.write_weights(source / f"{STEM}.fp16.safetensors", {"a": torch.ones(2)})
    assert refused().endswith(f"found {STEM}.fp16.safetensors; if it is a variant, name it with --variant")


def test_a_component_file_is_no_source(source: Path, refused: Refused) -> None:
    """A weight file of a component as SOURCE is answered with the folder to give."""
    path = source / SHARDS[0]
    assert (
        refused(given=path) == f"{path}: expected a component folder with config.json, found one file; give its folder"
    )


def test_i3_a_missing_config_is_refused(source: Path, out: Path, refused: Refused) -> None:
    """Without config.json the folder is no component, and an empty one is not mistaken for anything else."""
    (source / "config.json").unlink()
    assert f"{source}: no config.json" in refused()
    empty = source.parent / "empty"
    empty.mkdir()
    assert refused(given=empty) == f"{empty}: no config.json; give a diffusers component folder or a pipeline folder"


def test_a_source_that_does_not_exist_is_refused(source: Path, refused: Refused) -> None:
    """A mistyped path is called a path that is not there; the Hub is not asked."""
    wrong = source.parent / "nope"
    assert refused(given=wrong) == f"{wrong}: no such folder; give a diffusers folder or a Hub repo id such as org/name"


def test_i3_no_class_name_is_refused(source: Path, refused: Refused) -> None:
    """A config without `_class_name` (of transformers, say) is not guessed at."""
    toys.edit_json(source / "config.json", _class_name=None)
    assert refused() == (
        f"{source}/config.json: expected a diffusers config with _class_name, found none; is it a component?"
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", "[" * 100_000])
def test_i3_a_broken_config_is_refused(source: Path, refused: Refused, text: str) -> None:
    """A config that is not JSON, or not an object, is named."""
    (source / "config.json").write_bytes(text.encode("latin-1"))
    assert refused().startswith(f"{source}/config.json: ")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "\xff"])
def test_a_broken_index_is_refused(source: Path, refused: Refused, text: str) -> None:
    """An index that is not JSON, or has no weight_map of names, is named."""
    (source / INDEX).write_bytes(text.encode("latin-1"))
    assert refused().startswith(f"{INDEX}: ")


def test_i3_an_unknown_class_is_named_with_both_versions(source: Path, refused: Refused) -> None:
    """A class that this diffusers lacks: the message has the class, the installed version and the config's."""
    toys.edit_json(source / "config.json", _class_name="Nope2DModel", _diffusers_version="9.9.0.dev0")
    assert refused() == (
        f"Nope2DModel: expected a model class of diffusers, not one in the installed diffusers {diffusers.__version__} "
        "(the config was written by diffusers 9.9.0.dev0); upgrade diffusers, or check _class_name in config.json"
    )


@pytest.mark.parametrize("name", ["FluxPipeline", "models", "os.system", "DDIMScheduler", "ModelMixin.__class__"])
def test_i3_only_model_classes_of_diffusers_are_built(source: Path, refused: Refused, name: str) -> None:
    """`_class_name` can name nothing but a model class of diffusers."""
    toys.edit_json(source / "config.json", _class_name=name)
    assert refused().startswith(f"{name}: expected a model class of diffusers")


def test_i3_a_class_without_a_plan_is_named(source: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that has no `_tp_plan`: the message has the class, the version and the way out."""
    toys.install(monkeypatch, _tp_plan=None)
    assert refused(PlanError) == (
        f"ToyTransformer: has no _tp_plan in diffusers {diffusers.__version__} and is not in the catalogue "
        "(shardconv plans lists it); give a plan with --plan FILE"
    )


def test_a_config_that_does_not_build_its_class_is_refused(source: Path, refused: Refused) -> None:
    """A config whose values the constructor refuses is named with the constructor's own words."""
    toys.edit_json(source / "config.json", num_layers="two")
    assert refused().startswith("config.json: does not build a ToyTransformer (TypeError: ")


# --- A: odd tensors


def test_a1_misaligned_source_data_is_read_right(source: Path, out: Path) -> None:
    """A header of odd length puts every tensor at an odd address; the bytes still come out right, on aligned ground."""
    whole = state(source)
    for name in SHARDS:
        tensors = toys.read_weights(source / name)
        for padding in range(8):
            toys.write_weights(source / name, tensors, {"format": "pt", "pad": "x" * padding})
            start = 8 + int.from_bytes((source / name).read_bytes()[:8], "little")
            if start % 4 == 3:
                break
        assert start % 4 == 3
    convert(source, out, tp=1)
    made = set_of(out, 1)
    assert all(torch.equal(made[key], whole[key]) for key in whole)


@pytest.mark.slow
@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}, {"format": "pt", "modelspec.x": "ÿ"}])
def test_a9_a10_any_metadata_converts_alike(source: Path, out: Path, metadata: dict[str, str] | None) -> None:
    """With or without metadata in the source the rank files say `format: pt`; the source's own is in the manifest."""
    for name in SHARDS:
        toys.write_weights(source / name, toys.read_weights(source / name), metadata)
    manifest = convert(source, out, tp=2)
    assert [dict(file.metadata) for file in manifest.source.files] == [metadata or {}] * 2
    for path in toys.rank_files(out / "tp2"):
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata()["format"] == "pt"


def test_a9_null_metadata_converts(source: Path, out: Path) -> None:
    """`__metadata__: null`, which some writers leave, is no metadata."""
    path = source / SHARDS[0]
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    text = json.dumps(json.loads(data[8:start]) | {"__metadata__": None}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[start:])
    convert(source, out, tp=2)
    assert set(set_of(out)) == set(weight_map(source))


def test_metadata_that_is_no_text_is_refused_before_any_work(source: Path, refused: Refused) -> None:
    """Half a surrogate pair passes JSON but could never be written to the manifest: the file is called malformed."""
    toys.write_weights(source / SHARDS[0], toys.read_weights(source / SHARDS[0]), {"format": "pt", "note": "\ud800"})
    assert refused().startswith(f"{SHARDS[0]}: not a well-formed safetensors file")


def _scales(model: toys.ToyTransformer) -> None:
    """Scalars inside and outside planned modules, and a per-channel scale on a colwise and a rowwise `Linear`."""
    model.register_parameter("alpha", torch.nn.Parameter(torch.ones(())))
    model.register_buffer("beta", torch.ones((), dtype=torch.float32))
    for block in model.blocks:
        for linear in (block.ff.proj, block.ff.out):
            linear.register_parameter("gain", torch.nn.Parameter(torch.ones(())))
            linear.register_parameter("channel_scale", torch.nn.Parameter(torch.ones(linear.out_features)))


def test_a3_a4_scalars_stay_whole_and_per_channel_scales_follow_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0-d tensors reach every rank unchanged; colwise cuts weight, bias and scale alike, rowwise leaves both whole."""
    model = toys.build(toys.install(monkeypatch, _scales))
    toys.save(model, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", tp=2)
    whole = state(tmp_path / "in")
    for rank, made in enumerate(toys.rank_states(tmp_path / "out" / "tp2")):
        for key in ("alpha", "beta", "blocks.0.ff.proj.gain", "blocks.1.ff.out.gain"):
            assert made[key].shape == ()
            assert torch.equal(made[key], whole[key])
        for leaf in ("weight", "bias", "channel_scale"):
            key = f"blocks.1.ff.proj.{leaf}"
            assert torch.equal(made[key], whole[key].chunk(2)[rank])
        for leaf in ("bias", "channel_scale"):
            assert torch.equal(made[f"blocks.0.ff.out.{leaf}"], whole[f"blocks.0.ff.out.{leaf}"])
        assert torch.equal(made["blocks.0.ff.out.weight"], whole["blocks.0.ff.out.weight"].chunk(2, 1)[rank])


def test_a4_a_per_channel_scale_that_is_a_buffer_follows_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scale kept as a persistent buffer is cut with the rows of its colwise `Linear` like one kept as a parameter."""

    def change(model: toys.ToyTransformer) -> None:
        for block in model.blocks:
            block.ff.proj.register_buffer("channel_scale", torch.arange(toys.FFN, dtype=torch.float32))

    model = toys.build(toys.install(monkeypatch, change))
    toys.save(model, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", tp=2)
    whole = state(tmp_path / "in")
    for rank, made in enumerate(toys.rank_states(tmp_path / "out" / "tp2")):
        key = "blocks.0.ff.proj.channel_scale"
        assert torch.equal(made[key], whole[key].chunk(2)[rank])


def test_a4_layers_without_biases_convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan does not need biases."""

    def change(model: toys.ToyTransformer) -> None:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.bias = None

    model = toys.build(toys.install(monkeypatch, change))
    toys.save(model, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", tp=2)
    whole = state(tmp_path / "in")
    assert not any(key.endswith("bias") for key in whole)
    assert all(set(made) == set(whole) for made in toys.rank_states(tmp_path / "out" / "tp2"))


def _empties(model: toys.ToyTransformer) -> None:
    for name, shape in (("empty", (0, 8)), ("hollow", (0,)), ("void", (0,))):
        model.register_parameter(name, torch.nn.Parameter(torch.empty(shape)))


def test_a5_empty_tensors_are_carried_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without elements, two of them alike, come out with their shapes."""
    model = toys.install(monkeypatch, _empties)().to(torch.bfloat16)
    toys.save_flat(model, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", tp=2)
    for made in toys.rank_states(tmp_path / "out" / "tp2"):
        assert [tuple(made[key].shape) for key in ("empty", "hollow", "void")] == [(0, 8), (0,), (0,)]


@pytest.mark.parametrize(("shape", "style", "dim"), [((0, 192), "colwise", 0), ((192, 0), "rowwise", 1)])
def test_a5_an_empty_dim_cannot_be_planned(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    shape: tuple[int, int],
    style: str,
    dim: int,
) -> None:
    """A plan that cuts a dim without elements is refused, naming the layer."""

    def change(model: toys.ToyTransformer) -> None:
        model.hollow = torch.nn.Linear(8, 8)
        model.hollow.weight = torch.nn.Parameter(torch.empty(shape))
        model.hollow.bias = torch.nn.Parameter(torch.empty(shape[0]))

    model = toys.install(monkeypatch, change, _tp_plan={**toys.PLAN, "hollow": style})().to(torch.bfloat16)
    toys.save_flat(model, tmp_path / "in")
    message = toys.refused(capsys, PlanError, tmp_path / "in", tmp_path / "out", tp=2)
    assert message == f"hollow: dim {dim} has no elements, nothing can be cut; take it out of the plan"


def test_a_clean_source_says_nothing(source: Path, out: Path) -> None:
    """An ordinary checkpoint converts without a single warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(source, out, tp=2)


# --- index and config as a stranger may write them


def test_an_index_with_a_name_twice_is_refused(source: Path, refused: Refused) -> None:
    """Two entries of one tensor contradict each other: neither is taken."""
    text = (source / INDEX).read_text().replace(f'"{FIRST}": ', f'"{FIRST}": "{SHARDS[1]}", "{FIRST}": ', 1)
    (source / INDEX).write_text(text)
    assert refused() == f"{INDEX}: cannot be read as JSON (the name {FIRST!r} stands twice); fetch it again"


@pytest.mark.parametrize("name", ["x" * 300 + ".safetensors", "\0.safetensors", "\ud800.safetensors"])
def test_an_index_of_names_that_no_file_can_have_is_refused(source: Path, refused: Refused, name: str) -> None:
    """Names too long for the file system, with a NUL or with half a surrogate pair are refused like absent ones."""
    toys.edit_json(source / INDEX, weight_map=weight_map(source) | {FIRST: name})
    assert INDEX in refused() or "named by the index" in refused()


@pytest.mark.parametrize("name", ["config.json", INDEX, SHARDS[1]])
def test_a_link_to_itself_is_refused(source: Path, refused: Refused, name: str) -> None:
    """A link that leads nowhere is no file."""
    (source / name).unlink()
    (source / name).symlink_to(name)
    assert name in refused()


@pytest.mark.parametrize("name", ["config.json", INDEX, SHARDS[1]])
def test_a_pipe_in_place_of_a_file_is_refused_not_waited_for(source: Path, out: Path, name: str) -> None:
    """A pipe that nobody writes to would hold a reader for ever; it is refused by name."""
    (source / name).unlink()
    os.mkfifo(source / name)
    with pytest.raises(CheckpointError, match=f"{name}: .*a pipe or a device, not a file"):
        convert(source, out, tp=2)


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_json_file_beyond_reason_is_refused_unread(source: Path, out: Path, name: str) -> None:
    """A file that would fill memory is refused by its length."""
    os.truncate(source / name, 100_000_001)
    with pytest.raises(CheckpointError, match=f"{name}: .*100,000,001 bytes, at most 100,000,000 are read"):
        convert(source, out, tp=2)


def test_names_that_would_steer_a_terminal_are_shown_escaped(source: Path, refused: Refused) -> None:
    """A tensor name with a line break and an escape sequence comes out in a fault as text, on one line."""
    listed = weight_map(source) | {"a\nb\x1b[2J": SHARDS[0]}
    toys.edit_json(source / INDEX, weight_map=listed)
    assert refused() == (rf"a\nb\x1b[2J: {INDEX} says {SHARDS[0]}, which lacks it; the file is of another revision")
