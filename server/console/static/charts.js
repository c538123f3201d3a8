// Draws the metrics of the runs that the page lists, and lets them grow as the server reports more.

const MAX_POINTS = 500; // the server averages a longer run to this many
const MAX_GROWTH = 1500; // points that may be added before the run is averaged again
const HEIGHT = 200;
const MAIN = [
  ["training", "loss:mean", "Loss"],
  ["training", "learning_rate", "Learning rate"],
  ["training", "unclipped_grad_l2:mean", "Gradient norm"],
  ["training", "tokens_per_second", "Tokens per second"],
  ["training", "step_seconds", "Step time, seconds"],
  ["training", "queued_seconds", "Queue wait, seconds"],
];

const grid = document.getElementById("charts");
const moreGrid = document.getElementById("more-charts");
const more = document.getElementById("more");
const live = document.getElementById("live");
const legend = document.getElementById("legend");
const smoothing = document.getElementById("smoothing");
const logScale = document.getElementById("log-scale");
const axis = document.getElementById("x-axis");
const root = grid.dataset.console;

const runs = [...legend.querySelectorAll("[data-run]")].map((item, number) => ({
  id: item.dataset.run,
  number,
  series: { training: emptySeries(), logged: emptySeries() },
}));
const charts = new Map(); // "source name" -> Chart

function emptySeries() {
  return { steps: [], times: [], metrics: new Map(), last: -1, growth: 0 };
}

/** Adds an answer of the server to what is known. A step that is there already, or a return to an earlier one after a
 * checkpoint was loaded, replaces what followed. */
function add(series, news) {
  const isMean = series.steps.length === 0;
  news.steps.forEach((step, row) => {
    while (series.steps.length && series.steps.at(-1) >= step) truncate(series, series.steps.length - 1);
    const length = series.steps.push(step);
    series.times.push(news.times[row]);
    for (const [name, values] of Object.entries(news.metrics)) {
      if (!series.metrics.has(name)) series.metrics.set(name, []);
      const known = series.metrics.get(name);
      while (known.length < length - 1) known.push(null);
      known.push(values[row]);
    }
  });
  for (const known of series.metrics.values()) while (known.length < series.steps.length) known.push(null);
  if (news.last !== null) series.last = news.last;
  if (!isMean) series.growth += news.steps.length;
}

function truncate(series, length) {
  series.steps.length = series.times.length = length;
  for (const values of series.metrics.values()) values.length = Math.min(values.length, length);
}

