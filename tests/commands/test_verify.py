"""`shardconv verify`: what is right passes, and everything that is wrong is said at once, by name, with exit code 1."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import toys
from safetensors.torch import load_file, save_file

import loader
import shardconv
from loader.files.validate import open_set
from shardconv import Manifest, SetError, verify
from shardconv.cli.main import main
from shardconv.commands.inspect import inspect
from shardconv.format.header import FileHeader
from shardconv.remote.hub import Repo
from shardconv.remote.snapshot import Snapshot
from shardconv.remote.store import Listing
from shardconv.source import fetch as fetching

RANK_1, SHARED = "rank-00001-of-00002.safetensors", "replicated.safetensors"
PACKED = {
    "blocks.*.attn.to_q": "colwise",
    "blocks.*.attn.to_k": "colwise",
    "blocks.*.attn.to_v": "colwise",
    "blocks.*.attn.to_out.0": "rowwise",
    "blocks.*.ff.proj": {"style": "packed_colwise", "blocks": [1, 1]},
    "blocks.*.ff.out": {"style": "packed_rowwise", "blocks": [1, 1]},
    "time_embedder": "rowwise_split_input",
}


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch) -> None:
    toys.install(monkeypatch, _tp_plan=PACKED)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T in `source`, converted for 2 ranks with all five styles in `out`; copy before damaging."""
    root = tmp_path_factory.mktemp("verify")
    with pytest.MonkeyPatch.context() as patch:
        toys.save(toys.build(toys.install(patch, _tp_plan=PACKED)), root / "source")
        shardconv.convert(root / "source", root / "out", tp=2)
    return root


@pytest.fixture(scope="module")
def one(pristine: Path) -> Path:
    """The same for one rank, which loads without a process group."""
    with pytest.MonkeyPatch.context() as patch:
        toys.install(patch, _tp_plan=PACKED)
        shardconv.convert(pristine / "source", pristine / "one", tp=1)
    return pristine / "one"


@pytest.fixture
def root(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "root"))


def issues_of(path: Path, **options: object) -> tuple[str, ...]:
    with pytest.raises(SetError) as caught:
        verify(path, **options)  # type: ignore[arg-type]
    return caught.value.issues


def flip(path: Path, position: int) -> None:
    """Flip one bit of a file, as a disk that rots does: length and times stay."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << (position % 8)
    path.write_bytes(data)


def middle(path: Path, name: str) -> int:
    """Absolute position of a byte in the middle of a tensor."""
    header = FileHeader.read(path)
    entry = next(entry for entry in header.tensors if entry.name == name)
    return header.data_start + entry.start + entry.nbytes // 2


# What is right


@pytest.mark.parametrize("options", [{}, {"self_contained": True}, {"dtype": "fp32"}, {"dtype": "fp16", "tp": 3}])
def test_a_sound_set_passes(pristine: Path, tmp_path: Path, options: dict[str, object]) -> None:
    """A set as it was written passes, alone and against its source, cast or not; each slice's bytes are read."""
    manifest = shardconv.convert(pristine / "source", tmp_path / "out", **{"tp": 2, **options})  # type: ignore[arg-type]
    (found,) = verify(tmp_path / "out", source=pristine / "source")
    assert (found.manifest, found.issues) == (manifest, ())
    paths = (tmp_path / "out" / f"tp{manifest.tp_degree}").glob("*.safetensors")
    assert found.nbytes == sum(tensor.nbytes for path in paths for tensor in load_file(path).values())


def test_every_set_of_an_output_folder_is_checked(root: Path) -> None:
    """Of an output folder all components, of a component all degrees, in the order of their names."""
    shutil.move(root / "out", root / "pipe" / "transformer")
    shutil.copytree(root / "pipe" / "transformer", root / "pipe" / "transformer_2")
    shardconv.convert(root / "source", root / "pipe" / "transformer", tp=4)
    found = verify(root / "pipe")
    assert [each.path.relative_to(root / "pipe").as_posix() for each in found] == [
        "transformer/tp2", "transformer/tp4", "transformer_2/tp2"
    ]  # fmt: skip
    flip(root / "pipe" / "transformer" / "tp4" / "replicated.safetensors", -1)
    (root / "pipe" / "transformer_2" / "tp2" / RANK_1).unlink()
    assert len(issues_of(root / "pipe")) == 2


