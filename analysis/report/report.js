// Shows the value of every run at the pointer, by the last step at or before it.
"use strict";
for (const plot of document.querySelectorAll("svg.percentile")) {
  const data = plot.dataset, curves = JSON.parse(data.curves), out = plot.nextElementSibling;
  const left = Number(data.left), right = Number(data.right), most = Math.log(Number(data.most));
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "line");
  cursor.setAttribute("class", "cursor"); cursor.setAttribute("visibility", "hidden");
  plot.append(cursor);
  const idle = out.textContent = "Hover over the plot for values.";
  const duration = s => s >= 1 ? s.toFixed(s < 10 ? 2 : 1) + " s"
    : (s * 1e3).toFixed(s < 0.01 ? 2 : s < 0.1 ? 1 : 0) + " ms";
  const show = event => {
    const box = plot.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * plot.viewBox.baseVal.width;
    const x = Math.min(right, Math.max(left, at));
    const percent = 100 * (1 - Math.exp(-(x - left) / (right - left) * most));
    const values = curves.map(curve => {
      let value = null;
      for (const [place, v] of curve.steps) { if (place > x) break; value = v; }
      return curve.name + " " + (value === null ? "–" : duration(value));
    });
    const digits = percent < 99 ? 1 : percent < 99.9 ? 2 : 3;
    out.textContent = percent.toFixed(digits) + " %:  " + values.join("  ·  ");
    for (const [key, value] of [["x1", x], ["x2", x], ["y1", 12], ["y2", 254]])
      cursor.setAttribute(key, value);
    cursor.setAttribute("visibility", "visible");
  };
  plot.addEventListener("pointermove", show);
  plot.addEventListener("pointerdown", show);
  plot.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden"); out.textContent = idle; });
}
