"""`shardconv reshard`: the set of another degree, byte for byte what converting the source gives, or nothing at all."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import hand_sets
import pytest
import small_sets
import toys
from hypothesis import given, settings
from hypothesis import strategies as st

import shardconv
from shardconv import Manifest, OutputError, PlanError, SetError, UsageError, reshard
from shardconv.cli.main import main
from shardconv.commands import reshard as resharding
from shardconv.commands.merge import merge
from shardconv.engine import pool
from shardconv.plans.catalogue import small_models


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """T converted for 2 ranks; the source beside it is gone."""
    toys.save(toys.build(toys.install(monkeypatch)), tmp_path / "source")
    shardconv.convert(tmp_path / "source", tmp_path / "out", tp=2)
    (tmp_path / "source").rename(tmp_path / "hidden")
    return tmp_path


# Equal to a conversion


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"self_contained": True}, {"dtype": "bf16"}])
@pytest.mark.parametrize(("a", "b"), [(1, 8), (8, 1), (2, 8), (8, 2), (4, 4)])
def test_resharding_is_converting(a: int, b: int, options: dict[str, Any], tmp_path: Path) -> None:
    """Of a real class, up, down and sideways: every file, config and manifest too, is as a fresh conversion's."""
    reshard(small_sets.converted("flux2", a, **options), tmp_path / "out", tp=b)
    assert contents(tmp_path / "out") == contents(small_sets.converted("flux2", b, **options))


@pytest.mark.parametrize("name", small_sets.NAMES)
def test_every_class_reshards(name: str, tmp_path: Path) -> None:
    """Plain and packed styles of every class we have come out as converted."""
    reshard(small_sets.converted(name, 4), tmp_path / "out", tp=2)
    assert contents(tmp_path / "out") == contents(small_sets.converted(name, 2))


