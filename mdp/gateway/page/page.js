// The fleet live, and answers to pictures. Asks its own gateway and nobody else.

import { $, alertOf, breakable, devicePath, eachEvent, el, follow, live, percent, request, text, told, width } from "./common.js";

const MODES = {
  stacked: "Stacked: weights that were fitted for exactly these devices.",
  boosted: "Boosted: the devices' parts of one sum.",
  bagged: "Bagged: the mean of the devices' classifiers.",
  single: "Single: one device answers alone.",
};
const STATES = {
  READY: "Ready", UNREACHABLE: "Not reachable", SILENT: "Does not answer", REFUSED: "Refused",
  STARTING: "Starting", WARMING: "Warming up", DRAINING: "Ending", FAILED: "Failed", UNKNOWN: "Unknown",
};
const STAGES = { first: "fast: first stage", escalated: "sure: all asked" };
const REFUSED = {
  NotFoundError: "this computer has none, or none that is switched on",
  NotAllowedError: "the browser was not allowed to use it",
  NotReadableError: "another program uses it",
};
const NO_BUNDLE = "Teach the fleet its classes first: record, build, and push.";
const NO_PICTURE = "This file is no picture that can be read (JPEG, PNG, WebP, GIF, BMP, TIFF ...).";
const CAMERA_MS = 400;
const MAX_SIDE = 640;
// A picture's answer without a device that is able to: busy for a moment, perhaps.
const RETRY_MS = 2000;
const MAX_RETRIES = 5;
// Cells on a side of a map, and how strange cells of good pictures mostly are.
const SIDE = 16;
const LIKE_GOOD = 96;

const state = { fleets: [], chosen: null, blob: null, camera: null, opening: null, looking: null, asking: false, again: false, team: null, retries: 0, viewing: false };

// The fleet, as it changes.

function show(fleets) {
  state.fleets = fleets;
  // A link that is followed sends no token.
  document.querySelector('a[href="metrics"]').hidden = Boolean(sessionStorage.getItem("token"));
  if (!fleets.length) {
    // A gateway that teaches begins without a bundle.
    $("tabs").hidden = false;
    text("label", "No bundle yet");
    text("note", NO_BUNDLE);
    live("warn", "No bundle yet");
    return;
  }
  if (state.team === null && !state.blob) showNoAnswer("No picture yet", "The fused answer of all devices, and what it is made of, appear here.");
  if (!fleets.some((fleet) => fleet.name === state.chosen)) state.chosen = fleets[0].name;
  $("pick").hidden = fleets.length < 2;
  $("tabs").hidden = !fleets[0].teaches;
  const names = fleets.map((fleet) => fleet.name);
  if ([...$("fleet").options].map((option) => option.value).join() !== names.join()) {
    $("fleet").replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  }
  $("fleet").value = state.chosen;
  // Another bundle may have maps, or have none.
  if (state.looking && state.looking.maps !== current().inspects) look();
  showFleet();
}

const current = () => state.fleets.find((fleet) => fleet.name === state.chosen);
const ableOf = (fleet) => fleet.devices.filter((device) => device.usable && device.in_use);

