"""The kernels as another machine runs them: every call of the library goes to a program under qemu, or under valgrind.

A plugin of pytest, for the tests of the kernels as they are; test_native_arm.py and test_native_valgrind.py start it.

A call takes along the memory that it reaches: structures, and the tensors whose addresses stand in them or among the
arguments. It comes back as the library left it. Between its pieces lies junk, and what is written there is noticed.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from array import array
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.model.packed.native import build, library
from shoal.model.packed.native.library import (
    BatchStruct,
    ChainStruct,
    ExpertsStruct,
    LayerStruct,
    Model,
    RecurrenceStruct,
    Weight,
)

COMMAND = "SHOAL_TEST_EMULATOR"
"""The environment variable that names the program: the words of a command, one a line."""
KERNEL_TESTS = Path(__file__).parent / "model" / "packed"
WITHOUT_LOADING = "not openmp and not reason and not wish and not narrower and not folder and not at_once"
"""Of test_native.py what does not ask how the library is loaded."""
_ARGUMENTS, _NAME = 10, 32  # as in emulated_calls.c
_LINE = 64
_JUNK = 0xA7
_data_ptr = torch.Tensor.data_ptr
_tensors: dict[int, int] = {}
"""Bytes at the addresses of tensors that somebody asked for. Memory that was freed since is asked for anew."""


def built(folder: Path, compiler: str, vectors: str, *more: str) -> list[str]:
    """The library and what answers calls of it (emulated_calls.c): the words of a command."""
    target, program = folder / "libshoal.so", folder / "calls"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_NATIVE_FLAGS", " ".join(more))
        build._compile(compiler, vectors, "generic", ["-Wl,--no-undefined", "-fopenmp"], target)
    options = ["-std=gnu11", "-O1", "-Wall", "-Werror", *more]
    subprocess.run([compiler, *options, str(KERNEL_TESTS / "emulated_calls.c"), "-o", str(program), "-ldl"], check=True)
    return [str(program), str(target)]


def passes(file: str, some: str, command: list[str]) -> None:
    """Run the kernels' own tests of a file under the emulator."""
    environment = {**os.environ, COMMAND: "\n".join(command), "PYTHONPATH": ":".join(sys.path)}
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "emulated", "-k", some, str(KERNEL_TESTS / file)]
    done = subprocess.run([sys.executable, "-m", "pytest", *options], env=environment, capture_output=True, text=True)
    told = (done.stdout + done.stderr)[-4000:]
    assert done.returncode == 0 and " passed" in done.stdout, told
    assert re.search(r"^[1-9]\d* calls were emulated$", done.stdout, re.MULTILINE), told


def pytest_configure(config: pytest.Config) -> None:
    torch.Tensor.data_ptr = noted  # type: ignore[method-assign]
    emulated = Emulated(os.environ[COMMAND].splitlines())
    library._open = lambda: (emulated, "")  # type: ignore[assignment,return-value]
    config.add_cleanup(emulated.close)


def noted(tensor: torch.Tensor) -> int:
    """In the place of `data_ptr`: remembers how much lies there."""
    address = _data_ptr(tensor)
    _tensors[address] = tensor.numel() * tensor.element_size()
    return address


class Emulated:
    """In the place of the library that ctypes would load."""

    def __init__(self, command: list[str]) -> None:
        self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, name)

    def close(self) -> None:
        """End the program, and tell how much it did."""
        self._program.communicate()
        print(f"\n{self._calls} calls were emulated")

    def shoal_vectors(self) -> bytes:
        """A text that the program has is at no address here."""
        return b"emulated"

    def shoal_advise(self, *arguments: int) -> None:
        """Pages are the program's own."""

    def _call(self, name: str, *arguments: Any) -> Any:
        self._calls += 1
        block = Block(arguments)
        result, after = self.ask(name, block)
        block.write_back(after)
        kind = library._SIGNATURES[name][0]
        return None if kind is None else kind(result).value

    def ask(self, name: str, block: Block) -> tuple[int, bytearray]:
        """The result of a call, in a register, and the block after it."""
        source, target = self._program.stdout, self._program.stdin
        assert source is not None and target is not None
        head = array("q", [len(block.sent), len(block.places), len(block.gaps)])
        target.write(name.encode().ljust(_NAME, b"\0") + head.tobytes() + block.sent)
        target.write(array("q", [*block.places, *chain(*block.gaps)]).tobytes())
        target.flush()
        result, after = source.read(8), bytearray(source.read(len(block.sent)))
        assert len(after) == len(block.sent), f"the program stopped in {name}"
        return int.from_bytes(result, "little", signed=True), after


