/* A conversation is a tree of messages: an edit or another answer is a further branch. It is kept in the browser alone. */

import { fenced } from "./files.js";
import { goodPicture } from "./images.js";
import { parts } from "./message.js";
import { goodRounds, messagesOf } from "./tools.js";

const PREFIX = "shoal.chat.";
const TITLE = 80;

export class Conversation {
  constructor(held = {}) {
    this.id = held.id ?? crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
    this.title = held.title ?? "";
    this.system = held.system ?? "";
    this.tools = held.tools ?? true;
    this.when = held.when ?? Date.now();
    this.messages = held.messages ?? [];
    this.leaf = held.leaf ?? null;
  }

  /* The messages on screen, first to last. */
  get path() {
    return this.until(this.leaf);
  }

  until(last) {
    const found = [];
    for (let at = last; at !== null; at = this.messages[at].parent) found.unshift(this.messages[at]);
    return found;
  }

  /* A further message after `parent`; it is the last on screen. */
  add(role, content, parent = this.leaf, more = {}) {
    const message = { id: this.messages.length, parent, role, content, ...more };
    this.messages.push(message);
    this.leaf = message.id;
    this.when = Date.now();
    if (!this.title && role === "user") this.title = (content.trim() || more.pictures?.[0].name || "").split("\n")[0].slice(0, TITLE);
    return message;
  }

  branches(message) {
    return this.messages.filter((one) => one.parent === message.parent);
  }

  /* Brings a branch on screen, with what was last said after it. */
  choose(message) {
    for (let next = message; next; next = this.messages.findLast((one) => one.parent === this.leaf)) this.leaf = next.id;
  }

  /* What the model is sent to answer into a message: thoughts and figures are not part of it, but for an answer that goes on. */
  said(message) {
    const system = this.system.trim() ? [{ role: "system", content: this.system }] : [];
    return [...system, ...this.until(message.id).flatMap((one) => {
      if (one.role === "user") return [{ role: one.role, content: withPictures(one) }];
      const { rounds = [] } = one, content = one === message ? one.content : parts(one).text;
      const last = content || (one !== message && !rounds.length) ? [{ role: one.role, content }] : [];
      return [...messagesOf(rounds, (round) => parts(round).text), ...last];
    })];
  }

  get held() {
    const { id, title, system, tools, when, messages, leaf } = this;
    return { id, title, system, tools, when, messages, leaf };
  }
}

function withPictures({ content, pictures = [] }) {
  const shown = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return shown.length ? [...shown, { type: "text", text: content }] : content;
}

/* Whether something read from storage is a conversation; whoever can write there may write anything. */
function good(held) {
  const text = (value) => typeof value === "string";
  const parent = (one, place) => one.parent === null || (Number.isInteger(one.parent) && one.parent >= 0 && one.parent < place);
  return held !== null && typeof held === "object" && text(held.id) && text(held.title) && text(held.system) && [undefined, true, false].includes(held.tools) && Array.isArray(held.messages)
    && held.messages.every((one, place) => one?.id === place && text(one.content) && ["user", "assistant"].includes(one.role) && parent(one, place)
      && (one.rounds === undefined || goodRounds(one.rounds))
      && (one.pictures === undefined || (Array.isArray(one.pictures) && one.pictures.every(goodPicture))))
    && (held.leaf === null || held.messages[held.leaf] !== undefined);
}

/* The conversations in the browser's storage, or in memory where that is closed to the page. */
export class Shelf {
  constructor() {
    this.all = new Map();
    this.read();
  }

  read() {
    this.all.clear();
    try {
      for (const key of Object.keys(localStorage).filter((one) => one.startsWith(PREFIX))) this.take(localStorage.getItem(key));
    } catch { /* no storage: they live as long as the page */ }
  }

  take(text) {
    try {
      const held = JSON.parse(text);
      if (good(held)) this.all.set(held.id, new Conversation(held));
    } catch { /* no JSON: none of ours */ }
  }

  get newestFirst() {
    return [...this.all.values()].sort((a, b) => b.when - a.when);
  }

  /* False where the browser has no room for it. */
  keep(conversation) {
    this.all.set(conversation.id, conversation);
    try {
      localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation.held));
      return true;
    } catch {
      return false;
    }
  }

  remove(conversation) {
    this.all.delete(conversation.id);
    try {
      localStorage.removeItem(PREFIX + conversation.id);
    } catch { /* no storage */ }
  }
}

function written({ content, calls }) {
  return [content.trim(), ...calls.flatMap(({ name, arguments: given, result }) => [fenced(`${name} ${given}`), fenced(result ?? "")])];
}

export function asMarkdown(conversation, names) {
  const system = conversation.system.trim() ? [`## ${names.system}\n\n${conversation.system.trim()}`] : [];
  const turns = conversation.path.map(({ role, content, pictures = [], rounds = [] }) => [
    `## ${names[role]}`, ...pictures.map(({ name, url }) => `![${name.replace(/[[\]\\]/g, "\\$&")}](${url})`), ...rounds.flatMap(written), content.trim()].filter(Boolean).join("\n\n"));
  return `${[`# ${conversation.title}`, ...system, ...turns].join("\n\n")}\n`;
}
