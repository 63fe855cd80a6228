"use strict";

const AT_ONCE = 4; // requests that the page has under way
const SHOWN = 5; // classes of a picture

const pictures = document.getElementById("pictures");
const report = document.getElementById("status");
const queue = [];
let running = 0;
let answered = 0;
let wanted = 0;

/** Shows pictures at once, and sends them one after the other. */
function add(files) {
  for (const file of files) {
    const image = make("img", { src: URL.createObjectURL(file), alt: "" });
    image.onerror = () => image.remove(); // the browser cannot show it; the server says what it is
    const answer = make("div", {}, make("p", { className: "time" }, "Waiting…"));
    const name = make("h3", {}, file.name || "A picture");
    pictures.prepend(make("li", {}, image, make("div", {}, name, answer)));
    queue.push({ file, image, answer });
    wanted += 1;
  }
  say();
  while (running < AT_ONCE && queue.length) work();
}

async function work() {
  running += 1;
  while (queue.length) {
    const { file, image, answer } = queue.shift();
    answer.replaceChildren(...(await classify(file, image)));
    answered += 1;
    say();
  }
  running -= 1;
}

/** Asks the server; returns what to show of its answer. */
async function classify(file, image) {
  const begun = performance.now();
  try {
    const response = await key.fetch(`/v1/classify?top_k=${SHOWN}`, {
      method: "POST",
      headers: { "Content-Type": "application/octet-stream" },
      body: file,
    });
    if (!response.ok) return [make("p", { className: "wrong" }, await sentence(response))];
    const took = performance.now() - begun;
    const { data, usage } = await response.json();
    const best = data[0].predictions;
    image.alt = `${file.name || "A picture"}: ${best[0].label}`;
    return [
      make("ol", { className: "labels" }, ...best.map(bar)),
      make("p", { className: "time" }, `${ms(took)} in all, ${ms(usage.total_ms)} in the server, ` +
        `${ms(usage.inference_ms)} in the model`),
    ];
  } catch {
    return [make("p", { className: "wrong" }, UNREACHABLE)];
  }
}

/** One class: its name and score, over a bar that is as long as it is likely. */
function bar({ label, score }) {
  const drawing = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  rect.setAttribute("width", `${100 * score}%`);
  rect.setAttribute("height", "100%");
  drawing.setAttribute("aria-hidden", "true");
  drawing.append(rect);
  const percent = `${(100 * score).toFixed(1)} %`;
  return make("li", {}, drawing, make("span", {}, label),
    make("span", { className: "score" }, percent));
}

function ms(time) {
  return `${time.toFixed(time < 10 ? 1 : 0)} ms`;
}

function say() {
  report.textContent = answered < wanted
    ? `${answered} of ${wanted} pictures answered.`
    : `${wanted} ${wanted === 1 ? "picture" : "pictures"} answered.`;
}

const input = document.getElementById("files");
input.addEventListener("change", () => {
  add([...input.files]);
  input.value = ""; // so that the same file can be chosen again
});
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    document.body.classList.toggle("over", kind === "dragover");
    if (kind === "drop") add([...event.dataTransfer.files]);
  });
}
document.addEventListener("paste", (event) => add([...event.clipboardData.files]));

(async () => {
  try {
    const response = await key.fetch("/version");
    if (!response.ok) throw new Error(await sentence(response));
    const { model, device, dtype } = await response.json();
    document.getElementById("model").textContent = `${model} on ${device}, ${dtype}`;
  } catch (error) {
    report.replaceChildren(
      make("span", { className: "wrong" }, error instanceof TypeError ? UNREACHABLE : error.message),
    );
  }
})();
