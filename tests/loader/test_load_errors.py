"""What goes wrong before or while loading: every rank raises the same error, soon, with words that say what to do."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import pytest
import ranks
import small_sets
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import loader
import shardconv
from loader import load, parallel
from loader.files.locate import find_set
from shardconv.format.header import DATA_ALIGNMENT, FileHeader
from shardconv.format.manifest import Manifest
from shardconv.plans.catalogue import small_models

NAME = "qwenimage"
SOON = 10  # seconds within which every rank must have raised; nothing here takes one
RANK_0, RANK_1 = (f"rank-0000{rank}-of-00002.safetensors" for rank in range(2))
SHARED = "replicated.safetensors"

Damage = Callable[[Path], None]  # of a component folder


@pytest.fixture
def out(tmp_path) -> Path:
    """A copy of a set for two ranks, to damage: the component folder."""
    return small_sets.copied(small_sets.converted(NAME, 2), tmp_path / "out")


def load_each(paths: list[Path], options: dict[str, Any]) -> str:
    """Each rank loads its own path, or the only one."""
    loader.load_model(paths[dist.get_rank() % len(paths)], device="cpu", **options)
    return "loaded"


def refused(*paths: Path, n: int = 2, **options: Any) -> str:
    """The words with which all ranks refuse, the same on each."""
    outcomes = ranks.run(load_each, list(paths), options, n=n)
    outcome = ranks.same(outcomes)
    assert outcome.error == "LoadError", outcome.trace
    assert "RuntimeError" in outcome.bases
    assert all(each.seconds < SOON for each in outcomes)
    return outcome.text


# --- damage ---


def cut(name: str, nbytes: int) -> Damage:
    """Take `nbytes` off the end of a file of the set; all but the header when 0, all when -1."""

    def damage(out: Path) -> None:
        path = out / "tp2" / name
        whole = path.stat().st_size
        header = FileHeader.read(path).data_start
        os.truncate(path, {0: header, -1: 0}.get(nbytes, whole - nbytes))

    return damage


def removed(name: str) -> Damage:
    return lambda out: (out / "tp2" / name).unlink()


def flipped(name: str, position: int) -> Damage:
    """One bit of one byte turned round; the position counts from the start of the file."""

    def damage(out: Path) -> None:
        with open(out / "tp2" / name, "r+b") as file:
            file.seek(position)
            byte = file.read(1)
            file.seek(position)
            file.write(bytes([byte[0] ^ 1]))

    return damage


def replaced(name: str, content: bytes) -> Damage:
    return lambda out: (out / "tp2" / name).write_bytes(content) and None


def swapped(out: Path) -> None:
    (out / "tp2" / RANK_0).rename(out / "aside")
    (out / "tp2" / RANK_1).rename(out / "tp2" / RANK_0)
    (out / "aside").rename(out / "tp2" / RANK_1)


def mixed(name: str) -> Damage:
    """A file of another conversion: other weights, the same shapes and file names."""

    def damage(out: Path) -> None:
        other = out.parent / "other"
        small_models.build(NAME, seed=1).save_pretrained(other / "source")
        shardconv.convert(other / "source", other / "out", tp=2)
        shutil.copyfile(other / "out" / "tp2" / name, out / "tp2" / name)

    return damage


def of_an_edited_source(out: Path) -> None:
    """Rank 1's file from a source in which one replicated number was edited: its own bytes of data are the same."""
    model = small_models.build(NAME)
    model.proj_out.weight.data[0, 0] += 1
    model.save_pretrained(out.parent / "edited")
    shardconv.convert(out.parent / "edited", out.parent / "again", tp=2)
    data = [FileHeader.read(each / "tp2" / RANK_1).data_start for each in (out, out.parent / "again")]
    before, after = (each / "tp2" / RANK_1 for each in (out, out.parent / "again"))
    assert before.read_bytes()[data[0] :] == after.read_bytes()[data[1] :]
    shutil.copyfile(after, before)


def of_another_degree(out: Path) -> None:
    shutil.copyfile(small_sets.converted(NAME, 4) / "tp4" / "rank-00001-of-00004.safetensors", out / "tp2" / RANK_1)


def linked_away(out: Path) -> None:
    """As a clone of a repo may bring it; what people link themselves is in test_links.py."""
    (out / ".git").mkdir()
    (out / "tp2" / RANK_1).rename(out.parent / "elsewhere.safetensors")
    (out / "tp2" / RANK_1).symlink_to(out.parent / "elsewhere.safetensors")


