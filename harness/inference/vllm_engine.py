"""vLLM as the engine: adapters by versioned name, seeds per row, log probabilities of the tempered distribution.

`VllmEngine` is what both forms share; `ColocatedEngine` runs vLLM's engine in child processes of this one, and
`harness.inference.vllm_server.ServedEngine` talks to a `vllm serve` of its own. Either holds the base model once more.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.core.errors import HarnessError, InfraError
from harness.core.redact import redact
from harness.core.types import Completion
from harness.inference.vllm_guard import Guard
from harness.inference.vllm_requests import BASE, Row, check_request, completion_of, rows_of, sampling_fields
from harness.inference.vllm_settings import EngineSettings, engine_arguments, environment

LOOK_S = 0.5
"""Seconds between two looks at vLLM's processes while a call is under way."""
STOP_S = 5.0
"""Seconds that vLLM's processes may take to end by themselves."""


class VllmEngine(ABC):
    """An engine that samples from the version of the policy it was told of last, or from the base before that.

    One thread syncs; others may sample meanwhile, from a version that they hold (`pinned`).

    Args:
        settings: what vLLM was started with.
        eos_ids: every id that ends a completion.
        log: file that vLLM's own output goes to.
    """

    def __init__(self, settings: EngineSettings, eos_ids: frozenset[int], log: Path) -> None:
        self.settings = settings
        self.eos_ids = eos_ids
        self.log = log
        self.version: str | None = None
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        max_tokens: int,
        temperature: float,
        seeds: Sequence[Sequence[int]],
        version: str | None = None,
    ) -> list[list[Completion]]:
        """Sample `n` completions for each prompt; the contract is that of `TransformersEngine.generate`.

        Args:
            version: of the policy, one that is held; None takes the newest.

        Raises:
            ConfigError: a prompt with its reply is longer than the engine's context, or the temperature too low.
            InfraError: the engine is lost, or what it answers is not what it documents.
        """
        if not prompts:
            return []
        check_request(prompts, max_tokens, temperature, self.settings.context)
        found = self._draw(rows_of(prompts, n, seeds), max_tokens, temperature, version or self.version or BASE)
        return [found[start : start + n] for start in range(0, len(found), n)]

    def sync(self, version: str, folder: Path) -> None:
        """Sample from the adapter in `folder` from now on, and forget the one before it once nobody holds it.

        Args:
            version: a name that no other adapter has had; keys and values of the prefix cache are bound to it.
            folder: an adapter in the layout that vLLM reads; it must stay as long as the version is in `live`.

        Raises:
            InfraError: vLLM does not take the adapter, or does not list it afterwards.
            ValueError: the name was used before.
        """
        if version in (self.version, BASE):
            raise ValueError(f"{version!r} names a policy already: every version needs a name of its own")
        before = self.version
        self._load(version, folder)
        with self._lock:
            self.version = version
            held = before is not None and self._users[before] > 0
        if before is not None and not held:
            self._unload(before)
        if version not in self._loaded():
            raise InfraError(f"vLLM took the adapter {version} and does not list it", f"read {self.log}")

    @contextmanager
    def pinned(self) -> Iterator[PinnedEngine]:
        """Yield an engine that goes on sampling from the newest version of now; it is kept until the block ends.

        Raises:
            InfraError: vLLM does not drop a version that was synced over meanwhile.
        """
        with self._lock:
            version = self.version or BASE
            self._users[version] += 1
        try:
            yield PinnedEngine(self, version)
        finally:
            with self._lock:
                self._users[version] -= 1
                over = version not in (BASE, self.version) and not self._users[version]
        if over:
            self._unload(version)

    @property
    def live(self) -> set[str]:
        """The versions that something may yet be sampled from."""
        with self._lock:
            return {name for name, users in self._users.items() if users} | {self.version or BASE}

    def lost(self, what: str, error: BaseException) -> InfraError:
        """Return the error of an engine that failed; an engine's failure says nothing about the hypothesis."""
        if isinstance(error, HarnessError):
            return InfraError(f"{what}: {error.message}", error.hint)
        text = redact(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
        return InfraError(f"{what}: {text}", f"read {self.log}, then launch with --resume")

    @abstractmethod
    def close(self) -> None:
        """End every process of the engine; a second call does nothing."""

    @abstractmethod
    def _draw(self, rows: Sequence[Row], max_tokens: int, temperature: float, version: str) -> list[Completion]: ...

    @abstractmethod
    def _load(self, version: str, folder: Path) -> None: ...

    @abstractmethod
    def _unload(self, version: str) -> None: ...

    @abstractmethod
    def _loaded(self) -> set[str]: ...


@dataclass(frozen=True, slots=True)
class PinnedEngine:
    """An engine that samples from one version of the policy, whatever another thread syncs meanwhile.

    Args:
        engine: that holds the version.
        version: its name.
    """

    engine: VllmEngine
    version: str

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        max_tokens: int,
        temperature: float,
        seeds: Sequence[Sequence[int]],
    ) -> list[list[Completion]]:
        """Sample `n` completions for each prompt; see `VllmEngine.generate`."""
        return self.engine.generate(prompts, n, max_tokens, temperature, seeds, self.version)


