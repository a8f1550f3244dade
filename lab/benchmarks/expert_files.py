"""Writes a dense GGUF file again as a mixture: the groups of neurons of `shoal train read_me` as experts, with gates.

    python lab/benchmarks/expert_files.py --model M.gguf --part PART --answers DIR --experts 6 --to MIXTURE.gguf

PART and DIR are the output of `shoal train read_me --model M.gguf --out PART`, and its answers. The gate of each layer
is fitted by least squares to the logarithms of the groups' shares in what the MLP gives, on the model's own answers.
Its logits are then made so small that all chosen experts weigh the same. Shared groups become the expert beside the
others (qwen2moe); a Llama model has none. Experts are in Q8_0, all else as it was. So the file runs on Shoal and on
llama.cpp, and routes as a trained mixture does, not evenly. The last line on stdout says how often gates choose what
they should.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

import script
import shoal
from shoal.speculative import draft_head_file
from shoal_lab.components.router import NEURONS
from shoal_lab.train.corpus import AnsweredText, Corpus
from shoal_lab.train.read_me import gated_mlps, group_energies

NAMES = {"llama": "llama", "qwen2": "qwen2moe"}
"""Architecture -> that of the mixture."""
_EVEN = 1e-3
"""Factor of the gates' logits."""
_RIDGE = 1e-4
_BLOCK = 32
"""Numbers of a block of Q8_0."""


