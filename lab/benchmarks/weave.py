"""Prompts in two waves between two processes that share a model (TokenWeave), by the delay of the line between them.

    sudo python lab/benchmarks/weave.py [--delays 0,0.5,2,5] [--sizes 128,256,512] [--layers 4] [--rounds 5]

A process with one thread runs in each of two network namespaces. Without a delay these are joined by a pair of virtual
devices; else by two TUN devices, between which a thread hands packets on after that many milliseconds (not every kernel
has `tc qdisc netem`). It takes some of the processors' time. The model has random float32 weights in the
shape of Qwen2.5-0.5B, with fewer layers and a small vocabulary. By turns each forward runs as without a weave ("off"),
in one wave with attention in tiles ("one"), and in two ("two"); medians count. A timeline of one more forward in two
waves tells in how much of the time with a sum under way process 0 computed: that much was hidden. "on" is what
`Weave.tune` decides there, which is what a server does when it starts.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import script
import shoal
from shoal.depth.plan import DepthPlan
from shoal.engine.loading import ranks
from shoal.model import weave as weaves
from shoal.model.runner import SequenceChunk

SPACES, DEVICES, HOSTS = ("shoal-a", "shoal-b"), ("weave-a", "weave-b"), ("10.211.7.1", "10.211.7.2")
WIDTH, MTU = 896, 65_000
MODES = ("off", "one", "two")
LEAST = 0.98
"""Speed over that without a weave below which a size that is on would be a fault."""


def main() -> int:
    """Measure at every delay and write, or be one of the processes."""
    parser = script.parser(__doc__)
    parser.add_argument("--delays", default="0,0.5,2,5", help="milliseconds")
    parser.add_argument("--sizes", default="128,256,512")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--member", help="folder of the model, for one of the two processes")
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    if args.member:
        return member(Path(args.member), sizes, args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args.layers)
        runs = []
        for delay in map(float, args.delays.split(",")):
            with joined(delay):
                runs.append({"delay_ms": delay, **measured(Path(folder), args)})
                print(json.dumps(runs[-1]), file=sys.stderr, flush=True)
    slow = [(run["delay_ms"], one["tokens"]) for run in runs for one in run["sizes"]
            if one["on"] and one["gain"] < LEAST]
    script.publish(__file__, sys.argv[1:], {"runs": runs, "slower_though_on": slow}, args.json)
    return int(bool(slow))


def make_model(folder: Path, layers: int) -> None:
    """Random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(vocab_size=1024, hidden_size=WIDTH, intermediate_size=4864, num_hidden_layers=layers,
                         num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=4096)
    Qwen2ForCausalLM(config).save_pretrained(folder)


@contextmanager
def joined(delay: float) -> Iterator[None]:
    """Two namespaces and the line between them."""
    _clear()
    ends = list[int]()
    try:
        for space in SPACES:
            _run("ip", "netns", "add", space)
        if delay:
            ends = [tun(device) for device in DEVICES]
        else:
            _run("ip", "link", "add", DEVICES[0], "type", "veth", "peer", "name", DEVICES[1])
        for space, device, host in zip(SPACES, DEVICES, HOSTS, strict=True):
            _run("ip", "link", "set", device, "netns", space)
            inside = ("ip", "netns", "exec", space, "ip")
            _run(*inside, "addr", "add", f"{host}/24", "dev", device)
            _run(*inside, "link", "set", device, "up", "mtu", str(MTU), "txqueuelen", "10000")
            _run(*inside, "link", "set", "lo", "up")
        yield from _relayed(ends, delay / 1000)
    finally:
        _clear()


def _relayed(ends: list[int], delay: float) -> Iterator[None]:
    """Hand packets on meanwhile, if there are two ends."""
    over = threading.Event()
    relays = [threading.Thread(target=hand_on, args=(*ends, delay, over))] if ends else []
    for relay in relays:
        relay.start()
    try:
        yield
    finally:
        over.set()
        for relay in relays:
            relay.join()


def tun(name: str) -> int:
    """A new TUN device: what is written to it arrives there, and what is sent there is read from it."""
    end = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(end, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x1001))  # TUNSETIFF, IFF_TUN | IFF_NO_PI
    return end


