"""The planning process: the same answers as in this one, and no trace of it when it is gone or fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import toys

from shardconv.format.plan import OWN, PlanChoice, Rule, Style
from shardconv.plans import planner
from shardconv.plans.catalogue import ENTRIES, small_models
from shardconv.plans.catalogue.cases import CASES
from shardconv.plans.facts import ModelFacts, model_facts

PLAN = {"single_transformer_blocks.*.attn.to_q": Rule(Style.PACKED_COLWISE, (1, 2))}

# Asks the child about each config of a file; prints the answers and what the asking process has imported.
ASK = """
import json, sys
from shardconv.format.plan import PlanChoice
from shardconv.plans.planner import Planner
questions = json.load(open(sys.argv[1]))
with Planner(needs_torch=False) as planner:
    pid = planner._children[True].pid
    answers = [planner.facts(config, PlanChoice(kind), 2).to_json() for config, kind in questions]
    planned = [planner.has_plan("diffusers", "FluxTransformer2DModel"), planner.has_plan("diffusers", "AutoencoderKL"),
               planner.has_plan("transformers", "T5EncoderModel"), planner.has_plan("diffusers", "Nope")]
print(json.dumps([answers, planned, "torch" in sys.modules, pid]))
"""


def _config(name: str) -> dict[str, object]:
    return json.loads(json.dumps(dict(small_models.build(name).config)))


@pytest.mark.slow
def test_the_child_answers_as_this_process_does(tmp_path: Path) -> None:
    """Facts of every class of the catalogue are the same from the child, whose imports are cut short, as from full
    imports, plain and lean; the process that asks imports no torch, the child answers to the end, and none is left."""
    configs = [json.loads(json.dumps({**CASES[name].config, "_class_name": name})) for name in ENTRIES]
    questions = [(config, "own") for config in configs]
    questions += [(config, "lean") for config in configs if ENTRIES[str(config["_class_name"])].lean]
    assert {config["_class_name"] for config, _ in questions} == set(ENTRIES)
    (tmp_path / "questions.json").write_text(json.dumps(questions))
    command = [sys.executable, "-c", ASK, str(tmp_path / "questions.json")]
    answers, planned, torch_here, pid = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    for (config, kind), answer in zip(questions, answers, strict=True):
        assert ModelFacts.from_json(answer) == model_facts(config, PlanChoice(kind), 2), config["_class_name"]
    assert planned == [True, False, True, None]
    assert torch_here is False
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_the_child_imports_lightly() -> None:
    """In the child neither torch._dynamo nor transformers is loaded, although diffusers' model files ask for them."""
    code = (
        "import sys; from shardconv.plans.planner import import_lightly; import_lightly()\n"
        "import diffusers; diffusers.FluxTransformer2DModel\n"
        "print([name for name in sys.modules if name.startswith(('torch._dynamo.', 'transformers.'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("tp", [2, 3])
def test_facts_survive_the_passage(tp: int) -> None:
    """Facts are the same after JSON text: packed cuts, blocks of a plan, tied names; and a plan that does not fit."""
    config = {**_config("flux2"), "_class_name": "Flux2Transformer2DModel"}
    facts = model_facts(config, PlanChoice("given", PLAN) if tp == 3 else OWN, tp)
    assert bool(facts.plan_issues) == (tp == 3)
    assert bool(facts.cuts) == (tp == 2)
    assert ModelFacts.from_json(json.loads(json.dumps(facts.to_json()))) == facts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("child", "why"), [("/bin/false", b"exit code 1"), ("/nowhere/python", b"No such file or directory")]
)
def test_a_child_that_fails_is_done_without(child: str, why: bytes, tmp_path: Path) -> None:
    """When the child dies or does not start, the conversion goes on in this process, to the same bytes; one that debugs
    is told so, and why."""
    source = toys.save(small_models.build("flux"), tmp_path / "source")
    code = f"import sys; sys.executable = {child!r}; from shardconv.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "convert", "--tp", "2", "--quiet", str(source)]
    environment = os.environ | {"SHARDCONV_DEBUG": "1"}
    done = subprocess.run([*command, str(tmp_path / "out")], check=True, env=environment, stderr=subprocess.PIPE)
    assert b"planner: the planning child failed, so this process plans" in done.stderr
    assert why in done.stderr
    assert toys.main(["convert", "--tp", "2", "--quiet", str(source), str(tmp_path / "here")]) == 0
    assert toys.contents(tmp_path / "out") == toys.contents(tmp_path / "here")


def test_what_the_child_cannot_answer_is_answered_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question that fails in the child is asked again in this process, and why it failed is logged."""
    said: list[str] = []
    monkeypatch.setattr(planner.LOG, "debug", lambda text, *values: said.append(text % values))
    answer = 'import sys; sys.stdin.readline(); print(\'{"failed": "no such decorator"}\')'
    with planner.Planner(needs_torch=True) as asked:
        asked._children[True] = subprocess.Popen(
            [sys.executable, "-S", "-c", answer], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert asked.has_plan("diffusers", "FluxTransformer2DModel") is True
        assert asked._children[True] is None
    (why,) = said
    assert "so this process plans" in why
    assert "no such decorator" in why


@pytest.mark.slow
def test_a_fault_is_told_once(tmp_path: Path) -> None:
    """What the child cannot answer reads as it would without one: one sentence, from the command line, exit code 1."""
    source = toys.save(small_models.build("flux"), tmp_path / "source")
    toys.edit_json(source / "config.json", _class_name="Nope2DModel")
    command = [sys.executable, "-m", "shardconv", "convert", "--tp", "2", str(source), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("shardconv: Nope2DModel: expected a model class of diffusers")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_ctrl_c_while_planning_leaves_nobody(tmp_path: Path) -> None:
    """Ctrl-C, which a terminal sends to the whole group, ends both with the usual sentence and no traceback."""
    source = toys.save(small_models.build("flux"), tmp_path / "source")
    command = [sys.executable, "-m", "shardconv", "convert", "--tp", "2", str(source), str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 60
    while not (child := children.read_text().split()) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "shardconv: stopped; nothing half-done is left behind\n"
    assert process.returncode == 130
    while Path(f"/proc/{child[0]}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)  # one that was just being started ends by itself
    assert not Path(f"/proc/{child[0]}").exists()
