/* The comparison: reads the form, asks the server, shows answers beside each other. */

import { fetchJson } from "./api.js";
import { verdict } from "./compare.js";
import { make } from "./dom.js";
import { Knobs } from "./knobs.js";
import { copy, read, written } from "./link.js";
import { Pane } from "./pane.js";
import { fewestOf, planPicture } from "./picture.js";
import { t } from "./strings.js";

const at = (id) => document.getElementById(id);
const knobs = new Knobs(at("knobs"), at("more-knobs"), at("more"), at("knob-note"), changed);
const NUMBERS = {
  tokens: { good: (n) => Number.isInteger(n) && n >= 1 },
  temperature: { good: (n) => Number.isFinite(n) && n >= 0 },
  seed: { good: (n) => Number.isInteger(n) },
};
let talk = [];
let model = null;
let running = null;
let planning = null;
let timer = 0;
let keeping = 0;
let fewest = null;

let locked = () => {};

function fail(error, again) {
  if (error.name === "AbortError") return;
  at("error").textContent = error.message;
  at("retry").hidden = error.status !== 0;
  at("retry").onclick = again;
  const folded = error.field?.closest("details");
  if (folded) folded.open = true;
  error.field?.focus();
  if (error.status === 401) locked();
}

function calm() {
  at("error").textContent = "";
  at("retry").hidden = true;
}

function use(told) {
  model = told;
  document.body.classList.toggle("masked", model.masked);
  at("kind").closest("label").hidden = !model.chat;
  if (!model.chat) at("kind").value = "plain";
  const own = make("option", { value: "" }, t("servers_own", { name: model.default_method }));
  const names = model.methods.map((method) => {
    const option = make("option", { value: method.name }, method.why_not === null ? method.name : t("not_here", method));
    option.disabled = method.why_not !== null;
    return option;
  });
  at("method").replaceChildren(own, ...names);
  const refused = model.methods.filter((method) => method.why_not !== null);
  at("refused").hidden = refused.length === 0;
  at("reasons").replaceChildren(...refused.map((method) => make("li", {}, make("strong", {}, method.name), `: ${method.why_not}`)));
  const known = new Set(model.methods.map((method) => method.name));
  if (["auto", "full"].includes(model.default_method) && known.has("d3")) at("method").value = "d3";
}

/* The form as the address has it. */
function restore() {
  const held = read(location.hash);
  for (const [name, text] of Object.entries(held.fields)) {
    const known = at(name).tagName !== "SELECT" || [...at(name).options].some((one) => one.value === text && !one.disabled);
    if (known) at(name).value = text;
  }
  for (const [name, on] of Object.entries(held.checks)) at(name).checked = on;
  talk = model.chat ? held.talk : [];
  tell();
  choose(held.knobs);
}

/* Puts the form into the address once the typing pauses; browsers mind more than a few changes a second. */
function remember() {
  clearTimeout(keeping);
  keeping = setTimeout(keep, 300);
}

function keep() {
  clearTimeout(keeping);
  if (model && document.body.classList.contains("comparing")) history.replaceState(null, "", `#${written(at, knobs, talk)}`);
}

function choose(given = new Map()) {
  const method = model.methods.find((one) => one.name === at("method").value);
  at("about").textContent = method ? [method.summary, method.paper].filter(Boolean).join(" ") : "";
  knobs.show(method ? method.knobs : []);
  knobs.fill(given);
  changed();
}

function changed() {
  remember();
  replan();
}

/* The turns before this one. */
function tell() {
  const said = { user: t("you"), assistant: t("answer"), system: t("system_turn") };
  at("turns").replaceChildren(...talk.map(({ role, content }) => make("li", { class: role }, make("strong", {}, said[role]), ` ${content}`)));
  at("talk").hidden = talk.length === 0;
}

/* The next prompt goes on from an answer. */
function goOn(prompt, answer) {
  talk = [...talk, { role: "user", content: prompt }, { role: "assistant", content: answer }];
  at("prompt").value = "";
  tell();
  remember();
  at("prompt").focus();
}

function chosen() {
  const name = at("method").value;
  return name ? { method: name, method_args: knobs.values } : {};
}

/* The number in a field, null where it is empty; an error that names the field where it is none. */
function number(id) {
  const text = at(id).value.trim();
  const value = text === "" ? null : Number(text);
  const good = value === null || NUMBERS[id].good(value);
  at(id).setAttribute("aria-invalid", String(!good));
  if (good) return value;
  const label = at(id).closest("label").textContent.trim();
  throw Object.assign(new Error(t("wrong_number", { label, text, range: t(`number_${id}`) })), { field: at(id) });
}

