// Holds back a press of a button that applies to the selected images while the server does not know the selection yet.
// Counters of each list: selections made, those made when the last request was sent, and those that the page shows.
(() => {
  const LISTS = { gallery: [0, 0, 0], batch: [0, 0, 0], history: [0, 0, 0] };
  const ROWS = "#actions, #history-actions", PATIENCE_MS = 3000;
  const [MADE, SENT, KNOWN] = [0, 1, 2];
  let held = null;  // ID of the last held button

  const isKnown = () => Object.values(LISTS).every((list) => list[KNOWN] === list[MADE]);
  const frame = () => new Promise(requestAnimationFrame);

  async function release() {
    if (!held || !isKnown()) return;
    const name = held;
    held = null;
    await frame();
    await frame();
    const part = document.getElementById(name), button = part?.matches("a, button") ? part : part?.querySelector("a, button");
    if (button && button.offsetParent && !button.disabled) button.click();
  }

  // Gradio may send no request, or none for later selections after an error: then buttons apply to what is shown.
  function giveUp(list) {
    if (list[SENT] !== list[KNOWN]) return setTimeout(giveUp, PATIENCE_MS, list);
    list[SENT] = list[KNOWN] = list[MADE];
    release();
  }

  // Call it before gradio gets the event of a selection. A press before a new selection meant other images.
  diffserve.selecting = (name, isNew = true) => {
    LISTS[name][MADE] += 1;
    if (isNew) held = null;
    setTimeout(giveUp, PATIENCE_MS, LISTS[name]);
  };
  diffserve.sending = (name, value) => {
    LISTS[name][SENT] = LISTS[name][MADE];
    return value;
  };
  diffserve.received = (name) => {
    LISTS[name][KNOWN] = LISTS[name][SENT];
    release();
    return [];
  };
  diffserve.failed = (name) => {
    held = null;
    return diffserve.received(name);
  };

  document.addEventListener("click", (event) => {
    const item = event.target.closest?.(".thumbnail-item:not(.selected)"), list = item?.closest("#gallery, #batch");
    if (list) return diffserve.selecting(list.id);
    const button = event.target.closest?.("a, button");
    if (!button?.closest(ROWS) || isKnown()) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    held = button.closest("[id]").id;
  }, true);
})();
