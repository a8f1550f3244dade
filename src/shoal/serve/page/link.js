/* What is asked for, in the address: it survives a reload, and whoever gets the link asks for the same. No answer and no key goes in. */

const FIELDS = ["prompt", "kind", "method", "tokens", "temperature", "seed"];
const CHECKS = ["compare", "together"];

/* The form as the part of an address behind the #. */
export function written(at, knobs, talk) {
  const words = new URLSearchParams({ view: "compare" });
  for (const name of FIELDS) words.set(name, at(name).value);
  for (const name of CHECKS) words.set(name, at(name).checked ? "1" : "0");
  for (const [name, text] of knobs.texts) if (text) words.set(`knob.${name}`, text);
  if (talk.length) words.set("talk", JSON.stringify(talk));
  return words.toString();
}

/* What an address says, as far as it says anything. */
export function read(hash) {
  const words = new URLSearchParams(hash.replace(/^#/, ""));
  const fields = FIELDS.filter((name) => words.has(name)).map((name) => [name, words.get(name)]);
  const checks = CHECKS.filter((name) => words.has(name)).map((name) => [name, words.get(name) === "1"]);
  const knobs = [...words].filter(([name]) => name.startsWith("knob.")).map(([name, text]) => [name.slice(5), text]);
  return { fields: Object.fromEntries(fields), checks: Object.fromEntries(checks), knobs: new Map(knobs), talk: turns(words.get("talk")) };
}

function turns(text) {
  try {
    const found = JSON.parse(text ?? "[]");
    const good = (one) => ["system", "user", "assistant"].includes(one?.role) && typeof one.content === "string";
    return Array.isArray(found) && found.every(good) ? found.map(({ role, content }) => ({ role, content })) : [];
  } catch {
    return [];
  }
}

/* Puts text where it can be pasted from; without the clipboard's permission by way of a selection. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const held = document.createElement("textarea");
    held.value = text;
    document.body.append(held);
    held.select();
    document.execCommand("copy");
    held.remove();
  }
}
