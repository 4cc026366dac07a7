"""`shardconv merge`: a set gives the ordinary checkpoint back, bit for bit, or nothing at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from safetensors.torch import load_file

import shardconv
from shardconv.cli.main import main
from shardconv.cli.merge import parse_size
from shardconv.commands import merge as merging
from shardconv.commands import reshard as resharding
from shardconv.commands.merge import merge
from shardconv.engine import pool
from shardconv.plans.catalogue import small_models


def weights(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merge") / "flux2"
    small_models.build("flux2").save_pretrained(folder, max_shard_size="2MB")
    return folder


@pytest.mark.parametrize("self_contained", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("chunk", [pytest.param(10_007, marks=pytest.mark.slow), 8 << 20])
def test_convert_then_merge_is_the_identity(
    source: Path, tmp_path: Path, tp: int, self_contained: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the degree, the layout and the chunk, every tensor comes back as it was."""
    monkeypatch.setattr(pool, "CHUNK_NBYTES", chunk)
    shardconv.convert(source, tmp_path / "out", tp=tp, self_contained=self_contained)
    merge(tmp_path / "out", tmp_path / "merged", max_shard_nbytes=1_500_000)
    assert same(weights(tmp_path / "merged"), weights(source))
    assert (tmp_path / "merged" / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", small_models.NAMES)
def test_diffusers_loads_what_merge_writes(tmp_path: Path, name: str) -> None:
    """A merged folder is an ordinary checkpoint: `from_pretrained` gives the model that was converted."""
    model = small_models.build(name)
    model.save_pretrained(tmp_path / "source")
    shardconv.convert(tmp_path / "source", tmp_path / "out", tp=2)
    for limit in (10**10, 10**6):
        merge(tmp_path / "out" / "tp2", tmp_path / str(limit), max_shard_nbytes=limit)
        loaded = type(model).from_pretrained(tmp_path / str(limit))
        assert same(dict(loaded.state_dict()), dict(model.state_dict()))


def test_a_cast_set_merges_to_the_cast(source: Path, tmp_path: Path) -> None:
    """Merging a set that was cast gives the cast weights, not the source's."""
    shardconv.convert(source, tmp_path / "out", tp=2, dtype="bf16")
    merge(tmp_path / "out", tmp_path / "merged")
    assert same(weights(tmp_path / "merged"), {k: t.to(torch.bfloat16) for k, t in weights(source).items()})


def test_the_index_names_every_tensor_once(source: Path, tmp_path: Path) -> None:
    """The index lists each tensor in the file that holds it, and the bytes of all of them."""
    shardconv.convert(source, tmp_path / "out", tp=2)
    merge(tmp_path / "out", tmp_path / "merged", max_shard_nbytes=10**6)
    index = json.loads((tmp_path / "merged" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    held = {name: path.name for path in (tmp_path / "merged").glob("*.safetensors") for name in load_file(path)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights(source).values())


@pytest.mark.parametrize("file", ["rank-00001-of-00002.safetensors", "replicated.safetensors"])
def test_a_damaged_slice_is_refused_by_name(source: Path, tmp_path: Path, file: str) -> None:
    """One flipped bit anywhere in the payload stops the merge, names the tensor and leaves nothing behind."""
    shardconv.convert(source, tmp_path / "out", tp=2)
    path = tmp_path / "out" / "tp2" / file
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(shardconv.SetError, match=r"slice \d of \d is damaged"):
        merge(tmp_path / "out", tmp_path / "merged")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out"]


def test_out_must_be_empty(source: Path, tmp_path: Path) -> None:
    """A folder with something in it is refused and left as it was; an empty one is taken."""
    shardconv.convert(source, tmp_path / "out", tp=2)
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "mine.txt").write_text("keep")
    with pytest.raises(shardconv.OutputError, match="expected a new or empty folder"):
        merge(tmp_path / "out", tmp_path / "merged")
    assert [entry.name for entry in (tmp_path / "merged").iterdir()] == ["mine.txt"]
    (tmp_path / "merged" / "mine.txt").unlink()
    merge(tmp_path / "out", tmp_path / "merged")
    assert same(weights(tmp_path / "merged"), weights(source))


GIVEN = ("out", "out/transformer", "out/transformer/tp2", "link", "link/tp2")
INSIDE = (
    "out/transformer", "out/transformer/tp2", "out/transformer/merged", "out/transformer/tp8",
    "out/transformer/tp2/merged", "link/new/merged", "linked-set", ".", "out/transformer/../transformer/new",
)  # fmt: skip


@pytest.mark.slow
def test_i2_a_set_is_not_merged_into_itself(source: Path, tmp_path: Path) -> None:
    """OUT as the set, its component or its pipeline, in it or around it, under any name: refused, nothing written."""
    out = pipeline(source, tmp_path / "out")
    (tmp_path / "link").symlink_to(out / "transformer")
    (tmp_path / "linked-set").symlink_to(out / "transformer" / "tp2")
    before = toys.listing(tmp_path)
    for given, to in [*((given, to) for given in GIVEN for to in INSIDE), ("out", "out"), ("out", "out/new")]:
        with pytest.raises(shardconv.OutputError, match=r"lies inside|expected a new or empty folder"):
            merge(tmp_path / given, tmp_path / to)
    assert toys.listing(tmp_path) == before


def test_an_empty_folder_may_be_a_link(source: Path, tmp_path: Path) -> None:
    """OUT as a link to an empty folder on another disk: the checkpoint comes to stand there."""
    shardconv.convert(source, tmp_path / "out", tp=2)
    (tmp_path / "elsewhere" / "empty").mkdir(parents=True)
    (tmp_path / "merged").symlink_to(tmp_path / "elsewhere" / "empty")
    merge(tmp_path / "out", tmp_path / "merged")
    assert same(weights(tmp_path / "elsewhere" / "empty"), weights(source))
    assert (tmp_path / "merged").is_symlink()


def pipeline(source: Path, folder: Path) -> Path:
    """A pipeline of two transformers and a scheduler, the transformers converted for 2 ranks."""
    for name in ("transformer", "transformer_2"):
        shardconv.convert(source, folder / name, tp=2)
    (folder / "scheduler").mkdir()
    (folder / "scheduler" / "scheduler_config.json").write_text("{}")
    index = {name: ["diffusers", "Flux2Transformer2DModel"] for name in ("transformer", "transformer_2")}
    (folder / "model_index.json").write_text(json.dumps(index | {"scheduler": ["diffusers", "DDIMScheduler"]}))
    return folder


@pytest.mark.slow
def test_an_output_folder_gives_the_pipeline_back(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every sharded component is merged, all else is linked, and `--json` lists each file with its bytes."""
    out = pipeline(source, tmp_path / "out")
    assert main(["merge", "--json", "--max-shard-size", "2MB", str(out), str(tmp_path / "merged")]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    found = {path for path in (tmp_path / "merged").rglob("*") if path.is_file()}
    assert {tmp_path / "merged" / name: nbytes for name, nbytes in files.items()} == {
        path: path.stat().st_size for path in found
    }
    for name in ("transformer", "transformer_2"):
        assert same(weights(tmp_path / "merged" / name), weights(source))
    for name in ("model_index.json", "scheduler/scheduler_config.json"):
        assert (tmp_path / "merged" / name).samefile(out / name)


def test_the_faults_of_all_components_are_told_at_once(source: Path, tmp_path: Path) -> None:
    """A missing file in one component and an edited config in another are one error, from merge and from reshard."""
    out = pipeline(source, tmp_path / "out")
    (out / "transformer" / "tp2" / "replicated.safetensors").unlink()
    config = out / "transformer_2" / "config.json"
    config.write_text(config.read_text().replace('"num_layers": 2', '"num_layers": 3'))
    for work in (merge, lambda path, new: shardconv.reshard(path, new, tp=4)):
        with pytest.raises(shardconv.SetError) as caught:
            work(out, tmp_path / "new")
        assert len(caught.value.issues) == 2
        assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.parametrize("existed", [True, False])
def test_i2_a_pipeline_is_merged_whole_or_not_at_all(source: Path, tmp_path: Path, existed: bool) -> None:
    """Damage in the second component takes back what was written of the first, and nothing else."""
    out = pipeline(source, tmp_path / "out")
    path = out / "transformer_2" / "tp2" / "replicated.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    if existed:
        (tmp_path / "merged").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(shardconv.SetError, match="is damaged"):
        merge(out, tmp_path / "merged")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_rank_file_is_named(source: Path, tmp_path: Path) -> None:
    """An incomplete set is refused before anything is written."""
    shardconv.convert(source, tmp_path / "out", tp=4)
    (tmp_path / "out" / "tp4" / "rank-00002-of-00004.safetensors").unlink()
    with pytest.raises(shardconv.SetError, match=r"rank-00002-of-00004\.safetensors: cannot be read"):
        merge(tmp_path / "out", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_the_command_names_what_it_wrote(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """stdout lists the files, one a line; `--quiet` says nothing."""
    shardconv.convert(source, tmp_path / "out", tp=2)
    assert main(["merge", str(tmp_path / "out"), str(tmp_path / "a")]) == 0
    said = capsys.readouterr()
    assert sorted(said.out.split()) == sorted(str(path) for path in (tmp_path / "a").iterdir())
    assert said.err == ""
    assert main(["merge", "--quiet", str(tmp_path / "out"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("text", "nbytes"), [("5GB", 5 * 10**9), ("512 MiB", 512 << 20), ("10000000000", 10**10)])
def test_sizes_are_read_as_people_write_them(text: str, nbytes: int) -> None:
    """Decimal and binary units, and plain bytes."""
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1GB", "5 parsecs", "1.5GB"])
def test_a_size_that_is_none_is_a_usage_error(text: str) -> None:
    """A size that cannot be read is refused with what was found."""
    with pytest.raises(shardconv.UsageError, match="expected a size such as 5GB"):
        parse_size(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "verb", "said"),
    [
        (merging, ["merge"], "nothing half-done is left behind"),
        (
            resharding,
            ["reshard", "--tp", "4"],
            "{}/transformer/tp4 stands complete, what follows does not; run it again",
        ),
    ],
)
def test_ctrl_c_between_two_components_says_what_is_true(
    module: Any, verb: list[str], said: str, source: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at the second component: `merge` takes the first back and says that nothing is left, `reshard` names
    it."""
    out, new = pipeline(source, tmp_path / "out"), tmp_path / "new"
    real = module._execute

    def stopped(job: Any, *others: Any) -> Any:
        if job.component == "transformer_2":
            raise KeyboardInterrupt
        return real(job, *others)

    monkeypatch.setattr(module, "_execute", stopped)
    assert main([*verb, str(out), str(new)]) == 130
    assert capsys.readouterr().err == f"shardconv: stopped; {said.format(new)}\n"
    assert new.exists() == (verb != ["merge"])