function showFleet() {
  const fleet = current();
  const able = ableOf(fleet);
  document.title = `${fleet.name} – MDP fleet`;
  text("bundle", fleet.name);
  text("count", `${able.length} of ${fleet.devices.length}`);
  text("count-note", `${fleet.devices.length === 1 ? "device" : "devices"} ${able.length === 1 ? "answers" : "answer"}`);
  text("accuracy", percent(fleet.expected_accuracy));
  const all = fleet.expected_accuracy_all;
  const lost = all == null || fleet.expected_accuracy == null ? 0 : (all - fleet.expected_accuracy) * 100;
  text("change", Math.abs(lost) < 0.05 ? "" : `${lost > 0 ? "−" : "+"}${Math.abs(lost).toFixed(1)} points`);
  const pictures = fleet.expected_accuracy_pictures;
  const suspects = able.filter((device) => device.suspect).map((device) => device.name);
  const measured = pictures == null ? "never measured" : `measured on ${pictures.toLocaleString()} ${fleet.scenes ? "scenes" : "pictures"}`;
  text("accuracy-note", `expected accuracy of these devices, ${measured}${suspects.length ? `; it does not hold for looks with a suspected camera (${suspects.join(", ")})` : ""}`);
  $("accuracy").className = suspects.length ? "fewer" : "";
  $("count").className = !able.length ? "none" : able.length < fleet.devices.length ? "fewer" : "";
  $("seats").replaceChildren(...fleet.devices.map((device, index) => el("i", { class: able.includes(device) ? `d${index % 6}` : "off" })));
  $("meter").style.width = width(fleet.expected_accuracy);
  $("meter-all").style.left = width(all);
  $("meter-all").hidden = all == null;
  text("version", `bundle ${fleet.bundle} ${fleet.digest}, ${fleet.classes} classes`);
  const troubles = able.length < fleet.devices.length ? ["degraded"] : [];
  if (suspects.length) troubles.push(suspects.length > 1 ? "cameras suspected" : "a camera suspected");
  if (!able.length) live("bad", "No device can answer");
  else live(troubles.length ? "warn" : "good", ["Live", ...troubles].join(", "));
  $("cameras").hidden = !fleet.devices.some((device) => device.source);
  showDevices(fleet);
  showFaults(fleet);
  showFront(fleet, able);
  // What a device less makes of the same picture shows at once.
  const team = able.map((device) => device.name).join();
  if (team !== state.team && state.blob && !state.camera && able.length) {
    state.retries = MAX_RETRIES;
    ask();
  }
  if (!able.length && (state.team !== null || !state.blob)) showNoAnswer("No device can answer", "Callers get status 503 until one is back; this page then asks again by itself.");
  else if (able.length && state.team === "" && !state.blob) showNoAnswer("No picture yet", "The fused answer of all devices, and what it is made of, appear here.");
  state.team = team;
}

function showDevices(fleet) {
  const list = $("devices");
  if ([...list.children].map((card) => card.dataset.name).join() !== fleet.devices.map((device) => device.name).join()) {
    list.replaceChildren(...fleet.devices.map(newCard));
  }
  fleet.devices.forEach((device, index) => update(list.children[index], device, fleet));
}

function newCard(device, index) {
  const card = $("device").content.firstElementChild.cloneNode(true);
  card.dataset.name = device.name;
  card.classList.add(`d${index % 6}`);
  card.querySelector("h3").textContent = device.name;
  const box = card.querySelector("input");
  box.setAttribute("aria-label", `${device.name} takes part in answers`);
  box.addEventListener("change", async () => {
    try {
      const path = device.name.split("/").map(encodeURIComponent).join("/");
      const content = await told(await request(`v2/models/${state.chosen}/devices/${path}`, {
        method: "PUT", body: JSON.stringify({ in_use: box.checked }),
      }));
      alertOf("");
      show(state.fleets.map((fleet) => (fleet.name === content.name ? content : fleet)));
    } catch (error) {
      box.checked = !box.checked;
      alertOf(error.message);
    }
  });
  return card;
}

