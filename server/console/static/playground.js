// Samples from the weights that a panel names, shows the text as it arrives, and the probability of each token.

import { formToken, notify } from "./console.js";

const panels = document.querySelector(".panels");
const root = panels.dataset.console;
const alternatives = Number(panels.dataset.alternatives);

class Panel {
  constructor(section) {
    this.form = section.querySelector("form");
    this.output = section.querySelector(".output");
    this.status = section.querySelector(".status");
    this.token = section.querySelector(".token");
    this.stop = this.form.elements.stop;
    this.tokens = []; // {text, logprob, others: [[text, logprob]]}
    this.chosen = -1;
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.sample();
    });
    this.stop.addEventListener("click", () => this.aborting?.abort());
    this.output.addEventListener("pointerover", (event) => this.choose(Number(event.target.dataset.at ?? -1)));
    this.output.addEventListener("click", (event) => this.choose(Number(event.target.dataset.at ?? -1)));
    this.output.addEventListener("keydown", (event) => this.move(event));
  }

  request() {
    const fields = this.form.elements;
    const isChat = fields.kind.value === "chat";
    const body = {
      model: fields.model.value.trim(),
      max_tokens: Number(fields.tokens.value),
      temperature: Number(fields.temperature.value),
      stream: true,
    };
    if (fields.seed.value !== "") body.seed = Number(fields.seed.value);
    const asked = isChat
      ? { messages: [{ role: "user", content: fields.prompt.value }], logprobs: true, top_logprobs: alternatives }
      : { prompt: fields.prompt.value, logprobs: alternatives };
    return { path: isChat ? "/v1/chat/completions" : "/v1/completions", body: { ...body, ...asked } };
  }

  async sample() {
    this.aborting?.abort();
    const aborting = (this.aborting = new AbortController());
    this.tokens = [];
    this.chosen = -1;
    this.output.replaceChildren();
    this.token.hidden = true;
    this.stop.hidden = false;
    this.status.textContent = "sampling";
    const { path, body } = this.request();
    const began = performance.now();
    try {
      const answer = await fetch(root + path, {
        method: "POST",
        headers: { "Content-Type": "application/json", "X-Form-Token": formToken },
        body: JSON.stringify(body),
        signal: aborting.signal,
      });
      if (!answer.ok) {
        const content = await answer.json();
        throw new Error(content.error?.message ?? content.detail);
      }
      for await (const event of events(answer.body)) {
        if (event.error) throw new Error(event.error.message);
        for (const choice of event.choices ?? []) this.add(choice);
      }
      const seconds = (performance.now() - began) / 1000;
      this.status.textContent = `${this.tokens.length} tokens in ${seconds.toFixed(1)} s`;
    } catch (error) {
      if (aborting !== this.aborting) return; // another request has replaced this one
      this.status.textContent = error.name === "AbortError" ? "stopped" : "failed";
      if (error.name !== "AbortError") notify(error.message, true);
    } finally {
      if (aborting === this.aborting) this.stop.hidden = true;
    }
  }

  /** Adds the tokens of a chunk: OpenAI's two endpoints write them in different forms. */
  add({ logprobs }) {
    const chat = logprobs?.content?.map((one) => ({
      text: one.token,
      logprob: one.logprob,
      others: one.top_logprobs.map((other) => [other.token, other.logprob]),
    }));
    const text = logprobs?.tokens?.map((token, at) => ({
      text: token,
      logprob: logprobs.token_logprobs[at],
      others: Object.entries(logprobs.top_logprobs?.[at] ?? {}),
    }));
    for (const token of chat ?? text ?? []) {
      const span = document.createElement("span");
      const probability = Math.exp(token.logprob ?? 0);
      span.className = `p${Math.min(9, Math.floor(probability * 10))}`;
      span.dataset.at = this.tokens.push(token) - 1;
      span.textContent = token.text;
      span.title = percent(probability);
      this.output.append(span);
    }
  }

  choose(at) {
    const token = this.tokens[at];
    if (!token) return;
    this.output.children[this.chosen]?.classList.remove("chosen");
    this.chosen = at;
    this.output.children[at].classList.add("chosen");
    const shown = new Map([[token.text, token.logprob], ...token.others]);
    const rows = [...shown].sort((one, other) => other[1] - one[1]).map(([text, logprob]) => {
      const row = document.createElement("tr");
      if (text === token.text) row.className = "taken";
      for (const [name, value] of [["id", JSON.stringify(text)], ["num", percent(Math.exp(logprob))]]) {
        const cell = document.createElement("td");
        cell.className = name;
        cell.textContent = value;
        row.append(cell);
      }
      return row;
    });
    this.token.querySelector("tbody").replaceChildren(...rows);
    this.token.hidden = false;
  }

  move(event) {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by || !this.tokens.length) return;
    event.preventDefault();
    this.choose(Math.min(this.tokens.length - 1, Math.max(0, this.chosen + by)));
  }
}

function percent(probability) {
  return `${(100 * probability).toFixed(probability < 0.01 ? 3 : 1)} %`;
}

/** Yields the JSON of server-sent events. */
async function* events(body) {
  let rest = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const blocks = (rest + part.value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

for (const section of panels.querySelectorAll(".panel")) new Panel(section);

const second = document.getElementById("second");
second.addEventListener("click", () => {
  const right = document.getElementById("right");
  right.hidden = !right.hidden;
  panels.classList.toggle("two", !right.hidden);
  second.setAttribute("aria-pressed", String(!right.hidden));
  const [from, to] = ["left", "right"].map((side) => document.querySelector(`#${side} textarea`));
  if (!to.value) to.value = from.value;
});
