"""What a conversion does to dtypes: nothing unless asked, and then what torch and diffusers would do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import toys
from small_minimax import MINIMAX_PLAN, build_minimax

from shardconv import PlanError, convert, verify

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LONG = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def whole(folder: Path) -> dict[str, torch.Tensor]:
    return {
        key: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for key, tensor in safetensors.torch.load_file(path).items()
    }


def bits(tensor: torch.Tensor) -> toys.Raw:
    return toys.raw(tensor)


def joined(folder: Path, key: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor `key` of a set put together again; a slice that is as large as the whole is the whole."""
    parts = [state[key] for state in toys.rank_states(folder)]
    if parts[0].shape == tensor.shape:
        return parts[0]
    dim = next(i for i, (part, full) in enumerate(zip(parts[0].shape, tensor.shape, strict=True)) if part != full)
    return torch.cat(parts, dim)


def awkward(shape: torch.Size) -> torch.Tensor:
    """Float32 values that show how a cast rounds: ties, subnormals of the small types, overflow, both zeros, NaN."""
    special = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, 2**-24, 3 * 2**-25, 1e-40, 65519.9, 65520.0, 1e38]
    special += [3.4e38, -0.0, 0.0, float("inf"), float("nan"), -(1 + 2**-8)]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(3)).flatten()
    num = min(len(special), values.numel())
    values[:num] = torch.tensor(special[:num])
    return values.reshape(shape)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DTYPES, *LONG.values()])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16", "float64"])
def test_a_cast_is_torchs_cast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, stored: str) -> None:
    """`dtype` gives, for every slice of every float tensor, the bits that `tensor.to(dtype)` gives."""
    model = toys.build(toys.install(monkeypatch), num_layers=1)
    given = {key: awkward(tensor.shape).to(getattr(torch, stored)) for key, tensor in model.state_dict().items()}
    toys.save_flat(model, tmp_path / "in", given)
    manifest = convert(tmp_path / "in", tmp_path / "out", tp=2, dtype=name)
    target = DTYPES[next(short for short, long in LONG.items() if name in (short, long))]
    for key, tensor in given.items():
        assert bits(joined(tmp_path / "out" / "tp2", key, tensor)) == bits(tensor.to(target)), key
    assert {tensor.dtype for tensor in manifest.tensors} == {bits(torch.empty(0, dtype=target))[0]}


def _islands(model: Any) -> None:
    model.rope = torch.nn.Linear(4, 4)
    model.time_embedders = torch.nn.Linear(4, 4)  # not the same word as time_embedder


@pytest.mark.slow
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_d1_the_modules_a_class_wants_in_fp32_stay_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stored: torch.dtype,
    dtype: str,
) -> None:
    """`_keep_in_fp32_modules` come out as F32 under a cast, also when the source stores them smaller; whole names only.

    The counts of dtypes are printed, and the manifest says which modules were kept.
    """
    cls = toys.install(monkeypatch, _islands, _keep_in_fp32_modules=["time_embedder", "rope", "to_out"])
    model = cls(num_layers=1)
    toys.small_models.randomize(model, 0)
    state = {key: tensor.to(stored) for key, tensor in model.state_dict().items()}
    toys.save_flat(model, tmp_path / "in", state)
    manifest = convert(tmp_path / "in", tmp_path / "out", tp=2, dtype=dtype)
    kept = {key for key in state if re.search(r"(^|\.)(time_embedder|rope|to_out)\.", key)}
    assert "blocks.0.attn.to_out.0.weight" in kept
    for key, tensor in state.items():
        made = joined(tmp_path / "out" / "tp2", key, tensor)
        assert bits(made) == bits(tensor.to(torch.float32 if key in kept else DTYPES[dtype])), key
    assert manifest.keep_fp32 == ("time_embedder", "rope", "to_out")
    assert {tensor.name for tensor in manifest.tensors if tensor.dtype == "F32"} == kept
    toys.main(toys.arguments(tmp_path / "in", tmp_path / "out", tp=1, dtype=dtype))
    num_cast, name = len(state) - len(kept), {"bf16": "BF16", "fp16": "F16"}[dtype]
    counts = f"{num_cast} {name}, {len(kept)} F32" if name < "F32" else f"{len(kept)} F32, {num_cast} {name}"
    assert f"dtypes: {counts} tensors" in capsys.readouterr().out


def test_d1_what_is_kept_is_what_from_pretrained_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a cast conversion has the dtypes and values that diffusers' own loading in that dtype has."""
    cls = toys.install(monkeypatch, _islands, _keep_in_fp32_modules=["time_embedder", "rope"])
    model = cls(num_layers=1)
    toys.small_models.randomize(model, 0)
    toys.save(model, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", tp=1, dtype="bf16")
    loaded = cls.from_pretrained(tmp_path / "in", torch_dtype=torch.bfloat16).state_dict()
    (made,) = toys.rank_states(tmp_path / "out" / "tp1")
    assert {key: bits(tensor) for key, tensor in made.items()} == {key: bits(t) for key, t in loaded.items()}
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16, torch.float32}


