// Adds words of a closed vocabulary to the prompt by click: "a fox", "a fox and a cactus", "two foxes", and a place
// behind them.
(() => {
  const places = () => [...document.querySelectorAll("#palette [data-kind=place]")].map((each) => each.dataset.say);

  const COUNTED = /(^|\s)(two|three|four|five|six|seven|eight|nine|ten|\d+|a pair of)$/i;

  function withThing(things, say, many) {
    if (COUNTED.test(things)) return `${things} ${many}`;
    return things ? `${things} and ${say}` : say;
  }

  function add(text, { kind, say, many }) {
    const whole = text.trim().replace(/[.,;]+$/, "");
    const place = places().find((each) => whole.toLowerCase().endsWith(each.toLowerCase())) || "";
    const things = whole.slice(0, whole.length - place.length).trim();
    const parts = kind === "place" ? [things, say] : [withThing(things, say, many), whole.slice(whole.length - place.length)];
    return parts.filter(Boolean).join(" ");
  }

  // A whole example, a word of an adapter, or a word of the vocabulary.
  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest("[data-example], [data-word], #palette button[data-say]");
    const area = document.querySelector("#prompt textarea");
    if (!button || !area) return;
    const { example, word } = button.dataset;
    area.value = example ?? (word ? `${area.value} ${word}`.trim() : add(area.value, button.dataset));
    area.dispatchEvent(new Event("input", { bubbles: true }));
    if (example) area.focus();
  });
})();
