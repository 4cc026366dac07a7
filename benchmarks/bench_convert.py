"""How long a conversion takes, against copying the same bytes and against the script one would write instead.

    python benchmarks/bench_convert.py --gb 5 --files 3 --model flux2 --rounds 6 --work /tmp/bench

Contestants, each a process of its own, timed from its start to its end, imports included:

- `shardconv convert`, at each tp degree;
- `cp` and fsync of a set that has been converted already: the same number of bytes;
- a script: `from_pretrained` in bf16, slices with torch, `safetensors.torch.save_file` for each rank, fsync.

Every file that comes out is compared by digest with what oracle.py expects.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common
from common import GB, MIB, Child, Contestant, Sample

CP = "cp + fsync"
COPY = 'mkdir "$2" && cp "$1"/*.safetensors "$2" && sync "$2"/*.safetensors'


def ours(tp: int) -> str:
    """The name of our contestant at one degree."""
    return f"shardconv convert --tp {tp}"


def script(tp: int) -> str:
    """The name of the scripted way at one degree."""
    return f"from_pretrained, slice, save_file, tp {tp}"


# --- in the script's process ---


def _import_what_converting_needs(source: Path) -> float:
    start = time.perf_counter()
    import diffusers
    import torch  # noqa: F401

    getattr(diffusers, json.loads((source / "config.json").read_text())["_class_name"])
    return time.perf_counter() - start


def child_script(source: Path, out: Path, tp: int) -> dict[str, float]:
    """Load, slice, save, as a person would write it; replicated tensors once, so that the bytes are the same."""
    imports_s = _import_what_converting_needs(source)
    start = time.perf_counter()
    import diffusers
    import torch
    from oracle import model_specs, take
    from safetensors.torch import save_file

    specs = model_specs(source, tp)
    cls = getattr(diffusers, json.loads((source / "config.json").read_text())["_class_name"])
    state = cls.from_pretrained(source, torch_dtype=torch.bfloat16).state_dict()
    cut = {name for name in state if name in specs and specs[name].dim is not None}
    folder = out / f"tp{tp}"
    folder.mkdir(parents=True)
    for rank in range(tp):
        path = folder / f"rank-{rank:05d}-of-{tp:05d}.safetensors"
        save_file({name: take(state[name], specs[name], rank, tp) for name in cut}, path)
        _fsync(path)
    path = folder / "replicated.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in state.items() if name not in cut}, path)
    _fsync(path)
    return {"imports_s": imports_s, "work_s": time.perf_counter() - start}


def _fsync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


# --- in the measuring process ---


class Bench:
    """One checkpoint, the degrees, and what must come out."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.source = common.checkpoint(args)
        self.weights = common.files_in(self.source)
        self.out = args.work / "out"
        self.copied = common.converted(self.source, args.copy_tp) / f"tp{args.copy_tp}" if args.copy_tp else None
        self.expected = {tp: self._expected(tp) for tp in sorted({*args.tp, args.copy_tp, *args.script_tp} - {0})}
        empty = common.run_child(common.python("-c", "pass"))
        self.interpreter_mib = empty.peak_rss_nbytes / MIB

    def _expected(self, tp: int) -> dict[str, dict[str, str]]:
        ranks, replicated = common.expected_slices(self.source, tp)
        files = {f"rank-{rank:05d}-of-{tp:05d}.safetensors": part for rank, part in enumerate(ranks)}
        return files | {"replicated.safetensors": replicated}

    def contestants(self, ready: Callable[[list[Path]], Sample]) -> list[Contestant]:
        """All of them; `ready` makes the files that one reads warm or cold."""
        source = partial(self._prepare, ready, self.weights)
        found = [Contestant(ours(tp), partial(self._convert, tp), source) for tp in self.args.tp]
        found += [Contestant(script(tp), partial(self._script, tp), source) for tp in self.args.script_tp]
        if self.copied:
            files = common.files_in(self.copied)
            found.append(Contestant(CP, partial(self._copy, self.copied), partial(self._prepare, ready, files)))
        return found

    def _prepare(self, ready: Callable[[list[Path]], Sample], files: list[Path]) -> Sample:
        shutil.rmtree(self.out, ignore_errors=True)
        common.settle()
        return ready(files)

    def _convert(self, tp: int) -> Sample:
        command = common.python("-m", "shardconv", "convert", "--tp", tp, "--quiet", self.source, self.out)
        sample = self._sample(common.run_child(command), self.weights)
        self._verify(ours(tp), self.out / f"tp{tp}", tp)
        return sample

    def _script(self, tp: int) -> Sample:
        child = common.run_child(common.python(__file__, "--child", self.source, self.out, tp))
        self._verify(script(tp), self.out / f"tp{tp}", tp)
        return self._sample(child, self.weights) | child.result

    def _copy(self, folder: Path) -> Sample:
        child = common.run_child(["sh", "-c", COPY, "sh", str(folder), str(self.out)])
        self._verify(CP, self.out, self.args.copy_tp)
        return self._sample(child, common.files_in(folder))

    def _sample(self, child: Child, read: list[Path]) -> Sample:
        nbytes = common.nbytes_of(read)
        return {
            "seconds": child.seconds,
            "gb_per_s": nbytes / GB / child.seconds,
            "peak_rss_mib": child.peak_rss_nbytes / MIB,
            "peak_rss_above_interpreter_mib": child.peak_rss_nbytes / MIB - self.interpreter_mib,
            "disk_read_of_source": child.disk_read_nbytes / nbytes,
        }

    def _verify(self, who: str, folder: Path, tp: int) -> None:
        expected = self.expected[tp]
        found = {path.name: path for path in common.files_in(folder)}
        if set(found) != set(expected):
            raise RuntimeError(f"{who}: expected the files {sorted(expected)}, found {sorted(found)}")
        for name, path in found.items():
            common.check_equal(f"{who}: {name}", common.digests_of_file(path), expected[name])


