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

  document.addEventListener("click", (event) => {
    const button = event.target.closest && event.target.closest("#palette button[data-say]");
    const area = document.querySelector("#prompt textarea");
    if (!button || !area) return;
    area.value = add(area.value, button.dataset);
    area.dispatchEvent(new Event("input", { bubbles: true }));
  });
})();