def hand_on(one: int, other: int, delay: float, over: threading.Event) -> None:
    """Hand packets on between two devices, each after some seconds."""
    waiting = deque[tuple[float, int, bytes]]()
    while not over.is_set():
        left = waiting[0][0] - time.monotonic() if waiting else 0.1
        for end in select.select([one, other], [], [], max(0.0, left))[0]:
            packet = os.read(end, 1 << 16)
            waiting.append((time.monotonic() + delay, other if end == one else one, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(*waiting.popleft()[1:])
    for end in (one, other):
        os.close(end)


def _clear() -> None:
    for space in SPACES:
        subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def measured(folder: Path, args: Any) -> dict[str, Any]:
    """What process 0 says."""
    members = []
    for number, (space, device) in enumerate(zip(SPACES, DEVICES, strict=True)):
        own = {**os.environ, "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
               "MASTER_ADDR": HOSTS[0], "MASTER_PORT": "29577", "GLOO_SOCKET_IFNAME": device}
        words = ["ip", "netns", "exec", space, sys.executable, __file__, "--member", str(folder), "--sizes", args.sizes,
                 "--rounds", str(args.rounds)]
        members.append(subprocess.Popen(words, env=own, stdout=subprocess.PIPE, text=True))
    said = [one.communicate(timeout=460)[0] for one in members]
    if any(one.returncode for one in members):
        raise RuntimeError("a process has failed")
    found: dict[str, Any] = json.loads(said[0].splitlines()[-1])
    return found


def member(folder: Path, sizes: list[int], rounds: int) -> int:
    """Measure as one of the two processes; the first one prints."""
    torch.set_num_threads(1)
    engine = shoal.load(str(folder), dtype="float32", device="cpu", tensor_parallel=True)
    runner: Any = engine.runner
    plan, cache = DepthPlan.full(runner.num_layers), runner.new_cache(1)

    def forward(size: int) -> torch.Tensor:
        chunk = SequenceChunk(0, [token % 1000 for token in range(size)], [0] * size, plan, wanted=size)
        logits: torch.Tensor = runner.forward([chunk], cache)
        cache.rollback(0)
        return logits

    alone = sum_seconds(sizes[-1], WIDTH)
    weave = weaves.weave_of(runner.parts.layers)
    assert weave is not None
    found = [measure(runner, weave, forward, size, rounds) for size in sizes]
    runner.weave = weave
    weave.sizes = {}
    weave.tune(forward, max(sizes), engine.ranks.agree)
    for one in found:
        one["on"] = weave.sizes[one["tokens"]]
    if engine.ranks.rank == 0:
        print(json.dumps({"sum_seconds": alone, "norms_share": norms(runner, forward, sizes[-1]), "sizes": found}))
    else:
        norms(runner, forward, sizes[-1])
    ranks.leave()
    return 0


def sum_seconds(tokens: int, width: int) -> float:
    """Seconds of a sum of that many rows, with nothing beside it."""
    part, seconds = torch.ones(tokens, width), []
    for _ in range(7):
        began = time.perf_counter()
        dist.all_reduce(part)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def measure(
    runner: Any, weave: Any, forward: Callable[[int], torch.Tensor], size: int, rounds: int
) -> dict[str, Any]:
    """Seconds of a forward in each way, and what a timeline shows."""
    seconds, logits = {mode: list[float]() for mode in MODES}, {}
    for turn in range(rounds + 1):
        for mode in MODES:
            runner.weave = None if mode == "off" else weave
            weave.sizes = {size: mode == "two"}
            began = time.perf_counter()
            logits[mode] = forward(size)
            if turn:
                seconds[mode].append(time.perf_counter() - began)
    weave.spans = []
    began = time.perf_counter()
    forward(size)
    whole, spans, weave.spans = time.perf_counter() - began, weave.spans, None
    time.sleep(0.05)  # the last callbacks
    middle = {mode: median(own) for mode, own in seconds.items()}
    return {
        "tokens": size, "seconds": seconds, "medians": middle, "gain": middle["off"] / middle["two"],
        "gain_over_one": middle["one"] / middle["two"], "equal": torch.equal(logits["one"], logits["two"]),
        "seconds_of_timeline": whole, "computing_share": computing_share(spans),
        "timeline": [[span.wave, span.what, round(span.first - began, 5), round(span.last - began, 5)]
                     for span in spans[:24]],
    }


def computing_share(spans: Sequence[weaves.Span]) -> float:
    """The share of the time with a sum under way during which the process computed."""
    ends = sorted({end for span in spans for end in (span.first, span.last)})
    both = [(last - first, {span.what for span in spans if span.first <= first and last <= span.last})
            for first, last in pairwise(ends)]
    under_way = sum(seconds for seconds, what in both if "send" in what)
    return sum(seconds for seconds, what in both if {"send", "compute"} <= what) / max(under_way, 1e-9)


def norms(runner: Any, forward: Callable[[int], torch.Tensor], size: int) -> float:
    """The share of a forward that its norms take, which each process computes of all tokens."""
    taken, began = 0.0, 0.0

    def before(*_: Any) -> None:
        nonlocal began
        began = time.perf_counter()

    def after(*_: Any) -> None:
        nonlocal taken
        taken += time.perf_counter() - began

    modules = [module for layer in runner.parts.layers for module in layer.modules() if "Norm" in type(module).__name__]
    hooks = [hook for one in modules
             for hook in (one.register_forward_pre_hook(before), one.register_forward_hook(after))]
    runner.weave, start = None, time.perf_counter()
    forward(size)
    whole = time.perf_counter() - start
    for hook in hooks:
        hook.remove()
    return taken / whole


if __name__ == "__main__":
    sys.exit(main())
