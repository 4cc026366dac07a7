"""Ways to get one rank's tensors onto a device, each as its documentation says; for bench_load.py and gpu_check.py.

A `Peer` is prepared (imports, process group) before the clock starts, then called once. One process stands for rank r
of n: the process group is torch's fake one, so nothing waits for a rank that is not there. diffusers refuses tensor
parallelism on a CPU by its list of device types; `let_diffusers_shard_on_cpu` extends that list, nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch

Tensors = Mapping[str, torch.Tensor]
Load = Callable[[], tuple[Tensors, Any]]  # the tensors, and what must stay alive with them


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's load."""

    source: Path  # the ordinary checkpoint
    out: Path  # the folder that holds tpN
    tp: int
    rank: int
    device: torch.device
    packed: Path  # folder of the files in other formats, see `pack`

    @property
    def files(self) -> list[Path]:
        """Our files of this rank."""
        return common.rank_files(self.out, self.tp, self.rank)

    @property
    def flashpack(self) -> Path:
        return self.packed / f"rank-{self.rank}-of-{self.tp}.flashpack"

    @property
    def tensorizer(self) -> Path:
        return self.packed / f"rank-{self.rank}-of-{self.tp}.tensors"


@dataclass(frozen=True, slots=True)
class Peer:
    """One way to load."""

    name: str
    prepare: Callable[[Job], Load]
    reads: Callable[[Job], list[Path]] = lambda job: job.files
    needs: str | None = None  # module that must be installed
    devices: tuple[str, ...] = ("cpu", "cuda")
    about: str = ""

    def left_out(self, device_type: str) -> str | None:
        """Why it cannot take part here; None when it can."""
        if device_type not in self.devices:
            return f"loads to {' and '.join(self.devices)} only"
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        if self.name == PREFETCH and not _has_prefetch():
            return "the installed safetensors has no safe_open.prefetch"
        return None


# --- what stands for the other ranks ---


def fake_group(job: Job) -> None:
    """Make this process rank r of n without the others. Collectives of a fake group return at once."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=job.rank, world_size=job.tp)


def let_diffusers_shard_on_cpu() -> None:
    """Add "cpu" to the device types that diffusers shards on; take the CPU where it would ask for an accelerator."""
    from diffusers import ModelMixin
    from diffusers.hooks import tensor_parallel
    from diffusers.models._modeling_parallel import ParallelConfig, TensorParallelConfig

    def resolve(self: Any, config: Any) -> Any:
        import torch.distributed as dist

        if isinstance(config, TensorParallelConfig):
            config = ParallelConfig(tensor_parallel_config=config)
        mesh = config.tensor_parallel_config.mesh
        config.setup(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), mesh=mesh)
        self._parallel_config = config
        return config

    tensor_parallel._SUPPORTED_TP_DEVICES = (*tensor_parallel._SUPPORTED_TP_DEVICES, "cpu")
    ModelMixin._resolve_parallel_config = resolve


def tp_config(tp: int, device_type: str) -> Any:
    """diffusers' config for `tp` ranks on a mesh of `device_type`."""
    from diffusers.models._modeling_parallel import TensorParallelConfig
    from torch.distributed.device_mesh import init_device_mesh

    return TensorParallelConfig(tp_degree=tp, mesh=init_device_mesh(device_type, (tp,), mesh_dim_names=("tp",)))


def model_class(source: Path) -> Any:
    """diffusers' class of a checkpoint, imported."""
    import diffusers

    return getattr(diffusers, json.loads((source / "config.json").read_text())["_class_name"])