def test_a_rank_file_is_checked_alone(root: Path) -> None:
    """One file with the manifest beside it is checked, whatever the others are; another one is not looked at."""
    folder = root / "out" / "tp2"
    (folder / "rank-00000-of-00002.safetensors").unlink()
    (found,) = verify(folder / RANK_1)
    assert 0 < found.nbytes < (folder / RANK_1).stat().st_size
    flip(folder / RANK_1, -1)
    assert issues_of(folder / RANK_1)[0].startswith(f"{folder / RANK_1}: ")
    verify(folder / SHARED)


def test_a_lone_rank_file_says_what_cannot_be_checked(root: Path) -> None:
    """Without its manifest a file cannot be vouched for, and the message says what could be seen and what is needed."""
    lone = Path(shutil.copy(root / "out" / "tp2" / RANK_1, root / "lone.safetensors"))
    (issue,) = issues_of(lone)
    assert "header and length are right" in issue
    assert issue.endswith("stands in shardconv.json, which is not beside it; fetch that too")
    lone.write_bytes(lone.read_bytes()[:-1])
    assert "the copy is incomplete" in issues_of(lone)[0]


# What is wrong

Damage = Callable[[Path], object]


def cut_to(nbytes: Callable[[Path], int]) -> Damage:
    def damage(out: Path) -> None:
        path = out / "tp2" / RANK_1
        path.write_bytes(path.read_bytes()[: nbytes(path)])

    return damage


def swapped(out: Path) -> None:
    a, b = out / "tp2" / "rank-00000-of-00002.safetensors", out / "tp2" / RANK_1
    held = a.read_bytes()
    a.write_bytes(b.read_bytes())
    b.write_bytes(held)


def foreign(out: Path) -> None:
    (out / "tp2" / "rank-00002-of-00004.safetensors").write_bytes(b"")
    (out / "tp2" / "notes.txt").write_text("mine")


def other_config(out: Path) -> None:
    toys.edit_json(out / "config.json", num_layers=3)


