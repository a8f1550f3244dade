"""Which model types people run: a hundred of them, by downloads, by threads of 2026 and by other tools' lists.

    python -m tools.sweep.people --clones FOLDER

FOLDER holds clones of the repositories in `LISTS` and `DOWNLOADS` at the commits named there, as OWNER/NAME (vLLM's and
llama.cpp's may be the files alone). Written is docs/people_run.json.

Counted are types that text is generated with and that a config alone describes: those that transformers has a causal
language model of and neither a masked nor a translating one, a `..._text` with the type it is part of, and `OUTSIDE`.
Each gets three places: by downloads, by how many titles of pull requests of 2026 name it, and by how many lists name
it. The hundred are the lowest sums of places; types in `ASKED` are held in any case, in place of the last ones. Types
that run by code in their own folders are written beside them, where `ENOUGH` lists name them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COUNTED = ROOT / "docs" / "people_run.json"
MANY, ENOUGH = 100, 3
DOWNLOADS = ("AlexsJones/llmfit", "a3e0eb27c57fe05298292f4c61699b9aed2824ea", "llmfit-core/data/hf_models.json")
"""The Hub's downloads of 1,852 models in 30 days, with each one's type; of May 2026."""
LISTS = {
    "vllm-project/vllm": ("0046f770d322e202c2000e325a0c8cc1fcb2fc76", "docs/models/supported_models.md"),
    "ggml-org/llama.cpp": ("as in llama_cpp_python 0.3.36", "conversion/*.py"),
    "ml-explore/mlx-lm": ("d78bf58e217c904ec282ed8da9b947491f78c022", "mlx_lm/models/"),
    "turboderp-org/exllamav3": ("4f8ad0121f483ba66a5336244a4c3b6d7210385e", "exllamav3/architecture/*.py"),
    "ModelCloud/GPTQModel": ("f4c327a17eb3e24524d5a97a3d682e3696ae6a28", "gptqmodel/models/auto.py"),
    "huggingface/optimum-intel": ("e1de5beecfd0c3ae6047ea22cea4a4cad4307aff",
                                  "optimum/exporters/openvino/model_configs.py"),
    "huggingface/text-generation-inference": ("db931fcf42da018a3657580c64bf2720f167f9ab",
                                              "server/text_generation_server/models/__init__.py"),
    "EricLBuehler/mistral.rs": ("9e922623f24b32d41f3892b74f0eed18707f4e6c",
                                "mistralrs-core/src/pipeline/loaders/*.rs"),
    "InternLM/lmdeploy": ("1263d5cd889b7ad500e85b8eb20401327a4516ab", "lmdeploy/pytorch/models/module_map.py"),
    "axolotl-ai-cloud/axolotl": ("067b021c8b87a9e5e380b9173c704cf7340e30f5", "src/axolotl/monkeypatch/multipack.py"),
    "modelscope/ms-swift": ("3602360a562313afbf2ef6065fdf61f271a2c5b9", "swift/model/models/*.py"),
}
"""Repository: commit, and where it says which models it runs."""
THREADS = ("ml-explore/mlx-lm", "turboderp-org/exllamav3", "ModelCloud/GPTQModel", "huggingface/optimum-intel",
           "EricLBuehler/mistral.rs", "InternLM/lmdeploy", "axolotl-ai-cloud/axolotl", "modelscope/ms-swift")
"""Repositories whose titles of pull requests are read, from their logs since January 2026: `... (#123)`."""
OUTSIDE = {"mistral3": "Mistral3ForConditionalGeneration", "phi4flash": "Phi4FlashForCausalLM"}
"""Types that transformers has no causal language model of."""
SAME = {"kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3", "falcon_rw": "falcon", "inkling2": "inkling"}
"""Types whose layers are another's."""
WORDS = ("git", "new", "transformer", "echo", "unknown", "clip")
"""Types whose names mean other things in titles and in code: git is Microsoft's captioner."""
ASKED = (
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "mamba2", "bamba", "granitemoehybrid",
    "nemotron_h", "falcon_h1", "zamba2", "mamba", "falcon_mamba", "jamba", "lfm2", "lfm2_moe", "lfm3", "minimax",
    "bailing_hybrid", "recurrent_gemma", "phi4flash", "rwkv", "xlstm", "zaya", "inkling", "gpt2", "gpt_neox", "phi",
    "starcoder2", "falcon", "cohere", "bloom", "mpt", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite",
    "minicpm3", "gpt_oss", "llama4", "gemma3n", "gemma4", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe",
    "glm4_moe", "mixtral", "mistral3", "cohere2", "phimoe", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense",
    "hunyuan_v1_moe", "exaone4", "seed_oss",
)  # fmt: skip
"""Types that issues and threads asked Shoal itself for."""


