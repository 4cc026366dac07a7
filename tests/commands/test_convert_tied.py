"""Case K1: one parameter under two names. Both resolve after a conversion, or the conversion is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from toys import FFN, INNER, PLAN

from shardconv import CheckpointError, Manifest, PlanError, convert

HEAD, EMBED = "head.weight", "embed.weight"
BOTH = PLAN | {"head": "colwise", "embed": "colwise", "last": "rowwise"}


def _tied(model: Any) -> None:
    """`head` and `embed` share their weight; `last` takes up what they give."""
    model.head = torch.nn.Linear(INNER, FFN, bias=False)
    model.embed = torch.nn.Linear(INNER, FFN, bias=False)
    model.embed.weight = model.head.weight
    model.last = torch.nn.Linear(FFN, INNER)


def checkpoint(folder: Path, cls: type[toys.ToyTransformer], *, without: str | None = None) -> dict[str, torch.Tensor]:
    """A folder of the tied model; its tensors, both names or all but one."""
    model = toys.build(cls)
    state = {key: tensor for key, tensor in model.state_dict().items() if key != without}
    toys.save_flat(model, folder, state)
    return state


@pytest.mark.parametrize("plan", [PLAN, BOTH], ids=["replicated", "sharded"])
def test_k1_both_names_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: dict[str, object]) -> None:
    """Stored twice with equal bytes, both names stand in the set, equal to the original."""
    state = checkpoint(tmp_path / "in", toys.install(monkeypatch, _tied, _tp_plan=plan))
    manifest = convert(tmp_path / "in", tmp_path / "out", tp=2)
    assert manifest.aliases == {}
    for rank, made in enumerate(toys.rank_states(tmp_path / "out" / "tp2")):
        expected = state[HEAD].chunk(2)[rank] if plan is BOTH else state[HEAD]
        assert torch.equal(made[HEAD], expected)
        assert torch.equal(made[EMBED], expected)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [PLAN, BOTH], ids=["replicated", "sharded"])
@pytest.mark.parametrize(("stored", "dropped"), [(HEAD, EMBED), (EMBED, HEAD)])
def test_k1_one_name_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: dict[str, object], stored: str, dropped: str
) -> None:
    """Stored once, under either name, the other one is an alias in the manifest, and the bytes stand there once."""
    state = checkpoint(tmp_path / "in", toys.install(monkeypatch, _tied, _tp_plan=plan), without=dropped)
    manifest = convert(tmp_path / "in", tmp_path / "out", tp=2)
    assert manifest.aliases == {dropped: stored}
    assert Manifest.read(tmp_path / "out" / "tp2").aliases == {dropped: stored}
    for rank, made in enumerate(toys.rank_states(tmp_path / "out" / "tp2")):
        assert dropped not in made
        assert torch.equal(made[stored], state[stored].chunk(2)[rank] if plan is BOTH else state[stored])


def test_k1_a_name_missing_from_both_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When neither name is stored the tensor is missing, and the message says so."""
    cls = toys.install(monkeypatch, _tied)
    model = toys.build(cls)
    state = {key: tensor for key, tensor in model.state_dict().items() if key not in (HEAD, EMBED)}
    toys.save_flat(model, tmp_path / "in", state)
    message = toys.refused(capsys, CheckpointError, tmp_path / "in", tmp_path / "out", tp=2)
    assert f"{HEAD}: the model has it, the checkpoint does not" in message


