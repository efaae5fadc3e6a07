"use strict";
// Longest side of a picture, its quality, and milliseconds from one to the next.
const LONGEST = 1280, QUALITY = 0.85, EVERY_MS = 100, AGAIN_MS = 1000;
const REFUSED = {
  403: "This address lacks the right token: scan the code again.",
  409: "Another phone is this board's camera now.",
  413: "A picture was too large.",
};
const $ = (id) => document.getElementById(id);
const token = location.hash.slice(1), phone = crypto.randomUUID();
let sent = 0;

function tell(text, bad = false) {
  $("told").textContent = text;
  $("told").className = bad ? "bad" : "";
}

const wait = (ms) => new Promise((done) => setTimeout(done, ms));

async function keepAwake() {
  try {
    await navigator.wakeLock?.request("screen");
  } catch { /* A phone that falls asleep stops sending; nothing else is lost. */ }
}

async function start() {
  $("start").disabled = true;
  let stream;
  try {
    const video = { facingMode: { ideal: "environment" }, width: { ideal: LONGEST } };
    stream = await navigator.mediaDevices.getUserMedia({ video });
  } catch (error) {
    $("start").disabled = false;
    tell(error.name === "NotFoundError" ? "This device has no camera."
      : "The browser gave no camera: allow it for this page, then press again.", true);
    return;
  }
  $("start").hidden = true;
  $("seen").srcObject = stream;
  $("seen").hidden = false;
  await $("seen").play();
  await keepAwake();
  document.addEventListener("visibilitychange", () => document.hidden || keepAwake());
  for (;;) {
    const began = performance.now();
    const pause = await sendOne() ? EVERY_MS : AGAIN_MS;
    await wait(Math.max(0, pause - (performance.now() - began)));
  }
}

async function sendOne() {
  const { videoWidth, videoHeight } = $("seen");
  const scale = Math.min(1, LONGEST / Math.max(videoWidth, videoHeight));
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(videoWidth * scale);
  canvas.height = Math.round(videoHeight * scale);
  canvas.getContext("2d").drawImage($("seen"), 0, 0, canvas.width, canvas.height);
  const body = await new Promise((done) => canvas.toBlob(done, "image/jpeg", QUALITY));
  try {
    const headers = { Authorization: `Bearer ${token}`, "X-Phone": phone };
    const { status } = await fetch("picture", { method: "POST", headers, body });
    if (status !== 204) {
      tell(REFUSED[status] ?? `The board answers ${status}.`, true);
      return false;
    }
  } catch {
    tell("The board cannot be reached; trying again.", true);
    return false;
  }
  sent += 1;
  tell(sent === 1 ? "1 picture sent." : `${sent} pictures sent.`);
  return true;
}

$("where").textContent = location.host;
$("start").addEventListener("click", start);
if (!token) tell("This address has no token: scan the code again.", true);
