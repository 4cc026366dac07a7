"""What every benchmark needs: contestants taken in turns, cold files, measured child processes, digests, JSON.

No torch here: the process that measures stays small, and what it starts inherits nothing from it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import xxhash

from shardconv.system.pagecache import is_cached

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
MIB, GB = 1 << 20, 1_000_000_000
READ_NBYTES = 8 << 20  # read at once, when only reading matters
READ = 'for file do dd if="$file" of=/dev/null bs=8M status=none || exit 1; done'  # for sh -c; the floor of reading
CHILD_LIMIT_S = 1800
COLD = (
    "each contestant's weight files are fsynced and dropped with posix_fadvise(POSIX_FADV_DONTNEED) before its turn, "
    "nothing else is; that they are gone is checked with mincore (shardconv.system.pagecache.is_cached)"
)
WARM = "each contestant's weight files are read whole before its turn, and mincore says that they are in memory"

Sample = dict[str, Any]  # of one turn: "seconds", more figures, and flags such as "cold_confirmed"


# --- contestants in turns ---


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to do the job."""

    name: str
    run: Callable[[], Sample]  # timed inside; may check its result and raise
    prepare: Callable[[], Sample] = dict  # not timed, just before; what it returns is added to the sample


def take_turns(contestants: Sequence[Contestant], rounds: int) -> dict[str, list[Sample]]:
    """Samples by contestant, one a round. Each round starts with another contestant, so that drift hits all alike."""
    samples: dict[str, list[Sample]] = {each.name: [] for each in contestants}
    for round_ in range(rounds):
        first = round_ % len(contestants)
        for each in [*contestants[first:], *contestants[:first]]:
            sample = each.prepare() | each.run()
            samples[each.name].append(sample)
            say(f"  round {round_ + 1}/{rounds}  {each.name:<34} {sample['seconds']:8.3f} s")
    return samples


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(title: str, samples: Mapping[str, Sequence[Sample]], baseline: str, note: str = "") -> dict[str, Any]:
    """One question's figures: every sample, their spread, and the ratio to `baseline` paired round by round."""
    base = [sample["seconds"] for sample in samples[baseline]]
    rows = []
    for name, taken in samples.items():
        seconds = [sample["seconds"] for sample in taken]
        row: dict[str, Any] = {
            "name": name,
            "seconds": spread(seconds),
            "ratio": spread([mine / other for mine, other in zip(seconds, base, strict=True)]),
            "samples": [{key: _rounded(value) for key, value in sample.items()} for sample in taken],
        }
        for key in taken[0]:
            values = [sample[key] for sample in taken]
            if key != "seconds" and isinstance(values[0], bool):
                row[key] = all(values)
            elif key != "seconds" and isinstance(values[0], (int, float)):
                row[key] = spread(values)
        rows.append(row)
    return {"title": title, "unit": "s", "baseline": baseline, "note": note, "rows": rows}


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def paired(samples: Mapping[str, Sequence[Sample]], mine: str, others: Sequence[str]) -> dict[str, float] | None:
    """Spread of `mine` over the slowest of `others`, round by round; None when one of them did not run."""
    if any(name not in samples for name in (mine, *others)):
        return None
    longest = [max(samples[name][i]["seconds"] for name in others) for i in range(len(samples[mine]))]
    return spread([sample["seconds"] / most for sample, most in zip(samples[mine], longest, strict=True)])


def figure(what: str, value: Mapping[str, float] | float | None, limit: float, at_most: bool = True) -> dict[str, Any]:
    """A figure that issue 3 sets a limit to, and whether it held."""
    number = value["median"] if isinstance(value, Mapping) else value
    held = None if number is None else (number <= limit if at_most else number >= limit)
    return {"what": what, "value": value, "limit": limit, "at_most": at_most, "held": held}


# --- the page cache ---


def drop(paths: Iterable[Path]) -> Sample:
    """Take files out of the page cache; says whether it worked (a file system in memory keeps them)."""
    paths = list(paths)
    for path in paths:
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # dirty pages cannot be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return {"cold_confirmed": not any(is_cached(path) for path in paths)}


def warm(paths: Iterable[Path]) -> Sample:
    """Read files whole into the page cache; says whether they are there."""
    paths, buffer = list(paths), bytearray(READ_NBYTES)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return {"warm_confirmed": all(is_cached(path) for path in paths)}


READY = {"warm": (warm, WARM), "cold": (drop, COLD)}  # how files are made so, and what the report says of it


def settle() -> None:
    """Let what earlier turns wrote and deleted reach the disk, so that nobody pays for his neighbour."""
    os.sync()


