"""Run a function on N real processes that share a gloo group, without paying for N imports of torch and diffusers.

One helper process imports them once (seconds) and then forks fresh ranks for every job (milliseconds), so that jobs
cannot disturb each other. A rank that hangs or dies fails the test with what it printed; nothing survives it.

    def double(x):                            # at the top of a test module: a job finds it by name
        return x * (2 + dist.get_rank())

    assert ranks.values(double, 10, n=2) == [20, 30]
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 60  # for one job, start to end
_PRELOADED = ("torch", "torch.distributed", "torch.distributed.tensor", "diffusers", "loader.load", "loader.pipeline")
_PRELOADED_CLASSES = (
    "FluxTransformer2DModel", "Flux2Transformer2DModel", "QwenImageTransformer2DModel", "QwenImage21Transformer2DModel",
    "MiniMaxH3Transformer3DModel", "ModelMixin",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What one rank gave: a value, or the error it ended with."""

    value: Any = None
    error: str | None = None  # class name of the exception; "killed" when the process died
    text: str = ""  # of the exception
    issues: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()  # class names the exception inherits from
    seconds: float = 0.0  # in the function
    trace: str = field(default="", repr=False)


def run(
    function: Callable[..., Any],
    *args: Any,
    n: int = 2,
    group: bool = True,
    env: Mapping[str, str] | None = None,
    timeout: float = TIMEOUT_S,
) -> list[Outcome]:
    """Call `function(*args)` on `n` ranks and return what each gave, by rank.

    `group=False` leaves out `init_process_group` (RANK and WORLD_SIZE are set as torchrun does); `env` is added to each
    rank's environment. The test fails when the ranks are not done after `timeout` seconds.
    """
    global _zygote
    if _zygote is None:
        _zygote = _Zygote()
    folder = Path(tempfile.mkdtemp(prefix="shardconv-ranks-"))
    try:
        call = pickle.dumps((function, args))
        job = _Job(str(folder), function.__module__, call, n, group, dict(env or {}), timeout)
        statuses = _zygote.run(job)
        if statuses is None:
            logs = "\n".join(f"rank {rank}: {_log(folder, rank)}" for rank in range(n))
            pytest.fail(f"{function.__name__}: not done after {timeout} s\n{logs}")
        return [_outcome(folder, rank, status) for rank, status in enumerate(statuses)]
    finally:
        shutil.rmtree(folder)


def values(function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """As `run`, for ranks that must succeed: what each returned, by rank."""
    outcomes = run(function, *args, **options)
    failed = [f"rank {rank}: {each.trace or each.text}" for rank, each in enumerate(outcomes) if each.error]
    if failed:
        pytest.fail(f"{function.__name__}:\n" + "\n".join(failed))
    return [each.value for each in outcomes]


@dataclass(frozen=True)
class _Job:
    folder: str
    module: str
    call: bytes  # pickled function and arguments
    n: int
    group: bool
    env: dict[str, str]
    timeout: float


def _log(folder: Path, rank: int) -> str:
    path = folder / f"rank-{rank}.log"
    return path.read_text(errors="replace")[-3000:] if path.exists() else "(nothing printed)"


def _outcome(folder: Path, rank: int, status: int) -> Outcome:
    result = folder / f"rank-{rank}.pickle"
    if result.exists():
        return pickle.loads(result.read_bytes())
    code = os.waitstatus_to_exitcode(status)
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return Outcome(error="killed", text=f"{how}: {_log(folder, rank)}")


class _Zygote:
    """The helper process, seen from pytest."""

    def __init__(self) -> None:
        self._connection, other = Pipe()
        paths = filter(None, sys.path)  # with the folder of every test module, which are all imported by now
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import ranks; ranks._serve({other.fileno()})"],
            stdin=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
            start_new_session=True,
            env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo"},
        )
        other.close()

    def run(self, job: _Job) -> list[int] | None:
        """Wait statuses by rank; None when the time was up, the ranks are killed then."""
        try:
            self._connection.send_bytes(pickle.dumps(job))
            pids = pickle.loads(self._connection.recv_bytes())
            in_time = self._connection.poll(job.timeout)
            if not in_time:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            statuses = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            self.close()
            raise RuntimeError("the helper process of the ranks died; its stderr says why") from error
        if isinstance(statuses, str):
            pytest.fail(f"{job.module} could not be imported for the ranks:\n{statuses}")
        return statuses if in_time else None

    def close(self) -> None:
        global _zygote
        _zygote = None
        self._connection.close()  # the helper ends when its end of the pipe does
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


_zygote: _Zygote | None = None


@atexit.register
def _close() -> None:
    if _zygote is not None:
        _zygote.close()


def _serve(fd: int) -> None:
    """The helper process: fork ranks for each job until the pipe closes."""
    connection = Connection(fd)
    for name in _PRELOADED:
        importlib.import_module(name)
    for name in _PRELOADED_CLASSES:
        getattr(sys.modules["diffusers"], name)
    gc.collect()
    gc.freeze()  # ranks neither walk through nor copy what lives to the end
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            importlib.import_module(job.module)
        except BaseException:  # reported to pytest
            connection.send_bytes(pickle.dumps([]))
            connection.send_bytes(pickle.dumps(traceback.format_exc()))
            continue
        pids = [_fork(job, rank, connection) for rank in range(job.n)]
        connection.send_bytes(pickle.dumps(pids))
        connection.send_bytes(pickle.dumps([os.waitpid(pid, 0)[1] for pid in pids]))


def _fork(job: _Job, rank: int, connection: Connection) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        connection.close()
        _run_rank(job, rank)
    except BaseException:  # a child must never return into the loop of its parent
        traceback.print_exc()
        os._exit(70)
    os._exit(0)


def _run_rank(job: _Job, rank: int) -> None:
    import torch

    folder = Path(job.folder)
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(job.timeout * 0.9, exit=False)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.n), LOCAL_WORLD_SIZE=str(job.n))
    os.environ.update(job.env)
    if job.group:
        _init_group(job, rank)
    start = time.perf_counter()
    try:
        function, args = pickle.loads(job.call)
        value = function(*args)
        outcome = Outcome(value, seconds=time.perf_counter() - start)
    except Exception as error:
        outcome = Outcome(
            None,
            type(error).__name__,
            str(error),
            tuple(getattr(error, "issues", ())),
            tuple(base.__name__ for base in type(error).__mro__),
            time.perf_counter() - start,
            traceback.format_exc(),
        )
    part = folder / f"rank-{rank}.part"
    part.write_bytes(pickle.dumps(outcome))
    part.rename(folder / f"rank-{rank}.pickle")
    if job.group:
        torch.distributed.destroy_process_group()


def _init_group(job: _Job, rank: int) -> None:
    from datetime import timedelta

    import torch.distributed as dist

    store = dist.FileStore(str(Path(job.folder, "store")), job.n)
    limit = timedelta(seconds=max(1.0, job.timeout * 0.8))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.n, timeout=limit)
    store.set(f"ready {rank}", "")
    store.wait([f"ready {each}" for each in range(job.n)], limit)  # or a quick rank could leave while others connect


def same(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of every rank, when all of them ended with the same error."""
    assert {(each.error, each.text) for each in outcomes} == {(outcomes[0].error, outcomes[0].text)}
    assert outcomes[0].error is not None, "every rank succeeded"
    return outcomes[0]
