// Copies what the picture was painted with, also where the browser offers no clipboard (a plain http address).
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

// Generate and Stop take each other's place, and so do Run and Stop of an experiment: whoever goes by keyboard stays
// where they are.
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

// Gradio names what shows that there is no picture yet, but says not what it is: a name alone is not read out.
new MutationObserver(() => {
  for (const empty of document.querySelectorAll(".empty[aria-label]:not([role])")) empty.setAttribute("role", "img");
}).observe(document, { childList: true, subtree: true });
