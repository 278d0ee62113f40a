// The server's routes: relative addresses, the key where one is needed, errors in the server's words.

import { recall, remember, state, update } from "./store.js";

export class ApiError extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

let key = recall("key", { tab: true }) ?? recall("key");
let asking = null;

/** The key that the user types; many requests may wait for it. */
function askForKey() {
  if (asking === null) {
    const refused = key !== null;
    asking = {};
    asking.answer = new Promise((resolve, reject) => Object.assign(asking, { resolve, reject }));
    update({ key: { refused } });
  }
  return asking.answer;
}

export function giveKey(given, keep) {
  key = given;
  remember("key", given, { tab: true });
  remember("key", keep ? given : null);
  const { resolve } = asking;
  asking = null;
  update({ key: null });
  resolve();
}

export function refuseKey() {
  const { reject } = asking;
  asking = null;
  update({ key: null });
  reject(new ApiError("This server wants an API key.", { status: 401 }));
}

export function forgetKey() {
  key = null;
  remember("key", null, { tab: true });
  remember("key", null);
}

export const hasKey = () => key !== null;

/** A successful response. Raises `ApiError`, or AbortError. */
async function request(path, options = {}) {
  for (;;) {
    const sent = key;
    const headers = { ...options.headers, ...(key !== null && { Authorization: `Bearer ${key}` }) };
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server does not answer.");
    }
    if (response.ok) return response;
    if (response.status !== 401) throw await refusal(response);
    if (sent === key) await askForKey(); // else another request has brought a new one meanwhile
  }
}

async function refusal(response) {
  const text = await response.text();
  try {
    const { message, param } = JSON.parse(text).error;
    return new ApiError(message, { status: response.status, param });
  } catch {
    return new ApiError(`The server answers ${response.status}.`, { status: response.status });
  }
}

export async function get(path) {
  return (await request(path)).json();
}

/** The chunks of a streamed chat completion. Raises `ApiError` also for a stream that ends too early. */
export async function* chat(body, signal) {
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const ignored = response.headers.get("x-pageloom-ignored");
  if (ignored) console.warn("the server ignored", ignored);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, { param: chunk.error.param });
    yield chunk;
  }
  throw new ApiError("The connection was closed before the answer was complete.");
}

/** The data of server-sent events. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The connection broke before the answer was complete.");
    }
    if (part.done) return;
    const whole = (rest + part.value).split(/\r?\n\r?\n/);
    rest = whole.pop();
    for (const event of whole) {
      const lines = event.split(/\r?\n/).filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(line[5] === " " ? 6 : 5)).join("\n");
    }
  }
}

/** Which models there are; the chosen one stays, if it is still there. */
export async function loadModels() {
  try {
    const models = (await get("v1/models")).data;
    const names = models.map((model) => model.id);
    const chosen = state.model ?? recall("model");
    update({ models, model: names.includes(chosen) ? chosen : names[0], offline: null });
  } catch (error) {
    update({ offline: error.message });
  }
}