def test_d1_a_real_class_keeps_its_islands(tmp_path: Path) -> None:
    """MiniMax-H3 stored in bf16 and cast to fp16: what its class keeps in fp32 is fp32, the rest fp16."""
    model = build_minimax()
    islands = set(type(model)._keep_in_fp32_modules)
    state = {key: tensor.to(torch.bfloat16) for key, tensor in model.state_dict().items()}
    toys.save_flat(model, tmp_path / "in", state)
    manifest = convert(tmp_path / "in", tmp_path / "out", tp=2, plan=MINIMAX_PLAN, dtype="fp16")
    expected = {key: "F16" if islands.isdisjoint(key.split(".")) else "F32" for key in state}
    assert {tensor.name: tensor.dtype for tensor in manifest.tensors} == expected
    assert set(expected.values()) == {"F16", "F32"}
    convert(tmp_path / "in", tmp_path / "as-stored", tp=2, plan=MINIMAX_PLAN)
    stored, cast = (toys.rank_states(tmp_path / folder / "tp2") for folder in ("as-stored", "out"))
    for before, after in zip(stored, cast, strict=True):
        for key, tensor in before.items():
            target = torch.float32 if expected[key] == "F32" else torch.float16
            assert bits(after[key]) == bits(tensor.to(target)), key


# Tensors of dtypes that a cast must not touch, or that torch or safetensors.torch may not know at all.
EXOTIC: dict[str, toys.Raw] = {
    "integers": ("I64", (4,), bytes(range(32))),
    "small": ("I8", (3,), b"\x80\x00\x7f"),
    "unsigned": ("U16", (2, 2), bytes(range(8))),
    "flags": ("BOOL", (5,), b"\0\1\1\0\1"),
    "complex": ("C64", (3,), bytes(range(24))),
    "e8m0": ("F8_E8M0", (3,), b"\x7f\x80\xff"),
    "f4": ("F4", (4, 2), b"\x12\x34\x56\x78"),
    "f6a": ("F6_E2M3", (4,), b"abc"),
    "f6b": ("F6_E3M2", (8,), b"abcdef"),
}


def _exotic(model: Any) -> None:
    """A buffer of the right shape for each; its dtype in the model does not matter."""
    for name, (_, shape, _) in EXOTIC.items():
        model.register_buffer(name, torch.zeros(shape))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "bf16", "fp16", "fp32"])