def config_with(**changes: Any) -> Damage:
    def damage(out: Path) -> None:
        path = out / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def manifest_with(**changes: Any) -> Damage:
    def damage(out: Path) -> None:
        path = out / "tp2" / "shardconv.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def killed_conversion(out: Path) -> None:
    (out / "tp2").rename(out / ".tp2.partial")
    (out / ".tp2.partial" / "shardconv.json").unlink()


def a_file_instead(out: Path) -> None:
    shutil.rmtree(out)
    out.write_text("not a folder")


SHORT = r"{}: header declares [\d,]+ bytes, file has [\d,]+; the copy is incomplete, fetch it again"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "text"),
    [
        pytest.param(cut(RANK_1, 1), r"^rank 1: " + SHORT.format(RANK_1), id="1-byte-short"),
        pytest.param(cut(RANK_0, 4096), r"^rank 0: " + SHORT.format(RANK_0), id="4-KiB-short"),
        pytest.param(cut(RANK_1, 0), r"^rank 1: " + SHORT.format(RANK_1), id="only-a-header"),
        pytest.param(cut(SHARED, 1), r"^every rank: " + SHORT.format(SHARED), id="shared-file-short"),
        pytest.param(cut(RANK_1, -1), rf"^rank 1: {RANK_1}: the file is empty; fetch it again", id="empty"),
        pytest.param(removed(RANK_1), rf"^rank 1: \S+/tp2/{RANK_1}: cannot be read \(No such file", id="missing"),
        pytest.param(removed(SHARED), rf"^every rank: \S+/tp2/{SHARED}: cannot be read \(No such", id="shared-missing"),
        pytest.param(
            replaced(RANK_1, b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
            rf"^rank 1: {RANK_1}: a Git LFS pointer, not the weights; run: git lfs pull",
            id="lfs-pointer",
        ),
        pytest.param(
            flipped(RANK_0, DATA_ALIGNMENT - 8 - 20),  # in the padding of the header, harmless to JSON readers
            rf"^rank 0: {RANK_0}: (not a well-formed|its header is not the one the manifest describes)",
            id="header-flipped",
        ),
        pytest.param(
            flipped(RANK_1, 3),
            rf"^rank 1: {RANK_1}: header declares [\d,]+ bytes for itself",
            id="header-length-flipped",
        ),
        pytest.param(
            swapped,
            rf"rank 0: {RANK_0}: expected rank 0, found 1; the file is of another conversion or rank, fetch or convert "
            rf"the set again\n.*rank 1: {RANK_1}: expected rank 1, found 0;",
            id="rank-files-swapped",
        ),
        pytest.param(
            mixed(RANK_1),
            rf"^rank 1: {RANK_1}: expected conversion_id \w{{32}}, found \w{{32}}; the file is of another conversion",
            id="rank-file-of-another-conversion",
        ),
        pytest.param(
            of_an_edited_source,
            rf"^rank 1: {RANK_1}: expected conversion_id \w{{32}}, found \w{{32}}; the file is of another conversion",
            id="rank-file-of-an-edited-source",
        ),
        pytest.param(
            of_another_degree,
            rf"^rank 1: {RANK_1}: expected tp_degree 2, found 4; the file is of another conversion or rank",
            id="rank-file-of-another-degree",
        ),
        pytest.param(
            mixed("shardconv.json"),
            rf"rank 0: {RANK_0}: expected conversion_id(.|\n)*rank 1: {SHARED}: expected conversion_id",
            id="manifest-of-another-conversion",
        ),
        pytest.param(linked_away, rf"^rank 1: {RANK_1}: a link that leads out of its folder, to \S+", id="link-out"),
        pytest.param(
            manifest_with(tp_degree=4), r"^every rank: \S+shardconv.json: (not a well-formed|contradicts)", id="edited"
        ),
        pytest.param(
            manifest_with(format_version=2),
            r"^every rank: \S+: format version 2, this shardconv reads 1; upgrade shardconv",
            id="newer-format",
        ),
        pytest.param(
            replaced("shardconv.json", b"{"), r"^every rank: \S+/shardconv.json: not JSON \(", id="manifest-cut"
        ),
        pytest.param(
            killed_conversion,
            r"^every rank: \S+/out: the conversion for tp degree 2 did not finish; run shardconv convert again",
            id="killed-conversion",
        ),
        pytest.param(
            removed("shardconv.json"),
            r"^every rank: \S+/out/tp2: no shardconv.json, so not a complete set; \S+",
            id="no-manifest",
        ),
        pytest.param(shutil.rmtree, r"^every rank: \S+/out: no such folder; give the folder that shardconv", id="gone"),
        pytest.param(a_file_instead, r"^every rank: \S+/out: (no such folder|expected a folder)", id="a-file"),
        pytest.param(
            config_with(_class_name="FluxTransformer2DModel"),
            r"^every rank: \S+/config.json: expected a QwenImageTransformer2DModel, found a FluxTransformer2DModel; "
            "the config is of another model",
            id="config-of-another-class",
        ),
        pytest.param(
            config_with(num_layers=1),
            r"^every rank: \S+/config.json: not the config that was converted; ",
            id="config-with-fewer-layers",
        ),
        pytest.param(
            config_with(num_layers=3),
            r"^every rank: \S+/config.json: not the config that was converted; ",
            id="config-with-more-layers",
        ),
        pytest.param(
            config_with(context_in_dim=40),
            r"^every rank: \S+/config.json: not the config that was converted; ",
            id="config-of-another-width",
        ),
        pytest.param(removed("../config.json"), r"^every rank: \S+/out: no config.json", id="no-config"),
        pytest.param(
            config_with(num_layers="two"),
            r"^every rank: \S+/config.json: not the config that was converted; ",
            id="bad-config",
        ),
    ],
)
def test_e1_e2_e6_f3_a_damaged_set_is_refused_by_every_rank_in_the_same_words(damage, text, out):
    """One damaged file is enough: all ranks raise at once, with the reason of the rank that met it."""
    damage(out)
    assert re.search(text, refused(out)), refused(out)