function update(card, device, fleet) {
  const put = (selector, value) => {
    const node = card.querySelector(selector);
    if (node.textContent !== value) node.textContent = value;
  };
  card.classList.toggle("off", !device.in_use || !device.usable);
  const box = card.querySelector("input");
  if (document.activeElement !== box || box.checked !== device.in_use) box.checked = device.in_use;
  let [kind, said] = device.usable ? ["good", "Ready"] : ["bad", STATES[device.state] || device.state];
  if (device.usable && device.fault) [kind, said] = ["warn", `Ready, but ${device.fault}`];
  else if (device.usable && device.reason) [kind, said] = ["warn", `Ready: ${device.reason}`];
  else if (device.state === "READY" && !device.usable) said = device.reason;
  if (!device.in_use) [kind, said] = ["warn", "Switched off here"];
  if (device.source?.includes("; being recorded")) said += "; its camera is being recorded";
  card.querySelector(".state").className = `state ${kind}`;
  put(".state-text", said);
  put(".submodel", device.submodel);
  put(".provider", (device.provider || "–").replace("ExecutionProvider", ""));
  card.querySelector(".warmth").hidden = device.temperature_c == null;
  put(".temperature", device.temperature_c == null ? "" : `${device.temperature_c.toFixed(0)} °C`);
  put(".alone", device.accuracy == null ? "never measured" : `${percent(device.accuracy)} accurate`);
  const fault = fleet.faults.find((each) => each.device === device.name && !each.over && !bySomebody(each));
  put(".fault", fault ? `${words(fault.what)}, ${clock(fault.at_s)}` : "none");
  spark(card, device.latencies_ms);
}

function spark(card, values) {
  const svg = card.querySelector(".spark svg");
  const sorted = [...values].sort((a, b) => a - b);
  // One slow answer leaves the others readable.
  const most = Math.max(1, 2 * (sorted[Math.floor(sorted.length * 0.9)] || 0));
  const x = (index) => (160 * (index + 60 - values.length)) / 59;
  const points = values.map((value, index) => `${x(index).toFixed(1)} ${(35 - (34 * Math.min(value, most)) / most).toFixed(1)}`);
  const line = points.length > 1 ? `M${points.join("L")}` : "";
  card.querySelector(".line").setAttribute("d", line);
  card.querySelector(".area").setAttribute("d", line && `${line}L160 36L${x(0).toFixed(1)} 36Z`);
  const last = values.length ? `${values.at(-1).toFixed(1)} ms` : "–";
  card.querySelector(".ms").textContent = last;
  const middle = values.length ? `, median ${sorted[sorted.length >> 1].toFixed(1)} ms` : "";
  svg.setAttribute("aria-label", values.length ? `Latency of the last ${values.length} answers: ${last}${middle}` : "No answer yet");
}

// The best that devices reach within a time, each alone, and those that answer now.
function showFront(fleet, able) {
  const known = fleet.devices.filter((device) => device.accuracy != null);
  $("front-card").hidden = !fleet.front.length || known.length < 2;
  if ($("front-card").hidden) return;
  const svg = $("front");
  const wide = svg.clientWidth;
  const now = able.length && fleet.expected_accuracy != null
    ? { latency_ms: Math.max(...able.map((device) => device.predicted_ms)), accuracy: fleet.expected_accuracy } : null;
  const key = JSON.stringify([fleet.name, fleet.front, now, wide]);
  if (svg.dataset.key === key) return;
  svg.dataset.key = key;
  const points = [...fleet.front, ...known.map((device) => ({ latency_ms: device.predicted_ms, accuracy: device.accuracy })), ...(now ? [now] : [])];
  const times = points.map((point) => point.latency_ms);
  const [first, last] = [Math.min(...times), Math.max(...times)];
  const span = Math.max(last - first, 0.2 * last);
  const shares = points.map((point) => point.accuracy);
  const margin = Math.max(0.004, 0.15 * (Math.max(...shares) - Math.min(...shares)));
  const [low, high] = [Math.min(...shares) - margin, Math.min(1, Math.max(...shares) + margin)];
  const x = (ms) => 48 + ((wide - 56) * (ms - first + 0.15 * span)) / (1.4 * span);
  const y = (share) => 176 - (166 * (share - low)) / (high - low);
  const nodes = [];
  const draw = (tag, attributes, ...children) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    nodes.push(node);
  };
  for (const part of [0.1, 0.5, 0.9]) {
    const share = low + part * (high - low);
    draw("line", { class: "grid", x1: 48, x2: wide - 8, y1: y(share), y2: y(share) });
    draw("text", { x: 42, y: y(share) + 4, "text-anchor": "end" }, percent(share));
  }
  for (const part of [0, 0.5, 1]) {
    const ms = first + part * span;
    draw("text", { x: x(ms), y: 196, "text-anchor": "middle" }, `${ms.toPrecision(ms < 10 ? 2 : 3)} ms`);
  }
  const steps = fleet.front.map((each, index) => `${index ? "H" : "M"}${x(each.latency_ms)}${index ? "V" : " "}${y(each.accuracy)}`);
  draw("path", { class: "best", d: `${steps.join("")}H${wide - 8}` });
  for (const each of fleet.front) draw("circle", { class: "step", r: 6, cx: x(each.latency_ms), cy: y(each.accuracy) });
  for (const device of known) {
    draw("circle", { class: `own d${fleet.devices.indexOf(device) % 6}`, r: 4, cx: x(device.predicted_ms), cy: y(device.accuracy) });
  }
  if (now) {
    draw("circle", { class: "now", r: 7, cx: x(now.latency_ms), cy: y(now.accuracy) });
    draw("text", { class: "named", x: x(now.latency_ms), y: y(now.accuracy) + (y(now.accuracy) < 150 ? 22 : -12), "text-anchor": "middle" }, "now");
  }
  svg.setAttribute("viewBox", `0 0 ${wide} 210`);
  svg.setAttribute("aria-label", fleet.front.map((each) => `${percent(each.accuracy)} in ${each.latency_ms.toFixed(1)} ms with ${each.devices.join(", ")}`).join("; "));
  svg.replaceChildren(...nodes);
}

