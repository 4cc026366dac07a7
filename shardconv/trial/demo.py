"""`shardconv demo`: the whole tool on a small model, with no GPU and no network."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ..commands.convert import convert
from ..errors import Interrupted, ShardconvError, UsageError
from ..format.manifest import Manifest
from ..format.summary import human, summarize
from ..plans.catalogue import small_models
from ..system.children import run_together

TP = 2
TOLERANCE = 1e-5  # largest difference, relative to the largest output, in fp32


def run_demo(model: str, keep: str | None, say: Callable[[str], None]) -> None:
    """Build `model` small, convert it for 2 ranks, run it on 2 CPU ranks, compare with the unsharded model.

    Raises `ShardconvError` when the outputs differ or a rank fails, `UsageError` when `keep` exists already.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="shardconv-demo-") as folder:
            _demo(model, Path(folder), say)
        return
    if Path(keep).exists():
        raise UsageError(f"--keep: {keep} exists already; name a new folder")
    try:
        _demo(model, Path(keep).absolute(), say)
    except KeyboardInterrupt:
        if not Path(keep).exists():
            raise
        raise Interrupted(f"{keep} holds what was made by then; remove it") from None
    say(f"\nThe files are in {keep}. Look at one: head -c 300 {keep}/out/tp{TP}/rank-00000-of-0000{TP}.safetensors")


def _demo(name: str, folder: Path, say: Callable[[str], None]) -> None:
    source, out = folder / "source", folder / "out"
    say(f"1. A small {small_models.class_name(name)} with random weights, saved as diffusers saves it")
    model = small_models.build(name)
    model.save_pretrained(source)
    nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    say(f"     {source.name}/  {human(nbytes)} of fp32 weights")

    say(f"\n2. shardconv convert --tp {TP} source out")
    start = time.perf_counter()
    manifest = convert(source, out, tp=TP)
    say(f"     {_files(out / f'tp{TP}', manifest)}")
    say(f"     took {time.perf_counter() - start:.2f} s")

    say(f"\n3. {TP} ranks (gloo, CPU), each loads its own file: loader.load_model('out')")
    start = time.perf_counter()
    ranks = _run_ranks(name, out)
    for rank in ranks:
        say(
            f"     rank {rank['rank']}: loaded {human(rank['nbytes'])} in {rank['load_s'] * 1e3:.0f} ms, "
            f"one forward in {rank['forward_s'] * 1e3:.0f} ms"
        )
    say(f"     took {time.perf_counter() - start:.1f} s, nearly all of it imports")

    worst = max(rank["difference"] for rank in ranks)
    say("\n4. Sharded against unsharded output, same inputs")
    say(f"     largest difference {worst:.1e} of the largest output, allowed {TOLERANCE:.0e}: {_verdict(worst)}")
    summary = summarize(manifest)
    say(
        f"\nEach rank held {human(summary.rank_nbytes)} instead of {human(summary.nbytes)}, "
        f"and read nothing but its own file and the shared one."
    )
    if worst > TOLERANCE:
        raise ShardconvError(f"demo: the sharded output differs by {worst:.1e}, allowed {TOLERANCE:.0e}; report this")


def _files(folder: Path, manifest: Manifest) -> str:
    return "\n     ".join(
        f"{folder.parent.name}/{folder.name}/{file.name}  {human(file.nbytes)}" for file in manifest.files
    )


def _verdict(difference: float) -> str:
    return "equal" if difference <= TOLERANCE else "DIFFERENT"


def _run_ranks(name: str, out: Path) -> list[dict[str, float]]:
    """Run the ranks, a process each, and collect what they report."""
    with tempfile.TemporaryDirectory(prefix="shardconv-demo-") as folder:
        command = [sys.executable, "-m", "shardconv.trial.demo_rank", name, str(out), folder, str(TP)]
        run_together("demo", [[*command, str(rank)] for rank in range(TP)], Path(folder))
        return [json.loads(Path(folder, f"rank-{rank}.json").read_text()) for rank in range(TP)]
