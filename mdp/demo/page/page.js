// The demo as it goes on. Asks its own server and nobody else.

const $ = (id) => document.getElementById(id);
const ASK_MS = 250;
const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
const width = (share) => `${(100 * share).toFixed(1)}%`;
const words = (label) => label.replaceAll("_", " ");
const cards = new Map();
let busy = 0;

function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

async function send(change, button) {
  button.disabled = true;
  busy += 1;
  try {
    const response = await fetch("change", { method: "POST", body: JSON.stringify(change) });
    if (response.ok) show(await response.json());
  } finally {
    busy -= 1;
    button.disabled = false;
  }
}

function newCard(camera) {
  const card = $("camera").content.firstElementChild.cloneNode(true);
  const [cover, plug] = [card.querySelector(".cover"), card.querySelector(".plug")];
  text(card.querySelector("h2"), camera.camera);
  text(card.querySelector(".device"), camera.device);
  cover.addEventListener("click", () =>
    send({ do: "cover", device: camera.device, on: cover.getAttribute("aria-pressed") !== "true" }, cover));
  plug.addEventListener("click", () =>
    send({ do: "plug", device: camera.device, on: plug.getAttribute("aria-pressed") === "true" }, plug));
  $("cameras").append(card);
  cards.set(camera.device, card);
  return card;
}

function press(button, pressed, name) {
  button.setAttribute("aria-pressed", String(pressed));
  text(button, name);
}

// All cameras' pictures change at once, when the last of them is there.
async function showPictures(cameras, item) {
  const changed = cameras.map((camera) => [camera, cards.get(camera.device) || newCard(camera), `${item.number} ${camera.covered}`])
    .filter(([, card, shown]) => card.dataset.shown !== shown);
  const loaded = await Promise.all(changed.map(async ([camera, card, shown]) => {
    card.dataset.shown = shown;
    const picture = new Image();
    picture.alt = `What camera ${camera.camera} sees`;
    picture.src = `picture/${encodeURIComponent(camera.device)}?${encodeURIComponent(shown)}`;
    await picture.decode().catch(() => {});
    return [card, shown, picture];
  }));
  for (const [card, shown, picture] of loaded) {
    if (card.dataset.shown === shown) card.querySelector("img").replaceWith(picture);
  }
}

function showCamera(camera, item) {
  const card = cards.get(camera.device) || newCard(camera);
  press(card.querySelector(".cover"), camera.covered, camera.covered ? "Uncover" : "Cover");
  press(card.querySelector(".plug"), !camera.plugged, camera.plugged ? "Unplug" : "Plug in");
  card.classList.toggle("gone", !camera.plugged);
  const badge = card.querySelector(".badge");
  const note = !camera.plugged ? "unplugged" : camera.suspect ? `suspected: ${camera.suspect}` : "";
  badge.hidden = !note;
  text(badge, note);
  if (!camera.plugged) {
    text(card.querySelector(".what"), "says nothing");
    text(card.querySelector(".sure"), "");
    card.querySelector(".bar i").style.width = "0";
    card.classList.remove("wrong");
  } else if (camera.own) {
    text(card.querySelector(".what"), words(camera.own.label));
    text(card.querySelector(".sure"), percent(camera.own.probability, 0));
    card.querySelector(".bar i").style.width = width(camera.own.probability);
    card.classList.toggle("wrong", item.label !== null && camera.own.label !== item.label);
  }
}

function showAnswer(state) {
  const { answer, item, cameras } = state;
  const panel = document.querySelector(".verdict");
  if (!answer) return;
  panel.classList.toggle("failed", Boolean(answer.error));
  panel.classList.toggle("unknown", answer.known === false);
  const truth = $("truth");
  if (answer.error) {
    text($("label"), answer.error);
    text(truth, "no answer, and why");
    truth.className = "truth";
    for (const id of ["used", "expected", "latency"]) text($(id), "–");
    return;
  }
  const unknown = answer.known === false;
  const label = $("label");
  label.replaceChildren(unknown ? "none of these" : words(answer.label));
  const small = document.createElement("small");
  text(small, unknown ? `nearest ${words(answer.label)}` : percent(answer.probability, 0));
  label.append(small);
  const right = item.label === null ? unknown : !unknown && answer.label === item.label;
  text(truth, item.label === null ? `${right ? "right" : "wrong"}: it is no class` : `${right ? "right" : "wrong"}: it is ${words(item.label)}`);
  truth.className = `truth ${right ? "right" : "wrong"}`;
  const names = new Map(cameras.map((one) => [one.device, one.camera]));
  text($("used"), answer.used.map((device) => names.get(device)).join(" + "));
  const missing = cameras.filter((one) => one.missing);
  text($("missing"), missing.map((one) => `${one.camera}: ${one.missing}`).join("; ") || "nothing");
  $("missing").className = missing.length ? "bad" : "";
  const doubted = answer.suspects.length > 0;
  const expected = doubted ? "unknown while a camera is suspected"
    : unknown ? (answer.known_rejected == null ? "–" : `${percent(answer.known_rejected)} of known items`)
    : answer.expected_accuracy == null ? "never measured"
    : `${percent(answer.expected_accuracy)}, measured for exactly these ${answer.used.length}`;
  text($("worth"), unknown && !doubted ? "Called so wrongly" : "Expected accuracy");
  text($("expected"), expected);
  $("expected").className = doubted ? "warn" : "";
  text($("latency"), `${answer.latency_ms.toFixed(1)} of ${state.deadline_ms.toFixed(0)} ms`);
}

function showScore({ tally, cameras }) {
  const rows = [["together", tally.fused, true], ...cameras.map((one) => [`${one.camera} alone`, tally.alone[one.device] || 0, false])];
  const list = $("score");
  while (list.children.length < rows.length) {
    const row = document.createElement("li");
    row.innerHTML = '<span></span><span class="bar" aria-hidden="true"><i></i></span><span class="number"></span>';
    list.append(row);
  }
  rows.forEach(([name, right, all], place) => {
    const row = list.children[place];
    row.classList.toggle("all", all);
    text(row.children[0], name);
    row.querySelector("i").style.width = width(tally.items ? right / tally.items : 0);
    text(row.children[2], `${right}/${tally.items}`);
  });
}

function showLines(lines) {
  const list = $("lines");
  if (!lines.length || list.dataset.shown === lines.join("\n")) return;
  list.dataset.shown = lines.join("\n");
  list.replaceChildren(...lines.toReversed().map((line) => {
    const row = document.createElement("li");
    text(row, line);
    return row;
  }));
}

function show(state) {
  $("gone").hidden = true;
  showPictures(state.cameras, state.item);
  for (const camera of state.cameras) showCamera(camera, state.item);
  showAnswer(state);
  showScore(state);
  showLines(state.lines);
}

$("else").addEventListener("click", (event) => send({ do: "something else" }, event.currentTarget));
for (;;) {
  try {
    const response = await fetch("state");
    if (!busy) show(await response.json());
  } catch {
    $("gone").hidden = false;
  }
  await new Promise((resolve) => setTimeout(resolve, ASK_MS));
}
