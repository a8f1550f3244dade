/* Puts the page together: reads the form, asks the server, shows the answers. */

import { fetchJson, useKey } from "./api.js";
import { make } from "./dom.js";
import { Knobs } from "./knobs.js";
import { Pane } from "./pane.js";
import { fewestOf, planPicture } from "./picture.js";

const at = (id) => document.getElementById(id);
const knobs = new Knobs(at("knobs"), at("more-knobs"), at("more"), at("knob-note"), replan);
let model = null;
let running = null;
let planning = null;
let timer = 0;
let fewest = null;

function fail(error) {
  if (error.name === "AbortError") return;
  at("error").textContent = error.message;
  if (error.status === 401) {
    at("key-form").hidden = false;
    at("key").focus();
  }
}

async function load() {
  at("error").textContent = "";
  try {
    model = await fetchJson("playground/model");
  } catch (error) {
    fail(error);
    return;
  }
  at("key-form").hidden = true;
  at("model").textContent = `${model.model} · ${model.num_layers} layers`;
  at("kind").closest("label").hidden = !model.chat;
  if (!model.chat) at("kind").value = "plain";
  const own = make("option", { value: "" }, `the server's (${model.default_method})`);
  const names = model.methods.map((method) => {
    const option = make("option", { value: method.name }, method.name);
    option.disabled = method.why_not !== null;
    return option;
  });
  at("method").replaceChildren(own, ...names);
  const known = new Set(model.methods.map((method) => method.name));
  if (["auto", "full"].includes(model.default_method) && known.has("d3")) at("method").value = "d3";
  choose();
}

function choose() {
  const method = model.methods.find((one) => one.name === at("method").value);
  at("about").textContent = method ? [method.summary, method.paper].filter(Boolean).join(" ") : "";
  knobs.show(method ? method.knobs : []);
  replan();
}

function chosen() {
  const name = at("method").value;
  return name ? { method: name, method_args: knobs.values } : {};
}

function whole(id) {
  const text = at(id).value.trim();
  return text === "" ? null : Number(text);
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
  const tokens = Math.max(1, whole("tokens") || 64);
  try {
    const found = await fetchJson("playground/plan", { ...chosen(), max_tokens: tokens }, planning.signal);
    at("picture").replaceChildren(planPicture(found, tokens));
    at("caption").textContent = caption(found, tokens);
    fewest = fewestOf(found, tokens);
  } catch (error) {
    if (error.name === "AbortError") return;
    at("picture").replaceChildren();
    fewest = null;
    at("caption").textContent = error.message;
  }
}

function caption(found, tokens) {
  const promise = { full: "Same output as full depth", plan: "Lossy", none: "Lossy" }[found.exact_to];
  const gain = found.guesses ? "after guessing ahead" : `ideal speed-up ${found.ideal_speedup.toFixed(2)}×`;
  return `Layers (upwards) over ${tokens} tokens: ${found.mean_layers.toFixed(1)} of ${found.num_layers} on average, `
    + `${gain}. ${promise}.`;
}

function request(method) {
  const chat = at("kind").value === "chat";
  const text = at("prompt").value;
  const said = chat ? { messages: [{ role: "user", content: text }] } : { prompt: text };
  const body = {
    model: model.model, ...said, ...method, max_tokens: whole("tokens"), temperature: whole("temperature"),
    seed: whole("seed"), stream: true, stream_options: { include_usage: true }, steps: true, metrics: true,
  };
  return { path: chat ? "v1/chat/completions" : "v1/completions", body };
}

function comparable(name) {
  return at("compare").checked && name !== "full" && model.methods.some((method) => method.name === "full");
}

async function run() {
  if (running || !model) return;
  running = new AbortController();
  at("run").disabled = true;
  at("stop").disabled = false;
  at("error").textContent = at("verdict").textContent = "";
  await plan();
  const method = chosen();
  const name = method.method ?? model.default_method;
  const ramp = { all: model.num_layers, fewest: fewest ?? model.num_layers / 2 };
  at("fewest").textContent = ramp.fewest < ramp.all ? `${ramp.fewest} layers` : "fewer layers";
  const panes = [[new Pane(name, ramp), request(method)]];
  if (comparable(name)) panes.push([new Pane("full depth", ramp), request({ method: "full" })]);
  at("panes").replaceChildren(...panes.map(([pane]) => pane.element));
  at("panes").scrollIntoView({ block: "nearest" });
  try {
    const start = ([pane, { path, body }]) => pane.run(path, body, running.signal);
    if (at("together").checked) await Promise.all(panes.map(start));
    else for (const pair of panes) await start(pair);
    if (panes.length === 2) at("verdict").textContent = verdict(panes[0][0], panes[1][0]);
  } catch (error) {
    running.abort();
    fail(error);
  } finally {
    running = null;
    at("run").disabled = false;
    at("stop").disabled = true;
  }
}

function verdict(ours, full) {
  const [mine, theirs] = [ours.ids, full.ids];
  const first = mine.findIndex((token, place) => token !== theirs[place]);
  const same = first < 0 && mine.length === theirs.length
    ? "The same tokens as full depth"
    : `The first different token is number ${(first < 0 ? mine.length : first) + 1}`;
  const ratio = ours.speed / full.speed;
  return Number.isFinite(ratio) ? `${same}; ${ratio.toFixed(2)}× its speed in this run.` : `${same}.`;
}

at("form").addEventListener("submit", (event) => { event.preventDefault(); run(); });
at("stop").addEventListener("click", () => running?.abort());
at("method").addEventListener("change", choose);
at("tokens").addEventListener("input", replan);
at("key-form").addEventListener("submit", (event) => { event.preventDefault(); useKey(at("key").value); load(); });
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); run(); }
  if (event.key === "Escape") running?.abort();
});
load();
