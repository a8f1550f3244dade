/* Tools of the server's MCP servers: which there are, whether one may be called, and a call on screen. What a model asks for and what a tool returns are strangers' texts. */

import { fetchJson } from "./api.js";
import { make } from "./dom.js";
import { t } from "./strings.js";

export const MOST_ROUNDS = 8;
const ENDS = ["called", "denied", "failed"];
const DENIED = "The user did not allow this call.";
const INTERRUPTED = "The user interrupted this call.";

const at = (id) => document.getElementById(id);

/* Answers of one turn that called tools, each with its results, as the model is sent them. */
export function messagesOf(rounds, textOf) {
  return rounds.flatMap((round) => [
    { role: "assistant", content: textOf(round), tool_calls: round.calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } })) },
    ...round.calls.map(({ id, name, result }) => ({ role: "tool", tool_call_id: id, name, content: result ?? INTERRUPTED })),
  ]);
}

/* Whether something read from storage is such a list. */
export function goodRounds(held) {
  const text = (value) => typeof value === "string";
  const call = (one) => text(one?.id) && text(one.name) && text(one.arguments) && [undefined, ...ENDS].includes(one.state)
    && ["result", "server", "error"].every((name) => one[name] === undefined || text(one[name]));
  return Array.isArray(held) && held.every((round) => text(round?.content) && (round.thoughts === undefined || text(round.thoughts)) && Array.isArray(round.calls) && round.calls.every(call));
}

export class Tools {
  constructor() {
    Object.assign(this, { offered: [], always: new Set() });
  }

  /* Asks the server what there is now. */
  async look(model, signal) {
    this.offered = model.tools ? (await fetchJson(`playground/tools?model=${encodeURIComponent(model.model)}`, undefined, signal)).tools : [];
  }

  /* What is added to a request; nothing where there are no tools. */
  get part() {
    return this.offered.length ? { tools: this.offered.map((one) => one.function) } : {};
  }

  /* Shows which there are, which are called without asking, and whether this conversation uses them. */
  list(on) {
    at("tools").hidden = !this.offered.length;
    at("use-tools").checked = on;
    at("tools-off").hidden = on || !this.offered.length;
    at("tool-list").replaceChildren(...this.offered.map((one) => make("li", {}, make("code", {}, one.name),
      ` ${visible(one.server)} · ${t(this.allows(one) ? "tool_allowed" : "tool_asks")}`)));
  }

  allows(tool) {
    return tool.allowed || this.always.has(key(tool));
  }

  /* Makes a call if that is allowed; its result is whole, or there is none. */
  async make(call, view, model, signal) {
    const tool = this.offered.find((one) => one.name === call.name);
    call.server = tool?.server;
    if (tool && !this.allows(tool)) {
      const said = await view.ask(signal);
      if (said === "always") this.always.add(key(tool));
      if (said === "deny") return Object.assign(call, { state: "denied", result: DENIED });
    }
    view.draw("running");
    const { content, error } = await fetchJson("playground/call", { model: model.model, name: call.name, arguments: parsed(call.arguments) }, signal);
    return Object.assign(call, error === null ? { state: "called", result: content } : { state: "failed", result: content, error });
  }
}

function key({ server, name }) {
  return JSON.stringify([server, name]);
}

/* Arguments as the tool takes them; what is no JSON stays text, which the server refuses. */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/* Text whose invisible characters are spelled out, so that what is allowed is what is read. */
export function visible(text) {
  return text.replace(/[^\P{C}\n\t]|[\p{Zl}\p{Zp}]/gu, (one) => `\\u${one.codePointAt(0).toString(16).padStart(4, "0")}`);
}

function pretty(text) {
  const value = parsed(text);
  return value !== null && typeof value === "object" ? JSON.stringify(value, null, 1) : text;
}

/* A call: folded, with its name, arguments and result; open while it is asked about. */
export class CallView {
  constructor(call) {
    this.call = call;
    this.state = make("span", { class: "note" });
    this.trouble = make("p", { class: "trouble" });
    this.result = make("pre");
    this.returned = make("div", { hidden: "" }, make("p", { class: "note" }, t("returned")), this.result);
    this.folded = make("details", {}, make("summary", {}, make("code", {}, visible(call.name)), " ", this.state),
      make("pre", { class: "arguments" }, visible(pretty(call.arguments))), this.returned);
    this.element = make("div", { class: "call" }, this.folded, this.trouble);
    this.draw();
  }

  draw(state = this.call.state ?? "not_called") {
    const { server, result, error } = this.call;
    this.state.textContent = t(`call_${state}`, { server: visible(server ?? "?") });
    this.trouble.textContent = visible(error ?? "");
    this.returned.hidden = state !== "called";
    this.result.textContent = visible(result ?? "");
  }

  /* "once", "always" or "deny", by the person. The keyboard is not put on a button: whoever types must not allow anything. */
  ask(signal) {
    const question = t("may_call", { name: visible(this.call.name), server: visible(this.call.server) });
    const buttons = ["once", "always", "deny"].map((answer) => make("button", { type: "button", class: answer }, t(`call_${answer}`)));
    const asking = make("div", { class: "asking", role: "group", tabindex: "-1", "aria-label": question }, make("p", {}, question), make("div", { class: "row" }, ...buttons));
    this.draw("asked");
    this.folded.open = true;
    this.element.append(asking);
    asking.scrollIntoView({ block: "nearest" });
    document.getElementById("status").textContent = question;
    const field = document.getElementById("ask");
    if (document.activeElement === document.body || (document.activeElement === field && field.value === "")) asking.focus({ preventScroll: true });
    return new Promise((resolve, reject) => {
      const end = (settle, value) => {
        const held = asking.contains(document.activeElement);
        asking.remove();
        this.folded.open = false;
        if (held) field.focus();
        settle(value);
      };
      for (const button of buttons) button.addEventListener("click", () => end(resolve, button.className));
      signal.addEventListener("abort", () => { this.draw(); end(reject, signal.reason); }, { once: true });
      if (signal.aborted) end(reject, signal.reason);
    });
  }
}
