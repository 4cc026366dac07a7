"""Acceptance: every fault stops the conversion with one clear message, and what stood on disk before still stands."""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import toys
from small_pipelines import build_flux_pipeline
from torch import nn

from shardconv import (
    CheckpointError,
    OutputError,
    PlanError,
    SetError,
    ShardconvError,
    ShardconvWarning,
    UsageError,
    convert,
)
from shardconv.cli.main import main
from shardconv.format.sets import sets_in
from shardconv.target import checks, leftovers
from shardconv.target import folder as destination

Refused = Callable[..., str]
SET = {"shardconv.json", "replicated.safetensors", "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T, saved once; tests work on copies."""
    return toys.save(toys.build(toys.ToyTransformer), tmp_path_factory.mktemp("pristine") / "T")


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small FluxPipeline, saved once and never written to."""
    folder = tmp_path_factory.mktemp("pipeline") / "flux"
    build_flux_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture
def source(pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    toys.install(monkeypatch)
    return Path(shutil.copytree(pristine, tmp_path / "T"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], source: Path, out: Path) -> Refused:
    """Converts `source` for 2 ranks, which must fail and change nothing; gives the message."""

    def run(error: type[ShardconvError], **options: Any) -> str:
        given, to = options.pop("given", source), options.pop("to", out)
        return toys.refused(capsys, error, given, to, **({"root": source.parent, "tp": 2} | options))

    return run


def plan_file(folder: Path, plan: dict[str, object]) -> Path:
    path = folder / "plan.json"
    path.write_text(json.dumps(plan))
    return path


def refill(path: Path, value: float) -> None:
    """Other bytes under the same header, length, name and modification time."""
    stat = path.stat()
    tensors = safetensors.torch.load(path.read_bytes())
    data = path.read_bytes()
    payload = sum(tensor.nbytes for tensor in tensors.values())
    filling = torch.full([payload // 2], value, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    path.write_bytes(data[: len(data) - payload] + filling)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)


# --- the request


@pytest.mark.parametrize("tp", [0, -2])
def test_a_degree_that_is_no_number_of_ranks_is_a_usage_error(refused: Refused, tp: int) -> None:
    """--tp wants a positive number; exit code 2."""
    assert refused(UsageError, tp=tp, code=2) == f"--tp: expected a positive number of ranks, found {tp}"


@pytest.mark.parametrize(
    "argv",
    [["convert", "in", "out"], ["convert", "in", "out", "--tp", "two"], ["convert", "in", "out", "--tp", "2", "--nope"],
     ["convert", "in", "out", "--tp", "2", "--dtype", "fp8"], ["convert", "in", "--tp", "2"], ["nope"], []],
)  # fmt: skip
def test_a_command_line_that_cannot_be_parsed_exits_with_2(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What argparse refuses exits with 2, says why on stderr and writes nothing."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "error: " in said.err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_dtype_is_a_usage_error(source: Path, out: Path) -> None:
    """A library call with a dtype that is none of ours is told which there are."""
    with pytest.raises(UsageError, match=r"--dtype: expected one of bf16, .*, found 'fp8'"):
        convert(source, out, tp=2, dtype="fp8")
    assert not out.exists()


@pytest.mark.parametrize("subfolder", ["../T", "/etc", "a/../../T"])
def test_h1_a_subfolder_outside_the_source_is_a_usage_error(refused: Refused, subfolder: str) -> None:
    """--subfolder stays inside SOURCE; exit code 2."""
    message = refused(UsageError, subfolder=subfolder, code=2)
    assert message == f"--subfolder: expected a folder inside the source, found {subfolder!r}"


def test_a_subfolder_that_is_not_there_is_named(source: Path, refused: Refused) -> None:
    """A mistyped component is a failure, exit code 1, with the source it was looked for in."""
    assert (
        refused(CheckpointError, subfolder="transfromer")
        == f"{source}: no folder 'transfromer' in it; check --subfolder"
    )


# --- the plan


def test_a_degree_that_does_not_divide_the_heads(refused: Refused) -> None:
    """tp 5 on 24 heads: one error that offers the degrees that work."""
    message = refused(PlanError, tp=5)
    assert (
        "config.json num_attention_heads: 24 heads, not divisible by tp degree 5; use 1, 2, 3, 4, 6, 8, 12" in message
    )
    assert "blocks.0.attn.to_q.weight: dim 0 is 192, not divisible by tp degree 5; use 1, 2, 3, 4, 6, 8, 12" in message


def test_c6_a_packed_block_that_does_not_divide_though_the_sum_does(source: Path, refused: Refused) -> None:
    """768 rows divide by 3, their blocks of 256, 128 and 384 do not all: the block is named."""
    plan = toys.PLAN | {"blocks.*.ff.proj": {"style": "packed_colwise", "blocks": [2, 1, 3]}}
    message = refused(PlanError, tp=3, plan=plan_file(source.parent, plan))
    assert "blocks.0.ff.proj.weight: dim 0 is packed in blocks [256, 128, 384], block 0 is 256" in message


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("blocks.*.attn.to_kv", "matches nothing in 2 of 2 places, the first is blocks.0.attn.to_kv; correct the key"),
        ("blocks.*.attn.to_out.*", "expected at most one '*', found 2; write one key for each list"),
        ("proj_in.*.a", "expected an nn.ModuleList before '*', proj_in is Linear"),
    ],
)
def test_c3_a_key_that_cannot_be_meant(source: Path, refused: Refused, key: str, said: str) -> None:
    """A key that matches nothing, has two stars or a star over no list: the key and what is wrong with it."""
    message = refused(PlanError, plan=plan_file(source.parent, toys.PLAN | {key: "colwise"}))
    assert message == f"plan key {key!r}: {said}"


def test_a_plan_file_that_is_not_there(source: Path, refused: Refused) -> None:
    """A plan file that cannot be read is named with the system's reason."""
    path = source.parent / "nope.json"
    assert refused(PlanError, plan=path) == f"{path}: cannot read the plan file (No such file or directory)"


def test_i3_a_class_without_a_plan(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that has no plan is named, with the way out."""
    toys.install(monkeypatch, _tp_plan=None)
    assert refused(PlanError).startswith("ToyTransformer: has no _tp_plan in diffusers ")


def test_i3_an_unknown_class(source: Path, refused: Refused) -> None:
    """A class that this diffusers lacks is named."""
    toys.edit_json(source / "config.json", _class_name="Nope2DModel")
    assert refused(CheckpointError).startswith("Nope2DModel: expected a model class of diffusers")


# --- OUT is the source, or somebody else's


def test_out_is_the_source(source: Path, refused: Refused) -> None:
    """Converting a folder into itself is refused, under any of its names."""
    said = "is the source itself; name another OUT, the source stays as it is"
    assert refused(OutputError, to=source) == f"{source}: {said}"
    link = source.parent / "link"
    link.symlink_to(source)
    assert refused(OutputError, to=link) == f"{link}: {said}"
    assert refused(OutputError, given=link, to=source) == f"{source}: {said}"
    dotted = source / ".." / source.name
    assert refused(OutputError, to=dotted) == f"{dotted}: {said}"


@pytest.mark.slow
def test_out_is_the_pipeline_that_holds_the_source(
    flux: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pipeline, or one component of it, cannot be converted into the pipeline itself."""
    said = f"{flux / 'transformer'}: is the source itself; name another OUT, the source stays as it is"
    assert toys.refused(capsys, OutputError, flux, flux, tp=2) == said
    assert toys.refused(capsys, OutputError, flux, flux, tp=2, subfolder="transformer") == said
    link = tmp_path / "link"
    link.symlink_to(flux)
    assert "is the source itself" in toys.refused(capsys, OutputError, flux, link, root=flux, tp=2)


def test_out_is_a_file(out: Path, refused: Refused) -> None:
    """A file where OUT should be, or above it, is refused and stays."""
    out.write_bytes(b"mine")
    assert refused(OutputError) == f"{out}: expected a folder to write into, found a file; name another OUT"
    assert str(out) in refused(OutputError, to=out / "deeper")


def test_i2_foreign_files_in_the_target_are_not_touched(out: Path, refused: Refused) -> None:
    """A file in tpN that is not one of a set stops the conversion, --overwrite or not, and stays."""
    (out / "tp2").mkdir(parents=True)
    (out / "tp2" / "notes.txt").write_text("mine")
    said = f"{out / 'tp2' / 'notes.txt'}: not a file of a converted set; move it away, nothing was touched"
    assert refused(OutputError) == said
    assert refused(OutputError, overwrite=True) == said


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["rank-lora.safetensors", "rank-0-of-2.safetensors", "rank-00000-of-00002-old.safetensors"]
)
def test_i2_a_file_that_only_resembles_ours_is_foreign(source: Path, out: Path, refused: Refused, name: str) -> None:
    """Files that we never wrote are not deleted by --overwrite, however much their names resemble ours."""
    convert(source, out, tp=2)
    (out / "tp2" / name).write_text("mine")
    assert refused(OutputError, overwrite=True) == (
        f"{out / 'tp2' / name}: not a file of a converted set; move it away, nothing was touched"
    )


def test_i2_a_foreign_file_in_the_partial_folder_is_not_published(source: Path, out: Path) -> None:
    """What somebody put into the folder under construction neither vanishes nor becomes part of the set."""
    mine = out / ".tp2.partial" / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(OutputError, match=r"notes\.txt"):
        convert(source, out, tp=2)
    assert toys.contents(out).keys() == {".tp2.partial", ".tp2.partial/notes.txt"}


def test_a_file_where_the_set_should_go(out: Path, refused: Refused) -> None:
    """A file called tpN is somebody's file."""
    out.mkdir()
    (out / "tp2").write_text("mine")
    assert refused(OutputError) == f"{out / 'tp2'}: expected a folder, found a file; move it away, nothing was touched"


def test_an_unfinished_folder_where_the_set_should_go(source: Path, out: Path, refused: Refused) -> None:
    """A tpN without a manifest is not taken for a set, nor written over unasked."""
    convert(source, out, tp=2)
    (out / "tp2" / "shardconv.json").unlink()
    assert refused(OutputError) == (f"{out / 'tp2'}: has no shardconv.json, so it is not a complete set; move it away")


def test_a_damaged_manifest_where_the_set_should_go(source: Path, out: Path, refused: Refused) -> None:
    """A set whose manifest cannot be read is a failure with the reason; --overwrite replaces it."""
    convert(source, out, tp=2)
    good = toys.contents(out)
    (out / "tp2" / "shardconv.json").write_text("{")
    assert refused(SetError).startswith(f"{out / 'tp2' / 'shardconv.json'}: not JSON")
    convert(source, out, tp=2, overwrite=True)
    assert toys.contents(out) == good


@pytest.mark.parametrize("name", [toys.SINGLE, toys.INDEX, f"{toys.STEM}.fp16.safetensors", f"{toys.STEM}.bin"])
def test_ordinary_weights_in_out_are_not_joined_by_a_set(out: Path, refused: Refused, name: str) -> None:
    """A folder with the weights of a model is no place for a set: two truths under one config.json."""
    out.mkdir()
    (out / name).write_bytes(b"of another model")
    assert (
        refused(OutputError) == f"{out / name}: ordinary weights, which a set must not stand beside; name another OUT"
    )


def test_a_second_source_with_another_config_is_refused(source: Path, out: Path, refused: Refused) -> None:
    """Sets of several degrees share one config.json, so a source with another config is refused."""
    convert(source, out, tp=2)
    toys.edit_json(source / "config.json", extra=1)
    assert refused(OutputError, tp=4) == (
        f"{out / 'config.json'}: belongs to another model than {source}; name another OUT"
    )


def test_a_second_source_with_other_weights_is_refused(source: Path, out: Path, refused: Refused) -> None:
    """A second degree from other weights under the same config is refused, whether headers or only bytes differ."""
    convert(source, out, tp=2)
    said = f"{out / 'tp2'}: was converted from other weights than these; name another OUT"
    for name in toys.SHARDS:
        refill(source / name, 0.5)
    before = toys.contents(source.parent)
    with pytest.raises(OutputError) as caught:  # only reading the weights can tell
        convert(source, out, tp=4)
    assert str(caught.value) == said
    assert toys.contents(source.parent) == before
    model = toys.build(toys.ToyTransformer, dtype=torch.float32)
    for name in (toys.INDEX, *toys.SHARDS):
        (source / name).unlink()
    toys.write_weights(source / toys.SINGLE, model.state_dict())
    assert refused(OutputError, tp=4) == said


# --- a set that stands there


def test_e6_another_conversion_is_replaced_only_when_asked(source: Path, out: Path, refused: Refused) -> None:
    """A set of other settings stays unless --overwrite is given; the message says in what they differ."""
    convert(source, out, tp=2)
    plan = plan_file(source.parent, toys.ATTENTION_PLAN)
    for options, what in (
        ({"dtype": "fp32"}, "dtype"),
        ({"plan": plan}, "plan"),
        ({"self_contained": True}, "self_contained"),
    ):
        assert refused(OutputError, **options) == (
            f"{out / 'tp2'}: holds another conversion (differs in {what}); add --overwrite to replace it"
        )


def test_e6_an_edited_source_is_noticed_though_size_and_time_are_the_same(
    source: Path, out: Path, refused: Refused
) -> None:
    """Other bytes under the same name, length and modification time are another source."""
    convert(source, out, tp=2)
    refill(source / toys.SHARDS[1], 0.25)
    assert refused(OutputError) == (
        f"{out / 'tp2'}: holds another conversion (differs in the source's bytes); add --overwrite to replace it"
    )
    convert(source, out, tp=2, overwrite=True)
    assert convert(source, out, tp=2) == convert(source, out, tp=2)


def test_a_rerun_of_an_equal_set_does_nothing_and_says_so(
    source: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asking again for what is there touches no file and says that it was there already."""
    first = convert(source, out, tp=2)
    before = toys.listing(source.parent)
    assert convert(source, out, tp=2) == first
    capsys.readouterr()
    assert main(toys.arguments(source, out, tp=2)) == 0
    assert f"{out / 'tp2'}: ToyTransformer, tp degree 2, there already, unchanged" in capsys.readouterr().out
    assert main([*toys.arguments(source, out, tp=2), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sets"][0]["already_there"] is True
    assert toys.listing(source.parent) == before


@pytest.mark.parametrize("harm", ["missing", "short"])
def test_a_rerun_over_a_damaged_set_does_not_call_it_complete(
    source: Path, out: Path, refused: Refused, harm: str
) -> None:
    """A set that has lost a file, or part of one, is not "there already": it is called damaged."""
    convert(source, out, tp=2)
    path = out / "tp2" / "rank-00001-of-00002.safetensors"
    if harm == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size - 1)
    assert path.name in refused(ShardconvError)


def test_e4_overwrite_replaces_in_one_step_under_a_reader(source: Path, out: Path) -> None:
    """A reader that had mapped the old files reads old bytes on; the new set is what a fresh conversion would be."""
    convert(source, out, tp=2)
    path = out / "tp2" / "rank-00000-of-00002.safetensors"
    old = path.read_bytes()
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        convert(source, out, tp=2, dtype="fp32", overwrite=True)
        assert path.read_bytes() != old
        assert mapped[:] == old
    assert set(os.listdir(out)) == {"config.json", "tp2"}
    convert(source, source.parent / "fresh", tp=2, dtype="fp32")
    assert toys.contents(out) == toys.contents(source.parent / "fresh")


def test_e4_the_old_set_is_never_gone_while_it_is_replaced(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the moment of exchange the old set stands complete, and after a failure just then it still does."""
    convert(source, out, tp=2)
    before = toys.contents(out)

    def exchange(new: Path, old: Path) -> None:
        assert {key: value for key, value in toys.contents(out).items() if not key.startswith(".tp2")} == before
        assert set(os.listdir(new)) == SET
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(destination, "exchange", exchange)
    with pytest.raises(OutputError, match="Input/output error; nothing was left behind"):
        convert(source, out, tp=2, dtype="fp32", overwrite=True)
    assert toys.contents(out) == before


def test_e4_overwrite_works_where_there_is_no_exchange(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a system without renameat2 the new set still takes the old one's place, and nothing else is left."""
    convert(source, out, tp=2)
    monkeypatch.setattr(leftovers.ctypes, "CDLL", lambda *args, **kwargs: object())
    convert(source, out, tp=2, dtype="fp32", overwrite=True)
    assert set(os.listdir(out)) == {"config.json", "tp2"}
    assert set(os.listdir(out / "tp2")) == SET


def test_overwrite_leaves_other_degrees_alone(source: Path, out: Path) -> None:
    """Replacing one degree touches no file of another."""
    convert(source, out, tp=2)
    convert(source, out, tp=4)
    before = {key: value for key, value in toys.listing(out).items() if key.startswith("tp4")}
    convert(source, out, tp=2, dtype="fp32", overwrite=True)
    assert {key: value for key, value in toys.listing(out).items() if key.startswith("tp4")} == before


# --- the target cannot take it


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path | None]]:
    """Mounts a small file system with the given options; None where this user may not mount."""
    folders: list[Path] = []

    def mount(options: str) -> Path | None:
        folder = tmp_path / f"mounted{len(folders)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", str(folder)], check=True)


