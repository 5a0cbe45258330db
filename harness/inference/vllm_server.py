"""A `vllm serve` of one's own on the loopback interface, and the engine that talks to it over HTTP.

The server gets a key that only this process and it know, since adapters are loaded by path: it travels in the
environment, so that no list of processes and no log shows it.
"""

from __future__ import annotations

import atexit
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.config.schema import RunConfig
from harness.core.errors import InfraError
from harness.core.redact import redact
from harness.core.types import Completion
from harness.inference.models import LoadedModel
from harness.inference.vllm_engine import ColocatedEngine, VllmEngine
from harness.inference.vllm_guard import Guard
from harness.inference.vllm_requests import Row, completion_body, read_completion, sampling_fields
from harness.inference.vllm_settings import EngineSettings, environment, server_arguments

START_S = 900.0
"""Seconds that a server may take until it answers; large models are read from slow disks."""
ANSWER_S = 3600.0
"""Seconds that one completion may take."""
STOP_S = 10.0
"""Seconds that a server may take to end by itself; it has nothing to save."""
CONNECTIONS = 128
"""Requests of one call under way at the same time; vLLM queues what it cannot batch, this only bounds threads here."""


class ServedEngine(VllmEngine):
    """An engine that is a `vllm serve` process on 127.0.0.1, started here and ended here.

    Raises:
        InfraError: the server does not start.
    """

    def __init__(self, settings: EngineSettings, eos_ids: frozenset[int], log: Path) -> None:
        super().__init__(settings, eos_ids, log)
        self.port = _free_port()
        self._closed = False
        self._open: set[http.client.HTTPConnection] = set()
        self._key = secrets.token_urlsafe(32)
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = os.environ | environment(settings, server=True) | {"VLLM_API_KEY": self._key}
        command = [sys.executable, "-m", "harness.inference.vllm_child"]
        self._guard = Guard()
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [*command, *server_arguments(settings, self.port)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=variables,
                start_new_session=True,  # Ctrl-C in a terminal reaches this process first, which then ends the server
            )
        self._guard.started(self.process.pid)
        atexit.register(self.close)
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            status = self.process.poll()
            if status is not None:
                raise InfraError(f"vLLM does not start: it ended with {status}", f"read {self.log}")
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == http.client.OK:
                    return
            except OSError:  # nobody listens yet
                pass
            finally:
                connection.close()
            time.sleep(0.2)
        raise InfraError(f"vLLM did not answer within {START_S:g} s", f"read {self.log}")

    def _draw(self, rows: Sequence[Row], max_tokens: int, temperature: float, version: str) -> list[Completion]:
        def one(row: Row) -> Completion:
            fields = sampling_fields(row.seed, max_tokens, temperature, self.eos_ids)
            answer = self._post("/v1/completions", completion_body(row, fields, version))
            return read_completion(answer, row.prompt, temperature, version)

        # a pool of its own: the few requests of a probe do not queue behind those of a batch in another thread
        pool = ThreadPoolExecutor(min(CONNECTIONS, len(rows)), thread_name_prefix="vllm-request")
        try:
            return [future.result() for future in [pool.submit(one, row) for row in rows]]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _post(self, path: str, body: dict[str, Any] | None, method: str = "POST") -> Any:
        """Send a request and return the JSON of the answer, or its text.

        Each has a connection of its own: the server closes one that is idle, between two steps for instance.

        Raises:
            InfraError: the server is gone, or refuses.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        self._open.add(connection)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            status, text = response.status, response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise self.lost(f"the vLLM server {self._state()}", error) from error
        finally:
            self._open.discard(connection)
            connection.close()
        if status != http.client.OK:
            raise InfraError(f"vLLM refuses {path} with {status}: {redact(text)[:300]}", f"read {self.log}")
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _state(self) -> str:
        status = self.process.poll()
        return "does not answer" if status is None else f"is gone (it ended with {status})"

    def _load(self, version: str, folder: Path) -> None:
        self._post("/v1/load_lora_adapter", {"lora_name": version, "lora_path": str(folder.resolve())})

    def _unload(self, version: str) -> None:
        self._post("/v1/unload_lora_adapter", {"lora_name": version})

    def _loaded(self) -> set[str]:
        return {str(entry["id"]) for entry in self._post("/v1/models", None, "GET")["data"]}

    def close(self) -> None:
        """End the server and its children; a second call does nothing."""
        atexit.unregister(self.close)
        if self._closed:
            return
        self._closed = True
        if self.process.poll() is None:
            self._signal(signal.SIGTERM)
            for connection in list(self._open):  # another thread's: the server would wait for what it no longer answers
                with suppress(OSError, AttributeError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        self._signal(signal.SIGKILL)  # the group may hold children that outlived the server
        self.process.wait()
        self._guard.end()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)  # it leads its session, and its children are in its group


def start_engine(config: RunConfig, loaded: LoadedModel, log: Path) -> VllmEngine:
    """Start vLLM as a run's engine; `check_possible` has said that it can be.

    Args:
        config: the run's config.
        loaded: the trainer's base model; vLLM loads the same files in the same dtype.
        log: file that vLLM's own output goes to.

    Raises:
        InfraError: vLLM does not start.
    """
    settings = EngineSettings.of(config, loaded)
    if config.backend.vllm.mode == "server":
        return ServedEngine(settings, loaded.eos_ids, log)
    return ColocatedEngine(settings, loaded.eos_ids, log)


def _free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
