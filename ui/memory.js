// State that survives a reload: the visitor's token, the field values and the selected tab, per browser tab. Earlier prompts
// are shared by all tabs of the browser.
window.diffserve = (() => {
  const FORMS = "diffserve.form.", TOKEN = "diffserve.token", TAB = "diffserve.tab", PROMPTS = "diffserve.prompts";
  const MAX_CHARS = 200_000, MAX_PROMPTS = 50, MAX_PROMPT_CHARS = 4_000;

  function read(storage, key) {
    try { return JSON.parse(storage().getItem(key)); } catch { return null; }
  }
  function write(storage, key, value) {
    try { storage().setItem(key, JSON.stringify(value)); } catch { /* private window or full disk: works without storage */ }
  }
  const ours = () => window.sessionStorage, everybodys = () => window.localStorage;

  const forms = new Map();  // names of the fields of restored forms

  // Random token by which the server finds the images of this tab.
  function token() {
    let kept = read(ours, TOKEN);
    if (!/^[0-9a-f]{32}$/.test(kept)) {
      kept = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
      write(ours, TOKEN, kept);
    }
    return [kept];
  }

  // A change that gradio reports while it builds the page must not replace a state that is not restored yet.
  function keep(form, values) {
    if (forms.has(form) && JSON.stringify(values).length <= MAX_CHARS) write(ours, FORMS + form, values);
    return [];
  }

  // Gradio turns an empty number field into zero when it builds it; those with a placeholder may be empty.
  const isOptional = (name) => Boolean(document.querySelector(`[id="${name}"] input[type=number][placeholder]:not([placeholder=""])`));

  // Returns the stored values of the fields `names` if their number matches, else `values`.
  function restore(form, names, values) {
    const kept = read(ours, FORMS + form);
    const shown = Array.isArray(kept) && kept.length === values.length ? kept : values.map((value, at) => value === 0 && isOptional(names[at]) ? null : value);
    forms.set(form, names);
    keep(form, shown);
    return shown;
  }

  // Without a connection gradio reports no changes, so store input from DOM events.
  function keepTyped(event) {
    const root = document.documentElement, field = event.target;
    if (!root.classList.contains("lost") || !field.closest || ["file", "checkbox"].includes(field.type)) return;
    if (field.getAttribute("role") === "listbox" || field.closest("[role=listbox]")) return;
    for (const [form, names] of forms) {
      const place = names.findIndex((name) => field.closest(`[id="${name}"]`)), kept = read(ours, FORMS + form);
      if (place < 0 || !kept) continue;
      const isNumber = ["range", "number"].includes(field.type);
      kept[place] = isNumber ? (field.value === "" ? null : Number(field.value)) : field.value;
      keep(form, kept);
    }
  }
  document.addEventListener("input", keepTyped, true);
  document.addEventListener("change", keepTyped, true);

  function remember(prompt) {
    const text = (prompt || "").trim();
    if (text && text.length <= MAX_PROMPT_CHARS) {
      const others = prompts().filter((each) => each !== text);
      write(everybodys, PROMPTS, [text, ...others].slice(0, MAX_PROMPTS));
    }
    return [];
  }
  function prompts() {
    const kept = read(everybodys, PROMPTS);
    return Array.isArray(kept) ? kept.filter((each) => typeof each === "string") : [];
  }

  // Gradio reports its initial tab as a selection: only a click counts.
  document.addEventListener("click", (event) => {
    const tab = event.isTrusted && event.target.closest && event.target.closest("#tabs > .tab-wrapper [role=tab]");
    if (tab) write(ours, TAB, tab.textContent.trim());
  }, true);
  function openTab(name) {
    const tab = [...document.querySelectorAll("[role=tab]")].find((each) => each.textContent.trim() === name);
    if (tab && tab.getAttribute("aria-selected") !== "true") tab.click();
    return [];
  }
  function look(name) {  // on a phone it may be above the visible part
    document.getElementById(name)?.scrollIntoView({ block: "nearest" });
    return [];
  }
  const restoreTab = () => openTab(read(ours, TAB));

  return { token, keep, restore, remember, prompts, openTab, look, restoreTab };
})();
