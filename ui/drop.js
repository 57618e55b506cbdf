// Loads the settings of an image that is dropped on the page, and edits one that is dropped on the edit panel, as if it had
// been chosen with the button there.
(() => {
  let depth = 0;
  const hasFiles = (event) => event.dataTransfer && [...event.dataTransfer.types].includes("Files");
  const show = (isOver) => document.documentElement.classList.toggle("dropping", isOver);

  document.addEventListener("dragenter", (event) => { if (hasFiles(event)) { depth += 1; show(true); } });
  document.addEventListener("dragleave", (event) => { if (hasFiles(event) && (depth -= 1) <= 0) { depth = 0; show(false); } });
  document.addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
  document.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    depth = 0;
    show(false);
    const [file] = event.dataTransfer.files;
    if (!file) return;
    diffserve.openTab("Create");
    const name = event.target.closest && event.target.closest("#start") ? "start-choose" : "read-parameters";
    const input = document.querySelector(`#${name} input[type=file], input[type=file]#${name}`)
      || document.querySelector(`#${name}`)?.parentElement.querySelector("input[type=file]");
    if (!input) return;
    const chosen = new DataTransfer();
    chosen.items.add(file);
    input.files = chosen.files;
    input.dispatchEvent(new Event("change", { bubbles: true }));
  }, true);
})();
