/* The chat: conversations, the one on screen, and the answer under way. */

import { events } from "./api.js";
import { asMarkdown, Conversation, Shelf } from "./conversation.js";
import { make } from "./dom.js";
import { Attached } from "./files.js";
import { copy } from "./link.js";
import { Message } from "./message.js";
import { chosen } from "./options.js";
import { t } from "./strings.js";
import { MOST_ROUNDS, Tools } from "./tools.js";

const at = (id) => document.getElementById(id);
const NEAR = 80;
const PAUSE = 1000;

export class Chat {
  /* `locked` is called where the server asks for a key. */
  constructor(locked) {
    Object.assign(this, { locked, model: null, running: null, shelf: new Shelf(), views: [], tools: new Tools() });
    this.attached = new Attached(at("attached"), (line) => this.complain(line));
    this.open(new Conversation());
    this.listen();
  }

  listen() {
    at("composer").addEventListener("submit", (event) => { event.preventDefault(); this.send(); });
    at("ask").addEventListener("keydown", (event) => this.typed(event));
    at("ask").addEventListener("input", grow);
    at("halt").addEventListener("click", () => this.stop());
    at("new").addEventListener("click", () => this.anew());
    at("show-list").addEventListener("click", () => this.fold(!document.body.classList.contains("listing")));
    at("as-markdown").addEventListener("click", () => this.export("md", "text/markdown", asMarkdown(this.on, { user: t("you"), assistant: t("answer"), system: t("system") })));
    at("as-json").addEventListener("click", () => this.export("json", "application/json", JSON.stringify(this.on.held, null, 2)));
    at("system").addEventListener("change", () => { this.on.system = at("system").value; if (this.on.messages.length) this.keep(); });
    at("use-tools").addEventListener("change", () => { this.on.tools = at("use-tools").checked; this.listTools(); if (this.on.messages.length) this.keep(); });
    at("attach").addEventListener("click", () => at("file").click());
    at("file").addEventListener("change", async () => { await this.attached.add([...at("file").files]); at("file").value = ""; at("ask").focus(); });
    at("thread").addEventListener("click", (event) => { const { copies } = event.target; if (copies !== undefined) this.copy(copies, event.target); });
    for (const name of ["dragover", "drop"]) at("chat").addEventListener(name, (event) => this.dropped(event));
    at("ask").addEventListener("paste", (event) => { if (event.clipboardData.files.length) { event.preventDefault(); this.attached.add([...event.clipboardData.files]); } });
    window.addEventListener("storage", () => { if (!this.running) { this.shelf.read(); this.list(); } });
    window.addEventListener("pagehide", () => { if (this.running) this.keep(); });
  }

  dropped(event) {
    if (![...event.dataTransfer.types].includes("Files")) return;
    event.preventDefault();
    document.body.classList.toggle("dropping", event.type === "dragover");
    if (event.type === "drop") this.attached.add([...event.dataTransfer.files]);
  }

