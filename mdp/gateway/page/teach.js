// Teaching: record scenes, put kept items right, build, roll out, mask cameras.

import { $, alertOf, breakable, eachEvent, devicePath, el, follow, live, percent, request, text, told, width } from "./common.js";

const WHY = { unknown: "unknown", different: "different from good ones", unsure: "unsure", disagreement: "in disagreement" };
//: Between two rounds of pictures.
const PREVIEW_MS = 700;
const UNKNOWN = "unknown";
// Scenes of a class below which a build knows little.
const FEW = 10;

const state = { told: null, model: null, offset_s: 0, items: [], place: 0, shown: null, wanted: null, leaving: new Set(), stamp: "", keys: [], looking: null, mask: null, devices: [] };

async function change(path, method, content) {
  const body = content === undefined ? undefined : JSON.stringify(content);
  const answer = await told(await request(`teach/${path}`, { method, body }));
  alertOf("");
  return answer;
}

// Does something that somebody asked for, and says why it could not be done.
async function attempt(path, method, content) {
  try {
    const answer = await change(path, method, content);
    if (answer.classes) show(answer);
    return answer;
  } catch (error) {
    alertOf(error.message);
    return null;
  }
}

// What the gateway tells.

function show(content) {
  state.told = content;
  state.offset_s = content.now_s - Date.now() / 1000;
  text("folder", `teaches ${content.scenes}/`);
  const { recording, build, rollout } = content;
  if (content.problem) live("warn", content.problem);
  else if (recording && ["countdown", "recording"].includes(recording.state)) live("warn", `Recording ${recording.label}`);
  else if (build.running) live("warn", "Building");
  else if (content.heads.running) live("warn", "Learning good items");
  else if (["pushing", "rolling back"].includes(rollout.state)) live("warn", "Rolling out");
  else live("good", "Ready");
  showCameras(content);
  showRecording(content);
  showClasses(content);
  showReview(content);
  showHeads(content);
  showBuild(content);
  showRollout(content);
}

// Cameras.

function showCameras(content) {
  const list = $("cameras");
  if ([...list.children].map((each) => each.dataset.name).join() !== content.cameras.join()) {
    list.replaceChildren(...content.cameras.map((name) => {
      const node = $("camera").content.firstElementChild.cloneNode(true);
      node.dataset.name = name;
      node.querySelector("h3").replaceChildren(...breakable(name));
      node.querySelector("img").alt = `What the camera of ${name} sees`;
      const button = node.querySelector("button");
      button.setAttribute("aria-label", `Region and mask of ${name}`);
      button.addEventListener("click", () => openMask(name));
      return node;
    }));
  }
  list.classList.toggle("recording", content.recording?.state === "recording");
}

async function preview() {
  for (;;) {
    // Nobody is watched for a page that nobody sees.
    if (document.visibilityState === "visible" && state.told) {
      try {
        await showPictures(await told(await request("teach/cameras")));
      } catch (error) {
        text("cameras-note", error.message);
      }
    }
    await new Promise((resolve) => setTimeout(resolve, PREVIEW_MS));
  }
}

async function showPictures({ pictures, missing }) {
  const left = state.told.cameras.length - pictures.length;
  text("cameras-note", left ? `${left} of ${state.told.cameras.length} give no picture` : "Live; their devices say that they are being recorded");
  await Promise.all([...$("cameras").children].map(async (node) => {
    const name = node.dataset.name;
    const image = node.querySelector("img");
    const why = node.querySelector(".no-view");
    if (pictures.includes(name)) {
      const response = await request(`teach/cameras/${devicePath(name)}`);
      if (response.status === 200) {
        put(image, await response.blob());
        why.textContent = "";
        image.hidden = false;
        return;
      }
    }
    image.hidden = true;
    const words = missing[name] || "no picture";
    if (why.textContent !== words) why.textContent = words;
  }));
}

function put(image, blob) {
  const url = URL.createObjectURL(blob);
  for (const kind of ["load", "error"]) image.addEventListener(kind, () => URL.revokeObjectURL(url), { once: true });
  image.src = url;
}

// Recording.

$("record-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  await attempt("recording", "PUT", {
    label: $("label").value.trim(), count: Number($("count").value), every_s: Number($("every").value),
  });
});
$("stop").addEventListener("click", () => attempt("recording", "DELETE"));
$("remove").addEventListener("click", () => attempt("recording/scenes", "DELETE"));

