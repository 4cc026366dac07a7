"""A pipeline folder: what has a plan is sharded, everything else comes along untouched."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import struct
import time
from pathlib import Path
from typing import Any

import crashes
import diffusers
import pytest
import toys
from small_pipelines import build_flux_pipeline

from shardconv import CheckpointError, Manifest, OutputError, PlanError, ShardconvWarning, UsageError, convert
from shardconv.cli.main import main
from shardconv.commands import convert as conversion
from shardconv.commands.convert import convert_all
from shardconv.commands.options import Options

OTHERS = {"vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "scheduler"}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small FluxPipeline with sharded weights, saved once; tests work on copies."""
    folder = tmp_path_factory.mktemp("pipeline") / "flux"
    build_flux_pipeline().save_pretrained(folder, max_shard_size="2MB")
    return folder


@pytest.fixture
def pipe(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "flux"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def files_under(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def others(pipe: Path) -> set[str]:
    """Relative names of everything in a pipeline that is not its transformer."""
    return {name for name in files_under(pipe) if not name.startswith("transformer/")}


def test_the_transformer_is_sharded_and_the_rest_is_linked(pipe: Path, out: Path) -> None:
    """OUT is the pipeline again, with a set in place of the transformer's weights and hard links for all the rest."""
    manifest = convert(pipe, out, tp=2)
    assert manifest.model_class == "FluxTransformer2DModel"
    assert manifest.source.subfolder == "transformer"
    sets = {f"transformer/tp2/{path.name}" for path in (out / "transformer" / "tp2").iterdir()}
    assert len(sets) == 4
    assert files_under(out) == others(pipe) | {"transformer/config.json"} | sets
    assert {name.split("/")[0] for name in others(pipe) if "/" in name} == OTHERS
    for name in others(pipe):
        assert (out / name).stat().st_ino == (pipe / name).stat().st_ino, name
    convert(pipe / "transformer", out.parent / "alone", tp=2)
    alone = out.parent / "alone" / "tp2"
    for path in alone.glob("*.safetensors"):
        assert path.read_bytes() == (out / "transformer" / "tp2" / path.name).read_bytes()


@pytest.mark.slow
def test_the_parts_that_are_not_sharded_still_load(pipe: Path, out: Path) -> None:
    """Everything but the transformer loads from OUT with diffusers as it stands."""
    convert(pipe, out, tp=2)
    loaded = diffusers.FluxPipeline.from_pretrained(out, transformer=None)
    assert loaded.vae is not None
    assert loaded.text_encoder_2 is not None


@pytest.mark.slow
def test_across_file_systems_the_rest_is_copied(pipe: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a hard link is impossible the files are copied, byte for byte, and a rerun leaves the copies alone."""

    def link(source: object, target: object, **options: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", link)
    convert(pipe, out, tp=2)
    for name in others(pipe):
        assert (out / name).stat().st_ino != (pipe / name).stat().st_ino
        assert (out / name).read_bytes() == (pipe / name).read_bytes()
    before = toys.listing(out)
    convert(pipe, out, tp=2)
    assert toys.listing(out) == before


def refuse_links(source: object, target: object, **options: object) -> None:
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


@pytest.mark.slow
@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()])
def test_a_copy_cut_short_does_not_stand_in_the_way_of_a_rerun(
    pipe: Path, out: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    """A copy that fails midway leaves no half file under its final name; the rerun ends as if nothing had happened."""

    def half_a_copy(source: Path, target: Path, **options: object) -> None:
        data = Path(source).read_bytes()
        Path(target).write_bytes(data[: len(data) // 2])
        raise failure

    monkeypatch.setattr(os, "link", refuse_links)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", half_a_copy)
        with pytest.raises((OutputError, KeyboardInterrupt)):
            convert(pipe, out, tp=2)
    for name in others(pipe) & files_under(out):
        assert (out / name).read_bytes() == (pipe / name).read_bytes(), name
    convert(pipe, out, tp=2)
    assert others(pipe) < files_under(out)
    for name in others(pipe):
        assert (out / name).read_bytes() == (pipe / name).read_bytes(), name


@pytest.mark.slow
def test_e2_a_copy_that_was_killed_leaves_nothing_after_the_rerun(pipe: Path, out: Path) -> None:
    """SIGKILL in the middle of a copy: no half file under its final name, and no half file at all after the rerun."""

    def killed() -> None:
        def half_a_copy(source: Path, target: Path, **options: object) -> None:
            data = Path(source).read_bytes()
            Path(target).write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

        os.link, shutil.copyfile = refuse_links, half_a_copy  # type: ignore[assignment]
        convert(pipe, out, tp=2)

    assert crashes.was_killed(crashes.start(killed))
    assert [name for name in files_under(out) if name.endswith("partial")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", refuse_links)
        convert(pipe, out, tp=2)
    convert(pipe, out.with_name("undisturbed"), tp=2)
    assert toys.contents(out) == toys.contents(out.with_name("undisturbed"))


@pytest.mark.slow
def test_a_copy_waits_for_another_process_that_makes_it(pipe: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two degrees of one pipeline at once, on a disk without hard links: neither writes into the other's half file."""
    monkeypatch.setattr(os, "link", refuse_links)
    started, start = os.pipe()

    def other() -> None:
        os.close(start)
        os.read(started, 1)
        convert(pipe, out, tp=4)

    process = crashes.start(other)
    ended: list[int] = []
    real = shutil.copyfile

    def slow_copy(source: Path, target: Path) -> None:
        os.write(start, b"!")
        for _ in range(30):  # long enough for the other one to come by
            if not ended and os.waitpid(process, os.WNOHANG)[0]:
                ended.append(process)
            time.sleep(0.01)
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "copyfile", slow_copy)
        convert(pipe, out, tp=2)
    assert not ended
    assert not crashes.was_killed(process)
    for name in others(pipe):
        assert (out / name).read_bytes() == (pipe / name).read_bytes(), name
    assert not [name for name in files_under(out) if "partial" in name]


def test_b8_weights_at_the_root_are_not_taken(pipe: Path, out: Path) -> None:
    """Original-format files at the root are neither read nor brought along; licence and card are."""
    for name in ("flux1-dev.safetensors", "model.safetensors", "ae.safetensors", "flux1.gguf"):
        (pipe / name).write_bytes(b"never opened")
    (pipe / "README.md").write_text("card")
    (pipe / "LICENSE.md").write_text("licence")
    convert(pipe, out, tp=2)
    assert {path.name for path in out.iterdir() if path.is_file()} == {"model_index.json", "README.md", "LICENSE.md"}


def test_folders_beside_the_components_are_left_alone(pipe: Path, out: Path) -> None:
    """A folder at the root that is no component, called like a licence or not, is neither linked nor in the way."""
    for name in ("LICENSES", "assets"):
        (pipe / name).mkdir()
        (pipe / name / "MIT.txt").write_text("licence")
    convert(pipe, out, tp=2)
    assert {path.name for path in out.iterdir()} == OTHERS | {"transformer", "model_index.json"}


def test_a_subfolder_may_end_in_a_slash(pipe: Path, out: Path) -> None:
    """As shells complete it: `--subfolder transformer/` is the same component, in OUT and in the manifest."""
    manifest = convert(pipe, out, tp=2, subfolder="transformer/")
    assert manifest.source.subfolder == "transformer"
    assert manifest == convert(pipe, out, tp=2, subfolder="transformer")


def test_relative_paths_work(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SOURCE and OUT may be relative to where one stands."""
    monkeypatch.chdir(pipe.parent)
    convert("flux", "new/out", tp=2)
    assert others(pipe) < files_under(pipe.parent / "new" / "out")


def test_subfolder_takes_that_component_alone(pipe: Path, out: Path) -> None:
    """With --subfolder only OUT/transformer is written, and no other component is so much as looked at."""
    for name in OTHERS:
        shutil.rmtree(pipe / name)
    (pipe / "model_index.json").write_text("broken")
    manifest = convert(pipe, out, tp=2, subfolder="transformer")
    assert manifest.source.subfolder == "transformer"
    assert {path.name for path in out.iterdir()} == {"transformer"}
    assert {path.name for path in (out / "transformer").iterdir()} == {"config.json", "tp2"}


@pytest.mark.slow
def test_a_second_degree_is_added_beside_the_first(pipe: Path, out: Path) -> None:
    """tp 4 beside tp 2: both complete, nothing of the first is touched, and linked files are left alone."""
    convert(pipe, out, tp=2)
    before = toys.listing(out)
    convert(pipe, out, tp=4)
    after = toys.listing(out)
    touched = {"transformer"}  # the folder gained a name
    assert {name for name in before if before[name] != after[name]} <= touched
    assert {Path(name).parts[1] for name in set(after) - set(before)} == {"tp4"}
    assert Manifest.read(out / "transformer" / "tp2").tp_degree == 2
    assert Manifest.read(out / "transformer" / "tp4").tp_degree == 4


def test_a_plan_for_a_whole_pipeline_is_a_usage_error(
    pipe: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--plan names modules of one model: on a pipeline it needs --subfolder; exit code 2."""
    plan = pipe.parent / "plan.json"
    plan.write_text('{"transformer_blocks.*.attn.to_q": "colwise"}')
    assert toys.refused(capsys, UsageError, pipe, out, tp=2, plan=plan, code=2) == (
        "--plan: names modules of one model, the source is a pipeline; add --subfolder COMPONENT"
    )


def test_a_pipeline_without_a_class_that_has_a_plan(
    pipe: Path, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One error that lists the components with their classes, and the way out."""
    monkeypatch.setattr(diffusers.FluxTransformer2DModel, "_tp_plan", None)
    message = toys.refused(capsys, PlanError, pipe, out, tp=2)
    assert message.startswith(f"{pipe}: no component has a class with a _tp_plan, found ")
    assert "transformer (FluxTransformer2DModel)" in message
    assert "vae (AutoencoderKL)" in message
    assert message.endswith("give a plan with --subfolder COMPONENT --plan FILE")


@pytest.mark.slow
def test_b4_a_variant_falls_back_component_by_component(pipe: Path, out: Path) -> None:
    """A component without files of the variant gives its default ones, with a warning that names it; one that has them
    gives only those."""
    second = pipe / "transformer_2"
    shutil.copytree(pipe / "transformer", second)
    index = json.loads((pipe / "model_index.json").read_text())
    index["transformer_2"] = index["transformer"]
    (pipe / "model_index.json").write_text(json.dumps(index))
    for path in second.glob("*.safetensors*"):
        path.unlink()
    toys.small_models.build("flux", 5).save_pretrained(second, variant="fp16", max_shard_size="2MB")
    with pytest.warns(ShardconvWarning) as caught:
        convert(pipe, out, tp=2, variant="fp16")
    assert [str(each.message) for each in caught] == [
        f"{pipe / 'transformer'}: no files of variant 'fp16', the default ones are taken"
    ]
    first, second_set = (Manifest.read(out / name / "tp2") for name in ("transformer", "transformer_2"))
    assert (first.source.variant, second_set.source.variant) == (None, "fp16")
    assert all(".fp16" in file.name for file in second_set.source.files)


@pytest.mark.parametrize("options", [{}, {"subfolder": "transformer"}])
def test_b4_a_variant_that_no_component_has(
    pipe: Path, out: Path, capsys: pytest.CaptureFixture[str], options: dict[str, str]
) -> None:
    """An error that lists what there is, as diffusers' is one, of a pipeline and of one component of it."""
    (pipe / "transformer" / "diffusion_pytorch_model.fp32.safetensors").write_bytes(b"not read")
    with pytest.raises(ValueError, match="no such modeling files are available"):
        diffusers.FluxPipeline.from_pretrained(pipe, variant="fp16")
    for more in ({}, {"dry_run": True}):
        message = toys.refused(capsys, CheckpointError, pipe, out, tp=2, variant="fp16", **options, **more)
        assert message == (
            f"{pipe / options.get('subfolder', '')}: expected weights of variant 'fp16', found the default ones, fp32; "
            "choose another --variant or leave it out"
        )


def test_b4_a_variant_of_a_component_that_is_not_sharded(pipe: Path, out: Path) -> None:
    """One component that has the variant is enough for a pipeline, not for the transformer alone."""
    shutil.copy(pipe / "vae" / toys.SINGLE, pipe / "vae" / "diffusion_pytorch_model.fp16.safetensors")
    with pytest.warns(ShardconvWarning, match="transformer: no files of variant 'fp16', the default ones are taken"):
        convert(pipe, out, tp=2, variant="fp16")
    with pytest.raises(CheckpointError, match="transformer: expected weights of variant 'fp16'"):
        convert(pipe, out.with_name("alone"), tp=2, variant="fp16", subfolder="transformer")


@pytest.mark.slow
def test_every_sharded_component_is_checked_before_one_is_written(
    pipe: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A fault in the second of two transformers stops the conversion before the first is written."""
    shutil.copytree(pipe / "transformer", pipe / "transformer_2")
    index = json.loads((pipe / "model_index.json").read_text())
    index["transformer_2"] = index["transformer"]
    (pipe / "model_index.json").write_text(json.dumps(index))
    shard = sorted((pipe / "transformer_2").glob("*.safetensors"))[-1]
    shard.unlink()
    assert toys.refused(capsys, CheckpointError, pipe, out, tp=2).startswith(f"{shard.name}: named by the index")


def test_two_sharded_components_are_both_reported(pipe: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipeline with two transformers gets two sets, each with its own lines and its own JSON entry."""
    shutil.copytree(pipe / "transformer", pipe / "transformer_2")
    index = json.loads((pipe / "model_index.json").read_text())
    index["transformer_2"] = index["transformer"]
    (pipe / "model_index.json").write_text(json.dumps(index))
    assert main([*toys.arguments(pipe, out, tp=2), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["component"] for entry in document["sets"]] == ["transformer", "transformer_2"]
    assert [entry["folder"] for entry in document["sets"]] == [
        str(out / name / "tp2") for name in ("transformer", "transformer_2")
    ]


@pytest.mark.slow
def test_ctrl_c_between_two_components_tells_what_stands(
    pipe: Path, out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before the second of two transformers names the first's set, which stays; before the first, nothing does.
    Running it again, as the sentence says, makes the rest."""
    shutil.copytree(pipe / "transformer", pipe / "transformer_2")
    index = json.loads((pipe / "model_index.json").read_text())
    index["transformer_2"] = index["transformer"]
    (pipe / "model_index.json").write_text(json.dumps(index))
    real, arguments = conversion._execute, [*toys.arguments(pipe, out, tp=2), "--quiet"]

    def stopped_at(name: str) -> str:
        def execute(job: Any, *others: Any) -> Manifest:
            if job.component == name:
                raise KeyboardInterrupt
            return real(job, *others)

        monkeypatch.setattr(conversion, "_execute", execute)
        assert main(arguments) == 130
        return capsys.readouterr().err

    assert stopped_at("transformer") == "shardconv: stopped; nothing half-done is left behind\n"
    assert files_under(out) == set()
    said = stopped_at("transformer_2")
    assert said.startswith(f"shardconv: stopped; {out / 'transformer' / 'tp2'} stands complete, what follows does not")
    monkeypatch.setattr(conversion, "_execute", real)
    assert main(arguments) == 0
    assert (out / "transformer_2" / "tp2" / "shardconv.json").is_file()


def test_another_pipelines_component_in_out_is_refused_before_any_work(
    pipe: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A different file where a linked one would go is found before a byte of the set is written, and stays."""
    (out / "vae").mkdir(parents=True)
    (out / "vae" / "config.json").write_text("{}")
    message = toys.refused(capsys, OutputError, pipe, out, tp=2)
    assert message.startswith(f"{out / 'vae' / 'config.json'}: differs from {pipe / 'vae' / 'config.json'}")


def test_h1_the_links_of_a_hub_cache_come_out_as_files(pipe: Path, out: Path) -> None:
    """A pipeline in the Hub cache, all links, becomes real files in OUT."""
    repo = pipe.parent / "models--org--flux"
    snapshot = repo / "snapshots" / ("c" * 40)
    (repo / "blobs").mkdir(parents=True)
    for position, name in enumerate(sorted(files_under(pipe))):
        blob = repo / "blobs" / f"{position:040x}"
        (pipe / name).rename(blob)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    convert(snapshot, out, tp=2)
    assert others(snapshot) < files_under(out)
    assert not any(path.is_symlink() for path in out.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "[]", "{", '{"../x": ["diffusers", "FluxTransformer2DModel"]}'])
def test_a_broken_model_index_is_refused(pipe: Path, out: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    """A model_index.json that is no map of component names is named, and nothing is written."""
    (pipe / "model_index.json").write_text(text)
    assert toys.refused(capsys, CheckpointError, pipe, out, tp=2).startswith(f"{pipe / 'model_index.json'}: ")


def test_a_listed_component_that_is_absent_is_named(pipe: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipeline whose transformer folder is not there fails by its name."""
    shutil.rmtree(pipe / "transformer")
    message = toys.refused(capsys, CheckpointError, pipe, out, tp=2)
    assert str(pipe / "transformer") in message


def test_a_component_that_the_pipeline_does_without_is_no_obstacle(pipe: Path, out: Path) -> None:
    """[null, null] in model_index.json, as diffusers writes for an absent component, is skipped."""
    index = json.loads((pipe / "model_index.json").read_text())
    assert index["image_encoder"] == [None, None]
    convert(pipe, out, tp=2)
    assert not (out / "image_encoder").exists()


# --- dry run


def sparse(folder: Path) -> None:
    """Keep the headers of weight files and replace their data by a hole of the same length."""
    for path in folder.glob("*.safetensors"):
        nbytes = path.stat().st_size
        head = path.read_bytes()[: 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]]
        path.write_bytes(head)
        os.truncate(path, nbytes)


@pytest.mark.slow
def test_a_dry_run_writes_nothing_and_reads_no_weights(
    pipe: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only headers and configs are read: far fewer bytes than the weights weigh, and the disk stays as it was."""
    sparse(pipe / "transformer")
    weights = sum(path.stat().st_size for path in (pipe / "transformer").glob("*.safetensors"))
    convert(pipe, out, tp=2, dry_run=True)  # imports what it needs
    before = toys.listing(pipe.parent)
    start = bytes_read()
    assert main([*toys.arguments(pipe, out, tp=2), "--dry-run"]) == 0
    assert bytes_read() - start < weights // 4
    assert toys.listing(pipe.parent) == before
    assert "would be written" in capsys.readouterr().out


def bytes_read() -> int:
    """All bytes this process has read by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_dry_run_foretells_the_set(pipe: Path, out: Path) -> None:
    """The manifest of a dry run is that of the conversion, but for digests and the id made of them."""
    (planned,) = convert_all(pipe, out, Options(tp=2, dry_run=True))
    assert not out.exists()
    (made,) = convert_all(pipe, out, Options(tp=2))
    assert planned.manifest.tensors == made.manifest.tensors
    assert planned.manifest.layout() == made.manifest.layout()
    assert [(file.name, file.nbytes) for file in planned.manifest.files] == [
        (file.name, file.nbytes) for file in made.manifest.files
    ]
    for file in planned.manifest.files:
        assert (made.folder / file.name).stat().st_size == file.nbytes


def test_g8_a_dry_run_says_what_each_rank_would_hold(pipe: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors and bytes for each style, bytes a rank, and the replicated share, as numbers and as text."""
    assert main([*toys.arguments(pipe, out, tp=2), "--dry-run", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["sets"]
    state = toys.small_models.build("flux").state_dict()
    packed = {key: t for key, t in state.items() if key.endswith("proj_out.weight") and "single" in key}
    assert entry["styles"]["packed_rowwise"] == {
        "tensors": len(packed),
        "nbytes": sum(tensor.nbytes for tensor in packed.values()),
        "rank_nbytes": sum(tensor.nbytes for tensor in packed.values()) // 2,
    }
    assert set(entry["styles"]) == {"colwise", "rowwise", "packed_rowwise", "replicated"}
    assert sum(style["tensors"] for style in entry["styles"].values()) == len(state)
    assert entry["nbytes"] == sum(tensor.nbytes for tensor in state.values())
    sharded = sum(style["nbytes"] for name, style in entry["styles"].items() if name != "replicated")
    assert entry["replicated_nbytes"] == entry["styles"]["replicated"]["nbytes"] == entry["nbytes"] - sharded
    assert entry["rank_nbytes"] == sharded // 2 + entry["replicated_nbytes"]
    assert entry["replicated_share"] == round(entry["replicated_nbytes"] / entry["nbytes"], 4)
    assert main([*toys.arguments(pipe, out, tp=2), "--dry-run"]) == 0
    text = capsys.readouterr().out
    for style, numbers in entry["styles"].items():
        (line,) = [line for line in text.splitlines() if line.strip().startswith(f"{style} ")]
        assert line.split()[1] == str(numbers["tensors"])
    assert f"each of 2 ranks holds 1/{entry['nbytes'] / entry['rank_nbytes']:.2f} of the model" in text
    assert f"{entry['replicated_share']:.0%} of it stays replicated" in text


@pytest.mark.slow
def test_a_dry_run_finds_every_fault_that_a_run_would(
    pipe: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A degree that does not fit, or a target that is taken, fails a dry run too."""
    assert "not divisible by tp degree 3" in toys.refused(capsys, PlanError, pipe, out, tp=3, dry_run=True)
    (out / "transformer").mkdir(parents=True)
    (out / "transformer" / toys.SINGLE).write_bytes(b"of another model")
    assert "ordinary weights" in toys.refused(capsys, OutputError, pipe, out, tp=2, dry_run=True)


@pytest.mark.slow
def test_a_dry_run_over_another_set_says_that_overwrite_is_needed(
    pipe: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run does not promise to write what the run would refuse to replace."""
    convert(pipe, out, tp=2, dtype="bf16")
    message = toys.refused(capsys, OutputError, pipe, out, tp=2, dry_run=True)
    assert "holds another conversion (differs in dtype); add --overwrite to replace it" in message
