// Charts: lines over steps with a brush, histograms, points. Drawn by uPlot, a classic script of its own.
import { h, number } from "./dom.js";

const drawn = new Set();

export function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export const LINES = ["line1", "line2", "line3", "line4", "line5", "line6", "line7", "line8"];

const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

/** Axes of a chart; `places`: the numbers along the lower one, which has whole ticks where all of them are whole. */
function axes(places, format) {
  const common = { stroke: color("soft"), grid: { stroke: color("grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  return [
    { ...common, size: 22, gap: 2, space: 60, ...(places.every(Number.isInteger) ? { incrs: WHOLE } : {}) },
    { ...common, size: 52, gap: 4, space: 26, values: (_, values) => values.map(format ?? ((value) => number(value))) },
  ];
}

/** Makes a chart that fills the width of its place. `make(width)` gives uPlot's options and data. */
function place(holder, make) {
  let chart = null;
  const draw = () => {
    if (!holder.isConnected) return;
    chart?.destroy();
    const { options, data } = make(Math.max(200, holder.clientWidth));
    chart = new uPlot(options, data, holder);
    holder.chart = chart;
  };
  new ResizeObserver(() => {
    if (!chart) draw();
    else chart.setSize({ width: Math.max(200, holder.clientWidth), height: chart.height });
  }).observe(holder);
  drawn.add({ holder, draw });
  return holder;
}

/** Draws all charts again, in the colours of another theme; forgets those that are gone. */
export function redraw() {
  for (const one of [...drawn]) {
    if (one.holder.isConnected) one.draw();
    else drawn.delete(one);
  }
}

/**
 * Lines over steps, or minutes. lines: [{name, values, color?}]; range: [first, last] or null; zoomed(range) after
 * brushing; opened(place) on a click, the place among the steps.
 */
export function curves({ title, steps, lines, range, zoomed, opened, stacked, marks }) {
  const figure = h("figure", { class: "chart" }, h("figcaption", {}, title), h("div", { class: "plot" }));
  const values = stacked ? stack(lines) : lines.map((line) => line.values);
  const colors = lines.map((line, index) => line.color ?? LINES[index % LINES.length]);
  const last = h("div", { class: "legend" });
  const legend = (index) => {
    last.textContent = "";
    lines.forEach((line, place) => {
      const value = index === null ? [...line.values].reverse().find((one) => one !== null && one !== undefined) : line.values[index];
      last.append(h("span", { class: `key ${colors[place]}` }, h("i", {}), lines.length > 1 ? `${line.name} ` : "", h("b", {}, number(value))));
    });
  };
  legend(null);
  figure.firstChild.append(last);
  place(figure.lastChild, (width) => ({
    data: [steps, ...values],
    options: {
      width,
      height: 150,
      legend: { show: false },
      cursor: { drag: { x: true, y: false, setScale: false }, points: { size: 5 }, sync: { key: "steps" } },
      scales: { x: { time: false, range: () => range ?? bounds(steps) }, y: { range: (_, low, high) => room(low, high, stacked) } },
      axes: axes(steps),
      series: [
        {},
        ...lines.map((line, place) => ({
          label: line.name,
          stroke: color(colors[place]),
          width: stacked ? 1 : 1.5,
          fill: stacked ? mix(color(colors[place])) : undefined,
          spanGaps: true,
          dash: !stacked && values.slice(0, place).some((one) => same(one, values[place])) ? [6, 6] : undefined,
          points: { show: steps.length < (stacked ? 2 : 40), size: 4 },
        })),
      ],
      hooks: {
        setCursor: [(chart) => legend(chart.cursor.idx ?? null)],
        setSelect: [
          (chart) => {
            const { left, width: size } = chart.select;
            if (size > 4) zoomed?.([chart.posToVal(left, "x"), chart.posToVal(left + size, "x")]);
          },
        ],
        draw: marks?.length ? [(chart) => flags(chart, marks)] : [],
        ready: [
          (chart) => {
            let down = 0;
            chart.over.addEventListener("mousedown", (event) => (down = event.clientX));
            chart.over.addEventListener("click", (event) => {
              const index = chart.cursor.idx;
              if (Math.abs(event.clientX - down) < 4 && index !== null && index !== undefined) opened?.(index);
            });
            chart.over.addEventListener("dblclick", () => zoomed?.(null));
          },
        ],
      },
    },
  }));
  return figure;
}

/** Whether one line would hide the other. */
function same(one, other) {
  return one.length === other.length && one.every((value, index) => value === other[index]);
}

function flags(chart, marks) {
  const { ctx, bbox } = chart;
  ctx.save();
  ctx.strokeStyle = color("bad");
  ctx.setLineDash([3, 3]);
  for (const step of marks) {
    const x = chart.valToPos(step, "x", true);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function stack(lines) {
  let sums = [];
  return lines
    .map((line) => (sums = line.values.map((value, place) => (value ?? 0) + (sums[place] ?? 0))))
    .map((values) => [...values]);
}

function bounds(steps) {
  const low = steps[0] ?? 0;
  const high = steps[steps.length - 1] ?? 1;
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}

function room(low, high, fromZero) {
  if (low === null || high === null) return [0, 1];
  if (fromZero) low = 0;
  if (low === high) return [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1];
  const some = (high - low) * 0.06;
  return [low >= 0 && low - some < 0 ? 0 : low - some, high + some];
}

function mix(value) {
  return `color-mix(in srgb, ${value} 35%, transparent)`;
}

/** A histogram of numbers. */
export function histogram({ title, values, chosen }) {
  const found = values.filter((value) => typeof value === "number" && Number.isFinite(value));
  if (!found.length) return null;
  const low = Math.min(...found);
  const high = Math.max(...found);
  const bins = low === high ? 1 : Math.min(24, Math.max(6, new Set(found).size));
  const width = (high - low || 1) / bins;
  const counts = new Array(bins).fill(0);
  for (const value of found) counts[Math.min(bins - 1, Math.floor((value - low) / width))] += 1;
  const figure = h("figure", { class: "chart small" }, h("figcaption", {}, title, h("div", { class: "legend" }, `${number(low)} … ${number(high)}`)), h("div", { class: "bars" }));
  const most = Math.max(...counts);
  counts.forEach((count, place) => {
    const from = low + place * width;
    figure.lastChild.append(
      h("button", {
        class: "bar",
        type: "button",
        title: `${number(from)} to ${number(from + width)}: ${count}`,
        "aria-label": `${title} ${number(from)} to ${number(from + width)}: ${count}`,
        style: { "--part": count ? Math.max(0.02, count / most) : 0 },
        on: { click: () => chosen?.(from, place === bins - 1 ? high : from + width, place === bins - 1) },
      }),
    );
  });
  return figure;
}

/** Points: x, y and the index that `opened` is given. */
export function scatter({ title, xs, ys, names, opened }) {
  const order = xs.map((_, index) => index).filter((index) => typeof xs[index] === "number" && typeof ys[index] === "number");
  if (!order.length) return null;
  order.sort((a, b) => xs[a] - xs[b]);
  const note = h("div", { class: "legend" });
  const figure = h("figure", { class: "chart" }, h("figcaption", {}, title, note), h("div", { class: "plot" }));
  // Equal rewards lie on one line: a little spread, the same at each drawing, shows how many there are.
  const spread = (Math.max(...order.map((one) => ys[one])) - Math.min(...order.map((one) => ys[one])) || 1) * 0.03;
  const shift = (index) => ((((index * 2654435761) % 1000) / 1000) - 0.5) * spread;
  place(figure.lastChild, (width) => ({
    data: [order.map((index) => xs[index]), order.map((index) => ys[index] + shift(index))],
    options: {
      width,
      height: 150,
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, points: { size: 8 }, focus: { prox: 16 } },
      scales: { x: { time: false, range: (_, low, high) => room(low, high) }, y: { range: (_, low, high) => room(low - spread, high + spread) } },
      axes: axes(order.map((index) => xs[index])),
      series: [{}, { paths: () => null, points: { show: true, size: 5, fill: mix(color("line1")), stroke: color("line1"), width: 1 } }],
      hooks: {
        setCursor: [
          (chart) => {
            const index = chart.cursor.idx;
            note.textContent = index === null || index === undefined ? "" : `${names[order[index]]}: ${number(xs[order[index]])}, ${number(ys[order[index]])}`;
          },
        ],
        ready: [
          (chart) =>
            chart.over.addEventListener("click", () => {
              const index = chart.cursor.idx;
              if (index !== null && index !== undefined) opened?.(order[index]);
            }),
        ],
      },
    },
  }));
  return figure;
}