@pytest.mark.slow
def test_every_fault_is_reported_at_once(out):
    """Several damaged files make one error, whose issues name each, with the rank."""
    for damage in (cut(RANK_0, 1), removed(RANK_1), flipped(SHARED, 3)):
        damage(out)
    outcome = ranks.same(ranks.run(load_each, [out], {}))
    assert [issue.split(":")[0] for issue in outcome.issues] == ["rank 0", "rank 0", "rank 1", "rank 1"]
    assert [name in issue for name, issue in zip((RANK_0, SHARED, RANK_1, SHARED), outcome.issues, strict=True)] == (
        [True] * 4
    )
    assert outcome.text.startswith("4 problems:\n  - rank 0: ")


@pytest.mark.slow
def test_a_file_missing_on_one_node_is_told_on_all(out, tmp_path):
    """Ranks with folders of their own: what only rank 1 lacks is the reason that both give."""
    other = small_sets.copied(out, tmp_path / "node1" / "out")
    removed(RANK_1)(other)
    reason = rf"rank 1: \S+node1/out/tp2/{RANK_1}: cannot be read \(.*\); fetch or convert the set again"
    assert re.fullmatch(reason, refused(out, other))


@pytest.mark.slow
def test_a_file_of_another_rank_need_not_be_there(out, tmp_path):
    """A node needs the files of its own ranks only."""
    other = small_sets.copied(out, tmp_path / "node1" / "out")
    removed(RANK_1)(out)
    removed(RANK_0)(other)
    assert ranks.values(load_each, [out, other], {}) == ["loaded", "loaded"]


@pytest.mark.slow
def test_nodes_with_different_conversions_are_refused(out, tmp_path):
    """Two good sets that are not the same conversion do not make one model."""
    other = small_sets.copied(small_sets.converted(NAME, 2, dtype="bf16"), tmp_path / "node1")
    ids = [Manifest.read(folder / "tp2").conversion_id for folder in (out, other)]
    outcomes = ranks.run(load_each, [out, other], {})
    for each in outcomes:
        assert each.error == "LoadError"
        assert f"the ranks load different things ({ids[0]} as stored, {ids[1]} as stored); give every" in each.text


@pytest.mark.slow
@pytest.mark.parametrize("inner", ["", "tp4"])
def test_f4_a_set_that_the_number_of_ranks_does_not_divide_is_refused(inner):
    """A tp 4 set on 3 ranks, given by its component folder or its own, says both numbers and what to run."""
    out = small_sets.converted(NAME, 4)
    assert refused(out / inner, n=3) == (
        f"every rank: {out / inner}: converted for tp degree 4, this group has 3 ranks; "
        f"run: shardconv reshard --tp 3 {out / 'tp4'} {out}"
    )


