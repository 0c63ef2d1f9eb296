// Making and changing elements. Text is always set as text: names come from jobs and are untrusted.

const SVG = "http://www.w3.org/2000/svg";

function put(node, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false));
  return node;
}

export function h(tag, properties = {}, ...children) {
  return put(document.createElement(tag), properties, children);
}

export function svg(tag, properties = {}, ...children) {
  return put(document.createElementNS(SVG, tag), properties, children);
}

/** Set the text of a node only where it differs: nothing is laid out anew for equal text. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Replace the children of a node when `key` is not what it was at the last call. */
export function refill(node, key, make) {
  if (node.dataset.key === key) return false;
  node.dataset.key = key;
  const focused = node.contains(document.activeElement) ? document.activeElement.id : "";
  node.replaceChildren(...[make()].flat(Infinity).filter(Boolean));
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  return true;
}

export function panel(title, properties, ...children) {
  const { aside = null, class: extra = "", ...rest } = properties;
  return h("section", { class: `panel ${extra}`, "aria-label": title, ...rest },
    h("div", { class: "panel-head" }, h("h2", {}, title), aside), ...children);
}

export function table(columns, rows, caption) {
  const numeric = columns.map((c) => c.startsWith(">"));
  const head = columns.map((c, i) => h("th", { scope: "col", class: numeric[i] ? "num" : "" }, c.replace(/^>/, "")));
  const body = rows.map((row) => h("tr", row.properties ?? {},
    (row.cells ?? row).map((cell, i) => h("td", { class: numeric[i] ? "num" : "" }, cell ?? "–"))));
  const scroller = h("div", { class: "scroller", role: "group", "aria-label": caption });
  wide.observe(scroller);
  return put(scroller, {}, [h("table", {},
    h("caption", { class: "hidden" }, caption), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body))]);
}

/** What is wider than its place is moved by arrow keys, once it has the focus. */
const wide = new ResizeObserver((all) => {
  for (const { target } of all) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});

export function nothing(title, text) {
  return h("div", { class: "nothing" }, h("p", { class: "nothing-title" }, title), h("p", {}, text));
}

/** Buttons of which one is chosen; arrow keys move, as in a radio group. */
export function choice(label, options, chosen, onchoose) {
  const buttons = options.map(([value, text, disabled]) => h("button", {
    type: "button", role: "radio", "data-value": value, "aria-checked": String(value === chosen),
    tabindex: value === chosen ? "0" : "-1", disabled: disabled || false,
    onclick: () => set(value),
  }, text));
  function set(value) {
    for (const b of buttons) {
      const on = b.dataset.value === value;
      b.setAttribute("aria-checked", String(on));
      b.tabIndex = on ? 0 : -1;
    }
    onchoose(value);
  }
  return h("div", { class: "choice", role: "radiogroup", "aria-label": label, onkeydown: (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const usable = buttons.filter((b) => !b.disabled);
    const at = usable.indexOf(document.activeElement);
    const next = usable[(at + step + usable.length) % usable.length];
    next.focus();
    set(next.dataset.value);
  } }, buttons);
}
