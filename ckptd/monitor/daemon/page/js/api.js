// Requests to the daemon that served this page, and to nobody else.

const BASE = "api/v1";
const WAIT_MS = 15000;

export class ApiError extends Error {
  constructor(status, message, hint = "") {
    super(message);
    this.status = status;
    this.hint = hint;
  }
}

/** Called when the daemon wants a token. */
let refused = () => {};
export function onRefused(callback) { refused = callback; }

async function request(path, options = {}) {
  const cut = AbortSignal.timeout(WAIT_MS);
  let answer;
  try {
    answer = await fetch(`${BASE}/${path}`, {
      credentials: "same-origin", cache: "no-store", signal: cut, ...options,
    });
  } catch (cause) {
    throw new ApiError(0, "the daemon does not answer", String(cause));
  }
  if (answer.status === 401 && path !== "login") refused();
  const body = await answer.json().catch(() => null);
  if (!answer.ok) {
    const error = body?.error ?? {};
    throw new ApiError(answer.status, error.message ?? `status ${answer.status}`, error.hint ?? "");
  }
  return body;
}

export const get = (path) => request(path);

export const post = (path, body) => request(path, {
  method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
});

export const streamUrl = () => `${BASE}/stream`;
