"use strict";
(() => {
  const root = document.documentElement;
  const $ = (id) => document.getElementById(id);
  const all = (selector) => Array.from(document.querySelectorAll(selector));
  const data = JSON.parse($("data").textContent);
  const coarse = matchMedia("(pointer: coarse)").matches;
  const CONFIG = { displayModeBar: false, responsive: true, displaylogo: false, showTips: false };
  const hidden = new Set();
  const hasButtons = new Set(all(".keys").map((keys) => keys.dataset.figure));
  const drawn = new Map();

  /* The theme: colours are read from the style sheet, so figures and text always agree. */
  const read = () => {
    const style = getComputedStyle(root);
    const colour = (role) => style.getPropertyValue("--" + role).trim();
    const rgba = (role, alpha) => {
      const hex = colour(role);
      const part = (at) => parseInt(hex.slice(at, at + 2), 16);
      return alpha === undefined ? hex : `rgba(${part(1)},${part(3)},${part(5)},${alpha})`;
    };
    return { colour, rgba, font: getComputedStyle(document.body).fontFamily };
  };
  let theme = read();

  /* In the data a colour is an object {"$": role}, which no text can be mistaken for. */
  const fill = (value) => {
    if (Array.isArray(value)) return value.map(fill);
    if (value === null || typeof value !== "object") return value;
    if ("$" in value) return theme.rgba(value.$, value.alpha);
    return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, fill(item)]));
  };
  const axis = (own) => ({
    gridcolor: theme.colour("grid"), linecolor: theme.colour("rule"), zerolinecolor: theme.colour("soft"),
    tickcolor: theme.colour("rule"), automargin: true, ...own,
    title: { font: { size: 12.5, color: theme.colour("soft") }, standoff: 10, ...(own || {}).title },
  });
  const layout = (own) => ({
    font: { family: theme.font, size: 12.5, color: theme.colour("soft") },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, autosize: true,
    dragmode: coarse ? false : "zoom",
    hoverlabel: {
      bgcolor: theme.colour("raised"), bordercolor: theme.colour("rule"), align: "left",
      font: { color: theme.colour("ink"), family: theme.font, size: 12.5 }, namelength: 28,
    },
    ...own, xaxis: axis(own.xaxis), yaxis: axis(own.yaxis),
  });
  /* Wheels: in rows that fit the width, each with its name above. */
  const wheels = (own, count, width) => {
    const columns = Math.min(count, width < 600 ? 2 : Math.max(2, Math.min(4, Math.ceil(count / 2))));
    const rows = Math.ceil(count / columns);
    const tall = Math.min(width / columns, 270) + 56;
    for (let n = 0; n < count; n += 1) {
      const x = (n % columns) + 0.5;
      const y = Math.floor(n / columns);
      own[n ? `polar${n + 1}` : "polar"].domain = {
        x: [(x - 0.4) / columns, (x + 0.4) / columns], y: [1 - (y + 0.93) / rows, 1 - (y + 58 / tall) / rows],
      };
      Object.assign(own.annotations[n], { x: x / columns, y: 1 - y / rows, xanchor: "center", yanchor: "top" });
    }
    own.height = rows * tall + own.margin.t + own.margin.b;
  };
  const draw = (name, figure) => {
    const place = $("plot-" + name);
    if (!place || !figure) return null;
    drawn.set(name, figure);
    const traces = fill(figure.data).map((trace) => (hasButtons.has(name) && hidden.has(trace.meta && trace.meta.arm) ? { ...trace, visible: false } : trace));
    const own = fill(figure.layout);
    if (own.showlegend && place.clientWidth < 600) own.height += 21 * traces.length;
    if (own.meta && own.meta.square) own.height = Math.min(own.height, place.clientWidth + 90);
    if (own.meta && own.meta.wheels) wheels(own, own.meta.wheels, place.clientWidth);
    return Plotly.react(place, traces, layout(own), CONFIG);
  };
  const redraw = () => {
    theme = read();
    drawn.forEach((figure, name) => draw(name, figure));
    showMaps();
    root.dataset.drawn = theme.colour("paper");
  };

  /* Figures with variants to choose from, and buttons that show and hide arms. */
  const drawVariant = (name) => draw(name, data.figures[name][$(name + "-variant") ? Number($(name + "-variant").value) : 0]);
  all(".variant").forEach((select) => select.addEventListener("input", () => drawVariant(select.dataset.figure)));
  all(".keys button").forEach((button) => button.addEventListener("click", () => {
    const arm = Number(button.dataset.arm);
    if (hidden.has(arm)) hidden.delete(arm); else hidden.add(arm);
    all(`.keys button[data-arm="${arm}"]`).forEach((item) => item.setAttribute("aria-pressed", String(!hidden.has(arm))));
    hasButtons.forEach(drawVariant);
  }));

  /* The value of a slider, for eyes and for screen readers. */
  const showValue = (slider, text) => {
    $(slider.id + "-text").textContent = text;
    slider.setAttribute("aria-valuetext", text);
  };

  /* Attention maps: one byte per weight, 127 sign(w) sqrt(|w| / scale), the rows of a lower triangle. */
  const SIDES = ["first", "second"];
  let view = null;
  const unpack = (head) => {
    const text = atob(head.data);
    const rows = [];
    for (let at = 0, length = 1; at < text.length; at += length, length += 1) {
      const row = [];
      for (let s = 0; s < length; s += 1) {
        const byte = (text.charCodeAt(at + s) << 24) >> 24;
        row.push(head.scale * Math.sign(byte) * (byte / 127) ** 2);
      }
      rows.push(row);
    }
    return rows;
  };
  const escape = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const weight = (value) => (Math.abs(value) < 5e-5 ? "0" : value.toFixed(Math.abs(value) < 0.1 ? 4 : 3).replace("-", "\u2212"));
  const setMax = (slider, max) => {
    slider.max = String(Math.max(0, max));
    slider.disabled = max < 1;
    return Math.min(Number(slider.value), Math.max(0, max));
  };
  const chosen = (what, otherwise) => ($("map-" + what) ? Number($("map-" + what).value) : otherwise);
  const showMaps = () => {
    if (!$("maps") || !data.maps.length) return;
    const excerpt = chosen("excerpt", 0);
    const { tokens, breaks } = data.excerpts[excerpt];
    const arms = SIDES.map((side, n) => data.maps[chosen(side, n)]);
    const layer = setMax($("map-layer"), Math.max(...arms.map((arm) => arm.layers.length)) - 1);
    const stacks = arms.map((arm) => arm.maps[excerpt][Math.min(layer, arm.layers.length - 1)]);
    const head = setMax($("map-head"), Math.max(...stacks.map((heads) => heads.length)) - 1);
    const token = setMax($("map-token"), tokens.length - 1);
    const heads = stacks.map((own) => Math.min(head, own.length - 1));
    const maps = stacks.map((own, side) => unpack(own[heads[side]]));
    const largest = maps.flat(2).reduce((largest, value) => Math.max(largest, Math.abs(value)), 1e-9);
    const negative = maps.flat(2).some((value) => value < -1e-4);
    showValue($("map-layer"), `${arms[0].layers[Math.min(layer, arms[0].layers.length - 1)]} of ${arms[0].depth}`);
    showValue($("map-head"), `${head + 1} of ${Math.max(...stacks.map((own) => own.length))}`);
    SIDES.forEach((side, n) => {
      const own = arms[n].layers[Math.min(layer, arms[n].layers.length - 1)];
      const which = arms[n].pooled ? "" : `, head ${heads[n] + 1} of ${stacks[n].length}`;
      $(`map-${side}-title`).textContent = `${arms[n].name}, layer ${own}${which}`;
      drawMap(side, maps[n], tokens, largest, token);
    });
    $("scale-low").textContent = negative ? weight(-largest) : "0";
    $("scale-high").textContent = weight(largest);
    const low = negative ? theme.colour("less") : theme.colour("paper");
    $("scale-ramp").style.background = `linear-gradient(to right, ${low}, ${negative ? theme.colour("paper") + ", " : ""}${theme.colour("more")})`;
    view = { maps, tokens, breaks, largest };
    showToken();
  };
  const showToken = () => {
    const token = Number($("map-token").value);
    showValue($("map-token"), `${token + 1}, \u201c${view.tokens[token]}\u201d`);
    SIDES.forEach((side, n) => drawText(side, view.maps[n], view.tokens, view.breaks, view.largest, token));
  };
  const row = (token) => ({ type: "rect", x0: -0.5, x1: token + 0.5, y0: token - 0.5, y1: token + 0.5, line: { color: theme.colour("ink"), width: 1.5 } });
  const drawMap = (side, map, tokens, largest, token) => {
    const place = $("plot-map-" + side);
    labelAxes(side, tokens, place.parentElement.clientWidth);
    const root = (value) => Math.sign(value) * Math.sqrt(Math.abs(value) / largest);
    const z = map.map((line) => [...line.map(root), ...Array(tokens.length - line.length).fill(null)]);
    const safe = tokens.map(escape);
    const texts = map.map((line, t) => line.map((value, s) => `<b>${safe[t]}</b> (${t + 1}) to <b>${safe[s]}</b> (${s + 1}): <b>${weight(value)}</b>`));
    const heat = {
      type: "heatmap", z, text: texts, hovertemplate: "%{text}<extra></extra>", hoverongaps: false, zmin: -1, zmax: 1, showscale: false,
      colorscale: [[0, theme.colour("less")], [0.5, theme.colour("paper")], [1, theme.colour("more")]],
    };
    const plain = { showticklabels: false, ticks: "", showgrid: false, zeroline: false, fixedrange: true, automargin: false };
    const own = {
      height: Math.max(200, Math.min(place.clientWidth, 560)), margin: { l: 0, r: 0, t: 0, b: 0 }, shapes: [row(token)], dragmode: false,
      xaxis: plain, yaxis: { ...plain, autorange: "reversed" },
    };
    Plotly.react(place, [heat], { ...layout(own), plot_bgcolor: theme.colour("raised") }, CONFIG);
  };
  /* Token labels along both sides: plain text, which is much faster than plotly ticks. */
  const labelAxes = (side, tokens, width) => {
    const cell = width / (tokens.length + 3);
    const short = tokens.map((token) => (token.length > 9 ? token.slice(0, 8) + "\u2026" : token));
    const wide = short.filter((token) => token.length > 2).length > tokens.length / 8;
    ["xs", "ys"].forEach((along) => {
      const strip = $(`map-${side}-${along}`);
      strip.hidden = cell < 6.2;
      strip.style.fontSize = Math.min(11, Math.max(7, cell)) + "px";
      strip.classList.toggle("tall", wide);
      const cut = (token) => (wide || token.length < 3 ? token : token[0] === "\u27e8" ? "\u25a0" : "\u00b7");
      strip.replaceChildren(...short.map((token) => Object.assign(document.createElement("span"), { textContent: cut(token) })));
    });
  };
  const drawText = (side, map, tokens, breaks, largest, token) => {
    const place = $(`map-${side}-words`);
    const ends = new Set(breaks);
    place.replaceChildren(...tokens.flatMap((name, s) => {
      const span = document.createElement("span");
      const value = s <= token ? map[token][s] : 0;
      span.textContent = name.replace(/\u2423/g, " ");
      span.dataset.token = String(s);
      if (s > token) span.className = "later";
      else {
        const alpha = 0.5 * Math.sqrt(Math.abs(value) / largest);
        span.style.backgroundColor = theme.rgba(value < 0 ? "less" : "more", alpha.toFixed(3));
        if (value < -1e-4) span.classList.add("negative");
      }
      if (s === token) span.classList.add("here");
      return ends.has(s) ? [span, document.createTextNode("\n")] : [span];
    }));
    const top = map[token].map((value, s) => [value, s]).sort((a, b) => Math.abs(b[0]) - Math.abs(a[0])).slice(0, 3);
    $(`map-${side}-readout`).textContent = `Token ${token + 1}, \u201c${tokens[token]}\u201d, attends most to ` +
      top.map(([value, s]) => `\u201c${tokens[s]}\u201d (${s + 1}): ${weight(value)}`).join(", ") + ".";
  };
  SIDES.forEach((side) => {
    if (!$("maps")) return;
    $(`map-${side}-words`).addEventListener("click", (event) => {
      const token = event.target.dataset && event.target.dataset.token;
      if (token === undefined) return;
      $("map-token").value = token;
      moveToken();
    });
  });
  const moveToken = () => {
    SIDES.forEach((side) => Plotly.relayout($("plot-map-" + side), { shapes: [row(Number($("map-token").value))] }));
    showToken();
  };
  if ($("maps")) {
    ["map-first", "map-second", "map-excerpt", "map-layer", "map-head"].forEach((id) => $(id) && $(id).addEventListener("input", showMaps));
    $("map-token").addEventListener("input", moveToken);
  }

  /* Theme, downloads, printing. */
  const THEMES = ["", "light", "dark"];
  const THEME_NAMES = { "": "Theme: system", light: "Theme: light", dark: "Theme: dark" };
  const setTheme = (name) => {
    if (name) root.dataset.theme = name; else delete root.dataset.theme;
    redraw();
  };
  $("theme").addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(root.dataset.theme || "") + 1) % THEMES.length];
    $("theme").textContent = THEME_NAMES[next];
    setTheme(next);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  all("[data-save]").forEach((button) => button.addEventListener("click", () =>
    Plotly.downloadImage($("plot-" + button.dataset.save), { format: "svg", filename: "qkflow-" + button.dataset.save })));
  let before = null;
  addEventListener("beforeprint", () => {
    if (before) return;
    before = { theme: root.dataset.theme || "", closed: all("details:not([open])") };
    before.closed.forEach((item) => { item.open = true; });
    setTheme("light");
    all(".plot.js-plotly-plot").forEach((place) => Plotly.relayout(place, { width: place.closest(".map") ? 320 : 660, ...(place.closest(".map") ? { height: 320 } : {}) }));
  });
  addEventListener("afterprint", () => {
    if (!before) return;
    before.closed.forEach((item) => { item.open = false; });
    setTheme(before.theme);
    before = null;
  });
  const regions = () => all(".scroll").forEach((box) => {
    if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0; else box.removeAttribute("tabindex");
  });
  addEventListener("resize", regions);
  all("details").forEach((item) => item.addEventListener("toggle", regions));

  all(".needs-script").forEach((item) => { item.hidden = false; });
  Object.keys(data.figures).forEach(drawVariant);
  if ($("maps")) {
    const last = data.excerpts[0].tokens.length - 1;
    $("map-token").max = String(last);
    $("map-token").value = String(data.token ?? Math.floor(last * 0.6));
  }
  showMaps();
  regions();
  root.dataset.ready = "yes";
})();
