"""Draws from a continuous model, alone or with a draft whose tokens it accepts by the ratio of two densities.

Target and draft denoise from the same noise, step by step with the same noise (the paper's trajectory alignment). What
the shared noises leave open is each model's last step, a Gaussian: given them, acceptance with min(1, p / q) and a
residual by acceptance and rejection are exact as they are for words, and so they are on average over the noises. The
paper multiplies p / q by the product of the ratios of all earlier deviations; where these differ that is no longer
exact, and `RULES["scaled"]` shows by how much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal_lab.other_fields.continuous.model import PLACES, WIDTH, ContinuousModel

TRIES = 10_000
"""Proposals for a residual before the last one is taken as it is, which is counted."""


@dataclass(frozen=True)
class AcceptanceRule:
    """How drafts are accepted. The defaults are exact; each other setting breaks the law in a way of its own.

    Attributes:
        scaled: Multiplies the ratio by that of the earlier steps' deviations, as the paper does.
        always: Accepts all drafts.
        residual: Draws what replaces a rejected token from the residual; otherwise from the target.
        rollback: Ends at the first rejected token; otherwise later accepted ones are kept.
    """

    scaled: bool = False
    always: bool = False
    residual: bool = True
    rollback: bool = True


RULES = {
    "exact": AcceptanceRule(),
    "scaled": AcceptanceRule(scaled=True),
    "always": AcceptanceRule(always=True),
    "no residual": AcceptanceRule(residual=False),
    "no rollback": AcceptanceRule(rollback=False),
}


@dataclass(frozen=True)
class Last:
    """The last steps of trajectories, given their noises.

    Attributes:
        mean: Means of the last Gaussians, (..., WIDTH).
        deviation: Logs of their deviations, (..., WIDTH).
        earlier: Sums of the logs of the deviations of the steps before, (...).
    """

    mean: Tensor
    deviation: Tensor
    earlier: Tensor

    def drawn(self, generator: torch.Generator) -> Tensor:
        """A token of each."""
        return self.mean + self.deviation.exp() * torch.randn(self.mean.shape, generator=generator)

    def log_density(self, tokens: Tensor) -> Tensor:
        """Logs of densities of tokens, (...)."""
        away = (tokens - self.mean) / self.deviation.exp()
        return -(away.square() / 2 + self.deviation + math.log(2 * math.pi) / 2).sum(-1)

    def at(self, chosen: Tensor) -> Last:
        """Some of them."""
        return Last(self.mean[chosen], self.deviation[chosen], self.earlier[chosen])


@dataclass
class Drawn:
    """Images drawn, and the work that they took.

    Attributes:
        tokens: Of shape (images, PLACES, WIDTH).
        calls: Forwards of the target, by image, (images,).
        drafted: Drafts that were judged, by place, (PLACES,).
        accepted: Those accepted, by place, (PLACES,).
        scores: Of the tokens under the target's last Gaussian, (images, PLACES, WIDTH): standard normal, and
            independent of all before, where a rule is exact given the noises.
        given_up: Residuals that took more than `TRIES` proposals.
    """

    tokens: Tensor
    calls: Tensor
    drafted: Tensor
    accepted: Tensor
    scores: Tensor
    given_up: int = 0


def last_step(model: ContinuousModel, condition: Tensor, noises: Tensor) -> Last:
    """All steps but the last one's draw, of conditions (..., width) and noises (..., steps, WIDTH), the first pure."""
    at, earlier = noises[..., 0, :], torch.zeros(noises.shape[:-2])
    for done, level in enumerate(range(model.noise.steps, 0, -1), 1):
        mean, deviation, _ = model.step(at, torch.full(at.shape[:-1], level), condition)
        if level > 1:
            at, earlier = mean + deviation.exp() * noises[..., done, :], earlier + deviation.sum(-1)
    return Last(mean, deviation, earlier)