def test_e2_a_set_folder_without_its_manifest_is_not_complete(tmp_path):
    """Half a download, given by its own folder, says that the manifest is what is missing (E2)."""
    out = small_sets.copied(small_sets.converted(NAME, 1), tmp_path / "out")
    (out / "tp1" / "shardconv.json").unlink()
    with pytest.raises(shardconv.SetError, match=r"out/tp1: no shardconv.json, so not a complete set; "):
        loader.load_model(out / "tp1", device="cpu")


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, "bf16"], ids=str)
def test_a_dtype_that_weights_cannot_have_is_refused(dtype):
    """`dtype=` takes floating point dtypes: weights are never rounded to integers, nor a name looked up."""
    with pytest.raises(
        shardconv.UsageError, match=r"^dtype: expected a floating point torch.dtype, found .*; leave it"
    ):
        loader.load_model(small_sets.converted(NAME, 1), device="cpu", dtype=dtype)


def test_f4_the_degrees_that_there_are_are_listed(tmp_path):
    """A group larger than every set is told of all of them, and to reshard the largest."""
    for degree in (2, 4):
        shutil.copytree(small_sets.converted(NAME, degree), tmp_path, dirs_exist_ok=True)
    with pytest.raises(shardconv.SetError) as caught:
        find_set(tmp_path, None, 8)
    assert str(caught.value) == (
        f"{tmp_path}: converted for tp degree 2 and 4, this group has 8 ranks; "
        f"run: shardconv reshard --tp 8 {tmp_path / 'tp4'} {tmp_path}"
    )


@pytest.mark.parametrize("inner", ["", "tp2"])
def test_f4_the_ordinary_loader_takes_nothing_of_a_set(inner, out):
    """`from_pretrained` of a component or a set folder finds no weights in it, instead of loading one rank's slices."""
    shutil.copyfile(out / "config.json", out / "tp2" / "config.json")
    with pytest.raises(OSError, match="no file named diffusion_pytorch_model"):
        getattr(diffusers, small_models.class_name(NAME)).from_pretrained(out / inner)


def test_an_ordinary_checkpoint_is_refused_with_the_command_to_run():
    """What `from_pretrained` would load is told apart from a set."""
    source = small_sets.source(NAME)
    with pytest.raises(shardconv.SetError) as caught:
        loader.load_model(source, device="cpu")
    assert str(caught.value) == (
        f"{source}: an ordinary checkpoint, not converted; run: shardconv convert --tp 1 {source} OUT"
    )


def test_a_folder_above_the_set_asks_for_the_subfolder(tmp_path):
    """A pipeline folder names the component that holds the set."""
    small_sets.copied(small_sets.converted(NAME, 1), tmp_path / "transformer")
    with pytest.raises(shardconv.SetError, match="the set is in transformer; add subfolder='transformer'"):
        loader.load_model(tmp_path, device="cpu")
    assert loader.load_model(tmp_path, subfolder="transformer", device="cpu").config.num_layers == 2


def test_an_empty_folder_says_what_to_run(tmp_path):
    """Nothing converted and nothing to convert: the command is named."""
    with pytest.raises(shardconv.SetError, match=r"no converted set in it; run: shardconv convert --tp 1 SOURCE"):
        loader.load_model(tmp_path, device="cpu")


# --- digests ---


