// The timeline: a canvas of lanes over time, an overview above it, and what is known of the span under the pointer.
//
// Times are whole nanoseconds. With skipped iterations folded, the axis is piecewise: `fold` maps time to places on
// it and `unfold` back. A view is an interval of places. Spans of a lane do not overlap, so that they are found by
// bisection; what is narrower than a pixel is drawn as shares of its column, so that a step of many thousands of
// spans costs no more than its pixels.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { spans, texts, lanes, gaps, rows } = data;
  const step = Math.max(data.step, 1);
  const text = (column, n) => texts[spans[column][n]];
  const count = spans.start.length;
  const $ = (id) => document.getElementById(id);
  const canvas = $("lanes"), overview = $("overview"), tip = $("tip"), details = $("details"), folding = $("fold");
  const PHASES = ["forward", "backward", "recompute", "optimizer", "compiler_remat"];
  const RULER = 22, LABEL = 15, GAP = 7, THICK = 34, THIN = 20, TALL = 48;

  const length = (n) => spans.end[n] - spans.start[n], cost = (n) => length(n) * spans.count[n];

  // ---- what there is: spans by lane, waits by what they cost the step, and what to show for a row of the tables
  const at = lanes.map(() => []);
  for (let n = 0; n < count; n++) at[spans.lane[n]].push(n);
  const waits = [], exposedIn = new Map(), shownFor = new Map();
  for (let n = 0; n < count; n++) {
    if (text("kind", n) === "wait") {
      waits.push(n);
      if (spans.of[n] >= 0) {
        const list = exposedIn.get(spans.of[n]) ?? [];
        list.push(n);
        exposedIn.set(spans.of[n], list);
      }
    }
    const row = spans.row[n];
    if (row < 0) continue;
    const best = shownFor.get(row);
    const kind = text("kind", n), bestKind = best === undefined ? "" : text("kind", best);
    if (kind === bestKind ? cost(n) > cost(best) : kind === "wait" || best === undefined) shownFor.set(row, n);
  }
  waits.sort((a, b) => cost(b) - cost(a));

  let top = RULER;
  const places = lanes.map((lane) => {
    const y = top + LABEL, height = lane.name === "compute" ? THICK : THIN;
    top = y + height + GAP;
    return { y, height, label: lane.label };
  });
  const memory = data.memory;
  const least = memory ? memory.bytes.reduce((a, b) => Math.min(a, b)) : 0, most = memory ? memory.bytes.reduce((a, b) => Math.max(a, b)) : 0;
  const floor = least < most / 2 ? 0 : least - (most - least) * 0.15; // where little changes, the change is what to see
  if (memory) {
    const label = `HBM in use, ${floor ? bytes(least) : "0"} to ${bytes(most)}`;
    places.push({ y: top + LABEL, height: TALL, label });
    top += LABEL + TALL + GAP;
  }
  const height = top;

  // ---- the axis
  let knots = [[0, 0], [step, step]];
  function makeAxis() {
    const skipped = gaps.reduce((sum, g) => sum + g[1] - g[0], 0), roots = gaps.reduce((sum, g) => sum + Math.sqrt(g[1] - g[0]), 0);
    const shared = (step - skipped) * Math.min(0.04 * gaps.length, 0.35); // among the gaps, by the roots of their times
    let less = 0;
    knots = [[0, 0]];
    for (const [from, to] of folding.checked ? gaps : []) {
      knots.push([from, from - less]);
      less += Math.max(0, to - from - (shared * Math.sqrt(to - from)) / roots);
      knots.push([to, to - less]);
    }
    knots.push([step, step - less]);
  }
  function along(value, from, to) {
    let low = 0, high = knots.length - 2;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (knots[middle][from] <= value) low = middle; else high = middle - 1;
    }
    const a = knots[low], b = knots[low + 1], size = b[from] - a[from];
    return a[to] + (size ? ((value - a[from]) / size) * (b[to] - a[to]) : 0);
  }
  const fold = (time) => along(time, 0, 1), unfold = (place) => along(place, 1, 0);
  const whole = () => knots[knots.length - 1][1];

  // ---- the view
  let view = { from: 0, to: step }, chosen = -1, hovered = null, colors = {}, ink = {}, pending = false;
  function setView(from, to) {
    const size = Math.min(Math.max(to - from, Math.min(200, whole())), whole());
    from = Math.min(Math.max(from, 0), whole() - size);
    const moved = from !== view.from || from + size !== view.to;
    view = { from, to: from + size };
    redraw();
    return moved;
  }
  const zoom = (factor, center = (view.from + view.to) / 2) =>
    setView(center - (center - view.from) * factor, center + (view.to - center) * factor);
  const move = (share) => setView(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));
  function showSpan(n) {
    const size = Math.max(fold(spans.end[n]) - fold(spans.start[n]), 1000) * 5;
    const middle = (fold(spans.start[n]) + fold(spans.end[n])) / 2;
    setView(middle - size / 2, middle + size / 2);
    choose(n);
  }
  function redraw() {
    if (!pending) requestAnimationFrame(draw);
    pending = true;
  }

  // ---- drawing
  function readColors() {
    const style = getComputedStyle(document.documentElement);
    const names = ["text", "dim", "line", "soft", "card", "accent", "exposed", "transfer", "memory", ...PHASES];
    for (const name of names) {
      colors[name] = style.getPropertyValue(`--${name.replace("_", "-")}`).trim();
      const [red, green, blue] = [1, 3, 5].map((k) => (parseInt(colors[name].slice(k, k + 2), 16) / 255) ** 2.2);
      ink[name] = 0.21 * red + 0.72 * green + 0.07 * blue > 0.28 ? "#10151c" : "#fff"; // what can be read on it
    }
  }
  function colorOf(n) {
    const kind = text("kind", n);
    if (kind === "wait") return "exposed";
    return kind === "transfer" ? "transfer" : PHASES.includes(text("phase", n)) ? text("phase", n) : "transfer";
  }
  const color = Array.from({ length: count }, (_, n) => colorOf(n));

  function sized(element, cssHeight) {
    const ratio = devicePixelRatio || 1, width = element.clientWidth;
    if (element.width !== Math.round(width * ratio) || element.height !== Math.round(cssHeight * ratio)) {
      element.width = Math.round(width * ratio);
      element.height = Math.round(cssHeight * ratio);
      element.style.height = `${cssHeight}px`;
    }
    const pen = element.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, cssHeight);
    return [pen, width];
  }

  // Paints intervals [start, end, color, span], in order; narrow ones are gathered by column of pixels.
  function paint(pen, intervals, scale, y, high, labels) {
    let column = -1, parts = {};
    const flush = () => {
      let bottom = y + high;
      for (const name of ["transfer", ...PHASES]) {
        if (!parts[name]) continue;
        const size = Math.min(1, parts[name]) * high;
        pen.fillStyle = colors[name];
        pen.fillRect(column, bottom - size, 1, size);
        bottom -= size;
      }
      if (parts.exposed) {
        const size = Math.max(2, Math.min(1, parts.exposed) * high);
        pen.fillStyle = colors.exposed;
        pen.fillRect(column, Math.max(y, bottom - size), 1, Math.min(size, high));
      }
      parts = {};
    };
    for (const [start, end, name, n] of intervals) {
      const x0 = scale(start), x1 = scale(end), wide = x1 - x0;
      if (wide >= 1.5) {
        pen.fillStyle = colors[name];
        pen.fillRect(x0, y, wide > 4 ? wide - 0.6 : wide, high);
        if (labels && wide > 40) label(pen, n, ink[name], Math.max(0, x0), x1, y, high);
        continue;
      }
      for (let x = Math.floor(x0); x <= Math.floor(x1); x++) {
        if (x !== column) {
          flush();
          column = x;
        }
        parts[name] = (parts[name] ?? 0) + Math.max(0, Math.min(x1, x + 1) - Math.max(x0, x));
      }
    }
    flush();
  }
  function label(pen, n, style, from, x1, y, high) {
    const room = Math.floor((Math.min(x1, canvas.clientWidth) - from - 10) / 6.3);
    if (room < 4) return;
    const name = title(n);
    pen.fillStyle = style;
    pen.font = "11px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace";
    pen.fillText(name.length > room ? `${name.slice(0, room - 1)}…` : name, from + 5, y + high / 2 + 4);
  }

  function* visible(lane, from, to, withWaits) {
    const list = at[lane];
    for (let k = Math.max(0, first(list, from) - 1); k < list.length && spans.start[list[k]] <= to; k++) {
      const n = list[k];
      yield [spans.start[n], spans.end[n], color[n], n];
      if (withWaits)
        for (const w of exposedIn.get(n) ?? []) // what of a transfer is exposed, in its own lane too
          yield [Math.max(spans.start[w], spans.start[n]), Math.min(spans.end[w], spans.end[n]), "exposed", n];
    }
  }
  function first(list, time) { // the first span that starts after `time`
    let low = 0, high = list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans.start[list[middle]] <= time) low = middle + 1; else high = middle;
    }
    return low;
  }

  function draw() {
    pending = false;
    const [pen, width] = sized(canvas, height);
    const perPlace = width / (view.to - view.from);
    const scale = (time) => (fold(time) - view.from) * perPlace;
    const from = unfold(view.from), to = unfold(view.to);
    ruler(pen, width, scale, from, to);
    lanes.forEach((_, lane) => {
      const { y, height: high } = places[lane];
      pen.fillStyle = colors.soft;
      pen.fillRect(0, y, width, high);
      paint(pen, visible(lane, from, to, true), scale, y, high, true);
    });
    if (memory) drawMemory(pen, scale, from, to, width);
    for (const gap of gaps) band(pen, scale(gap[0]), scale(gap[1]), gap[2], width);
    pen.fillStyle = colors.dim;
    pen.font = "11px system-ui, sans-serif";
    for (const { y, label: name } of places) {
      pen.clearRect(0, y - LABEL, pen.measureText(name).width + 6, LABEL);
      pen.fillText(name, 1, y - 4);
    }
    mark(pen, hovered?.span, scale, colors.text, 1);
    mark(pen, chosen, scale, colors.text, 2);
    drawOverview();
  }

  function drawMemory(pen, scale, from, to, width) {
    const { y, height: high } = places[lanes.length];
    pen.fillStyle = colors.soft;
    pen.fillRect(0, y, width, high);
    pen.fillStyle = colors.memory;
    for (let k = memoryAt(from); k < memory.time.length && memory.time[k] <= to; k++) {
      const x0 = scale(memory.time[k]), x1 = scale(memory.time[k + 1] ?? step);
      const size = Math.max(1, ((memory.bytes[k] - floor) / (most - floor || 1)) * (high - 2));
      pen.fillRect(x0, y + high - size, Math.max(x1 - x0, 1) + 0.3, size);
    }
  }
  function memoryAt(time) { // the last point that is not after `time`
    let low = 0, high = memory.time.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (memory.time[middle] <= time) low = middle; else high = middle - 1;
    }
    return low;
  }

  function ruler(pen, width, scale, from, to) {
    const perTime = (view.to - view.from) / width; // of what is not folded
    const rough = perTime * 90, power = 10 ** Math.floor(Math.log10(rough));
    const every = [1, 2, 5, 10].map((m) => m * power).find((m) => m >= rough);
    pen.font = "11px system-ui, sans-serif";
    let free = -1;
    const ticks = Math.ceil(from / every), most = 20000;
    for (let k = ticks; k * every <= to && k - ticks < most; k++) {
      const x = scale(k * every);
      if (x < 0 || folded(k * every)) continue;
      pen.fillStyle = colors.line;
      pen.fillRect(Math.round(x), RULER - 6, 1, height - RULER + 6);
      const name = duration(k * every, every);
      if (x < free || x + name.length * 6 > width) continue;
      pen.fillStyle = colors.dim;
      pen.fillText(name, x + 3, RULER - 9);
      free = x + name.length * 6.5 + 14;
    }
  }
  const folded = (time) => folding.checked && gaps.some((g) => time > g[0] && time < g[1]);

  function band(pen, x0, x1, times, width) {
    if (x1 < 0 || x0 > width || x1 - x0 < 1) return;
    const from = Math.max(x0, 0), wide = Math.min(x1, width) - from;
    const bottom = height - GAP;
    pen.save();
    pen.beginPath();
    pen.rect(from, RULER, wide, bottom - RULER);
    pen.clip();
    pen.fillStyle = colors.card;
    pen.globalAlpha = 0.82;
    pen.fillRect(from, RULER, wide, bottom - RULER);
    pen.globalAlpha = 1;
    pen.strokeStyle = colors.dim;
    pen.globalAlpha = 0.3;
    pen.lineWidth = 1;
    pen.beginPath();
    for (let x = from - ((from + bottom) % 7) - bottom; x < from + wide; x += 7) {
      pen.moveTo(x, bottom);
      pen.lineTo(x + bottom, 0);
    }
    pen.stroke();
    pen.globalAlpha = 1;
    const name = `×${times}`;
    pen.font = "600 11px system-ui, sans-serif";
    const size = pen.measureText(name).width;
    if (wide >= 9) { // upright where there is room, else along the band
      pen.fillStyle = colors.text;
      pen.textAlign = "center";
      pen.textBaseline = "middle";
      pen.translate(from + wide / 2, places[0].y + places[0].height / 2);
      if (wide < size + 4) pen.rotate(-Math.PI / 2);
      pen.fillText(name, 0, 0);
    }
    pen.restore();
  }

  function mark(pen, n, scale, style, thick) {
    if (n === undefined || n < 0) return;
    const { y, height: high } = places[spans.lane[n]], x0 = scale(spans.start[n]);
    pen.strokeStyle = style;
    pen.lineWidth = thick;
    pen.strokeRect(x0 - 1, y - 1.5, Math.max(scale(spans.end[n]) - x0, 1) + 2, high + 3);
  }

  const compute = lanes.findIndex((lane) => lane.name === "compute");
  function drawOverview() {
    const [pen, width] = sized(overview, 40);
    const scale = (time) => (fold(time) / whole()) * width;
    pen.fillStyle = colors.soft;
    pen.fillRect(0, 0, width, 40);
    if (compute >= 0) paint(pen, visible(compute, 0, step, false), scale, 0, 40, false);
    pen.fillStyle = colors.soft;
    for (const [from, to] of gaps) pen.fillRect(scale(from), 0, Math.max(scale(to) - scale(from), 1), 40);
    const x0 = (view.from / whole()) * width, x1 = (view.to / whole()) * width;
    pen.fillStyle = colors.card;
    pen.globalAlpha = 0.72;
    pen.fillRect(0, 0, x0, 40);
    pen.fillRect(x1, 0, width - x1, 40);
    pen.globalAlpha = 1;
    pen.strokeStyle = colors.text;
    pen.lineWidth = 1.5;
    pen.strokeRect(x0 + 0.75, 0.75, Math.max(x1 - x0 - 1.5, 2), 38.5);
  }

  // ---- words
  function duration(ns, precision = ns / 1000) {
    const [unit, size] = ns >= 1e9 || precision >= 1e8 ? ["s", 1e9] : ns >= 1e6 || precision >= 1e5 ? ["ms", 1e6] : ["µs", 1e3];
    const digits = Math.max(0, Math.min(4, Math.ceil(-Math.log10(precision / size) - 1e-9)));
    return `${(ns / size).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })} ${unit}`;
  }
  function bytes(number) {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let k = 0;
    while (number >= 1024 && k < 4) [number, k] = [number / 1024, k + 1];
    return `${number.toFixed(k ? 2 : 0)} ${units[k]}`;
  }
  const arithmetic = (flops) => (flops >= 1e12 ? `${(flops / 1e12).toFixed(2)} TFLOP` : `${(flops / 1e9).toFixed(2)} GFLOP`);
  const title = (n) => text("tensor", n) || text("name", n);
  const times = (n) => n.toLocaleString("en", { maximumFractionDigits: 1 });

  function facts(n) {
    const kind = text("kind", n), row = rows[spans.row[n]], time = length(n);
    const source = kind === "wait" && spans.of[n] >= 0 ? spans.of[n] : n; // a wait is told by its transfer
    const found = [["operation", `${text("opcode", n)}  ${text("name", n)}`], ["part", text("phase", n).replace("_", " ")]];
    found.push([kind === "wait" ? "exposed" : "takes", `${duration(time)} from ${duration(spans.start[n])}`, kind === "wait"]);
    if (kind === "transfer") {
      const waited = (exposedIn.get(n) ?? []).reduce((sum, w) => sum + length(w), 0);
      found.push(["exposed", waited ? `${duration(waited)} of it` : "nothing of it", waited > 0]);
    }
    if (spans.bytes[n]) {
      const rate = kind !== "work" && length(source) ? ` at ${(spans.bytes[n] / length(source)).toFixed(1)} GB/s` : "";
      found.push([kind === "work" ? "HBM" : "bytes", bytes(spans.bytes[n]) + rate]);
    }
    if (spans.flops[n]) found.push(["FLOPs", `${arithmetic(spans.flops[n])} at ${(spans.flops[n] / time / 1e3).toFixed(0)} TFLOP/s`]);
    if (row) {
      const [all, exposed, number, window, windowTime] = row;
      if (windowTime) found.push(["window", `${duration(windowTime)} from start to done; work in it covers ${(100 * window).toFixed(0)} %`]);
      found.push(["in the step", `${times(number)} times, ${duration(all)}, ${exposed ? duration(exposed) : "nothing"} exposed`, exposed > 0]);
    }
    if (text("loop", n)) found.push(["loop", `${text("loop", n)}, iteration ${spans.iteration[n] + 1}`]);
    if (spans.count[n] !== 1) found.push(["stands for", `${times(spans.count[n])} alike`]);
    return found;
  }
  function about(heading, list) {
    const box = document.createElement("div"), head = document.createElement("h4"), terms = document.createElement("dl");
    box.className = "about";
    head.textContent = heading;
    for (const [term, value, red] of list) {
      const pair = document.createElement("div"), dt = document.createElement("dt"), dd = document.createElement("dd");
      dt.textContent = term;
      dd.textContent = value;
      if (red) dd.className = "red";
      pair.append(dt, dd);
      terms.append(pair);
    }
    box.append(head, terms);
    return box;
  }
  const aboutSpan = (n) => about((text("kind", n) === "wait" ? "waits for " : "") + title(n), facts(n));
  const aboutGap = (g) => about(`×${g[2]}: iterations like the one before`, [["loop", g[3]], ["take", duration(g[1] - g[0])]]);
  const aboutMemory = (size, time) =>
    about(`${bytes(size)} of HBM in use`, [["at", duration(time)], ["of the most", `${((100 * size) / most).toFixed(1)} %`]]);
  function aboutFound(found) {
    if (found.gap) return aboutGap(found.gap);
    return found.span === undefined ? aboutMemory(found.bytes, found.time) : aboutSpan(found.span);
  }

  function choose(n) {
    chosen = n;
    details.replaceChildren(...(n < 0 ? [] : [aboutSpan(n)]));
    redraw();
  }

  // ---- what is under the pointer
  function hit(x, y) {
    const lane = places.findIndex((p) => y >= p.y - LABEL && y < p.y + p.height + GAP);
    if (lane < 0) return null;
    const perPixel = (view.to - view.from) / canvas.clientWidth;
    const place = view.from + x * perPixel, time = unfold(place);
    const gap = gaps.find((g) => time > g[0] && time < g[1]);
    if (gap) return { gap };
    if (lane === lanes.length) return { bytes: memory.bytes[memoryAt(time)], time };
    const low = unfold(place - 2 * perPixel), high = unfold(place + 2 * perPixel), list = at[lane];
    let best = -1, bestSize = -1;
    for (let k = Math.max(0, first(list, low) - 1); k < list.length && spans.start[list[k]] <= high; k++) {
      const n = list[k];
      if (spans.end[n] < low) continue;
      const size = spans.start[n] <= time && time < spans.end[n] && length(n) > 4 * (high - low) ? Infinity : length(n);
      if (size > bestSize) [best, bestSize] = [n, size];
    }
    return best < 0 ? null : { span: best };
  }
  function hover(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    const found = hit(x, y);
    if (found?.span !== hovered?.span) redraw();
    hovered = found;
    tip.hidden = !found;
    if (!found) return;
    tip.replaceChildren(aboutFound(found));
    const right = x + 16 + tip.offsetWidth > canvas.clientWidth;
    tip.style.left = `${Math.max(0, right ? x - tip.offsetWidth - 12 : x + 16)}px`;
    tip.style.top = `${canvas.offsetTop + y + 18}px`;
  }
  function unhover() {
    if (hovered) redraw();
    hovered = null;
    tip.hidden = true;
  }

  // ---- pointers: one drags, two pinch, a short one chooses
  const pointers = new Map();
  let dragged = 0;
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    pointers.set(event.pointerId, event.clientX);
    canvas.setPointerCapture(event.pointerId);
    dragged = pointers.size > 1 ? Infinity : 0;
    unhover();
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) {
      if (event.pointerType !== "touch") hover(event);
      return;
    }
    const before = [...pointers.values()], perPixel = (view.to - view.from) / canvas.clientWidth;
    pointers.set(event.pointerId, event.clientX);
    const now = [...pointers.values()];
    dragged += Math.abs(now[0] - before[0]);
    if (pointers.size === 1) {
      if (dragged < 4) return;
      canvas.classList.add("moving");
      setView(view.from - (now[0] - before[0]) * perPixel, view.to - (now[0] - before[0]) * perPixel);
      return;
    }
    const left = canvas.getBoundingClientRect().left;
    const size = (xs) => Math.max(Math.abs(xs[0] - xs[1]), 10), middle = (xs) => (xs[0] + xs[1]) / 2 - left;
    const center = view.from + middle(before) * perPixel, factor = size(before) / size(now);
    const from = center - middle(now) * perPixel * factor;
    setView(from, from + (view.to - view.from) * factor);
  });
  function release(event) {
    if (!pointers.delete(event.pointerId)) return;
    canvas.classList.remove("moving");
    if (event.type === "pointerup" && dragged < 4) {
      const box = canvas.getBoundingClientRect(), found = hit(event.clientX - box.left, event.clientY - box.top);
      choose(found?.span ?? -1);
      if (found && found.span === undefined) details.replaceChildren(aboutFound(found));
    }
  }
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", unhover);
  canvas.addEventListener("dblclick", (event) => zoom(0.25, view.from + (event.offsetX / canvas.clientWidth) * (view.to - view.from)));
  canvas.addEventListener("wheel", (event) => {
    const lines = event.deltaMode ? 16 : 1, dx = event.deltaX * lines, dy = event.deltaY * lines;
    const sideways = event.shiftKey || Math.abs(dx) > Math.abs(dy);
    const center = view.from + (event.offsetX / canvas.clientWidth) * (view.to - view.from);
    const moved = sideways ? move((dx || dy) / canvas.clientWidth) : zoom(Math.exp(Math.max(-60, Math.min(60, dy)) * 0.006), center);
    if (moved || event.ctrlKey) event.preventDefault(); // with the whole step in view the page scrolls on
    unhover();
  }, { passive: false });

  const center = (event) => {
    const place = (event.offsetX / overview.clientWidth) * whole(), half = (view.to - view.from) / 2;
    setView(place - half, place + half);
  };
  overview.addEventListener("pointerdown", (event) => {
    overview.setPointerCapture(event.pointerId);
    center(event);
  });
  overview.addEventListener("pointermove", (event) => event.buttons && center(event));

  // ---- keys and buttons
  let rank = -1;
  function largest(by) {
    if (!waits.length) return;
    rank = (rank + by + waits.length) % waits.length;
    $("rank").textContent = `${rank + 1}/${waits.length}`;
    showSpan(waits[rank]);
  }
  function neighbour(by, lanesOn = 0) {
    if (!count) return;
    if (chosen < 0) chosen = hit(canvas.clientWidth / 2, places[0].y)?.span ?? at[0]?.[0] ?? -1;
    else if (lanesOn) {
      const lane = (spans.lane[chosen] + lanesOn + lanes.length) % lanes.length;
      chosen = at[lane][Math.max(0, first(at[lane], spans.start[chosen]) - 1)];
    } else {
      const list = at[spans.lane[chosen]], k = list.indexOf(chosen) + by;
      chosen = list[Math.max(0, Math.min(list.length - 1, k))];
    }
    if (chosen < 0) return;
    const from = fold(spans.start[chosen]), to = fold(spans.end[chosen]), size = view.to - view.from;
    if (to < view.from || from > view.to) setView((from + to - size) / 2, (from + to + size) / 2);
    choose(chosen);
  }
  const fit = () => setView(0, whole());
  const keys = {
    ArrowLeft: () => neighbour(-1), ArrowRight: () => neighbour(1), ArrowUp: () => neighbour(0, -1), ArrowDown: () => neighbour(0, 1),
    "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), 0: fit, Home: fit, a: () => move(-0.3), d: () => move(0.3),
    n: () => largest(1), p: () => largest(-1), Escape: () => choose(-1), Enter: () => chosen >= 0 && showSpan(chosen),
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    keys[event.key]();
    event.preventDefault();
  });
  const actions = { largest: () => largest(1), out: () => zoom(1 / 0.6), in: () => zoom(0.6), fit };
  for (const button of document.querySelectorAll("[data-do]")) button.addEventListener("click", actions[button.dataset.do]);
  folding.addEventListener("change", () => {
    const from = unfold(view.from), to = unfold(view.to), all = view.to - view.from >= whole();
    makeAxis();
    if (all) fit(); else setView(fold(from), fold(to));
  });
  document.addEventListener("show-transfer", (event) => {
    const n = shownFor.get(event.detail);
    if (n === undefined) return;
    showSpan(n);
    $("timeline").scrollIntoView({ block: "start" });
    canvas.focus({ preventScroll: true });
  });

  // ---- begin
  document.querySelector(".tools").hidden = false;
  $("folding").hidden = !gaps.length;
  document.querySelector("[data-do=largest]").hidden = !waits.length;
  const drawn = new Set(color);
  for (const item of document.querySelectorAll(".legend [data-color]")) item.hidden = !drawn.has(item.dataset.color);
  document.querySelector(".legend .of-gaps").hidden = !gaps.length;
  document.querySelector(".legend .of-memory").hidden = !memory;
  const recolor = () => {
    readColors();
    redraw();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolor);
  matchMedia("print").addEventListener("change", () => {
    readColors(); // paper is light, and does not wait for a frame
    draw();
  });
  new ResizeObserver(redraw).observe(canvas);
  makeAxis();
  readColors();
  fit();
})();
