"use strict";
// The page's data are gzip files in script elements (see tools/report_page/write.py). The large ones, the tokens
// of a step, are read when a group of the step is opened or searched.

const $ = (id) => document.getElementById(id);
const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#999999", "#b8a800"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const SYMBOLS = ["circle", "square", "triangle-up", "diamond", "x", "star", "cross", "triangle-down"];
const PATTERNS = ["", "/", "x", "-", ".", "+", "\\"];  // not as many as colors, so that no pair repeats soon
const NESTED_TIMES = new Set(["step", "agreement", "environments", "environments_waited"]);
const GROUPS_PER_PAGE = 25, MAX_COLUMNS = 200, MAX_TOKENS = 8000;

let data, shown = [], page = 0, open = null;
const charts = new Map();  // element -> function that returns [traces, layout]
const chunks = new Map();  // "run.step" -> groups

async function unpack(id) {
  const packed = await fetch(`data:application/gzip;base64,${$(id).textContent}`);  // faster than atob
  return new Response(packed.body.pipeThrough(new DecompressionStream("gzip")));
}
const unpackJson = async (id) => (await unpack(id)).json();
const unpackArray = async (id, type) => new type(await (await unpack(id)).arrayBuffer());

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}
function table(head, rows) {  // a cell is a text, a number, or an element
  const made = element("table"), top = made.createTHead().insertRow();
  head.forEach((name) => top.append(element("th", name, { scope: "col" })));
  const body = made.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const cell of row) {
      if (cell instanceof Node) line.append(cell);
      else line.append(element("td", typeof cell === "number" ? format(cell) : cell ?? "-", typeof cell === "number" ? { class: "number" } : {}));
    }
  }
  return made;
}
const format = (x) => x === null || x === undefined || Number.isNaN(x) ? "-" : Number.isInteger(x) ? String(x) : Number(x.toPrecision(4)).toString();
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const style = (i) => ({ color: COLORS[i % COLORS.length], dash: DASHES[i % DASHES.length], symbol: SYMBOLS[i % SYMBOLS.length] });

// Charts ---------------------------------------------------------------------------------------------------

function layout(title, more = {}) {
  const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), automargin: true };
  // The first 30 pixels are those of the mode bar, which would cover a title there.
  return { title: { text: title, font: { size: 14 }, x: 0.5, y: 1, yref: "container", yanchor: "top", pad: { t: 32 } }, margin: { l: 50, r: 12, t: 60, b: 40 }, font: { color: css("--text"), size: 12 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified", hoverlabel: { bgcolor: css("--raised"), font: { color: css("--text") } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--quiet"), activecolor: css("--accent") },
    height: 336, legend: { orientation: "h", y: -0.14 }, ...more, xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis } };
}
const visible = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (!isIntersecting || !charts.has(target)) continue;
    visible.unobserve(target);
    const [traces, frame] = charts.get(target)();
    Plotly.react(target, traces, frame, { responsive: true, displaylogo: false, toImageButtonOptions: { scale: 2 } });
  }
}, { rootMargin: "300px" });
function draw(target, build) {  // when the chart is near the window: a chart takes about 0.1 s
  charts.set(target, build);
  visible.unobserve(target);
  visible.observe(target);
}
const drawAll = () => charts.forEach((build, target) => draw(target, build));

function smooth(values, weight) {  // an exponential moving average without bias at its start
  let mean = 0, norm = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    mean = weight * mean + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return Number((mean / norm).toPrecision(7));  // else a constant metric shows its rounding errors
  });
}
function xOf(run) {
  const { steps, time } = run.metrics;
  return $("x-axis").value === "step" ? steps : time.map((t) => (t - time[0]) / 3600);
}
const resumes = (runs) => $("x-axis").value !== "step" ? [] : runs.flatMap((run) => run.events.filter((e) => e.kind === "resume").map((e) => ({
  type: "line", x0: e.step, x1: e.step, yref: "paper", y0: 0, y1: 1, line: { color: css("--quiet"), width: 1, dash: "dot" } })));

