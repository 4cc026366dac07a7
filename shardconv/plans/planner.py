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
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ..format.plan import PlanChoice
from ..system.children import how_ended
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
        self._child: subprocess.Popen[bytes] | None = None
        if not needs_torch and "torch" not in sys.modules and sys.executable:
            program = f"import sys; sys.path = {sys.path!r}; from shardconv.plans.planner import serve; serve()"
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-c", program],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is for this process, which then ends the child
                )
            except OSError as error:
                self._do_without(error)

    def has_plan(self, library: str, name: str, config: Mapping[str, Any] | None = None) -> bool | None:
        """See `models.has_plan`."""
        answer = self._ask({"library": library, "name": name, "config": config})
        return has_plan(library, name, config) if answer is None else answer["has_plan"]

    def facts(self, config: Mapping[str, Any], choice: PlanChoice, tp: int) -> ModelFacts:
        """See `model_facts`."""
        answer = self._ask({"config": config, "choice": choice.to_json(), "tp": tp})
        return model_facts(config, choice, tp) if answer is None else ModelFacts.from_json(answer)

    def _ask(self, question: Mapping[str, Any]) -> Any:
        if self._child is None:
            return None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(question).encode() + b"\n")
            self._child.stdin.flush()
            answer = json.loads(self._child.stdout.readline())
        except (OSError, ValueError) as error:
            return self._do_without(_how_ended(self._child) or error)
        return self._do_without(answer["failed"]) if "failed" in answer else answer

    def _do_without(self, why: object) -> None:
        """From now on questions are answered here."""
        self._end_child()
        LOG.debug("the planning child failed, so this process plans, with full imports: %s", why)

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.kill()  # it holds nothing that would need an orderly end
            with contextlib.suppress(BrokenPipeError), self._child:
                pass
            self._child = None

    def __enter__(self) -> Planner:
        return self

    def __exit__(self, *raised: object) -> None:
        self._end_child()


def _how_ended(child: subprocess.Popen[bytes]) -> str | None:
    """How a child that does not answer has ended; None when it has not."""
    try:
        return how_ended(child.wait(timeout=1))
    except subprocess.TimeoutExpired:
        return None


def serve() -> None:
    """The child: a question a line on stdin, an answer a line on stdout, or why there is none."""
    gc.disable()
    with os.fdopen(os.dup(1), "wb", buffering=0) as answers, os.fdopen(0, "rb") as questions:
        os.dup2(2, 1)  # whatever a library prints is talk
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
