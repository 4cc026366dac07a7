"""Questions about diffusers' models, answered by a process of its own where that saves time and memory.

Importing torch and diffusers takes longer than converting a small model and more memory than converting any. Where they
are not imported yet, a child imports them, leaves out what a skeleton never uses, and is gone before bytes move.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from ..format.plan import PlanChoice
from ..system.children import how_ended
from .catalogue import ENTRIES
from .choice import has_plan
from .facts import ModelFacts, model_facts

LOG = logging.getLogger("shardconv.planner")


class Planner:
    """Answers as `models.has_plan` and `model_facts` do. A context manager: the child lasts as long as the block.

    A child that fails, in whatever way, is done without: the question is asked again in this process, which meets the
    same fault and tells it. Why it failed is logged (`SHARDCONV_DEBUG=1` shows it).
    """

    def __init__(self, needs_torch: bool) -> None:
        """`needs_torch`: this process will import torch in any case, so a child would gain nothing."""
        self._wants_children = not needs_torch and "torch" not in sys.modules and bool(sys.executable)
        self._children: dict[bool, subprocess.Popen[bytes] | None] = {}  # by whether its imports are cut short
        self._child_for(light=True)

    def _child_for(self, light: bool) -> subprocess.Popen[bytes] | None:
        """The child for diffusers' models, whose imports are cut short, or the one for those of transformers, which is
        started when somebody asks for it; None when this process answers."""
        if light not in self._children:
            self._children[light] = None
            if self._wants_children:
                program = (
                    f"import sys; sys.path = {sys.path!r}; from shardconv.plans.planner import serve; serve({light})"
                )
                try:
                    self._children[light] = subprocess.Popen(
                        [sys.executable, "-c", f"{program}; serve({light})"],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        start_new_session=True,  # Ctrl-C is for this process, which then ends the child
                    )
                except OSError as error:
                    self._do_without(error)
        return self._children[light]

    def start_for(self, names: Iterable[str]) -> None:
        """Have the children that models of these classes need import side by side."""
        for name in names:
            self._child_for(_is_light(name))

    def has_plan(self, library: str, name: str, config: Mapping[str, Any] | None = None) -> bool | None:
        """See `models.has_plan`."""
        answer = self._ask({"library": library, "name": name, "config": config}, light=True)
        return has_plan(library, name, config) if answer is None else answer["has_plan"]

    def facts(self, config: Mapping[str, Any], choice: PlanChoice, tp: int) -> ModelFacts:
        """See `model_facts`."""
        light = _is_light(str(config.get("_class_name")))
        answer = self._ask({"config": config, "choice": choice.to_json(), "tp": tp}, light)
        return model_facts(config, choice, tp) if answer is None else ModelFacts.from_json(answer)

    def _ask(self, question: Mapping[str, Any], light: bool) -> Any:
        child = self._child_for(light)
        if child is None:
            return None
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(question).encode() + b"\n")
            child.stdin.flush()
            answer = json.loads(child.stdout.readline())
        except (OSError, ValueError) as error:
            return self._do_without(_how_ended(child) or error)
        return self._do_without(answer["failed"]) if "failed" in answer else answer

    def _do_without(self, why: object) -> None:
        """From now on questions are answered here."""
        self._end_children()
        self._wants_children = False
        LOG.debug("the planning child failed, so this process plans, with full imports: %s", why)

    def _end_children(self) -> None:
        for light, child in self._children.items():
            if child is not None:
                child.kill()  # it holds nothing that would need an orderly end
                with contextlib.suppress(BrokenPipeError), child:
                    pass
                self._children[light] = None

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *raised: object) -> None:
        self._end_children()


def _is_light(name: str) -> bool:
    """Whether a model class is of a library that the light child has."""
    return name not in ENTRIES or ENTRIES[name].library == "diffusers"


def _how_ended(child: subprocess.Popen[bytes]) -> str | None:
    """How a child that does not answer has ended; None when it has not."""
    try:
        return how_ended(child.wait(timeout=1))
    except subprocess.TimeoutExpired:
        return None


def serve(light: bool = True) -> None:
    """The child: a question a line on stdin, an answer a line on stdout, or why there is none."""
    gc.disable()
    with os.fdopen(os.dup(1), "wb", buffering=0) as answers, os.fdopen(0, "rb") as questions:
        os.dup2(2, 1)  # whatever a library prints is talk
        if light:
            import_lightly()
        for line in questions:
            try:
                answer = _answer(json.loads(line))
            except Exception:  # of whatever kind: the parent asks itself, and meets it again
                answer = {"failed": traceback.format_exc()}
            answers.write(json.dumps(answer).encode() + b"\n")


def _answer(question: Mapping[str, Any]) -> dict[str, Any]:
    if "name" in question:
        return {"has_plan": has_plan(question["library"], question["name"], question["config"])}
    choice = PlanChoice.from_json(question["choice"])
    return model_facts(question["config"], choice, question["tp"]).to_json()


def import_lightly() -> None:
    """Leave out, from now on, the half of diffusers' imports that only compiling and text encoders need.

    Its model files take decorators from `torch._dynamo` and base classes from transformers, both slow to import. Only
    for a process that builds skeletons and nothing else.
    """
    sys.modules["torch._dynamo"] = _Decorators("torch._dynamo")
    sys.modules["transformers"] = None  # type: ignore[assignment]  # as if it were not installed


class _Decorators(ModuleType):
    """A module whose every function leaves what it decorates as it is."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda function=None, *_, **__: function if function is not None else (lambda decorated: decorated)
