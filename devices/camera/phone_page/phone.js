"use strict";
// Longest side of a picture, its quality, and milliseconds from one to the next.
const LONGEST = 1280, QUALITY = 0.85, EVERY_MS = 100, AGAIN_MS = 1000;
const REFUSED = {
  403: "This address lacks the right token: scan the code again.",
  409: "Another phone is this board's camera now.",
  413: "A picture was too large.",
};
// A picture was taken; no further one will be.
const SENT = 204, FOR_GOOD = 403;
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
    const status = await sendOne();
    $("seen").classList.toggle("unsent", status !== SENT);
    if (status === FOR_GOOD) {
      for (const track of stream.getTracks()) track.stop();
      $("seen").hidden = true;
      return;
    }
    const pause = status === SENT ? EVERY_MS : AGAIN_MS;
    await wait(Math.max(0, pause - (performance.now() - began)));
  }
}

// The status of a picture; none where the board was not reached.
async function sendOne() {
  const { videoWidth, videoHeight } = $("seen");
  const scale = Math.min(1, LONGEST / Math.max(videoWidth, videoHeight));
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(videoWidth * scale);
  canvas.height = Math.round(videoHeight * scale);
  canvas.getContext("2d").drawImage($("seen"), 0, 0, canvas.width, canvas.height);
  const body = await new Promise((done) => canvas.toBlob(done, "image/jpeg", QUALITY));
  let status;
  try {
    const headers = { Authorization: `Bearer ${token}`, "X-Phone": phone };
    ({ status } = await fetch("picture", { method: "POST", headers, body }));
  } catch {
    tell("The board cannot be reached; trying again.", true);
    return undefined;
  }
  if (status === SENT) {
    sent += 1;
    tell(sent === 1 ? "1 picture sent." : `${sent} pictures sent.`);
  } else {
    tell(REFUSED[status] ?? `The board answers ${status}.`, true);
  }
  return status;
}

$("where").textContent = location.host;
$("start").addEventListener("click", start);
if (!token) {
  $("start").disabled = true;
  tell("This address has no token: scan the code again.", true);
}