class Block:
    """The memory of a call: its arguments, and behind them copies of the pieces that they lead to.

    Attributes:
        sent: its bytes; an address in it counts from its start.
        places: where in it addresses stand.
        gaps: from where to where there is junk.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self._words = array("q", map(_word, arguments)) + array("q", [0] * (_ARGUMENTS - len(arguments)))
        self._pieces: list[tuple[int, int, int]] = []  # address here, bytes, place
        self.gaps: list[tuple[int, int]] = []
        self._before = bytearray()
        for address, nbytes in (_extent(self._words), *_structures(arguments)):
            self._hold(address, nbytes)
        found = self._scanned()
        for address in sorted(set(found.values()) & _tensors.keys()):  # a tensor before what lies, or once lay, in it
            if self._place_of(address) is None:
                self._hold(address, _tensors[address])
        targets = {place: self._place_of(word) for place, word in found.items()}
        self.places = [place for place, target in targets.items() if target is not None]
        relocated = bytearray(self._before)
        for place in self.places:
            relocated[place : place + 8] = targets[place].to_bytes(8, "little")
        self.sent = bytes(relocated)

    def write_back(self, after: bytearray) -> None:
        """Copy what changed to where it is from."""
        for place in self.places:
            after[place : place + 8] = self._before[place : place + 8]
        for first, last in self.gaps:
            assert after[first:last] == self._before[first:last], "the library wrote behind the end of its memory"
        for address, nbytes, place in self._pieces:
            if after[place : place + nbytes] != self._before[place : place + nbytes]:
                ctypes.memmove(address, bytes(after[place : place + nbytes]), nbytes)

    def _hold(self, address: int, nbytes: int) -> None:
        place = len(self._before)
        self._before += ctypes.string_at(address, nbytes)
        end = place + nbytes
        following = (end + 2 * _LINE - 1) // _LINE * _LINE
        self._before += bytes([_JUNK]) * (following - end)
        self._pieces.append((address, nbytes, place))
        self.gaps.append((end, following))

    def _scanned(self) -> dict[int, int]:
        """The words of what is held so far, by their places."""
        return {
            place + at: int.from_bytes(self._before[place + at : place + at + 8], "little")
            for _, nbytes, place in self._pieces for at in range(0, nbytes - 7, 8)
        }

    def _place_of(self, word: int) -> int | None:
        for address, nbytes, place in self._pieces:
            if address <= word < address + nbytes:
                return place + word - address
        return None


def _word(argument: Any) -> int:
    """An argument as a number."""
    if argument is None or isinstance(argument, int):
        return argument or 0
    return ctypes.addressof(getattr(argument, "_obj", argument))


def _extent(words: array[int]) -> tuple[int, int]:
    address, length = words.buffer_info()
    return address, length * words.itemsize


def _structures(arguments: tuple[Any, ...]) -> Iterator[tuple[int, int]]:
    """Address and bytes of what the arguments lead to, tensors left out."""
    for argument in arguments:
        if argument is None or isinstance(argument, int):
            continue
        target = getattr(argument, "_obj", argument)  # of byref()
        yield ctypes.addressof(target), ctypes.sizeof(target)
        if isinstance(target, Model) and target.num_layers:
            yield ctypes.addressof(target.layers.contents), target.num_layers * ctypes.sizeof(LayerStruct)
            for layer in target.layers[: target.num_layers]:
                if layer.recurrence:
                    yield ctypes.addressof(layer.recurrence.contents), ctypes.sizeof(RecurrenceStruct)
                if layer.experts:
                    own = layer.experts.contents
                    yield ctypes.addressof(own), ctypes.sizeof(ExpertsStruct)
                    yield ctypes.addressof(own.parts.contents), 3 * own.count * ctypes.sizeof(Weight)
        if isinstance(target, ChainStruct):
            yield from (_extent(part) for part in target.memory if isinstance(part, array))  # type: ignore[attr-defined]
        if isinstance(target, BatchStruct):
            *flags, kv = target.memory  # type: ignore[misc]
            arrays = target.numbers, target.best, *flags
            yield from (_extent(part) for part in arrays if part)  # an empty one is nowhere
            tables = (*kv._arrays, target.read, *(one for one in target.recurrent if isinstance(one, ctypes.Array)))
            yield from ((ctypes.addressof(table), ctypes.sizeof(table)) for table in tables if table is not None)
