"""One process per system, with its own memory and threads: it can crash or be stopped without the others.

Parent and child talk through a pipe: (method name, arguments) one way, ("ok" | "absent" | "error", value) back.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.process import peak_memory, reset_peak_memory
from shoal_lab.bench.system import NotMeasured, Setting, System

Factory = Callable[[MeasuredModel, Setting], System]


class SystemProcess:
    """A system in a process of its own.

    Args:
        factory: makes the system; must be importable by name.
        model: the model to run.
        setting: how to run it.
    """

    def __init__(self, factory: Factory, model: MeasuredModel, setting: Setting) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, factory, model, setting), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid or 0

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.is_alive()

    def call(self, name: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a method of the system and wait for what it returns.

        Raises:
            NotMeasured: the system says so, has ended, or did not answer within `timeout` seconds.
            RuntimeError: the method failed.
        """
        try:
            self._pipe.send((name, args))
            if not self._pipe.poll(timeout):
                self.stop()
                raise NotMeasured(f"{name} took longer than {timeout:.0f} s")
            kind, value = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self._process.join(5)
            raise NotMeasured(f"its process ended in {name} with code {self._process.exitcode}") from error
        if kind == "absent":
            raise NotMeasured(value)
        if kind == "error":
            raise RuntimeError(value)
        return value

    def stop(self) -> None:
        """End the process, politely first."""
        if self._process.is_alive():
            try:
                self._pipe.send(("close", ()))
                self._process.join(2)
            except OSError:
                pass
            if self._process.is_alive():
                self._process.kill()
                self._process.join()
        self._pipe.close()


class Host:
    """Answers calls to a system, and calls about the process that holds it."""

    def __init__(self, system: System, device: str) -> None:
        self._system, self._device = system, device

    def call(self, name: str, *args: Any) -> Any:
        """Call a method of the system, or one of this class."""
        if name == "memory":
            apart = getattr(self._system, "apart", None)  # where another process holds the weights
            return peak_memory(self._device) if apart is None else apart()
        if name == "reset_memory":
            return reset_peak_memory(self._device)
        if not hasattr(self._system, name):
            return None
        return getattr(self._system, name)(*args)


def _serve(pipe: Connection, factory: Factory, model: MeasuredModel, setting: Setting) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupted parent ends its workers itself
    torch.set_num_threads(setting.threads)
    host: Host | None = None
    name = ""
    while name != "close":
        try:
            name, args = pipe.recv()
        except EOFError:
            name, args = "close", ()
        try:
            host = host or Host(factory(model, setting), setting.device)
            answer = ("ok", host.call(name, *args))
        except NotMeasured as reason:
            answer = ("absent", str(reason))
        except Exception:  # whatever a baseline raises is for the parent to report
            answer = ("error", traceback.format_exc())
        try:
            pipe.send(answer)
        except OSError:
            return
