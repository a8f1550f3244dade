"""A small LLaVA (Liu et al., 2023, arXiv 2304.08485): a frozen language model, an encoder and a projector for shapes.

The encoder first learns to name what stands at each patch, without the language model: the projector's output there is
to be the sum of the model's own embeddings of count, colour and kind. Then both learn to make it answer. The published
one starts from an encoder that was trained on pairs of pictures and captions.
"""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from shoal_lab.pictures.batches import CUE, answer_logits, batch_of, normalised, pixels_of
from shoal_lab.pictures.shapes import COLOURS, COUNTS, KINDS, PATCH, SIDE, TOKENS, Scene, ShapeQuestion
from shoal_lab.train import files

HELD_OUT = 1_000_000
"""Seeds of pictures from here on are never trained on."""
_SIGHT = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
          "image_size": SIDE, "patch_size": PATCH, "projection_dim": 128}
_NAMING, _NAMED_AT_ONCE, _ASKED_AT_ONCE = 1200, 32, 8
"""Steps of naming, pictures of each, and pictures of each step with the language model."""
_RATE, _ASKING_RATE, _WARM = 1e-3, 3e-4, 50
_STATE = "training.pt"
WORDS = (COUNTS, tuple(COLOURS), KINDS)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ '\\n' + part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}" + CUE)
"""A chat of one picture and one question."""


class Seer(nn.Module):
    """Encoder and projector, transformers' modules, as `LlavaForConditionalGeneration` has them."""

    def __init__(self, config: Any) -> None:
        from transformers import CLIPVisionModel
        from transformers.models.llava.modeling_llava import LlavaMultiModalProjector

        super().__init__()
        self.vision_tower = CLIPVisionModel._from_config(config.vision_config, attn_implementation="sdpa")
        self.multi_modal_projector = LlavaMultiModalProjector(config)

    def encoded(self, pixels: Tensor) -> Tensor:
        """The encoder's states [B, TOKENS, width] of pixels in 0..255."""
        states: Tensor = self.vision_tower(normalised(pixels)).last_hidden_state
        return states[:, 1:]

    def forward(self, pixels: Tensor) -> Tensor:
        """What stands for pictures [B, TOKENS, D] among embeddings."""
        states: Tensor = self.multi_modal_projector(self.encoded(pixels))
        return states


def config_of(text: Any, token: int) -> Any:
    """LLaVA's config around a language model's."""
    from transformers import CLIPVisionConfig, LlavaConfig

    return LlavaConfig(text_config=text, vision_config=CLIPVisionConfig(**_SIGHT), image_token_index=token,
                       vision_feature_layer=-1, vision_feature_select_strategy="default", image_seq_length=TOKENS)


