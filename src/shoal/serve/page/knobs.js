/* The fields of a method's knobs, made from what the server says of them. */

import { make } from "./dom.js";

/* Text as the server wants it: JSON where it is JSON, a list of numbers with or without brackets, else a string. */
export function valueOf(text) {
  const word = text.trim();
  for (const candidate of [word, /^-?\d+(\s*,\s*-?\d+)+$/.test(word) ? `[${word}]` : null]) {
    try {
      if (candidate !== null) return JSON.parse(candidate);
    } catch { /* not JSON */ }
  }
  return word;
}

function shown(value) {
  if (value === null) return "auto";
  return typeof value === "string" ? value : JSON.stringify(value);
}

function field(knob) {
  if (knob.choices.length === 0) {
    return make("input", { placeholder: shown(knob.default), autocomplete: "off", spellcheck: "false" });
  }
  const first = make("option", { value: "" }, shown(knob.default));
  const rest = knob.choices.filter((choice) => choice !== knob.default);
  return make("select", {}, first, ...rest.map((choice) => make("option", { value: shown(choice) }, shown(choice))));
}

const FIRST = ["mean", "alpha"];

/* A method's own knobs before those that all have, and of these what people turn first. */
function inOrder(knobs) {
  const rank = (knob) => [knob.own ? 0 : 1, FIRST.includes(knob.name) ? FIRST.indexOf(knob.name) : FIRST.length];
  return [...knobs].sort((a, b) => rank(a)[0] - rank(b)[0] || rank(a)[1] - rank(b)[1]);
}

export class Knobs {
  constructor(near, far, more, note, changed) {
    Object.assign(this, { near, far, more, note, changed, fields: new Map() });
  }

  show(knobs) {
    this.fields.clear();
    this.near.replaceChildren();
    this.far.replaceChildren();
    for (const knob of inOrder(knobs)) {
      const input = field(knob);
      input.dataset.knob = knob.name;
      input.addEventListener("input", this.changed);
      input.addEventListener("focus", () => { this.note.textContent = `${knob.name}: ${knob.about} (${knob.type})`; });
      input.addEventListener("blur", () => { this.note.textContent = ""; });
      this.fields.set(knob.name, input);
      (knob.own && this.near.childElementCount < 6 ? this.near : this.far).append(make("label", {}, `${knob.name} `, input));
    }
    this.more.hidden = this.far.childElementCount === 0;
  }

  /* Put texts into the fields of some knobs. */
  fill(texts) {
    for (const [name, text] of texts) {
      const input = this.fields.get(name);
      if (!input) continue;
      input.value = text;
      if (this.far.contains(input)) this.more.open = true;
    }
  }

  get texts() {
    return [...this.fields].map(([name, input]) => [name, input.value.trim()]);
  }

  get values() {
    const given = [...this.fields].filter(([, input]) => input.value.trim() !== "");
    return Object.fromEntries(given.map(([name, input]) => [name, valueOf(input.value)]));
  }
}
