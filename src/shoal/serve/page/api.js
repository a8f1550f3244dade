/* Speaks to the server: JSON, and streams of server-sent events. The key stays in this module's memory. */

let key = "";

export function useKey(given) {
  key = given.trim();
}

export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, body, signal) {
  try {
    return await sent(path, body, signal);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, `the server at ${location.host} does not answer; it may have been stopped, or the network is down`);
  }
}

function sent(path, body, signal) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  if (body === undefined) return fetch(path, { headers, signal });
  headers["content-type"] = "application/json";
  return fetch(path, { method: "POST", headers, signal, body: JSON.stringify(body) });
}

async function accepted(answer) {
  if (answer.ok) return answer;
  let message = `the server answered ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch { /* no JSON: a proxy's page, say */ }
  throw new Refusal(answer.status, message);
}

export async function fetchJson(path, body, signal) {
  return (await accepted(await ask(path, body, signal))).json();
}

/* Yields the parsed events; throws a Refusal for an error, before the stream or in it. */
export async function* events(path, body, signal) {
  const answer = await accepted(await ask(path, body, signal));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refusal(0, "the connection ended before the answer did");
    held += value;
    const pieces = held.split("\n\n");
    held = pieces.pop();
    for (const piece of pieces) {
      const data = piece.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refusal(0, event.error.message);
      yield event;
    }
  }
}