function lineTraces(run, name, label, number) {
  const weight = Number($("smoothing").value), values = run.metrics.columns[name], look = style(number), x = xOf(run);
  const there = values.map((v, i) => i).filter((i) => values[i] !== null);
  const xs = there.map((i) => x[i]), ys = there.map((i) => values[i]);
  const line = { x: xs, y: smooth(ys, weight), name: label, mode: "lines+markers", line: { color: look.color, dash: look.dash, width: 2 },
    marker: { symbol: look.symbol, size: 7, maxdisplayed: 10 } };
  if (!weight) return [line];
  return [{ x: xs, y: ys, mode: "lines", line: { color: look.color, width: 1 }, opacity: 0.25, showlegend: false, hoverinfo: "skip" }, line];
}
function addCurve(name, removable = true) {
  const having = data.runs.filter((run) => run.metrics.columns[name]);
  if (!having.length || document.querySelector(`[data-metric="${CSS.escape(name)}"]`)) return;
  const box = element("div", undefined, { class: "chart", "data-metric": name }), plot = element("div", undefined, { class: "chart" });
  if (removable) {
    const button = element("button", "\u00d7", { class: "remove", type: "button", title: `Remove ${name}`, "aria-label": `Remove ${name}` });
    button.onclick = () => { charts.delete(plot); box.remove(); };
    box.append(button);
  }
  const { plain, bad } = data.curves[name] ?? {};
  box.append(plot);
  if (bad) {
    const note = element("p", "Bad: ", { class: "note" });
    bad.split("`").forEach((part, i) => note.append(i % 2 ? element("code", part) : part));
    box.append(note);
  }
  $("curve-charts").append(box);
  draw(plot, () => [having.flatMap((run) => lineTraces(run, name, run.name, data.runs.indexOf(run))),
    layout(plain ? `${plain} <span style="font-size:11px">${name}</span>` : name, { showlegend: data.runs.length > 1, shapes: resumes(having) })]);
}
function drawValidation() {
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics.columns)))].filter((name) => name.startsWith("val-core/"));
  const byKind = Map.groupBy(names, (name) => name.split("/").slice(-2).join("/"));
  $("validation").hidden = !names.length;
  for (const [kind, members] of byKind) {
    const plot = element("div", undefined, { class: "chart" });
    $("validation-charts").append(plot);
    draw(plot, () => {
      let number = 0;
      const traces = data.runs.flatMap((run) => members.filter((name) => run.metrics.columns[name]).flatMap((name) => {
        const source = name.slice("val-core/".length, -kind.length - 1);
        return lineTraces(run, name, data.runs.length > 1 ? `${run.name}: ${source}` : source, number++);
      }));
      return [traces, layout(kind, { showlegend: true })];
    });
  }
}
function drawTimes() {
  draw($("time-chart"), () => {
    const run = data.runs[$("time-run").value], columns = run.metrics.columns, x = run.metrics.steps;
    const names = Object.keys(columns).filter((name) => name.startsWith("timing_s/") && !NESTED_TIMES.has(name.slice(9)));
    const sum = (name) => columns[name].reduce((a, b) => a + (b ?? 0), 0);
    names.sort((a, b) => sum(b) - sum(a));
    const outside = new Set(["timing_s/testing", "timing_s/save_checkpoint"]);
    const rest = (columns["timing_s/step"] ?? []).map((step, i) => step === null ? 0 : Math.max(0, step - names.reduce((a, n) => a + (outside.has(n) ? 0 : columns[n][i] ?? 0), 0)));
    const parts = names.map((name) => [name.slice(9), columns[name].map((v) => v ?? 0)]).concat([["other", rest]]);
    const traces = parts.map(([name, y], i) => ({ x, y, name, stackgroup: "one", mode: "lines", line: { width: 1, color: COLORS[i % COLORS.length] },
      fillpattern: { shape: PATTERNS[i % PATTERNS.length], solidity: 0.25 }, hovertemplate: "%{y:.3g} s" }));
    return [traces, layout("", { height: 406, yaxis: { title: { text: "seconds" } } })];
  });
}
function histogram(values, steps, rows, isLength) {  // returns shares per bin and block of steps
  const first = steps[0], last = steps[steps.length - 1], width = Math.max(1, Math.ceil((last - first + 1) / MAX_COLUMNS));
  let low = Infinity, high = -Infinity;
  for (const i of rows) { if (values[i] < low) low = values[i]; if (values[i] > high) high = values[i]; }
  const distinct = new Set();
  for (const i of rows) { distinct.add(values[i]); if (distinct.size > 12) break; }
  const kinds = distinct.size <= 12 && !isLength ? [...distinct].filter((v) => !Number.isNaN(v)).sort((a, b) => a - b) : null;
  const number = kinds ? kinds.length : 30, size = (high - low) / number || 1;
  const places = kinds && new Map(kinds.map((v, i) => [v, i]));
  const columns = Math.floor((last - first) / width) + 1, counts = Array.from({ length: number }, () => new Array(columns).fill(0));
  const totals = new Array(columns).fill(0);
  for (const i of rows) {
    if (Number.isNaN(values[i])) continue;
    const bin = places ? places.get(values[i]) : Math.min(number - 1, Math.floor((values[i] - low) / size)), column = Math.floor((steps[i] - first) / width);
    counts[bin][column]++;
    totals[column]++;
  }
  const y = kinds ? kinds.map(format) : Array.from({ length: number }, (_, i) => low + (i + 0.5) * size);
  return { x: totals.map((_, i) => first + i * width), y, z: counts.map((row) => row.map((n, i) => totals[i] ? n / totals[i] : null)), kinds };
}
function drawDistributions() {
  const index = Number($("distribution-run").value), run = data.runs[index], box = $("distribution-charts");
  for (const plot of box.children) charts.delete(plot);
  box.replaceChildren();
  if (!run.samples) { $("distribution-note").textContent = "This run has stored no rollouts (logging.rollouts)."; return; }
  const { step, row, score, length } = run.arrays, rows = [];
  for (let i = 0; i < step.length; i++) if (!row[i]) rows.push(i);
  $("distribution-note").textContent = `Share of each step's stored samples; lighter colours are larger shares. ${rows.length} samples are stored (logging.rollouts=${run.samples.kind}).`;
  for (const [title, values] of [["score", score], ["length in tokens", length]]) {
    const plot = element("div", undefined, { class: "chart" });
    let found;
    box.append(plot);
    draw(plot, () => (found ??= histogram(values, step, rows, values === length)) && [[{ type: "heatmap", x: found.x, y: found.y, z: found.z, colorscale: "Cividis", zmin: 0, hovertemplate: "step %{x}, " + title + " %{y}: %{z:.1%}<extra></extra>",
      colorbar: { thickness: 10, tickformat: ".1%", outlinewidth: 0 } }], layout(title, { hovermode: "closest", yaxis: found.kinds ? { type: "category" } : {} })]);
  }
}