addEventListener("resize", () => current() && showFleet());

const words = (fault) => fault.replace(/\b[A-Z]{5,}\b/, (known) => STATES[known]?.toLowerCase() ?? known).replace(/: no connection$/, "");

const bySomebody = (fault) => fault.what.startsWith("switched ");

const clock = (at_s) => new Date(at_s * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });

function showFaults(fleet) {
  $("no-faults").hidden = fleet.faults.length > 0;
  const key = fleet.faults.map((fault) => fault.at_s + fault.device).join();
  if ($("faults").dataset.key === fleet.name + key) return;
  $("faults").dataset.key = fleet.name + key;
  $("faults").replaceChildren(...fleet.faults.map((fault) => el("li", {},
    el("time", { datetime: new Date(fault.at_s * 1000).toISOString() }, clock(fault.at_s)),
    el("span", {}, fault.device),
    el("span", { class: `what ${bySomebody(fault) ? "" : fault.over ? "good" : "bad"}` }, words(fault.what)),
  )));
}

// A picture, and its answer.

async function ask() {
  if (state.asking) {
    state.again = true;
    return;
  }
  if (!current()) {
    showNoAnswer("No bundle yet", NO_BUNDLE);
    return;
  }
  state.asking = true;
  const { blob, chosen } = state;
  // The picture or the fleet may be another one before the answer is there.
  const latest = () => state.blob === blob && state.chosen === chosen;
  let lacking;
  try {
    const answer = await told(await request(`v2/models/${chosen}/classify`, {
      method: "POST", body: blob, headers: { "Content-Type": blob.type || "application/octet-stream" },
    }));
    if (latest()) showAnswer(answer);
    lacking = answer.degraded ? Object.keys(answer.missing) : [];
  } catch (error) {
    // Of a file of any other kind, the decoder's words help nobody.
    const strange = error.message.includes("found no format that is read");
    if (latest()) showNoAnswer("No answer", strange ? NO_PICTURE : error.message);
    lacking = error.status >= 500 ? current()?.devices.map((device) => device.name) ?? [] : [];
  } finally {
    state.asking = false;
  }
  if (!state.camera && state.retries > 0 && current() && ableOf(current()).some((device) => lacking.includes(device.name))) {
    state.retries -= 1;
    setTimeout(() => latest() && ask(), RETRY_MS);
  }
  if (state.again) {
    state.again = false;
    if (state.blob) await ask();
  }
}

