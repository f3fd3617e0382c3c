// The dashboard's own script: ages that count on, figures that turn grey, live pages, dialogs, copying, charts.
// Every page can be read without it.
"use strict";
(() => {
  const REFRESH_MS = 5000;
  const plots = new Map();
  const stale = Number(document.body.dataset.staleSeconds);
  const skew = Date.parse(document.querySelector("footer time").dateTime) - Date.now();

  function ago(seconds) {
    if (seconds < 1) return "just now";
    for (const [unit, of] of [["s", 60], ["min", 60], ["h", 48]]) {
      if (seconds < of) return `${Math.floor(seconds)} ${unit} ago`;
      seconds /= unit === "h" ? 24 : of;
    }
    return `${Math.floor(seconds)} days ago`;
  }

  function age(moment) {
    return (Date.now() + skew - Date.parse(moment)) / 1000;
  }

  function tick() {
    for (const element of document.querySelectorAll("time[data-ago]")) {
      const text = ago(age(element.dateTime));
      if (element.textContent !== text) element.textContent = text;
    }
    for (const element of document.querySelectorAll("[data-read]")) {
      const old = !element.dataset.read || age(element.dataset.read) > stale;
      const shown = element.matches("tr") ? element : element.closest("[data-figures]");
      if (shown) shown.classList.toggle("stale", old);
    }
  }

  // Parts of a page that are marked `data-live` are fetched again while somebody looks at them.
  function refresh() {
    if (document.hidden || document.querySelector("dialog[open]") || !getSelection().isCollapsed) return;
    for (const log of document.querySelectorAll("[data-tail]")) {
      if (log.scrollTop + log.clientHeight < log.scrollHeight - 40) return;  // somebody reads further up
    }
    for (const element of document.querySelectorAll("[data-live]")) htmx.trigger(element, "refresh");
    drawAll();
  }

  function drawAll() {
    for (const element of document.querySelectorAll("[data-chart]")) draw(element).catch(() => setOffline(true));
  }

  function setOffline(is) {
    document.getElementById("offline").hidden = !is;
  }

  function prepare(root) {
    for (const button of root.querySelectorAll("[data-copy]")) button.hidden = false;
    for (const log of root.querySelectorAll("[data-tail]")) log.scrollTop = log.scrollHeight;
    tick();
  }

  async function draw(element) {
    if (typeof uPlot === "undefined") return;
    const answer = await fetch(element.dataset.chart);
    if (!answer.ok) return;
    const data = await answer.json();
    for (const read of element.closest("[data-figures]").querySelectorAll(".read")) {
      read.dataset.read = data.read_at;
      for (const time of read.querySelectorAll("time")) time.dateTime = time.title = data.read_at;
    }
    const style = getComputedStyle(document.documentElement);
    const colour = name => style.getPropertyValue(name).trim();
    const axis = {stroke: colour("--soft"), grid: {stroke: colour("--faint"), width: 1}, ticks: {stroke: colour("--line"), width: 1}};
    for (const chart of data.charts) {
      const place = element.querySelector(`[data-series="${chart.id}"]`);
      if (!place || !data.at.length) continue;
      const values = [data.at, ...chart.series.map(one => one.values)];
      const known = plots.get(place);
      if (known && known.series.length === values.length) {
        known.setData(values);
        continue;
      }
      place.textContent = "";
      const width = () => place.clientWidth - 20;
      const plot = new uPlot({
        width: width(), height: 190, cursor: {y: false}, tzDate: at => uPlot.tzDate(new Date(at * 1e3), "Etc/UTC"),
        series: [{label: "time"}, ...chart.series.map(one => ({
          label: one.label, stroke: colour(one.colour), width: 1.5, points: {show: data.at.length < 40, size: 4},
        }))],
        axes: [axis, {...axis, size: 64}],
        scales: {x: data.range ? {range: data.range} : {}, y: {range: (_, low, high) => [0, (high || 1) * 1.08]}},
      }, values, place);
      plots.set(place, plot);
      new ResizeObserver(() => plot.setSize({width: width(), height: 190})).observe(place.parentElement);
    }
  }

  document.addEventListener("click", event => {
    const copy = event.target.closest("[data-copy]");
    if (copy) {
      navigator.clipboard.writeText(copy.dataset.copy).then(() => {
        copy.textContent = document.getElementById("said").textContent = "Copied";  // its name is the command
        setTimeout(() => { copy.textContent = "Copy"; }, 1500);
      });
    }
    const dialog = document.getElementById("dialog");
    if (dialog.open && event.target.closest("[data-close]")) {
      event.preventDefault();
      dialog.close();
    }
  });
  document.addEventListener("keydown", event => {
    const search = document.querySelector("input[type=search]");
    if (event.key === "/" && search && !/^(INPUT|TEXTAREA)$/.test(document.activeElement.tagName)) {
      event.preventDefault();
      search.select();
    }
  });
  // What a person does to a part of the page outlives its refresh: focus, ticks, open details, sideways scrolling.
  let kept = null;
  let pressed = false;

  // What a person can reach with the keyboard, by a name that the same thing has in the part that replaces this one.
  function controls(live) {
    const found = new Map();
    const seen = new Map();
    for (const one of live.querySelectorAll("a[href], button, input, summary, [tabindex]")) {
      const fields = one.form ? [...one.form.elements].filter(field => field.type === "hidden").map(field => field.value) : [];
      const row = one.closest("tr")?.querySelector("th")?.textContent;
      const name = [one.id, one.tagName, one.getAttribute("href"), one.name, one.form?.getAttribute("action"), ...fields, row].join("\n");
      seen.set(name, (seen.get(name) || 0) + 1);
      found.set(`${name}\n${seen.get(name)}`, one);
    }
    return found;
  }

  function keep(live) {
    const now = [...controls(live)];
    kept = {
      focused: now.find(([, one]) => one === document.activeElement)?.[0],
      ticked: now.filter(([, one]) => one.checked).map(([name]) => name),
      open: now.filter(([, one]) => one.parentElement.open).map(([name]) => name),
      scrolled: [...live.querySelectorAll(".scroll")].map(one => one.scrollLeft),
    };
  }

  function restore(live) {
    const now = controls(live);
    for (const name of kept.ticked) if (now.has(name)) now.get(name).checked = true;
    for (const name of kept.open) if (now.has(name)) now.get(name).parentElement.open = true;
    live.querySelectorAll(".scroll").forEach((one, index) => { one.scrollLeft = kept.scrolled[index] || 0; });
    now.get(kept.focused)?.focus({preventScroll: true});
    kept = null;
  }

  // A screen reader is told what changed, once: what is replaced itself every few seconds cannot be a live region.
  let said = document.querySelector("[data-say]")?.dataset.say;

  function say() {
    const now = document.querySelector("[data-say]")?.dataset.say;
    if (now && now !== said) document.getElementById("said").textContent = now;
    said = now;
  }

  addEventListener("pointerdown", () => { pressed = true; }, true);
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => setTimeout(() => { pressed = false; }), true);
  document.addEventListener("htmx:beforeSwap", event => {
    const target = event.detail.target;
    // A refused action is shown in its dialog; a page that failed to refresh stays as it is, and turns grey.
    if (event.detail.isError && target.id === "dialog") event.detail.shouldSwap = true;
    if (target.id !== "live") return;
    // A click under way must reach what it was meant for; a dialog gives the focus back to what opened it.
    if (pressed || document.getElementById("dialog").open) event.detail.shouldSwap = false;
    else keep(target);
  });
  document.addEventListener("htmx:afterSwap", event => {
    const target = event.detail.target;
    if (target.id === "dialog" && !target.open) target.showModal();
    const live = document.getElementById("live");
    if (kept && live) restore(live);
    prepare(document);
    say();
  });
  document.addEventListener("htmx:sendError", () => setOffline(true));
  document.addEventListener("htmx:timeout", () => setOffline(true));
  document.addEventListener("htmx:afterRequest", event => { if (event.detail.successful) setOffline(false); });
  document.addEventListener("visibilitychange", refresh);
  setInterval(tick, 1000);
  setInterval(refresh, REFRESH_MS);
  prepare(document);
  drawAll();
})();