// Samples --------------------------------------------------------------------------------------------------

const filters = () => Object.fromEntries(new FormData($("filters")));
const within = (value, low, high) => (low === "" || value >= Number(low)) && (high === "" || value <= Number(high));

async function filterSamples() {
  const f = filters(), index = Number(f.run), run = data.runs[index], token = (filterSamples.last = {});
  $("groups").replaceChildren();
  shown = [];
  if (!run.samples) { $("found").textContent = "This run has stored no rollouts (logging.rollouts)."; turnPage(0); return; }
  const { step, group, row, score, length, source } = run.arrays, wanted = f.source === "" ? -1 : run.samples.sources.indexOf(f.source);
  const groups = new Map();
  let samples = 0;
  for (let i = 0; i < step.length; i++) {
    if (!within(step[i], f["step-low"], f["step-high"]) || (wanted >= 0 && source[i] !== wanted)) continue;
    const key = step[i] * 65536 + group[i];
    let entry = groups.get(key);
    if (!entry) groups.set(key, (entry = { step: step[i], group: group[i], source: source[i], scores: [], lengths: [], hits: 0 }));
    if (!row[i]) { entry.scores.push(score[i]); entry.lengths.push(length[i]); }
    if (within(score[i], f["score-low"], f["score-high"]) && within(length[i], f["length-low"], f["length-high"])) { entry.hits++; samples++; }
  }
  let matching = [...groups.values()].filter((entry) => entry.hits);
  const total = matching.length;
  matching = matching.filter((entry) => run.samples.stored[entry.step]?.includes(entry.group));
  const without = total - matching.length ? `; of these, ${matching.length} groups are in this page with their tokens: lockstep samples shows the others` : "";
  let texts = "";
  if (f.text) {
    const pattern = f.text.toLowerCase(), hits = [];
    for (const [n, entry] of matching.entries()) {
      if (n % 20 === 0) $("found").textContent = `Searching ${n} of ${matching.length} groups ...`;
      const found = await readGroup(index, entry);
      if (filterSamples.last !== token) return;  // a newer search has begun
      if (found.prompt.toLowerCase().includes(pattern) || found.samples.some((s) => s.ids.map((id) => run.tokens[id]).join("").toLowerCase().includes(pattern))) hits.push(entry);
    }
    matching = hits;
    texts = `; ${hits.length} groups with this text`;
  }
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  for (const entry of matching) {
    entry.score = mean(entry.scores);
    entry.length = mean(entry.lengths);
    entry.spread = Math.sqrt(mean(entry.scores.map((s) => (s - entry.score) ** 2)));
  }
  if (f.order !== "step") matching.sort((a, b) => b[f.order] - a[f.order] || a.step - b.step);
  $("found").textContent = `${samples} samples in ${total} groups match${without}${texts}.`;
  shown = matching;
  await turnPage(0);
}
async function readGroup(run, entry) {
  const key = `${run}.${entry.step}`;
  if (!chunks.has(key)) chunks.set(key, unpackJson(`tokens.${key}`));
  return (await chunks.get(key)).find((found) => found.group === entry.group);
}
async function turnPage(to) {
  page = to;
  const run = Number(filters().run), last = Math.max(0, Math.ceil(shown.length / GROUPS_PER_PAGE) - 1), part = shown.slice(to * GROUPS_PER_PAGE, (to + 1) * GROUPS_PER_PAGE);
  $("pages").hidden = last === 0;
  $("page-number").textContent = `page ${to + 1} of ${last + 1}`;
  $("previous").disabled = to === 0;
  $("next").disabled = to === last;
  const prompts = await Promise.all(part.map(async (entry) => (await readGroup(run, entry)).prompt));
  if (page !== to) return;
  const rows = part.map((entry, i) => [entry.step, entry.group, data.runs[run].samples.sources[entry.source], entry.scores.length, entry.score, entry.spread, entry.length,
    element("td", prompts[i].replace(/\s+/g, " ").trim().slice(-300), { class: "excerpt" })]);
  const made = table(["step", "group", "source", "samples", "mean score", "spread", "mean length", "prompt"], rows);
  [...made.tBodies[0].rows].forEach((line, i) => {
    line.tabIndex = 0;
    line.onclick = () => openGroup(run, part[i], line);
    line.onkeydown = (event) => { if (event.key === "Enter") line.onclick(); };
  });
  $("groups").replaceChildren(made);
}
async function openGroup(run, entry, line) {
  for (const other of $("groups").querySelectorAll("tr")) other.setAttribute("aria-selected", other === line);
  open = { run, entry, group: await readGroup(run, entry) };
  $("group").hidden = false;
  $("group-title").textContent = `Step ${entry.step}, group ${entry.group}${open.group.truth === null ? "" : `, ground truth ${open.group.truth.slice(0, 200)}`}`;
  $("prompt").textContent = open.group.prompt;
  $("images").replaceChildren(...(open.group.images ?? []).map((file, i) => element("img", undefined, { src: `data:image/*;base64,${file}`, alt: `image ${i + 1}` })));
  drawGroup();
}
const list = (values, i) => (Array.isArray(values) ? values[i] : values);  // one number stands for equal ones