def figures(tables: dict[str, dict[str, list[Sample]]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """What issue 3, point 1 sets limits to."""
    found = []
    for mode, samples in tables.items():
        for tp in args.tp:
            name = ours(tp)
            ratio = common.paired(samples, name, [CP])
            found.append(common.figure(f"{mode}, tp {tp}: whole process over cp + fsync", ratio, 1.25))
        if len(args.tp) > 1:
            flat = common.paired(samples, ours(args.tp[-1]), [ours(args.tp[0])])
            found.append(common.figure(f"{mode}: tp {args.tp[-1]} over tp {args.tp[0]}", flat, 1.10))
        for tp in set(args.script_tp) & set(args.tp):
            faster = common.paired(samples, script(tp), [ours(tp)])
            mine, theirs = (samples[name][0]["peak_rss_above_interpreter_mib"] for name in (ours(tp), script(tp)))
            found.append(common.figure(f"{mode}, tp {tp}: scripted way over ours, time", faster, 3.0, at_most=False))
            found.append(common.figure(f"{mode}, tp {tp}: our memory over the scripted way's", mine / theirs, 0.1))
        most = max(sample["peak_rss_above_interpreter_mib"] for tp in args.tp for sample in samples[ours(tp)])
        found.append(common.figure(f"{mode}: peak RSS above the empty interpreter, MiB", most, 300))
    if "cold" in tables:
        most = max(sample["disk_read_of_source"] for tp in args.tp for sample in tables["cold"][ours(tp)])
        found.append(common.figure("cold: bytes read from the disk over the source's length", most, 1.02))
    return [each for each in found if each["value"] is not None]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_checkpoint_flags(parser, "convert")
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--copy-tp", type=int, default=4, help="degree of the set that cp copies; 0: no cp")
    parser.add_argument("--script-tp", type=int, nargs="*", default=[4], help="degrees of the scripted way")
    parser.add_argument("--modes", nargs="+", choices=("warm", "cold"), default=["warm", "cold"])
    args = parser.parse_args()
    bench = Bench(args)
    samples, tables = {}, []
    for mode in args.modes:
        common.say(f"convert, {mode}")
        ready, note = common.READY[mode]
        samples[mode] = common.take_turns(bench.contestants(ready), args.rounds)
        tables.append(common.table(f"Convert, {mode}", samples[mode], CP if args.copy_tp else ours(args.tp[0]), note))
    shutil.rmtree(bench.out, ignore_errors=True)
    report = common.document(
        "What does a conversion cost against copying the same bytes?",
        args.work,
        checkpoint=common.checkpoint_record(args, bench.source),
        rounds=args.rounds,
        interpreter_mib=bench.interpreter_mib,
        tables=tables,
        figures=figures(samples, args),
        verified="every tensor of every output file, every round, by xxh3-128 against slices cut with torch",
    )
    common.write(args.results, args.name, report)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child_script(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))))
    else:
        main()
