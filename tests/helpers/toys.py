"""What the conversion tests share: the toy checkpoint T, writers of odd files, and checks of what stands on disk.

T is a diffusers folder of a class with a `_tp_plan`: 2 blocks, 24 heads x 8 = 192 inner dim, FFN 768, bf16, biases on,
2 shards and an index. Nothing here uses the slicing, reading or writing code under test.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import diffusers
import pytest
import safetensors.torch
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

from shardconv import ShardconvError, convert
from shardconv.cli.main import main
from shardconv.plans.catalogue import small_models

HEADS, HEAD_DIM, INNER, FFN = 24, 8, 192, 768
NAME = "ToyTransformer"  # the class, as diffusers has it once `install` ran
STEM = "diffusion_pytorch_model"
INDEX = f"{STEM}.safetensors.index.json"
SINGLE = f"{STEM}.safetensors"
SHARDS = (f"{STEM}-00001-of-00002.safetensors", f"{STEM}-00002-of-00002.safetensors")

ATTENTION_PLAN: dict[str, object] = {
    "blocks.*.attn.to_q": "colwise",
    "blocks.*.attn.to_k": "colwise",
    "blocks.*.attn.to_v": "colwise",
    "blocks.*.attn.to_out.0": "rowwise",
}
PLAN: dict[str, object] = {**ATTENTION_PLAN, "blocks.*.ff.proj": "colwise", "blocks.*.ff.out": "rowwise"}


class ToyAttention(nn.Module):
    """No head count of its own: it would be derived from the tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(INNER, INNER)
        self.to_k = nn.Linear(INNER, INNER)
        self.to_v = nn.Linear(INNER, INNER)
        self.norm_q = nn.RMSNorm(HEAD_DIM)
        self.norm_k = nn.RMSNorm(HEAD_DIM)
        self.to_out = nn.ModuleList([nn.Linear(INNER, INNER), nn.Identity()])


class ToyFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(INNER, FFN)
        self.out = nn.Linear(FFN, INNER)


class ToyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = ToyAttention()
        self.ff = ToyFeedForward()


class ToyTransformer(ModelMixin, ConfigMixin):
    """The model of T."""

    _tp_plan: ClassVar[Mapping[str, object] | None] = PLAN
    change: ClassVar[Callable[[Any], None]] = staticmethod(lambda model: None)  # done at the end of the constructor

    @register_to_config
    def __init__(
        self, num_attention_heads: int = HEADS, num_layers: int = 2, num_key_value_heads: int | None = None
    ) -> None:
        super().__init__()
        self.proj_in = nn.Linear(16, INNER)
        self.time_embedder = nn.Linear(INNER, INNER)
        self.blocks = nn.ModuleList(ToyBlock() for _ in range(num_layers))
        type(self).change(self)


def install(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None] | None = None, **attributes: object
) -> type[ToyTransformer]:
    """Put the toy class on the diffusers module, altered by `change(model)` and with other class `attributes`."""
    if change is not None:
        attributes["change"] = staticmethod(change)
    cls = type(NAME, (ToyTransformer,), attributes)
    monkeypatch.setattr(diffusers, NAME, cls, raising=False)
    return cls


def build(cls: type[ToyTransformer], *, dtype: torch.dtype = torch.bfloat16, **config: object) -> ToyTransformer:
    """A toy model with random weights."""
    model = cls(**config)
    small_models.randomize(model, 0)
    return model.to(dtype)


def save(model: Any, folder: Path, *, max_shard_size: str = "1MB", variant: str | None = None) -> Path:
    """The model as an ordinary diffusers folder; T comes out as `SHARDS` and `INDEX`."""
    model.save_pretrained(folder, max_shard_size=max_shard_size, variant=variant)
    return folder


def save_flat(model: Any, folder: Path, tensors: Mapping[str, torch.Tensor | Raw] | None = None) -> Path:
    """config.json and one weight file that holds exactly `tensors` (None: all names, also those that are tied)."""
    model.save_config(folder)
    write_weights(folder / SINGLE, model.state_dict() if tensors is None else tensors)
    return folder


Raw = tuple[str, tuple[int, ...], bytes]  # dtype name of the format, shape, data


