// A server that is gone is said at once, and the buttons go on to work: Stop stops, and Generate waits until the server is
// back. Gradio itself would notice only when it is asked for something, and from then on do nothing until it reloads the
// page. The reload loses nothing (memory.js), and what was pressed meanwhile is done after it.
(() => {
  const BUSY_MS = 1000, IDLE_MS = 4000, PATIENCE_MS = 8000, AFTERWARDS_MS = 100, TRIES = 600, MOST_PRESSES = 3;
  const LOCKED = Symbol("a key is asked for");
  const PRESSED = "diffserve.pressed", LEFT = "diffserve.left";
  const KEPT = "What is here stays, and the page goes on by itself when the server is back.";
  const LOST = "lost with the server";  // what a tab says of it after the reload
  const SHOWN = "What is painted stays until it is back, and then the page goes on by itself.";
  const LATER = "The server is gone; this is painted as soon as it is back.";
  const TABS = {
    create: {
      run: "generate", label: "Generate", stop: "stop", row: "run", said: "caption",
      gone: `The server is gone. ${KEPT}`, stopped: `Stopped: the server is gone. ${KEPT}`,
    },
    experiment: {
      run: "exp-run", label: "Run", stop: "exp-stop", row: "exp-buttons", said: "exp-status",
      gone: `The server is gone. ${SHOWN}`, stopped: `Stopped: the server is gone. ${SHOWN}`,
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

  // What a tab is told while the server is gone; told again where gradio, late, puts the last it had heard in its place.
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

  // A button in the place of those that run and stop, which gradio no longer listens to.
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

  // Also a tab that is opened only now.
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
      if (id === LOCKED) return window.location.reload();  // where a key is asked for; a page that comes back has all it had
      if (id === null) { if (!isLost && !isLeaving) lose(); }
      else if (isLost || id !== appHere()) return window.location.reload();
      if (isLost) tell();
    }
    setTimeout(watch, isLost || Object.values(TABS).some(isBusy) ? BUSY_MS : IDLE_MS);
  }
  window.addEventListener("pagehide", () => {
    isLeaving = true;
    // A page that is left before it has its fields again has nothing of its own to say yet.
    keep(LEFT, isBack ? { app: appHere(), isLost, ...(isLost ? { busy, lost } : { busy: whoIsBusy(), lost: whoSaysLost() }) } : left);
  });
  window.addEventListener("pageshow", () => { isLeaving = false; });
  setTimeout(watch, IDLE_MS);

  // Whether what a tab was painting before the reload is lost, and is not to be painted anew anyway: an experiment goes with
  // its page, everything with the server. What was said of it is said again, until something else happens there.
  const left = kept(LEFT), pressedBefore = kept(PRESSED);
  sessionStorage.removeItem(LEFT);
  diffserve.wasLost = (name) => {
    const isAnother = left.app !== appHere(), isGone = isAnother || (name === "experiment" && left.isLost);
    const isLostNow = (left.busy?.[name] && isGone) || left.lost?.[name];
    return Boolean(isLostNow && pressedBefore[name] !== TABS[name].run);
  };

  // Called once the page has its fields again: what was pressed while the server was away.
  diffserve.goOn = () => {
    isBack = true;
    for (const [name, button] of Object.entries(kept(PRESSED))) if (name in TABS) pressSoon(name, button);
    return [];
  };

  function done(name) {
    const { [name]: _, ...others } = kept(PRESSED);
    keep(PRESSED, others);
  }

  // Gradio may not listen yet to a button that it shows already: a press of which nothing comes is made again.
  function pressSoon(name, button) {
    const tab = TABS[name], isRunning = button === tab.run;
    let tries = 0, pressed = 0, pressedAt = -PATIENCE_MS;
    const again = setInterval(() => {
      const waited = AFTERWARDS_MS * (tries += 1);
      const isDone = isRunning ? pressed && isBusy(tab) : !isBusy(tab) && (pressed || waited > IDLE_MS);
      if (isDone || tries > TRIES) { clearInterval(again); return done(name); }
      if (!isThere(part(button)) || waited - pressedAt < PATIENCE_MS || pressed === MOST_PRESSES) return;
      pressed += 1;
      pressedAt = waited;
      part(button).click();
    }, AFTERWARDS_MS);
  }
})();
