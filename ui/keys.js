// Ctrl+Enter generates and Esc stops, wherever the focus is. In the prompt, the up arrow recalls earlier prompts.
(() => {
  const BUTTONS = [["lost-generate", "lost-stop"], ["lost-exp-run", "lost-exp-stop"], ["generate", "stop"], ["exp-run", "exp-stop"]];
  const RECALLED = "ArrowUp", BACK = "ArrowDown";
  let place = -1, draft = "", recalled = null;

  const isThere = (element) => element && element.offsetParent !== null && !element.disabled;
  function press(which) {
    for (const names of BUTTONS) {
      const button = document.getElementById(names[which]);
      if (isThere(button)) { button.click(); return true; }
    }
    return false;
  }

  // Whether something else is open that Esc closes.
  const isTaken = () => document.fullscreenElement || document.querySelector(".fullscreen, ul.options, dialog[open]");

  function put(area, text) {
    area.value = text;
    area.dispatchEvent(new Event("input", { bubbles: true }));
    recalled = text;
    area.setSelectionRange(text.length, text.length);
  }

  // Only from the first line upwards and from the last line downwards: within a text arrows move the cursor.
  function recall(event, area) {
    const isUp = event.key === RECALLED, earlier = diffserve.prompts();
    const rest = isUp ? area.value.slice(0, area.selectionStart) : area.value.slice(area.selectionEnd);
    if (rest.includes("\n") || area.selectionStart !== area.selectionEnd) return;
    if (area.value !== recalled) { place = -1; draft = area.value; }
    let next = place + (isUp ? 1 : -1);
    while (isUp && next < earlier.length && earlier[next] === area.value) next += 1;
    if (next < -1 || next >= earlier.length || (place === -1 && !isUp)) return;
    event.preventDefault();
    place = next;
    put(area, place === -1 ? draft : earlier[place]);
  }

  document.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      if (press(0)) { event.preventDefault(); event.stopPropagation(); }
    } else if (event.key === "Escape" && !isTaken()) {
      if (press(1)) event.preventDefault();
    } else if ([RECALLED, BACK].includes(event.key) && !event.altKey && !event.ctrlKey && !event.metaKey && !event.shiftKey) {
      const area = event.target.closest && event.target.closest("#prompt textarea");
      if (area) recall(event, area);
    }
  }, true);
})();
