"""Made-up systems whose results are known, so that every figure of a report can be computed by hand."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shoal_lab.bench.model import MeasuredModel
from shoal_lab.bench.speed.cells import Grid
from shoal_lab.bench.system import About, Expected, NotMeasured, Run, Setting
from shoal_lab.bench.worker import Factory, Host

MODEL = MeasuredModel(shape="tiny")
SETTING = Setting("float32", threads=1, card_seconds=0.01)
D3 = {"method": "d3", "method_args": {"mean": 0.5}}
GRID = Grid({"d3:mean=0.5": D3}, ["hf"], batches=(1, 2), contexts=(8,), new_tokens=5, positions=(1, 4), prefills=(16,))
SPEEDS = {"full": 0.2, "d3": 0.1, "hf": 0.5}


class Fake:
    """Takes `SPEEDS` seconds per step; records every call."""

    log: list[tuple[Any, ...]] = []
    name = "shoal"

    def __init__(self, model: MeasuredModel, setting: Setting) -> None:
        self.setting = setting

    def prepare(self) -> About:
        self.log.append((self.name, "prepare"))
        return About("1.0", "made up", 1000.0)

    def speed(self, method: Mapping[str, Any] | None) -> float:
        return SPEEDS[method["method"] if method is not None else self.name]

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int, method: Mapping[str, Any] | None) -> Run:
        self.log.append((self.name, "generate", len(prompts), len(prompts[0]), new_tokens, method))
        speed, lossy = self.speed(method), method is not None and method["method"] != "full"
        times = tuple(1.0 + speed * step for step in range(new_tokens))
        return Run(times, (1, 2, 3, 9 if lossy else 4, 5)[:new_tokens], 2.0 if lossy else 4.0, 1.5 if lossy else 1.0)

    def forward(self, prompt: Sequence[int], positions: int, repeats: int) -> list[float]:
        self.log.append((self.name, "forward", positions))
        return [self.speed(None) * positions] * repeats if self.name != "shoal" else [0.1 + 0.1 * positions] * repeats

    def expect(self, context: int, rows: int, new_tokens: int, method: Mapping[str, Any] | None) -> Expected:
        return Expected(500.0, 3.0, 2 * self.speed(method))

    def close(self) -> None:
        self.log.append((self.name, "close"))


class FakeBaseline(Fake):
    name = "hf"


class Moody:
    """Fails in the way it is asked to."""

    def __init__(self, model: MeasuredModel, setting: Setting) -> None:
        self.setting = setting

    def prepare(self) -> About:
        return About(None, f"{self.setting.threads} threads", float(os.getpid()))

    def absent(self) -> None:
        raise NotMeasured("not today")

    def broken(self) -> None:
        raise KeyError("nothing there")

    def threads(self) -> int:
        import torch

        return torch.get_num_threads()

    def die(self) -> None:
        os._exit(7)

    def sleep(self) -> None:
        time.sleep(60)

    def close(self) -> None:
        pass


def failing(name: str, what: str, after: int = 0) -> type[Fake]:
    """A baseline of that name whose method `what` refuses from call number `after` on."""
    calls = 0

    def refuse(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Fake, *args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                raise NotMeasured(f"{name} cannot {what}")
            return original(self, *args)

        return call

    return type("Failing", (Fake,), {"name": name, what: refuse(getattr(Fake, what))})


class Local:
    """The interface of a `SystemProcess` without a process."""

    pid, alive = 0, True

    def __init__(self, factory: Factory, model: MeasuredModel, setting: Setting) -> None:
        self._host = Host(factory(model, setting), setting.device)

    def call(self, name: str, *args: Any, timeout: float | None = None) -> Any:
        """Call a method; there is no time limit."""
        return self._host.call(name, *args)

    def stop(self) -> None:
        """Close the system."""
        self._host.call("close")
