// Draws the charts of a report with uPlot from the values in the page, and keeps them in step: hover, zoom, smoothing.
// With "live" in the values, asks the server it came from for a newer page every few seconds.
"use strict";
(() => {
  const POLL_MS = 3000;
  const TOUCH_RADIUS = 3; // pixels a finger may move and still tap
  const state = { smoothing: 0.6, zoom: null, hidden: new Set() };
  const shown = new Map(); // figure -> { plot, tip }
  let data = JSON.parse(document.getElementById("data").textContent);

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const runColour = (run) => colour(`run${run % 8}`);
  const faded = (value, share) => `color-mix(in srgb, ${value} ${Math.round(100 * share)}%, transparent)`;

  function number(value, chart) {
    if (value === null || value === undefined) return "";
    if (chart.percent) return `${(100 * value).toFixed(1)} %`;
    const size = Math.abs(value);
    if (size >= 1e12 || (size > 0 && size < 1e-4)) return value.toExponential(2);
    if (size >= 1e9) return `${(value / 1e9).toPrecision(4)} G`;
    if (size >= 1e6) return `${(value / 1e6).toPrecision(4)} M`;
    return String(Number(value.toPrecision(5)));
  }

  function element(kind, className, text) {
    const made = document.createElement(kind);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  // Exponential moving average that starts without a bias towards zero, as dashboards do it.
  function smoothed(values, weight) {
    let sum = 0;
    let count = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = sum * weight + (1 - weight) * value;
      count += 1;
      return sum / (1 - weight ** count);
    });
  }

  // The x values of several lines together, rising, and for each line its values there (null where it has none).
  function aligned(lines) {
    const xs = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
    const index = new Map(xs.map((x, i) => [x, i]));
    const spread = (line, values) => {
      const out = new Array(xs.length).fill(null);
      values.forEach((value, i) => { out[index.get(line.x[i])] = value; });
      return out;
    };
    return { xs, spread };
  }

  function nearest(values, at) {
    for (let away = 0; away < values.length; away += 1) {
      if (values[at - away] !== undefined && values[at - away] !== null) return at - away;
      if (values[at + away] !== undefined && values[at + away] !== null) return at + away;
    }
    return null;
  }

  function axes(chart, valueSize, label) {
    const style = { stroke: colour("dim"), grid: { stroke: colour("rule"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    return [
      { ...style, space: 60, size: 26, label, labelSize: 18, labelFont: style.font, values: (u, ticks) => ticks.map((t) => (Number.isInteger(t) ? String(t) : "")) },
      { ...style, size: valueSize || 54, gap: 4, values: (u, ticks) => ticks.map((t) => (chart.percent ? `${Math.round(1000 * t) / 10} %` : number(t, chart))) },
    ];
  }

  function options(figure, chart, height, rest) {
    return {
      width: Math.max(figure.clientWidth - 26, 120),
      height,
      legend: { show: false },
      padding: [8, 18, 0, 0],
      ...rest,
      cursor: { sync: { key: "steps", setSeries: false }, drag: { x: true, y: false, setScale: false }, y: false, points: { size: 6 }, ...rest.cursor },
      hooks: {
        setSelect: [(u) => { if (u.select.width > 4) zoomTo(u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")); u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false); }],
        ...rest.hooks,
      },
    };
  }

  function xScale(xs) {
    const low = xs[0];
    const high = xs[xs.length - 1];
    const pad = low === high ? 0.5 : 0;
    return { time: false, range: () => state.zoom || [low - pad, high + pad] };
  }

  function valueScale(chart) {
    if (chart.whole) return { range: () => [0, 1] };
    return {
      range: (u, low, high) => {
        if (low === null || high === null) return [0, 1];
        const size = Math.max(Math.abs(low), Math.abs(high));
        const pad = high - low > 1e-6 * size ? 0.06 * (high - low) : 0.1 * size || 1;
        const floor = low >= 0 && low - pad < 0 ? 0 : low - pad;
        return [floor, high + pad];
      },
    };
  }

  function drawLines(figure, chart) {
    const lines = chart.series.filter((line) => !state.hidden.has(line.run));
    if (!lines.length) return null;
    const { xs, spread } = aligned(lines);
    const columns = [xs];
    const series = [{}];
    const bands = [];
    const rows = []; // what the hover shows: a line and the column of its values
    const marks = []; // evaluations: dots with intervals
    const add = (values, look) => { columns.push(values); series.push({ spanGaps: true, points: { show: false }, ...look }); return columns.length - 1; };
    for (const line of lines) {
      const ink = runColour(line.run);
      const values = spread(line, line.y);
      if (line.dots) {
        const column = add(values, { stroke: ink, width: line.x.length > 1 ? 1 : 0, dash: [4, 4], points: { show: false } });
        marks.push({ column, low: add(spread(line, line.low), { width: 0, stroke: "transparent" }), high: add(spread(line, line.high), { width: 0, stroke: "transparent" }), ink });
        rows.push({ line, column, said: spread(line, line.said) });
        continue;
      }
      const few = line.x.length <= 60;
      if (line.low) {
        const high = add(spread(line, line.high), { width: 0, stroke: "transparent" });
        const low = add(spread(line, line.low), { width: 0, stroke: "transparent" });
        bands.push({ series: [high, low], fill: faded(ink, 0.14) });
      }
      const smooth = state.smoothing > 0 && line.x.length > 2;
      const column = add(values, { stroke: smooth ? faded(ink, 0.35) : ink, width: smooth ? 1 : 1.6, points: { show: few && !smooth, size: 4, fill: ink, stroke: ink } });
      const average = smooth ? add(spread(line, smoothed(line.y, state.smoothing)), { stroke: ink, width: 2 }) : null;
      rows.push({ line, column, average });
    }
    const height = chart.large ? (window.innerWidth < 640 ? 260 : 340) : 190;
    const tip = element("div", "tip");
    const plot = new uPlot(options(figure, chart, height, {
      axes: axes(chart, 0, chart.large ? "training step" : undefined),
      scales: { x: xScale(xs), y: valueScale(chart) },
      series,
      bands,
      cursor: { dataIdx: (u, index, at) => nearest(u.data[index], at) },
      hooks: {
        draw: [(u) => marks.forEach((mark, i) => drawMarks(u, mark, 8 * (i - (marks.length - 1) / 2)))],
        setCursor: [(u) => showTip(u, tip, lineTip(u, chart, rows))],
      },
    }), columns, figure.querySelector(".plot"));
    const kinds = [];
    if (lines.some((line) => line.dots)) kinds.push("dots: evaluations with 95 % intervals", "line: training episodes");
    const thinned = Math.max(0, ...lines.map((line) => line.steps || 0));
    if (thinned) kinds.push(`each point is the mean of ${thinned} steps, the shade their range`);
    if (kinds.length) addKey(figure, kinds.map((text) => [null, text]));
    return { plot, tip };
  }

  // Dots with intervals, moved `aside` pixels so that those of several runs do not hide each other.
  function drawMarks(u, mark, aside) {
    const ctx = u.ctx;
    const ratio = window.devicePixelRatio || 1;
    ctx.save();
    ctx.beginPath();
    ctx.rect(u.bbox.left - 10 * ratio, u.bbox.top, u.bbox.width + 20 * ratio, u.bbox.height);
    ctx.clip();
    ctx.strokeStyle = ctx.fillStyle = mark.ink;
    ctx.lineWidth = 1.5 * ratio;
    u.data[0].forEach((x, i) => {
      const value = u.data[mark.column][i];
      if (value === null) return;
      const [px, py, low, high] = [u.valToPos(x, "x", true) + aside * ratio, ...[value, u.data[mark.low][i], u.data[mark.high][i]].map((v) => u.valToPos(v, "y", true))];
      ctx.beginPath();
      ctx.moveTo(px, low);
      ctx.lineTo(px, high);
      for (const end of [low, high]) { ctx.moveTo(px - 4 * ratio, end); ctx.lineTo(px + 4 * ratio, end); }
      ctx.stroke();
      ctx.beginPath();
      ctx.arc(px, py, 4 * ratio, 0, 2 * Math.PI);
      ctx.fill();
    });
    ctx.restore();
  }

  function lineTip(u, chart, rows) {
    const at = u.cursor.idx;
    if (at === null || at === undefined) return null;
    const out = [];
    for (const { line, column, average, said } of rows) {
      const i = nearest(u.data[column], at);
      if (i === null) continue;
      const away = Math.abs(u.valToPos(u.data[0][i], "x") - u.cursor.left);
      if (line.dots && away > 12) continue;
      const label = [data.runs.length > 1 ? data.runs[line.run] : "", line.dots ? "evaluation" : ""].filter(Boolean).join(", ");
      const step = u.data[0][i] === u.data[0][at] ? "" : ` at step ${u.data[0][i]}`;
      const value = said ? said[i] : number(u.data[column][i], chart) + (average ? ` (smoothed ${number(u.data[average][i], chart)})` : "");
      out.push([runColour(line.run), label, value + step]);
    }
    return { head: `step ${u.data[0][at]}`, rows: out };
  }

  function drawStack(figure, chart) {
    if (state.hidden.has(chart.run)) return null;
    const columns = [chart.x];
    const series = [{}];
    const bands = [];
    let below = chart.x.map(() => 0);
    const sums = chart.series.map((layer) => { below = below.map((value, i) => value + layer.y[i]); return below; });
    const inks = chart.series.map((layer) => colour(`phase${layer.colour}`));
    for (let i = sums.length - 1; i >= 0; i -= 1) { // the whole first, so that each layer covers what lies above it
      columns.push(sums[i]);
      series.push({ stroke: inks[i], width: 1, points: { show: chart.x.length === 1 }, fill: i === 0 ? faded(inks[0], 0.7) : undefined });
      if (i > 0) bands.push({ series: [sums.length - i, sums.length - i + 1], fill: faded(inks[i], 0.7) });
    }
    const tip = element("div", "tip");
    const plot = new uPlot(options(figure, chart, 220, {
      axes: axes(chart),
      scales: { x: xScale(chart.x), y: { range: (u, low, high) => [0, 1.05 * (high || 1)] } },
      series,
      bands,
      hooks: {
        setCursor: [(u) => {
          const at = u.cursor.idx;
          if (at === null || at === undefined) { showTip(u, tip, null); return; }
          const rows = chart.series.map((layer, i) => [inks[i], layer.label, `${number(layer.y[at], chart)} s`]).reverse();
          showTip(u, tip, { head: `step ${chart.x[at]}: ${number(sums[sums.length - 1][at], chart)} s`, rows });
        }],
      },
    }), columns, figure.querySelector(".plot"));
    addKey(figure, chart.series.map((layer, i) => [inks[i], layer.label]).reverse());
    return { plot, tip };
  }

  function heatColour(share) {
    const stops = [0, 1, 2, 3, 4].map((i) => colour(`heat${i}`));
    const at = Math.min(3, Math.floor(4 * share));
    return mix(stops[at], stops[at + 1], 4 * share - at);
  }

  function mix(one, other, share) {
    const parts = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    const [a, b] = [parts(one), parts(other)];
    return `rgb(${a.map((value, i) => Math.round(value + share * (b[i] - value))).join(" ")})`;
  }

  function drawHeat(figure, chart) {
    if (state.hidden.has(chart.run)) return null;
    const columns = chart.edges.length;
    const single = chart.first === null; // a column is one evaluation: all are of equal width, whatever lies between
    const left = (i) => (single ? i : i ? chart.edges[i - 1] + 0.5 : chart.first - 0.5);
    const right = (i) => (single ? i + 1 : chart.edges[i] + 0.5);
    const xs = chart.edges.map((_, i) => (left(i) + right(i)) / 2);
    const count = chart.rows.length;
    const narrow = figure.clientWidth < 480;
    const size = Math.min(narrow ? 110 : 190, 14 + 6.3 * Math.max(...chart.rows.map((name) => name.length)));
    const letters = Math.floor((size - 10) / 6.2);
    const shade = chart.cells.map((row) => row.map((share) => (share === null ? null : heatColour(share))));
    const tip = element("div", "tip");
    const [xAxis, yAxis] = axes(chart, size);
    const every = Math.ceil((34 * columns) / Math.max(figure.clientWidth - size - 40, 1)); // labels that have room
    const named = { splits: () => xs, values: () => chart.edges.map((step, i) => (i % every ? "" : String(step))) };
    const plot = new uPlot(options(figure, chart, Math.max(120, 40 + (count > 30 ? 16 : 20) * count), {
      axes: [
        { ...xAxis, grid: { show: false }, ...(single ? named : {}) },
        { ...yAxis, grid: { show: false }, splits: () => chart.rows.map((_, i) => count - i - 0.5), values: () => chart.rows.map((name) => (name.length > letters ? `${name.slice(0, letters - 1)}…` : name)) },
      ],
      scales: { x: { time: false, range: () => (!single && state.zoom) || [left(0), right(columns - 1)] }, y: { range: () => [0, count] } },
      series: [{}, { paths: () => null, points: { show: false } }],
      cursor: { y: true, points: { show: false }, ...(single ? { sync: {}, drag: { x: false, y: false } } : {}) },
      hooks: {
        draw: [(u) => {
          const ctx = u.ctx;
          ctx.save();
          ctx.beginPath();
          ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
          ctx.clip();
          for (let i = 0; i < columns; i += 1) {
            const [x0, x1] = [left(i), right(i)].map((x) => Math.round(u.valToPos(x, "x", true)));
            for (let row = 0; row < count; row += 1) {
              if (shade[row][i] === null) continue;
              const [y0, y1] = [count - row, count - row - 1].map((y) => Math.round(u.valToPos(y, "y", true)));
              ctx.fillStyle = shade[row][i];
              ctx.fillRect(x0, y0, x1 - x0 - (x1 - x0 > 6 ? 1 : 0), y1 - y0 - 1);
            }
          }
          ctx.restore();
        }],
        setCursor: [(u) => {
          const { left: px, top: py } = u.cursor;
          if (px < 0 || py < 0) { showTip(u, tip, null); return; }
          const [x, y] = [u.posToVal(px, "x"), u.posToVal(py, "y")];
          const column = chart.edges.findIndex((_, i) => x >= left(i) && x < right(i));
          const row = count - 1 - Math.floor(y);
          if (column < 0 || row < 0 || row >= count) { showTip(u, tip, null); return; }
          const first = column ? chart.edges[column - 1] + 1 : chart.first;
          const steps = single || first === chart.edges[column] ? `step ${chart.edges[column]}` : `steps ${first} to ${chart.edges[column]}`;
          const share = chart.cells[row][column];
          showTip(u, tip, { head: chart.rows[row], rows: [[shade[row][column] || "transparent", steps, share === null ? "no episodes" : `${(100 * share).toFixed(1)} % (${chart.said[row][column]})`]] });
        }],
      },
    }), [xs, xs.map(() => 0)], figure.querySelector(".plot"));
    const ramp = element("canvas", "ramp");
    ramp.width = 100;
    ramp.height = 1;
    const ctx = ramp.getContext("2d");
    for (let i = 0; i < 100; i += 1) { ctx.fillStyle = heatColour(i / 99); ctx.fillRect(i, 0, 1, 1); }
    const key = addKey(figure, []);
    const scale = element("span", "", "0 %");
    scale.append(ramp, "100 % success; empty: no episodes");
    key.append(scale);
    if (chart.left_out) key.append(element("span", "", `${chart.left_out} more tasks in metrics.jsonl`));
    return { plot, tip };
  }

  function addKey(figure, entries) {
    const key = element("div", "key");
    for (const [ink, text] of entries) {
      const entry = element("span", "", text);
      if (ink) { const dot = element("i"); dot.style.background = ink; entry.prepend(dot); }
      key.append(entry);
    }
    figure.append(key);
    return key;
  }

  function showTip(u, tip, content) {
    if (!content || u.cursor.left < 0) { tip.remove(); return; }
    if (!u.root.matches(":hover") && !u.root.dataset.touched) { tip.remove(); return; } // the cursor of another chart
    tip.replaceChildren(element("b", "", content.head), ...content.rows.map(([ink, label, value]) => {
      const row = element("div");
      const name = element("span", "", label);
      const dot = element("i");
      dot.style.background = ink;
      name.prepend(dot);
      row.append(name, element("span", "", value));
      return row;
    }));
    u.over.append(tip);
    const [over, figure] = [u.over.getBoundingClientRect(), u.root.closest(".chart").getBoundingClientRect()];
    const beside = u.cursor.left > over.width / 2 ? u.cursor.left - 14 - tip.offsetWidth : u.cursor.left + 14;
    tip.style.left = `${Math.max(figure.left - over.left, Math.min(beside, figure.right - over.left - tip.offsetWidth))}px`;
    tip.style.top = `${Math.max(0, Math.min(u.cursor.top - 10, u.over.clientHeight - tip.clientHeight))}px`;
  }

  function zoomTo(low, high) {
    state.zoom = low === null ? null : [Math.min(low, high), Math.max(low, high)];
    document.getElementById("reset").hidden = state.zoom === null;
    for (const { plot } of shown.values()) plot.setData(plot.data);
  }

  // Fingers: one moves the cursor across, two zoom; up and down scroll the page as ever.
  function touches(plot) {
    const over = plot.root.querySelector(".u-over");
    const fingers = new Map();
    let span = null;
    const place = (event) => event.clientX - over.getBoundingClientRect().left;
    over.addEventListener("pointerdown", (event) => {
      if (event.pointerType === "mouse") return;
      fingers.set(event.pointerId, place(event));
      plot.root.dataset.touched = "yes";
      if (fingers.size === 2) span = [...fingers.values()].map((x) => plot.posToVal(x, "x"));
    });
    over.addEventListener("pointermove", (event) => {
      if (!fingers.has(event.pointerId)) return;
      const moved = Math.abs(place(event) - fingers.get(event.pointerId));
      fingers.set(event.pointerId, place(event));
      if (fingers.size === 1 && moved < 10 * TOUCH_RADIUS) plot.setCursor({ left: place(event), top: event.clientY - over.getBoundingClientRect().top });
      if (fingers.size === 2 && span) {
        const [a, b] = [...fingers.values()];
        if (Math.abs(b - a) < 20) return;
        const scale = (span[1] - span[0]) / (b - a); // steps per pixel that puts both fingers on what they first touched
        const low = span[0] - a * scale;
        if (scale > 0) zoomTo(low, low + over.clientWidth * scale);
      }
    });
    const lift = (event) => { fingers.delete(event.pointerId); span = null; };
    for (const kind of ["pointerup", "pointercancel", "pointerleave"]) over.addEventListener(kind, lift);
  }

  function draw(figure) {
    const chart = data.charts[figure.dataset.chart];
    remove(figure);
    if (!chart) return;
    const kind = chart.rows ? drawHeat : chart.stack ? drawStack : drawLines;
    const made = kind(figure, chart);
    figure.hidden = made === null;
    if (made === null) return;
    made.plot.root.addEventListener("dblclick", () => zoomTo(null));
    made.plot.root.addEventListener("mouseleave", () => { delete made.plot.root.dataset.touched; made.tip.remove(); });
    touches(made.plot);
    made.width = figure.clientWidth;
    shown.set(figure, made);
  }

  function remove(figure) {
    const old = shown.get(figure);
    if (old) { old.plot.destroy(); old.tip.remove(); }
    shown.delete(figure);
    figure.querySelectorAll(".key").forEach((key) => key.remove());
  }

  // Charts are drawn once they come near the screen: a page may have a hundred.
  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { watcher.unobserve(entry.target); draw(entry.target); }
  }, { rootMargin: "400px" });

  function redraw() {
    for (const figure of [...shown.keys()]) draw(figure);
    document.querySelectorAll(".chart[hidden]").forEach((figure) => draw(figure));
  }

  function watch() {
    document.querySelectorAll(".chart").forEach((figure) => { if (!shown.has(figure)) watcher.observe(figure); });
    document.querySelectorAll(".speeds").forEach((line) => { line.hidden = false; });
    document.querySelectorAll("video").forEach((video) => {
      if (video.dataset.ready) return;
      video.dataset.ready = "yes";
      // A recording of a few steps is over in a blink: it starts at a speed that lasts three seconds.
      const pace = () => setSpeed(video.closest("section"), [1, 0.5, 0.25, 0.1].find((speed) => video.duration / speed >= 3) || 0.1);
      if (video.readyState > 0) pace(); else video.addEventListener("loadedmetadata", pace, { once: true });
    });
  }

  function setSpeed(section, speed) {
    section.querySelectorAll("video").forEach((video) => { video.playbackRate = video.defaultPlaybackRate = speed; });
    section.querySelectorAll("[data-speed]").forEach((button) => button.setAttribute("aria-pressed", String(Number(button.dataset.speed) === speed)));
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-speed]");
    if (button) setSpeed(button.closest("section"), Number(button.dataset.speed));
  });

  const controls = document.getElementById("controls");
  controls.hidden = false;
  const slider = document.getElementById("smoothing");
  slider.addEventListener("input", () => {
    state.smoothing = Number(slider.value);
    document.getElementById("smoothed").textContent = state.smoothing.toFixed(2);
    redraw();
  });
  document.getElementById("reset").addEventListener("click", () => zoomTo(null));
  controls.addEventListener("change", (event) => {
    if (event.target.dataset.run === undefined) return;
    const run = Number(event.target.dataset.run);
    if (event.target.checked) state.hidden.delete(run); else state.hidden.add(run);
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new ResizeObserver(() => {
    for (const [figure, made] of [...shown]) if (Math.abs(made.width - figure.clientWidth) > 1) draw(figure);
  }).observe(document.body);
  watch();

  // Takes over what is new in a page from the server; sections that did not change keep their state.
  function adopt(text) {
    const page = new DOMParser().parseFromString(text, "text/html");
    data = JSON.parse(page.getElementById("data").textContent);
    const open = new Set([...document.querySelectorAll("details[open]")].map((one) => one.id));
    const main = document.querySelector("main");
    const old = new Map([...document.querySelectorAll("[data-part]")].map((part) => [part.dataset.part, part]));
    const parts = [...page.querySelectorAll("[data-part]")].map((part) => {
      const had = old.get(part.dataset.part);
      const source = part.outerHTML;
      if (had && had.sourceText === source) return had;
      const made = document.importNode(part, true);
      made.sourceText = source;
      return made;
    });
    document.querySelector("header").replaceWith(parts[0]);
    main.replaceChildren(...parts.slice(1));
    document.querySelectorAll("details").forEach((one) => { one.open = one.open || open.has(one.id); });
    for (const figure of [...shown.keys()]) if (!figure.isConnected) remove(figure);
    redraw();
    watch();
  }

  if (data.live) {
    const status = document.getElementById("live");
    let tag = "";
    let pressed = false;
    addEventListener("pointerdown", () => { pressed = true; });
    for (const kind of ["pointerup", "pointercancel"]) addEventListener(kind, () => { pressed = false; });
    const ask = async () => {
      try {
        const answer = await fetch("/", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
        if (answer.ok) {
          const text = await answer.text();
          if (!pressed) { adopt(text); tag = answer.headers.get("ETag") || ""; } // not under a hand that draws a zoom
        } else if (answer.status !== 304) {
          throw new Error(String(answer.status));
        }
        status.classList.remove("lost");
        status.textContent = `live, ${new Date().toLocaleTimeString()}`;
      } catch {
        status.classList.add("lost");
        status.textContent = "the server is gone; the page shows what it last sent";
      }
      setTimeout(ask, POLL_MS);
    };
    setTimeout(ask, POLL_MS);
  }
})();
