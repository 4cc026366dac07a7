"""Acceptance: whatever kills a conversion, nothing looks complete that is not, and a rerun gives the right bytes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import itertools
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crashes
import pytest
import ranks
import torch
import toys
from safetensors.torch import load_file

import loader
from loader.files.locate import find_set
from shardconv import LoadError, OutputError, SetError, convert
from shardconv.cli.main import main
from shardconv.commands.convert import Options, convert_all
from shardconv.commands.merge import merge
from shardconv.engine import pool
from shardconv.engine.records import TensorDigests
from shardconv.plans.catalogue import small_models
from shardconv.target import journal

KILLS = int(os.environ.get("SHARDCONV_KILLS", "40"))  # at random moments
Json = dict[str, Any]


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """The source, and what undisturbed conversions of it give; in memory where that can be, as disks sync slowly."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="shardconv-crash-", dir=memory) as name:
        folder = Path(name)
        toys.save(small_models.build("qwenimage21"), folder / "in")
        convert(folder / "in", folder / "fresh", tp=2)
        convert(folder / "in", folder / "other", tp=2, dtype="bf16")
        convert(folder / "in", folder / "four", tp=4)
        yield folder


def test_the_undisturbed_set_is_the_slices_of_torch(base: Path) -> None:
    """What the tests below compare with: each rank holds each tensor whole, or its share along the manifest's dim."""
    manifest = json.loads((base / "fresh" / "tp2" / "shardconv.json").read_text())
    whole: dict[str, torch.Tensor] = {}
    for path in (base / "in").glob("*.safetensors"):
        whole |= load_file(path)
    states = toys.rank_states(base / "fresh" / "tp2")
    assert [state.keys() for state in states] == [whole.keys()] * 2
    for tensor in manifest["tensors"]:
        full = whole[tensor["name"]]
        for rank, state in enumerate(states):
            blocks = torch.split(full, tensor["block_sizes"], tensor["dim"]) if "dim" in tensor else [full]
            parts = [block.chunk(2, tensor["dim"])[rank] for block in blocks] if "dim" in tensor else blocks
            assert torch.equal(state[tensor["name"]], torch.cat(parts, tensor.get("dim", 0)))


def conversion(base: Path, out: Path, overwrite: bool) -> dict[str, Any]:
    """The arguments of the conversion that gives `fresh`."""
    return {"source": base / "in", "out": out, "tp": 2, "overwrite": overwrite}


def check_what_is_left(base: Path, out: Path, overwrite: bool) -> None:
    """After a kill: no set, or the old one or the new one whole; what is journaled is right; nothing else is there."""
    there = toys.contents(out) if out.exists() else {}
    fresh, other = toys.contents(base / "fresh"), toys.contents(base / "other")
    at_name = {name: digest for name, digest in there.items() if name.startswith("tp2")}
    wholes = [{name: digest for name, digest in whole.items() if name.startswith("tp2")} for whole in (fresh, other)]
    assert at_name in wholes or (not at_name and not overwrite)
    assert {name.split("/")[0] for name in there} <= {"tp2", ".tp2.partial", "config.json"}
    if not at_name:
        with pytest.raises(SetError):
            find_set(out, None, 2)
    partial = {name.split("/")[1]: digest for name, digest in there.items() if name.startswith(".tp2.partial/")}
    if "progress.jsonl" in partial:
        check_journaled(base, out / ".tp2.partial")
    elif "shardconv.json" in partial:
        with contextlib.suppress(SetError, ValueError):  # while it is written
            whole = {name.removeprefix("tp2/"): digest for name, digest in [*wholes[0].items(), *wholes[1].items()]}
            assert set(partial) <= set(whole)


def journaled(partial: Path) -> list[str]:
    """Names of the tensors in the journal's whole lines."""
    if not (partial / "progress.jsonl").exists():
        return []
    lines = (partial / "progress.jsonl").read_text(errors="replace").split("\n")[1:]
    return [json.loads(line)["name"] for line in lines if line.startswith("{") and line.endswith("}")]


