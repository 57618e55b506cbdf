// Copies the image's parameters, also where the browser has no clipboard API (plain http).
async function diffserveCopy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  const button = document.querySelector("#copy-parameters");
  if (!button) return;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy parameters"; }, 1500);
}

// What the events of lists send, by the name of the list. Requests take it when they begin, because gradio repeats the data
// of the first event with the later ones.
diffserve.chosen = {};
diffserve.pressed = { loras: [], queue: [], references: [] };
diffserve.selected = (name) => [...document.querySelectorAll(`#${name} .thumbnail-item`)]
  .findIndex((item) => item.classList.contains("selected"));

// Settings of the reference images; an empty number is null.
diffserve.references = () => [...document.querySelectorAll("#references [data-reference]")].map((item) => {
  const settings = { id: item.dataset.reference };
  for (const { type, value, dataset } of item.querySelectorAll("[data-set]")) {
    settings[dataset.set] = type !== "number" ? value : value === "" ? null : Number(value);
  }
  return settings;
});

// Saves a file that the server prepared.
diffserve.save = (file) => {
  if (!file) return [];
  const link = document.createElement("a");
  [link.href, link.download] = [file.url, file.orig_name || file.path.split("/").pop()];
  link.click();
  return [];
};

// Generate and Stop replace each other, as do Run and Stop of an experiment: move the keyboard focus to the new button.
(() => {
  const other = { generate: "stop", stop: "generate", "exp-run": "exp-stop", "exp-stop": "exp-run" };
  let last = null;
  document.addEventListener("focusin", (event) => { last = event.target.id; });
  new MutationObserver(() => {
    if (!(last in other)) return;
    const [gone, come] = [last, other[last]].map((id) => document.getElementById(id));
    if (![document.body, gone].includes(document.activeElement)) return;
    if (come && come.offsetParent && !(gone && gone.offsetParent)) come.focus();
  }).observe(document, { childList: true, subtree: true, attributes: true, attributeFilter: ["class", "style"] });
})();

// Gradio labels its empty image placeholder but gives it no role, so screen readers would skip it.
new MutationObserver(() => {
  for (const empty of document.querySelectorAll(".empty[aria-label]:not([role])")) empty.setAttribute("role", "img");
}).observe(document, { childList: true, subtree: true });
