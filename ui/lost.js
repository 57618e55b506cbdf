// A server that is gone is said at once, and the buttons go on to work: Stop stops, and Generate waits until the server is
// back. Gradio itself would notice only when it is asked for something, and from then on do nothing until it reloads the
// page. The reload loses nothing (memory.js), and what was pressed meanwhile is done after it.
(() => {
  const BUSY_MS = 1000, IDLE_MS = 4000, PATIENCE_MS = 8000, AFTERWARDS_MS = 100, TRIES = 600;
  const PRESSED = "diffserve.pressed";
  const SAID = {
    "": "The server is gone. What is here stays, and the page goes on by itself when the server is back.",
    stop: "Stopped: the server is gone. What is here stays, and the page goes on by itself when the server is back.",
    generate: "The server is gone; this is painted as soon as it is back.",
  };
  let isLost = false, isLeaving = false;

  const part = (name) => document.getElementById(name);
  const isThere = (element) => element && element.offsetParent !== null && !element.disabled;

  async function appId() {
    const abort = new AbortController(), timer = setTimeout(() => abort.abort(), PATIENCE_MS);
    try {
      const base = window.location.href.split(/[?#]/)[0];
      const answer = await fetch(new URL("gradio_api/app_id", base), { signal: abort.signal, cache: "no-store" });
      return answer.ok ? (await answer.json()).app_id : null;
    } catch {
      return null;
    } finally {
      clearTimeout(timer);
    }
  }

  function say(text) {
    const caption = document.querySelector("#caption .prose") || part("caption");
    if (!caption) return;
    const box = document.createElement("div"), line = document.createElement("p");
    box.className = "error";
    box.setAttribute("role", "alert");
    line.textContent = text;
    box.append(line);
    caption.replaceChildren(box);
  }

  // A button in the place of Generate and Stop, which gradio no longer listens to.
  function standIn(name, label) {
    const button = document.createElement("button");
    button.id = `lost-${name}`;
    button.type = "button";
    button.className = "stand-in";
    button.textContent = label;
    button.addEventListener("click", () => press(name));
    return button;
  }

  function offer(name) {
    document.querySelectorAll(".stand-in").forEach((button) => button.remove());
    const button = name === "stop" ? standIn("stop", "Stop") : standIn("generate", "Generate");
    part("run")?.append(button);
    return button;
  }

  function press(name) {
    sessionStorage.setItem(PRESSED, name);
    say(SAID[name]);
    offer(name === "stop" ? "generate" : "stop").focus();
  }

  function lose() {
    isLost = true;
    const isBusy = isThere(part("stop"));
    document.documentElement.classList.add("lost");
    say(SAID[""]);
    offer(isBusy ? "stop" : "generate");
  }

  async function watch() {
    if (document.visibilityState === "visible" && window.gradio_config && !isLeaving) {
      const id = await appId();
      if (id === null) { if (!isLost && !isLeaving) lose(); }
      else if (isLost || id !== window.gradio_config.app_id) return window.location.reload();
    }
    setTimeout(watch, isLost || isThere(part("stop")) ? BUSY_MS : IDLE_MS);
  }
  window.addEventListener("pagehide", () => { isLeaving = true; });
  window.addEventListener("pageshow", () => { isLeaving = false; });
  setTimeout(watch, IDLE_MS);

  // Called once the page has its fields again: what was pressed while the server was away.
  diffserve.goOn = () => {
    const name = sessionStorage.getItem(PRESSED);
    sessionStorage.removeItem(PRESSED);
    let tries = name ? TRIES : 0;
    const again = setInterval(() => {
      if ((tries -= 1) < 0) return clearInterval(again);
      if (isThere(part(name))) { clearInterval(again); part(name).click(); }
      else if (name === "stop" && isThere(part("generate")) && tries < TRIES - 50) clearInterval(again);
    }, AFTERWARDS_MS);
    return [];
  };
})();
