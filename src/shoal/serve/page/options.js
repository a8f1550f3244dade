/* How answers are asked for: what the settings hold, kept in the browser. An empty field leaves the choice to the server. */

const KEPT = "shoal.settings";
const NUMBERS = { temperature: "chat-temperature", top_p: "top-p", max_tokens: "most-tokens", seed: "chat-seed" };
const CHOICES = { model: "chat-model", method: "chat-method" };

const at = (id) => document.getElementById(id);

function kept() {
  try {
    const found = JSON.parse(localStorage.getItem(KEPT) ?? "{}");
    return found !== null && typeof found === "object" ? found : {};
  } catch {
    return {};
  }
}

/* What is kept under a name, such as the model. */
export function remembered(name) {
  return kept()[name];
}

/* Puts what is kept into the fields, as far as they have it. */
export function fill() {
  const held = kept();
  for (const [name, id] of Object.entries(NUMBERS)) at(id).value = Number.isFinite(held[name]) ? held[name] : "";
  for (const [name, id] of Object.entries(CHOICES)) {
    const known = [...at(id).options].some((one) => one.value === held[name] && !one.disabled);
    if (known) at(id).value = held[name];
  }
}

/* The fields that hold something good, as a request has them. */
export function chosen() {
  const numbers = Object.entries(NUMBERS).filter(([, id]) => at(id).value.trim() !== "" && at(id).checkValidity());
  const choices = Object.entries(CHOICES).filter(([, id]) => at(id).value !== "");
  return Object.fromEntries([...numbers.map(([name, id]) => [name, Number(at(id).value)]), ...choices.map(([name, id]) => [name, at(id).value])]);
}

export function keep() {
  try {
    localStorage.setItem(KEPT, JSON.stringify(chosen()));
  } catch { /* no storage: until the page is left */ }
}
