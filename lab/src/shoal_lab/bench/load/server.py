"""Server processes: start them, hold them still while others take their turn, end them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from shoal_lab.bench.load.http import Address, Failed, get
from shoal_lab.bench.system import NotMeasured, Setting

_PLACE = 2048
"""Positions per request in llama.cpp's server, whose context is divided among its slots."""


class Server:
    """A running server.

    Args:
        argv: its command line.
        port: where it listens once it is ready.
        environment: added to ours.
        minutes: time limit for getting ready.

    Raises:
        NotMeasured: it ended or was not ready in time; the message holds the last line of its log.
    """

    def __init__(
        self, argv: Sequence[str], port: int, environment: Mapping[str, str] | None = None, minutes: float = 5.0
    ) -> None:
        self.argv, self.url = list(argv), f"http://127.0.0.1:{port}"
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the server
        self._process = subprocess.Popen(
            self.argv, stdout=self._log, stderr=self._log, env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            self._wait(port, time.monotonic() + 60 * minutes)
        except BaseException:
            self.stop()
            raise

    def _wait(self, port: int, until: float) -> None:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                if self._process.poll() is not None:
                    raise NotMeasured(f"its server ended with code {self._process.returncode}: {self.said()}") from None
                if time.monotonic() > until:
                    raise NotMeasured(f"its server was not ready in time: {self.said()}") from None
                time.sleep(0.1)

    def until_healthy(self, minutes: float = 5.0) -> None:
        """Wait until GET /health succeeds, for a server that listens while it loads; NotMeasured at the time limit."""
        until = time.monotonic() + 60 * minutes
        while True:
            try:
                get(Address(self.url), "/health")
                return
            except Failed as failure:
                if not self.alive or time.monotonic() > until:
                    raise NotMeasured(f"its server did not get ready ({failure}): {self.said()}") from None
                time.sleep(0.1)

    def said(self) -> str:
        """The last line of its log."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it wrote nothing"

    @property
    def alive(self) -> bool:
        """Whether it is running."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def hold(self) -> None:
        """Suspend it, so that it takes no processor from others."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it after `hold`."""
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """End it, politely first."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def _signal(self, number: int) -> None:
        if self.alive:
            os.killpg(self._process.pid, number)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def shoal_argv(model: Path, port: int, setting: Setting, more: Sequence[str] = ()) -> list[str]:
    """The command line of Shoal's own server."""
    quantised = [] if setting.quant is None else ["--quant", setting.quant]
    start = [sys.executable, "-m", "shoal", "serve", "--model", str(model), "--served-model-name", str(model)]
    return [*start, "--port", str(port), "--dtype", setting.dtype, "--device", setting.device, *quantised,
            "--timeout", "0", *more]


def transformers_argv(model: Path, port: int, setting: Setting) -> list[str]:
    """The command line of transformers' server with its continuous batching."""
    start = [sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve", str(model)]
    return [*start, "--continuous-batching", "--port", str(port), "--dtype", setting.dtype,
            "--device", setting.device, "--host", "127.0.0.1"]


def llama_argv(binary: str, model: Path, port: int, setting: Setting, rows: int) -> list[str]:
    """The command line of llama.cpp's own server, with a slot per request and no prompt cache."""
    threads = str(setting.threads)
    return [binary, "-m", str(model), "-a", str(model), "--host", "127.0.0.1", "--port", str(port), "-np", str(rows),
            "-c", str(rows * _PLACE), "-t", threads, "-tb", threads, "--no-cache-prompt", "--cache-ram", "0"]
