// What only concerns the display: dark or light, the shortcut help, sharp small images, full screen, local times, and the
// group of a setting that is invalid.
(() => {
  const THEME = "diffserve.theme", SMALL_PX = 400, ENLARGED = 1.4, SHARE_OF_HEIGHT = 0.6;
  const part = (name) => document.getElementById(name);
  const stored = () => { try { return localStorage.getItem(THEME); } catch { return null; } };

  // Gradio follows the system; a choice on the page has priority.
  function applyTheme() {
    const theme = stored();
    if (theme && document.body.classList.contains("dark") !== (theme === "dark")) document.body.classList.toggle("dark");
  }
  function toggleTheme() {
    const theme = document.body.classList.contains("dark") ? "light" : "dark";
    try { localStorage.setItem(THEME, theme); } catch { /* works without storage */ }
    document.body.classList.toggle("dark", theme === "dark");
  }

  // Images much smaller than their place are enlarged without smoothing, the large one by a whole factor.
  function sharpen(image) {
    const small = Math.max(image.naturalWidth, image.naturalHeight) < SMALL_PX;
    if (!image.closest("#picture")) {
      return image.classList.toggle("pixelated", small && image.clientWidth > ENLARGED * image.naturalWidth);
    }
    const isFull = image.closest(".fullscreen"), place = part("show").clientWidth;
    const room = Math.min(place / image.naturalWidth, SHARE_OF_HEIGHT * window.innerHeight / image.naturalHeight);
    const factor = small ? Math.max(1, Math.floor(room)) : 1;
    image.classList.toggle("pixelated", small);
    image.style.width = factor > 1 && !isFull ? `${factor * image.naturalWidth}px` : "";
    const line = part("true-size")?.querySelector("p");
    const size = `${image.naturalWidth}x${image.naturalHeight} pixels`;
    if (line) line.textContent = factor > 1 ? `${size}, shown at ${factor} times its size` : size;
  }
  const IMAGES = "#picture img, #batch img, #gallery img, #history-grid img, #lightbox img";
  document.addEventListener("load", (event) => { if (event.target.matches?.(IMAGES)) sharpen(event.target); }, true);
  window.addEventListener("resize", () => document.querySelectorAll(IMAGES).forEach(sharpen));

  // Full screen over the images that are shown together, with the arrow keys.
  let shown = [], at = 0;
  function show(step) {
    at = (at + step + shown.length) % shown.length;
    const box = part("lightbox");
    [box.querySelector("img").src, box.querySelector("img").alt] = [shown[at].src, shown[at].alt || "Image"];
    box.querySelector("p").textContent = `${at + 1} of ${shown.length}`;
  }
  diffserve.fullScreen = (...names) => {
    const inside = (name) => [...document.querySelectorAll(`#${name} .thumbnail-item img, #${name} [data-id] img`)];
    shown = names.map(inside).find((images) => images.length) || [];
    const current = document.querySelector(`${names.map((name) => `#${name} .selected img`).join(", ")}`) || document.querySelector("#picture img");
    at = Math.max(0, shown.findIndex((image) => image.src === current?.src));
    if (shown.length) { show(0); part("lightbox").showModal(); }
    return [];
  };

  document.addEventListener("click", (event) => {
    const name = event.target.closest?.("[data-do]")?.dataset.do;
    if (name === "theme") toggleTheme();
    if (name === "help") part("help").showModal();
    if (name === "close") event.target.closest("dialog").close();
    if (name === "earlier" || name === "later") show(name === "later" ? 1 : -1);
  });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const isTyping = event.target.closest?.("input, textarea, [contenteditable]");
    if (event.key === "?" && !isTyping && !document.querySelector("dialog[open]")) part("help").showModal();
    if (!part("lightbox")?.open) return;
    if (event.key === "ArrowRight" || event.key === "ArrowLeft") { event.preventDefault(); show(event.key === "ArrowRight" ? 1 : -1); }
  });

  // Dates of the server are UTC.
  function localTimes() {
    for (const time of document.querySelectorAll("time[datetime]:not([title])")) {
      time.title = time.textContent;
      time.textContent = new Date(time.dateTime).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
    }
  }
  // Counts down the expected duration of an experiment until the server sends a new one.
  const duration = (seconds) => seconds < 60 ? `${seconds} s` : `${Math.floor(seconds / 60)} min${seconds % 60 ? ` ${seconds % 60} s` : ""}`;
  setInterval(() => {
    for (const place of document.querySelectorAll("[data-left]")) {
      const left = Math.max(1, Number(place.dataset.left) - 1);
      place.dataset.left = left;
      place.textContent = duration(left);
    }
  }, 1000);

  // Gradio's message at an invalid field goes with the next event of the page. This one stays until the value changes.
  let invalid = null;
  const input = (block) => block?.querySelector("input, textarea");
  function markInvalid() {
    const block = invalid && part(invalid.field), old = document.querySelector(".block > .invalid");
    const text = block && input(block)?.value === invalid.value ? invalid.message : "";
    if (old && (old.parentElement !== block || old.textContent !== text)) {
      input(old.parentElement)?.removeAttribute("aria-invalid");
      old.remove();
    }
    if (!text || block.querySelector(":scope > .invalid")) return;
    const message = document.createElement("p");
    [message.className, message.role, message.textContent] = ["invalid", "alert", text];
    block.append(message);
    input(block)?.setAttribute("aria-invalid", "true");
  }
  diffserve.showInvalid = (checked) => {
    const block = checked && part(checked.field);
    invalid = checked && { ...checked, value: input(block)?.value };
    if (block && !block.offsetParent) part("groups").querySelector(`input[value=${block.closest(".group")?.id}]`)?.click();
    markInvalid();
    block?.scrollIntoView({ block: "nearest" });
    return [];
  };
  document.addEventListener("input", () => setTimeout(markInvalid));
  new MutationObserver(() => { localTimes(); markInvalid(); }).observe(document, { childList: true, subtree: true });
  const start = () => { applyTheme(); new MutationObserver(applyTheme).observe(document.body, { attributeFilter: ["class"] }); };
  if (document.body) start(); else document.addEventListener("DOMContentLoaded", start);
})();