def files_in(folder: Path, suffix: str = ".safetensors") -> list[Path]:
    """Weight files directly in `folder`."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(suffix))


# --- child processes ---


@dataclass(frozen=True, slots=True)
class Child:
    """A child process that ended well."""

    seconds: float  # from its start to its end
    peak_rss_nbytes: int
    disk_read_nbytes: int  # fetched from the disk (read_bytes of /proc/PID/io)
    syscall_read_nbytes: int  # asked for with read calls, from wherever (rchar)
    out: str

    @property
    def result(self) -> Any:
        """The JSON document on the last line that the child printed."""
        return json.loads(self.out.strip().splitlines()[-1])


def environment(**more: str) -> dict[str, str]:
    """This environment with the repository importable and nothing fetched from the Hub."""
    paths = [str(HERE.parent), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    fixed = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {**os.environ, **fixed, **more}


def run_child(argv: Sequence[str], **more: str) -> Child:
    """Run a command to its end; `more` is added to its environment. Raises `RuntimeError` with what it printed."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.perf_counter()
        process = subprocess.Popen(argv, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment(**more))
        timer = threading.Timer(CHILD_LIMIT_S, process.kill)
        timer.start()
        try:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # ended, but its /proc folder still stands
            seconds = time.perf_counter() - start
            io = _io_of(process.pid)
            _, status, usage = os.wait4(process.pid, 0)
        finally:
            timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        text, errors = out.read().decode(errors="replace"), err.read().decode(errors="replace")
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(argv)}: exit code {process.returncode}\n{text[-2000:]}\n{errors[-4000:]}")
    return Child(seconds, usage.ru_maxrss * 1024, io.get("read_bytes", 0), io.get("rchar", 0), text)


