// Shows a lost connection at once and keeps the buttons working: Stop stops, and Generate waits until the server is back.
// Gradio would notice the loss only at its next request and then do nothing until it reloads the page. The reload keeps all
// fields (memory.js), and a button that was pressed meanwhile is pressed again after it.
(() => {
  const BUSY_MS = 1000, IDLE_MS = 4000, PATIENCE_MS = 8000, RESUMED_MS = 30000, AFTERWARDS_MS = 100, TRIES = 600, MOST_PRESSES = 3;
  const LOCKED = Symbol("a key is required");
  const PRESSED = "diffserve.pressed", LEFT = "diffserve.left";
  const KEPT = "your work is kept, reconnecting.";
  const LOST = "lost when the server stopped";  // part of the status text after the reload
  const LATER = "Connection lost; this is generated after reconnecting.";
  const TABS = {
    create: {
      run: "generate", label: "Generate", stop: "stop", row: "run", said: "caption",
      gone: `Connection lost; ${KEPT}`, stopped: `Stopped: connection lost; ${KEPT}`,
    },
    experiment: {
      run: "exp-run", label: "Run", stop: "exp-stop", row: "exp-buttons", said: "exp-status",
      gone: `Connection lost; ${KEPT}`, stopped: `Stopped: connection lost; ${KEPT}`,
    },
  };
  let isLost = false, isLeaving = false, isBack = false, busy = {}, lost = {}, told = {};

  const part = (name) => document.getElementById(name);
  const isThere = (element) => element && !element.disabled && getComputedStyle(element).display !== "none";
  const isBusy = (tab) => Boolean(isThere(part(tab.stop)) || part(tab.run)?.disabled);
  const whoIsBusy = () => Object.fromEntries(Object.entries(TABS).map(([name, tab]) => [name, isBusy(tab)]));
  const whoSaysLost = () =>
    Object.fromEntries(Object.entries(TABS).map(([name, tab]) => [name, Boolean(part(tab.said)?.textContent.includes(LOST))]));
  const kept = (key) => { try { return JSON.parse(sessionStorage.getItem(key)) || {}; } catch { return {}; } };
  const keep = (key, value) => sessionStorage.setItem(key, JSON.stringify(value));
  const appHere = () => window.gradio_config && window.gradio_config.app_id;

  async function appId() {
    const abort = new AbortController(), timer = setTimeout(() => abort.abort(), PATIENCE_MS);
    try {
      const base = window.location.href.split(/[?#]/)[0];
      const answer = await fetch(new URL("gradio_api/app_id", base), { signal: abort.signal, cache: "no-store" });
      if (answer.status === 401) return LOCKED;
      return answer.ok ? (await answer.json()).app_id : null;
    } catch {
      return null;
    } finally {
      clearTimeout(timer);
    }
  }

  // Shows a status text; repeated if a late update of gradio replaces it.
  function say(name, text) {
    told[name] = text;
    const place = part(TABS[name].said)?.querySelector("[role=status], [role=alert]");
    if (!place || place.textContent === text) return;
    const box = document.createElement("div"), line = document.createElement("p");
    box.className = "error";
    box.setAttribute("role", "alert");
    line.textContent = text;
    box.append(line);
    place.replaceWith(box);
  }

  // Replaces the run and stop buttons, which gradio no longer handles.
  function offer(name, isRunning) {
    const tab = TABS[name], button = document.createElement("button");
    button.id = `lost-${isRunning ? tab.stop : tab.run}`;
    button.type = "button";
    button.className = isRunning ? "stand-in stand-in-stop" : "stand-in";
    button.textContent = isRunning ? "Stop" : tab.label;
    button.addEventListener("click", () => press(name, !isRunning));
    part(tab.row).querySelector(".stand-in")?.remove();
    part(tab.row).append(button);
    return button;
  }

  function press(name, isRunning) {
    const tab = TABS[name];
    keep(PRESSED, { ...kept(PRESSED), [name]: isRunning ? tab.run : tab.stop });
    say(name, isRunning ? LATER : tab.stopped);
    offer(name, isRunning).focus();
  }

  // Also covers a tab that is first opened now.
  function tell() {
    for (const [name, tab] of Object.entries(TABS)) {
      if (!part(tab.row)) continue;
      say(name, told[name] ?? tab.gone);
      const pressed = kept(PRESSED)[name];
      if (!part(tab.row).querySelector(".stand-in")) offer(name, pressed ? pressed === tab.run : busy[name]);
    }
  }

  function lose() {
    isLost = true;
    busy = whoIsBusy();
    lost = whoSaysLost();
    document.documentElement.classList.add("lost");
  }

  async function watch() {
    if (document.visibilityState === "visible" && window.gradio_config && !isLeaving) {
      const id = await appId();
      if (id === LOCKED) return window.location.reload();  // shows the sign-in form; the reload keeps all fields
      if (id === null) { if (!isLost && !isLeaving) lose(); }
      else if (isLost || id !== appHere()) return window.location.reload();
      if (isLost) tell();
    }
    setTimeout(watch, isLost || Object.values(TABS).some(isBusy) ? BUSY_MS : IDLE_MS);
  }
  window.addEventListener("pagehide", () => {
    isLeaving = true;
    // A page that is left before its fields are restored keeps the earlier state.
    keep(LEFT, isBack ? { app: appHere(), isLost, ...(isLost ? { busy, lost } : { busy: whoIsBusy(), lost: whoSaysLost() }) } : left);
  });
  window.addEventListener("pageshow", () => { isLeaving = false; });
  setTimeout(watch, IDLE_MS);

  // Whether a tab's work was lost with the server and is not restarted anyway. The message is repeated until something else
  // happens in the tab. An experiment goes on without its page and its server.
  const left = kept(LEFT), pressedBefore = kept(PRESSED);
  sessionStorage.removeItem(LEFT);
  diffserve.wasLost = (name) => {
    const isLostNow = (left.busy?.[name] && left.app !== appHere()) || left.lost?.[name];
    return Boolean(isLostNow && pressedBefore[name] !== TABS[name].run);
  };

  // Called once the fields are restored: presses the buttons that were pressed without a connection.
  diffserve.goOn = () => {
    isBack = true;
    for (const [name, button] of Object.entries(kept(PRESSED))) if (name in TABS) pressSoon(name, button);
    return [];
  };

  function done(name) {
    const { [name]: _, ...others } = kept(PRESSED);
    keep(PRESSED, others);
  }

  // Gradio may show a button before it handles it: a press without effect is repeated. Stop waits for RESUMED_MS, because a
  // busy server shows late that an experiment went on; new work that begins meanwhile is not stopped.
  function pressSoon(name, button) {
    const tab = TABS[name], isRunning = button === tab.run;
    let tries = 0, pressed = 0, pressedAt = -PATIENCE_MS, isReplaced = false;
    if (!isRunning) part(tab.run)?.addEventListener("click", () => { isReplaced = true; }, { once: true });
    const again = setInterval(() => {
      const waited = AFTERWARDS_MS * (tries += 1);
      const isDone = isRunning ? pressed && isBusy(tab) : !isBusy(tab) && (pressed || waited > RESUMED_MS);
      if (isDone || isReplaced || tries > TRIES) { clearInterval(again); return done(name); }
      if (!isThere(part(button)) || waited - pressedAt < PATIENCE_MS || pressed === MOST_PRESSES) return;
      pressed += 1;
      pressedAt = waited;
      part(button).click();
    }, AFTERWARDS_MS);
  }
})();