function showNoAnswer(label, why) {
  text("label", label);
  text("note", why);
  for (const id of ["made", "mode", "how", "strange", "different", "doubted"]) $(id).hidden = true;
  for (const id of ["top", "crops", "legend"]) $(id).replaceChildren();
  hideMaps();
}

function showAnswer(answer) {
  const fleet = current();
  const missing = Object.entries(answer.missing);
  const unknown = answer.known === false;
  text("label", unknown ? "unknown" : answer.holds?.map(([label]) => label).join(" + ") || answer.label);
  const suspects = answer.used.filter((name) => answer.suspects[name]);
  const doubt = suspects.length ? `; accuracy unknown with a suspected camera (${suspects.join(", ")})` : "";
  const what = unknown ? `none of the classes, nearest ${answer.label}, ` : "";
  const worst = answer.members.filter((one) => !answer.blind_sides.includes(one.device))
    .sort((one, other) => (other.anomaly ?? -Infinity) - (one.anomaly ?? -Infinity))[0];
  const passing = answer.defects_missed_most == null ? ""
    : `: ${percent(answer.defects_missed_least)} to ${percent(answer.defects_missed_most)} of defects like the measured ones pass`;
  const blind = answer.blind_sides.length ? `; blind to ${answer.blind_sides.join(", ")}${passing}` : "";
  const differs = answer.normal === false ? `differs from the good ones, most at ${worst.device}, ` : "";
  const sure = answer.holds ? `of the least certain label ${percent(answer.probability)} sure` : `${percent(answer.probability)} probable`;
  const parts = `${differs}${what}${sure}, from ${answer.used.join(", ")}${doubt}${blind}`;
  if (answer.stage === "first" && !answer.degraded) text("note", `${parts}; the others were not needed`);
  else text("note", parts + (missing.length ? `; without ${missing.map(([name, why]) => `${name} (${why})`).join(", ")}` : ""));
  text("latency", `${answer.latency_ms.toFixed(0)} ms`);
  text("latency-note", `last answer, of ${answer.deadline_ms.toLocaleString()} ms`);
  $("spent").style.width = width(Math.min(1, answer.latency_ms / answer.deadline_ms));
  $("mode").hidden = false;
  text("mode", answer.mode);
  $("strange").hidden = !unknown;
  $("different").hidden = answer.normal !== false;
  $("doubted").hidden = !suspects.length;
  const how = answer.degraded ? "partial" : STAGES[answer.stage];
  $("how").hidden = !how;
  text("how", how || "");
  $("how").classList.toggle("degraded", answer.degraded);
  const held = new Set((answer.holds ?? answer.top.slice(0, 1)).map(([label]) => label));
  $("top").replaceChildren(...answer.top.map(([label, share]) => {
    const bar = el("i");
    bar.style.width = width(share);
    return el("li", held.has(label) ? { class: "held" } : {}, el("span", { title: label }, label), el("div", { "aria-hidden": "true" }, bar), el("span", { class: "number" }, percent(share)));
  }));
  $("made").hidden = false;
  const opinions = new Map(answer.members.map((each) => [each.device, each]));
  $("opinions").replaceChildren(...fleet.devices.map((device, index) => {
    const own = opinions.get(device.name);
    const name = el("th", { scope: "row" }, el("span", { class: "swatch", "aria-hidden": "true" }), ...breakable(device.name));
    if (!own) return el("tr", { class: `out d${index % 6}` }, name, el("td", { colspan: "3" }, device.in_use ? answer.missing[device.name] || "not asked" : "switched off"));
    const other = own.label !== answer.label;
    if (suspects.includes(device.name)) name.append(el("span", { class: "doubt" }, "suspected"));
    return el("tr", { class: `d${index % 6}` }, name,
      el("td", other ? { class: "other" } : {}, ...breakable(own.label)),
      el("td", { class: "number" }, percent(own.probability)),
      el("td", { class: "number" }, percent(suspects.includes(device.name) ? null : device.accuracy)));
  }));
  $("fused-label").replaceChildren(...(unknown ? ["unknown"] : breakable(answer.label)));
  text("fused-probability", percent(unknown ? null : answer.probability));
  // Measured for the label, which is not the answer.
  text("fused-accuracy", percent(unknown ? null : answer.expected_accuracy));
  text("mode-note", MODES[answer.mode] || "");
  if (state.looking) showMaps(fleet, answer);
  else showCrops(fleet, answer);
}

