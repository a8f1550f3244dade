/* One message of a conversation on screen: its text, its figures, what can be done with it. */

import { make } from "./dom.js";
import { thumbnail } from "./images.js";
import { show } from "./markdown.js";
import { t } from "./strings.js";
import { CallView, MOST_ROUNDS } from "./tools.js";

const THOUGHTS = /^\s*<think>([^]*?)(?:<\/think>|$)/;

/* Thoughts and answer, whether the server tells them apart or leaves the model's tags in the text. */
export function parts({ content, thoughts = "" }) {
  const found = thoughts ? null : THOUGHTS.exec(content);
  return found ? { thoughts: found[1].trim(), text: content.slice(found[0].length).trimStart() } : { thoughts, text: content };
}

export class Message {
  /* `does` has what the buttons do: edit, again, goOn, choose, copy. */
  constructor(message, branches, does) {
    Object.assign(this, { message, branches, does });
    this.calls = new Map();
    this.rounds = make("div", { class: "rounds" });
    Object.assign(this, folding());
    this.seen = make("div", { class: "seen" }, ...(message.pictures ?? []).map(thumbnail));
    this.text = make("div", { class: message.role === "assistant" ? "markdown" : "typed", dir: "auto" });
    this.figures = make("p", { class: "figures note" });
    this.buttons = make("div", { class: "tools" });
    this.element = make("li", { class: message.role },
      make("h3", { class: "unseen" }, t(message.role === "user" ? "you" : "answer")), this.seen, this.rounds, this.folded, this.text, this.figures, this.buttons);
    this.draw(false);
  }

  /* Shows the message as it is now; once a frame is enough. */
  later() {
    this.frame ??= requestAnimationFrame(() => { this.frame = undefined; this.draw(true); this.does.drawn(); });
  }

  draw(underWay) {
    if (this.frame !== undefined) cancelAnimationFrame(this.frame);
    this.frame = undefined;
    if (this.message.role === "user") this.text.textContent = this.message.content;
    else this.answer(underWay);
    this.figures.textContent = underWay ? "" : figures(this.message);
    this.buttons.replaceChildren(...(underWay ? [] : this.tools()));
  }

  /* Answers of the turn that called tools, and the calls; these stay as they are while they are asked about. */
  called(underWay) {
    for (const round of (this.message.rounds ?? []).slice(this.rounds.childElementCount)) {
      const { folded, thoughts } = folding(), said = parts(round), text = make("div", { class: "markdown", dir: "auto" });
      folded.hidden = !said.thoughts;
      show(thoughts, said.thoughts);
      show(text, said.text);
      for (const call of round.calls) this.calls.set(call, new CallView(call));
      this.rounds.append(make("div", {}, folded, text, ...round.calls.map((call) => this.calls.get(call).element)));
    }
    if (!underWay) for (const view of this.calls.values()) view.draw();
  }

  answer(underWay) {
    this.called(underWay);
    const { thoughts, text } = parts(this.message);
    this.folded.hidden = !thoughts;
    this.summary.textContent = t(underWay && !text ? "thinking" : "thoughts");
    show(this.thoughts, thoughts);
    show(this.text, text);
    this.element.classList.toggle("waiting", underWay && !text);
  }

  tools() {
    const button = (key, act) => {
      const made = make("button", { type: "button", class: key }, t(key));
      made.addEventListener("click", () => act(made));
      return made;
    };
    const own = this.message.role === "user"
      ? [button("edit", () => this.does.edit(this))]
      : [button("again", () => this.does.again(this.message)),
        ...(this.message.ended && this.message.ended !== "stop" ? [button("go_on", () => this.does.goOn(this.message))] : [])];
    const copied = button("copy", (made) => this.does.copy(parts(this.message).text, made));
    return [...this.turning(), copied, ...own];
  }

  turning() {
    if (this.branches.length < 2) return [];
    const at = this.branches.indexOf(this.message);
    const step = (key, sign, to) => {
      const made = make("button", { type: "button", class: key, "aria-label": t(key) }, sign);
      made.disabled = !to;
      made.addEventListener("click", () => this.does.choose(to, key));
      return made;
    };
    return [step("earlier", "‹", this.branches[at - 1]),
      make("span", { class: "place" }, t("branch", { place: at + 1, count: this.branches.length })), step("later", "›", this.branches[at + 1])];
  }

  /* Puts a field where the text is; what it holds is sent as a further branch. */
  edit(send) {
    const field = make("textarea", { rows: "3", "aria-label": t("edit_message") });
    field.value = this.message.content;
    const form = make("form", { class: "editing" }, field, make("div", { class: "row" },
      make("button", { type: "submit" }, t("save_edit")), make("button", { type: "button" }, t("cancel"))));
    const back = () => { form.remove(); this.text.hidden = this.buttons.hidden = false; this.buttons.querySelector(".edit").focus(); };
    form.addEventListener("submit", (event) => { event.preventDefault(); if (field.value.trim()) send(field.value); });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") back();
      if (event.key === "Enter" && !event.shiftKey && event.target === field && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
    });
    form.querySelector("button[type=button]").addEventListener("click", back);
    this.text.hidden = this.buttons.hidden = true;
    this.text.after(form);
    field.focus();
  }
}

function folding() {
  const thoughts = make("div", { class: "markdown" }), summary = make("summary", {}, t("thoughts"));
  return { thoughts, summary, folded: make("details", { class: "thoughts", hidden: "" }, summary, thoughts) };
}

/* The quiet line: pace, tokens, and what was not computed. */
function figures({ figures: found, ended }) {
  const end = { length: t("cut"), stopped: t("stopped"), rounds: t("rounds", { count: MOST_ROUNDS }) }[ended] ?? "";
  if (!found) return end;
  const line = [t("figures", { speed: found.speed.toFixed(1), count: found.tokens })];
  if (found.kept) line.push(t("saved", { kept: found.kept, count: found.tokens }));
  if (found.layers && found.layers < found.all) line.push(t("skipped", { layers: found.layers.toFixed(1), all: found.all }));
  return [...line, end].filter(Boolean).join(" · ");
}