function drawGroup() {
  if (!open) return;
  const kind = $("shading").value, samples = open.group.samples;
  const largest = (name) => Math.max(1e-9, ...samples.map((s) => Array.isArray(s[name]) ? s[name].reduce((a, b) => Math.max(a, Math.abs(b)), 0) : Math.abs(s[name] ?? 0)));
  const nothing = kind === "gap" && largest("gap") <= 1e-9 ? "Trainer and engine differ by less than 0.0001 in every token." : "";
  const scale = kind === "advantage" ? largest("advantage") : kind === "gap" ? largest("gap") : 1;
  $("legend").textContent = nothing || { probability: "The stronger the shade, the less probable the token was for the trainer's policy.",
    advantage: `Strongest shade: ${format(scale)}. Solid underline: positive; dotted: negative.`,
    gap: `Strongest shade: a difference of ${format(scale)} between the log-probs of trainer and engine. Solid underline: the trainer's is higher; dotted: lower.`, none: "" }[kind];
  $("cards").replaceChildren(...samples.map((sample, number) => card(sample, number, kind, scale)));
}
function card(sample, number, kind, scale) {
  const made = element("section", undefined, { class: "card" }), vocabulary = data.runs[open.run].tokens;
  made.append(element("h4", `Sample ${sample.sample}${sample.row ? `, row ${sample.row}` : ""}: score ${format(sample.score)}`));
  const facts = [`reward ${format(sample.reward)}`, `${sample.ids.length} tokens`, sample.truncated ? "truncated" : "", sample.versions, ...Object.entries(sample.details).map(([name, value]) => `${name} ${format(value)}`)];
  made.append(element("div", facts.filter(Boolean).join(", "), { class: "note" }));
  const box = element("div", undefined, { class: "tokens" });
  let part = box, turn;
  sample.ids.slice(0, MAX_TOKENS).forEach((id, i) => {
    if (sample.turns && sample.turns[i] !== turn) {
      turn = sample.turns[i];
      const who = turn > 0 ? `policy, turn ${turn}` : data.sources[-turn];
      part = element("div", undefined, { class: turn > 0 ? "turn" : "turn given" });
      part.append(element("b", who));
      box.append(part);
    }
    const span = element("i", vocabulary[id].replaceAll("\n", "\u21b5\n")), sampled = !sample.turns || turn > 0;
    if (sampled && kind === "probability" && sample.probability) shade(span, "--shade", 1 - sample.probability[i] / 100);
    else if (sampled && kind !== "none" && sample[kind] !== undefined) {
      const value = list(sample[kind], i);
      shade(span, value < 0 ? "--negative" : "--positive", Math.abs(value) / scale);
      if (value) span.className = value > 0 ? "up" : "down";
    }
    if (sampled && sample.mask && !sample.mask[i]) span.classList.add("out");
    span.dataset.place = `${number}.${i}`;
    part.append(span);
  });
  if (sample.ids.length > MAX_TOKENS) box.append(element("b", `${sample.ids.length - MAX_TOKENS} more tokens: lockstep samples shows them`));
  made.append(box);
  return made;
}
function shade(span, color, share) {
  if (share > 0.02) span.style.background = `color-mix(in srgb, var(${color}) ${Math.round(90 * Math.min(1, share))}%, transparent)`;
}
function describeToken(event) {
  const place = event.target.dataset?.place;
  if (!place) return;
  const [number, i] = place.split(".").map(Number), s = open.group.samples[number];
  const facts = [`sample ${s.sample}, token ${i + 1} of ${s.ids.length}: ${JSON.stringify(data.runs[open.run].tokens[s.ids[i]])}`];
  if (s.turns && s.turns[i] <= 0) facts.push(`given by ${data.sources[-s.turns[i]]}`);
  else {
    if (s.probability) facts.push(`probability ${s.probability[i]}%`);
    if (s.advantage !== undefined) facts.push(`advantage ${format(list(s.advantage, i))}`);
    if (s.gap !== undefined) facts.push(`log-prob of the trainer minus the engine's ${format(list(s.gap, i))}`);
    if (s.mask && !s.mask[i]) facts.push("left out of the loss");
  }
  $("token").textContent = facts.join(", ");
}