// Where each camera's picture differs from good ones: sides that count first, of these the strangest.
function showMaps(fleet, answer) {
  const rank = (one) => (answer.blind_sides.includes(one.device) ? -Infinity : one.anomaly ?? -Infinity);
  const seen = answer.members.filter((one) => one.anomaly_map).sort((one, other) => rank(other) - rank(one) || one.k - other.k);
  const known = new Map([...$("maps").children].map((node) => [node.dataset.name, node]));
  $("maps").hidden = !seen.length;
  $("maps").replaceChildren(...seen.map((one) => {
    const node = known.get(one.device) || newMap(one.device);
    const device = fleet.devices.find((each) => each.name === one.device);
    drawMap(node, one, device?.region || [0, 0, 1, 1], answer.blind_sides.includes(one.device));
    return node;
  }));
  if (fleet.teaches && seen.length) showViews(state.looking);
}

function newMap(name) {
  const canvas = el("canvas", { width: SIDE, height: SIDE, role: "img" });
  const node = el("li", {}, el("div", { class: "map" }, el("img", { alt: "", hidden: "" }), canvas), el("b", {}, ...breakable(name)), el("span"));
  node.dataset.name = name;
  return node;
}

function drawMap(node, one, [left, top, right, bottom], blind) {
  const cells = Uint8Array.from(atob(one.anomaly_map), (each) => each.charCodeAt(0));
  const canvas = node.querySelector("canvas");
  // A device's region is a part of the centred square, which is what is shown of its picture.
  Object.assign(canvas.style, { left: width(left), top: width(top), width: width(right - left), height: width(bottom - top) });
  const pixels = new ImageData(SIDE, SIDE);
  cells.forEach((cell, place) => {
    // Cells like those of good pictures hide nothing.
    const share = Math.max(0, cell - LIKE_GOOD) / (255 - LIKE_GOOD);
    pixels.data.set([225, Math.round(190 * (1 - share)), 20, Math.round(220 * Math.sqrt(share))], 4 * place);
  });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  const most = cells.indexOf(Math.max(...cells));
  const differs = !blind && one.anomaly > 0;
  canvas.setAttribute("aria-label", `Map of ${one.device}: strangest in row ${Math.floor(most / SIDE) + 1} and column ${(most % SIDE) + 1} of ${SIDE}`);
  node.classList.toggle("differs", differs);
  const words = one.anomaly == null ? "" : ` ${one.anomaly > 0 ? "+" : "−"}${Math.abs(one.anomaly).toFixed(2)} decades`;
  node.querySelector("span").textContent = `${words}${blind ? ", does not count" : differs ? ", differs" : ""}`;
}

// Pictures behind the maps, for who may teach and so see them; others are not asked for a token.
async function showViews(looking) {
  if (state.viewing || looking.refused) return;
  state.viewing = true;
  const token = sessionStorage.getItem("token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  try {
    await Promise.all([...$("maps").children].map(async (node) => {
      const response = await fetch(`teach/cameras/${devicePath(node.dataset.name)}`, { headers });
      const image = node.querySelector("img");
      if ([401, 403].includes(response.status)) looking.refused = true;
      if (response.status !== 200 || state.looking !== looking) {
        image.hidden = true;
        return;
      }
      const url = URL.createObjectURL(await response.blob());
      for (const kind of ["load", "error"]) image.addEventListener(kind, () => URL.revokeObjectURL(url), { once: true });
      image.src = url;
      image.hidden = false;
      text("travels", "and their pictures are shown to who may teach");
    }));
  } catch {
    // A gateway that is gone is told elsewhere.
  } finally {
    state.viewing = false;
  }
}

