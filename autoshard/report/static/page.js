// Unpacks plotly.js, which the page holds as gzip in base64, and draws each chart from the JSON beside it.
(async () => {
  const charts = document.querySelectorAll(".chart");
  const isDark = matchMedia("screen and (prefers-color-scheme: dark)");
  // The house's colours of texts, lines and paper, and of scales with numbers on them, as they are on dark paper.
  const onDark = { "#1c2733": "#e4e9ee", "#e3e7ec": "#38424d", white: "#1a2129" };
  const scalesOnDark = { "#f3f7fa": "#1a2129", "#dcecf7": "#16354a", "#56B4E9": "#0072B2" };
  const themed = (key, value) => (/color$/.test(key) && onDark[value]) || (key === "1" && scalesOnDark[value]) || value;
  const draw = (chart, dark) => {
    const { data, layout } = JSON.parse(chart.nextElementSibling.textContent, dark ? themed : undefined);
    return Plotly.react(chart, data, layout, { responsive: true, displayModeBar: false });
  };
  const drawAll = async (dark) => {
    for (const chart of charts) await draw(chart, dark);
    if (wanted) await mark(true);
  };
  // The map of tables by ranks: tables that are looked for are marked, and named as all are that there is room for.
  const map = document.getElementById("chart-map");
  const wanted = document.getElementById("find-table");
  const ROW_PX = 14, TICK_PX = 28, MARGINS_PX = 120, NAME_ROOM = 20;
  const written = (name) => new Option(name.length > NAME_ROOM ? `${name.slice(0, NAME_ROOM - 1)}…` : name).innerHTML;
  const mark = async (isNew) => {
    const { data: [{ meta: names }], layout: { xaxis, yaxis } } = JSON.parse(map.nextElementSibling.textContent);
    const text = wanted.value.trim().toLowerCase();
    const found = names.flatMap((name, row) => (text && name.toLowerCase().includes(text) ? [row] : []));
    const some = Math.ceil((map.clientHeight - MARGINS_PX) / ROW_PX / 2);
    const [first, last] = !isNew ? [...map.layout.yaxis.range].sort((one, other) => one - other)
      : found.length ? [Math.max(-0.5, found[0] - some), Math.min(names.length - 0.5, found[found.length - 1] + some)]
      : [-0.5, names.length - 0.5];
    const rowPx = (map.clientHeight - MARGINS_PX) / (last - first);
    const candidates = rowPx >= ROW_PX ? [...names.keys()] : found;
    const named = [];
    for (const row of candidates) if (!named.length || (row - named[named.length - 1]) * rowPx >= ROW_PX) named.push(row);
    let step = xaxis.dtick;
    const [lowest, highest] = map.layout.xaxis.range;
    while (((highest - lowest) / step) * TICK_PX > map.clientWidth / 2) step *= 2;
    await Plotly.relayout(map, {
      shapes: found.map((row) => ({
        type: "rect", xref: "paper", x0: 0, x1: 1, y0: row - 0.5, y1: row + 0.5, layer: "below",
        fillcolor: "rgba(213,94,0,0.25)", line: { width: 1, color: "#D55E00" },
      })),
      "xaxis.dtick": step,
      "yaxis.range": [last, first],
      "yaxis.tickvals": named.length ? named : yaxis.tickvals,
      "yaxis.ticktext": named.length ? named.map((row) => written(names[row])) : yaxis.ticktext,
    });
    document.getElementById("found-tables").textContent = !text ? "" : `${found.length.toLocaleString("en")} of ${names.length.toLocaleString("en")} tables`;
  };
  try {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (char) => char.charCodeAt(0));
    const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
    await drawAll(isDark.matches);
    if (wanted) {
      wanted.addEventListener("input", () => mark(true));
      map.on("plotly_relayout", (changed) => {
        if (["autosize", "yaxis.range[0]", "yaxis.autorange"].some((name) => name in changed)) mark("yaxis.autorange" in changed);
      });
    }
    isDark.addEventListener("change", () => drawAll(isDark.matches));
    addEventListener("beforeprint", () => drawAll(false));
    addEventListener("afterprint", () => drawAll(isDark.matches));
  } catch (error) {
    for (const chart of charts) {
      if (!chart.hasChildNodes()) chart.textContent = "This browser cannot draw the chart; the tables hold its numbers.";
    }
    throw error;
  }
})();
