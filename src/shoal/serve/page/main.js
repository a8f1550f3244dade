/* Puts the page together: the two views, the key, the model, the language. */

import { fetchJson, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { make } from "./dom.js";
import { instrument } from "./instrument.js";
import { fill, keep, remembered } from "./options.js";
import { STRINGS, label, language, speak, t } from "./strings.js";

const at = (id) => document.getElementById(id);
const TABS = { chat: at("tab-chat"), compare: at("tab-compare") };
label(document);
const chat = new Chat(locked);
instrument.lock(locked);
let model = null;

function locked() {
  at("key-form").hidden = false;
  at("key").focus();
}

async function load() {
  chat.calm();
  instrument.calm();
  try {
    const names = (await fetchJson("v1/models")).data.map((one) => one.id);
    use(await fetchJson(asked(remembered("model"), names)), names);
  } catch (error) {
    chat.complain(error.message);
    at("chat-retry").hidden = error.status !== 0;
    at("chat-retry").onclick = load;
    instrument.fail(error, load);
    if (error.status === 401) locked();
  }
}

/* Where a model is told of: one of the list by its name, which loads it, else the server's own choice. */
function asked(name, names) {
  return names.includes(name) ? `playground/model?model=${encodeURIComponent(name)}` : "playground/model";
}

/* Another model was chosen, which may first have to be loaded. */
async function change() {
  const names = [...at("chat-model").options].map((one) => one.value), name = at("chat-model").value;
  if (!model || name === model.model) return;
  at("model").textContent = t("loading", { model: name });
  try {
    use(await fetchJson(asked(name, names)), names);
  } catch (error) {
    chat.complain(error.message);
    at("chat-model").value = model.model;
    keep();
    offer(names);
  }
}

function use(told, names) {
  model = told;
  at("key-form").hidden = true;
  offer(names);
  chat.use(told);
  instrument.use(told);
  look();
}

/* What the settings can choose from, in the language of now. */
function offer(names) {
  at("model").textContent = t("layers", { model: model.model, count: model.num_layers });
  at("chat-model").replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  at("chat-model").value = model.model;
  const able = model.methods.filter((method) => method.why_not === null);
  at("chat-method").replaceChildren(make("option", { value: "" }, t("servers_own", { name: model.default_method })),
    ...able.map((method) => make("option", { value: method.name, title: method.summary }, method.name)));
  fill();
}

/* An address with a question in it, or with the view's name, is one of the comparison. */
function look() {
  const compares = location.hash.length > 1;
  for (const [name, tab] of Object.entries(TABS)) {
    const on = (name === "compare") === compares;
    tab.setAttribute("aria-selected", String(on));
    tab.tabIndex = on ? 0 : -1;
    at(tab.getAttribute("aria-controls")).hidden = !on;
  }
  document.body.classList.toggle("comparing", compares);
  if (compares && model) instrument.restore();
}

function turn(name) {
  history.pushState(null, "", name === "compare" ? `#${instrument.address()}` : location.pathname);
  look();
}

for (const [name, tab] of Object.entries(TABS)) {
  tab.addEventListener("click", () => { if (tab.getAttribute("aria-selected") !== "true") turn(name); });
  tab.addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    const other = name === "chat" ? "compare" : "chat";
    turn(other);
    TABS[other].focus();
  });
}
window.addEventListener("hashchange", look);
window.addEventListener("popstate", look);
at("key-form").addEventListener("submit", (event) => { event.preventDefault(); useKey(at("key").value); load(); });
at("show-options").addEventListener("click", () => { chat.listTools(); at("options").showModal(); });
at("options").addEventListener("close", () => { keep(); fill(); change(); at("ask").focus(); });
at("page-language").replaceChildren(...Object.entries(STRINGS).map(([name, own]) => make("option", { value: name, lang: name }, own.language)));
at("page-language").value = language();
at("page-language").addEventListener("change", () => {
  speak(at("page-language").value);
  label(document);
  if (model) {
    keep();
    offer([...at("chat-model").options].map((one) => one.value));
    instrument.use(model);
  }
  if (!chat.running) chat.draw();
  chat.list();
  chat.listTools();
});
document.addEventListener("keydown", (event) => {
  if (document.body.classList.contains("comparing")) instrument.pressed(event);
  else if (event.key === "Escape" && !at("options").open && !event.defaultPrevented) chat.stop();
});
look();
load();