@pytest.mark.slow
@pytest.mark.parametrize("name", [RANK_0, RANK_1, SHARED])
def test_e8_verify_finds_one_flipped_byte_and_a_plain_load_does_not_look(name, out):
    """`verify=True` names file and tensor of a single flipped bit; without it no byte of the data is read (E8)."""
    header = FileHeader.read(out / "tp2" / name)
    victim = header.tensors[len(header.tensors) // 2]
    flipped(name, header.data_start + victim.start + victim.nbytes // 2)(out)
    who = {RANK_0: "rank 0", RANK_1: "rank 1", SHARED: "every rank"}[name]
    expected = f"{who}: {name}: {victim.name} is damaged (its digest differs); fetch it again"
    assert refused(out, verify=True) == expected
    assert ranks.values(load_each, [out], {}) == ["loaded", "loaded"]


@pytest.mark.slow
@pytest.mark.parametrize("self_contained", [False, True])
def test_verify_passes_a_good_set(self_contained):
    """`verify=True` finds no fault in either layout of a good set."""
    good = small_sets.converted(NAME, 2, **({"self_contained": True} if self_contained else {}))
    assert ranks.values(load_each, [good], {"verify": True}) == ["loaded", "loaded"]


# --- the model has changed since the conversion ---


def load_with_another_class(out: Path, change: str) -> None:
    build = load.skeleton

    def changed(*args: Any) -> Any:
        model = build(*args)
        if change == "renamed":
            attention = model.single_transformer_blocks[0].attn
            attention.out_proj = attention.to_out
            del attention.to_out
        else:  # as a later diffusers might reorder the parts of its fused projection
            model.single_transformer_blocks[1].attn.to_out._tp_packed_row_blocks.reverse()
        return model

    with mock.patch.object(load, "skeleton", changed):
        loader.load_model(out, device="cpu")


@pytest.mark.slow
def test_a_plan_that_no_longer_resolves_is_refused():
    """A class whose module got another name: the plan key, the tensors and what to do are named."""
    outcome = ranks.same(ranks.run(load_with_another_class, small_sets.converted("flux2", 2), "renamed"))
    assert outcome.error == "LoadError"
    name = "single_transformer_blocks.0.attn"
    assert f"{name}.out_proj.weight: the model has it, the set does not; convert again with this diffusers" in (
        outcome.text
    )
    assert "plan key 'single_transformer_blocks.*.attn.to_out': matches nothing in 1 of 2 places" in outcome.text


@pytest.mark.slow
def test_c2_a_layer_that_is_cut_otherwise_now_is_refused():
    """A class whose fused layer is laid out otherwise: nothing is loaded with parts of other blocks (C2)."""
    outcome = ranks.same(ranks.run(load_with_another_class, small_sets.converted("flux2", 2), "relaid"))
    assert outcome.error == "LoadError"
    name, blocks = r"single_transformer_blocks\.1\.attn\.to_out\.weight", r"dim 1 in blocks \[\d+, \d+\]"
    assert re.match(
        rf"every rank: {name}: the set .*{blocks}, this diffusers' model .*{blocks}; convert again$", outcome.text
    )


# --- the group ---


def load_alone(path: Path) -> None:
    loader.load_model(path, device="cpu")


def parallelize_alone() -> None:
    loader.parallelize(small_models.build(NAME))


def load_in_pairs(path: Path) -> str:
    """Three ranks, and a group of the first two."""
    group = dist.new_group([0, 1])
    loader.load_model(path, device="cpu", group=group)
    return "loaded"


def load_in_a_mesh_of_two(path: Path) -> str:
    """Three ranks, and a mesh of the first two."""
    loader.load_model(path, device="cpu", group=DeviceMesh("cpu", [0, 1]))
    return "loaded"


def load_in_two_dims(path: Path) -> None:
    loader.load_model(path, device="cpu", group=init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp")))


@pytest.mark.slow
@pytest.mark.parametrize("function", [load_alone, parallelize_alone])
def test_f1_several_processes_without_a_group_are_refused(function):
    """Under torchrun but without `init_process_group` no rank is guessed: every process says what to call."""
    args = (small_sets.converted(NAME, 2),) if function is load_alone else ()
    outcome = ranks.same(ranks.run(function, *args, group=False))
    assert outcome.error == "LoadError"
    assert outcome.text == (
        "WORLD_SIZE is 2 but torch.distributed is not initialized; call torch.distributed.init_process_group() first"
    )


@pytest.mark.slow
@pytest.mark.parametrize("function", [load_in_pairs, load_in_a_mesh_of_two])
def test_a_rank_outside_the_group_is_told_so(function):
    """The members load; the rank that is not in the group gets an error that names it, and nobody waits."""
    *members, outsider = ranks.run(function, small_sets.converted(NAME, 2), n=3)
    assert [each.value for each in members] == ["loaded", "loaded"], members
    assert outsider.error == "LoadError"
    assert outsider.text == "group: global rank 2 is not in it; load on its members only"


@pytest.mark.slow
def test_a_mesh_of_two_dims_is_refused():
    """A mesh must be narrowed to its tensor-parallel dim, and the error shows how."""
    outcome = ranks.same(ranks.run(load_in_two_dims, small_sets.converted(NAME, 2)))
    assert outcome.error == "LoadError"
    assert outcome.text == (
        "group: expected a device mesh of one dim, found 2 ('dp', 'tp'); give one of them, such as mesh[\"tp\"]"
    )


# --- the device ---


@pytest.fixture
def accelerators(monkeypatch) -> Callable[..., list[int]]:
    """`accelerators(visible, LOCAL_RANK=...)` as torchrun on a node with so many; returns what is made the current."""

    def pretend(visible: int, **environment: str) -> list[int]:
        current: list[int] = []
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: visible)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return current

    return pretend


def device_of(device: Any) -> torch.device:
    """Where `load_model(device=device)` would put the weights."""
    with mock.patch.object(load, "_load_rank", return_value=(None, "id")) as place, contextlib.suppress(AttributeError):
        load.load_model("anywhere", device=device)
    return next(value for value in place.call_args.args if isinstance(value, torch.device))


@pytest.mark.parametrize("device", [None, "cuda", torch.device("cuda")], ids=str)
@pytest.mark.parametrize("local", [0, 3])
def test_f2_a_device_without_a_number_is_the_one_of_the_rank(local, device, accelerators):
    """None and "cuda" mean the accelerator of LOCAL_RANK, made the current one: ranks do not pile up on GPU 0."""
    current = accelerators(4, LOCAL_RANK=str(local), LOCAL_WORLD_SIZE="4")
    assert device_of(device) == torch.device("cuda", local)
    assert current == [local]


@pytest.mark.parametrize(("device", "place"), [("cuda:1", "cuda:1"), ("cpu", "cpu"), (torch.device("cpu"), "cpu")])
def test_a_device_that_is_named_is_taken(device, place, accelerators):
    """A device with a number is used as given and becomes the current one, for collectives; the CPU is just used."""
    current = accelerators(4, LOCAL_RANK="3", LOCAL_WORLD_SIZE="4")
    assert device_of(device) == torch.device(place)
    assert current == ([1] if place == "cuda:1" else [])


def test_one_process_on_one_accelerator_needs_no_launcher(accelerators):
    """Outside torchrun the only accelerator is taken."""
    accelerators(1)
    assert device_of(None) == torch.device("cuda", 0)


@pytest.mark.parametrize(("visible", "local"), [(1, 1), (2, 2), (2, 5)])
def test_f2_more_ranks_than_accelerators_are_refused(visible, local, accelerators):
    """LOCAL_RANK beyond the visible accelerators is an error with both numbers, not GPU 0 for two ranks."""
    current = accelerators(visible, LOCAL_RANK=str(local), LOCAL_WORLD_SIZE="8")
    told = rf"^LOCAL_RANK is {local} but {visible} accelerator\(s\) are visible; .*pass device="
    with pytest.raises(shardconv.LoadError, match=told):
        load.load_model("anywhere")
    assert current == []


@pytest.mark.parametrize("told", ["x", "-1", "1.5", " ", "\u00b2"])
def test_a_local_rank_that_is_no_number_is_told(told, accelerators):
    """What `loader.prefetch` passes over in silence is said here; an empty variable is as good as none."""
    accelerators(2, LOCAL_RANK=told)
    with pytest.raises(shardconv.LoadError, match=rf"^LOCAL_RANK: expected a number, found {re.escape(repr(told))}; "):
        load.load_model("anywhere")
    accelerators(2, LOCAL_RANK="")
    assert device_of(None) == torch.device("cuda", 0)


# --- what nobody expected ---


def fail_on_rank_1(where: str, error: Exception, path: Path) -> str:
    module, name = {
        "read": (load, "map_file"),
        "attach": (load, "attach"),
        "apply": (load, "apply"),
        "fingerprint": (parallel, "_fingerprint"),
        "slice": (parallel, "take_slice"),
        "wrap": (parallel, "makers"),
    }[where]
    failing = mock.patch.object(module, name, side_effect=error)
    if dist.get_rank() == 1:
        failing.start()
    if module is load:
        loader.load_model(path, device="cpu")
    else:
        loader.parallelize(small_models.build(NAME))
    return "loaded"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("read", MemoryError("no room for 40 GB")),
        ("read", OSError(5, "Input/output error", "/mnt/x")),
        ("attach", torch.OutOfMemoryError("CUDA out of memory")),
        ("apply", RuntimeError("a fault of ours")),
        ("fingerprint", RuntimeError("the device fell off")),
        ("slice", torch.OutOfMemoryError("CUDA out of memory")),
        ("wrap", RuntimeError("a fault of ours")),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_f3_an_unexpected_exception_on_one_rank_ends_all_of_them(where, error):
    """Whatever rank 1 meets, every rank raises its reason within seconds, and none waits for it."""
    outcomes = ranks.run(fail_on_rank_1, where, error, small_sets.converted(NAME, 2), timeout=20)
    outcome = ranks.same(outcomes)
    assert outcome.error == "LoadError"
    assert outcome.text == f"rank 1: {type(error).__name__}: {error}"
    assert all(each.seconds < SOON for each in outcomes)
