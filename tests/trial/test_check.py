"""`shardconv check` finds plans that are wrong and says where; `shardconv plans` prints ones that are right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks

from shardconv.cli.main import main
from shardconv.commands.plans import plan_of
from shardconv.errors import UsageError
from shardconv.plans.catalogue import cases
from shardconv.trial.check import TOLERANCE, _few_layers, check

WAN, PIXART, CHROMA = "WanTransformer3DModel", "PixArtTransformer2DModel", "ChromaTransformer2DModel"


def report(name: str, plan: dict[str, Any] | str | None = None, fault: str = "none") -> dict[str, Any]:
    """What two ranks report about `plan`."""
    import catalogue_ranks

    (found,) = ranks.values(catalogue_ranks.check, name, 2, plan, fault, n=1, group=False)
    return found


def changed(name: str, **rules: Any) -> dict[str, Any]:
    """The plan of a class with the rules of the keys that end as given replaced, or taken out with None."""
    plan = dict(plan_of(name))
    for ending, rule in rules.items():
        keys = [key for key in plan if key.endswith(ending.replace("__", "."))]
        assert keys
        for key in keys:
            plan[key] = rule
    return {key: rule for key, rule in plan.items() if rule is not None}


def is_right(found: dict[str, Any]) -> bool:
    return not found["issues"] and found["difference"] <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", [WAN, PIXART, CHROMA, "AnyFlowFARTransformer3DModel"])
def test_the_right_plan_passes(name: str) -> None:
    """The class's own plan, the same written out as a plan file, and auto-rows are right, and no layer is named."""
    for plan in (None, dict(plan_of(name)), "auto-rows"):
        found = report(name, plan)
        assert is_right(found)
        assert found["layers"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rules", "said"),
    [
        pytest.param(
            WAN,
            {"attn1.to_q": "rowwise", "attn1.to_out__0": "colwise"},
            "blocks.0.attn1.to_q: RuntimeError",
            id="styles-swapped",
        ),
        pytest.param(WAN, {"norm_q": None, "norm_k": None}, "norm_q: a norm across all heads", id="norm-left-local"),
        pytest.param(WAN, {"attn1.to_v": None}, "attn1.to_v: not in the plan", id="key-missing"),
        pytest.param(PIXART, {"ff.net.2": None}, "ff.net.0.proj: colwise, but no rowwise", id="other-key-missing"),
    ],
)
def test_a_broken_plan_that_can_be_seen_is_refused(name: str, rules: dict[str, Any], said: str) -> None:
    """Two styles swapped, a norm left local, a key missing: the report names the layer."""
    found = report(name, changed(name, **{key.replace(".", "__"): rule for key, rule in rules.items()}))
    assert not is_right(found)
    assert any(said in issue for issue in found["issues"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rules", "fault", "layer"),
    [
        pytest.param(
            CHROMA, {"proj_out": "rowwise"}, "none", "single_transformer_blocks.0.proj_out", id="packed-as-plain"
        ),
        pytest.param(PIXART, {}, "heads left whole", "transformer_blocks.0.attn1.to_out.0", id="head-count-left-whole"),
        pytest.param(WAN, {}, "norm left local", "blocks.0.attn1.norm_q", id="norm-left-local"),
    ],
)
def test_a_broken_plan_that_runs_is_found_by_its_output(
    name: str, rules: dict[str, Any], fault: str, layer: str
) -> None:
    """What only the numbers show is found, and the first layer named is the one at fault."""
    plan = changed(name, **rules) if rules else None
    if name == CHROMA and plan:
        plan = {key: rule for key, rule in plan.items() if key != "proj_out"} | {
            "single_transformer_blocks.*.proj_out": "rowwise"
        }
    found = report(name, plan, fault)
    assert not is_right(found)
    assert found["layers"][0]["layer"] == layer


@pytest.mark.slow
def test_the_command_line_and_a_folder(tmp_path: Path) -> None:
    """A component folder with many layers is checked by its own config; `--json` is one document; exit code 0."""
    config = {**cases.CASES[PIXART].config, "num_layers": 28, "attention_head_dim": 16, "cross_attention_dim": 64}
    config |= {"_class_name": PIXART, "_diffusers_version": "0.42.1"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "shardconv", "check", str(tmp_path), "--tp", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["right"] is True
    assert document["model_class"] == PIXART


@pytest.mark.slow
def test_a_wrong_plan_is_exit_code_1(tmp_path: Path) -> None:
    """The verdict is on stdout, the error on stderr."""
    (tmp_path / "plan.json").write_text(json.dumps(changed(PIXART, attn2__to_k=None)))
    command = [sys.executable, "-m", "shardconv", "check", PIXART, "--tp", "2", "--plan", str(tmp_path / "plan.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{PIXART}, tp degree 2: WRONG" in done.stdout
    assert "attn2.to_k: not in the plan" in done.stdout
    assert done.stderr == f"shardconv: {PIXART}: the plan is wrong at tp degree 2; do not use it\n"


def test_a_real_config_is_cut_to_few_layers() -> None:
    """Widths stay, layer counts become those of the small case, whether the config states them or not; lists that go
    with the layers go."""
    small = {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 8}
    config = {"_class_name": "X", "num_layers": 19, "attention_head_dim": 128, "num_refiner_layers": 40,
              "layer_types": ["a"] * 19}  # fmt: skip
    assert _few_layers(config, small) == {
        "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 128, "num_refiner_layers": 2,
    }  # fmt: skip
    small |= {"num_layers": 3, "dual_layers": (0,)}  # a list that names no layer but those left is the config's own
    for named, left in (([], []), ([2], [2]), ([0, 12], (0,))):
        assert _few_layers({"num_layers": 2, "dual_layers": named}, small) == {
            "num_layers": 2, "num_single_layers": 2, "dual_layers": left,
        }  # fmt: skip


def test_what_cannot_be_checked_is_refused() -> None:
    """A class whose inputs nobody described, and one rank: usage errors."""
    with pytest.raises(UsageError, match="no class whose inputs are known"):
        check("DiTTransformer2DModel", 2)
    with pytest.raises(UsageError, match="expected 2 ranks or more"):
        check(PIXART, 1)


@pytest.mark.slow
def test_plans_prints_a_plan_file(capsys: pytest.CaptureFixture[str]) -> None:
    """`plans CLASS` prints what `--plan` reads; a class that is not in the catalogue is a usage error."""
    from shardconv.format.plan import parse_plan

    assert main(["plans", "MochiTransformer3DModel"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert parse_plan(plan, "plan")
    assert plan["pos_frequencies"] == {"style": "parameter", "dim": 1}
    assert plan["transformer_blocks.0.ff_context.net.2"] == "rowwise"  # the last block has none
    assert main(["plans", "GPT2"]) == 2


@pytest.mark.slow
def test_plans_lists_classes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line a class: degrees, bytes, shares and needs, of a released model; the same figures as JSON."""
    from shardconv.commands import plans as listing
    from shardconv.plans.catalogue import ENTRIES

    monkeypatch.setattr(listing, "ENTRIES", {name: ENTRIES[name] for name in (PIXART, "LTXVideoTransformer3DModel")})
    assert main(["plans"]) == 0
    heading, ltx, pixart = capsys.readouterr().out.splitlines()
    assert heading.split() == ["class", "degrees", "whole", "repl.", "rank", "--lean", "rank", "needs"]
    assert ltx.split()[:2] == ["LTXVideoTransformer3DModel", "2,4,8"]
    assert ltx.endswith("local head counts, norms across heads, rope tables cut")
    assert pixart.split()[2:4] == ["1.22", "GB"]
    assert main(["plans", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["model_class"] for row in rows] == ["LTXVideoTransformer3DModel", PIXART]
    assert rows[0]["degrees"] == [1, 2, 4, 8]
    assert rows[0]["lean_rank_nbytes"] < rows[0]["rank_nbytes"] < rows[0]["nbytes"] / 6