DAMAGED: dict[str, tuple[Damage, list[str]]] = {
    "e1_cut_by_1_byte": (cut_to(lambda p: p.stat().st_size - 1), [RANK_1 + ": header declares"]),
    "e1_cut_by_4_KiB": (cut_to(lambda p: p.stat().st_size - 4096), [RANK_1 + ": header declares"]),
    "e1_cut_to_the_header": (cut_to(lambda p: FileHeader.read(p).data_start), [RANK_1 + ": header declares"]),
    "empty": (cut_to(lambda p: 0), [RANK_1 + ": the file is empty"]),
    "missing": (lambda out: (out / "tp2" / RANK_1).unlink(), [RANK_1 + ": cannot be read (No such file"]),
    "b11_ranks_swapped": (swapped, ["rank-00000-of-00002.safetensors: expected rank 0, found 1", "expected rank 1"]),
    "no_manifest": (lambda out: (out / "tp2" / "shardconv.json").unlink(), ["tp2: no shardconv.json"]),
    "config": (other_config, ["config.json: not the config that was converted"]),
    "no_config": (lambda out: (out / "config.json").unlink(), ["out: no config.json"]),
    "foreign": (foreign, ["notes.txt: not a file of a set", "rank-00002-of-00004.safetensors: of another set"]),
    "e8_a_byte": (lambda out: flip(out / "tp2" / RANK_1, -1000), [RANK_1 + ": blocks."]),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_is_named(root: Path, kind: str) -> None:
    """Each kind of damage is an issue that names the file, and nothing that is whole is complained about."""
    damage, expected = DAMAGED[kind]
    damage(root / "out")
    found = issues_of(root / "out")
    assert len(found) == len(expected)
    for issue, text in zip(found, expected, strict=True):
        assert issue.startswith(str(root / "out"))
        assert text in issue


def test_every_problem_is_listed_at_once(root: Path) -> None:
    """Damage of several kinds in several files is told in one go."""
    out = root / "out"
    other_config(out)
    foreign(out)
    (out / "tp2" / SHARED).unlink()
    for name in ("blocks.0.attn.to_q.weight", "blocks.1.ff.out.weight"):
        flip(out / "tp2" / RANK_1, middle(out / "tp2" / RANK_1, name))
    found = issues_of(out)
    assert len(found) == 6
    for word in ("config.json", "notes.txt", "rank-00002-of-00004", SHARED, "to_q.weight is damaged", "ff.out.weight"):
        assert sum(word in issue for issue in found) == 1


def test_a13_trailing_bytes_are_refused_by_all(root: Path) -> None:
    """`verify`, the loader, `merge` and, of a source, `convert` say the same of a file that something was added to."""
    path = root / "out" / "tp2" / RANK_1
    path.write_bytes(path.read_bytes() + b"\0\0\0\0")
    assert "something was added to it" in issues_of(root / "out")[0]
    with pytest.raises(SetError, match="something was added to it"):
        shardconv.merge(root / "out", root / "merged")
    source = root / "source" / toys.SHARDS[0]
    source.write_bytes(source.read_bytes() + b"\0\0\0\0")
    with pytest.raises(shardconv.CheckpointError, match="something was added to it"):
        shardconv.convert(root / "source", root / "new", tp=2)
    with pytest.raises(SetError, match="something was added to it"):
        open_set(root / "out" / "tp2", 1, 2)


def test_a_file_that_cannot_be_read_does_not_hide_the_rest(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk error in one tensor is named with the system's reason, and what can be read is still checked."""
    from shardconv.engine import pool

    folder = root / "out" / "tp2"
    bad = middle(folder / RANK_1, "blocks.0.attn.to_q.weight")
    flip(folder / SHARED, -1)
    real, inode = pool.os.preadv, (folder / RANK_1).stat().st_ino

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        if pool.os.fstat(fd).st_ino == inode and offset <= bad < offset + len(buffers[0]):
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(pool.os, "preadv", preadv)
    found = issues_of(folder)
    assert len(found) == 2
    assert any("to_q.weight cannot be read ([Errno 5] Input/output error)" in issue for issue in found)


def test_e6_sets_of_two_sources_side_by_side_are_found(root: Path) -> None:
    """Two degrees under one config.json must be of the same weights."""
    state = load_file(root / "source" / toys.SHARDS[0])
    first = next(iter(state))
    save_file({**state, first: state[first] + 1}, root / "source" / toys.SHARDS[0], {"format": "pt"})
    shardconv.convert(root / "source", root / "other", tp=4)
    shutil.copytree(root / "other" / "tp4", root / "out" / "tp4")
    (issue,) = issues_of(root / "out")
    assert f"{root / 'out' / 'tp4'}: was converted from other weights than {root / 'out' / 'tp2'}" in issue


def test_an_incomplete_set_beside_a_whole_one_is_named(root: Path) -> None:
    """A tpN folder without a manifest is no set, however good its neighbour is."""
    (root / "out" / "tp4").mkdir()
    (issue,) = issues_of(root / "out")
    assert issue.startswith(f"{root / 'out' / 'tp4'}: no shardconv.json, so not a complete set")


def test_a_component_whose_set_is_incomplete_is_not_passed_over(root: Path) -> None:
    """In an output folder, a component with no complete set is named by every verb; none takes it for another file."""
    shutil.move(root / "out", root / "pipe" / "transformer")
    shutil.copytree(root / "pipe" / "transformer", root / "pipe" / "transformer_2")
    bad = root / "pipe" / "transformer_2" / "tp2"
    (bad / "shardconv.json").unlink()
    for work in (
        verify,
        inspect,
        lambda path: shardconv.merge(path, root / "new"),
        lambda path: shardconv.reshard(path, root / "new", tp=4),
    ):
        with pytest.raises(SetError, match=f"^{bad}: no shardconv.json, so not a complete set"):
            work(root / "pipe")
        assert not (root / "new").exists()


# Bit rot

PLACES = [
    (RANK_1, "header"), (RANK_1, "padding"), (SHARED, "header"), ("shardconv.json", "manifest"),
    (RANK_1, "blocks.0.attn.to_q.weight"), (RANK_1, "blocks.0.attn.to_q.bias"),
    (RANK_1, "blocks.1.attn.to_out.0.weight"), (RANK_1, "blocks.0.ff.proj.weight"), (RANK_1, "blocks.1.ff.out.weight"),
    (RANK_1, "time_embedder.weight"), (SHARED, "proj_in.weight"), (SHARED, "time_embedder.bias"),
    (SHARED, "blocks.0.attn.norm_q.weight"),
]  # fmt: skip
FOUND_BY_DEFAULT = {"header", "padding", "manifest"}


def rot(path: Path, place: str) -> None:
    if place == "manifest":
        flip(path, path.stat().st_size // 2)
    elif place in ("header", "padding"):
        flip(path, 60 if place == "header" else FileHeader.read(path).data_start - 1)
    else:
        flip(path, middle(path, place))


@pytest.mark.parametrize(("file", "place"), PLACES, ids=[f"{file[:4]}-{place}" for file, place in PLACES])
def test_e8_one_flipped_bit_is_found(root: Path, file: str, place: str) -> None:
    """One bit in a header, its padding, the manifest, or the payload of any style is found by `verify`."""
    rot(root / "out" / "tp2" / file, place)
    (issue,) = issues_of(root / "out")
    assert file in issue
    assert place in issue or place in FOUND_BY_DEFAULT


@pytest.mark.slow
@pytest.mark.parametrize(("file", "place"), PLACES, ids=[f"{file[:4]}-{place}" for file, place in PLACES])
def test_e8_one_flipped_bit_is_found_by_a_load_that_verifies(one: Path, tmp_path: Path, file: str, place: str) -> None:
    """`load_model(verify=True)` finds each of them, too; without it, as documented, those outside the payload."""
    out = Path(shutil.copytree(one, tmp_path / "out"))
    rot(out / "tp1" / file.replace(RANK_1, "rank-00000-of-00001.safetensors"), place)
    with pytest.raises(SetError):
        loader.load_model(out, verify=True)
    if place in FOUND_BY_DEFAULT:
        with pytest.raises(SetError):
            loader.load_model(out)
    else:
        assert loader.load_model(out) is not None


# Against the source


def edited(root: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Change the tensors of the source's first file."""
    path = root / "source" / toys.SHARDS[0]
    tensors: dict[str, object] = dict(load_file(path))
    change(tensors)
    save_file(tensors, path, {"format": "pt"})  # type: ignore[arg-type]


def test_another_source_is_told_by_tensor_and_slice(root: Path) -> None:
    """A source whose bytes differ is told from the one that was converted: which tensor, and in which slices."""
    name = "blocks.0.attn.to_q.weight"

    def change(tensors: dict[str, object]) -> None:
        tensors[name] = tensors[name].clone()  # type: ignore[attr-defined]
        tensors[name][-1, -1] += 1  # type: ignore[index]

    edited(root, change)
    verify(root / "out")
    (issue,) = issues_of(root / "out", source=root / "source")
    assert issue == f"{root / 'out' / 'tp2'}: {name} differs from {root / 'source'} in slices [1]"


def test_a_source_that_lacks_or_adds_a_tensor_is_told(root: Path) -> None:
    """Names and shapes that do not match are listed, with what was found, beside what could be compared."""
    import torch

    weights = {name: tensor for shard in toys.SHARDS for name, tensor in load_file(root / "source" / shard).items()}
    weights["extra"] = torch.zeros(3)
    weights["proj_in.bias"] = weights["proj_in.bias"].float()
    weights["proj_in.weight"] = weights["proj_in.weight"][:, :8].contiguous()
    del weights["time_embedder.bias"]
    shutil.rmtree(root / "source")
    (root / "source").mkdir()
    save_file(weights, root / "source" / toys.SINGLE, {"format": "pt"})
    shutil.copy(root / "out" / "config.json", root / "source")
    found = "\n".join(issues_of(root / "out", source=root / "source"))
    assert found.count("\n") == 3
    assert "lacks extra, which" in found
    assert "proj_in.bias is BF16 [192], by" in found
    assert "found F32 [192]" in found
    assert "found BF16 [192, 8]" in found
    assert f"time_embedder.bias is BF16 [192], by {root / 'source'} which does not have it" in found


def test_the_same_weights_in_other_files_are_the_same_source(root: Path) -> None:
    """What counts is each tensor: a source saved anew in one file, or merged from the set, compares equal."""
    shardconv.merge(root / "out", root / "merged")
    verify(root / "out", source=root / "merged")


def test_the_source_may_be_the_pipeline(root: Path) -> None:
    """Of a pipeline's component the record says which, so that either folder will do."""
    shutil.move(root / "source", root / "pipe" / "transformer")
    shardconv.convert(root / "pipe", root / "new", tp=2, subfolder="transformer")
    for source in (root / "pipe", root / "pipe" / "transformer"):
        (found,) = verify(root / "new", source=source)
        assert found.path == root / "new" / "transformer" / "tp2"


def test_a_repo_is_taken_at_the_commit_on_record(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A set that came from the Hub is compared with the commit that it was converted from, not with what is newest."""
    asked: list[tuple[object, ...]] = []

    def fetch(repo: Repo, *args: object) -> Snapshot:
        asked.append((repo.name, *args))
        return Snapshot(repo, Listing("c0ffee", {}, ""), root / "source", (), temporary=False)

    monkeypatch.setattr(fetching, "fetch", fetch)
    shardconv.convert("org/name", root / "new", tp=2, revision="main")
    verify(root / "new", source="org/name")
    assert asked == [("org/name", "main", None, None, False), ("org/name", "c0ffee", None, None, False)]


def test_a_source_that_cannot_be_read_is_its_own_error(root: Path) -> None:
    """A missing source is not a fault of the set."""
    with pytest.raises(shardconv.CheckpointError, match="no such folder"):
        verify(root / "out", source=root / "nowhere")


# The command


def test_the_command_says_what_is_right(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line a set on stdout and exit code 0; `--json` prints one document; `--quiet` nothing."""
    folder = root / "out" / "tp2"
    assert main(["verify", str(root / "out")]) == 0
    assert capsys.readouterr().out.startswith(f"{folder}: ToyTransformer, tp degree 2, ")
    assert main(["verify", "--quiet", str(root / "out")]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["verify", "--json", str(root / "out"), "--source", str(root / "source")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], document["source"]) == (True, str(root / "source"))
    assert document["sets"][0]["path"] == str(folder)
    assert document["sets"][0]["conversion_id"] == Manifest.read(folder).conversion_id


def test_the_command_exits_with_1_and_lists_all(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Problems are on stderr and, with `--json`, also in the document; exit code 1."""
    flip(root / "out" / "tp2" / RANK_1, -1)
    flip(root / "out" / "tp2" / SHARED, -1)
    assert main(["verify", str(root / "out")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("shardconv: 2 problems:\n  - ")
    assert main(["verify", "--json", str(root / "out")]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is False
    assert len(document["sets"][0]["issues"]) == 2


@pytest.mark.slow
def test_verifying_needs_no_torch(root: Path) -> None:
    """Neither alone nor against a source without a cast does `verify` load a heavy library."""
    script = "import sys; from shardconv.cli.main import main\n"
    script += f"code = main(['verify', {str(root / 'out')!r}, '--source', {str(root / 'source')!r}])\n"
    script += "print(code, sorted({'torch', 'diffusers', 'safetensors', 'huggingface_hub', 'tqdm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
