/* Every text of the page, by language. `{name}` stands for a value. The model's text and the server's are not translated. */

const KEPT = "shoal.language";

export const STRINGS = {
  en: {
    language: "English",
    views: "Views", chat: "Chat", compare: "Compare", api_key: "API key", use_it: "Use it", layers: "{model} · {count} layers", loading: "{model} is being loaded …",
    conversations: "Conversations", new_chat: "New chat", show_list: "Conversations", none_yet: "Conversations stay in this browser.",
    remove: "Delete", remove_this: "Delete “{title}”", really_remove: "Delete “{title}”? It cannot be brought back.",
    export: "Export", settings: "Settings", message: "Message", ask_anything: "Ask anything", send: "Send", stop: "Stop",
    hint: "Enter sends, Shift Enter begins a new line, Esc stops.", conversation: "Conversation", you: "You", answer: "Answer", system: "System prompt",
    copy: "Copy", copied: "Copied", edit: "Edit", again: "Regenerate", go_on: "Continue", earlier: "Earlier branch", later: "Later branch",
    branch: "{place} of {count}", save_edit: "Send", cancel: "Cancel", edit_message: "Edit the message", code: "code", table: "Table",
    picture: "Picture, not loaded:", thoughts: "Thoughts", thinking: "Thinking", answering: "Answering", answered: "The answer is complete",
    stopped: "stopped", cut: "cut off at the limit of tokens", figures: "{speed} tokens/s · {count} tokens",
    saved: "guesses saved {kept} of {count} steps", skipped: "{layers} of {all} layers on average", try_again: "Try again",
    model: "Model", method: "Method", servers_own: "{name} (default)", temperature: "Temperature", top_p: "Top p", max_tokens: "Most tokens",
    seed: "Seed", models_own: "the model's own", any: "any", page_language: "Language of the page", close: "Close",
    system_about: "Of this conversation. It tells the model how to answer.", no_template: "This model has no chat template: it continues your text.",
    full_storage: "The browser has no room to keep this conversation. Export or delete some.",
    attach: "Attach a file", detach: "Detach {name}", drop: "Drop files here", files: "Attached files",
    no_picture: "{name} is no picture that the browser can show; it was not attached.",
    no_pictures: "{name} is a picture, and this model takes text alone; it was not attached.",
    no_text: "{name} is no text file; it was not attached.", too_large: "{name} has {size} kB; a file may have up to {most} kB.",
    keys: "Keys", key_enter: "send", key_shift: "new line", key_esc: "stop", key_up: "edit the last message, where nothing is typed",
    busy: "Stop the answer first.",
    tools: "Tools of MCP servers", tool_asks: "asks before each call", tool_allowed: "called without asking", use_tools: "Let the model call tools in this conversation", tools_off: "The tools are switched off for this conversation.",
    no_tools: "This model calls no tools: its chat template has no place for them.",
    may_call: "The model wants to call {name} of {server}. Allow it?", call_once: "Allow once", call_always: "Always allow this tool", call_deny: "Deny",
    call_asked: "{server} · waits for you", call_running: "{server} · runs", call_called: "{server} · called", call_denied: "{server} · denied", call_failed: "{server} · failed",
    call_not_called: "not called", returned: "What the tool returned, a stranger's text:", rounds: "{count} answers in a row called tools; say how to go on",
    request: "Request", so_far: "So far", anew: "Begin anew", turns: "Turns so far", prompt: "Prompt", run: "Run", copy_link: "Copy link",
    prompt_is: "Prompt is", kind_chat: "a chat message", kind_plain: "plain text", refused: "Methods that this model cannot run",
    more_knobs: "More knobs", tokens: "Tokens", beside: "Beside full depth", together: "both at once (they share the machine)",
    answers: "Answers", fewer: "fewer layers", all_layers: "all layers", guessed: "guessed ahead", differs: "differs",
    number_tokens: "a whole number of at least 1",
    number_temperature: "a number of at least 0",
    number_seed: "a whole number, or nothing for any",
    wrong_number: "{label} is “{text}”; it must be {range}",
    not_here: "{name} (not on this model)",
    system_turn: "System",
    exact: "Same output as full depth",
    lossy: "Lossy",
    after_guessing: "after guessing ahead",
    ideal: "ideal speed-up {ratio}×",
    plan_caption: "Layers (upwards) over {tokens} tokens: {mean} of {all} on average, {gain}. {promise}.",
    some_layers: "{count} layers",
    full_depth: "full depth",
    tokens_of: "Tokens of {title}; arrow keys go through them",
    pace: "tokens/s",
    mean_layers: "mean layers",
    count: "tokens",
    guesses_kept: "guesses kept",
    further: "Go on from this answer",
    token_at: "token {place}: {layers} of {all} layers",
    token_guessed: "token {place}: {layers} of {all} layers, guessed ahead",
    same: "The same tokens as full depth{pace}.",
    meets: ", from number {ours} on ({full} there) the texts meet again",
    parts: "The first different token is number {place}{met}{pace}.",
    times: "; {ratio}× its speed in this run",
    plan_picture: "Layers by token: {mean} of {all} on average",
    bars: "Layers run by token",
    decided_last: "decided last",
    decided_first: "first",
    box: "word {place}, step {step}",
    boxes: "{count} words, decided in {steps} steps",
  },
  de: {
    language: "Deutsch",
    views: "Ansichten", chat: "Chat", compare: "Vergleich", api_key: "API-Schlüssel", use_it: "Verwenden", layers: "{model} · {count} Schichten", loading: "{model} wird geladen …",
    conversations: "Gespräche", new_chat: "Neues Gespräch", show_list: "Gespräche", none_yet: "Gespräche bleiben in diesem Browser.",
    remove: "Löschen", remove_this: "„{title}“ löschen", really_remove: "„{title}“ löschen? Das lässt sich nicht rückgängig machen.",
    export: "Exportieren", settings: "Einstellungen", message: "Nachricht", ask_anything: "Frag etwas", send: "Senden", stop: "Anhalten",
    hint: "Enter sendet, Umschalt Enter beginnt eine Zeile, Esc hält an.", conversation: "Gespräch", you: "Du", answer: "Antwort", system: "Systemprompt",
    copy: "Kopieren", copied: "Kopiert", edit: "Bearbeiten", again: "Neu antworten", go_on: "Fortsetzen", earlier: "Früherer Zweig", later: "Späterer Zweig",
    branch: "{place} von {count}", save_edit: "Senden", cancel: "Abbrechen", edit_message: "Nachricht bearbeiten", code: "Code", table: "Tabelle",
    picture: "Bild, nicht geladen:", thoughts: "Gedanken", thinking: "Denkt nach", answering: "Antwortet", answered: "Die Antwort ist vollständig",
    stopped: "angehalten", cut: "am Limit der Token abgeschnitten", figures: "{speed} Token/s · {count} Token",
    saved: "Raten sparte {kept} von {count} Schritten", skipped: "im Mittel {layers} von {all} Schichten", try_again: "Noch einmal",
    model: "Modell", method: "Verfahren", servers_own: "{name} (Vorgabe)", temperature: "Temperatur", top_p: "Top p", max_tokens: "Höchstens Token",
    seed: "Startwert", models_own: "wie vom Modell empfohlen", any: "beliebig", page_language: "Sprache der Seite", close: "Schließen",
    system_about: "Für dieses Gespräch. Er sagt dem Modell, wie es antworten soll.", no_template: "Dieses Modell hat keine Chat-Vorlage: Es setzt den Text fort.",
    full_storage: "Der Browser hat keinen Platz für dieses Gespräch. Exportiere oder lösche einige.",
    attach: "Datei anhängen", detach: "{name} entfernen", drop: "Dateien hier ablegen", files: "Angehängte Dateien",
    no_picture: "{name} ist kein Bild, das der Browser zeigen kann; es wurde nicht angehängt.",
    no_pictures: "{name} ist ein Bild, und dieses Modell nimmt nur Text; es wurde nicht angehängt.",
    no_text: "{name} ist keine Textdatei; sie wurde nicht angehängt.", too_large: "{name} hat {size} kB; eine Datei darf bis zu {most} kB haben.",
    keys: "Tasten", key_enter: "senden", key_shift: "neue Zeile", key_esc: "anhalten", key_up: "letzte Nachricht bearbeiten, wo nichts getippt ist",
    busy: "Halte zuerst die Antwort an.",
    tools: "Werkzeuge von MCP-Servern", tool_asks: "fragt vor jedem Aufruf", tool_allowed: "ohne Nachfrage", use_tools: "Werkzeuge in diesem Gespräch aufrufen lassen", tools_off: "Die Werkzeuge sind für dieses Gespräch abgeschaltet.",
    no_tools: "Dieses Modell ruft keine Werkzeuge auf: Seine Chat-Vorlage hat keinen Platz dafür.",
    may_call: "Das Modell will {name} von {server} aufrufen. Erlauben?", call_once: "Einmal erlauben", call_always: "Dieses Werkzeug immer erlauben", call_deny: "Ablehnen",
    call_asked: "{server} · wartet auf dich", call_running: "{server} · läuft", call_called: "{server} · aufgerufen", call_denied: "{server} · abgelehnt", call_failed: "{server} · fehlgeschlagen",
    call_not_called: "nicht aufgerufen", returned: "Was das Werkzeug lieferte, ein fremder Text:", rounds: "{count} Antworten nacheinander riefen Werkzeuge auf; sag, wie es weitergeht",
    request: "Anfrage", so_far: "Bisher", anew: "Neu beginnen", turns: "Bisherige Beiträge", prompt: "Prompt", run: "Los", copy_link: "Link kopieren",
    prompt_is: "Der Prompt ist", kind_chat: "eine Nachricht im Chat", kind_plain: "reiner Text", refused: "Verfahren, die dieses Modell nicht kann",
    more_knobs: "Weitere Regler", tokens: "Token", beside: "Neben voller Tiefe", together: "beide zugleich (sie teilen sich die Maschine)",
    answers: "Antworten", fewer: "weniger Schichten", all_layers: "alle Schichten", guessed: "vorab geraten", differs: "weicht ab",
    number_tokens: "eine ganze Zahl ab 1",
    number_temperature: "eine Zahl ab 0",
    number_seed: "eine ganze Zahl, oder leer für eine beliebige",
    wrong_number: "{label} ist „{text}“; erlaubt ist {range}",
    not_here: "{name} (nicht mit diesem Modell)",
    system_turn: "System",
    exact: "Gleiche Ausgabe wie bei voller Tiefe",
    lossy: "Verlustbehaftet",
    after_guessing: "nach Vorabraten",
    ideal: "bestenfalls {ratio}-mal so schnell",
    plan_caption: "Schichten (nach oben) über {tokens} Token: im Mittel {mean} von {all}, {gain}. {promise}.",
    some_layers: "{count} Schichten",
    full_depth: "volle Tiefe",
    tokens_of: "Token von {title}; Pfeiltasten gehen sie durch",
    pace: "Token/s",
    mean_layers: "Schichten im Mittel",
    count: "Token",
    guesses_kept: "Geratenes behalten",
    further: "Von dieser Antwort aus weiter",
    token_at: "Token {place}: {layers} von {all} Schichten",
    token_guessed: "Token {place}: {layers} von {all} Schichten, vorab geraten",
    same: "Dieselben Token wie bei voller Tiefe{pace}.",
    meets: ", ab Nummer {ours} (dort {full}) stimmen die Texte wieder überein",
    parts: "Das erste andere Token ist Nummer {place}{met}{pace}.",
    times: "; in diesem Lauf {ratio}-mal so schnell",
    plan_picture: "Schichten je Token: im Mittel {mean} von {all}",
    bars: "Gerechnete Schichten je Token",
    decided_last: "zuletzt entschieden",
    decided_first: "zuerst",
    box: "Wort {place}, Schritt {step}",
    boxes: "{count} Wörter, in {steps} Schritten entschieden",
  },
};

let current = chosen();

function chosen() {
  const known = (name) => (Object.hasOwn(STRINGS, name ?? "") ? name : null);
  try {
    return known(localStorage.getItem(KEPT)) ?? known(navigator.language.slice(0, 2)) ?? "en";
  } catch {
    return "en";
  }
}

export function language() {
  return current;
}

export function speak(name) {
  current = name;
  try {
    localStorage.setItem(KEPT, name);
  } catch { /* no storage: until the page is left */ }
}

export function t(key, values = {}) {
  return STRINGS[current][key].replace(/\{(\w+)\}/g, (_, name) => values[name]);
}

/* Puts the texts of the language where the page's markup names them. */
export function label(root) {
  document.documentElement.lang = current;
  for (const one of root.querySelectorAll("[data-t]")) one.textContent = t(one.dataset.t);
  for (const one of root.querySelectorAll("[data-t-label]")) one.setAttribute("aria-label", t(one.dataset.tLabel));
  for (const one of root.querySelectorAll("[data-t-hint]")) one.setAttribute("placeholder", t(one.dataset.tHint));
}
