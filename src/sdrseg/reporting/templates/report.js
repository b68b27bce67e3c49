"use strict";
// The pictures: sliders for step and opacity, and buttons that highlight classes. Masks are palette PNGs whose value is
// the class, so a class is highlighted by rewriting the palette; no pixel is decoded here.
(() => {
  const grid = document.getElementById("grid");
  if (!grid) return;
  const step = document.getElementById("step");
  const opacity = document.getElementById("opacity");
  const clears = [...document.querySelectorAll(".clear")];
  const buttons = [...document.querySelectorAll(".legend button[data-channel]")];
  const masks = [...document.querySelectorAll("img.mask")];
  const clouds = [...document.querySelectorAll(".cloud")];
  const names = JSON.parse(document.getElementById("step-names").textContent);
  const originals = new Map(masks.map((mask) => [mask, mask.src]));
  const lit = new Set();

  const crcs = Uint32Array.from({ length: 256 }, (_, n) => {
    for (let bit = 0; bit < 8; bit++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1;
    return n;
  });
  const crc = (bytes) => {
    let value = 0xffffffff;
    for (const byte of bytes) value = crcs[(value ^ byte) & 255] ^ (value >>> 8);
    return (value ^ 0xffffffff) >>> 0;
  };

  // The PNG with all classes dark and half transparent, except the highlighted ones.
  function dimmed(uri) {
    const bytes = Uint8Array.from(atob(uri.slice(uri.indexOf(",") + 1)), (c) => c.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    for (let at = 8; at < bytes.length; ) {
      const length = view.getUint32(at);
      const kind = String.fromCharCode(...bytes.subarray(at + 4, at + 8));
      const width = kind === "PLTE" ? 3 : kind === "tRNS" ? 1 : 0;
      if (width) {
        for (let c = 0; c * width < length; c++) {
          if (!lit.has(c)) bytes.fill(width === 3 ? 16 : 200, at + 8 + c * width, at + 8 + (c + 1) * width);
        }
        view.setUint32(at + 8 + length, crc(bytes.subarray(at + 4, at + 8 + length)));
      }
      at += 12 + length;
    }
    return new Blob([bytes], { type: "image/png" });
  }

  function paint() {
    for (const mask of masks) {
      const before = mask.src;
      if (mask.hidden && lit.size) continue;
      const wanted = lit.size ? [...lit].sort((a, b) => a - b).join() : "";
      if (mask.dataset.lit === wanted || (!wanted && !mask.dataset.lit)) continue;
      mask.src = wanted ? URL.createObjectURL(dimmed(originals.get(mask))) : originals.get(mask);
      mask.dataset.lit = wanted;
      if (before.startsWith("blob:")) URL.revokeObjectURL(before);
    }
    for (const cloud of clouds) cloud.classList.toggle("dim", lit.size > 0 && !lit.has(Number(cloud.dataset.channel)));
    for (const button of buttons) {
      button.setAttribute("aria-pressed", String(lit.has(Number(button.dataset.channel))));
    }
    for (const clear of clears) clear.hidden = lit.size === 0;
  }

  function showStep() {
    const now = Number(step.value);
    document.getElementById("step-now").textContent = String(now);
    const fresh = names[now] || [];
    document.getElementById("step-new").textContent =
      now === 0 ? "The model of step 0." : fresh.length ? `New in step ${now}: ${fresh.join(", ")}.` : "";
    for (const figure of grid.querySelectorAll("figure[data-run]")) {
      const tiles = [...figure.querySelectorAll("img.mask")];
      const shown = Math.min(now, tiles.length - 1);
      tiles.forEach((tile, k) => (tile.hidden = k !== shown));
      const when = figure.querySelector(".when");
      if (when) when.textContent = `step ${shown}` + (shown < now ? " (its last)" : "");
    }
    paint();
  }

  function showOpacity() {
    document.querySelector("main").style.setProperty("--opacity", String(opacity.value / 100));
    document.getElementById("opacity-now").textContent = `${opacity.value} %`;
  }

  for (const button of buttons) {
    button.addEventListener("click", () => {
      const channel = Number(button.dataset.channel);
      if (!lit.delete(channel)) lit.add(channel);
      paint();
    });
  }
  for (const legend of document.querySelectorAll(".legend")) {
    const all = () => {
      lit.clear();
      paint();
      legend.querySelector("button").focus();
    };
    legend.querySelector(".clear").addEventListener("click", all);
    legend.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && lit.size) all();
    });
  }
  step.addEventListener("input", showStep);
  opacity.addEventListener("input", showOpacity);
  showOpacity();
  showStep();
})();