const isRecording = (recording) => ["countdown", "recording"].includes(recording?.state);
const isRolling = (rollout) => ["pushing", "rolling back"].includes(rollout.state);

function showRecording({ recording, removable, build, heads, rollout }) {
  const going = isRecording(recording);
  $("start").disabled = going || build.running || heads.running || isRolling(rollout);
  $("now").hidden = !recording;
  if (!recording) return;
  $("stop").hidden = !going;
  $("remove").hidden = going || !removable;
  $("count-down").className = recording.state === "recording" ? "rec" : "";
  text("count-down", recording.state === "countdown" ? `${Math.ceil(recording.left_s) || ""}` : recording.state === "recording" ? `${recording.scenes}` : "");
  const scenes = `${recording.scenes} ${recording.scenes === 1 ? "scene" : "scenes"} of ${recording.label}`;
  text("recording-text", {
    countdown: `Put ${recording.label} before the cameras`,
    recording: `Recording ${recording.label}: move it between scenes`,
    done: `${scenes} recorded`,
    stopped: `Stopped after ${scenes}`,
    failed: `${recording.error}; ${scenes} are kept`,
  }[recording.state]);
  $("recorded").style.width = width((recording.scenes + recording.left_out) / recording.wanted);
  const notes = Object.entries(recording.missing).map(([name, count]) => `without ${name} ${count}${recording.why[name] ? `: ${recording.why[name]}` : ""}`);
  if (recording.left_out) notes.unshift(`${recording.left_out} left out: fewer than two cameras`);
  $("recording-why").replaceChildren(...[...notes, ...recording.warnings].map((words) => el("li", {}, words)));
}

// Counts.

// What is not the same in all names.
function short(name, names) {
  const parts = (each) => each.split(/(?<=[_/-])/);
  let same = 0;
  while (names.every((each) => parts(each).length > same + 1 && parts(each)[same] === parts(names[0])[same])) same += 1;
  return names.length > 1 && same ? `…${parts(name).slice(same).join("")}` : name;
}

function showClasses({ classes, cameras, recording, served }) {
  const key = JSON.stringify([classes, recording?.label, recording?.state, served]);
  if ($("classes").dataset.key === key) return;
  $("classes").dataset.key = key;
  $("classes").hidden = !classes.length;
  $("no-classes").hidden = classes.length > 0;
  const names = [...new Set([...cameras, ...classes.flatMap((each) => Object.keys(each.cameras))])];
  $("classes-head").replaceChildren(
    el("th", { scope: "col" }, "Class"), el("th", { scope: "col", class: "number" }, "Scenes"),
    ...names.map((name) => el("th", { scope: "col", class: "number", title: name, "aria-label": name }, short(name, names))));
  const going = recording && ["countdown", "recording"].includes(recording.state) ? recording.label : null;
  $("classes-body").replaceChildren(...classes.map((each) => {
    const fresh = served.length > 0 && !served.includes(each.label) && each.label !== UNKNOWN;
    const mark = fresh ? [el("span", { class: "tag" }, "new")] : each.label === UNKNOWN ? [el("span", { class: "tag degraded" }, "no class")] : [];
    return el("tr", each.label === going ? { class: "now-recorded" } : {},
      el("th", { scope: "row" }, ...breakable(each.label), ...mark),
      el("td", { class: each.scenes < FEW ? "number few" : "number" }, `${each.scenes}`),
      ...names.map((name) => el("td", { class: (each.cameras[name] || 0) < each.scenes ? "number few" : "number" }, `${each.cameras[name] || 0}`)));
  }));
  const labels = [...new Set([...classes.map((each) => each.label), ...served])];
  $("labels").replaceChildren(...labels.map((label) => el("option", { value: label })));
}

// What was kept.