def main() -> int:
    """Fit and write."""
    parser = script.parser(__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--part", required=True)
    parser.add_argument("--answers", type=Path, required=True)
    parser.add_argument("--experts", type=int, default=6, help="that a token runs, shared ones not counted")
    parser.add_argument("--texts", type=int, default=64, help="answers that gates are fitted to")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engine, answers = shoal.load(str(args.model), backend="hf", dtype="float32"), Corpus(args.answers)
    part = draft_head_file.read(args.part, "read_me", engine.info())
    shared, shape = int(part.shape.get("shared", 0)), (part.size(name) for name in ("layers", "groups", "neurons"))
    neurons = part.take(NEURONS, *shape).long()
    if neurons.shape[2] % _BLOCK:
        raise SystemExit(f"a group has {neurons.shape[2]} neurons; Q8_0 needs a multiple of {_BLOCK}: train the part "
                         "with another --groups")
    texts = [one for shard in range(len(answers.shards)) for one in answers.answers(shard, validation=False)]
    gates = fitted(engine.model, texts[:: max(1, len(texts) // args.texts)][: args.texts], neurons, shared)
    found = right(engine.model, answers.validation(8), neurons, shared, gates, args.experts)
    write(args.model, args.to, Mixture(neurons, shared, gates, args.experts))
    script.publish(__file__, sys.argv[1:], {"model": args.model.name, "experts": neurons.shape[1] - shared,
                                            "shared": shared, "chosen": args.experts, **found}, args.json)
    return 0


def _seen(model: Any, text: AnsweredText, neurons: Tensor, shared: int) -> tuple[list[Tensor], Tensor]:
    """Inputs of the MLPs at an answer's tokens [T, hidden], and centred logarithms of energies [T, layers, groups]."""
    inputs: list[Tensor] = []
    hooks = [mlp.register_forward_pre_hook(lambda _, given: inputs.append(given[0][0].detach()))
             for mlp in gated_mlps(model)]
    energies = group_energies(model, text.tokens[None], neurons)[0, text.prompt :, :, shared:]
    for hook in hooks:
        hook.remove()
    wanted = energies.clamp_min(1e-12).log()
    return [one[text.prompt :] for one in inputs], wanted - wanted.mean(-1, keepdim=True)


@torch.no_grad()
def fitted(model: Any, texts: list[AnsweredText], neurons: Tensor, shared: int) -> Tensor:
    """Gates [layers, experts, hidden]."""
    layers, hidden, experts = len(neurons), model.config.hidden_size, neurons.shape[1] - shared
    squares = torch.zeros(layers, hidden, hidden, dtype=torch.float64)
    products = torch.zeros(layers, hidden, experts, dtype=torch.float64)
    for text in texts:
        inputs, wanted = _seen(model, text, neurons, shared)
        for layer, x in enumerate(inputs):
            squares[layer] += (x.T @ x).double()
            products[layer] += (x.T @ wanted[:, layer]).double()
    size = squares.diagonal(dim1=1, dim2=2).mean(1)
    eye = torch.eye(hidden, dtype=torch.float64)
    found = [torch.cholesky_solve(product, torch.linalg.cholesky(square + _RIDGE * one * eye))
             for square, product, one in zip(squares, products, size, strict=True)]
    return torch.stack(found).transpose(1, 2).float()


@torch.no_grad()
def right(
    model: Any, texts: list[AnsweredText], neurons: Tensor, shared: int, gates: Tensor, count: int
) -> dict[str, float]:
    """Share of each token's strongest groups that gates choose, on other answers, and of those of the whole text."""
    shares, fixed = list[Tensor](), list[Tensor]()
    for text in texts:
        inputs, wanted = _seen(model, text, neurons, shared)
        for layer, x in enumerate(inputs):
            best = _mask(wanted[:, layer], count)
            shares.append((best * _mask(x @ gates[layer].T, count)).sum(1) / count)
            fixed.append((best * _mask(best.mean(0, keepdim=True), count)).sum(1) / count)
    return {"gates_right": round(float(torch.cat(shares).mean()), 4),
            "by_lot_right": round(count / gates.shape[1], 4),
            "most_used_right": round(float(torch.cat(fixed).mean()), 4)}


def _mask(scores: Tensor, count: int) -> Tensor:
    return torch.zeros_like(scores).scatter_(1, scores.topk(count).indices, 1.0)


@dataclass(frozen=True)
class Mixture:
    """What becomes of the MLPs.

    Attributes:
        neurons: of the groups, int64 [layers, groups, n].
        shared: the first groups, which always run.
        gates: [layers, groups - shared, hidden].
        count: experts that a token runs.
    """

    neurons: Tensor
    shared: int
    gates: Tensor
    count: int


def write(source: Path, target: Path, mixture: Mixture) -> None:
    """The file; of its tensors one is in memory at a time."""
    reader = gguf.GGUFReader(source)
    old = reader.fields["general.architecture"].contents()
    if (NAMES[old] == "llama") == bool(mixture.shared):
        raise ValueError(f"the part has {mixture.shared} shared groups; a Llama model needs 0 and a Qwen2 model 1 or "
                         "more: shoal train read_me --shared")
    writer = _writer(reader, old, mixture)
    for name, size, kind, _ in _tensors(reader, NAMES[old], mixture):
        line = int(np.prod(gguf.quant_shape_to_byte_shape(size, kind)))
        writer.add_tensor_info(name, size, np.dtype(np.float32), line, raw_dtype=kind)
    writer.write_header_to_file(target)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for *_, values in _tensors(reader, NAMES[old], mixture):
        writer.write_tensor_data(np.ascontiguousarray(values()))
    writer.close()


def _writer(reader: Any, old: str, mixture: Mixture) -> gguf.GGUFWriter:
    """A writer with the old file's metadata, and the sizes of experts."""
    name, size = NAMES[old], mixture.neurons.shape[2]
    writer = gguf.GGUFWriter(None, name)
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture" and field.contents() != []:
            key = field.name.replace(f"{old}.", f"{name}.", 1) if field.name.startswith(f"{old}.") else field.name
            writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
    if not mixture.shared:
        writer.kv_data[0].pop(f"{name}.feed_forward_length")
        writer.add_feed_forward_length(size)
    else:
        writer.add_expert_feed_forward_length(size)
        writer.add_expert_shared_feed_forward_length(mixture.shared * size)
    writer.add_expert_count(mixture.gates.shape[1])
    writer.add_expert_used_count(mixture.count)
    writer.data_alignment = int(reader.alignment)
    return writer


def _tensors(reader: Any, name: str, mixture: Mixture) -> Iterator[tuple[str, tuple[int, ...], Type, Any]]:
    """Name, size, type and a maker of the values of every tensor."""
    for one in reader.tensors:
        place = one.name.split(".")
        if place[-2] not in ("ffn_gate", "ffn_up", "ffn_down"):
            yield one.name, tuple(map(int, one.shape[::-1])), one.tensor_type, lambda one=one: one.data
            continue
        layer, down = int(place[1]), place[-2] == "ffn_down"
        groups, hidden = mixture.neurons[layer], mixture.gates.shape[2]
        factor = 1.0 if not down else mixture.count if name == "llama" else len(mixture.gates[layer])
        at, parts = f"blk.{layer}.", groups[mixture.shared :]
        size = (hidden, groups.shape[1]) if down else (groups.shape[1], hidden)
        yield (f"{at}{place[-2]}_exps.weight", (len(parts), *size), Type.Q8_0,
               lambda one=one, parts=parts, factor=factor: _some(one, parts, factor))
        if mixture.shared:
            beside = groups[: mixture.shared].flatten()
            size = (hidden, len(beside)) if down else (len(beside), hidden)
            yield (f"{at}{place[-2]}_shexp.weight", size, Type.Q8_0,
                   lambda one=one, beside=beside, down=down: _some(one, beside[None], 2.0 if down else 1.0)[0])
        if down:
            gate = (_EVEN * mixture.gates[layer]).numpy()
            yield f"{at}ffn_gate_inp.weight", gate.shape, Type.F32, lambda gate=gate: gate
            if mixture.shared:  # whose sigmoid is a half
                yield f"{at}ffn_gate_inp_shexp.weight", (hidden,), Type.F32, lambda gate=gate: 0 * gate[0]


def _some(tensor: Any, groups: Tensor, factor: float) -> Any:
    """Groups of neurons of a matrix of an MLP, times a factor."""
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type) * np.float32(factor)
    some = (values[:, one] if ".ffn_down." in tensor.name else values[one] for one in groups.numpy())
    return np.stack([gguf.quants.quantize(np.ascontiguousarray(one), Type.Q8_0) for one in some])


if __name__ == "__main__":
    sys.exit(main())