// Summary, events, config ------------------------------------------------------------------------------------

function drawTables() {
  const names = data.runs.map((run) => run.name), facts = [...new Set(data.runs.flatMap((run) => Object.keys(run.summary)))];
  $("summary-table").append(table(["", ...names], facts.map((fact) => [fact, ...data.runs.map((run) => run.summary[fact] ?? "-")])));
  const own = data.runs.length > 1 ? ["run"] : [];  // a column of one name would take a phone's width
  const events = data.runs.flatMap((run) => run.events.map((e) => [...own.map(() => run.name), e.time, e.step, e.kind, e.text]));
  $("events").append(table([...own, "time", "step", "event", ""], events));
  drawConfig();
}
function drawConfig() {
  const part = $("config-key").value.toLowerCase(), only = $("only-differences").checked;
  const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.config)))].filter((key) => key.toLowerCase().includes(part));
  const rows = keys.flatMap((key) => {
    const values = data.runs.map((run) => run.config[key] ?? "-"), differs = new Set(values).size > 1;
    return only && !differs ? [] : [[key, ...values.map((value) => element("td", value, differs ? { class: "differs" } : {}))]];
  });
  $("config-table").replaceChildren(table(["key", ...data.runs.map((run) => run.name)], rows));
}

// Start ------------------------------------------------------------------------------------------------------