/* Draws the plan of what is chosen now, once the typing pauses. */
function replan() {
  clearTimeout(timer);
  timer = setTimeout(plan, 150);
}

async function plan() {
  clearTimeout(timer);
  planning?.abort();
  planning = new AbortController();
  try {
    const tokens = number("tokens") ?? 64;
    const found = await fetchJson("playground/plan", { model: model.model, ...chosen(), max_tokens: tokens }, planning.signal);
    at("picture").replaceChildren(planPicture(found, tokens));
    at("caption").textContent = caption(found, tokens);
    fewest = fewestOf(found, tokens);
  } catch (error) {
    if (error.name === "AbortError") return;
    if (error.status === 0) fail(error, plan);
    at("picture").replaceChildren();
    fewest = null;
    at("caption").textContent = error.message;
  }
}

function caption(found, tokens) {
  const promise = t(found.exact_to === "full" ? "exact" : "lossy");
  const gain = found.guesses ? t("after_guessing") : t("ideal", { ratio: found.ideal_speedup.toFixed(2) });
  return t("plan_caption", { tokens, mean: found.mean_layers.toFixed(1), all: found.num_layers, gain, promise });
}

function request(method) {
  const chat = at("kind").value === "chat";
  const text = at("prompt").value;
  const said = chat ? { messages: [...talk, { role: "user", content: text }] } : { prompt: text };
  const body = {
    model: model.model, ...said, ...method, max_tokens: number("tokens"), temperature: number("temperature"),
    seed: number("seed"), stream: true, stream_options: { include_usage: true }, steps: true, metrics: true,
    canvas: true, ...(chat ? { reasoning_format: "none" } : {}),
  };
  return { path: chat ? "v1/chat/completions" : "v1/completions", body };
}

function comparable(name) {
  return at("compare").checked && name !== "full" && model.methods.some((method) => method.name === "full" && method.why_not === null);
}

async function run() {
  if (running || !model) return;
  calm();
  keep();
  running = new AbortController();
  at("run").disabled = true;
  at("stop").disabled = false;
  at("verdict").textContent = "";
  try {
    await answers(chosen());
  } catch (error) {
    running.abort();
    fail(error, run);
  } finally {
    running = null;
    at("run").disabled = false;
    at("stop").disabled = true;
  }
}

async function answers(method) {
  const name = method.method ?? model.default_method;
  const requests = [request(method), ...(comparable(name) ? [request({ method: "full" })] : [])];
  await plan();
  const ramp = { all: model.num_layers, fewest: fewest ?? model.num_layers / 2 };
  at("fewest").textContent = ramp.fewest < ramp.all ? t("some_layers", { count: ramp.fewest }) : t("fewer");
  const prompt = at("prompt").value;
  const further = at("kind").value === "chat" ? (text) => goOn(prompt, text) : null;
  const panes = requests.map((_, place) => new Pane(place ? t("full_depth") : name, ramp, { copy, further }));
  at("panes").replaceChildren(...panes.map((pane) => pane.element));
  at("panes").scrollIntoView({ block: "nearest" });
  const start = (pane, place) => pane.run(requests[place].path, requests[place].body, running.signal);
  if (at("together").checked) await Promise.all(panes.map(start));
  else for (const [place, pane] of panes.entries()) await start(pane, place);
  if (panes.length === 2) at("verdict").textContent = verdict(...panes);
}

at("form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
at("stop").addEventListener("click", () => running?.abort());
at("method").addEventListener("change", () => choose());
for (const name of ["prompt", "kind", "temperature", "seed", "compare", "together"]) at(name).addEventListener("input", remember);
at("tokens").addEventListener("input", changed);
at("anew").addEventListener("click", () => { talk = []; tell(); remember(); at("prompt").focus(); });
at("link").addEventListener("click", async () => {
  keep();
  await copy(location.href);
  at("link").textContent = t("copied");
  setTimeout(() => { at("link").textContent = t("copy_link"); }, 1500);
});
window.addEventListener("pagehide", keep);

function pressed(event) {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); }
  if (event.key === "Escape") running?.abort();
}

export const instrument = {
  fail, calm, use, restore, pressed,
  address: () => written(at, knobs, talk),
  lock(given) { locked = given; },
};