function hideMaps() {
  $("maps").hidden = true;
  $("maps").replaceChildren();
}

function showCrops(fleet, answer) {
  const shown = state.camera ? $("video") : $("picture");
  if (shown.hidden || $("shot").hidden) return;
  const [width, height] = [shown.videoWidth || shown.naturalWidth, shown.videoHeight || shown.naturalHeight];
  if (!width) return;
  const side = Math.min(width, height);
  const unit = side / Math.max(1, Math.min(shown.clientWidth, shown.clientHeight));
  const used = fleet.devices.filter((device) => answer.used.includes(device.name));
  const svg = $("crops");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("aria-label", used.map((device) => `${device.name} sees ${area(device.region)}`).join("; "));
  const shapes = used.flatMap((device, place) => {
    const [left, top, right, bottom] = device.region;
    // Boxes that are the same lie inside each other.
    const inset = (3 + 6 * place) * unit;
    const box = {
      x: (width - side) / 2 + left * side + inset, y: (height - side) / 2 + top * side + inset,
      width: (right - left) * side - 2 * inset, height: (bottom - top) * side - 2 * inset, rx: 3 * unit,
    };
    return ["edge", "own"].map((kind) => {
      const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      for (const [name, value] of Object.entries(box)) rect.setAttribute(name, Math.max(0, value));
      rect.setAttribute("class", kind);
      if (kind === "own") rect.style.stroke = `var(--d${fleet.devices.indexOf(device) % 6})`;
      return rect;
    });
  });
  svg.replaceChildren(...shapes);
  // Devices that see the same share a line.
  const views = new Map();
  for (const device of used) views.set(`${device.region}`, [...(views.get(`${device.region}`) || []), device]);
  $("legend").replaceChildren(...[...views.values()].map((devices) => el("li", {},
    ...devices.map((device) => el("span", { class: `swatch d${fleet.devices.indexOf(device) % 6}`, "aria-hidden": "true" })),
    el("span", {}, `${devices.map((device) => device.name).join(", ")}: ${area(devices[0].region)}`))));
}

function area([left, top, right, bottom]) {
  const share = (right - left) * (bottom - top);
  return share > 0.999 ? "the whole square" : `${(share * 100).toFixed(0)} % of the square`;
}

async function open(blob) {
  stop();
  alertOf("");
  const url = URL.createObjectURL(blob);
  const picture = $("picture");
  const former = picture.src;
  picture.src = url;
  if (former) URL.revokeObjectURL(former);
  $("stage").classList.add("full");
  $("crops").replaceChildren();
  $("legend").replaceChildren();
  state.blob = blob;
  state.retries = MAX_RETRIES;
  text("label", "Asking …");
  text("note", "");
  const shown = await picture.decode().then(() => true, () => false);
  // Another one may have been opened meanwhile.
  if (state.blob !== blob) return;
  picture.hidden = false;
  // A browser may not show what the gateway can read.
  $("shot").hidden = !shown;
  $("empty").hidden = shown;
  $("empty-text").hidden = true;
  $("unseen").hidden = shown;
  await ask();
}

// The webcam.

