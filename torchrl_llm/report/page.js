"use strict";
// The views of a run report. Texts of environments and models come from compressed blocks and enter the page as text nodes only.

const SHADES = {
  credit: "advantage × weight", ratio: "ratio", log_prob: "log-prob", entropy: "entropy", kl: "KL to reference", clipped: "clipped / masked",
};
const LANES = { reward: "reward", value: "value V", advantage: "advantage", return: "return to go", error: "TD error r + γV′ − V" };
const STOPS = {
  RUNNING: "still running", WON: "won", LOST: "lost", TURN_LIMIT: "turn limit", MAX_TURNS: "cut at max_turns",
  CONTEXT: "context full", ERROR: "environment failed", TIMEOUT: "environment timed out", ENV_TRUNCATED: "truncated by the environment",
};
const CALLS = "tool_calls_json"; // the extra that has the calls of tools, which are shown as cards
const PAGE = 300; // list entries at a time: more make typing in the search slow

const state = { episode: 0, shade: "credit", query: "", recording: "", outcome: "", sort: "order", shown: PAGE };
let index, episodes = [];
const taskNames = new Map();

// ---------------------------------------------------------------- data

async function inflate(id) {
  const bytes = Uint8Array.from(atob(document.getElementById(id).textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

// The tokens of a group and the bytes of its quantities, inflated when first needed.
function block(group) {
  group.data ??= inflate(`block-${group.number}`).then((buffer) => {
    const width = group.wide ? 4 : 2;
    const tokens = new (group.wide ? Uint32Array : Uint16Array)(buffer, 0, group.tokens);
    const values = {};
    Object.keys(group.scales).forEach((name, i) => {
      values[name] = new Uint8Array(buffer, group.tokens * width + i * group.actions, group.actions);
    });
    return { tokens, values };
  });
  return group.data;
}

// An episode as spans of texts: {turn, start, texts}; start counts the model's tokens of the group.
async function spansOf(episode) {
  const { tokens } = await block(episode.group);
  let at = episode.tokenStart, action = episode.actionStart;
  return episode.spans.map(([turn, length]) => {
    const span = { turn, start: action, texts: [] };
    if (turn !== -2) {
      span.texts = Array.from(tokens.subarray(at, at + length), (piece) => index.pieces[piece]);
      at += length;
    }
    if (turn >= 0) action += length;
    return span;
  });
}

function valueOf(group, values, name, i) {
  const byte = values[name] ? values[name][i] : 0;
  if (!byte) return null;
  const [low, high] = group.scales[name];
  return low + ((high - low) * (byte - 1)) / 254;
}

function prepare() {
  index.groups.forEach((group, number) => {
    group.number = number;
    group.from = index.recordings[group.recording];
    if (!taskNames.has(group.task)) taskNames.set(group.task, `task ${taskNames.size + 1}`);
    group.taskName = taskNames.get(group.task);
    let tokenStart = 0, actionStart = 0;
    for (const episode of group.episodes) {
      Object.assign(episode, { group, tokenStart, actionStart, number: episodes.length, actions: 0, length: 0 });
      for (const [turn, length] of episode.spans) {
        if (turn !== -2) episode.length += length;
        if (turn >= 0) episode.actions += length;
      }
      tokenStart += episode.length;
      actionStart += episode.actions;
      episode.turns = episode.lanes.reward.length;
      episode.total = episode.lanes.reward.reduce((sum, reward) => sum + reward, 0);
      episode.surprise = largest(episode.lanes.error || episode.lanes.advantage);
      episodes.push(episode);
    }
  });
}

const largest = (values) => (values || []).reduce((most, value) => Math.max(most, Math.abs(value)), 0);
const mean = (values) => { // null is what was no number
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : NaN;
};

// ---------------------------------------------------------------- elements

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

const view = (name) => document.getElementById(`view-${name}`);

function number(value) {
  if (value == null || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e5) return value.toExponential(1).replace("-", "−").replace("e−", "e-");
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

function select(label, options, chosen, change) {
  const list = el("select", { "aria-label": label, onchange: (event) => change(event.target.value) });
  for (const [value, text] of options) list.append(el("option", { value, selected: String(value) === String(chosen) }, text));
  return list;
}

function signed(node, value, scale) {
  node.classList.add(value < 0 ? "neg" : "pos");
  node.style.setProperty("--a", scale ? Math.min(1, Math.abs(value) / scale).toFixed(3) : 0);
  return node;
}

// ---------------------------------------------------------------- an episode

// What the environment says of turns beside rewards: {name: [value of each turn as it is shown, or null]}.
function extras(episode) {
  const texts = Object.entries(episode.texts).filter(([name]) => name !== CALLS).map(([name, lane]) => [name, lane.map((piece) => (piece === null ? null : index.pieces[piece]))]);
  return { ...episode.extras, ...Object.fromEntries(texts) };
}

// The calls of tools in a turn, as they were read: {name, arguments}, or {text, reason} of what is none.
function callsOf(episode, turn) {
  const piece = episode.texts[CALLS]?.[turn];
  const text = piece == null ? "" : index.pieces[piece];
  try {
    return JSON.parse(text || "[]");
  } catch {
    return [{ text, reason: "it was cut, because it is too long to be kept" }];
  }
}

function card(call) {
  const rows = Object.entries(call.arguments || { text: call.text, "not read": call.reason });
  return el("div", { class: call.name ? "call" : "call wrong" }, el("b", {}, call.name || "no call"),
    el("dl", {}, ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", { dir: "auto" }, typeof value === "string" ? value : JSON.stringify(value))])));
}

const shown = (value) => (typeof value === "string" ? value : number(value));

function lanes(episode) {
  const head = el("tr", {}, el("th", {}, "turn"), ...episode.lanes.reward.map((_, turn) => el("th", { scope: "col" }, String(turn + 1))));
  const rows = Object.keys(LANES).filter((name) => episode.lanes[name]).map((name) => {
    const scale = largest(episode.lanes[name]);
    const cells = episode.lanes[name].map((value) => el("td", {}, signed(el("span", { class: "cell" }, number(value)), value, scale)));
    return el("tr", {}, el("th", { scope: "row" }, LANES[name]), ...cells);
  });
  for (const [name, lane] of Object.entries(extras(episode))) {
    const cells = lane.map((value) => el("td", {}, el("span", { class: `cell ${typeof value}`, title: shown(value) }, shown(value))));
    rows.push(el("tr", {}, el("th", { scope: "row" }, name), ...cells));
  }
  const why = episode.lanes.value ? null : el("p", { class: "muted small" },
    episode.group.from.kind === "training" ? "No values: this run has no critic." : "No credit: an evaluation is not learned from.");
  return el("div", {}, el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Turns" },
    el("table", { class: "lanes" }, el("thead", {}, head), el("tbody", {}, ...rows))), why);
}

// What a group is shaded by: where it lacks the chosen quantity, the log-probs, which every recording has.
const shadeOf = (group) => (group.from.missing[state.shade] ? "log_prob" : state.shade);

function paint(node, group, values, i) {
  node.className = "token";
  const shade = shadeOf(group), value = valueOf(group, values, shade, i);
  if (value === null) return;
  const [, , typical] = group.scales[shade];
  const share = typical ? Math.min(1, Math.abs(value) / typical) : 0;
  if (shade === "clipped") {
    if (Math.round(value)) node.classList.add(Math.round(value) === 2 ? "masked" : "clip");
  } else if (shade === "credit" || shade === "ratio") signed(node, value, typical);
  else {
    node.classList.add("seq");
    node.style.setProperty("--a", share.toFixed(3));
  }
}

function legend(group) {
  const shade = shadeOf(group), line = el("div", { class: "legend" });
  if (shade !== state.shade) line.append(`${SHADES[state.shade]}: ${group.from.missing[state.shade]}. Shaded by log-prob: `);
  if (shade === "none") return el("div", { class: "legend" }, "Not shaded.");
  const typical = group.scales[shade][2];
  const swatch = (kind) => { const node = el("span", { class: `swatch ${kind}` }); node.style.setProperty("--a", 1); return node; };
  line.append(`${index.quantities[shade]}.`);
  if (shade === "clipped") line.append(swatch("clip"), "clipped");
  else if (shade === "credit") line.append(swatch("pos"), `+${number(typical)}: made likelier`, swatch("neg"), `−${number(typical)}: less likely`);
  else if (shade === "ratio") line.append(swatch("pos"), `× ${number(Math.exp(typical))}`, swatch("neg"), `× ${number(Math.exp(-typical))}`);
  else line.append(swatch("seq"), shade === "log_prob" ? `${number(-typical)} or less: surprising` : `${number(typical)} or more`);
  return line;
}

function readout(group, values, i, text) {
  const bar = document.getElementById("readout");
  bar.replaceChildren(el("b", {}, JSON.stringify(text)));
  for (const name of Object.keys(SHADES)) {
    if (name === "clipped") continue;
    const value = valueOf(group, values, name, i);
    if (value === null) continue;
    bar.append(el("span", {}, `${SHADES[name]} ${name === "ratio" ? number(Math.exp(value)) : number(value)}`));
  }
  bar.hidden = false;
}

function tokens(span, group, values, query) {
  const place = el("pre", { tabindex: 0, dir: "auto" });
  span.texts.forEach((text, i) => {
    // A line break has no width to shade.
    const node = el("span", {}, text.replaceAll("\n", "↵\n"));
    node.action = span.start + i;
    paint(node, group, values, node.action);
    if (query && text.toLowerCase().includes(query)) node.classList.add("found");
    place.append(node);
  });
  const show = (node) => {
    place.querySelector(".at")?.classList.remove("at");
    if (!node || node.parentNode !== place) return;
    node.classList.add("at");
    readout(group, values, node.action, span.texts[node.action - span.start]);
  };
  place.addEventListener("pointerover", (event) => show(event.target));
  place.addEventListener("click", (event) => show(event.target));
  place.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const now = place.querySelector(".at");
    show(now ? (step > 0 ? now.nextSibling : now.previousSibling) : place.firstChild);
    event.preventDefault();
  });
  return place;
}

function folded(kind, label, span, inside, query) {
  const open = Boolean(query) && span.texts.join("").toLowerCase().includes(query);
  return el("details", { class: kind, open }, el("summary", {}, label), inside);
}

// A response; the thinking with which it begins is folded, and grey if the next context lacks it.
function response(span, next, episode, values, query) {
  const count = episode.extras.thinking_length?.[span.turn] || 0;
  const thinking = { ...span, texts: span.texts.slice(0, count) }, answer = { ...span, start: span.start + count, texts: span.texts.slice(count) };
  const left = next && !next.texts.join("").includes(thinking.texts.join("").trim());
  const label = `thinking, ${count} tokens${left ? ", which later turns do not see" : ""}`;
  return [count ? folded(left ? "thinking left" : "thinking", label, thinking, tokens(thinking, episode.group, values, query), query) : null, tokens(answer, episode.group, values, query)];
}

async function conversation(episode) {
  const { values } = await block(episode.group);
  const query = state.query.toLowerCase(), spans = await spansOf(episode);
  const parts = spans.map((span, i) => {
    if (span.turn === -3) return folded("env seen", `${span.texts.length} tokens from before`, span, el("pre", { dir: "auto" }, span.texts.join("")), query);
    if (span.turn === -2) return el("div", { class: "cut" }, "Parts of earlier turns leave the context; the model sees from here on:");
    if (span.turn < 0) return el("div", { class: "env" }, el("div", { class: "who" }, "environment"), el("pre", { dir: "auto" }, span.texts.join("").replace(/^\n+/, "")));
    const facts = [`${span.texts.length} tokens`, `reward ${number(episode.lanes.reward[span.turn])}`];
    if (episode.lanes.advantage) facts.push(`advantage ${number(episode.lanes.advantage[span.turn])}`);
    for (const [name, lane] of Object.entries(extras(episode))) if (lane[span.turn] !== null) facts.push(`${name} ${shown(lane[span.turn])}`);
    return el("div", { class: "model" },
      el("div", { class: "who" }, el("b", {}, `model, turn ${span.turn + 1}`), ...facts.map((fact) => el("span", {}, fact))),
      ...response(span, spans.slice(i).find((each) => each.turn === -3), episode, values, query),
      ...callsOf(episode, span.turn).map(card));
  });
  return el("div", { class: "text" }, ...parts);
}

function switches(groups, change) {
  const bar = el("div", { class: "shade", role: "group", "aria-label": "Shade tokens by" }, el("span", { class: "muted small" }, "shade by"));
  for (const [name, label] of [...Object.entries(SHADES), ["none", "none"]]) {
    const missing = groups.every((group) => group.from.missing[name]) && groups[0].from.missing[name];
    bar.append(el("button", {
      type: "button", "data-shade": name, "aria-pressed": String(groups.some((group) => shadeOf(group) === name)), disabled: Boolean(missing),
      title: missing || index.quantities[name], onclick: () => { state.shade = name; change(); },
    }, label));
  }
  if (groups.length === 1) bar.append(legend(groups[0]));
  return bar;
}

function headline(episode) {
  const { group } = episode;
  const facts = [group.from.label, group.taskName, episode.env, `${episode.turns} turns`, `${episode.length} tokens, ${episode.actions} of them the model's`, episode.tree];
  return el("div", {}, el("h3", {}, el("span", { class: `mark ${episode.won ? "won" : "lost"}` }), ` Episode ${episode.name}: ${STOPS[episode.stop]}, return ${number(episode.total)}`),
    el("p", { class: "muted small" }, facts.filter(Boolean).join(" · ")));
}

// ---------------------------------------------------------------- the view of episodes

const SORTS = {
  order: ["newest first", (a, b) => b.group.recording - a.group.recording],
  surprise: ["largest surprise |r + γV′ − V|", (a, b) => b.surprise - a.surprise],
  clipped: ["most clipped tokens", (a, b) => b.clipped - a.clipped],
  longest: ["longest", (a, b) => b.length - a.length],
  worst: ["lowest return", (a, b) => a.total - b.total],
  best: ["highest return", (a, b) => b.total - a.total],
};
const OUTCOMES = { "": "any outcome", won: "won", lost: "not won", early: "lost early (defeat, format error)", truncated: "truncated", failed: "environment failed" };

function matches(episode) {
  if (state.recording !== "" && episode.group.recording !== Number(state.recording)) return false;
  if (state.outcome === "won") return episode.won;
  if (state.outcome === "lost") return !episode.won;
  if (state.outcome === "early") return episode.stop === "LOST";
  if (state.outcome === "truncated") return ["MAX_TURNS", "CONTEXT", "ENV_TRUNCATED"].includes(episode.stop);
  if (state.outcome === "failed") return ["ERROR", "TIMEOUT"].includes(episode.stop);
  return true;
}

async function found() {
  let chosen = episodes.filter(matches);
  const query = state.query.toLowerCase();
  if (query) {
    const texts = await Promise.all(chosen.map(spansOf));
    chosen = chosen.filter((_, i) => texts[i].map((span) => span.texts.join("")).join("\n").toLowerCase().includes(query));
  }
  return chosen.sort(SORTS[state.sort][1]);
}

let listed = [];

async function refreshList() {
  listed = await found();
  const list = view("episodes").querySelector(".list");
  list.replaceChildren(...listed.slice(0, state.shown).map((episode) => el("li", {}, el("button", {
    type: "button", "data-episode": episode.number, "aria-current": episode.number === state.episode ? "true" : null,
    onclick: () => openEpisode(episode.number),
  }, el("span", { class: `mark ${episode.won ? "won" : "lost"}` }), el("span", {}, STOPS[episode.stop], el("span", { class: "muted small" }, `  ${episode.name}`)),
  el("span", { class: "value" }, number(episode.total)),
  el("span", { class: "under" }, `${episode.group.from.label} · ${episode.group.taskName} · ${episode.turns} turns · ${episode.length} tokens${episode.clipped ? ` · ${episode.clipped} clipped` : ""}`)))));
  if (listed.length > state.shown) {
    list.append(el("li", {}, el("button", { type: "button", onclick: () => { state.shown += PAGE; refreshList(); } }, `${listed.length - state.shown} more`)));
  }
  list.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
  view("episodes").querySelector(".count").textContent = `${listed.length} of ${episodes.length} episodes; right: return`;
}

async function openEpisode(number_, { keepHash = false } = {}) {
  state.episode = number_;
  const episode = episodes[number_], place = view("episodes").querySelector(".detail");
  const parts = [headline(episode), lanes(episode), switches([episode.group], () => openEpisode(number_, { keepHash: true })), await conversation(episode)];
  if (state.episode !== number_) return; // another one was opened meanwhile
  place.replaceChildren(...parts);
  for (const button of view("episodes").querySelectorAll("[data-episode]")) {
    const here = Number(button.dataset.episode) === number_;
    if (here) button.setAttribute("aria-current", "true"); else button.removeAttribute("aria-current");
    if (here) button.scrollIntoView({ block: "nearest" });
  }
  if (!keepHash) history.replaceState(null, "", `#episodes/${number_}`);
}

function buildEpisodes() {
  const change = (name) => (value) => { state[name] = value; state.shown = PAGE; refreshList(); };
  const search = el("input", { type: "search", placeholder: "search the text ( / )", "aria-label": "Search the text of episodes" });
  let waiting;
  search.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(() => { change("query")(search.value); openEpisode(state.episode, { keepHash: true }); }, 150); });
  const recordings = [["", "all recordings"], ...index.recordings.map((each, i) => [i, each.label])];
  const filters = el("div", { class: "filters" }, search,
    select("Recording", recordings, state.recording, change("recording")),
    select("Outcome", Object.entries(OUTCOMES), state.outcome, change("outcome")),
    select("Order", Object.entries(SORTS).map(([name, [label]]) => [name, label]), state.sort, change("sort")));
  filters.lastChild.style.gridColumn = "1 / -1";
  view("episodes").replaceChildren(el("div", { class: "browse" },
    el("div", {}, filters, el("p", { class: "muted small count", "aria-live": "polite" }), el("ul", { class: "list" })), el("div", { class: "detail" })));
}

// ---------------------------------------------------------------- trees

// The episodes of a task as a trie: a node is a response after what came before it, its replies are what the environment said then.
// The first message is that of the task, and no fork, even where its wording differs.
async function trie(group) {
  const reply = (text) => ({ text, children: new Map(), episodes: [] });
  const root = reply("");
  for (const episode of group.episodes) {
    let at = root, node = null, heard = "";
    at.episodes.push(episode);
    for (const span of await spansOf(episode)) {
      const text = span.texts.join("");
      if (span.turn === -3) continue;
      if (span.turn < 0) { heard += text; continue; }
      if (node === null) at.text ||= heard;
      else at = hear(node, heard, episode);
      if (!at.children.has(text)) at.children.set(text, { text, turn: span.turn, replies: new Map(), episodes: [] });
      node = at.children.get(text);
      node.episodes.push(episode);
      heard = "";
    }
    if (node) hear(node, heard, episode).ends.push(episode);
  }
  return root;
}

function hear(node, text, episode) {
  if (!node.replies.has(text)) node.replies.set(text, { text, children: new Map(), episodes: [], ends: [] });
  const reply = node.replies.get(text);
  reply.episodes.push(episode);
  return reply;
}

const byVisits = (nodes) => [...nodes.values()].sort((a, b) => b.episodes.length - a.episodes.length);

function* repliesBelow(at) {
  for (const node of at.children.values()) {
    for (const reply of node.replies.values()) { yield reply; yield* repliesBelow(reply); }
  }
}

// Replies without the lines at their ends that all of them share: the template's, and what an environment always says.
function shorten(root) {
  const all = [...repliesBelow(root)], lines = all.map((reply) => reply.text.split("\n"));
  const shared = (line) => lines.every((each) => each.length && each[0] !== undefined && line(each) === line(lines[0]));
  const texts = new Set(all.map((reply) => reply.text));
  while (texts.size > 1 && shared((each) => each[0]) && lines.every((each) => each.length > 1)) lines.forEach((each) => each.shift());
  while (texts.size > 1 && shared((each) => each.at(-1)) && lines.every((each) => each.length > 1)) lines.forEach((each) => each.pop());
  all.forEach((reply, i) => { reply.short = lines[i].join("\n").trim(); });
}

function branch(node, scale) {
  const visits = node.episodes, wins = visits.filter((episode) => episode.won).length / visits.length;
  const advantages = visits.filter((episode) => episode.lanes.advantage).map((episode) => episode.lanes.advantage[node.turn]);
  const rate = el("span", { class: "rate" }, el("i"));
  rate.firstChild.style.width = `${100 * wins}%`;
  const chip = advantages.length ? signed(el("span", { class: "cell" }, number(mean(advantages))), mean(advantages), scale) : el("span", {}, "–");
  const replies = byVisits(node.replies).map((reply) => el("li", {}, el("div", { class: "reply" }, reply.short),
    ...reply.ends.map((episode) => el("div", { class: "end" }, el("a", { href: `#episodes/${episode.number}` }, `episode ${episode.name}: ${STOPS[episode.stop]}, return ${number(episode.total)}`), el("span", { class: "muted small" }, episode.tree && `  ${episode.tree}`))),
    reply.children.size ? el("ul", {}, ...byVisits(reply.children).map((child) => branch(child, scale))) : null));
  return el("li", {}, el("details", { open: visits.length > 1 }, el("summary", {},
    el("code", {}, node.text), el("span", { class: "num" }, `${visits.length} `, el("small", {}, visits.length === 1 ? "visit" : "visits")),
    el("span", { class: "num", title: "win rate of the episodes through here" }, rate, `${Math.round(100 * wins)} %`),
    el("span", { class: "num", title: "mean advantage of this turn" }, chip)), el("ul", { class: "replies" }, ...replies)));
}

async function showTree(number_) {
  const group = index.groups[number_], root = await trie(group);
  shorten(root);
  const scale = largest(group.episodes.flatMap((episode) => episode.lanes.advantage || []));
  const wins = group.episodes.filter((episode) => episode.won).length;
  const options = index.groups.map((each, i) => [i, `${each.from.label} · ${each.taskName} · ${each.episodes.length} episodes`]);
  const fold = (open) => el("button", { type: "button", onclick: () => view("trees").querySelectorAll("details").forEach((each) => { each.open = open; }) }, open ? "unfold all" : "fold all");
  view("trees").replaceChildren(
    el("div", { class: "pick" }, select("Group", options, number_, (value) => showTree(Number(value))), fold(true), fold(false),
      el("span", { class: "muted small" }, `${wins} of ${group.episodes.length} won. A line is a response: its visits, the win rate of the episodes through it, the mean advantage of its turn.`)),
    el("div", { class: "env first" }, el("div", { class: "who" }, "environment"), el("pre", { dir: "auto" }, root.text)),
    el("ul", { class: "tree" }, ...byVisits(root.children).map((child) => branch(child, scale))));
}

// ---------------------------------------------------------------- then and now

const compared = { task: null, then: 0, now: 0, episodes: {} };

function timelines() {
  const tasks = new Map();
  for (const group of index.groups) tasks.set(group.task, [...(tasks.get(group.task) || []), group]);
  return new Map([...tasks].filter(([, groups]) => groups.length > 1).sort((a, b) => b[1].length - a[1].length));
}

async function pane(groups, side) {
  const group = groups[compared[side]], which = Math.min(compared.episodes[side] || 0, group.episodes.length - 1), episode = group.episodes[which];
  const change = (name, value) => { compared[name] = Number(value); showThenAndNow(); };
  const wins = group.episodes.filter((each) => each.won).length;
  return el("div", {}, el("div", { class: "pick" },
    select(side, groups.map((each, i) => [i, each.from.label]), compared[side], (value) => change(side, value)),
    select("Episode", group.episodes.map((each, i) => [i, `episode ${i + 1} of ${group.episodes.length}: ${STOPS[each.stop]}`]), which, (value) => { compared.episodes[side] = Number(value); showThenAndNow(); }),
    el("span", { class: "muted small" }, `won ${wins} of ${group.episodes.length}, mean return ${number(mean(group.episodes.map((each) => each.total)))}`)),
  headline(episode), lanes(episode), legend(group), await conversation(episode));
}

async function showThenAndNow() {
  const all = timelines();
  if (!all.size) {
    view("then-and-now").replaceChildren(el("p", { class: "note" }, "No task was recorded twice: the environment has a new task each time, or the run had one recording."));
    return;
  }
  if (!all.has(compared.task)) Object.assign(compared, { task: [...all.keys()][0], then: 0, now: -1, episodes: {} });
  const groups = all.get(compared.task);
  if (compared.now < 0) compared.now = groups.length - 1;
  const tasks = [...all].map(([task, its]) => [task, `${taskNames.get(task)} · ${its.length} recordings`]);
  const strip = el("div", { class: "strip" }, ...groups.map((group, i) => {
    const wins = group.episodes.filter((each) => each.won).length / group.episodes.length, bar = el("i");
    bar.style.height = `${100 * wins}%`;
    return el("button", { type: "button", title: `${group.from.label}: win rate ${Math.round(100 * wins)} %`, "aria-label": `${group.from.label}: win rate ${Math.round(100 * wins)} %`,
      "aria-pressed": String(i === compared.then || i === compared.now), onclick: () => { compared.now = i; showThenAndNow(); } }, bar);
  }));
  const panes = [await pane(groups, "then"), await pane(groups, "now")];
  view("then-and-now").replaceChildren(
    el("div", { class: "pick" }, select("Task", tasks, compared.task, (value) => { Object.assign(compared, { task: value, then: 0, now: -1, episodes: {} }); showThenAndNow(); }),
      el("span", { class: "muted small" }, `win rate of its episodes, from ${groups[0].from.label} to ${groups.at(-1).from.label}; a click on a bar compares it`)), strip,
    switches([groups[compared.then], groups[compared.now]], showThenAndNow), el("div", { class: "panes" }, ...panes));
}

// ---------------------------------------------------------------- navigation

const VIEWS = ["summary", "episodes", "trees", "then-and-now"];

function show() {
  const [name, number_] = location.hash.slice(1).split("/");
  const chosen = VIEWS.includes(name) ? name : "summary";
  for (const each of VIEWS) view(each).hidden = each !== chosen;
  for (const link of document.querySelectorAll(".top nav a")) {
    const here = link.hash === `#${chosen}`;
    if (here) link.setAttribute("aria-current", "page"); else link.removeAttribute("aria-current");
  }
  document.getElementById("readout").hidden = true;
  if (chosen === "summary") return;
  if (!episodes.length) {
    view(chosen).replaceChildren(el("p", { class: "note" }, "No episodes were recorded (record_interval is 0, or no iteration has ended yet)."));
  } else if (chosen === "episodes") {
    refreshList();
    openEpisode(number_ && episodes[Number(number_)] ? Number(number_) : state.episode, { keepHash: true });
  } else if (chosen === "trees") {
    if (!view("trees").childElementCount) showTree(widest());
  } else showThenAndNow();
}

// The newest group with most episodes: there is most to see in it.
function widest() {
  const training = index.groups.filter((group) => group.from.kind === "training");
  const from = training.length ? training : index.groups;
  return from.reduce((best, group) => (group.episodes.length >= best.episodes.length ? group : best)).number;
}

function setTheme(theme) { document.documentElement.dataset.theme = theme; }

function keys(event) {
  if (event.target.closest("input, select") || event.ctrlKey || event.metaKey || event.altKey) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const here = listed.findIndex((episode) => episode.number === state.episode);
  if (VIEWS[event.key - 1]) location.hash = VIEWS[event.key - 1];
  else if (event.key === "d") document.getElementById("theme").click();
  else if (event.key === "/" && episodes.length) {
    location.hash = "episodes";
    show();
    view("episodes").querySelector("input").focus();
  } else if (event.key === "s") {
    const open = document.querySelector("section:not([hidden])"), buttons = [...open.querySelectorAll(".shade")].slice(0, 1).flatMap((bar) => [...bar.querySelectorAll("button:not([disabled])")]);
    const next = buttons[(buttons.findIndex((button) => button.dataset.shade === state.shade) + 1) % buttons.length];
    next?.click();
  } else if ("jk".includes(event.key) && !view("episodes").hidden) {
    const next = listed[here + (event.key === "j" ? 1 : -1)];
    if (next) openEpisode(next.number);
  } else return;
  event.preventDefault();
}

async function start() {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.getElementById("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  index = JSON.parse(new TextDecoder().decode(await inflate("index")));
  prepare();
  if (episodes.length) buildEpisodes();
  // What the run did not compute cannot be shown first.
  const training = index.recordings.find((each) => each.kind === "training");
  if (training?.missing.credit) state.shade = "log_prob";
  const last = index.groups.findLast((group) => group.from.kind === "training");
  // The first to look at: where the newest credit was most surprising.
  if (last) state.episode = last.episodes.reduce((most, each) => (each.surprise > most.surprise ? each : most)).number;
  document.addEventListener("keydown", keys);
  addEventListener("hashchange", show);
  show();
  document.body.dataset.ready = "true";
}

start();
