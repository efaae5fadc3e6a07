// What both pages need: elements, requests with a token, events. Asks its own gateway and nobody else.

export const $ = (id) => document.getElementById(id);
export const percent = (value, digits = 1) => (value == null ? "–" : `${(value * 100).toFixed(digits)} %`);
export const devicePath = (name) => name.split("/").map(encodeURIComponent).join("/");
export const width = (share) => `${((share || 0) * 100).toFixed(2)}%`;
// The gateway gives a sign of life every ten seconds: a connection without one is half-open.
const SILENT_MS = 25_000;


export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function text(id, value) {
  if ($(id).textContent !== value) $(id).textContent = value;
}

// Requests.

function askToken() {
  return new Promise((resolve) => {
    const dialog = $("ask-token");
    $("wrong-token").hidden = !sessionStorage.getItem("token");
    $("token").value = "";
    // Several requests may wait for the same token.
    dialog.addEventListener("close", () => {
      // No other is a header: Escape closes the dialog unchecked.
      if ($("token").checkValidity()) sessionStorage.setItem("token", $("token").value.trim());
      resolve();
    }, { once: true });
    if (!dialog.open) dialog.showModal();
  });
}

export async function request(path, options = {}, asking = () => {}) {
  for (;;) {
    const token = sessionStorage.getItem("token");
    const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    // With 403 and this header, a token may ask, but not teach.
    const unfit = response.status === 403 && response.headers.has("www-authenticate");
    if (response.status !== 401 && !unfit) return response;
    asking();
    await askToken();
  }
}

export async function told(response) {
  const content = await response.json().catch(() => ({ error: `${response.status} ${response.statusText}` }));
  if (!response.ok) throw Object.assign(new Error(content.error), { status: response.status });
  return content;
}

// A label that may break where its words end, as in `english_springer`, and nowhere else.
export const breakable = (label) => label.split(/(?<=[_/-])/).flatMap((part) => [part, el("wbr")]);

export function alertOf(message) {
  $("alert").hidden = !message;
  text("alert", message || "");
}

// Server-sent events; EventSource sends no token.
export async function eachEvent(path, heard, left) {
  const watch = new AbortController();
  left?.addEventListener("abort", () => watch.abort());
  let timer;
  const alive = () => {
    clearTimeout(timer);
    timer = setTimeout(() => watch.abort(new Error("the gateway is silent")), SILENT_MS);
  };
  try {
    alive();
    const response = await request(path, { signal: watch.signal }, () => clearTimeout(timer));
    if (!response.ok) await told(response);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      alive();
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const [, kind, data] = /^event: (.*)\ndata: (.*)$/s.exec(part) || [];
        if (kind) heard(kind, JSON.parse(data));
      }
    }
  } finally {
    clearTimeout(timer);
  }
}

// The dot on top of a page, and its words.
export function live(kind, words) {
  $("live").className = `live ${kind}`;
  text("live-text", words);
}

// Shows every event of a path, again after each break.
export async function follow(path, show) {
  for (;;) {
    try {
      await eachEvent(path, (kind, content) => show(content));
    } catch (error) {
      console.info(error);
    }
    live("bad", "No gateway: trying again");
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}