@pytest.mark.slow
@pytest.mark.parametrize("plan", [PLAN, BOTH], ids=["replicated", "sharded"])
def test_k1_two_names_with_different_bytes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: dict[str, object]
) -> None:
    """Stored twice with different bytes, one of them would be lost at load: refused, and nothing is left behind."""
    cls = toys.install(monkeypatch, _tied, _tp_plan=plan)
    state = checkpoint(tmp_path / "in", cls)
    state[EMBED] = state[EMBED].clone()
    state[EMBED][-1, -1] += 1
    toys.save_flat(cls(), tmp_path / "in", state)
    before = toys.contents(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "in", tmp_path / "out", tp=2)
    assert str(caught.value).startswith(f"{EMBED}: the model ties it to {HEAD}") or str(caught.value).startswith(
        f"{HEAD}: the model ties it to {EMBED}"
    )
    assert "the checkpoint stores different bytes for them; save the model again" in str(caught.value)
    assert toys.contents(tmp_path) == before
    assert toys.main(toys.arguments(tmp_path / "in", tmp_path / "out", tp=2)) == 1
    assert toys.contents(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("without", [None, HEAD, EMBED])
@pytest.mark.parametrize(("planned", "other"), [("head", "embed"), ("embed", "head")])
def test_k1_a_plan_that_shards_one_name_only_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    without: str | None,
    planned: str,
    other: str,
) -> None:
    """Tied under a plan that cuts one name: refused before anything is written, whichever names are stored."""
    plan = PLAN | {planned: "colwise", "last": "rowwise"}
    checkpoint(tmp_path / "in", toys.install(monkeypatch, _tied, _tp_plan=plan), without=without)
    message = toys.refused(capsys, PlanError, tmp_path / "in", tmp_path / "out", tp=2)
    assert message == (
        f"{planned}.weight: tied to {other}.weight, which the plan does not cut in the same way; plan both or neither"
    )


def test_k1_a_tie_cut_along_different_dims_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both names planned, but one by rows and one by columns, cannot stay one parameter."""

    def change(model: Any) -> None:
        _tied(model)
        model.head = torch.nn.Linear(INNER, INNER, bias=False)
        model.embed = torch.nn.Linear(INNER, INNER, bias=False)
        model.embed.weight = model.head.weight

    cls = toys.install(monkeypatch, change, _tp_plan=PLAN | {"head": "colwise", "embed": "rowwise"})
    checkpoint(tmp_path / "in", cls)
    assert "which the plan does not cut in the same way" in toys.refused(
        capsys, PlanError, tmp_path / "in", tmp_path / "out", tp=2
    )


def test_k1_a_view_is_stored_like_any_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that is a view into another is no tie: both are stored and both come out whole and equal."""

    def change(model: Any) -> None:
        model.head = torch.nn.Linear(INNER, FFN, bias=False)
        model.part = torch.nn.Linear(INNER, FFN // 2, bias=False)
        model.part.weight = torch.nn.Parameter(model.head.weight.data[: FFN // 2])

    state = checkpoint(tmp_path / "in", toys.install(monkeypatch, change))
    convert(tmp_path / "in", tmp_path / "out", tp=2)
    for made in toys.rank_states(tmp_path / "out" / "tp2"):
        assert torch.equal(made[HEAD], state[HEAD])
        assert torch.equal(made["part.weight"], state["part.weight"])
    state.pop("part.weight")
    toys.write_weights(tmp_path / "in" / toys.SINGLE, state)
    with pytest.raises(CheckpointError, match=r"part\.weight: the model has it, the checkpoint does not"):
        convert(tmp_path / "in", tmp_path / "again", tp=2)


def test_k1_a_reused_block_is_converted_once_with_aliases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that holds one block in two places, stored once, converts; the second place is all aliases."""

    def change(model: Any) -> None:
        model.blocks[1] = model.blocks[0]

    model = toys.build(toys.install(monkeypatch, change))
    state = {key: tensor for key, tensor in model.state_dict().items() if not key.startswith("blocks.1.")}
    toys.save_flat(model, tmp_path / "in", state)
    manifest = convert(tmp_path / "in", tmp_path / "out", tp=2)
    assert manifest.aliases == {key.replace(".0.", ".1.", 1): key for key in state if key.startswith("blocks.0.")}
    for rank, made in enumerate(toys.rank_states(tmp_path / "out" / "tp2")):
        assert torch.equal(made["blocks.0.ff.proj.weight"], state["blocks.0.ff.proj.weight"].chunk(2)[rank])