@pytest.mark.parametrize("self_contained", [False, True], ids=["shared", "self-contained"])
def test_d4_other_dtypes_are_copied_as_raw_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str | None, self_contained: bool
) -> None:
    """Integers, bool, complex, scales and sub-byte floats reach every rank untouched, with or without a cast."""
    model = toys.build(toys.install(monkeypatch, _exotic), num_layers=1)
    state = {key: toys.raw(tensor) for key, tensor in model.state_dict().items() if key not in EXOTIC}
    toys.save_flat(model, tmp_path / "in", state | EXOTIC)
    convert(tmp_path / "in", tmp_path / "out", tp=2, dtype=dtype, self_contained=self_contained)
    for held in toys.rank_raws(tmp_path / "out" / "tp2"):
        assert {key: held[key] for key in EXOTIC} == EXOTIC


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
@pytest.mark.parametrize("dtype", [None, "bf16", "fp16", "fp32"])
def test_bare_float8_is_cast_like_any_float(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str | None
) -> None:
    """8-bit floats without scales, in weights, biases and buffers, become what `tensor.to(dtype)` gives, every one of
    the 256 values, cut or whole; without a dtype they stay. The set is what verifying against the source expects."""
    model = toys.build(toys.install(monkeypatch), num_layers=1)
    eight = getattr(torch, kind)
    every = torch.arange(256, dtype=torch.uint8).view(eight)
    state = {
        key: every.repeat(-(-tensor.numel() // 256))[: tensor.numel()].reshape(tensor.shape)
        for key, tensor in model.state_dict().items()
    }
    toys.save_flat(model, tmp_path / "in", state)
    convert(tmp_path / "in", tmp_path / "out", tp=2, dtype=dtype)
    target = DTYPES[dtype] if dtype else eight
    for key, tensor in state.items():
        assert bits(joined(tmp_path / "out" / "tp2", key, tensor)) == bits(tensor.to(target)), key
    verify(tmp_path / "out", source=tmp_path / "in")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "itemsize"), [("F8_E4M3", 1), ("F8_E8M0", 1), ("I8", 1), ("U16", 2), ("C64", 8), ("F64", 8)]
)
def test_d4_a_planned_layer_of_any_whole_byte_dtype_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, itemsize: int
) -> None:
    """Rows and columns are cut by their bytes, whatever they mean."""
    model = toys.build(toys.install(monkeypatch), num_layers=1)
    state: dict[str, Any] = {key: toys.raw(tensor) for key, tensor in model.state_dict().items()}
    table = torch.randint(0, 256, (toys.INNER, toys.INNER, itemsize), dtype=torch.uint8)
    for leaf in ("to_q", "to_out.0"):
        state[f"blocks.0.attn.{leaf}.weight"] = (dtype, (toys.INNER, toys.INNER), table.numpy().tobytes())
    toys.save_flat(model, tmp_path / "in", state)
    convert(tmp_path / "in", tmp_path / "out", tp=2)
    for rank, held in enumerate(toys.rank_raws(tmp_path / "out" / "tp2")):
        for dim, leaf in ((0, "to_q"), (1, "to_out.0")):
            share = table.chunk(2, dim)[rank]
            expected = (dtype, tuple(share.shape[:2]), share.contiguous().numpy().tobytes())
            assert held[f"blocks.0.attn.{leaf}.weight"] == expected


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "bits_each"), [("F4", 4), ("F6_E2M3", 6)])
@pytest.mark.parametrize("leaf", ["to_q", "to_out.0"])
def test_d4_a_planned_layer_of_less_than_a_byte_is_never_written_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: str, bits_each: int,
    leaf: str,
) -> None:  # fmt: skip
    """Elements smaller than a byte cannot be cut: refused by name, not filled with zeros."""
    model = toys.build(toys.install(monkeypatch), num_layers=1)
    state: dict[str, Any] = {key: toys.raw(tensor) for key, tensor in model.state_dict().items()}
    name = f"blocks.0.attn.{leaf}.weight"
    state[name] = (dtype, (toys.INNER, toys.INNER), b"\xa5" * (toys.INNER * toys.INNER * bits_each // 8))
    toys.save_flat(model, tmp_path / "in", state)
    message = toys.refused(capsys, toys.ShardconvError, tmp_path / "in", tmp_path / "out", tp=2)
    assert name in message
    assert dtype in message


@pytest.mark.parametrize("self_contained", [False, True], ids=["shared", "self-contained"])
def test_d7_without_dtype_nothing_changes_and_nothing_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, self_contained: bool
) -> None:
    """The dtypes of the source are kept, mixed ones too, and a set is as large as its source plus headers.

    A self-contained set is larger by what every further rank holds whole, and by nothing else.
    """
    model = toys.build(toys.install(monkeypatch))
    state = model.state_dict()
    state["time_embedder.weight"] = state["time_embedder.weight"].float()
    state["blocks.0.ff.proj.weight"] = state["blocks.0.ff.proj.weight"].half()
    toys.save_flat(model, tmp_path / "in", state)
    manifest = convert(tmp_path / "in", tmp_path / "out", tp=4, self_contained=self_contained)
    assert manifest.cast_to is None
    for key, tensor in state.items():
        assert bits(joined(tmp_path / "out" / "tp4", key, tensor)) == bits(tensor), key
    files = list((tmp_path / "out" / "tp4").glob("*.safetensors"))
    replicated = sum(state[tensor.name].nbytes for tensor in manifest.tensors if tensor.cut is None)
    expected = sum(tensor.nbytes for tensor in state.values()) + 3 * replicated * self_contained
    written = sum(path.stat().st_size for path in files)
    assert expected <= written <= expected + 8192 * len(files)


def test_d9_the_manifest_records_a_cast_that_config_json_does_not_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """config.json stays as it was, whatever it says about dtypes; the manifest says what the weights now are."""
    toys.save(toys.build(toys.install(monkeypatch)), tmp_path / "in")
    toys.edit_json(tmp_path / "in" / "config.json", torch_dtype="bfloat16")
    manifest = convert(tmp_path / "in", tmp_path / "out", tp=2, dtype="fp16")
    assert (tmp_path / "out" / "config.json").read_bytes() == (tmp_path / "in" / "config.json").read_bytes()
    assert manifest.cast_to == "F16"
    document = json.loads((tmp_path / "out" / "tp2" / "shardconv.json").read_text())
    assert document["dtype"] == {"cast_to": "F16", "keep_fp32": []}
    assert {tensor["dtype"] for tensor in document["tensors"]} == {"F16"}


def test_casting_to_what_is_stored_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--dtype bf16` of a bf16 checkpoint has the same slices as no dtype at all, NaN payloads included."""
    model = toys.build(toys.install(monkeypatch))
    with torch.no_grad():
        model.blocks[0].ff.proj.weight.view(torch.int16)[0, :4] = torch.tensor([0x7FC1, 0x7F81, -1, -128]).short()
    toys.save(model, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "a", tp=2)
    convert(tmp_path / "in", tmp_path / "b", tp=2, dtype="bf16")
    assert toys.rank_raws(tmp_path / "a" / "tp2") == toys.rank_raws(tmp_path / "b" / "tp2")


def test_a_plan_error_comes_before_a_dtype_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cast does not hide a degree that does not fit."""
    toys.save(toys.build(toys.install(monkeypatch)), tmp_path / "in")
    with pytest.raises(PlanError, match="not divisible by tp degree 5"):
        convert(tmp_path / "in", tmp_path / "out", tp=5, dtype="fp16")