async function openCamera() {
  stop();
  // While the browser asks, somebody may ask again, or choose a file.
  const opening = (state.opening = {});
  try {
    if (!navigator.mediaDevices) throw new Error("browsers open one for localhost and HTTPS only");
    const video = { width: { ideal: MAX_SIDE }, facingMode: { ideal: "environment" } };
    const stream = await navigator.mediaDevices.getUserMedia({ video });
    if (state.opening !== opening) {
      for (const track of stream.getTracks()) track.stop();
      return;
    }
    state.camera = stream;
    // Unplugged, or taken by another program.
    stream.getVideoTracks()[0].addEventListener("ended", () => state.camera === stream && stop());
  } catch (error) {
    if (state.opening !== opening) return;
    alertOf(`No webcam: ${REFUSED[error.name] || error.message || error.name}`);
    return;
  }
  alertOf("");
  const video = $("video");
  video.srcObject = state.camera;
  await video.play();
  $("picture").hidden = $("empty").hidden = true;
  $("shot").hidden = video.hidden = false;
  $("stage").classList.add("full");
  $("webcam").setAttribute("aria-pressed", "true");
  text("webcam", "Stop the webcam");
  const canvas = document.createElement("canvas");
  while (state.camera) {
    const scale = Math.min(1, MAX_SIDE / Math.max(video.videoWidth, video.videoHeight));
    canvas.width = video.videoWidth * scale;
    canvas.height = video.videoHeight * scale;
    canvas.getContext("2d").drawImage(video, 0, 0, canvas.width, canvas.height);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.9));
    if (!state.camera) break;
    state.blob = blob;
    await ask();
    await new Promise((resolve) => setTimeout(resolve, CAMERA_MS));
  }
}

function closeCamera() {
  if (!state.camera) return;
  for (const track of state.camera.getTracks()) track.stop();
  state.camera = null;
  $("video").hidden = true;
  $("webcam").setAttribute("aria-pressed", "false");
  text("webcam", "Webcam");
}

// The devices' own cameras.

async function look() {
  stop();
  const looking = (state.looking = new AbortController());
  looking.maps = current().inspects;
  $("cameras").setAttribute("aria-pressed", "true");
  text("cameras", "Stop looking");
  $("empty-text").hidden = true;
  $("looking").hidden = false;
  try {
    await eachEvent(`v2/models/${state.chosen}/watch?maps=${looking.maps ? 1 : 0}`, (kind, content) => {
      if (kind === "answer") showAnswer(content);
      else showNoAnswer("No answer", content.error);
    }, looking.signal);
  } catch (error) {
    if (!looking.signal.aborted) alertOf(error.message);
  }
  if (state.looking === looking) stop();
}

// Back to an empty stage.
function stop() {
  state.opening = null;
  closeCamera();
  state.looking?.abort();
  state.looking = null;
  $("cameras").setAttribute("aria-pressed", "false");
  text("cameras", "Fleet's cameras");
  $("empty-text").hidden = false;
  $("looking").hidden = $("unseen").hidden = true;
  state.blob = null;
  $("shot").hidden = true;
  $("empty").hidden = false;
  $("stage").classList.remove("full");
  $("legend").replaceChildren();
  hideMaps();
  text("travels", "and no picture travels");
}

$("webcam").addEventListener("click", () => (state.camera ? stop() : openCamera()));
$("cameras").addEventListener("click", () => (state.looking ? stop() : look()));
$("file").addEventListener("change", () => {
  if ($("file").files.length) open($("file").files[0]);
  $("file").value = "";
});
$("fleet").addEventListener("change", () => {
  state.chosen = $("fleet").value;
  state.team = null;
  if (state.looking) stop();
  showFleet();
  if (!state.blob) showNoAnswer("No picture yet", "The fused answer of all devices, and what it is made of, appear here.");
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  // Anywhere: a picture that is dropped beside the stage would open in its place.
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    $("stage").classList.toggle("over", kind === "dragover");
    const file = kind === "drop" && [...event.dataTransfer.files][0];
    if (file) open(file);
  });
}
document.addEventListener("paste", (event) => {
  const file = [...event.clipboardData.files][0];
  if (file) open(file);
});

follow("events", show);
