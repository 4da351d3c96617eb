"use strict";
// Draws the figures that the page's data describes: bars, lines, timelines, and tokens coloured by their scores.
(() => {
  const figures = JSON.parse(document.getElementById("data").textContent);
  const drawn = new Map();

  function colours() {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(name).trim();
    return { ink: of("--ink"), faint: of("--faint"), line: of("--line"), card: of("--card"), bad: of("--bad"),
      series: of("--series").split(" ") };
  }

  const three = (value) => {
    if (value === null || value === undefined) return "-";
    const size = Math.abs(value);
    return size >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
  };
  const bytes = (value) => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let at = 0;
    while (Math.abs(value) >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
    return three(value) + " " + units[at];
  };
  const percent = (value) => three(100 * value) + " %";
  const seconds = (value) => (value >= 1 ? three(value) + " s" : value >= 1e-3 ? three(value * 1e3) + " ms" : three(value * 1e6) + " us");
  const forms = { number: three, bytes, percent, seconds };

  function common(theme) {
    return {
      animation: false, backgroundColor: "transparent", color: theme.series,
      textStyle: { color: theme.ink, fontFamily: "system-ui, sans-serif" },
      tooltip: { renderMode: "richText", confine: true, backgroundColor: theme.card, borderColor: theme.line,
        textStyle: { color: theme.ink, fontSize: 12 } },
    };
  }

  function axis(theme, given, more) {
    const form = forms[given.form || "number"];
    return { type: given.log ? "log" : "value", logBase: given.log, name: given.name, nameLocation: "middle", scale: Boolean(given.free),
      nameTextStyle: { color: theme.faint }, axisLabel: { color: theme.faint, formatter: form, hideOverlap: true },
      axisLine: { lineStyle: { color: theme.line } }, splitLine: { lineStyle: { color: theme.line, opacity: 0.5 } },
      min: given.min, max: given.max, minorTick: { show: false }, ...more };
  }

  // A line from least to most with two ends, over data [place, low, high] or the other way round; a bar's value behind it.
  function whisker(theme, upright, bars) {
    return (params, api) => {
      const one = upright ? api.coord([api.value(0), api.value(1)]) : api.coord([api.value(1), api.value(0)]);
      const two = upright ? api.coord([api.value(0), api.value(2)]) : api.coord([api.value(2), api.value(0)]);
      const end = upright ? [4, 0] : [0, 4];
      const line = (a, b) => ({ type: "line", shape: { x1: a[0], y1: a[1], x2: b[0], y2: b[1] },
        style: { stroke: theme.ink, lineWidth: 1.5 } });
      const spread = api.value(2) > api.value(1) ? [line(one, two),
        ...[one, two].map((p) => line([p[0] - end[0], p[1] - end[1]], [p[0] + end[0], p[1] + end[1]]))] : [];
      const text = bars ? [{ type: "text", style: { text: three(bars[api.value(0)].median), x: two[0] + 7, y: two[1], fill: theme.ink,
        verticalAlign: "middle", fontSize: 12 } }] : [];
      return { type: "group", children: [...spread, ...text] };
    };
  }

  function bars(figure, theme) {
    const spread = figure.bars.map((bar, at) => [at, bar.low, bar.high]);
    return { ...common(theme),
      grid: { left: 8, right: 64, top: 8, bottom: 36, containLabel: true },
      xAxis: axis(theme, { name: figure.unit, min: 0 }, { nameGap: 24 }),
      yAxis: { type: "category", inverse: true, data: figure.bars.map((bar) => bar.name),
        axisLabel: { color: theme.ink, width: 130, overflow: "break" }, axisLine: { lineStyle: { color: theme.line } } },
      series: [
        { type: "bar", barMaxWidth: 26, data: figure.bars.map((bar, at) => ({ value: bar.median,
          itemStyle: { color: theme.series[bar.colour % theme.series.length] } })),
          tooltip: { formatter: (p) => { const bar = figure.bars[p.dataIndex];
            return `${bar.name}\n${three(bar.median)} ${figure.unit}\n${three(bar.low)} to ${three(bar.high)}, ${bar.count} runs`; } } },
        { type: "custom", silent: true, z: 5, data: spread, renderItem: whisker(theme, false, figure.bars), encode: { x: [1, 2], y: 0 } },
      ] };
  }

  const SHAPES = ["circle", "rect", "triangle", "diamond", "roundRect", "arrow", "pin"];

  function lines(figure, theme) {
    const x = forms[figure.x.form || "number"], y = forms[figure.y.form || "number"];
    const series = figure.lines.map((line, at) => {
      const colour = theme.series[(line.colour === undefined ? at : line.colour) % theme.series.length];
      return { type: line.scatter ? "scatter" : "line", name: line.name, data: line.points.map((p) => [p[0], p[1]]),
        step: line.step ? "end" : false, symbol: line.plain ? "none" : SHAPES[at % SHAPES.length], symbolSize: line.scatter ? 13 : 7,
        sampling: line.points.length > 2000 ? "minmax" : undefined, connectNulls: true,
        lineStyle: { type: line.dashed ? "dashed" : "solid", width: 2, color: colour }, itemStyle: { color: colour },
        tooltip: { formatter: (p) => `${line.name}\n${figure.x.name}: ${x(p.value[0])}\n${figure.y.name}: ${y(p.value[1])}` +
          (line.points[p.dataIndex].length > 3 ? `\n${y(line.points[p.dataIndex][2])} to ${y(line.points[p.dataIndex][3])}` : "") } };
    });
    const spread = figure.lines.flatMap((line) => line.points.filter((p) => p[3] > p[2]).map((p) => [p[0], p[2], p[3]]));
    if (spread.length) {
      series.push({ type: "custom", silent: true, z: 5, data: spread, renderItem: whisker(theme, true), encode: { x: 0, y: [1, 2] } });
    }
    return { ...common(theme),
      tooltip: { ...common(theme).tooltip, trigger: "item" },
      legend: { type: "scroll", bottom: 0, data: figure.lines.map((line) => line.name), textStyle: { color: theme.ink },
        pageTextStyle: { color: theme.ink }, pageIconColor: theme.ink, pageIconInactiveColor: theme.line, inactiveColor: theme.line },
      grid: { left: 32, right: 16, top: 16, bottom: 64, containLabel: true },
      xAxis: axis(theme, figure.x, { nameGap: 24 }), yAxis: axis(theme, figure.y, { nameGap: figure.y.form === "bytes" ? 64 : 50 }), series };
  }

  // ---- timelines: every task is there; what is narrower than two pixels is drawn together with its neighbours.

  function firstAfter(rows, at) {
    let low = 0, high = rows.length;
    while (low < high) { const middle = (low + high) >> 1; if (rows[middle].to < at) low = middle + 1; else high = middle; }
    return low;
  }

  function inView(lane, from, to, pixels) {
    const narrow = (2 * (to - from)) / pixels, out = [];
    let tasks = 0, open = null;
    for (let at = firstAfter(lane, from); at < lane.length && lane[at].from <= to; at += 1) {
      const [, , kind, name] = lane[at].row, start = lane[at].from, end = lane[at].end;
      tasks += 1;
      if (open && end - start < narrow && open.small && start - open.end < narrow) {
        open.end = Math.max(open.end, end); open.count += 1;
        open.kinds.set(kind, (open.kinds.get(kind) || 0) + end - start);
      } else {
        open = { start, end, count: 1, name, kinds: new Map([[kind, end - start]]), small: end - start < narrow };
        out.push(open);
      }
    }
    return { out, tasks };
  }

  function timeline(figure, theme) {
    const names = figure.lanes.map((lane) => lane.name);
    return { ...common(theme),
      grid: { left: 8, right: 16, top: 8, bottom: 70, containLabel: true },
      xAxis: axis(theme, { name: "seconds since the first task", min: 0, max: figure.span }, { nameGap: 24 }),
      yAxis: { type: "category", inverse: true, data: names, axisLabel: { color: theme.ink, width: 120, overflow: "break", lineHeight: 13, fontSize: 11 },
        splitLine: { show: true, lineStyle: { color: theme.line } }, axisLine: { lineStyle: { color: theme.line } } },
      dataZoom: [
        { type: "inside", filterMode: "none", zoomOnMouseWheel: "ctrl", minValueSpan: figure.span / 1e5 },
        { type: "slider", filterMode: "none", bottom: 6, height: 22, borderColor: theme.line, textStyle: { color: theme.faint },
          labelFormatter: (value) => seconds(value), brushSelect: false },
      ],
      series: [{ type: "custom", encode: { x: [1, 2], y: 0 }, clip: true, data: [],
        renderItem: (params, api) => {
          const a = api.coord([api.value(1), api.value(0)]), b = api.coord([api.value(2), api.value(0)]);
          const height = api.size([0, 1])[1] * 0.62, kind = api.value(3);
          const area = params.coordSys, left = Math.max(a[0], area.x), right = Math.min(b[0], area.x + area.width);
          if (right < left) return null;
          const stall = kind < 0;
          return { type: "rect", shape: { x: left, y: a[1] - height / 2, width: Math.max(1, right - left), height },
            style: stall ? { fill: "none", stroke: theme.bad, lineWidth: 1.5, lineDash: [3, 2] }
              : { fill: theme.series[kind % theme.series.length], opacity: api.value(4) > 1 ? 0.72 : 1 } };
        },
        tooltip: { formatter: (p) => p.data.said } }] };
  }

  function unpack(figure) {
    if (figure.unpacked) return;
    for (const lane of figure.lanes) {
      let most = 0;
      // `to`: the latest end so far, which a search by time needs where tasks of a lane overlap.
      lane.unpacked = lane.rows.map((row) => {
        const from = row[0] / 1e6, end = (row[0] + row[1]) / 1e6;
        most = Math.max(most, end);
        return { row, from, end, to: most };
      });
    }
    figure.unpacked = true;
  }

  function window_(state) {
    const zoom = state.chart.getOption().dataZoom[0];
    return [zoom.startValue === undefined ? 0 : zoom.startValue, zoom.endValue === undefined ? state.figure.span : zoom.endValue];
  }

  function refresh(state) {
    const { figure, chart } = state, [from, to] = window_(state), data = [];
    const pixels = Math.max(200, chart.getWidth() - 150);
    let tasks = 0;
    unpack(figure);
    figure.lanes.forEach((lane, place) => {
      const { out, tasks: some } = inView(lane.unpacked, from, to, pixels);
      tasks += some;
      for (const each of out) {
        const [kind] = [...each.kinds].sort((a, b) => b[1] - a[1])[0];
        const what = each.count === 1 ? figure.names[each.name] : `${each.count} tasks, mostly ${figure.kinds[kind]}`;
        data.push({ value: [place, each.start, each.end, kind, each.count],
          said: `${lane.name}\n${what}\n${seconds(each.end - each.start)} from ${seconds(each.start)}` });
      }
      for (const [start, length, cause] of lane.stalls) {
        const a = start / 1e6, b = (start + length) / 1e6;
        if (b >= from && a <= to) {
          data.push({ value: [place, a, b, -1, 1], said: `idle for ${seconds(b - a)}\n${figure.causes[cause]}` });
        }
      }
    });
    chart.setOption({ series: [{ data }] });
    const status = document.getElementById(`${figure.name}-status`);
    status.textContent = `Shown: ${seconds(from)} to ${seconds(to)}; ${tasks.toLocaleString("en")} tasks as ${data.length.toLocaleString("en")} bars.`;
  }

  function zoom(state, how) {
    const [from, to] = window_(state), width = to - from, middle = (from + to) / 2, most = state.figure.span;
    let [a, b] = { in: [middle - width / 4, middle + width / 4], out: [middle - width, middle + width], left: [from - width / 3, to - width / 3],
      right: [from + width / 3, to + width / 3], all: [0, most] }[how];
    if (a < 0) { b = Math.min(most, b - a); a = 0; }
    if (b > most) { a = Math.max(0, a - (b - most)); b = most; }
    state.chart.dispatchAction({ type: "dataZoom", startValue: a, endValue: b });
  }

  function save(figure) {
    const events = [], processes = [...new Set(figure.lanes.map((lane) => lane.process))];
    processes.forEach((name, at) => events.push({ ph: "M", name: "process_name", pid: at + 1, tid: 0, args: { name } }));
    let count = 0;
    for (const lane of figure.lanes) {
      const pid = processes.indexOf(lane.process) + 1, threads = [];
      for (const [ts, dur, kind, name] of lane.rows) {
        // Perfetto drops a task that begins before the last one of its thread ended: each has a thread that is free.
        let thread = threads.find((each) => each.end <= ts);
        if (!thread) {
          threads.push(thread = { tid: ++count });
          events.push({ ph: "M", name: "thread_name", pid, tid: thread.tid, args: { name: lane.resource } });
        }
        thread.end = ts + dur;
        events.push({ ph: "X", name: figure.names[name], cat: figure.kinds[kind], pid, tid: thread.tid, ts, dur });
      }
    }
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([JSON.stringify({ displayTimeUnit: "ms", traceEvents: events })], { type: "application/json" }));
    link.download = "trace.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  // ---- tokens over the text

  // Which positions stay of a prompt, as the cache chooses: sinks and recent ones, and of the others the highest scores,
  // of equal ones the first. A budget that holds all that a window shows leaves no choice.
  function keeps(scores, total, own, window) {
    const length = scores.length, stays = new Uint8Array(length);
    if (window !== null && total >= window - 1 && length > window - 1) {
      return stays.fill(1, length - (window - 1));
    }
    if (total >= length) return stays.fill(1);
    const sinks = Math.min(own.sinks, total), rest = total - sinks;
    const half = own.heavy === Math.floor((own.total - own.sinks) / 2);
    const heavy = half ? Math.floor(rest / 2) : Math.floor((rest * own.heavy) / Math.max(1, own.heavy + own.recent) + 1e-9);
    const start = length - (rest - heavy), first = window === null ? sinks : Math.max(sinks, length - window + 1);
    stays.fill(1, 0, sinks);
    stays.fill(1, start);
    const order = [];
    for (let at = first; at < start; at += 1) order.push(at);
    order.sort((a, b) => scores[b] - scores[a] || a - b);
    for (const at of order.slice(0, heavy)) stays[at] = 1;
    return stays;
  }

  function element(kind, text, attributes) {
    const made = document.createElement(kind);
    if (text !== undefined) made.textContent = text;
    for (const [name, value] of Object.entries(attributes || {})) made.setAttribute(name, value);
    return made;
  }

  function choice(bar, text, names) {
    const label = element("label", text + " "), select = element("select");
    names.forEach((name, at) => select.append(element("option", name, { value: at - 1 })));
    label.append(select);
    bar.append(label);
    return select;
  }

  function tokens(place, figure) {
    const bar = element("div", undefined, { class: "controls" });
    place.append(bar);
    const which = choice(bar, "Prompt", figure.sequences.map((_, at) => `${at + 1} of ${figure.sequences.length}`));
    const counted = (word, n) => ["all, on average", ...Array.from({ length: n }, (_, at) => `${word} ${at}`)];
    const layer = choice(bar, "Layer", counted("layer", figure.windows.length));
    const head = choice(bar, "KV head", counted("head", figure.sequences[0].scores[0].length));
    const label = element("label", "Budget "), slider = element("input", undefined, { type: "range", min: 1, step: 1 });
    const said = element("output");
    label.append(slider, said);
    bar.append(label);
    const end = element("input", undefined, { type: "checkbox" }), ended = element("label");
    ended.append(end, "as the run ended, with its answer");
    bar.append(ended);
    const key = element("p", undefined, { class: "note key" });
    const marks = [["low score", 0.05, ""], ["high score", 1, ""], ["evicted", 0, "gone"]];
    if (figure.sequences.some((one) => one.returns)) marks.push(["came back", 0, "back"]);
    if (figure.newest) marks.push(["twice the bits", 0, "finer"]);
    for (const [text, share, name] of marks) {
      const shown = element("span", text, { class: name });
      shown.style.setProperty("--share", share);
      key.append(shown);
    }
    key.classList.add("words-key");
    const words = element("div", undefined, { class: "words", tabindex: 0, role: "group", "aria-label": "The prompt's tokens. Arrow keys go from token to token." });
    const status = element("p", "", { class: "note status", role: "status" });
    place.append(key, words, status);
    let spans = [], shown = [], at = -1;

    function pairs() {
      const one = figure.sequences[+which.value + 1], all = (n) => Array.from({ length: n }, (_, i) => i);
      const layers = +layer.value < 0 ? all(one.scores.length) : [+layer.value];
      const heads = +head.value < 0 ? all(one.scores[0].length) : [+head.value];
      return layers.flatMap((l) => heads.map((h) => [l, h]));
    }

    function fresh() {
      const one = figure.sequences[+which.value + 1];
      slider.max = one.prompt;
      slider.value = Math.min(one.prompt, one.budget.total);
      spans = one.tokens.map((text) => element("span", text));
      words.replaceChildren(...spans);
      at = -1;
      update();
    }

    function update() {
      const one = figure.sequences[+which.value + 1], chosen = pairs(), total = +slider.value, count = end.checked ? one.tokens.length : one.prompt;
      const [share, stay, sum, back, times] = Array.from({ length: 5 }, () => new Float64Array(count));
      for (const [l, h] of chosen) {
        const scores = one.scores[l][h], sorted = [...scores].sort((a, b) => a - b), top = sorted[Math.floor(0.98 * (sorted.length - 1))] || 1;
        const kept = end.checked ? new Uint8Array(count) : keeps(scores, total, one.budget, figure.windows[l]);
        if (end.checked) {
          for (const position of (one.kept[l] || [])[h] || []) if (position < count) kept[position] = 1;
          for (const [position, often] of ((one.returns || [])[l] || [])[h] || []) {
            back[position] += 1 / chosen.length;
            times[position] += often;
          }
        }
        for (let i = 0; i < count; i += 1) {
          share[i] += Math.sqrt(Math.min(1, (scores[i] || 0) / top)) / chosen.length;
          sum[i] += (scores[i] || 0) / chosen.length;
          stay[i] += kept[i] / chosen.length;
        }
      }
      shown = { share, stay, sum, back, times, count, pairs: chosen.length };
      spans.forEach((span, i) => {
        span.hidden = i >= count;
        span.className = i < count ? [stay[i] < 0.5 ? "gone" : finer(i) ? "finer" : "", back[i] >= 0.5 ? "back" : ""].join(" ").trim() : "";
        span.style.setProperty("--share", i < one.prompt && i < count ? share[i].toFixed(3) : 0);
      });
      slider.disabled = end.checked;
      const own = total === Math.min(one.prompt, one.budget.total) ? ", as in this run" : "";
      said.textContent = ` ${total} tokens, ${percent(total / one.prompt)} of the prompt${own}`;
      slider.setAttribute("aria-valuetext", said.textContent);
      if (at >= 0) tell(at); else {
        const half = (parts) => Array.from(parts).filter((part) => part >= 0.5).length;
        const came = end.checked && one.returns ? `, ${half(back)} came back` : "";
        status.textContent = `${half(stay)} of ${count} tokens stay${came}${chosen.length > 1 ? ` in at least half of the ${chosen.length} caches` : ""}.`;
      }
    }

    // Of a packed cache at the end: whether a token that it holds is one of the newest, which have twice the bits. The
    // answer's last token is in no cache.
    function finer(position) {
      const one = figure.sequences[+which.value + 1];
      return end.checked && position >= one.tokens.length - 1 - (figure.newest || 0);
    }

    function tell(position) {
      if (position < 0 || position >= shown.count) return;
      if (spans[at]) spans[at].classList.remove("over");
      at = position;
      spans[at].classList.add("over");
      const rank = 1 + Array.from(shown.sum).filter((score) => score > shown.sum[at]).length;
      status.textContent = `\u201c${spans[at].textContent}\u201d, position ${at}: score ${three(shown.sum[at])}, number ${rank} of ${shown.count}; ` +
        (shown.pairs > 1 ? `kept in ${percent(shown.stay[at])} of the caches` : shown.stay[at] ? "kept" : "evicted") +
        (!end.checked || !figure.bits || !shown.stay[at] ? "" : `, key in ${figure.bits[0] * (finer(at) ? 2 : 1)} bits, value in ${figure.bits[1] * (finer(at) ? 2 : 1)}`) +
        (shown.times[at] ? `; came back ${shown.times[at] > 1 ? `${shown.times[at]} times` : "once"}` : "") +
        (shown.times[at] && shown.pairs > 1 ? ` in ${percent(shown.back[at])} of them.` : ".");
    }

    which.addEventListener("change", fresh);
    for (const control of [layer, head, end]) control.addEventListener("change", update);
    slider.addEventListener("input", update);
    words.addEventListener("mouseover", (event) => { const i = spans.indexOf(event.target); if (i >= 0) tell(i); });
    words.addEventListener("click", (event) => { const i = spans.indexOf(event.target); if (i >= 0) tell(i); });
    words.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      tell(Math.min(shown.count - 1, Math.max(0, at + step)));
      spans[at].scrollIntoView({ block: "nearest" });
      event.preventDefault();
    });
    if (figure.sequences.length < 2) which.parentElement.hidden = true;
    if (figure.sequences[0].scores[0].length < 2) head.parentElement.hidden = true;
    fresh();
  }

  for (const place of document.querySelectorAll(".tokens")) tokens(place, figures[place.dataset.figure]);

  // ---- drawing

  const makers = { bars, lines, timeline };

  function draw(theme) {
    for (const place of document.querySelectorAll(".chart")) {
      const figure = figures[place.dataset.figure], before = drawn.get(figure.name);
      if (figure.height) place.style.height = `${figure.height}rem`;
      const chart = before ? before.chart : echarts.init(place, null, { renderer: "canvas" });
      const state = before || { chart, figure }, kept = before && figure.kind === "timeline" ? window_(before) : null;
      chart.setOption(makers[figure.kind](figure, theme), true);
      drawn.set(figure.name, state);
      if (figure.kind !== "timeline") continue;
      if (kept) chart.dispatchAction({ type: "dataZoom", startValue: kept[0], endValue: kept[1] });
      refresh(state);
      if (before) continue;
      chart.on("datazoom", () => { clearTimeout(state.timer); state.timer = setTimeout(() => refresh(state), 30); });
      place.addEventListener("keydown", (event) => {
        const how = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all" }[event.key];
        if (how) { zoom(state, how); event.preventDefault(); }
      });
    }
  }

  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => zoom(drawn.get(button.dataset.of), button.dataset.zoom));
  }
  for (const button of document.querySelectorAll("[data-save]")) {
    button.addEventListener("click", () => save(figures[button.dataset.save]));
  }
  const dark = matchMedia("(prefers-color-scheme: dark)"), root = document.documentElement;
  document.getElementById("theme").addEventListener("click", () => {
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    draw(colours());
  });
  dark.addEventListener("change", () => draw(colours()));
  let shown;
  addEventListener("beforeprint", () => { shown = root.dataset.theme; root.dataset.theme = "light"; draw(colours());
    for (const folded of document.querySelectorAll("details")) folded.open = true; });
  addEventListener("afterprint", () => { if (shown) root.dataset.theme = shown; else delete root.dataset.theme; draw(colours()); });
  new ResizeObserver(() => { for (const { chart, figure } of drawn.values()) { chart.resize(); if (figure.kind === "timeline") refresh(drawn.get(figure.name)); } })
    .observe(document.querySelector("main"));
  draw(colours());
})();
