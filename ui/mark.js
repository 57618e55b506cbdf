// Mask editor: a canvas over the image, drawn with a brush by pointer or keyboard (arrows move the brush, Space lowers and
// lifts it). A reload keeps the mask.
(() => {
  const KEPT = "diffserve.marks", LOOK_PX = 64, STEP = 0.5, FAR = 4;
  const AIM = "Image to edit. Arrow keys move the brush, Space lowers and lifts it, [ and ] change its size.";
  let canvas = null, ring = null, picture = null, marks = [], live = null, isErasing = false, at = null, isDown = false;

  const tools = () => document.getElementById("start-picture");
  const read = () => { try { return JSON.parse(sessionStorage.getItem(KEPT)) || {}; } catch { return {}; } };
  const source = () => picture && new URL(picture.src, location.href).pathname;
  const brush = () => {
    const share = Number(document.getElementById("brush")?.value || 12) / 100;
    return Math.max(1, share * Math.min(canvas.width, canvas.height));
  };

  function keep() {
    try { sessionStorage.setItem(KEPT, JSON.stringify({ source: source(), marks })); } catch { /* works without storage */ }
  }

  // A mark is a brush stroke, or an inversion of the mask.
  function put(pen, mark) {
    pen.globalCompositeOperation = mark.invert ? "xor" : mark.erase ? "destination-out" : "source-over";
    pen.fillStyle = pen.strokeStyle = getComputedStyle(canvas).color;
    if (mark.invert) return pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.lineWidth = mark.width;
    pen.lineCap = pen.lineJoin = "round";
    pen.beginPath();
    pen.moveTo(...mark.points[0]);
    for (const point of mark.points.length > 1 ? mark.points : [mark.points[0]]) pen.lineTo(...point);
    pen.stroke();
  }

  function draw() {
    const pen = canvas.getContext("2d");
    pen.globalCompositeOperation = "source-over";
    pen.clearRect(0, 0, canvas.width, canvas.height);
    for (const mark of live ? [...marks, live] : marks) put(pen, mark);
  }

  // The masked share of the image, measured on a small copy.
  function share() {
    const small = document.createElement("canvas");
    small.width = small.height = LOOK_PX;
    const pen = small.getContext("2d");
    pen.drawImage(canvas, 0, 0, LOOK_PX, LOOK_PX);
    const { data } = pen.getImageData(0, 0, LOOK_PX, LOOK_PX);
    let sum = 0;
    for (let place = 3; place < data.length; place += 4) sum += data[place];
    return sum / (255 * LOOK_PX * LOOK_PX);
  }

  function tell() {
    const line = document.getElementById("marked");
    if (!line || !canvas) return;
    const part = share();
    const said = part > 0 ? `${Math.max(1, Math.round(100 * part))} % of the image is regenerated.`
      : "No mask: the whole image is regenerated.";
    line.textContent = at && document.activeElement === canvas ? `${said} The brush is ${isDown ? "down" : "up"}.` : said;
    for (const button of tools().querySelectorAll("[aria-pressed]")) {
      button.setAttribute("aria-pressed", String((button.dataset.mark === "erase") === isErasing));
    }
  }

  function add(mark) {
    live = null;
    marks.push(mark);
    draw();
    keep();
    tell();
  }

  function place(event) {
    const box = canvas.getBoundingClientRect();
    return [
      Math.round((event.clientX - box.left) * canvas.width / box.width),
      Math.round((event.clientY - box.top) * canvas.height / box.height),
    ];
  }

  function begin(point) { live = { erase: isErasing, width: Math.round(brush()), points: [point] }; draw(); }
  function end() { if (live) add(live); }

  function show(point) {
    const shown = point && canvas && (document.activeElement === canvas || live);
    if (!shown) { ring.hidden = true; return; }
    const share = brush() / canvas.width * 100;
    ring.hidden = false;
    ring.style.width = `${share}%`;
    ring.style.left = `${point[0] / canvas.width * 100 - share / 2}%`;
    ring.style.top = `${(point[1] - brush() / 2) / canvas.height * 100}%`;
  }

  const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    at = at || [Math.round(canvas.width / 2), Math.round(canvas.height / 2)];
    const move = MOVES[event.key], slider = document.getElementById("brush");
    if (move) {
      const far = brush() * STEP * (event.shiftKey ? FAR : 1);
      at = at.map((each, axis) => Math.round(Math.min(Math.max(each + move[axis] * far, 0), axis ? canvas.height : canvas.width)));
      if (isDown && live) { live.points.push(at); draw(); }
    } else if (event.key === " ") {
      isDown = !isDown;
      if (isDown) begin(at); else end();
    } else if (event.key === "[" || event.key === "]") {
      slider.value = Number(slider.value) + (event.key === "]" ? 2 : -2);
    } else return;
    event.preventDefault();
    show(at);
    tell();
  }

  function lift() { isDown = false; end(); at && show(null); tell(); }

  function build() {
    canvas = document.createElement("canvas");
    ring = document.createElement("i");
    ring.className = "brush-ring";
    ring.hidden = true;
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "application");
    canvas.setAttribute("aria-label", AIM);
    canvas.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      canvas.setPointerCapture(event.pointerId);
      begin(place(event));
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!live || isDown) return;
      for (const each of event.getCoalescedEvents?.() || [event]) live.points.push(place(each));
      draw();
    });
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { if (!isDown) end(); });
    canvas.addEventListener("keydown", onKey);
    canvas.addEventListener("focus", tell);
    canvas.addEventListener("blur", lift);
  }

  // Gradio replaces the image element: keep the canvas over the current one.
  function follow() {
    const shown = document.querySelector("#start-picture img");
    if (!shown && document.querySelector("#start-picture [data-from=noise]")) return diffserve.unmark();
    if (!shown || !shown.naturalWidth || !shown.parentElement) {
      if (shown) shown.addEventListener("load", follow, { once: true });
      else picture = null;
      return;
    }
    if (!canvas) build();
    const isNew = shown !== picture || source() !== canvas.dataset.source;
    picture = shown;
    if (isNew) {
      const kept = read();
      canvas.dataset.source = source();
      [canvas.width, canvas.height] = [shown.naturalWidth, shown.naturalHeight];
      [marks, live, at, isDown] = [kept.source === source() ? kept.marks || [] : [], null, null, false];
      keep();
    }
    if (canvas.parentElement !== shown.parentElement) {
      shown.parentElement.append(canvas, ring);
    }
    if (isNew) draw();
    if (isNew || !document.getElementById("marked")?.textContent) tell();
  }
  new MutationObserver(follow).observe(document, { childList: true, subtree: true, attributes: true, attributeFilter: ["src"] });

  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest("#start-picture [data-mark]");
    if (!button || !canvas) return;
    const what = button.dataset.mark;
    if (what === "brush" || what === "erase") { isErasing = what === "erase"; return tell(); }
    if (what === "invert") return add({ invert: true });
    if (what === "undo") marks.pop();
    if (what === "clear") marks = [];
    draw();
    keep();
    tell();
  });

  // Transparent where masked, as in OpenAI's API.
  function mask() {
    if (!canvas || !share()) return "";
    const whole = document.createElement("canvas");
    [whole.width, whole.height] = [canvas.width, canvas.height];
    const pen = whole.getContext("2d");
    pen.fillRect(0, 0, whole.width, whole.height);
    pen.globalCompositeOperation = "destination-out";
    pen.drawImage(canvas, 0, 0);
    return whole.toDataURL("image/png");
  }

  diffserve.isEdit = () => Boolean(document.querySelector("#start-picture img") || read().source);
  diffserve.unmark = () => { sessionStorage.removeItem(KEPT); picture = null; marks = []; return []; };
  diffserve.withMarks = (values) => {
    if (live) { isDown = false; end(); }
    const sent = { is_edit: diffserve.isEdit(), references: diffserve.references() };
    if (sent.is_edit && picture) sent.mask = mask();
    return [...values.slice(0, -1), sent.is_edit || sent.references.length ? JSON.stringify(sent) : ""];
  };

  // Gradio runs the events of one press of Generate in turn and reads the fields for each: the first one keeps the values.
  const pressed = [];
  diffserve.press = (values) => {
    diffserve.remember(values[0]);
    pressed.push(diffserve.withMarks(values));
    return pressed.at(-1);
  };
  diffserve.pressedValues = (values) => pressed.shift() || diffserve.withMarks(values);
})();