class SmallLlava:
    """The encoder in training, beside the frozen model.

    Args:
        model: transformers' language model; its weights stay.
        tokenizer: of the model.
        folder: holds the state between calls of `train`.
        seed: of the first weights.
    """

    def __init__(self, model: Any, tokenizer: Any, folder: Path, seed: int = 0) -> None:
        self.model, self.tokenizer, self.folder = model.requires_grad_(False).eval(), tokenizer, folder
        self.config = config_of(model.config, tokenizer.convert_tokens_to_ids(image_token(tokenizer)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.seer = Seer(self.config)
            self._heads = nn.ModuleList(nn.Linear(_SIGHT["hidden_size"], len(words) + 1) for words in WORDS)
        self.steps, self.seconds = {"naming": 0, "asking": 0}, {"naming": 0.0, "asking": 0.0}
        self._adam = torch.optim.AdamW([*self.seer.parameters(), *self._heads.parameters()], _RATE, weight_decay=0.01)
        if (folder / _STATE).exists():
            found = torch.load(folder / _STATE, weights_only=True)
            self.steps, self.seconds = found["steps"], found["seconds"]
            self.seer.load_state_dict(found["seer"])
            self._heads.load_state_dict(found["heads"])
            self._adam.load_state_dict(found["adam"])

    def train(self, steps: int, seconds: float) -> float:
        """Go on until so many steps with the language model, or for so long; returns the last losses' mean."""
        begin, losses = time.perf_counter(), list[float]()
        while self.steps["asking"] < steps and time.perf_counter() - begin < seconds:
            phase = "naming" if self.steps["naming"] < _NAMING else "asking"
            start = time.perf_counter()
            loss = self._naming_loss() if phase == "naming" else self._asking_loss()
            self._adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_([*self.seer.parameters()], 1.0)
            self._set_rate(phase, steps)
            self._adam.step()
            self.steps[phase] += 1
            self.seconds[phase] += time.perf_counter() - start
            losses.append(loss.item())
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {"steps": self.steps, "seconds": self.seconds, "seer": self.seer.state_dict(),
                 "heads": self._heads.state_dict(), "adam": self._adam.state_dict()}
        files.write(self.folder / _STATE, lambda part: torch.save(state, part))
        return sum(losses[-50:]) / max(1, len(losses[-50:]))

    def _set_rate(self, phase: str, steps: int) -> None:
        at, most, rate = ((self.steps["naming"], _NAMING, _RATE) if phase == "naming"
                          else (self.steps["asking"], steps, _ASKING_RATE))
        for group in self._adam.param_groups:
            group["lr"] = rate * min(1.0, (at + 1) / _WARM) * max(0.05, 1 - at / most)

    def _scenes(self, phase: str, size: int) -> list[Scene]:
        first = self.steps[phase] * size + (HELD_OUT // 2 if phase == "asking" else 0)
        return [Scene(first + place) for place in range(size)]

    def _naming_loss(self) -> Tensor:
        """Error of the projector's outputs and of heads on the encoder's, at every patch."""
        drawn = [scene.drawn() for scene in self._scenes("naming", _NAMED_AT_ONCE)]
        labels = torch.tensor([[[0] * 3 if group is None else [1 + words.index(word) for words, word in zip(
            WORDS, group.words, strict=True)] for group in shown] for _, shown in drawn])
        wanted = torch.stack([table[labels[..., place]] for place, table in enumerate(self._targets)]).sum(0)
        with torch.autocast("cpu", torch.bfloat16):
            states = self.seer.encoded(pixels_of([picture for picture, _ in drawn]))
            found = self.seer.multi_modal_projector(states).float()
        error = (found - wanted).square().mean() / wanted.square().mean()
        named = [cross_entropy(head(states.float()).flatten(0, 1), labels[..., place].flatten())
                 for place, head in enumerate(self._heads)]
        loss: Tensor = error + torch.stack(named).sum()
        return loss

    @cached_property
    def _targets(self) -> list[Tensor]:
        """Embeddings of the words, a third of a line break's where a patch shows nothing."""
        table = self.model.get_input_embeddings().weight.float()
        nothing = table[self.tokenizer("\n")["input_ids"][0]] / 3
        return [torch.stack([nothing, *(table[self.tokenizer(f" {word}")["input_ids"][0]] for word in words)])
                for words in WORDS]

    def _asking_loss(self) -> Tensor:
        """Surprise of the answers in nats."""
        batch = batch_of(self._scenes("asking", _ASKED_AT_ONCE), self.tokenizer)
        return cross_entropy(answer_logits(self.model, batch, self.seer(batch.pixels)), batch.answers)

    @torch.no_grad()
    def right(self, scenes: Sequence[Scene]) -> float:
        """Share of right answers, by the argmax token."""
        batch = batch_of(scenes, self.tokenizer)
        found = answer_logits(self.model, batch, self.seer(batch.pixels)).argmax(-1)
        return float((found == batch.answers).float().mean())

    def save(self) -> None:
        """Write the whole model, in bfloat16, and its processor, as transformers reads them."""
        from transformers import LlavaForConditionalGeneration

        with torch.device("meta"):
            made = LlavaForConditionalGeneration(self.config)
        made = made.to_empty(device="cpu").to(torch.bfloat16)
        made.model.language_model.load_state_dict(self.model.model.state_dict())
        for name in ("vision_tower", "multi_modal_projector"):
            getattr(made.model, name).load_state_dict(getattr(self.seer, name).state_dict())
        made.tie_weights()
        made.save_pretrained(self.folder)
        processor_of(self.tokenizer).save_pretrained(self.folder)


def asked_of(scene: Scene, question: ShapeQuestion) -> list[dict[str, Any]]:
    """A question about a picture as a chat."""
    file = io.BytesIO()
    scene.drawn()[0].save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}},
                                         {"type": "text", "text": question.text}]}]


def image_token(tokenizer: Any) -> str:
    """A special token that the language model has and nobody uses, so that its table of embeddings stays."""
    for name in ("<filename>", "<image>"):
        if name in tokenizer.get_vocab():
            return name
    raise ValueError("the tokenizer has no token <filename> or <image>; take SmolLM2, or add one")


def processor_of(tokenizer: Any) -> Any:
    """Transformers' processor of the pictures."""
    from transformers import LlavaProcessor

    from shoal.engine.picture_processors import by_pillow

    side = {"height": SIDE, "width": SIDE}
    pictures = by_pillow("CLIPImageProcessor")(size={"shortest_edge": SIDE}, crop_size=side, image_mean=[0.5] * 3,
                                               image_std=[0.5] * 3)
    token = image_token(tokenizer)
    return LlavaProcessor(
        pictures, tokenizer, patch_size=PATCH, num_additional_image_tokens=1, image_token=token,
        vision_feature_select_strategy="default", chat_template=TEMPLATE.replace("<image>", token))
