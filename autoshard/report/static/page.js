// Unpacks plotly.js, which the page holds as gzip in base64, and draws each chart from the JSON beside it.
(async () => {
  const charts = document.querySelectorAll(".chart");
  try {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (char) => char.charCodeAt(0));
    const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
    for (const chart of charts) {
      const { data, layout } = JSON.parse(chart.nextElementSibling.textContent);
      await Plotly.newPlot(chart, data, layout, { responsive: true, displayModeBar: false });
    }
  } catch (error) {
    for (const chart of charts) {
      if (!chart.hasChildNodes()) chart.textContent = "This browser cannot draw the chart; the tables hold its numbers.";
    }
    throw error;
  }
})();