def residual(target: Last, draft: Last, scale: Tensor, generator: torch.Generator) -> tuple[Tensor, int]:
    """Tokens (rows, WIDTH) of laws in proportion to max(0, scale * p - q), and how many were given up.

    `scale` is a logarithm. After the paper's acceptance-rejection sampling: a proposal from p is kept with probability
    max(0, 1 - q / (scale * p)), and the integral is never needed. Given a rejection 1 / TV(p, q) proposals are
    expected, so one for each token judged.
    """
    found, tries = target.drawn(generator), 0
    rows = torch.arange(len(found))
    while rows.numel() and tries < TRIES:
        many = max(1, 4096 // len(rows))
        p, q = target.at(rows), draft.at(rows)
        proposed = p.mean + p.deviation.exp() * torch.randn(many, *p.mean.shape, generator=generator)
        kept = 1 - (q.log_density(proposed) - p.log_density(proposed) - scale[rows]).exp()
        kept = torch.rand(kept.shape, generator=generator) < kept
        found[rows] = proposed[kept.long().argmax(0), torch.arange(len(rows))]
        rows, tries = rows[~kept.any(0)], tries + many
    return found, len(rows)


@torch.no_grad()
def draw(target: ContinuousModel, labels: Tensor, generator: torch.Generator, *, draft: ContinuousModel | None = None,
         guesses: int = 4, rule: AcceptanceRule = RULES["exact"], prefill: int = 0) -> Drawn:
    """Images of some classes.

    Args:
        target: The model whose law the images have.
        labels: Their classes, (images,).
        generator: Of all draws.
        draft: A model that guesses; without one each token takes a forward of the target.
        guesses: Tokens drafted for each forward of the target, at least 1.
        rule: How they are accepted.
        prefill: Tokens that the target draws alone before the first guess (the paper's token pre-filling).

    Raises:
        ValueError: A number outside its range, or models with other noise levels.
    """
    if guesses < 1 or not 0 <= prefill < PLACES:
        raise ValueError(f"guesses={guesses}, prefill={prefill}: guesses must be at least 1, prefill 0 to {PLACES - 1}")
    if draft is not None and draft.noise != target.noise:
        raise ValueError(f"the draft denoises with {draft.noise}, the target with {target.noise}; train both with one")
    rows = len(labels)
    out = Drawn(torch.zeros(rows, PLACES, WIDTH), torch.zeros(rows, dtype=torch.long),
                torch.zeros(PLACES, dtype=torch.long), torch.zeros(PLACES, dtype=torch.long),
                torch.zeros(rows, PLACES, WIDTH))
    known = torch.zeros(rows, dtype=torch.long)
    while (live := (known < PLACES).nonzero()[:, 0]).numel():
        alone = draft is None or int(known.min()) < prefill
        text, ahead = _round(target, None if alone else draft, labels[live], out, live, known[live],
                             0 if alone else guesses, rule, generator)
        out.tokens[live] = text[:, :PLACES]
        known[live] = ahead.clamp(max=PLACES)
        out.calls[live] += 1
    return out


def _round(target: ContinuousModel, draft: ContinuousModel | None, labels: Tensor, out: Drawn, live: Tensor,
           known: Tensor, guesses: int, rule: AcceptanceRule, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One forward of the target: the text with what it decided, (live, PLACES + guesses + 1, WIDTH), and how far."""
    rows, steps = torch.arange(len(live)), target.noise.steps
    text = torch.cat([out.tokens[live], torch.zeros(len(live), guesses + 1, WIDTH)], 1)
    noises = torch.randn(len(live), guesses + 1, steps, WIDTH, generator=generator)
    reach = int(known.max()) + guesses
    laws: list[Last] = []
    for ahead in range(guesses):
        assert draft is not None
        condition = draft.conditions(text[:, :reach], labels)[rows, known + ahead]
        laws.append(last_step(draft, condition, noises[:, ahead]))
        text[rows, known + ahead] = laws[-1].drawn(generator)
    places = known[:, None] + torch.arange(guesses + 1)
    judged = last_step(target, target.conditions(text[:, :reach], labels)[rows[:, None], places], noises)
    if not laws:
        text[rows, known] = judged.drawn(generator)[:, 0]
        _score(out, live, places, text[rows[:, None], places], judged, known + 1)
        return text, known + 1
    guessed = Last(*(torch.stack([getattr(law, part) for law in laws], 1) for part in ("mean", "deviation", "earlier")))
    upon = Last(judged.mean[:, :-1], judged.deviation[:, :-1], judged.earlier[:, :-1])
    tokens = text[rows[:, None], places[:, :-1]]
    scale = guessed.earlier - upon.earlier if rule.scaled else torch.zeros_like(upon.earlier)
    ratio = (upon.log_density(tokens) - guessed.log_density(tokens) + scale).exp()
    kept = (torch.rand(ratio.shape, generator=generator) < ratio) | torch.tensor(rule.always)
    first = kept.long().cumprod(1).sum(1)
    _count(out, places[:, :-1], kept, first)
    wrong = ~kept if not rule.rollback else torch.arange(guesses)[None] == first[:, None]
    p, q = upon.at(wrong), guessed.at(wrong)
    fresh, given_up = residual(p, q, scale[wrong], generator) if rule.residual else (p.drawn(generator), 0)
    out.given_up += given_up
    tokens[wrong] = fresh
    text[rows[:, None], places[:, :-1]] = tokens
    more = judged.drawn(generator)[:, -1]
    whole = first == guesses
    text[rows[whole], places[whole, -1]] = more[whole]
    decided = torch.where(whole, known + guesses + 1, known + (first + 1 if rule.rollback else guesses))
    _score(out, live, places, text[rows[:, None], places], judged, decided)
    return text, decided


def _score(out: Drawn, live: Tensor, places: Tensor, tokens: Tensor, law: Last, decided: Tensor) -> None:
    """Keep how far tokens lie from the target's means, in its deviations, at the places that are decided now."""
    new = (places < decided[:, None]) & (places < PLACES)
    images = live[:, None].expand_as(places)
    out.scores[images[new], places[new]] = ((tokens - law.mean) / law.deviation.exp())[new]


def _count(out: Drawn, places: Tensor, kept: Tensor, first: Tensor) -> None:
    """Add the drafts up to the first rejected one, which are those that were judged upon the text that stays."""
    seen = (torch.arange(places.shape[1])[None] <= first[:, None]) & (places < PLACES)
    out.drafted += torch.bincount(places[seen], minlength=PLACES)
    out.accepted += torch.bincount(places[seen & kept], minlength=PLACES)