def check_journaled(base: Path, partial: Path) -> None:
    """Every tensor that the journal names stands there as in an undisturbed run."""
    names = set(journaled(partial))
    for path in (base / "fresh" / "tp2").glob("*.safetensors"):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        header: Json = json.loads(data[8:start])
        found = (partial / path.name).read_bytes() if names else b""
        for name in names & header.keys():
            first, end = (start + at for at in header[name]["data_offsets"])
            assert found[first:end] == data[first:end], name


def rerun(base: Path, out: Path, overwrite: bool) -> None:
    """Converts again, which must end as if nothing had happened; not by force where the new set stands already."""
    there = out / "tp2" / "shardconv.json"
    is_there = there.exists() and there.read_bytes() == (base / "fresh" / "tp2" / "shardconv.json").read_bytes()
    convert(**conversion(base, out, overwrite and not is_there))
    assert toys.contents(out) == toys.contents(base / "fresh")


@contextlib.contextmanager
def target(base: Path, overwrite: bool) -> Iterator[Path]:
    """A folder to convert into, with another conversion in it when that is to be replaced."""
    out = base / "out"
    if overwrite:
        shutil.copytree(base / "other", out)
    try:
        yield out
    finally:
        shutil.rmtree(out, ignore_errors=True)  # a kill can come before there is one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "overwrite", "first"),
    [("power", False, 0), ("kill", True, 60), ("kill without exchange", True, 70)],
    ids=["power-lost", "killed-overwrite", "killed-no-exchange"],
)
def test_e2_killed_at_every_step(
    base: Path, how: str, overwrite: bool, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One SIGKILL before each change to the disk that a conversion makes; the power loss takes what was not synced."""
    if how == "kill without exchange":
        monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: object())

    def work() -> None:
        crashes.steadily(4)
        convert(**conversion(base, base / "out", overwrite))

    resumed = 0
    for step in itertools.count(first):
        with target(base, overwrite) as out:
            if not crashes.killed_at(step, work, out if how == "power" else None):
                break
            if how != "kill without exchange":  # there the old set is aside for a moment
                check_what_is_left(base, out, overwrite)
            resumed += bool(journaled(out / ".tp2.partial"))
            rerun(base, out, overwrite)
    assert step > 80
    assert resumed > 60 - first


def load(out: Path) -> list[str]:
    """On a rank: what `load_model` gives for the component folder, and for the unfinished folder in it."""
    found = []
    for path in (out, out / ".tp2.partial"):
        try:
            state = loader.load_model(path, device="cpu").state_dict()
        except (SetError, LoadError):
            found.append("refused")
        else:
            found.append(hashlib.sha256(b"".join(t.float().numpy().tobytes() for t in state.values())).hexdigest())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True], ids=["fresh", "overwrite"])
def test_e3_killed_at_random_moments(base: Path, overwrite: bool) -> None:
    """SIGKILL at any time, once or several times in a row: no wrong byte is loaded, and the rerun ends as it should."""

    def work() -> None:
        crashes.hurriedly(0.003)
        convert(**conversion(base, base / "out", overwrite))

    right = {*(ranks.values(load, base / name)[rank][0] for name in ("fresh", "other") for rank in (0, 1)), "refused"}
    chance = random.Random(KILLS + overwrite)
    with target(base, overwrite):
        start = time.monotonic()
        assert not crashes.was_killed(crashes.start(work))
        whole_run = time.monotonic() - start
    kills, resumed = 0, 0
    while kills < KILLS // 2:
        with target(base, overwrite) as out:
            for _ in range(chance.choice((1, 1, 2, 4))):
                if not crashes.killed_after(chance.uniform(0, whole_run), work):
                    break
                kills += 1
                check_what_is_left(base, out, overwrite)
                if out.exists() and chance.random() < 0.1:
                    assert {each for rank in ranks.values(load, out) for each in rank} <= right
                resumed += bool(journaled(out / ".tp2.partial"))
            rerun(base, out, overwrite)
    assert resumed > kills // 10


# --- what is resumed


def kill_halfway(base: Path, out: Path, **options: Any) -> None:
    """Kill a conversion of `in` when most tensors are in the journal."""

    def work() -> None:
        crashes.steadily(1)
        convert(**(conversion(base, out, False) | options))

    assert crashes.killed_at(100, work)
    assert 10 < len(journaled(out / f".tp{options.get('tp', 2)}.partial")) < 27


@pytest.fixture
def out(base: Path) -> Iterator[Path]:
    """A folder to convert into."""
    yield base / "out"
    shutil.rmtree(base / "out")


class Reads:
    """Counts what is read of the source's tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        real = os.preadv

        def preadv(*args: Any) -> int:
            nbytes = real(*args)
            self.nbytes += nbytes
            return nbytes

        monkeypatch.setattr(os, "preadv", preadv)


def sizes(base: Path) -> dict[str, int]:
    """Source bytes by tensor."""
    found: dict[str, int] = {}
    for path in (base / "in").glob("*.safetensors"):
        found |= {name: tensor.nbytes for name, tensor in load_file(path).items()}
    return found


def test_e2_a_rerun_reads_only_what_is_not_done(base: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors in the journal are not read again, their files are the same files, and the command says how much."""
    kill_halfway(base, out)
    done, nbytes = set(journaled(out / ".tp2.partial")), sizes(base)
    there = sum(nbytes[name] for name in done)
    inodes = {path.name: path.stat().st_ino for path in (out / ".tp2.partial").glob("*.safetensors")}
    reads, said, progress = Reads(monkeypatch), [], []
    convert_all(base / "in", out, Options(tp=2), new_progress=lambda what, total: progress.append, tell=said.append)
    assert reads.nbytes == sum(nbytes.values()) - there
    assert sum(progress) == sum(nbytes.values())
    assert said == [f"{out / 'tp2'}: resuming, {there:,} of {sum(nbytes.values()):,} bytes are there already"]
    assert {path.name: path.stat().st_ino for path in (out / "tp2").glob("*.safetensors")} == inodes
    assert toys.contents(out) == toys.contents(base / "fresh")


@pytest.mark.slow
@pytest.mark.parametrize("quiet", [False, True])
def test_the_command_says_on_stderr_that_it_resumes(
    base: Path, out: Path, capsys: pytest.CaptureFixture[str], quiet: bool
) -> None:
    """stdout stays data; --quiet says nothing."""
    kill_halfway(base, out)
    assert main([*toys.arguments(base / "in", out, tp=2), *(["--quiet"] if quiet else ["--json"])]) == 0
    said = capsys.readouterr()
    assert ("resuming, " in said.err) is not quiet
    assert said.out == "" if quiet else json.loads(said.out)["sets"][0]["already_there"] is False


def test_e2_at_most_the_tensor_in_flight_is_redone(base: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every finished tensor made durable, a kill in mid-tensor costs that tensor and no other."""
    kill_halfway(base, out)
    whole = {path.name: path.read_bytes() for path in (base / "fresh" / "tp2").glob("*.safetensors")}
    ahead = sum(  # bytes of tensors that stand there without being journaled
        len(data) - sum(a != b for a, b in zip(data, (out / ".tp2.partial" / name).read_bytes(), strict=True))
        for name, data in whole.items()
    )
    reads = Reads(monkeypatch)
    convert(base / "in", out, tp=2)
    largest = max(sizes(base).values())
    assert reads.nbytes <= sum(map(len, whole.values())) - ahead + largest + 4096 * len(whole)


@pytest.mark.slow
def test_e6_another_conversion_under_the_same_name_starts_afresh(
    base: Path, out: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Other settings, or another source, take nothing over from what a killed conversion left."""
    plan = tmp_path / "plan.json"
    keys = ("attn.to_q", "attn.to_k", "attn.to_v")
    plan.write_text(
        json.dumps(
            {f"transformer_blocks.*.{k}": "colwise" for k in keys} | {"transformer_blocks.*.attn.to_out.0": "rowwise"}
        )
    )
    shutil.copytree(base / "in", base / "moved")
    for number, change in enumerate(
        ({"dtype": "bf16"}, {"dtype": "fp16"}, {"plan": plan}, {"self_contained": True}, {"source": base / "moved"})
    ):
        kill_halfway(base, out)
        reads = Reads(monkeypatch)
        convert(**(conversion(base, out, False) | change))
        assert reads.nbytes == sum(sizes(base).values()), change
        undisturbed = tmp_path / str(number)
        convert(**(conversion(base, undisturbed, False) | change))
        assert toys.contents(out) == toys.contents(undisturbed), change
        shutil.rmtree(out)
    kill_halfway(base, out)
    convert(base / "in", out, tp=4)  # stands beside it and does not disturb it
    convert(base / "in", out, tp=2)
    assert toys.contents(out / "tp4") == toys.contents(base / "four" / "tp4")
    assert toys.contents(out / "tp2") == toys.contents(base / "fresh" / "tp2")


@pytest.mark.slow
@pytest.mark.parametrize("keep_time", [False, True])
def test_e6_a_source_edited_before_the_rerun_is_read_afresh(
    base: Path, out: Path, tmp_path: Path, keep_time: bool
) -> None:
    """Other bytes under the same name, length and header are noticed, even with the old modification time put back."""
    shutil.copytree(base / "in", tmp_path / "in")
    kill_halfway(base, out, source=tmp_path / "in")
    for path in (tmp_path / "in").glob("*.safetensors"):
        before, data = path.stat(), bytearray(path.read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        data[start:] = bytes(byte ^ 1 for byte in data[start:])
        path.write_bytes(data)
        if keep_time:
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    convert(tmp_path / "in", out, tp=2)
    convert(tmp_path / "in", tmp_path / "fresh", tp=2)
    assert toys.contents(out) == toys.contents(tmp_path / "fresh")


def _torn(partial: Path) -> None:
    path = partial / "progress.jsonl"
    path.write_bytes(path.read_bytes()[:-30])


def _zeros(partial: Path) -> None:
    with open(partial / "progress.jsonl", "ab") as file:
        file.write(bytes(4096))


def _no_text(partial: Path) -> None:
    with open(partial / "progress.jsonl", "ab") as file:
        file.write(b'\xff\xfe\n[]\n{"name": 1}\n{"name": "a", "source": "b", "slices": 3}\n17\nnull\n')


def _of_another(partial: Path) -> None:
    """Whole lines of another conversion's journal, which a file system without order could leave there."""
    path = partial / "progress.jsonl"
    first, *lines = path.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        record["slices"] = ["0" * 32 for _ in record["slices"]]
    path.write_text("\n".join([first, *(json.dumps(record, separators=(",", ":")) for record in records)]) + "\n")


def _headless(partial: Path) -> None:
    path = partial / "progress.jsonl"
    path.write_bytes(path.read_bytes().partition(b"\n")[2])


def _cut(partial: Path) -> None:
    os.truncate(partial / "rank-00001-of-00002.safetensors", 8192)


def _gone(partial: Path) -> None:
    (partial / "replicated.safetensors").unlink()


def _linked(partial: Path) -> None:
    (partial / "rank-00000-of-00002.safetensors").rename(partial.parent / "mine")
    (partial / "rank-00000-of-00002.safetensors").symlink_to(partial.parent / "mine")


@pytest.mark.slow
@pytest.mark.parametrize("harm", [_torn, _zeros, _no_text, _of_another, _headless, _cut, _gone, _linked])
def test_what_a_power_loss_does_to_the_journal(base: Path, out: Path, harm: Callable[[Path], None]) -> None:
    """A torn or damaged journal, or one that speaks of files that are not there, never costs a right byte."""
    kill_halfway(base, out)
    harm(out / ".tp2.partial")
    convert(base / "in", out, tp=2)
    (out / "mine").unlink(missing_ok=True)
    assert toys.contents(out) == toys.contents(base / "fresh")


@pytest.mark.slow
def test_e10_what_a_killed_conversion_took_counts_as_room(
    base: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that has room for one set, not for two, can still be resumed on."""
    kill_halfway(base, out)
    usage = shutil.disk_usage(out)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    convert(base / "in", out, tp=2)
    assert toys.contents(out) == toys.contents(base / "fresh")


# --- what is not ours


def test_i2_a_link_in_place_of_the_partial_folder_is_not_followed(base: Path, out: Path, tmp_path: Path) -> None:
    """A folder of somebody's weights is not taken for a leftover, whatever links to it."""
    shutil.copytree(base / "in", tmp_path / "mine")
    out.mkdir()
    (out / ".tp2.partial").symlink_to(tmp_path / "mine")
    before = toys.listing(tmp_path)
    with pytest.raises(OutputError, match=r"\.tp2\.partial: cannot be written"):
        convert(base / "in", out, tp=2)
    assert toys.listing(tmp_path) == before


@pytest.mark.parametrize("folder", [".tp2.partial", ".tp2.shardconv-old"])
def test_i2_what_others_put_beside_leftovers_stays(base: Path, out: Path, folder: str) -> None:
    """Clearing up after a killed overwrite leaves files that are not of a set, and the folder they are in."""
    shutil.copytree(base / "fresh", out)
    shutil.copytree(base / "other" / "tp2", out / folder)
    (out / folder / "notes.txt").write_text("mine")
    convert(base / "in", out, tp=2)
    found = toys.contents(out)
    assert {name for name in found if folder in name} == {folder, f"{folder}/notes.txt"}
    assert {name: found[name] for name in found if folder not in name} == toys.contents(base / "fresh")


# --- disks that fail


def failing(call: str, error: int, at: int) -> Callable[..., Any]:
    """The call of `os`, which fails once, the time number `at`, as a disk reports a lost write."""
    real, count = getattr(os, call), itertools.count()

    def fail(*args: Any, **options: Any) -> Any:
        if next(count) == at:
            raise OSError(error, os.strerror(error))
        return real(*args, **options)

    return fail


def commit_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the journal's thread sync the first tensor, which must fail, before the second one is written."""
    real = journal.Journal.add

    def add(self: journal.Journal, name: str, digests: TensorDigests) -> None:
        real(self, name, digests)
        self._thread.join(60)

    monkeypatch.setattr(pool, "WORKERS", 1)
    monkeypatch.setattr(journal, "INTERVAL_S", 0.001)
    monkeypatch.setattr(journal.Journal, "add", add)


FAULTS = [
    ("preadv", errno.EIO, 0), ("preadv", errno.EIO, 5), ("pwrite", errno.EIO, 0), ("pwrite", errno.EDQUOT, 10),
    ("fdatasync", errno.EIO, 0), ("fdatasync", errno.ENOSPC, 2), ("fsync", errno.EIO, 0), ("fsync", errno.EIO, 3),
]  # fmt: skip
AT_THE_START = [("posix_fallocate", errno.ENOSPC, 1), ("posix_fallocate", errno.EROFS, 0), ("mkdir", errno.EROFS, 1)]
CASES = [(state, *fault) for state in ("fresh", "overwrite", "resumed") for fault in FAULTS]
CASES += [(state, *fault) for state in ("fresh", "overwrite") for fault in AT_THE_START]


@pytest.mark.slow
@pytest.mark.parametrize(("state", "call", "error", "at"), CASES)
def test_e4_a_fault_of_the_disk_is_one_error_and_costs_no_set(
    base: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str,
    call: str,
    error: int,
    at: int,
) -> None:
    """One line, exit code 1, no part of a set left; the old sets stand, inode for inode."""
    shutil.copytree(base / ("other" if state == "overwrite" else "four"), out)
    before = toys.listing(out)
    if state == "resumed":
        kill_halfway(base, out)
    if call == "fdatasync":
        commit_at_once(monkeypatch)
    monkeypatch.setattr(os, call, failing(call, error, at))
    assert main([*toys.arguments(base / "in", out, tp=2), "--quiet", "--overwrite"]) == 1
    said = capsys.readouterr().err
    assert os.strerror(error) in said
    assert len(said.splitlines()) == 1
    after = toys.listing(out)
    assert {**after, ".": None} == {**before, ".": None}


@pytest.mark.slow
def test_e2_a_killed_merge_leaves_nothing_that_looks_complete(base: Path) -> None:
    """A merge killed at any step starts clean, also beside what a killed conversion left under the same name."""
    merge(base / "fresh", base / "merged")
    whole = toys.contents(base / "merged")

    def work() -> None:
        crashes.steadily(1)
        merge(base / "fresh", base / "out" / "tp2")

    for step in itertools.count():
        if step % 10 == 0:
            kill_halfway(base, base / "out")
        if not crashes.killed_at(step, work):
            break
        assert not (base / "out" / "tp2").exists() or toys.contents(base / "out" / "tp2") == whole
        if not (base / "out" / "tp2").exists():
            merge(base / "fresh", base / "out" / "tp2")
        assert toys.contents(base / "out") == {"tp2": "folder"} | {f"tp2/{name}": it for name, it in whole.items()}
        shutil.rmtree(base / "out")
    assert step > 30