async function showReview({ kept, classes, served }) {
  $("undo-line").hidden = !kept.undo;
  if (kept.undo) text("undo-text", `Item ${kept.undo.item} is a ${kept.undo.good ? "good one" : `scene of ${kept.undo.label}`}`);
  const reasons = Object.entries(kept.reasons).map(([why, count]) => `${count} ${WHY[why] || why}`).join(", ");
  text("review-count", kept.total ? `${kept.total} kept: ${reasons}` : "");
  text("no-review", kept.looks
    ? "Nothing is left to look through."
    : "The gateway looks nothing through: start it with --teach-kept and the folder of mdp watch --keep.");
  $("no-review").hidden = kept.total > 0;
  const stamp = JSON.stringify([kept, classes.map((each) => each.label), served]);
  if (stamp === state.stamp) return;
  state.stamp = stamp;
  if (!kept.total) {
    state.items = [];
    $("item").hidden = true;
    return;
  }
  try {
    const listed = await told(await request("teach/kept"));
    // Asked for before something was moved: what is there now comes with the next event.
    if (state.stamp !== stamp) return;
    // One that was put right here is there until the gateway has moved it, but is not shown again.
    const items = listed.items.filter((each) => !state.leaving.has(each.name));
    const before = items.some((each) => each.name === state.wanted) ? state.wanted : state.shown;
    // One that comes back only now is still wanted then.
    if (before === state.wanted) state.wanted = null;
    state.items = items;
    const place = items.findIndex((each) => each.name === before);
    state.place = place >= 0 ? place : Math.max(0, Math.min(state.place, items.length - 1));
    showItem();
  } catch (error) {
    alertOf(error.message);
  }
}

// What anomaly heads learn from.

function showHeads({ heads, rollout }) {
  $("key-good").hidden = !heads.teachable;
  $("heads-line").hidden = !heads.teachable && heads.state === "none";
  const served = rollout.state === "done" && rollout.bundle === heads.report?.bundle;
  const count = `${heads.good} good ${heads.good === 1 ? "item" : "items"}`;
  text("heads-text", heads.running
    ? `Learning from ${count}${heads.step ? `: ${heads.step}${heads.share == null ? "" : ` ${percent(heads.share, 0)}`}` : ""}`
    : heads.waits ? `${count}: learning begins soon`
      : served ? `All boards have learnt from ${heads.report.good} good items; of further ones ${percent(heads.report.rate)} may be called different`
        : count);
  $("heads-again").hidden = heads.running || heads.waits || !heads.teachable;
  $("heads-error").hidden = heads.running || !heads.error;
  text("heads-error", heads.error && `Good items were not learnt: ${heads.error}. The bundle that is served goes on.`);
}

function showItem() {
  const item = state.items[state.place];
  $("item").hidden = !item;
  if (!item) return;
  text("item-why", WHY[item.why] || item.why);
  text("item-name", `Item ${item.item}`);
  const said = item.label == null ? "nobody answered" : `${item.known === false ? "nearest " : ""}${item.label}${item.probability == null ? "" : `, ${percent(item.probability, 0)}`}`;
  text("item-said", `${said} · ${state.place + 1} of ${state.items.length}`);
  showKeys(item);
  if (state.shown === item.name) return;
  state.shown = item.name;
  // Pictures of the item before are no longer waited for, which may be gone by now.
  state.showing?.abort();
  const { signal } = (state.showing = new AbortController());
  $("item-pictures").replaceChildren(...item.pictures.map((name) => {
    const image = el("img", { alt: `Item ${item.item} as ${name} saw it` });
    showPicture(image, `teach/kept/${encodeURIComponent(item.name)}/${devicePath(name)}`, signal);
    const own = item.devices[name];
    const said = own?.label == null ? name : `${name}: ${own.label}${own.probability == null ? "" : ` ${percent(own.probability, 0)}`}`;
    const words = own?.anomaly > 0 ? `${said}, differs by ${own.anomaly.toFixed(1)} decades` : said;
    return el("li", {}, image, el("p", own && own.label !== item.label ? { class: "other" } : {}, words));
  }));
}

async function showPicture(image, path, signal) {
  try {
    const response = await request(path, { signal });
    if (response.ok) put(image, await response.blob());
  } catch {
    // The text beside the picture stands without it.
  }
}