def local_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What this rank holds, DTensors as their local part."""
    return {
        name: tensor.to_local() if hasattr(tensor, "to_local") else tensor
        for name, tensor in model.state_dict().items()
    }


# --- ours ---


def _ours(job: Job, verify: bool = False) -> Load:
    fake_group(job)
    model_class(job.source)
    from loader import load as runtime
    from loader.group.ranks import ranks_of

    runtime.heed = lambda ranks: None  # type: ignore[attr-defined]  # the other ranks are not there to be heard

    def load() -> tuple[Tensors, Any]:
        # load_model without its last word, for which the other ranks would have to be there.
        model = runtime._load_rank(
            job.out, None, job.device, runtime._Wishes(job.device, None, verify, None), ranks_of()
        )[0]
        return local_state(model), model

    return load


def _transfer(job: Job) -> Load:
    from loader.transfer.read import read_file
    from shardconv.format.header import FileHeader

    def load() -> tuple[Tensors, Any]:
        found: dict[str, torch.Tensor] = {}
        for path in job.files:
            found |= read_file(path, FileHeader.read(path), job.device)
        return found, None

    return load


# --- the others ---


def _diffusers_streaming(job: Job) -> Load:
    fake_group(job)
    cls = model_class(job.source)
    import torch.distributed.tensor.parallel  # by diffusers imported late; not to be timed

    if job.device.type == "cpu":
        let_diffusers_shard_on_cpu()

    def load() -> tuple[Tensors, Any]:
        config = tp_config(job.tp, job.device.type)
        model = cls.from_pretrained(job.source, torch_dtype=torch.bfloat16, parallel_config=config)
        return local_state(model), model

    return load


def _diffusers_then_shard(job: Job) -> Load:
    fake_group(job)
    cls = model_class(job.source)
    import torch.distributed.tensor.parallel as parallel

    if job.device.type == "cpu":
        let_diffusers_shard_on_cpu()
    # Every rank has the same weights, so each may slice its own instead of being sent slices by rank 0. That is torch's
    # own option, costs no collective, and gives the right bytes without the other ranks.
    parallel.parallelize_module = functools.partial(parallel.parallelize_module, src_data_rank=None)

    def load() -> tuple[Tensors, Any]:
        model = cls.from_pretrained(job.source, torch_dtype=torch.bfloat16).to(job.device)
        model.enable_parallelism(config=tp_config(job.tp, job.device.type))
        return local_state(model), model

    return load


def _load_file(job: Job) -> Load:
    from safetensors.torch import load_file

    def load() -> tuple[Tensors, Any]:
        found: dict[str, torch.Tensor] = {}
        for path in job.files:
            found |= load_file(path, device=str(job.device))
        return found, None

    return load


def _has_prefetch() -> bool:
    from safetensors import safe_open

    return hasattr(safe_open, "prefetch")


def _safetensors_prefetch(job: Job) -> Load:
    from safetensors import safe_open

    def load() -> tuple[Tensors, Any]:
        files = [safe_open(path, framework="pt", device=str(job.device)) for path in job.files]
        with contextlib.ExitStack() as stack:
            loaders = [stack.enter_context(stack.enter_context(file).prefetch()) for file in files]
            return {name: tensor for loader in loaders for name, tensor in loader}, None

    return load


def _fastsafetensors(job: Job) -> Load:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def load() -> tuple[Tensors, Any]:
        loader = SafeTensorsFileLoader(SingleGroup(), device=str(job.device), nogds=True)
        loader.add_filenames({0: [str(path) for path in job.files]})
        buffers = loader.copy_files_to_device()
        return {name: buffers.get_tensor(name) for name in loader.get_keys()}, (loader, buffers)

    return load


def _runai(job: Job) -> Load:
    from runai_model_streamer import SafetensorsStreamer

    def load() -> tuple[Tensors, Any]:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(path) for path in job.files], device=str(job.device))
            return dict(streamer.get_tensors()), None

    return load


def _flashpack(job: Job) -> Load:
    from flashpack.deserialization import iterate_from_flash_tensor, read_flashpack_file

    def load() -> tuple[Tensors, Any]:
        storage, about = read_flashpack_file(str(job.flashpack), device=job.device)
        return dict(iterate_from_flash_tensor(storage, about)), storage

    return load


def _tensorizer(job: Job) -> Load:
    from tensorizer import TensorDeserializer

    def load() -> tuple[Tensors, Any]:
        deserializer = TensorDeserializer(str(job.tensorizer), device=job.device)
        return {str(name): tensor for name, tensor in deserializer.items()}, deserializer

    return load


def _instanttensor(job: Job) -> Load:
    from instanttensor import safe_open

    def load() -> tuple[Tensors, Any]:
        with safe_open([str(path) for path in job.files], framework="pt", device=job.device) as file:
            return dict(file.tensors()), None

    return load


def pack(job: Job) -> None:
    """Write this rank's tensors in the formats of flashpack and tensorizer, where those are installed."""
    from safetensors.torch import load_file

    job.packed.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for path in job.files:
        tensors |= load_file(path)
    if importlib.util.find_spec("flashpack") and not job.flashpack.exists():
        from flashpack import pack_to_file

        pack_to_file(tensors, str(job.flashpack), target_dtype=None)
    if importlib.util.find_spec("tensorizer") and not job.tensorizer.exists():
        from tensorizer import TensorSerializer

        serializer = TensorSerializer(str(job.tensorizer))
        serializer.write_state_dict(tensors)
        serializer.close()


OURS = "ours"
VERIFIED = "ours, verify=True"
STREAMING = "diffusers streaming"
PREFETCH = "safetensors prefetch"


def _source(job: Job) -> list[Path]:
    return common.files_in(job.source)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(OURS, _ours, about="loader.load_model without its closing collective"),
        Peer(VERIFIED, functools.partial(_ours, verify=True), about="the same, every byte hashed first"),
        Peer("ours, read_file alone", _transfer, about="loader.transfer.read.read_file: copied, no model"),
        Peer(STREAMING, _diffusers_streaming, _source, about="from_pretrained(parallel_config=...), own slices only"),
        Peer("diffusers, then shard", _diffusers_then_shard, _source, about="from_pretrained, enable_parallelism"),
        Peer("safetensors load_file", _load_file, about="of our files; no model, nothing wrapped"),
        Peer(PREFETCH, _safetensors_prefetch, devices=("cuda",), about="safe_open.prefetch of safetensors 0.9"),
        Peer("fastsafetensors", _fastsafetensors, needs="fastsafetensors", about="of our files, no GPU direct storage"),
        Peer("runai-model-streamer", _runai, needs="runai_model_streamer", about="of our files"),
        Peer("flashpack", _flashpack, lambda job: [job.flashpack], "flashpack", about="in its own format"),
        Peer("tensorizer", _tensorizer, lambda job: [job.tensorizer], "tensorizer", about="in its own format"),
        Peer("instanttensor", _instanttensor, needs="instanttensor", devices=("cuda",), about="of our files"),
    )
}