def main(words: list[str]) -> int:
    """Count, and write the list."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--clones", type=Path, required=True, help="the folder of OWNER/NAME")
    clones = parser.parse_args(words).clones
    classes = causal_classes()
    downloads, named, threads = of_the_hub(clones, set(classes.values())), Counter[str](), Counter[str]()
    where: dict[str, list[str]] = {}
    for repository, (commit, paths) in LISTS.items():
        for kind in types_named(text_of(clones / repository, commit, paths), classes):
            named[kind] += 1
            where.setdefault(kind, []).append(repository)
    titles = [title for repository in THREADS for title in titles_of(clones / repository, LISTS[repository][0])]
    for kind in set(classes.values()):
        threads[kind] = sum(1 for title in titles if spelled(kind).search(title))
    own_code = sorted(kind for kind, count in foreign(clones).items() if count >= ENOUGH)
    kinds = chosen(set(classes.values()), downloads, threads, named)
    rows = [{"model_type": kind, "downloads": downloads[kind], "threads": threads[kind],
             "lists": [list(LISTS).index(one) for one in where.get(kind, [])]} for kind in kinds]
    sources = {"downloads": list(DOWNLOADS), "lists": [[name, *where] for name, where in LISTS.items()],
               "threads": [len(titles), *THREADS]}
    body = ",\n".join(json.dumps(row) for row in rows)
    head = json.dumps({"sources": sources, "own_code": own_code})[:-1]
    COUNTED.write_text(f'{head}, "types": [\n{body}\n]}}\n', encoding="utf-8")
    return 0


def chosen(kinds: set[str], *counts: Mapping[str, int]) -> list[str]:
    """The hundred types with the lowest sums of places, first the most named; those asked for in place of the last."""
    def places(count: Mapping[str, int]) -> dict[str, int]:
        return {kind: sum(count[other] > count[kind] for other in kinds) for kind in kinds}

    each = [places(count) for count in counts]
    order = sorted(kinds, key=lambda kind: (sum(place[kind] for place in each), kind))
    others = [kind for kind in order if kind not in ASKED][:MANY - len(ASKED)]
    return [kind for kind in order if kind in ASKED or kind in others]


def causal_classes() -> dict[str, str]:
    """Class and model type, as configs spell them, to the type it is counted as."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as PICTURES
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES as TRANSLATING

    found = {kind: whole(kind) for kind in (*CAUSAL, *OUTSIDE) if kind not in {*MASKED, *TRANSLATING, *WORDS}}
    for names in (PICTURES, CAUSAL, OUTSIDE):
        for kind, name in names.items():
            if whole(kind) in found.values():
                found.setdefault(str(name), whole(kind))
    return {**found, **SAME}


def whole(kind: str) -> str:
    """The type that is counted for one: the model's for its text part."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES as CONFIGS

    short = kind.removesuffix("_text")
    kind = short if short in CONFIGS else kind
    return SAME.get(kind, kind)


def of_the_hub(clones: Path, kinds: set[str]) -> Counter[str]:
    """Downloads by type."""
    repository, commit, path = DOWNLOADS
    found: Counter[str] = Counter()
    for model in json.loads(text_of(clones / repository, commit, path)):
        kind = whole(str(model["architecture"]))
        found[kind] += (model["hf_downloads"] or 0) * (kind in kinds)
    return found


def foreign(clones: Path) -> Counter[str]:
    """How many lists name each type of the downloads' file that transformers has no config of."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES as CONFIGS

    repository, commit, path = DOWNLOADS
    every = {str(model["architecture"]) for model in json.loads(text_of(clones / repository, commit, path))}
    others = {kind: kind for kind in every if kind not in CONFIGS and kind not in (*OUTSIDE, *SAME, *WORDS)}
    return Counter(kind for name, (commit, paths) in LISTS.items()
                   for kind in types_named(text_of(clones / name, commit, paths), others))


def types_named(text: str, classes: Mapping[str, str]) -> set[str]:
    """The types that a list names by class or by type; of a folder, files are named by type."""
    return {classes[name] for name in re.findall(r"[A-Za-z][A-Za-z0-9_]+", text) if name in classes}


def titles_of(clone: Path, commit: str) -> list[str]:
    """Titles of the pull requests merged in 2026."""
    log = git(clone, "log", "--since=2026-01-01", "--format=%s", commit)
    return [line.lower() for line in log.splitlines() if re.search(r"\(#\d+\)", line)]


def spelled(kind: str) -> re.Pattern[str]:
    """A type as people write it, "Qwen3.5 MoE" for qwen3_5_moe, not followed by what makes it another one."""
    parts = re.findall(r"[a-z]+|\d+", kind.lower())
    others = r"(?![a-z0-9])(?![-_. ]?(\d|moe|next|cpp|factory|omni|(vl|h\d?)\b))"
    return re.compile(r"(?<![a-z0-9])" + "[-_. ]?".join(parts) + others)


def text_of(clone: Path, commit: str, paths: str) -> str:
    """Files of a commit, joined; the names of files of a folder."""
    folder, _, pattern = paths.rpartition("/")
    if not (clone / "HEAD").is_file() and not (clone / ".git").exists():
        return "\n".join(path.read_text("utf-8") for path in sorted(clone.glob(paths)))
    names = git(clone, "ls-tree", "--name-only", commit, f"{folder}/").splitlines()
    if not pattern:
        return "\n".join(Path(name).stem for name in names)
    return "\n".join(git(clone, "show", f"{commit}:{name}") for name in names if Path(name).match(pattern))


def git(clone: Path, *words: str) -> str:
    """What git says of a clone."""
    done = subprocess.run(["git", "-C", str(clone), *words], capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