function showKeys(item) {
  const { classes, served } = state.told;
  const labels = [...new Set([...served, ...classes.map((each) => each.label)])].filter((label) => label !== UNKNOWN);
  const signs = "123456789abcdefhijklmopqrstvwy";
  state.keys = [...labels.slice(0, signs.length).map((label, place) => [signs[place], label]), ["u", UNKNOWN]];
  const key = JSON.stringify([state.keys, item.label]);
  if ($("item-keys").dataset.key === key) return;
  $("item-keys").dataset.key = key;
  $("item-keys").replaceChildren(...state.keys.map(([sign, label]) => {
    const words = label === UNKNOWN ? "none of the classes" : label;
    const button = el("button", { class: label === item.label ? "key guess" : "key", type: "button" }, el("kbd", {}, sign.toUpperCase()), el("span", {}, ...breakable(words)));
    button.addEventListener("click", () => putRight(label));
    return el("li", {}, button);
  }));
}

// The next item is there at once; the gateway's word comes with the next event.
async function putRight(label) {
  const item = state.items[state.place];
  if (!item) return;
  leave(item);
  await settle(item, await attempt(`kept/${encodeURIComponent(item.name)}`, "PUT", { label }));
}

async function makeGood() {
  const item = state.items[state.place];
  if (!item) return;
  leave(item);
  await settle(item, await attempt(`good/${encodeURIComponent(item.name)}`, "PUT"));
}

async function discard() {
  const item = state.items[state.place];
  if (!item) return;
  leave(item);
  await settle(item, await attempt(`kept/${encodeURIComponent(item.name)}`, "DELETE"));
}

// An item that the gateway left where it was is shown again.
async function settle(item, answer) {
  state.leaving.delete(item.name);
  if (!answer) {
    state.wanted = item.name;
    state.stamp = "";
    await showReview(state.told);
  }
  $("item").focus({ preventScroll: true });
}

function leave(item) {
  state.showing?.abort();
  state.shown = null;
  state.leaving.add(item.name);
  state.items = state.items.filter((each) => each !== item);
  state.place = Math.max(0, Math.min(state.place, state.items.length - 1));
  // It is asked for anew where the gateway says no.
  state.stamp = "";
  $("new-class").hidden = true;
  showItem();
}

async function undo() {
  state.wanted = state.told.kept.undo?.name;
  const answer = await attempt("moved", "DELETE");
  if (answer) $("item").focus({ preventScroll: true });
}

function move(by) {
  if (!state.items.length) return;
  state.place = (state.place + by + state.items.length) % state.items.length;
  showItem();
}

function newClass() {
  $("new-class").hidden = false;
  $("new-label").value = "";
  $("new-label").focus();
}

$("key-good").addEventListener("click", makeGood);
$("heads-again").addEventListener("click", () => attempt("good", "PUT"));
$("key-new").addEventListener("click", newClass);
$("key-discard").addEventListener("click", discard);
$("key-back").addEventListener("click", () => move(-1));
$("key-skip").addEventListener("click", () => move(1));
$("key-undo").addEventListener("click", undo);
$("new-class").addEventListener("submit", (event) => {
  event.preventDefault();
  putRight($("new-label").value.trim());
});
document.addEventListener("keydown", (event) => {
  const { target } = event;
  if (event.key === "Escape" && target === $("new-label")) {
    $("new-class").hidden = true;
    $("item").focus();
  }
  if (target.closest?.("input, select, textarea, dialog, pre") || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  const sign = event.key.toLowerCase();
  if (sign === "z" && !$("undo-line").hidden) return void undo();
  if ($("item").hidden) return;
  const found = state.keys.find(([key]) => key === sign);
  const act = found ? () => putRight(found[1]) : { g: state.told.heads.teachable ? makeGood : null, n: newClass, x: discard, arrowleft: () => move(-1), arrowright: () => move(1) }[sign];
  if (!act) return;
  event.preventDefault();
  act();
});

// Building.

$("build-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const latency = $("latency").value;
  await attempt("build", "PUT", { minutes: Number($("minutes").value), latency_ms: latency ? Number(latency) : null });
});
$("build-cancel").addEventListener("click", () => attempt("build", "DELETE"));

const clock = (seconds) => `${Math.floor(seconds / 60)}:${`${Math.floor(seconds % 60)}`.padStart(2, "0")}`;

