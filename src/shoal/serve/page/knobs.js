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

export class Knobs {
  constructor(near, far, more, note, changed) {
    Object.assign(this, { near, far, more, note, changed, fields: new Map() });
  }

  show(knobs) {
    this.fields.clear();
    this.near.replaceChildren();
    this.far.replaceChildren();
    for (const knob of [...knobs].sort((a, b) => b.own - a.own)) {
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

  get values() {
    const given = [...this.fields].filter(([, input]) => input.value.trim() !== "");
    return Object.fromEntries(given.map(([name, input]) => [name, valueOf(input.value)]));
  }
}
