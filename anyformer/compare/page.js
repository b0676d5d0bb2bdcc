"use strict";
(() => {
  const SMALLEST = 5, NAMED = 16;
  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  // on a dark page the palette's colours are too dim for thin lines and small letters
  const lifted = (colour) => {
    const share = +ink("--lift");
    return "#" + [1, 3, 5].map((i) => { const part = parseInt(colour.slice(i, i + 2), 16); return Math.round(part + (255 - part) * share).toString(16).padStart(2, "0"); }).join("");
  };
  const finite = (value) => typeof value === "number" && Number.isFinite(value);
  const config = { responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: "", modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

  function themed(layout) {
    const axis = { gridcolor: ink("--line"), linecolor: ink("--faint"), tickfont: { color: ink("--faint") }, title: { font: { color: ink("--faint") } } };
    const merged = { ...layout, font: { ...layout.font, color: ink("--ink") } };
    for (const name of ["xaxis", "yaxis"]) {
      const own = layout[name] || {};
      merged[name] = { ...own, ...axis, title: { ...own.title, font: axis.title.font } };
    }
    merged.modebar = { bgcolor: "rgba(0,0,0,0)", color: ink("--faint"), activecolor: ink("--ink") };
    merged.hoverlabel = { ...layout.hoverlabel, bgcolor: ink("--card"), bordercolor: ink("--faint"), font: { size: 12, color: ink("--ink") } };
    return merged;
  }

  function range(values, share, floor) {
    const low = Math.min(...values), high = Math.max(...values);
    const pad = share * (high - low) + floor;
    return [low - pad, high + pad];
  }

  // Where names go: nearest free place around each circle, as in the picture made beside this page.
  function places(circles, sizes, box) {
    const angles = [0, 180, 90, 270, 35, 325, 145, 215, 60, 120, 240, 300].map((a) => (a * Math.PI) / 180);
    const steps = [0, 6, 14, 26, 42, 62, 86];
    const overlap = (a, b) => Math.max(0, Math.min(a[2], b[2]) - Math.max(a[0], b[0])) * Math.max(0, Math.min(a[3], b[3]) - Math.max(a[1], b[1]));
    const side = (value) => (Math.abs(value) < 1e-9 ? 0 : Math.sign(value));
    const chosen = circles.map(() => null);
    for (let round = 0; round < 2; round++) {
      circles.forEach(([x, y, r], i) => {
        const [w, h] = sizes[i];
        let best = Infinity;
        const others = chosen.filter((b, j) => b && j !== i);
        for (const step of steps) for (const [rank, angle] of angles.entries()) {
          const u = x + Math.cos(angle) * (r + 3 + step) + (side(Math.cos(angle)) * w) / 2;
          const v = y + Math.sin(angle) * (r + 3 + step) + (side(Math.sin(angle)) * h) / 2;
          const b = [u - w / 2, v - h / 2, u + w / 2, v + h / 2];
          let cost = 100 * (w * h - overlap(b, box)) + (step + 0.4 * rank) * h;
          for (const o of others) cost += 100 * overlap(b, o);
          for (const [cx, cy, cr] of circles) cost += 8 * overlap(b, [cx - cr, cy - cr, cx + cr, cy + cr]);
          if (cost < best) { best = cost; chosen[i] = b; }
        }
      });
    }
    return chosen.map((b) => [(b[0] + b[2]) / 2, (b[1] + b[3]) / 2]);
  }

  function spread(values, gap, low, high) {
    const order = values.map((_, i) => i).sort((a, b) => values[a] - values[b]);
    const moved = order.map((i) => Math.min(Math.max(values[i], low), high));
    gap = Math.min(gap, (high - low) / Math.max(values.length - 1, 1));
    for (let i = 1; i < moved.length; i++) moved[i] = Math.max(moved[i], moved[i - 1] + gap);
    if (moved.length) moved[moved.length - 1] = Math.min(moved[moved.length - 1], high);
    for (let i = moved.length - 2; i >= 0; i--) moved[i] = Math.min(moved[i], moved[i + 1] - gap);
    const result = [];
    order.forEach((i, rank) => { result[i] = moved[rank]; });
    return result;
  }

  function bubbles(panel, div, figure) {
    const meta = figure.layout.meta;
    const pick = (name) => panel.querySelector(`select[name="${name}"]`);
    const ask = (name) => (pick(name) ? pick(name).value : "");
    const hidden = () => new Set([...panel.querySelectorAll('.chip[aria-pressed="false"]')].map((chip) => chip.dataset.key));
    let width = 0;

    function draw() {
      const off = hidden(), at = ask("quality"), length = ask("cost"), measure = ask("measure");
      const largest = figure.data.length > 2 * NAMED ? 14 : 25;
      const heaviest = Math.max(...figure.data.map(({ meta: m }) => m.memory[length] || 0));
      const state = figure.data.map(({ meta: m }) => ({
        m, x: (m.speed[measure] || {})[length], y: m.quality[at], shown: !off.has(String(m.key)),
        r: m.memory[length] ? Math.max(SMALLEST, largest * Math.sqrt(m.memory[length] / heaviest)) : SMALLEST,
      }));
      const drawn = state.filter((s) => s.shown && s.m.role === "disc" && finite(s.x) && finite(s.y));
      const ys = drawn.length ? drawn.map((s) => s.y) : [0, 1];
      const xs = drawn.length ? drawn.map((s) => Math.log10(s.x)) : [0, 1];
      const reach = Math.max(Math.max(...ys) - Math.min(...ys), 0.05 * Math.max(...ys.map(Math.abs)), 1e-9);
      const near = meta.lines.filter((l) => l.value >= Math.min(...ys) - reach && l.value <= Math.max(...ys) + reach).map((l) => l.value);
      const xr = range(xs, 0.14, 0.11), yr = range([...ys, ...near], 0.16, ys.length + near.length > 1 ? 0 : reach);
      const data = state.map((s, i) => ({ ...figure.data[i], x: [finite(s.x) ? s.x : null], y: [finite(s.y) ? s.y : null], visible: s.shown }));
      data.forEach((trace, i) => {
        if (state[i].m.role === "disc") trace.marker = { ...trace.marker, size: 2 * state[i].r };
        const low = state[i].m.low[at], high = state[i].m.high[at];
        if (state[i].m.role === "disc" && finite(low) && high > low) {
          trace.error_y = { type: "data", symmetric: false, array: [high - state[i].y], arrayminus: [state[i].y - low], color: trace.marker.color, thickness: 1.4, width: 0 };
        }
      });
      // large circles first, so that small ones lie on top and can be pointed at
      const order = data.map((_, i) => i).sort((a, b) => Math.floor(state[b].r) - Math.floor(state[a].r) || a - b);
      const layout = themed({ ...figure.layout, annotations: annotations(drawn, xr, yr, div.clientWidth, heaviest ? meta.sizes[length] : ""), shapes: shapes(yr) });
      layout.xaxis.range = xr;
      // over most of a decade, whole numbers at 1, 2 and 5 instead of bare digits between the decades
      layout.xaxis.tickformat = "~s";
      layout.xaxis.dtick = xr[1] - xr[0] > 0.8 ? "D2" : undefined;
      layout.yaxis.range = meta.lower ? [yr[1], yr[0]] : yr;
      layout.xaxis.title = { ...layout.xaxis.title, text: `${meta.measures[measure] || "speed"}: tokens/s at ${length} tokens, log scale` };
      layout.yaxis.title = { ...layout.yaxis.title, text: `${meta.metric} at ${at} tokens<br>${meta.lower ? "lower is better, axis reversed" : "higher is better"}` };
      width = div.clientWidth;
      Plotly.react(div, order.map((i) => data[i]), layout, config);
    }

    function shapes(yr) {
      const inside = meta.lines.filter((l) => l.value >= yr[0] && l.value <= yr[1]);
      return inside.map((l) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: l.value, y1: l.value, layer: "below", line: { color: ink("--faint"), width: 1, dash: "dash" } }));
    }

    function annotations(drawn, xr, yr, full, largest) {
      const margin = figure.layout.margin;
      const w = Math.max(full - margin.l - margin.r, 50), h = figure.layout.height - margin.t - margin.b;
      const down = (value) => { const share = (value - yr[0]) / (yr[1] - yr[0]); return (meta.lower ? share : 1 - share) * h; };
      const circles = drawn.map((s) => [((Math.log10(s.x) - xr[0]) / (xr[1] - xr[0])) * w, down(s.y), s.r]);
      const texts = drawn.map((s) => (drawn.length > NAMED ? String(s.m.key) : s.m.name));
      const pen = document.createElement("canvas").getContext("2d");
      pen.font = `12px ${figure.layout.font.family}`;
      // parsed as a document that is never shown: the escaped text becomes the letters that will be drawn
      const letters = (text) => new DOMParser().parseFromString(text, "text/html").body.textContent;
      const sizes = texts.map((text) => [pen.measureText(letters(text)).width + 8, 18]);
      const centres = places(circles, sizes, [0, 0, w, h]);
      const names = drawn.map((s, i) => ({
        x: Math.log10(s.x), y: s.y, text: texts[i], ax: centres[i][0] - circles[i][0], ay: centres[i][1] - circles[i][1], font: { size: 12 },
        showarrow: true, arrowhead: 0, arrowwidth: 0.8, arrowcolor: ink("--faint"), standoff: s.r, borderpad: 1, bgcolor: ink("--card"), captureevents: false,
        name: "name",
      }));
      names.forEach((name, i) => {
        const away = Math.hypot(Math.max(Math.abs(name.ax) - sizes[i][0] / 2, 0), Math.max(Math.abs(name.ay) - sizes[i][1] / 2, 0)) - drawn[i].r;
        if (away < 9) name.arrowcolor = "rgba(0,0,0,0)";
      });
      const inside = meta.lines.map((l) => Math.min(Math.max(l.value, yr[0]), yr[1]));
      const rows = spread(inside.map(down), 15, 0, h);
      const lines = meta.lines.map((l, i) => {
        const outside = inside[i] === l.value ? "" : (l.value > yr[1]) === meta.lower ? " ↓" : " ↑";
        return { xref: "paper", yref: "paper", x: 1, y: 1 - rows[i] / h, xanchor: "left", yanchor: "middle", showarrow: false, xshift: 6,
          text: `${l.name} ${+l.value.toPrecision(3)}${outside}`, font: { size: 11, color: ink("--faint") } };
      });
      const arrow = { xref: "paper", yref: "paper", x: 1, y: 1, ax: -36, ay: 26, text: "better", showarrow: true, arrowhead: 2, arrowwidth: 1.3, arrowcolor: ink("--faint"), font: { size: 11, color: ink("--faint") } };
      const scale = { xref: "paper", yref: "paper", x: 0, y: 1, xanchor: "left", yanchor: "bottom", yshift: 6, showarrow: false,
        text: largest ? `largest circle: ${largest}` : "memory was not measured: all circles alike", font: { size: 11, color: ink("--faint") } };
      return [...names, ...lines, arrow, scale];
    }

    panel.querySelectorAll("select").forEach((select) => select.addEventListener("change", draw));
    window.addEventListener("resize", () => { if (div.clientWidth !== width) draw(); });
    return draw;
  }

  // Each line is named in the right margin, at the height of its last point.
  function lines(panel, div, figure) {
    const scaled = (axis, value) => (figure.layout[axis].type === "log" ? Math.log10(value) : value);
    return () => {
      const off = new Set([...panel.querySelectorAll('.chip[aria-pressed="false"]')].map((chip) => chip.dataset.key));
      const data = figure.data.map((trace) => ({
        ...trace, visible: !off.has(String(trace.meta.key)), line: { ...trace.line, color: lifted(trace.meta.colour) }, marker: { ...trace.marker, color: lifted(trace.meta.colour) },
      }));
      const points = data.filter((t) => t.visible).flatMap((t) => t.x.map((x, i) => [scaled("xaxis", x), scaled("yaxis", t.y[i]), t]));
      const known = points.filter(([, y]) => Number.isFinite(y) && y !== null);
      const layout = themed(figure.layout);
      if (known.length) {
        const ys = known.map(([, y]) => y), xs = known.map(([x]) => x);
        layout.yaxis.range = range(ys, 0.08, Math.max(...ys) === Math.min(...ys) ? 0.1 * Math.abs(ys[0]) || 0.1 : 0);
        layout.xaxis.range = range(xs, 0.04, Math.max(...xs) === Math.min(...xs) ? 0.1 : 0);
        layout.annotations = [...(figure.layout.annotations || []), ...ends(known, layout)];
      }
      Plotly.react(div, data, layout, config);
    };

    function ends(known, layout) {
      const last = new Map();
      for (const point of known) {
        const key = point[2].meta.key;
        if (!last.has(key) || point[0] >= last.get(key)[0]) last.set(key, point);
      }
      const margin = figure.layout.margin, h = figure.layout.height - margin.t - margin.b;
      const [low, high] = layout.yaxis.range, marks = [...last.values()];
      if (marks.length * 12 > h) return [];
      const rows = spread(marks.map(([, y]) => ((y - low) / (high - low)) * h), 14, 0, h);
      return marks.map(([, , trace], i) => ({
        xref: "paper", yref: "paper", x: 1, y: rows[i] / h, xanchor: "left", yanchor: "middle", xshift: 5, showarrow: false,
        text: marks.length > NAMED ? String(trace.meta.key) : trace.meta.name, font: { size: 11, color: lifted(trace.meta.colour) },
      }));
    }
  }

  const redraws = [];
  document.querySelectorAll(".panel").forEach((panel) => {
    const draws = [...panel.querySelectorAll(".plot")].map((div) => {
      const figure = JSON.parse(document.getElementById(div.dataset.figure).textContent);
      const draw = (figure.layout.meta.kind === "bubbles" ? bubbles : lines)(panel, div, figure);
      draw();
      return draw;
    });
    redraws.push(...draws);
    panel.querySelectorAll(".chip").forEach((chip) => chip.addEventListener("click", () => {
      chip.setAttribute("aria-pressed", chip.getAttribute("aria-pressed") === "false" ? "true" : "false");
      draws.forEach((draw) => draw());
    }));
  });
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((draw) => draw()));

  document.querySelectorAll("table.sortable").forEach((table) => {
    table.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => {
      const head = button.closest("th"), column = head.cellIndex, body = table.tBodies[0];
      const up = head.getAttribute("aria-sort") !== "ascending";
      table.querySelectorAll("th").forEach((th) => th.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const value = (row) => row.cells[column].dataset.value;
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        // cells without a value stay last in both directions
        if (x === "" || y === "") return (x === "") - (y === "");
        const order = Number.isNaN(+x) || Number.isNaN(+y) ? x.localeCompare(y) : x - y;
        return up ? order : -order;
      });
      body.append(...rows);
    }));
  });
  document.documentElement.dataset.ready = "yes";
})();
