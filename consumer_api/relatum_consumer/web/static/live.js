// Live: rows as the server draws them, put before the others; bounded, and held back while one reads.
import { drawTimes, isShortcut } from "./shared.js";

const ROWS_MAX = 500;
const SILENT_MS = 30_000;
const AGAIN_MS = [1000, 2000, 5000, 10_000, 20_000];
const RATE_MS = 5000;

const place = document.querySelector("[data-live]");
const body = place?.querySelector("tbody");
const button = document.querySelector("[data-pause]");
const counts = { shown: 0, more: 0, lost: 0 };
let came = [];
let held = [];
let isPaused = false;
let isOver = false;
let isRenewed = false;
let last = "";
let said = "";
let tries = 0;
let connection = null;
let hasBegun = false;

const number = (value) => value.toLocaleString("en");

// --- what is seen ---------------------------------------------------------------------------------------

function say(state, words) {
  said = words;
  const shown = isPaused && state === "live" ? "paused" : words;
  const target = document.querySelector("[data-state]");
  if (target.textContent !== shown) target.textContent = shown;
  target.closest(".state").dataset.kind = isPaused && state === "live" ? "paused" : state;
  target.dataset.last = state;
}

function count() {
  const now = performance.now();
  came = came.filter(([at]) => now - at < RATE_MS);
  const rate = came.reduce((sum, [, messages]) => sum + messages, 0) / (RATE_MS / 1000);
  const waiting = held.reduce((sum, each) => sum + each.shown, 0);
  const parts = [`${number(counts.shown)} new`];
  if (rate >= 1) parts.push(`about ${number(Math.round(rate))} a second`);
  if (waiting) parts.push(`${number(waiting)} wait`);
  if (counts.more) parts.push(`${number(counts.more)} more than are listed`);
  if (counts.lost) parts.push(`${number(counts.lost)} lost: this connection is slow`);
  document.querySelector("[data-counts]").textContent = parts.join(" · ");
}

function put(rows) {
  const template = document.createElement("template");
  template.innerHTML = rows;
  drawTimes(template.content);
  for (const row of template.content.children) row.classList.add("new");
  body.prepend(template.content);
  while (body.childElementCount > ROWS_MAX) body.lastElementChild.remove();
}

function mark(...words) {
  if (held.length) { held.push({ words, shown: 0 }); return; }
  const row = body.insertRow(0);
  row.className = "mark";
  const cell = row.insertCell();
  cell.colSpan = 6;
  cell.append(...words);
  drawTimes(row);
}

function moment(at) {
  const text = new Date(at).toISOString();
  return Object.assign(document.createElement("time"), { dateTime: text, title: `${text.slice(0, 10)} ${text.slice(11, 23)} UTC` });
}

// --- what is told ---------------------------------------------------------------------------------------

const tell = {
  messages(data) {
    const more = data.more + data.passed;
    counts.shown += data.shown;
    counts.more += more;
    came.push([performance.now(), data.shown + more]);
    if (isPaused) {
      held.push(data);
      // As many as the list would keep.
      while (held.length > 1 && held.reduce((sum, each) => sum + each.shown, 0) > ROWS_MAX) counts.more += held.shift().shown;
    } else put(data.rows);
    count();
  },
  state({ state, words }) {
    if (state === "away") say("away", `away: ${words}`);
    else if (state === "live") say("live", "live");
    else if (state === "connecting") say("connecting", "connecting");
    else say("behind", `live, but ${words}`);
    button.disabled = false;
    count();
  },
  lost(data) { counts.lost += data.count; },
  missed(data) {
    mark("What arrived between ", moment(data.since), " and ", moment(Date.now()), " is not listed: nobody looked then.");
  },
  end({ why }) { isRenewed = why === "renew"; },
};

function take(text) {
  let name = "message", data = "";
  for (const line of text.split("\n")) {
    const [field, value] = [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)];
    if (field === "event") name = value;
    else if (field === "data") data += value;
    else if (field === "id") last = value;
  }
  if (tell[name]) tell[name](JSON.parse(data));
}

// --- the connection -------------------------------------------------------------------------------------

async function refused(response) {
  const { error } = await response.json().catch(() => ({ error: { message: response.statusText, hint: "" } }));
  if (response.status === 429 || response.status >= 500) {
    return Math.max(1000 * Number(response.headers.get("Retry-After") ?? 1), wait(`away: ${error.message}. ${error.hint}`));
  }
  isOver = true;
  say("over", response.status === 401 ? "ended: log in again, by loading this page" : `refused: ${error.message}. ${error.hint}`);
  return 0;
}

function wait(words) {
  const pause = AGAIN_MS[Math.min(tries++, AGAIN_MS.length - 1)];
  say("away", `${words} (tried again by itself)`);
  return pause;
}

async function listen() {
  const stop = connection = new AbortController();
  let timer;
  const alive = () => { clearTimeout(timer); timer = setTimeout(() => stop.abort(), SILENT_MS); };
  const url = `${place.dataset.live}${place.dataset.live.includes("?") ? "&" : "?"}form=rows&most=10`;
  alive();
  isRenewed = false;
  try {
    const response = await fetch(url, { headers: last ? { "Last-Event-ID": last } : {}, signal: stop.signal });
    if (!response.ok) return await refused(response);
    if (!hasBegun && body.childElementCount) mark("Above: arrived since this page was opened");
    hasBegun = true;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      alive();
      tries = 0;
      const parts = (text + value).split("\n\n");
      text = parts.pop();
      parts.forEach(take);
    }
    return isRenewed ? 0 : wait("away: the page was stopped, or begins anew");
  } catch {
    return document.hidden ? 0 : wait("away: the page does not answer");
  } finally {
    clearTimeout(timer);
    if (connection === stop) connection = null;
  }
}

let timer;

async function go() {
  clearTimeout(timer);
  if (connection || isOver || document.hidden) return;
  const pause = await listen();
  if (!isOver && !document.hidden) timer = setTimeout(go, pause);
}

// Who does not look costs nothing; what comes meanwhile is told afterwards.
document.addEventListener("visibilitychange", () => { if (document.hidden) connection?.abort(); else go(); });

function pause() {
  isPaused = !isPaused;
  button.textContent = isPaused ? "Go on" : "Pause";
  for (const each of isPaused ? [] : held.splice(0)) {
    if (each.rows === undefined) mark(...each.words);
    else put(each.rows);
  }
  say(document.querySelector("[data-state]").dataset.last, said);
  count();
}

if (place) {
  button.addEventListener("click", pause);
  document.addEventListener("keydown", (event) => {
    if (event.key === "p" && !button.disabled && isShortcut(event)) pause();
  });
  go();
}