function showBuild({ build, heads, recording }) {
  const { running } = build;
  $("no-build").hidden = !build.why_not;
  text("no-build", build.why_not && `This gateway cannot build: ${build.why_not}`);
  $("build-form").hidden = Boolean(build.why_not);
  $("build-start").disabled = running || heads.running || isRecording(recording);
  if (!$("latency").dataset.set && build.latency_ms != null) {
    $("latency").value = build.latency_ms;
    $("latency").dataset.set = "1";
  }
  $("building").hidden = !running;
  $("build-cancel").hidden = build.state === "cancelled";
  text("build-step", build.state === "cancelled" ? "Cancelling" : build.step ? `${build.step}${build.rest ? `: ${build.rest}` : ""}` : "Starting");
  $("build-meter").classList.toggle("unknown", build.share == null);
  $("build-share").style.width = width(build.share);
  text("build-time", running ? clock(Date.now() / 1000 + state.offset_s - build.started_s) : "");
  $("build-error").hidden = running || !build.error;
  text("build-error", build.state === "cancelled" ? `Cancelled; ${build.error}.` : build.error && `The build failed: ${build.error}. The bundle that is served goes on.`);
  $("build-log").hidden = !build.lines.length;
  const lines = build.lines.join("\n");
  if ($("build-lines").textContent !== lines) {
    $("build-lines").textContent = lines;
    $("build-lines").scrollTop = $("build-lines").scrollHeight;
  }
  const report = build.report;
  $("report").hidden = !report;
  if (!report) return;
  text("predicted", percent(report.predicted));
  text("interval-text", report.low == null ? "not predicted" : `nine of ten are between ${percent(report.low, 0)} and ${percent(report.high, 0)}`);
  $("interval").style.left = width(report.low);
  $("interval").style.width = width(report.high - report.low);
  $("predicted-mark").style.left = width(report.predicted);
  text("measured", percent(report.measured));
  text("measured-text", `on ${report.scenes} scenes that it never saw`);
  $("measured-mark").style.left = width(report.measured);
  const pairs = report.confusions.slice(0, 3).map(({ labels, pictures, confused }) => `${labels.join(" and ")} (${confused} of ${pictures} scenes)`);
  $("confusions").hidden = !pairs.length;
  text("confusions", pairs.length ? `Taken for each other: ${pairs.join(", ")}. Record more scenes of both, closer or from other sides.` : "");
  text("alone", `Alone: ${Object.entries(report.alone).map(([name, share]) => `${name} ${percent(share, 0)}`).join(", ")}. Built in ${clock(report.seconds)}.`);
}

// Rolling out.

$("push").addEventListener("click", () => attempt("rollout", "PUT", { action: "push" }));
$("rollback").addEventListener("click", () => attempt("rollout", "PUT", { action: "rollback" }));

function showRollout({ rollout, build, heads, cameras, recording }) {
  const going = isRolling(rollout);
  const busy = going || build.running || heads.running || isRecording(recording);
  const served = rollout.state === "done" && rollout.bundle === build.report?.bundle;
  $("push").disabled = busy || !build.pushable || served;
  $("rollback").disabled = busy;
  text("rollout-text", {
    none: "Boards serve on while they get it, and keep the bundle before.",
    pushing: `Pushing ${rollout.bundle}`,
    "rolling back": "Going back to the bundle before",
    done: `All ${cameras.length} boards serve ${rollout.bundle}, after ${clock(rollout.ended_s - rollout.started_s)}`,
    failed: "Boards serve what they did before, except those that could not go back",
  }[rollout.state]);
  $("boards").hidden = !going && rollout.state !== "done";
  $("boards").replaceChildren(...cameras.map((name) => {
    const done = rollout.done.includes(name) || rollout.state === "done";
    const share = done ? 1 : name === rollout.device ? rollout.share : 0;
    const bar = el("i");
    bar.style.width = width(share);
    const words = done ? "serves it" : name !== rollout.device ? "waits" : share < 1 ? percent(share, 0) : "loads it";
    return el("li", {}, el("span", {}, ...breakable(name)), el("div", { class: "meter", "aria-hidden": "true" }, bar), el("span", done ? { class: "good" } : {}, words));
  }));
  $("rollout-error").hidden = !rollout.error;
  text("rollout-error", rollout.error);
}