class ColocatedEngine(VllmEngine):
    """vLLM's engine in child processes of this one, on the same device.

    Raises:
        InfraError: vLLM does not start.
    """

    def __init__(self, settings: EngineSettings, eos_ids: frozenset[int], log: Path) -> None:
        super().__init__(settings, eos_ids, log)
        self._requests: dict[str, Any] = {}
        self._count = 0
        self._llm: Any = None
        self._caller = _Caller()
        self._guard: Guard | None = Guard()
        atexit.register(self.close)
        try:
            with _output_to(log), _environment(environment(settings, server=False)):
                from vllm import LLM

                _log_to(log)
                self._llm = LLM(**engine_arguments(settings), skip_tokenizer_init=True, disable_log_stats=True)
            self._guard.started()
        except Exception as error:
            self.close()
            raise self.lost("vLLM does not start", error) from error
        except BaseException:  # a signal: nothing may be left running
            self.close()
            raise

    def _draw(self, rows: Sequence[Row], max_tokens: int, temperature: float, version: str) -> list[Completion]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        prompts = [TokensPrompt(prompt_token_ids=list(row.prompt), cache_salt=version) for row in rows]
        fields = [sampling_fields(row.seed, max_tokens, temperature, self.eos_ids) for row in rows]
        sampling = [SamplingParams(**own, detokenize=False) for own in fields]
        adapter = self._requests.get(version)
        generate = partial(self._llm.generate, prompts, sampling, lora_request=adapter, use_tqdm=False)
        answers = self._call("vLLM is lost", generate)
        outputs = [answer.outputs[0] for answer in answers]
        return [
            completion_of(
                out.token_ids,
                [place[token].logprob for place, token in zip(out.logprobs, out.token_ids, strict=True)],
                out.finish_reason,
                temperature,
            )
            for out in outputs
        ]

    def _load(self, version: str, folder: Path) -> None:
        from vllm.lora.request import LoRARequest

        self._count += 1
        request = LoRARequest(version, self._count, str(folder.resolve()))
        self._call(f"vLLM does not take the adapter {version}", lambda: self._llm.llm_engine.add_lora(request))
        self._requests[version] = request

    def _unload(self, version: str) -> None:
        request = self._requests.pop(version)

        def forget() -> None:
            self._llm.llm_engine.remove_lora(request.lora_int_id)
            self._llm.reset_prefix_cache()  # nothing of it can be used again: it only takes room

        self._call(f"vLLM does not drop the adapter {version}", forget)

    def _loaded(self) -> set[str]:
        numbers = self._call("vLLM does not list its adapters", lambda: self._llm.llm_engine.list_loras())
        return {name for name, request in self._requests.items() if request.lora_int_id in numbers}

    def close(self) -> None:
        """End vLLM's processes; a second call does nothing."""
        atexit.unregister(self.close)
        self._llm = None
        guard, self._guard = self._guard, None
        if guard is not None:
            guard.end(STOP_S)  # not through vLLM's client, which may be in a call that never returns

    def _call(self, what: str, function: Callable[[], Any]) -> Any:
        """Call into vLLM, which waits for ever for an engine that was killed.

        Raises:
            InfraError: it raised, or one of its processes is gone.
        """
        try:
            return self._caller.call(function, lambda: self._guard is not None and self._guard.whole())
        except Exception as error:
            raise self.lost(what, error) from error


class _Caller:
    """Runs calls in a thread of its own, and stops waiting for one when something it needs is gone."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="vllm-calls", daemon=True).start()

    def _run(self) -> None:
        while True:
            function, future = self._calls.get()
            try:
                future.set_result(function())
            except BaseException as error:  # it is raised where the call was made
                future.set_exception(error)

    def call(self, function: Callable[[], Any], lives: Callable[[], bool]) -> Any:
        """Return what a function returns; raise what it raises, or ChildProcessError when `lives` says no."""
        future: Future[Any] = Future()
        self._calls.put((function, future))
        while True:
            try:
                return future.result(LOOK_S)
            except FutureTimeout:
                if future.done():  # the call itself timed out
                    raise
                if not lives():
                    raise ChildProcessError("one of its processes is gone") from None


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for the processes started in the block, and drop whatever was set meanwhile."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Let this process, and the children started in the block, write standard output and error to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with log.open("ab") as file:
        try:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, saved in enumerate(kept, 1):
                os.dup2(saved, number)
                os.close(saved)


def _log_to(log: Path) -> None:
    """Send what vLLM's part in this process has to say to the file of its other parts."""
    logger = logging.getLogger("vllm")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    handler = logging.FileHandler(log)
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
