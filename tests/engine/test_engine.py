"""`shardconv.engine.run` against torch's own slicing and casting, in chunks of awkward sizes, and when things break."""

from __future__ import annotations

import math
import os
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from shardconv.commands.prepare import plan_conversion
from shardconv.engine import pool
from shardconv.engine import run as engine
from shardconv.engine.pool import WORKERS, write_all
from shardconv.engine.records import ConvertPlan, Extent, RoutePlan, TensorDigests
from shardconv.errors import CheckpointError
from shardconv.format.cut import Cut
from shardconv.format.header import FileHeader
from shardconv.format.layout import file_header, plan_layout, stored_tensors
from shardconv.format.plan import Style
from shardconv.source.checkpoint import SourceFile, SourceTensor

ID = "0123456789abcdef" * 2
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.uint16, torch.int16, torch.float16, torch.bfloat16,
    torch.uint32, torch.int32, torch.float32, torch.uint64, torch.int64, torch.float64, torch.complex64,
]  # fmt: skip
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class Case:
    """Tensors to convert and how."""

    tensors: Mapping[str, torch.Tensor]
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    tp: int = 2
    chunk: int = 64  # bytes
    self_contained: bool = False
    cast_to: str | None = None
    keep_fp32: tuple[str, ...] = ()

    def target(self, name: str) -> torch.dtype:
        """dtype of what is stored, by torch's idea of a real floating point number."""
        dtype = self.tensors[name].dtype
        if self.cast_to is None or dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            return dtype
        return torch.float32 if name in self.keep_fp32 else FLOATS[self.cast_to]

    def stored(self, name: str) -> list[torch.Tensor]:
        """Oracle: what torch says each rank must hold; one tensor when it stays whole."""
        whole = self.tensors[name].to(self.target(name))
        cut = self.cuts.get(name)
        if cut is None:
            return [whole]
        raw = _bytes(whole)  # torch cannot concatenate all of its dtypes, but bytes it can
        parts = [torch.tensor_split(block, self.tp, cut.dim) for block in torch.split(raw, cut.block_sizes, cut.dim)]
        ranks = [torch.cat([part[rank] for part in parts], cut.dim).contiguous() for rank in range(self.tp)]
        return [rank.view(whole.dtype).squeeze(-1) for rank in ranks]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor with one more dim: the bytes of each element."""
    return tensor.unsqueeze(-1).view(torch.uint8)


def _digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(_bytes(tensor).contiguous().numpy().tobytes())


def _random(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits, so that every NaN, infinity and denormal comes up; booleans and casts get fit values."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).squeeze(-1)


def _plan(case: Case, folder: Path, num_files: int = 1) -> ConvertPlan:
    """The plan of `case` over sources that the safetensors library wrote into `folder`."""
    names = list(case.tensors)
    sources = []
    for i in range(num_files):
        path = folder / f"source-{i}.safetensors"
        save_file({name: case.tensors[name].contiguous() for name in names[i::num_files]}, path)
        file = SourceFile(path.name, path, FileHeader.read(path))
        sources += [SourceTensor(entry, file) for entry in file.header.tensors]
    styles = (Style.PACKED_COLWISE, Style.PACKED_ROWWISE)
    cuts = {name: (styles[cut.dim], cut) for name, cut in case.cuts.items()}
    tensors = stored_tensors([source.entry for source in sources], cuts, case.cast_to, case.keep_fp32)
    layout = plan_layout(tensors, case.tp, case.self_contained)
    return plan_conversion(layout, {source.entry.name: source for source in sources})


@contextmanager
def _outputs(plan: ConvertPlan, folder: Path) -> Iterator[list[int]]:
    fds = [os.open(folder / file.name, os.O_RDWR | os.O_CREAT | os.O_EXCL) for file in plan.layout.files]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def _quiet(nbytes: int) -> None:
    pass


def _run(case: Case, folder: Path, num_files: int = 1) -> Mapping[str, TensorDigests]:
    """Convert `case` into files of `folder`, headers included."""
    plan = _plan(case, folder, num_files)
    with pytest.MonkeyPatch.context() as patch, _outputs(plan, folder) as fds:
        patch.setattr(pool, "CHUNK_NBYTES", case.chunk)
        done: list[int] = []
        digests = engine.run(plan, fds, done.append)
        assert sum(done) == plan.read_nbytes == sum(tensor.nbytes for tensor in case.tensors.values())
        for fd, file in zip(fds, plan.layout.files, strict=True):
            os.pwrite(fd, file_header(file, ID, case.tp), 0)
    return digests


def _check(case: Case, folder: Path, digests: Mapping[str, TensorDigests]) -> None:
    """Every file holds exactly what torch says, read by the safetensors library, and the digests are of those bytes."""
    expected: dict[str, dict[str, torch.Tensor]] = {
        f"rank-{rank:05d}-of-{case.tp:05d}.safetensors": {} for rank in range(case.tp)
    }
    rank_files = list(expected)
    for name in case.tensors:
        slices = case.stored(name)
        if name in case.cuts:
            homes = [[file] for file in rank_files]
        else:
            homes = [rank_files if case.self_contained else ["replicated.safetensors"]]
        for files, tensor in zip(homes, slices, strict=True):
            for file in files:
                expected.setdefault(file, {})[name] = tensor
        assert digests[name].slices == tuple(map(_digest, slices))
        assert digests[name].source == _digest(case.tensors[name])
    assert sorted(path.name for path in folder.iterdir() if "source" not in path.name) == sorted(expected)
    for file, tensors in expected.items():
        found = load_file(folder / file)
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(_bytes(found[name]), _bytes(tensor))


# Any tensors, any degree, any chunk


@st.composite
def _cases(draw: st.DrawFn, dtypes: Sequence[torch.dtype], casts: bool, also_tp: int = 1) -> Case:
    tp = draw(st.integers(1, 8))
    tensors: dict[str, torch.Tensor] = {}
    cuts: dict[str, Cut] = {}
    for i in range(draw(st.integers(1, 4))):
        name = f"blocks.{i}.weight"
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        if shape and draw(st.booleans()):
            dim = draw(st.integers(0, min(1, len(shape) - 1)))
            blocks = tuple(
                math.lcm(tp, also_tp) * part for part in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
            )
            shape[dim] = sum(blocks)
            cuts[name] = Cut(dim, blocks)
        tensors[name] = _random(shape, draw(st.sampled_from(dtypes)), draw(st.integers(0, 2**32)))
        if casts:  # torch turns one NaN into another in its vector loops only, so the bits depend on the place
            tensors[name] = tensors[name].nan_to_num(1.5, float("inf"), -float("inf"))
    chunk = draw(st.integers(1, 70) | st.sampled_from([127, 1000, 4096]))
    if casts:
        chunk = chunk * 8  # a chunk that is cast holds whole elements, as 8 MiB always does
    kept = tuple(name for name in tensors if draw(st.booleans())) if casts else ()
    cast_to = draw(st.sampled_from(sorted(FLOATS))) if casts else None
    return Case(tensors, cuts, tp, chunk, draw(st.booleans()), cast_to, kept)


@settings(deadline=None, max_examples=80)
@given(_cases(DTYPES, casts=False), st.integers(1, 2))
def test_every_slice_is_the_slice_of_torch(case: Case, num_files: int) -> None:
    """Whatever dtype, shape, blocks, degree and chunk: each rank's file holds the bits that torch's slicing gives."""
    with tempfile.TemporaryDirectory() as folder:
        _check(case, Path(folder), _run(case, Path(folder), num_files))


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(_cases([torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int16], casts=True))
def test_a_cast_is_that_of_torch(case: Case) -> None:
    """A cast gives the bits of torch's `.to`, infinities included; integers stay and kept names are float32."""
    with tempfile.TemporaryDirectory() as folder:
        _check(case, Path(folder), _run(case, Path(folder)))