def test_e10_a_full_target_is_refused_up_front(
    source: Path,
    out: Path,
    mounted: Callable[[str], Path | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Too little room is found before a byte is written: what is needed and what is free."""
    disk = mounted("size=1m")
    if disk is None:
        disk = source.parent
        usage = shutil.disk_usage(disk)._replace(free=1 << 20)
        monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage)
    convert(source, source.parent / "elsewhere", tp=2, dry_run=True)
    needed = sum(file.nbytes for file in convert(source, source.parent / "elsewhere", tp=2, dry_run=True).files)
    message = toys.refused(capsys, OutputError, source, disk / "out", root=disk, tp=2)
    assert f"{disk}: the set takes {needed:,} bytes, " in message
    assert message.endswith("are free; make room or choose another disk")
    assert not (disk / "out").exists()


def test_e10_the_space_check_counts_what_is_written(source: Path, out: Path) -> None:
    """The bytes that the check asks for are the bytes that the set takes."""
    planned = convert(source, out, tp=4, self_contained=True, dry_run=True)
    convert(source, out, tp=4, self_contained=True)
    written = sum(path.stat().st_size for path in (out / "tp4").glob("*.safetensors"))
    assert sum(file.nbytes for file in planned.files) == written


def test_e4_a_read_only_target_is_refused_up_front(
    source: Path,
    mounted: Callable[[str], Path | None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A target that cannot be written is named before the weights are read."""
    disk = mounted("size=16m,ro")
    if disk is None:
        disk = source.parent
        monkeypatch.setattr(destination.os, "access", lambda path, mode: False)
    message = toys.refused(capsys, OutputError, source, disk / "out", root=disk, tp=2)
    assert message == f"{disk}: cannot be written; choose a folder you may write to"


def failing_pwrite(after: int, failure: Callable[[], None]) -> Callable[..., int]:
    """An `os.pwrite` that does `failure` once `after` bytes have been written."""
    real, written = os.pwrite, [0]

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if written[0] >= after:
            failure()
        nbytes = len(data)  # before the sum: a call in the middle of it would let another thread in between
        written[0] += nbytes
        return real(fd, data, offset)

    return pwrite


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True], ids=["fresh", "beside-another"])
@pytest.mark.parametrize("after", [0, 1_000_000])
def test_e10_a_disk_that_fills_up_in_mid_write_leaves_nothing(
    source: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    after: int,
    there: bool,
) -> None:
    """A write that fails removes what this conversion wrote, folders included, and nothing else."""
    if there:
        convert(source, out, tp=4)
    before = toys.contents(source.parent)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing_pwrite(after, no_space))
        with pytest.raises(OutputError) as caught:
            convert(source, out, tp=2)
        assert str(caught.value) == f"{out / 'tp2'}: No space left on device; nothing was left behind"
        assert toys.contents(source.parent) == before
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing_pwrite(after, no_space))
        assert main(toys.arguments(source, out, tp=2)) == 1
        assert capsys.readouterr().err == f"shardconv: {caught.value}\n"
    assert toys.contents(source.parent) == before