async function look() {
  if (state.looking) {
    state.looking.abort();
    return;
  }
  const looking = (state.looking = new AbortController());
  $("look").setAttribute("aria-pressed", "true");
  text("look", "Stop looking");
  try {
    const [fleet] = await told(await request("fleets"));
    if (!fleet) throw new Error("no bundle is served yet: build, and push");
    await eachEvent(`v2/models/${fleet.name}/watch?every_ms=500`, (kind, answer) => {
      if (kind !== "answer") {
        text("answer", "No answer");
        text("answer-note", answer.error);
        return;
      }
      const missing = Object.entries(answer.missing).map(([name, why]) => `${name} (${why})`);
      text("answer", answer.known === false ? "unknown" : answer.label);
      const nearest = answer.known === false ? `nearest ${answer.label}, ` : "";
      text("answer-note", `${nearest}${percent(answer.probability, 0)}, by ${answer.used.length} of ${state.told.cameras.length} boards${missing.length ? `, without ${missing.join(", ")}` : ""}`);
    }, looking.signal);
  } catch (error) {
    if (!looking.signal.aborted) text("answer-note", error.message);
  }
  state.looking = null;
  $("look").setAttribute("aria-pressed", "false");
  text("look", "Look now");
}
$("look").addEventListener("click", look);

// Region and mask. Boxes are [left, top, right, bottom], fractions of the whole picture.

const WHOLE = [0, 0, 1, 1];
const asBox = ([left, top, right, bottom]) => ({ left, top, right, bottom });
const asList = ({ left = 0, top = 0, right = 1, bottom = 1 }) => [left, top, right, bottom];

async function openMask(name) {
  if ($("mask").open) return;
  try {
    const { masks, missing } = await told(await request("teach/masks"));
    if (!masks[name]) throw new Error(`${name}: ${missing[name] || "no mask can be drawn"}`);
    const found = masks[name];
    if (!found.width) throw new Error(`${name}: the camera has given no picture yet`);
    const mask = found.mask;
    const shown = mask ? asList(mask.region || {}) : [...WHOLE];
    if (state.mask?.url) URL.revokeObjectURL(state.mask.url);
    state.mask = {
      name, width: found.width, height: found.height, settable: found.settable, shown,
      region: [...shown], hidden: (mask?.hidden || []).map(asList), mode: "region", chosen: null,
    };
    const response = await request(`teach/cameras/${devicePath(name)}`);
    state.mask.url = response.status === 200 ? URL.createObjectURL(await response.blob()) : "";
  } catch (error) {
    alertOf(error.message);
    return;
  }
  text("mask-title", `Region and mask of ${name}`);
  $("mask-error").hidden = state.mask.settable;
  text("mask-error", state.mask.settable ? "" : "Only the device's owner may change it: mdp-agent run --mask FILE --allow-mask there, and mask = true in this client's .limits.");
  for (const id of ["mask-save", "mask-clear"]) $(id).disabled = !state.mask.settable;
  setMode("region");
  drawMask();
  $("mask").showModal();
}

function setMode(mode) {
  state.mask.mode = mode;
  $("mode-region").setAttribute("aria-pressed", `${mode === "region"}`);
  $("mode-hidden").setAttribute("aria-pressed", `${mode === "hidden"}`);
}

function drawMask() {
  const { width: wide, height: high, shown, region, hidden, url, chosen } = state.mask;
  const svg = $("mask-svg");
  svg.setAttribute("viewBox", `0 0 ${wide} ${high}`);
  const node = (tag, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };
  const place = ([left, top, right, bottom]) => ({ x: left * wide, y: top * high, width: (right - left) * wide, height: (bottom - top) * high });
  const [l, t, r, b] = [region[0] * wide, region[1] * high, region[2] * wide, region[3] * high];
  svg.replaceChildren(
    // Of what is cut off now there is no picture.
    ...(url ? [node("image", { href: url, preserveAspectRatio: "none", ...place(shown) })] : []),
    node("path", { class: "outside", "fill-rule": "evenodd", d: `M0 0H${wide}V${high}H0ZM${l} ${t}H${r}V${b}H${l}Z` }),
    ...hidden.map((box, index) => node("rect", { class: index === chosen ? "hidden chosen" : "hidden", ...place(box) })),
    node("rect", { class: "region", ...place(region) }));
  const rows = [["Region", region], ...hidden.map((box, index) => [`Hidden ${index + 1}`, box])];
  const key = rows.map(([name]) => name).join();
  if ($("boxes").dataset.key !== key) {
    $("boxes").dataset.key = key;
    $("boxes").replaceChildren(...rows.map(([name], row) => rowOf(name, row)));
  }
  rows.forEach(([, box], row) => box.forEach((value, side) => {
    const input = $("boxes").children[row].querySelectorAll("input")[side];
    const shownValue = `${Math.round(value * 1000) / 10}`;
    if (document.activeElement !== input && input.value !== shownValue) input.value = shownValue;
  }));
}