@pytest.mark.parametrize("target", sorted(FLOATS))
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_cast_keeps_nan(source: torch.dtype, target: str, tmp_path: Path) -> None:
    """What is not a number stays so under a cast, and nothing else becomes it (torch does not promise which NaN)."""
    values = torch.tensor([1.0, float("nan"), -0.0, float("inf"), 65504.0, -float("nan"), 1e-8], dtype=torch.float64)
    case = Case({"w": values.to(source).repeat(5)}, chunk=16, cast_to=target)
    _run(case, tmp_path)
    found = load_file(tmp_path / "replicated.safetensors")["w"]
    assert found.dtype == case.target("w")
    torch.testing.assert_close(found, case.stored("w")[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 3, 16, 24, 48, 96, 100, 1 << 20])
@pytest.mark.parametrize("self_contained", [False, True])
def test_one_tensor_of_each_style(chunk: int, self_contained: bool, tmp_path: Path) -> None:
    """The five styles side by side come out right for chunks below, at and above one row and one run."""
    tensors = {
        "col.weight": _random((8, 6), torch.bfloat16, 1),
        "col.bias": _random((8,), torch.bfloat16, 2),
        "row.weight": _random((3, 8), torch.float32, 3),
        "row.bias": _random((3,), torch.float32, 4),
        "packed_col.weight": _random((12, 4), torch.float16, 5),
        "packed_row.weight": _random((5, 12), torch.int64, 6),
        "scalar": _random((), torch.float32, 7),
        "empty": torch.empty(0, 8),
        "hollow": torch.empty(2, 4, 0),
    }
    cuts = {
        "col.weight": Cut(0, (8,)), "col.bias": Cut(0, (8,)), "row.weight": Cut(1, (8,)),
        "packed_col.weight": Cut(0, (4, 8)), "packed_row.weight": Cut(1, (8, 4)), "hollow": Cut(1, (4,)),
    }  # fmt: skip
    case = Case(tensors, cuts, 4, chunk, self_contained)
    _check(case, tmp_path, _run(case, tmp_path))