def test_e4_a_failed_overwrite_leaves_the_old_set(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up while a set is replaced costs nothing: the old set stands, inode for inode."""
    convert(source, out, tp=2)
    before = {key: value for key, value in toys.listing(out).items() if key.startswith("tp2")}
    monkeypatch.setattr(os, "pwrite", failing_pwrite(1_000_000, no_space))
    with pytest.raises(OutputError, match="No space left on device"):
        convert(source, out, tp=2, dtype="fp32", overwrite=True)
    after = toys.listing(out)
    assert {key: value for key, value in after.items() if key.startswith("tp2")} == before
    assert set(after) == {".", "config.json"} | set(before)


def test_a_set_that_cannot_be_set_aside_is_refused_by_file(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that refuses a file's full length is asked before the first weight byte is read."""

    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    before = toys.contents(source.parent)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(
        OutputError, match=r"rank-00000-of-00002\.safetensors: [\d,]+ bytes cannot be set aside \(File too"
    ):
        convert(source, out, tp=2)
    assert toys.contents(source.parent) == before


def test_a_source_that_shrinks_while_it_is_read(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source file cut short under the reader is an error that names it, and leaves nothing."""
    real = os.posix_fallocate

    def truncate_source(fd: int, offset: int, nbytes: int) -> None:
        os.truncate(source / toys.SHARDS[1], 10_000)
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", truncate_source)
    with pytest.raises(CheckpointError, match=f"{toys.SHARDS[1]}: the file became shorter while it was read"):
        convert(source, out, tp=2)
    assert not out.exists()


def test_an_unexpected_error_is_one_line(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault of ours is one line with a hint, exit code 1 and nothing left; with SHARDCONV_DEBUG=1 a traceback."""

    def fail() -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(os, "pwrite", failing_pwrite(0, fail))
    assert main(toys.arguments(source, out, tp=2)) == 1
    assert capsys.readouterr().err == "shardconv: ZeroDivisionError: a fault of ours (SHARDCONV_DEBUG=1 shows where)\n"
    assert not out.exists()
    monkeypatch.setenv("SHARDCONV_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(toys.arguments(source, out, tp=2))


# --- two writers, interruption


def test_a_second_writer_fails_cleanly(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversion into a set that another one is writing fails at once, and does not disturb the first."""
    real, said = os.posix_fallocate, []

    def start_another(fd: int, offset: int, nbytes: int) -> None:
        if not said:
            said.append("")
            with pytest.raises(OutputError) as caught:
                convert(source, out, tp=2)
            said[0] = str(caught.value)
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", start_another)
    convert(source, out, tp=2)
    assert len(said) == 1
    assert said[0].startswith(f"{out / '.tp2.partial'}: another process is writing here")
    convert(source, source.parent / "fresh", tp=2)
    assert toys.contents(out) == toys.contents(source.parent / "fresh")


def test_a_second_writer_of_another_degree_is_welcome(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two degrees can be written into one folder at the same time."""
    real, started = os.posix_fallocate, []

    def start_another(fd: int, offset: int, nbytes: int) -> None:
        if not started:
            started.append(True)
            convert(source, out, tp=4)
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", start_another)
    convert(source, out, tp=2)
    assert set(os.listdir(out)) == {"config.json", "tp2", "tp4"}


def test_a_set_that_appears_meanwhile_is_not_replaced(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where locks do nothing, a set published by somebody else during the work is left as it is."""
    convert(source, source.parent / "other", tp=2, dtype="fp32")
    real = os.posix_fallocate

    def publish_another(fd: int, offset: int, nbytes: int) -> None:
        if not (out / "tp2").exists():
            shutil.copytree(source.parent / "other" / "tp2", out / "tp2")
        real(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", publish_another)
    with pytest.raises(OutputError, match=f"{out / 'tp2'}: appeared meanwhile"):
        convert(source, out, tp=2)
    assert toys.contents(out) == {
        key: value for key, value in toys.contents(source.parent / "other").items() if key != "config.json"
    }


def test_two_writers_where_locks_do_nothing(source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without flock too, what is published is one writer's whole set, and the other fails cleanly.

    The second writer starts in the middle of the first, and is held up until the first is done; then its disk is full.
    """

    def unsupported(fd: int, operation: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    failed: list[ShardconvError] = []
    created, released = threading.Event(), threading.Event()

    def run() -> None:
        try:
            convert(source, out, tp=2)
        except ShardconvError as error:
            failed.append(error)
        finally:
            created.set()

    second = threading.Thread(target=run)
    real_allocate = os.posix_fallocate
    num_files: dict[threading.Thread, int] = {}

    def allocate(fd: int, offset: int, nbytes: int) -> None:
        real_allocate(fd, offset, nbytes)
        thread = threading.current_thread()
        num_files[thread] = num_files.get(thread, 0) + 1
        if num_files[thread] < len(SET) - 1:
            return
        if thread is second:
            created.set()
            released.wait(20)
            no_space()
        second.start()
        created.wait(20)

    monkeypatch.setattr(fcntl, "flock", unsupported)
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    run()
    while_second_stands = toys.contents(out / "tp2") if (out / "tp2").exists() else None
    released.set()
    second.join()
    monkeypatch.setattr(os, "posix_fallocate", real_allocate)
    convert(source, source.parent / "fresh", tp=2)
    fresh = toys.contents(source.parent / "fresh")
    whole = {key.removeprefix("tp2/"): value for key, value in fresh.items() if key.startswith("tp2/")}
    assert while_second_stands in (None, whole)
    assert len(failed) == (1 if while_second_stands else 2)
    if not while_second_stands:
        assert not out.exists()
    convert(source, out, tp=2)
    assert toys.contents(out) == fresh


def test_e2_ctrl_c_leaves_nothing(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the middle exits with 130, says so, and leaves nothing behind."""
    before = toys.contents(source.parent)
    monkeypatch.setattr(os, "pwrite", failing_pwrite(500_000, lambda: os.kill(os.getpid(), signal.SIGINT)))
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        assert main(toys.arguments(source, out, tp=2)) == 130
    finally:
        signal.signal(signal.SIGINT, previous)
    assert capsys.readouterr().err == "shardconv: stopped; nothing half-done is left behind\n"
    assert toys.contents(source.parent) == before


KILLED = """
import os, signal, sys
import shardconv
from shardconv.cli.main import main
real, written = os.pwrite, 0
def pwrite(fd, data, offset):
    global written
    if written >= int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    written += len(data)
    return real(fd, data, offset)
os.pwrite = pwrite
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 2_000_000])
def test_e2_a_killed_conversion_leaves_nothing_that_looks_complete(tmp_path: Path, after: int) -> None:
    """After SIGKILL no tpN stands there, and a rerun gives the bytes of a run left alone, with no leftovers."""
    source, out = tmp_path / "in", tmp_path / "out"
    toys.save(toys.small_models.build("qwenimage21"), source)
    argv = toys.arguments(source, out, tp=2)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(after), *argv], capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not (out / "tp2").exists()
    assert (out / ".tp2.partial").exists()
    assert not list(out.rglob("shardconv.json"))
    assert sets_in(out) == {}
    assert main(argv) == 0
    convert(source, tmp_path / "fresh", tp=2)
    assert toys.contents(out) == toys.contents(tmp_path / "fresh")


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
from shardconv.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_e10_a_limit_on_file_sizes_is_told_before_weights_are_read(tmp_path: Path) -> None:
    """Under `ulimit -f` the first file too large is named at once, and nothing is left."""
    source, out = tmp_path / "in", tmp_path / "out"
    toys.save(toys.small_models.build("qwenimage21"), source)
    limited = subprocess.run(
        [sys.executable, "-c", LIMITED, *toys.arguments(source, out, tp=1)], capture_output=True, text=True, check=False
    )
    assert limited.returncode == 1
    assert "bytes cannot be set aside (File too large); make room, or choose another OUT" in limited.stderr
    assert "Traceback" not in limited.stderr
    assert not out.exists()


@pytest.mark.slow
def test_e10_a_disk_that_is_truly_full(tmp_path: Path, mounted: Callable[[str], Path | None]) -> None:
    """On a real small file system, filled up after the check, the conversion fails by name and frees what it took."""
    disk = mounted("size=2m")
    source = tmp_path / "in"
    toys.save(toys.small_models.build("qwenimage21"), source)
    script = LIMITED.replace("resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))", "") if disk else LIMITED
    script = script.replace(
        "sys.exit",
        "from shardconv.commands import convert as conversion\nconversion.check_space = lambda *args: []\nsys.exit",
    )
    target = (disk or tmp_path) / "out"
    argv = toys.arguments(source, target, tp=2, dtype="fp32", self_contained=True)
    full = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True, check=False)
    assert full.returncode == 1
    assert "bytes cannot be set aside (" in full.stderr
    assert not target.exists()


def test_warnings_do_not_stop_a_conversion(source: Path, out: Path) -> None:
    """Advice is a warning: with a fused layer cut plainly the set is written all the same."""
    with pytest.MonkeyPatch.context() as patch:

        def fused(model: nn.Module) -> None:
            model.blocks[0].ff.proj._tp_packed_col_blocks = [384, 384]

        toys.install(patch, fused)
        with pytest.warns(ShardconvWarning, match="a fused layer"):
            convert(source, out, tp=2)
    assert set(os.listdir(out / "tp2")) == SET