@pytest.mark.parametrize(("a", "b"), [(2, 3), (3, 8), (8, 6), (4, 12), (24, 1)])
def test_any_degree_becomes_any_other(a: int, b: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither degree need be a multiple of the other."""
    toys.save(toys.build(toys.install(monkeypatch)), tmp_path / "source")
    shardconv.convert(tmp_path / "source", tmp_path / "a", tp=a)
    shardconv.convert(tmp_path / "source", tmp_path / "b", tp=b)
    reshard(tmp_path / "a", tmp_path / "out", tp=b)
    assert contents(tmp_path / "out") == contents(tmp_path / "b")


DEGREES = st.integers(1, 8)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.data(), DEGREES, DEGREES, st.booleans(), st.none() | st.booleans(), st.integers(1, 300))
def test_round_trips(
    data: st.DataObject, a: int, b: int, self_contained: bool, change: bool | None, chunk: int
) -> None:
    """Whatever shapes, dtypes, blocks, degrees, layouts, chunks and file splits: convert(a) resharded to b is
    convert(b) in every byte, merging either gives every tensor of the source, and a reshard back is the beginning."""
    source = data.draw(hand_sets.sources(math.lcm(a, b)))
    whole = self_contained if change is None else change
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        root = Path(name)
        hand_sets.convert(source, root / "a", a, self_contained)
        hand_sets.convert(source, root / "b", b, whole)
        patch.setattr(resharding, "_check_degree", lambda *args: ())  # there is no such class to ask
        patch.setattr(pool, "CHUNK_NBYTES", chunk)
        patch.setattr(os, "fsync", lambda fd: None)  # no power will fail; most of the time goes there
        reshard(root / "a", root / "new", tp=b, self_contained=change)
        assert contents(root / "new") == contents(root / "b")
        reshard(root / "new", root / "back", tp=a, self_contained=self_contained)
        assert contents(root / "back") == contents(root / "a")
        for folder in ("a", "new"):
            merge(root / folder, root / f"{folder}-merged", max_shard_nbytes=data.draw(st.integers(1, 2000)))
            merged = (root / f"{folder}-merged").glob("*.safetensors")
            assert {k: v for file in merged for k, v in toys.read_weights(file).items()} == source.tensors()


@pytest.mark.slow
@pytest.mark.parametrize("self_contained", [True, False])
def test_the_layout_is_kept_unless_asked(self_contained: bool, toy: Path) -> None:
    """By default replicated tensors stay where the set has them; either way can be asked for."""
    reshard(toy / "out", toy / "other", tp=4, self_contained=self_contained)
    assert (toy / "other" / "tp4" / "replicated.safetensors").exists() != self_contained
    reshard(toy / "other", toy / "again", tp=2)
    assert Manifest.read(toy / "again" / "tp2").self_contained == self_contained


# Where to


def test_degrees_stand_side_by_side(toy: Path) -> None:
    """OUT may be the folder that is read, named by the component or by the set; the set that was there stays."""
    before = toys.listing(toy / "out" / "tp2")
    reshard(toy / "out", toy / "out", tp=4)
    reshard(toy / "out" / "tp2", toy / "out", tp=8)
    assert sorted(entry.name for entry in (toy / "out").iterdir()) == ["config.json", "tp2", "tp4", "tp8"]
    assert toys.listing(toy / "out" / "tp2") == before
    shardconv.verify(toy / "out", source=toy / "hidden")


def test_a_rerun_does_nothing(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A set that is already there is left alone, and the command says so; another one needs --overwrite."""
    argv = ["reshard", "--tp", "4", str(toy / "out"), str(toy / "out")]
    assert main(argv) == 0
    assert "tp degree 4, written" in capsys.readouterr().out
    before = toys.listing(toy / "out")
    assert main(argv) == 0
    assert "tp degree 4, there already, unchanged" in capsys.readouterr().out
    assert toys.listing(toy / "out") == before
    assert main([*argv, "--self-contained"]) == 1
    assert "holds another conversion (differs in self_contained); add --overwrite" in capsys.readouterr().err
    assert toys.listing(toy / "out") == before
    assert main([*argv, "--self-contained", "--overwrite", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")
    assert not (toy / "out" / "tp4" / "replicated.safetensors").exists()


def test_a_set_can_be_written_anew_in_its_own_place(toy: Path) -> None:
    """With --overwrite even the set that is read is replaced, in one step."""
    reshard(toy / "out", toy / "out", tp=2, self_contained=True, overwrite=True)
    shardconv.verify(toy / "out", source=toy / "hidden")
    assert Manifest.read(toy / "out" / "tp2").self_contained


def refused(error: type[Exception], text: str, root: Path, *args: object, **options: object) -> None:
    """`reshard` raises and nothing under `root` has changed."""
    before = toys.listing(root)
    with pytest.raises(error, match=text):
        reshard(*args, **options)  # type: ignore[arg-type]
    assert toys.listing(root) == before


def test_i2_nothing_foreign_is_touched(toy: Path) -> None:
    """Foreign files in the target, another model's config, ordinary weights, or a place inside or around the set are
    refused, and nothing is deleted or written."""
    out = toy / "out"
    refused(OutputError, "is a set; name its component folder", toy, out, out / "tp2", tp=4)
    refused(OutputError, "is a set; name its component folder", toy, out, out / "tp2" / "x", tp=4)
    refused(OutputError, "holds the set", toy, out, toy, tp=4)
    (toy / "a" / "tp4").mkdir(parents=True)
    (toy / "a" / "tp4" / "mine.txt").write_text("keep")
    refused(OutputError, r"mine\.txt: not a file of a converted set", toy, out, toy / "a", tp=4, overwrite=True)
    (toy / "b").mkdir()
    (toy / "b" / "config.json").write_text("{}")
    refused(OutputError, "belongs to another model", toy, out, toy / "b", tp=4)
    refused(OutputError, "ordinary weights", toy, out, toy / "hidden", tp=4)
    (toy / "c").write_text("a file")
    refused(OutputError, "expected a folder to write into, found a file", toy, out, toy / "c", tp=4)


def test_e6_a_set_of_other_weights_cannot_be_joined(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under one config.json all degrees are of the same weights; a resharded set is refused beside others."""
    model = toys.build(toys.install(monkeypatch))
    model.proj_in.weight.data += 1
    toys.save(model, toy / "source2")
    shutil.copy(toy / "hidden" / "config.json", toy / "source2")
    shardconv.convert(toy / "source2", toy / "out2", tp=4)
    refused(OutputError, r"tp4: was converted from other weights than", toy, toy / "out", toy / "out2", tp=3)
    refused(OutputError, r"holds another conversion \(differs in the source's bytes\)", toy, toy / "out", toy / "out2",
            tp=4)  # fmt: skip


# What cannot be done


@pytest.mark.slow
@pytest.mark.parametrize("tp", [5, 7, 16])
@pytest.mark.parametrize("name", ["flux", "flux2"])
def test_a_degree_is_refused_in_the_words_of_convert(name: str, tp: int, tmp_path: Path) -> None:
    """Heads and blocks that the degree does not divide give the error that converting the source gives."""
    with pytest.raises(PlanError) as expected:
        shardconv.convert(small_sets.source(name), tmp_path / "out", tp=tp)
    with pytest.raises(PlanError) as found:
        reshard(small_sets.converted(name, 4), tmp_path / "out", tp=tp)
    assert found.value.issues == expected.value.issues
    assert not (tmp_path / "out").exists()


def test_heads_count_where_every_block_divides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A degree that divides all widths but not the heads is refused: the manifest remembers the heads."""
    toys.save(toys.build(toys.install(monkeypatch)), tmp_path / "source")
    shardconv.convert(tmp_path / "source", tmp_path / "out", tp=2)
    with pytest.raises(PlanError, match="24 heads, not divisible by tp degree 16"):
        reshard(tmp_path / "out", tmp_path / "out", tp=16)


def test_a_set_of_degree_1_is_checked_as_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not matter on one rank, such as a norm across all heads, is checked before there are more."""
    import torch

    def change(model: Any) -> None:
        for block in model.blocks:
            block.attn.norm_q = torch.nn.RMSNorm(toys.INNER)

    toys.save(toys.build(toys.install(monkeypatch, change)), tmp_path / "source")
    shardconv.convert(tmp_path / "source", tmp_path / "out", tp=1)
    with pytest.raises(PlanError) as expected:
        shardconv.convert(tmp_path / "source", tmp_path / "new", tp=2)
    with pytest.raises(PlanError) as found:
        reshard(tmp_path / "out", tmp_path / "new", tp=2)
    assert found.value.issues == expected.value.issues


def test_a_class_that_is_cut_otherwise_by_now_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model is asked, one that cuts the set's tensors in another way is not mixed with them."""
    plan = {**toys.PLAN, "blocks.*.ff.proj": {"style": "packed_colwise"}}

    def blocks(sizes: list[int]) -> Any:
        def change(model: Any) -> None:
            for block in model.blocks:
                block.ff.proj._tp_packed_col_blocks = sizes

        return change

    toys.save(toys.build(toys.install(monkeypatch, blocks([384, 384]), _tp_plan=plan)), tmp_path / "source")
    shardconv.convert(tmp_path / "source", tmp_path / "out", tp=1)
    toys.install(monkeypatch, blocks([192, 576]), _tp_plan=plan)
    with pytest.raises(SetError, match=r"blocks\.0\.ff\.proj\.weight: this diffusers' ToyTransformer is cut otherwise"):
        reshard(tmp_path / "out", tmp_path / "new", tp=2)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [0, -2, True, 2.0])
def test_a_degree_that_is_none_is_a_usage_error(tp: Any, toy: Path) -> None:
    """As for convert."""
    refused(UsageError, f"--tp: expected a positive number of ranks, found {tp}", toy, toy / "out", toy / "new", tp=tp)


@pytest.mark.parametrize("file", ["rank-00001-of-00002.safetensors", "replicated.safetensors"])
def test_e8_a_damaged_slice_is_refused_by_name(file: str, toy: Path) -> None:
    """One flipped bit in the payload stops the reshard before anything is published, and nothing is left behind."""
    path = toy / "out" / "tp2" / file
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x10
    path.write_bytes(data)
    before = toys.contents(toy)
    with pytest.raises(SetError, match=r"slice \d of \d is damaged"):
        reshard(toy / "out", toy / "new", tp=4)
    with pytest.raises(SetError, match=r"slice \d of \d is damaged"):
        reshard(toy / "out", toy / "out", tp=4)
    assert toys.contents(toy) == before


def test_a_config_that_was_edited_is_refused(toy: Path) -> None:
    """The config beside the set must be the one that was converted."""
    toys.edit_json(toy / "out" / "config.json", num_layers=1)
    refused(SetError, r"config\.json: not the config that was converted", toy, toy / "out", toy / "new", tp=4)


def test_a_full_disk_leaves_nothing(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little room is told before, an error while writing cleans up; the set that is read stays."""
    before = toys.contents(toy)
    real = shutil.disk_usage(toy)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: real._replace(free=1000))
        with pytest.raises(OutputError, match="1,000 are free"):
            reshard(toy / "out", toy / "new", tp=4)

    def pwrite(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(pool.os, "pwrite", pwrite)
    with pytest.raises(OutputError, match="No space left on device; nothing was left behind"):
        reshard(toy / "out", toy / "new", tp=4)
    assert toys.contents(toy) == before


# Pipelines


def test_an_output_folder_is_resharded_whole(toy: Path) -> None:
    """Every sharded component gets the new degree; into another OUT the rest of the pipeline comes along."""
    pipe = toy / "pipe"
    for name in ("transformer", "transformer_2"):
        shutil.copytree(toy / "out", pipe / name)
    (pipe / "scheduler").mkdir()
    (pipe / "scheduler" / "scheduler_config.json").write_text("{}")
    index = {"scheduler": ["diffusers", "X"], "transformer": ["diffusers", toys.NAME]}
    index["transformer_2"] = index["transformer"]
    (pipe / "model_index.json").write_text(json.dumps(index))
    reshard(toy / "out", toy / "out", tp=4)
    reshard(pipe, toy / "new", tp=4)
    expected = {f"{name}/{file}" for name in ("transformer", "transformer_2") for file in contents(toy / "out")}
    rest = {"model_index.json", "scheduler/scheduler_config.json"}
    assert contents(toy / "new").keys() == {name for name in expected if "tp2" not in name} | rest
    reshard(pipe, pipe, tp=4)
    assert contents(pipe).keys() == expected | rest
    assert contents(pipe / "transformer_2" / "tp4") == contents(toy / "out" / "tp4")


# The command


def test_the_command_reports_as_convert_does(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints the document that convert prints for such a set."""
    assert main(["reshard", "--tp", "4", "--json", str(toy / "out"), str(toy / "new")]) == 0
    (found,) = json.loads(capsys.readouterr().out)["sets"]
    assert main(["convert", "--tp", "4", "--json", str(toy / "hidden"), str(toy / "fresh")]) == 0
    (expected,) = json.loads(capsys.readouterr().out)["sets"]
    assert {**found, "folder": ""} == {**expected, "folder": ""}


@pytest.mark.slow
def test_a_legal_degree_needs_no_torch(toy: Path) -> None:
    """Heads and blocks stand in the manifest, so that neither torch nor diffusers is loaded to reshard."""
    script = "import sys; from shardconv.cli.main import main\n"
    script += f"code = main(['reshard', '--tp', '8', {str(toy / 'out')!r}, {str(toy / 'new')!r}, '--quiet'])\n"
    script += "print(code, sorted({'torch', 'diffusers', 'safetensors', 'huggingface_hub', 'tqdm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_a_fused_layer_cut_plainly_is_warned_about_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From degree 1, where little is checked, resharding warns as converting the source does."""
    plan = {"transformer_blocks.*.ff.linear_in": "colwise", "transformer_blocks.*.ff.linear_out": "rowwise"}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    source = toys.save(small_models.build("flux2"), tmp_path / "source")
    options = ["--plan", str(tmp_path / "plan.json"), str(source)]
    assert main(["convert", "--tp", "2", *options, str(tmp_path / "two")]) == 0
    expected = capsys.readouterr().err
    assert "linear_in: a fused layer cut as colwise" in expected
    assert main(["convert", "--tp", "1", "--quiet", *options, str(tmp_path / "one")]) == 0
    assert main(["reshard", "--tp", "2", str(tmp_path / "one"), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().err == expected