def raw(tensor: torch.Tensor) -> Raw:
    """A tensor as a safetensors file holds it."""
    names = {
        "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "bool": "BOOL", "uint8": "U8",
        "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64", "uint16": "U16", "complex64": "C64",
        "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
    }  # fmt: skip
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return names[str(tensor.dtype).removeprefix("torch.")], tuple(tensor.shape), flat.numpy().tobytes()


def write_weights(
    path: Path, tensors: Mapping[str, torch.Tensor | Raw], metadata: Mapping[str, str] | None = None
) -> Path:
    """A safetensors file, in the given order, of dtypes that torch may not know."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    parts = []
    position = 0
    for name, value in tensors.items():
        dtype, shape, data = raw(value) if isinstance(value, torch.Tensor) else value
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    return path


def read_weights(path: Path) -> dict[str, Raw]:
    """The tensors of a safetensors file, read by the format's own rules."""
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], tuple(entry["shape"]), data[slice(*(start + at for at in entry["data_offsets"]))])
        for name, entry in header.items()
    }


def edit_json(path: Path, **changes: object) -> None:
    """Change keys of a JSON object on disk; None removes one."""
    document = json.loads(path.read_text())
    document.update(changes)
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}, indent=2))


def rank_files(folder: Path) -> list[Path]:
    """The rank files of a set, by rank."""
    return sorted(folder.glob("rank-*.safetensors"))


def rank_states(folder: Path) -> list[dict[str, torch.Tensor]]:
    """What each rank of the set in `folder` holds, replicated tensors included."""
    shared = folder / "replicated.safetensors"
    common = safetensors.torch.load_file(shared) if shared.exists() else {}
    return [common | safetensors.torch.load_file(path) for path in rank_files(folder)]


def rank_raws(folder: Path) -> list[dict[str, Raw]]:
    """As `rank_states`, of any dtype."""
    shared = folder / "replicated.safetensors"
    common = read_weights(shared) if shared.exists() else {}
    return [common | read_weights(path) for path in rank_files(folder)]


def contents(root: Path) -> dict[str, str]:
    """Relative path -> digest of every file under `root`, "folder" for a folder."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(root.rglob("*"))
    }


def listing(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything about `root` and what is under it: bytes, modes, times, inodes."""
    known = {".": "folder"} | contents(root)
    stats = {name: os.lstat(root / name) for name in known}
    return {
        name: (digest, stats[name].st_mode, stats[name].st_mtime_ns, stats[name].st_ino)
        for name, digest in known.items()
    }


def arguments(source: object, out: object, **options: object) -> list[str]:
    """The command line that asks for what `convert(source, out, **options)` does."""
    argv = ["convert", str(source), str(out)]
    for key, value in options.items():
        flag = f"--{key.replace('_', '-')}"
        argv += [flag] if value is True else [flag, str(value)]
    return argv


def refused(
    capsys: pytest.CaptureFixture[str],
    error: type[ShardconvError],
    source: object,
    out: object,
    *,
    root: Path | None = None,
    code: int = 1,
    **options: object,
) -> str:
    """Ask for a conversion that must fail, as a library call and on the command line. Returns the message.

    Both say the same, each fault is one sentence that names its subject and ends in what to do, stdout stays empty, and
    under `root` (the folder that holds SOURCE and OUT) nothing at all has changed.
    """
    root = root or Path(os.path.commonpath([str(source), str(out)]))
    before = listing(root)
    with pytest.raises(error) as caught:
        convert(source, out, **options)
    assert listing(root) == before
    capsys.readouterr()
    assert main(arguments(source, out, **options)) == code
    said = capsys.readouterr()
    assert said.err == f"shardconv: {caught.value}\n"
    assert said.out == ""
    assert listing(root) == before
    for issue in caught.value.issues:
        subject, colon, rest = issue.partition(": ")
        assert subject, issue
        assert colon, issue
        assert rest, issue
        assert "\n" not in issue
    return str(caught.value)


@contextmanager
def umask(value: int) -> Iterator[None]:
    """Run under another umask."""
    previous = os.umask(value)
    try:
        yield
    finally:
        os.umask(previous)