function rowOf(name, row) {
  const sides = ["left", "top", "right", "bottom"];
  const cells = sides.map((side, index) => {
    const input = el("input", { type: "number", min: "0", max: "100", step: "0.1", "aria-label": `${name}, ${side}` });
    input.addEventListener("input", () => {
      const box = row ? state.mask.hidden[row - 1] : state.mask.region;
      const value = Number(input.value) / 100;
      if (input.value !== "" && value >= 0 && value <= 1) box[index] = value;
      drawMask();
    });
    return el("td", {}, input);
  });
  const last = el("td");
  if (row) {
    const button = el("button", { class: "button quiet small", type: "button", "aria-label": `Remove ${name}` }, "Remove");
    button.addEventListener("click", () => {
      state.mask.hidden.splice(row - 1, 1);
      drawMask();
      $("mask-add").focus();
    });
    last.append(button);
  }
  return el("tr", {}, el("th", { scope: "row" }, name), ...cells, last);
}

function pointOf(event) {
  const box = $("mask-svg").getBoundingClientRect();
  const { width: wide, height: high } = state.mask;
  // The drawing keeps its shape inside the element.
  const scale = Math.min(box.width / wide, box.height / high);
  const x = (event.clientX - box.left - (box.width - wide * scale) / 2) / (wide * scale);
  const y = (event.clientY - box.top - (box.height - high * scale) / 2) / (high * scale);
  return [x, y].map((value) => Math.min(1, Math.max(0, value)));
}

$("mask-svg").addEventListener("pointerdown", (event) => {
  const from = pointOf(event);
  const { mode, hidden } = state.mask;
  const former = [...state.mask.region];
  let drawn = null;
  $("mask-svg").setPointerCapture(event.pointerId);
  const drag = (moved) => {
    const to = pointOf(moved);
    drawn = [Math.min(from[0], to[0]), Math.min(from[1], to[1]), Math.max(from[0], to[0]), Math.max(from[1], to[1])];
    if (mode === "region") state.mask.region = drawn;
    else {
      if (state.mask.chosen === null) {
        state.mask.chosen = hidden.length;
        hidden.push(drawn);
      } else hidden[state.mask.chosen] = drawn;
    }
    drawMask();
  };
  const end = () => {
    $("mask-svg").removeEventListener("pointermove", drag);
    const least = mode === "region" ? 0.05 : 0.005;
    const small = !drawn || drawn[2] - drawn[0] < least || drawn[3] - drawn[1] < least;
    if (small && mode === "region") state.mask.region = former;
    if (small && state.mask.chosen !== null) hidden.splice(state.mask.chosen, 1);
    state.mask.chosen = null;
    drawMask();
  };
  $("mask-svg").addEventListener("pointermove", drag);
  $("mask-svg").addEventListener("pointerup", end, { once: true });
});
$("mode-region").addEventListener("click", () => setMode("region"));
$("mode-hidden").addEventListener("click", () => setMode("hidden"));
$("mask-add").addEventListener("click", () => {
  state.mask.hidden.push([0.4, 0.4, 0.6, 0.6]);
  drawMask();
  $("boxes").lastElementChild.querySelector("input").focus();
});
$("mask-close").addEventListener("click", () => $("mask").close());

async function applyMask(mask) {
  const { name } = state.mask;
  try {
    await change(`masks/${devicePath(name)}`, "PUT", { mask });
    $("mask").close();
  } catch (error) {
    $("mask-error").hidden = false;
    text("mask-error", error.message);
  }
}
$("mask-save").addEventListener("click", () => {
  const { width: wide, height: high, region, hidden } = state.mask;
  applyMask({ width: wide, height: high, region: asBox(region), hidden: hidden.map(asBox) });
});
$("mask-clear").addEventListener("click", () => applyMask(null));

// A build's clock goes on between events.
setInterval(() => state.told && showBuild(state.told), 1000);
follow("teach/events", show);
preview();