# And back


def _route_plan(case: Case, folder: Path, starts: Mapping[str, Sequence[tuple[int, int]]]) -> RoutePlan:
    """From the files that `_run` wrote for `case` to `starts`."""
    layout = _plan(case, folder).layout
    slices = {
        tensor.name: [
            Extent(folder / layout.files[index].name, offset, tensor.slice_nbytes(case.tp))
            for index, offset in layout.starts[tensor.name][: None if tensor.cut else 1]
        ]
        for tensor in layout.tensors
    }
    return RoutePlan(layout.tensors, slices, starts)


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(_cases(DTYPES, casts=False), st.sampled_from([1, 7, 64, 72, 100, 1000, 4096]))
def test_joining_the_slices_gives_the_source_back(case: Case, chunk: int) -> None:
    """Splitting and joining is the identity on every bit, and joining finds the digests that splitting recorded."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        digests = _run(case, folder)
        starts = {tensor: [(0, source.extent.offset)] for tensor, source in _plan(case, folder).sources.items()}
        plan = _route_plan(case, folder, starts)
        patch.setattr(pool, "CHUNK_NBYTES", chunk)
        fd = os.open(folder / "joined", os.O_RDWR | os.O_CREAT)
        try:
            found = engine.reroute(plan, [fd], _quiet)
        finally:
            os.close(fd)
        data_start = FileHeader.read(folder / "source-0.safetensors").data_start
        source_bytes = (folder / "source-0.safetensors").read_bytes()
        assert (folder / "joined").read_bytes()[data_start:] == source_bytes[data_start:]
        assert {tensor: each.read for tensor, each in found.items()} == {k: each.slices for k, each in digests.items()}
        assert {tensor: each.written for tensor, each in found.items()} == {
            tensor: (each.source,) for tensor, each in digests.items()
        }


@pytest.mark.slow
@settings(deadline=None, max_examples=80)
@given(st.data(), st.integers(1, 8), st.booleans())
def test_slices_of_one_degree_become_those_of_another(data: st.DataObject, tp: int, self_contained: bool) -> None:
    """Any degree to any other that divides the blocks, also one that is no multiple: every file holds what torch says
    of the new degree, the digests read are those of the old slices."""
    case = data.draw(_cases(DTYPES, casts=False, also_tp=tp))
    target = replace(case, tp=tp, self_contained=self_contained, chunk=data.draw(st.integers(1, 200)))
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        old, new = Path(name) / "old", Path(name) / "new"
        old.mkdir()
        new.mkdir()
        digests = _run(case, old)
        layout = plan_layout(_plan(case, old).layout.tensors, tp, self_contained)
        plan = _route_plan(case, old, layout.starts)
        patch.setattr(pool, "CHUNK_NBYTES", target.chunk)
        with _outputs(ConvertPlan(layout, {}), new) as fds:
            found = engine.reroute(plan, fds, _quiet)
            for fd, file in zip(fds, layout.files, strict=True):
                os.pwrite(fd, file_header(file, ID, tp), 0)
        _check(target, new, {k: TensorDigests(digests[k].source, found[k].written) for k in found})
        assert {k: each.read for k, each in found.items()} == {k: each.slices for k, each in digests.items()}


# Economy


def _wide() -> Case:
    """Enough rows for several chunks in both directions."""
    tensors = {"col": _random((64, 96), torch.float32, 1), "row": _random((96, 64), torch.float32, 2),
               "whole": _random((1000,), torch.float32, 3)}  # fmt: skip
    return Case(tensors, {"col": Cut(0, (32, 32)), "row": Cut(1, (32, 32))}, 8, 4096)


def test_j4_each_source_byte_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ranks there are, every source byte is read exactly once (J4)."""
    reads: list[tuple[int, int]] = []
    preadv = os.preadv

    def counting(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        num_read = preadv(fd, buffers, offset)
        reads.append((offset, offset + num_read))
        return num_read

    monkeypatch.setattr(os, "preadv", counting)
    case = _wide()
    _run(case, tmp_path)
    header = FileHeader.read(tmp_path / "source-0.safetensors")
    position = header.data_start
    for start, end in sorted(reads):
        assert start == position
        position = end
    assert position == header.file_nbytes


def test_short_reads_and_writes_are_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that reads 5 bytes and writes 3 at a time, as signals and network disks may, changes nothing."""
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:5]], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:3], offset))
    case = Case({"w": _random((8, 6), torch.float32, 1), "b": _random((7,), torch.int8, 2)}, {"w": Cut(1, (2, 4))})
    plan = _plan(case, tmp_path)
    with _outputs(plan, tmp_path) as fds:
        digests = engine.run(plan, fds, _quiet)
        for fd, file in zip(fds, plan.layout.files, strict=True):
            write_all(fd, memoryview(file_header(file, ID, case.tp)), 0)
    _check(case, tmp_path, digests)


def test_memory_stays_at_the_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converting takes a few chunks of memory a worker, not the size of a tensor (G3)."""
    chunk = 64 << 10
    case = Case({"w": torch.zeros(2048, 1024), "v": torch.zeros(1024, 2048)}, {"w": Cut(1, (1024,))}, 4, chunk)
    plan = _plan(case, tmp_path)
    monkeypatch.setattr(pool, "CHUNK_NBYTES", chunk)
    with _outputs(plan, tmp_path) as fds:
        tracemalloc.start()
        try:
            engine.run(plan, fds, _quiet)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < WORKERS * 3 * chunk + (256 << 10)
    assert plan.read_nbytes > 10 * peak


def test_sources_can_be_digested_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digesting the sources alone gives the digests that the conversion gives."""
    case = _wide()
    monkeypatch.setattr(pool, "CHUNK_NBYTES", 100)
    digests = engine.digest_sources(_plan(case, tmp_path), _quiet)
    assert digests == {name: _digest(tensor) for name, tensor in case.tensors.items()}


# When things break


def _failing(case: Case, folder: Path, break_it: Callable[[list[int]], Callable[[int], None]], chunk: int) -> None:
    """Run with what `break_it` makes of the outputs; it returns the progress function."""
    plan = _plan(case, folder)
    before = threading.active_count()
    with pytest.MonkeyPatch.context() as patch, _outputs(plan, folder) as fds:
        patch.setattr(pool, "CHUNK_NBYTES", chunk)
        progress = break_it(fds)
        try:
            engine.run(plan, fds, progress)
        finally:
            assert threading.active_count() == before


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_a_source_that_shrinks_is_named(keep: float, tmp_path: Path) -> None:
    """A source cut short while it is read is a `CheckpointError` that names it, and no thread stays behind (J2)."""
    case = _wide()
    source = tmp_path / "source-0.safetensors"

    def break_it(fds: list[int]) -> Callable[[int], None]:
        return lambda nbytes: os.truncate(source, int(keep * source.stat().st_size))

    with pytest.raises(CheckpointError, match=r"^source-0\.safetensors: the file became shorter while it was read"):
        _failing(case, tmp_path, break_it, 256)


def test_e10_a_full_disk_comes_out_as_the_system_says_it(tmp_path: Path) -> None:
    """A write that meets a full disk comes out as that `OSError`, and no thread stays behind (E10)."""

    def break_it(fds: list[int]) -> Callable[[int], None]:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, fds[1])
        os.close(full)
        return _quiet

    with pytest.raises(OSError, match="No space left on device"):
        _failing(_wide(), tmp_path, break_it, 256)


def test_an_output_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    """An output opened for reading only is the system's own error, and no thread stays behind."""

    def break_it(fds: list[int]) -> Callable[[int], None]:
        readable = os.open(os.devnull, os.O_RDONLY)
        os.dup2(readable, fds[0])
        os.close(readable)
        return _quiet

    with pytest.raises(OSError, match="Bad file descriptor"):
        _failing(_wide(), tmp_path, break_it, 4096)


def test_an_error_stops_the_other_workers(tmp_path: Path) -> None:
    """After an error the rest is not carried out: of many tensors only a few are begun."""
    case = Case({f"t{i:03d}": torch.zeros(64) for i in range(200)}, {}, 1)
    begun: list[int] = []

    def break_it(fds: list[int]) -> Callable[[int], None]:
        def progress(nbytes: int) -> None:
            begun.append(nbytes)
            raise OSError("out of luck")

        return progress

    with pytest.raises(OSError, match="out of luck"):
        _failing(case, tmp_path, break_it, 4096)
    assert len(begun) < 100


def test_an_error_stops_a_long_tensor(tmp_path: Path) -> None:
    """After an error a worker in the middle of a large tensor gives up at its next chunk."""
    case = Case({"long": torch.zeros(1000 * 256), "bad": torch.zeros(1)}, {}, 1)
    failed = threading.Event()
    after: list[int] = []

    def break_it(fds: list[int]) -> Callable[[int], None]:
        def progress(nbytes: int) -> None:
            if nbytes == 4:
                failed.set()
                raise OSError("out of luck")
            assert failed.wait(timeout=60)
            after.append(nbytes)
            time.sleep(0.001)

        return progress

    with pytest.raises(OSError, match="out of luck"):
        _failing(case, tmp_path, break_it, 1024)
    assert len(after) < 1000