  typed(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.send();
    }
    const last = this.views.findLast((view) => view.message.role === "user");
    if (event.key === "ArrowUp" && at("ask").value === "" && last && !this.running) {
      event.preventDefault();
      this.edit(last);
    }
  }

  use(model) {
    this.model = model;
    this.attached.sees = model.sees;
    at("no-template").hidden = model.chat;
    at("no-tools").hidden = model.tools !== false;
    this.tools.look(model).then(() => this.listTools(), (error) => this.complain(error.message));
  }

  open(conversation) {
    this.on = conversation;
    at("system").value = conversation.system;
    this.listTools();
    this.calm();
    this.draw();
    this.list();
    at("thread").scrollTop = at("thread").scrollHeight;
  }

  listTools() {
    this.tools.list(this.on.tools);
  }

  anew() {
    if (this.running) this.stop();
    this.open(new Conversation());
    this.fold(false);
    at("ask").focus();
  }

  fold(listing) {
    document.body.classList.toggle("listing", listing);
    at("show-list").setAttribute("aria-expanded", String(listing));
  }

  list() {
    at("list").replaceChildren(...this.shelf.newestFirst.map((one) => {
      const pick = make("button", { type: "button", class: "pick", dir: "auto" }, one.title || t("new_chat"));
      if (one.id === this.on.id) pick.setAttribute("aria-current", "true");
      pick.addEventListener("click", () => { this.stop(); this.open(one); this.fold(false); at("ask").focus(); });
      const remove = make("button", { type: "button", class: "remove", "aria-label": t("remove_this", one) }, "×");
      remove.addEventListener("click", () => this.remove(one));
      return make("li", {}, pick, remove);
    }));
    at("none-yet").hidden = this.shelf.all.size > 0;
  }

  remove(conversation) {
    if (!window.confirm(t("really_remove", conversation))) return;
    if (conversation.id === this.on.id) this.stop();
    this.shelf.remove(conversation);
    if (conversation.id === this.on.id) this.open(new Conversation());
    else this.list();
    at("new").focus();
  }

  draw() {
    this.views = this.on.path.map((message) => new Message(message, this.on.branches(message), this));
    at("messages").replaceChildren(...this.views.map((view) => view.element));
    at("title").textContent = this.on.title || t("new_chat");
    document.body.classList.toggle("empty", this.views.length === 0);
    at("export").hidden = this.views.length === 0;
  }

  /* What a message's buttons do. */
  edit(view) {
    if (this.running) return this.complain(t("busy"));
    return view.edit((text) => this.ask(text, view.message.parent, view.message.pictures));
  }

  again(message) {
    if (this.running) return this.complain(t("busy"));
    return this.answer(this.on.add("assistant", "", message.parent));
  }

  goOn(message) {
    if (this.running) return this.complain(t("busy"));
    this.on.choose(message);
    return this.answer(message);
  }

  choose(message, key) {
    if (this.running) return this.complain(t("busy"));
    this.on.choose(message);
    this.keep();
    this.draw();
    const turned = this.views.find((view) => view.message === message).element;
    return (turned.querySelector(`.${key}:enabled`) ?? turned.querySelector(".earlier:enabled, .later:enabled")).focus();
  }

  async copy(text, button) {
    await copy(text);
    button.textContent = t("copied");
    setTimeout(() => { button.textContent = t("copy"); }, 1500);
  }

  drawn() {
    if (this.follows) at("thread").scrollTop = at("thread").scrollHeight;
  }

  send() {
    const text = at("ask").value;
    if (this.running || !this.model || (text.trim() === "" && !this.attached.files.length)) return;
    at("ask").value = "";
    grow();
    this.on.system = at("system").value;
    const taken = this.attached.taken(text);
    this.ask(taken.text, this.on.leaf, taken.pictures);
  }

  ask(text, parent, pictures = []) {
    this.on.add("user", text, parent, pictures.length ? { pictures } : {});
    return this.answer(this.on.add("assistant", ""));
  }

  /* Has the model answer into a message, which may hold the beginning of the answer. */
  async answer(message) {
    const conversation = this.on;
    const running = this.running = new AbortController();
    this.calm();
    delete message.ended;
    this.keep();
    this.draw();
    this.busy(true);
    const view = this.views.find((one) => one.message === message);
    view.draw(true);
    this.follow(true);
    try {
      await this.turn(message, view, running.signal);
      at("status").textContent = t("answered");
    } catch (error) {
      message.ended = "stopped";
      if (error.name !== "AbortError") this.fail(error, message);
    } finally {
      if (this.running === running) this.running = null;
      this.busy(this.running !== null);
      this.end(conversation, message, view);
    }
  }

  end(conversation, message, view) {
    if (this.shelf.all.has(conversation.id)) this.keep(conversation); // it may have been deleted meanwhile
    if (this.on !== conversation) return;
    view.draw(false);
    this.drawn();
  }

  /* Answers and calls in turn, until an answer calls nothing. Calls that an earlier try left unmade come first. */
  async turn(message, view, signal) {
    const { model } = this;
    for (let left = MOST_ROUNDS; ; left -= 1) {
      await this.tools.look(model, signal);
      for (const call of message.rounds?.at(-1).calls.filter((one) => one.result === undefined) ?? []) {
        if (!this.on.tools) break;
        await this.tools.make(call, view.calls.get(call), model, signal);
        view.calls.get(call).draw();
        this.keep();
      }
      if (left === 0) break;
      if (!await this.stream(message, view, model, signal)) return;
    }
    message.ended = "rounds";
  }

  /* One answer; whether it calls tools, which it then does as a whole. */
  async stream(message, view, model, signal) {
    const { path, body } = this.request(message, model), calls = [];
    let last = performance.now();
    for await (const event of events(path, body, signal)) {
      for (const choice of event.choices) {
        message.content += choice.delta?.content ?? choice.text ?? "";
        const thought = choice.delta?.reasoning_content ?? choice.delta?.reasoning;
        if (thought) message.thoughts = (message.thoughts ?? "") + thought;
        for (const part of choice.delta?.tool_calls ?? []) gather(calls, part);
        if (choice.finish_reason) message.ended = choice.finish_reason;
      }
      if (event.metrics) message.figures = figures(event);
      this.follow();
      view.later();
      if (performance.now() - last > PAUSE) {
        last = performance.now();
        this.keep();
      }
    }
    if (!calls.length) return false;
    const { content, thoughts } = message;
    message.rounds = [...(message.rounds ?? []), { content, thoughts, calls }];
    message.content = "";
    delete message.thoughts;
    view.draw(true);
    this.drawn();
    return true;
  }

  /* The end stays in view unless the reader has scrolled away from it. */
  follow(now = false) {
    const { scrollHeight, scrollTop, clientHeight } = at("thread");
    this.follows = now || scrollHeight - scrollTop - clientHeight < NEAR;
    if (now) this.drawn();
  }

  /* A conversation that ends with an answer is continued; without a template the texts follow each other. */
  request(message, model) {
    const body = { ...chosen(), model: model.model, stream: true, stream_options: { include_usage: true }, metrics: true };
    const messages = this.on.said(message);
    if (model.chat) return { path: "v1/chat/completions", body: { ...body, messages, ...(this.on.tools ? this.tools.part : {}) } };
    const prompt = messages.map((one) => one.content?.at?.(-1).text ?? one.content).join("\n");
    return { path: "v1/completions", body: { max_tokens: 256, ...body, prompt } };
  }

  busy(on) {
    at("send").hidden = on;
    at("halt").hidden = !on;
    if (on) at("status").textContent = t("answering");
  }

  stop() {
    this.running?.abort();
    this.running = null;
  }

  fail(error, message) {
    if (error.status === 401) this.locked();
    this.complain(error.message);
    at("chat-retry").hidden = false;
    at("chat-retry").onclick = () => this.answer(message);
  }

  complain(line) {
    at("chat-error").textContent = line;
  }

  calm() {
    this.complain("");
    at("chat-retry").hidden = true;
  }

  keep(conversation = this.on) {
    if (!this.shelf.keep(conversation)) this.complain(t("full_storage"));
    this.list();
    at("title").textContent = this.on.title || t("new_chat");
  }

  export(ending, type, text) {
    const url = URL.createObjectURL(new Blob([text], { type }));
    const name = this.on.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40) || "chat";
    make("a", { href: url, download: `${name}.${ending}` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
    at("export").open = false;
  }
}

/* A piece of a call, put where it belongs. */
function gather(calls, { index, id, function: piece = {} }) {
  const call = calls[index] ??= { id: "", name: "", arguments: "" };
  call.id ||= id ?? "";
  call.name += piece.name ?? "";
  call.arguments += piece.arguments ?? "";
}

function figures({ metrics, usage }) {
  return {
    speed: metrics.tokens_per_second, tokens: usage.completion_tokens, kept: metrics.speculative_decoding.num_accepted_draft_tokens,
    layers: metrics.depth.mean_layers, all: metrics.depth.full_layers,
  };
}

/* The field is as high as its text, up to a bound of the style. */
function grow() {
  at("ask").style.height = "auto";
  at("ask").style.height = `${at("ask").scrollHeight + 2}px`;
}