def _io_of(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:  # not allowed in some containers
        return {}
    return {key: int(value) for key, _, value in (line.partition(":") for line in lines)}


def python(*arguments: object) -> list[str]:
    """A command line for this interpreter."""
    return [sys.executable, *map(str, arguments)]


@dataclass(frozen=True, slots=True)
class RankEnd:
    """What one rank printed last, and when it was started."""

    result: dict[str, Any]
    started: float  # time.monotonic(), one clock for all processes


def run_ranks(argv: Sequence[str], n: int, limit_s: float = CHILD_LIMIT_S) -> list[RankEnd]:
    """Start `n` ranks as torchrun does and wait for all; each prints a JSON document on its last line."""
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "GLOO_SOCKET_IFNAME": "lo",
        "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n), "OMP_NUM_THREADS": str(max(1, num_cores() // n)),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2 * n)]
        started = time.monotonic()
        processes = []
        for rank in range(n):
            env = environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank))
            processes.append(subprocess.Popen(argv, stdout=logs[rank], stderr=logs[n + rank], env=env))
        try:
            for process in processes:
                process.wait(max(0.1, started + limit_s - time.monotonic()))
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        texts = []
        for log in logs:
            log.seek(0)
            texts.append(log.read().decode(errors="replace"))
    failed = [rank for rank, process in enumerate(processes) if process.returncode != 0]
    if failed:
        raise RuntimeError("\n".join(f"rank {rank}: {texts[rank][-1000:]}{texts[n + rank][-4000:]}" for rank in failed))
    return [RankEnd(json.loads(texts[rank].strip().splitlines()[-1]), started) for rank in range(n)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def memory() -> dict[str, int]:
    """Bytes of this process's memory: `anonymous` belongs to it alone and to no file; `uss` no other process maps."""
    fields: dict[str, int] = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        key, _, rest = line.partition(":")
        fields[key] = int(rest.split()[0]) * 1024
    return {
        "anonymous": fields["Anonymous"],
        "uss": fields["Private_Clean"] + fields["Private_Dirty"],
        "rss": fields["Rss"],
    }


# --- digests ---

_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip


def describe(dtype: str, shape: Sequence[int], digest: str) -> str:
    """One tensor's bytes, dtype and shape in a line that can be compared."""
    return f"{dtype} {list(shape)} {digest}"


def digests_of_file(path: Path) -> dict[str, str]:
    """`describe` of every tensor of a safetensors file. Parses the header itself, so nothing of ours is trusted."""
    found = {}
    with open(path, "rb", buffering=0) as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            start, end = entry["data_offsets"]
            file.seek(8 + length + start)
            digest, left = xxhash.xxh3_128(), end - start
            while left:
                data = file.read(min(left, READ_NBYTES))
                if not data:
                    raise RuntimeError(f"{path.name}: shorter than its header says")
                digest.update(data)
                left -= len(data)
            found[name] = describe(_DTYPES[entry["dtype"]], entry["shape"], digest.hexdigest())
    return found


def one_digest(described: Mapping[str, str]) -> str:
    """A single digest over the descriptions of many tensors."""
    lines = "\n".join(f"{name} {text}" for name, text in sorted(described.items()))
    return str(xxhash.xxh3_128_hexdigest(lines.encode()))


def check_equal(who: str, found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raise `RuntimeError` that names the first tensor whose bytes, dtype or shape differ."""
    for name in sorted(set(found) | set(expected)):
        if found.get(name) != expected.get(name):
            raise RuntimeError(f"{who}: {name}: expected {expected.get(name)}, found {found.get(name)}")


# --- checkpoints and sets ---


def add_checkpoint_flags(parser: argparse.ArgumentParser, name: str) -> None:
    """Which checkpoint, where, how many rounds, and the report's name."""
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="scratch folder, kept for the next run")
    parser.add_argument("--model", default="flux", help="as in make_checkpoint.py; small-NAME for a few MB")
    parser.add_argument("--gb", type=float, default=5.0)
    parser.add_argument("--files", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the JSON goes")
    parser.add_argument(
        "--name", default=name, help="of the JSON, so that runs of several kinds can stand side by side"
    )


def checkpoint(args: argparse.Namespace) -> Path:
    """The checkpoint that the flags ask for, made when it is not there yet."""
    args.work.mkdir(parents=True, exist_ok=True)
    folder: Path = args.work / f"source-{args.model}-{args.gb:g}gb-{args.files}"
    if not folder.exists():
        say(f"making {folder.name}")
        partial = args.work / f".{folder.name}"
        shutil.rmtree(partial, ignore_errors=True)
        small, _, name = args.model.partition("-")
        if small in ("small", "small32"):
            dtype = "bfloat16" if small == "small" else "float32"
            run_child(python(HERE / "oracle.py", "small", name, partial, dtype))
        else:
            asked = ["--model", args.model, "--gb", args.gb, "--files", args.files]
            run_child(python(HERE / "make_checkpoint.py", partial, *asked))
        partial.rename(folder)
    return folder


def checkpoint_record(args: argparse.Namespace, source: Path) -> dict[str, Any]:
    """What the report says of the checkpoint."""
    weights = files_in(source)
    return {"model": args.model, "nbytes": nbytes_of(weights), "files": len(weights)}


def converted(source: Path, tp: int) -> Path:
    """`source` converted for `tp` ranks, by the code as it is now; returns the folder with `tpN`, beside `source`."""
    out = source.with_name(source.name.replace("source", "set", 1))
    say(f"converting {source.name} for tp {tp}")
    shutil.rmtree(out / f"tp{tp}", ignore_errors=True)  # of an earlier run, perhaps by other code
    run_child(python("-m", "shardconv", "convert", "--tp", tp, "--quiet", source, out))
    return out


def rank_files(out: Path, tp: int, rank: int) -> list[Path]:
    """What one rank of a set reads."""
    folder = out / f"tp{tp}"
    names = [f"rank-{rank:05d}-of-{tp:05d}.safetensors", "replicated.safetensors"]
    return [folder / name for name in names if (folder / name).exists()]


def expected_slices(source: Path, tp: int) -> tuple[list[dict[str, str]], dict[str, str]]:
    """What each rank must hold alone, and what all hold, described; cut by diffusers' own rules, see oracle.py."""
    known = source.with_name(f"expected-tp{tp}-{source.name}.json")
    if not known.exists():
        known.write_text(json.dumps(run_child(python(HERE / "oracle.py", "expect", source, tp)).result))
    result = json.loads(known.read_text())
    return result["ranks"], result["replicated"]


def nbytes_of(paths: Iterable[Path]) -> int:
    """Length of files together."""
    return sum(path.stat().st_size for path in paths)


# --- the report ---


def document(question: str, folder: Path, **content: Any) -> dict[str, Any]:
    """A report: what was asked, on what, with what, and `content`."""
    head = {
        "question": question,
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *map(_short, sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "host": host(folder),
        "versions": versions(),
    }
    return head | content


def write(results: Path, name: str, content: Mapping[str, Any]) -> Path:
    """Write a report as `results/name.json`, the same text for the same content."""
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{name}.json"
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    say(f"wrote {path.name}")
    return path


def _short(argument: str) -> str:
    return Path(argument).name if "/" in argument else argument


def host(folder: Path) -> dict[str, Any]:
    """The machine, in words that name nobody's."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.machine(),
        "cores": num_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "kernel": platform.release(),
        "file_system": _file_system(folder),
        "load_average_at_end": round(os.getloadavg()[0], 1),
    }


def _file_system(folder: Path) -> str:
    found = ("", "unknown")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        if folder.resolve().is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, kind)
    return found[1]


_PACKAGES = (
    "torch", "diffusers", "safetensors", "numpy", "xxhash", "shardconv", "fastsafetensors", "runai-model-streamer",
    "flashpack", "tensorizer", "instanttensor",
)  # fmt: skip


def versions() -> dict[str, str]:
    """Of Python and every package that takes part, as installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)
