"use strict";
// Fills the comparison of two cells with the images that the page has, and shows it. Without scripts it stays hidden.
const compare = document.querySelector(".compare");
const strips = [...document.querySelectorAll("figure.strips")];
const [promptSelect, leftSelect, rightSelect] = compare.querySelectorAll("select");
const [leftImage, rightImage] = compare.querySelectorAll("img");
const position = compare.querySelector("input");
const pair = compare.querySelector(".pair");
let images = [];

function addOptions(select, labels, selected) {
  select.replaceChildren(...labels.map((label, index) => new Option(label, index, false, index === selected)));
}

function showImages() {
  for (const [image, select] of [[leftImage, leftSelect], [rightImage, rightSelect]]) {
    const source = images[select.value];
    image.src = source.src;
    image.alt = source.alt;
  }
  position.setAttribute("aria-valuetext", `${position.value} % ${leftImage.alt}`);
  pair.style.setProperty("--right", `${100 - position.value}%`);
}

function showPrompt() {
  const previous = [leftSelect, rightSelect].map((select) => select.selectedOptions[0]?.label);
  const sources = new Set();
  images = [...strips[promptSelect.value].querySelectorAll("img.image")].filter((image) => {
    const isRepeated = sources.has(image.src); // each row ends in the converged image
    sources.add(image.src);
    return !isRepeated;
  });
  const labels = images.map((image) => image.alt);
  const converged = images.findIndex((image) => !image.matches(".compared"));
  const defaults = [0, converged < 1 ? labels.length - 1 : converged];
  [leftSelect, rightSelect].forEach((select, index) => {
    const kept = labels.indexOf(previous[index]);
    addOptions(select, labels, kept < 0 ? defaults[index] : kept);
  });
  showImages();
}

addOptions(promptSelect, strips.map((strip) => strip.querySelector("figcaption").textContent), 0);
promptSelect.addEventListener("change", showPrompt);
for (const input of [leftSelect, rightSelect, position]) input.addEventListener("input", showImages);
pair.addEventListener("pointermove", (event) => {
  if (!event.buttons && event.pointerType === "mouse") return;
  const { left, width } = pair.getBoundingClientRect();
  position.value = (100 * (event.clientX - left)) / width;
  showImages();
});
showPrompt();
compare.hidden = false;
