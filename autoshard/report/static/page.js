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
  };
  try {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (char) => char.charCodeAt(0));
    const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
    await drawAll(isDark.matches);
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
