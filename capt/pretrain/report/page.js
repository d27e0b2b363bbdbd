
// Shows the values of the curves of a panel at the step under the pointer. The page loads nothing.
"use strict";
const number = value => Number(value.toPrecision(5)).toLocaleString("en", {maximumSignificantDigits: 5});
const element = (tag, name, parent) => {
  const made = document.createElement(tag);
  made.className = name;
  parent.append(made);
  return made;
};
for (const figure of document.querySelectorAll("figure[data-panels]")) {
  const panels = JSON.parse(figure.dataset.panels);
  const image = figure.querySelector("img");
  let tip = null;
  let rule = null;
  const clear = () => {
    tip?.remove();
    rule?.remove();
  };
  const show = event => {
    clear();
    const frame = image.getBoundingClientRect();
    const x = (event.clientX - frame.left) / frame.width;
    const y = 1 - (event.clientY - frame.top) / frame.height;
    const panel = panels.find(({box}) => box[0] <= x && x <= box[2] && box[1] <= y && y <= box[3]);
    if (!panel || !panel.lines.length) return;
    const [low, high, isLog] = panel.x;
    const scale = value => isLog ? Math.log(value) : value;
    const place = value => (scale(value) - scale(low)) / (scale(high) - scale(low));
    const pointer = (x - panel.box[0]) / (panel.box[2] - panel.box[0]);
    const distance = point => Math.abs(place(point[0]) - pointer);
    const nearest = points => points.reduce((best, point) => distance(point) < distance(best) ? point : best);
    const found = panel.lines.map(line => ({...line, point: nearest(line.points)}));
    const at = nearest(found.map(line => line.point))[0];
    const left = (panel.box[0] + place(at) * (panel.box[2] - panel.box[0])) * frame.width + image.offsetLeft;
    rule = element("div", "rule", figure);
    rule.style.left = `${left}px`;
    rule.style.top = `${image.offsetTop + (1 - panel.box[3]) * frame.height}px`;
    rule.style.height = `${(panel.box[3] - panel.box[1]) * frame.height}px`;
    tip = element("div", "tip", figure);
    const xName = panel.names[String(at)] ?? number(at);
    element("b", "", tip).textContent = `${panel.title[1]}, ${panel.title[0]} ${xName}`;
    for (const line of found.slice(0, 20)) {
      const row = element("div", "", tip);
      element("i", "", row).style.background = line.colour;
      const own = line.point[0] === at ? "" : ` (at ${panel.names[String(line.point[0])] ?? number(line.point[0])})`;
      row.append(`${line.name} ${number(line.point[1])}${own}`);
    }
    if (found.length > 20) element("div", "", tip).textContent = `and ${found.length - 20} more`;
    const room = Math.max(figure.clientWidth, image.offsetWidth) - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(left + 12, room))}px`;
    tip.style.top = `${image.offsetTop + (1 - y) * frame.height + 16}px`;
  };
  figure.addEventListener("pointermove", show);
  figure.addEventListener("pointerdown", show);
  figure.addEventListener("pointerleave", clear);
}
