/* One answer: its tokens, tinted, its numbers, the layers of every token. */

import { events } from "./api.js";
import { Canvas } from "./canvas.js";
import { make, tint } from "./dom.js";
import { DepthBars } from "./picture.js";
import { t } from "./strings.js";

function fixed(value, digits) {
  return Number.isFinite(value) ? value.toFixed(digits) : "–";
}

export class Pane {
  /* `copy` takes a text to the clipboard; `further` lets the next prompt go on from it, null where there is no chat. */
  constructor(title, ramp, { copy, further }) {
    this.ramp = ramp;
    this.steps = [];
    this.held = [];
    this.bars = new DepthBars(ramp);
    this.canvas = new Canvas();
    this.text = make("div", {
      class: "text", tabindex: "0", role: "group", "aria-label": t("tokens_of", { title }),
    });
    this.said = make("p", { class: "note said", "aria-live": "polite" });
    this.numbers = Object.fromEntries(["pace", "mean_layers", "count", "guesses_kept"].map((name) => [name, make("dd", {}, "–")]));
    const rows = Object.entries(this.numbers).map(([name, dd]) => make("div", {}, make("dt", {}, t(name)), dd));
    this.numbers.guesses_kept.parentElement.hidden = true;
    const copied = make("button", { type: "button" }, t("copy"));
    copied.addEventListener("click", () => copy(this.answer));
    this.further = make("button", { type: "button", hidden: "" }, t("further"));
    this.further.addEventListener("click", () => further(this.answer));
    this.chat = further !== null;
    this.element = make("article", { class: "pane" },
      make("div", { class: "row head" }, make("h2", {}, title), this.further, copied), make("dl", { class: "numbers" }, ...rows),
      make("div", { class: "depths" }, this.bars.svg), this.text,
      this.canvas.element, this.said);
    this.text.addEventListener("keydown", (event) => this.move(event));
    this.text.addEventListener("pointerover", (event) => this.point(event.target.closest("span")));
    this.text.addEventListener("click", (event) => this.point(event.target.closest("span")));
  }

  get answer() {
    return this.steps.map((step) => step.text).join("");
  }

  get ids() {
    return this.steps.map((step) => step.token);
  }

  async run(path, body, signal) {
    this.bars.room(body.max_tokens);
    this.canvas.room(body.max_tokens);
    for await (const event of events(path, body, signal)) {
      for (const choice of event.choices) {
        if (choice.canvas) this.canvas.put(choice.canvas);
        for (const step of choice.steps ?? []) this.add(step);
      }
      if (event.metrics) this.finish(event.metrics);
    }
  }

  add(step) {
    const now = performance.now();
    this.first ??= now;
    this.steps.push(step);
    this.bars.add(step.layers);
    this.held.push(step);
    if (step.text) this.append(step);
    const seconds = (now - this.first) / 1000;
    this.show(seconds > 0 ? (this.steps.length - 1) / seconds : NaN);
  }

  /* Tokens without text of their own, such as half a character, go with the one that completes it. */
  append(step) {
    const span = make("span", { class: tint(step.layers, this.ramp) }, step.text);
    span.classList.toggle("guess", step.from_draft);
    span.classList.toggle("begins", step.from_draft && !this.text.lastElementChild?.classList.contains("guess"));
    span.steps = this.held;
    this.held = [];
    const low = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40;
    this.text.append(span);
    if (low) this.text.scrollTop = this.text.scrollHeight;
  }

  show(speed) {
    const total = this.steps.reduce((sum, step) => sum + step.layers, 0);
    this.numbers.pace.textContent = fixed(speed, 1);
    this.numbers.mean_layers.textContent = fixed(total / this.steps.length, 2);
    this.numbers.count.textContent = String(this.steps.length);
  }

  finish(metrics) {
    this.bars.room(this.steps.length);
    this.canvas.finish(this.steps.length);
    this.speed = metrics.tokens_per_second;
    this.show(this.speed);
    const rate = metrics.speculative_decoding.draft_acceptance_rate;
    this.numbers.guesses_kept.parentElement.hidden = rate === null;
    this.further.hidden = !this.chat;
    if (rate !== null) this.numbers.guesses_kept.textContent = `${fixed(100 * rate, 0)} %`;
  }

  /* Marks the token where this answer parts from another, and the one from where they are alike again. */
  mark(parts, meets) {
    for (const span of this.text.children) {
      const holds = (place) => span.steps.some((step) => step.index === place);
      span.classList.toggle("parts", holds(parts));
      span.classList.toggle("meets", meets !== undefined && holds(meets));
      const apart = span.steps[0].index >= parts && (meets === undefined || span.steps[0].index < meets);
      span.classList.toggle("apart", apart);
    }
  }

  point(span) {
    if (!span) return;
    this.here?.classList.remove("here");
    this.here = span;
    span.classList.add("here");
    this.said.textContent = span.steps.map((step) => t(step.from_draft ? "token_guessed" : "token_at",
      { place: step.index + 1, layers: step.layers, all: this.ramp.all })).join("; ");
  }

  move(event) {
    const spans = this.text.children;
    const at = this.here ? [...spans].indexOf(this.here) : -1;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (to === undefined || !spans[to]) return;
    event.preventDefault();
    this.point(spans[to]);
    spans[to].scrollIntoView({ block: "nearest" });
  }
}