/** Exponential moving average, without bias at the beginning. */
function smooth(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

class Chart {
  constructor(source, name, title, place) {
    this.source = source;
    this.name = name;
    this.figure = document.createElement("figure");
    this.figure.className = "chart";
    this.figure.dataset.metric = name;
    const caption = document.createElement("figcaption");
    const words = document.createElement("span");
    words.textContent = title;
    if (title !== name) words.title = name;
    this.last = document.createElement("span");
    this.last.className = "last";
    caption.append(words, this.last);
    this.plot = document.createElement("div");
    this.plot.className = "plot";
    this.plot.setAttribute("role", "img");
    this.figure.append(caption, this.plot);
    place.append(this.figure);
    this.title = title;
    this.uplot = null;
    new ResizeObserver(() => this.uplot?.setSize({ width: this.width, height: HEIGHT })).observe(this.figure);
  }

  get width() {
    return Math.max(160, this.plot.clientWidth);
  }

  /** The present data: one aligned table, with a line for each run, and with smoothing also its raw values. */
  data() {
    const weight = Number(smoothing.value);
    const tables = [], lines = [];
    for (const run of runs) {
      const series = run.series[this.source];
      const values = series.metrics.get(this.name) ?? [];
      const start = run.series.training.times[0] ?? series.times[0] ?? 0;
      const x = [], y = [];
      values.forEach((value, row) => {
        if (value === null || (logScale.checked && value <= 0)) return;
        x.push(axis.value === "time" ? (series.times[row] - start) / 3600 : series.steps[row]);
        y.push(value);
      });
      if (weight > 0) {
        tables.push([x, y], [x, smooth(y, weight)]);
        lines.push({ run, isRaw: true }, { run, isRaw: false });
      } else {
        tables.push([x, y]);
        lines.push({ run, isRaw: false });
      }
    }
    return { table: uPlot.join(tables), lines };
  }

  draw() {
    const { table, lines } = this.data();
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const shape = `${lines.length} ${logScale.checked} ${color("--page")}`;
    if (this.uplot && this.shape === shape) {
      this.uplot.setData(table);
    } else {
      this.shape = shape;
      this.uplot?.destroy();
      const axes = { stroke: color("--weak"), grid: { stroke: color("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
      this.uplot = new uPlot(
        {
          width: this.width,
          height: HEIGHT,
          cursor: { sync: { key: "charts" }, y: false, points: { size: 6 } },
          legend: { show: false },
          scales: { x: { time: false }, y: logScale.checked ? { distr: 3, range: logRange } : {} },
          axes: [{ ...axes, size: 30 }, { ...axes, size: 58, values: (_, ticks) => ticks.map(brief) }],
          series: [{}, ...lines.map(({ run, isRaw }) => ({
            stroke: color(`--c${run.number}`), width: isRaw ? 1 : 2, alpha: isRaw ? 0.25 : 1, spanGaps: true, points: { show: table[0].length < 2 },
          }))],
          hooks: { setCursor: [() => this.say()] },
        },
        table,
        this.plot,
      );
    }
    this.lines = lines;
    this.say();
  }

  /** Writes the values under the cursor, else the last ones. */
  say() {
    if (!this.uplot || !this.lines) return;
    const row = this.uplot.cursor.idx;
    const shown = this.lines.map((line, number) => ({ line, values: this.uplot.data[number + 1] })).filter(({ line }) => !line.isRaw);
    const texts = shown.map(({ values }) => brief(row == null ? values.findLast((value) => value != null) : values[row]));
    const x = this.uplot.data[0][row ?? this.uplot.data[0].length - 1];
    this.last.textContent = x === undefined ? "" : `${texts.join(" · ")} at ${axis.value === "time" ? `${brief(x)} h` : brief(x)}`;
    this.plot.setAttribute("aria-label", `${this.title}: ${this.last.textContent}`);
  }
}

function brief(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  return String(Number(value.toPrecision(size >= 1000 ? 6 : 4)));
}

/** The decades that a logarithmic axis shows; also round a value that never changes, which has none of its own. */
function logRange(_, min, max) {
  if (min === null) return [0.1, 10];
  const isFlat = max - min < 1e-6 * max;
  return uPlot.rangeLog(isFlat ? min / 2 : min, isFlat ? max * 2 : max, 10, isFlat);
}

function names(source) {
  return [...new Set(runs.flatMap((run) => [...run.series[source].metrics.keys()]))];
}

/** Makes the charts that are missing, and draws those that are seen. */
function draw() {
  const logged = names("logged"), training = new Set(names("training"));
  const [loss, ...others] = MAIN;
  const first = [loss, ...logged.slice(0, 12).map((name) => ["logged", name, name]), ...others].filter(
    ([source, name]) => source === "logged" || training.has(name),
  );
  const known = new Set(MAIN.map(([, name]) => name));
  const rest = [
    ...logged.slice(12).map((name) => ["logged", name, name]),
    ...[...training].filter((name) => !known.has(name)).map((name) => ["training", name, name]),
  ];
  more.hidden = rest.length === 0;
  show(first, grid);
  if (more.open) show(rest, moreGrid);
  if (first.length && !document.documentElement.dataset.firstChart) {
    document.documentElement.dataset.firstChart = String(Math.round(performance.now()));
  }
}

function show(wanted, place) {
  wanted.forEach(([source, name, title], number) => {
    const key = `${source} ${name}`;
    if (!charts.has(key)) charts.set(key, new Chart(source, name, title, place));
    const { figure } = charts.get(key);
    if (place.children[number] !== figure) place.insertBefore(figure, place.children[number] ?? null);
    charts.get(key).draw();
  });
}

async function load(run) {
  const url = `${root}/api/v1/training_runs/${encodeURIComponent(run.id)}/metrics?points=${MAX_POINTS}&limit=100000`;
  const answer = await fetch(url);
  if (!answer.ok) throw new Error((await answer.json()).detail);
  const metrics = await answer.json();
  for (const source of ["training", "logged"]) {
    run.series[source] = emptySeries();
    add(run.series[source], metrics[source]);
    run.series[source].growth = 0;
  }
}

let pending = null;
function drawSoon() {
  pending ??= requestAnimationFrame(() => {
    pending = null;
    draw();
  });
}

let stream = null;

/** Follows the runs from the last steps that are known, as long as the page is seen: browsers open only some streams. */
function follow() {
  stream?.close();
  stream = null;
  if (document.hidden) return;
  const since = runs.map((run) => `${run.series.training.last}_${run.series.logged.last}`).join(".");
  const query = new URLSearchParams([...runs.map((run) => ["run", run.id]), ["since", since]]);
  stream = new EventSource(`${root}/events?${query}`);
  stream.onopen = () => setLive(live.dataset.connected, live.dataset.connected);
  stream.onerror = (event) => {
    setLive(event.target.readyState === EventSource.CLOSED ? "no live updates: reload" : "connecting again", "");
  };
  stream.addEventListener("metrics", async (event) => {
    const news = JSON.parse(event.data);
    const run = runs.find((one) => one.id === news.run);
    for (const source of ["training", "logged"]) add(run.series[source], news.metrics[source]);
    if (run.series.training.growth > MAX_GROWTH || run.series.logged.growth > MAX_GROWTH) await load(run);
    drawSoon();
  });
}

function setLive(words, kind) {
  live.textContent = words;
  live.className = `state ${kind}`;
}

function restore() {
  const kept = JSON.parse(localStorage.getItem("trainhouse-charts") ?? "{}");
  smoothing.value = kept.smoothing ?? 0;
  logScale.checked = kept.logScale ?? false;
  axis.value = kept.axis ?? "step";
  sayWeight();
}

function sayWeight() {
  document.getElementById("smoothing-value").textContent = smoothing.value;
}

function changed() {
  sayWeight();
  const kept = { smoothing: smoothing.value, logScale: logScale.checked, axis: axis.value };
  localStorage.setItem("trainhouse-charts", JSON.stringify(kept));
  drawSoon();
}

for (const control of [smoothing, logScale, axis]) control.addEventListener("input", changed);
more.addEventListener("toggle", drawSoon);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawSoon);
addEventListener("pageshow", (event) => {
  if (event.persisted) location.reload();
});

restore();
try {
  await Promise.all(runs.map(load));
  draw();
  if (!charts.size) grid.textContent = "No optimizer step yet: curves appear here with the first one.";
  follow();
  document.addEventListener("visibilitychange", follow);
  addEventListener("pagehide", () => stream?.close());
} catch (error) {
  setLive("failed", "bad");
  grid.textContent = error.message;
}
