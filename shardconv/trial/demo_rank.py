"""What each rank of `shardconv demo` runs: load, one forward, compare with the unsharded model, report as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import loader

from ..plans.catalogue import small_models


def main(name: str, out: str, folder: str, size: str, rank: str) -> None:
    """Write `folder/rank-R.json`: bytes held, seconds to load and to run, largest relative difference."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), int(size))  # type: ignore[attr-defined]  # public, says its documentation
    dist.init_process_group("gloo", store=store, rank=int(rank), world_size=int(size))
    reference, inputs = small_models.build(name), small_models.inputs(name)
    start = time.perf_counter()
    model = loader.load_model(out, device="cpu")
    loaded = time.perf_counter()
    with torch.inference_mode():
        output = model(**inputs, return_dict=False)[0]
        done = time.perf_counter()
        expected = reference(**inputs, return_dict=False)[0]
    report = {
        "rank": dist.get_rank(),
        "nbytes": sum(parameter.nbytes for parameter in model.parameters()),
        "load_s": loaded - start,
        "forward_s": done - loaded,
        "difference": float((output - expected).abs().max() / expected.abs().max()),
    }
    Path(folder, f"rank-{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # now and then a thread of torch's aborts an orderly exit, when all is done and told