const THEMES = ["light", "dark"];
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "light" ? "Dark" : "Light";
  drawAll();
}
async function start() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches ? "dark" : "light");
  dark.onchange = () => setTheme(dark.matches ? "dark" : "light");
  $("theme").onclick = () => setTheme(THEMES[1 - THEMES.indexOf(document.documentElement.dataset.theme)]);
  const [library, read] = await Promise.all([unpack("plotly").then((r) => r.text()), unpackJson("main")]);
  document.head.append(element("script", library));
  data = read;
  await Promise.all(data.runs.map(async (run, i) => {
    if (!run.samples) return;
    const types = { step: Int32Array, group: Int32Array, row: Uint8Array, source: Uint8Array, score: Float32Array, length: Int32Array };
    run.arrays = Object.fromEntries(await Promise.all(Object.entries(types).map(async ([name, type]) => [name, await unpackArray(`${name}.${i}`, type)])));
  }));
  const newest = data.runs.reduce((best, run, i) => run.metrics.time.at(-1) >= data.runs[best].metrics.time.at(-1) ? i : best, 0);
  for (const select of document.querySelectorAll(".run-select")) {
    data.runs.forEach((run, i) => select.append(element("option", run.name, { value: i, ...(i === newest && { selected: "" }) })));
    select.closest("label").hidden = data.runs.length < 2;
  }
  const metrics = [...new Set(data.runs.flatMap((run) => Object.keys(run.metrics.columns)))].sort();
  $("metric-names").append(...metrics.map((name) => element("option", undefined, { value: name })));
  $("only-differences").checked = data.runs.length > 1;
  drawTables();
  Object.keys(data.curves).forEach((name) => addCurve(name));
  drawValidation();
  drawTimes();
  drawDistributions();
  const fillSources = () => $("filters").elements.source.replaceChildren(element("option", "all", { value: "" }),
    ...(data.runs[filters().run].samples?.sources ?? []).map((name) => element("option", name || "(none)", { value: name })));
  fillSources();
  $("smoothing").oninput = () => { $("smoothing-value").textContent = $("smoothing").value; drawAll(); };
  $("x-axis").onchange = drawAll;
  $("add-metric").onclick = () => { addCurve($("metric").value); $("metric").value = ""; };
  $("time-run").onchange = drawTimes;
  $("distribution-run").onchange = drawDistributions;
  $("config-key").oninput = $("only-differences").onchange = drawConfig;
  $("filters").onsubmit = (event) => { event.preventDefault(); filterSamples(); };
  $("filters").onreset = () => setTimeout(filterSamples);
  $("filters").elements.run.onchange = () => { fillSources(); filterSamples(); };
  for (const name of ["source", "order"]) $("filters").elements[name].onchange = filterSamples;
  $("previous").onclick = () => turnPage(page - 1);
  $("next").onclick = () => turnPage(page + 1);
  $("shading").onchange = drawGroup;
  $("cards").onmouseover = $("cards").onclick = describeToken;
  await filterSamples();
  $("loading").hidden = true;
  document.body.dataset.ready = Math.round(performance.now());
}
start().catch((error) => { $("loading").textContent = `This page cannot be shown: ${error}`; throw error; });
